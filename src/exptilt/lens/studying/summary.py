r"""From units to a study: means over texts, with standard errors.

Text c, of weight w_c (its number of queries), gave x_c. Then

    x̄ = Σ w_c x_c / W,     W = Σ w_c,        error² = n/(n−1) Σ w_c² (x_c − x̄)² / W²

the usual error of a weighted mean of n independent units; where n = 1 it is not known. A text that cannot tell (NaN) does not count.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exptilt.lens.questions.hidden_states import cloud, holm
from exptilt.lens.studying import histograms
from exptilt.lens.studying.definitions import BLOCKS, HEADS, PLACES, Definition
from exptilt.lens.studying.one_text import HISTOGRAMS
from exptilt.lens.studying.results import Array, HeadDetail, HeadMeasure, LayerMeasure, TokenMass

Unit = Mapping[str, NDArray[Any]]
BINS = 40
TOP = 12
RARE = 3  # tokens seen less often than this are not ranked if enough others are: chance would put them first
FROM_WEIGHTS = {"link_symmetry", "link_definiteness"}
SAMPLE = 1024  # hidden states that distributions are measured on


def average(values: Array, weights: Array) -> tuple[Array, Array | None]:
    """Weighted mean over the first axis and its standard error; NaN values do not count.

    Args:
        values: ``(unit, ...)``.
        weights: ``(unit,)``.
    """
    known = ~np.isnan(values)
    w = np.where(known, weights.reshape(-1, *(1,) * (values.ndim - 1)), 0.0)
    x = np.where(known, values, 0.0)
    total, count = w.sum(0), known.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (w * x).sum(0) / total
        scatter = (w**2 * np.where(known, x - mean, 0.0) ** 2).sum(0)
        error = np.sqrt(count / (count - 1) * scatter) / total
    error = np.where(count > 1, error, np.nan)
    return mean, None if np.isnan(error).all() else error


def head_measures(units: Sequence[Unit], weights: Unit) -> dict[str, HeadMeasure]:
    """Every measure of `definitions.HEADS`.

    Args:
        units: of all texts.
        weights: the unit of `measure_weights`.
    """
    queries = np.array([float(unit["queries"].max()) for unit in units])
    shape = units[0]["head:entropy"].shape

    def over_texts(name: str) -> tuple[Array, Array | None]:
        tables = [unit.get(f"head:{name}", np.full(shape, np.nan)) for unit in units]
        return average(np.stack(tables), queries)

    found = {}
    for name, words in HEADS.items():
        if name in FROM_WEIGHTS:
            value, error, baseline = weights[f"head:{name}"], None, None
        else:
            value, error = over_texts(name)
            base, _ = over_texts(f"{name}_baseline")
            baseline = None if np.isnan(base).all() else base
        if np.isnan(value).all():
            found[name] = HeadMeasure(
                words.title,
                words.unit,
                words.about,
                words.assumes,
                None,
                reason=words.absent,
                span=words.span,
            )
        else:
            found[name] = HeadMeasure(
                words.title, words.unit, words.about, words.assumes, value, error, "", baseline, words.span
            )
    return found


def layer_measures(units: Sequence[Unit]) -> dict[str, LayerMeasure]:
    """Every measure of `definitions.PLACES` and `BLOCKS`.

    Args:
        units: of all texts.
    """
    tokens = np.array([float(unit["tokens"]) for unit in units])
    places = [str(x) for x in units[0]["place_labels"]]
    found: dict[str, tuple[Array, Array | None]] = {}
    for name in ("hidden_norm", "first_norm"):
        found[name] = average(np.stack([unit[f"place:{name}"] for unit in units]), tokens)
    clouds = [cloud(_pooled([unit[f"sample:{i}"] for unit in units])) for i in range(len(places))]
    for name in ("spread", "effective_rank", "anisotropy", "kurtosis", "sliced"):
        found[name] = np.array([getattr(c, name) for c in clouds]), None
    found["gaussian_p"] = holm(np.array([c.p for c in clouds])), None
    found["spectrum"] = np.array([c.spectrum for c in clouds]).reshape(len(places), -1), None
    measures = {name: _layer(PLACES[name], places, *found[name]) for name in PLACES}
    blocks = [str(x) for x in units[0]["block_labels"]]
    for name, words in BLOCKS.items():
        measures[name] = _layer(
            words, blocks, *average(np.stack([unit[f"block:{name}"] for unit in units]), tokens)
        )
    return measures


def _layer(words: Definition, places: list[str], value: Array, error: Array | None) -> LayerMeasure:
    if value.size == 0 or np.isnan(value).all():
        return LayerMeasure(
            words.title, words.unit, words.about, words.assumes, None, places, reason=words.absent
        )
    if value.ndim == 2:  # components that no place has
        value = value[:, : int((~np.isnan(value)).sum(1).max())]
    return LayerMeasure(words.title, words.unit, words.about, words.assumes, value, places, error)


def _pooled(samples: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Samples of all texts together, thinned evenly to `SAMPLE`."""
    rows = np.concatenate(list(samples))
    if len(rows) > SAMPLE:
        rows = rows[np.linspace(0, len(rows) - 1, SAMPLE).round().astype(int)]
    return torch.from_numpy(rows)


def details(units: Sequence[Unit], names: Mapping[int, str]) -> list[HeadDetail]:
    """Histograms, tokens and strip of every head.

    Args:
        units: of all texts; the first holds the strip.
        names: text of each token.
    """
    ids, counts, tables = _tokens(units)
    common = counts >= RARE if (counts >= RARE).sum() >= TOP else counts > 0
    found = []
    for layer, heads in enumerate(units[0]["head_count"]):
        for head in range(int(heads)):
            counted = {
                name: histograms.merge([_unpack(unit, name, layer, head) for unit in units], bins=BINS)
                for name in HISTOGRAMS
            }
            mass, drawn, even = tables[:, layer, head]
            lift = np.divide(drawn, even, out=np.full(even.shape, np.nan), where=common & (even > 0))
            best = [i for i in np.argsort(-lift, kind="stable")[:TOP] if not np.isnan(lift[i])]
            top = [
                TokenMass(names[int(ids[i])], float(mass[i] / counts[i]), int(counts[i]), float(lift[i]))
                for i in best
            ]
            strip = np.nan_to_num(units[0]["strip"][layer, head]).round(4)
            found.append(HeadDetail(layer, head, counted, top, strip))
    return found


def _unpack(unit: Unit, name: str, layer: int, head: int) -> histograms.Counts:
    key = f"histogram:{name}"
    numbers = unit[f"{key}:counts"][layer, head].astype(np.float64)
    filled = np.flatnonzero(numbers)
    size = int(filled[-1]) + 1 if filled.size else 0
    return int(unit[f"{key}:exponent"][layer, head]), int(unit[f"{key}:first"][layer, head]), numbers[:size]


def _tokens(units: Sequence[Unit]) -> tuple[NDArray[np.int64], Array, Array]:
    """Tokens of all texts, their counts, and ``(3, layer, head, token)``: share per query, attention drawn, even attention."""
    ids = np.unique(np.concatenate([unit["token_ids"] for unit in units]))
    counts = np.zeros(ids.size)
    tables = np.zeros((3, *units[0]["token_mass"].shape[:2], ids.size))
    for unit in units:
        place = np.searchsorted(ids, unit["token_ids"])
        counts[place] += unit["token_counts"]
        for table, name in zip(tables, ("token_mass", "token_drawn", "token_even"), strict=True):
            table[:, :, place] += unit[name]
    return ids, counts, tables
