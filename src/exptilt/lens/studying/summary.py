r"""From units to a study: means over texts, with standard errors.

Text c, of weight w_c (its number of queries), gave x_c. Then

    x̄ = Σ w_c x_c / W,     W = Σ w_c,        error² = n/(n−1) Σ w_c² (x_c − x̄)² / W²

the usual error of a weighted mean of n independent units; for n = 1 it is not known. A text without a value
(NaN) does not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exptilt.lens.questions.hidden_states import cloud, holm
from exptilt.lens.studying.definitions import BLOCKS, HEADS, PLACES
from exptilt.lens.studying.one_text import HISTOGRAMS, TOKENS
from exptilt.lens.studying.results import Array, HeadDetail, HeadMeasure, Histogram, LayerMeasure, TokenMass
from exptilt.lens.studying.store import Unit

BINS = 40
TOP = 12
RARE = 3  # tokens seen less often than this are not ranked if enough others are: chance would put them first
SAMPLE = 1024  # hidden states that distributions are measured on


def average(values: Array, weights: Array) -> tuple[Array, Array | None]:
    """Weighted mean of values ``(unit, ...)`` over units and its standard error; NaN does not count."""
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


def head_measures(units: Sequence[Unit], weights: Mapping[str, Any]) -> dict[str, HeadMeasure]:
    """Every measure of `definitions.HEADS`, from the units of all texts.

    `weights` has what was measured once: of the weights, on repeated tokens, on pieces of one length.
    """
    queries = np.array([float(unit["queries"].max()) for unit in units])
    unknown = np.full(units[0]["head:entropy"].shape, np.nan)

    def over_texts(name: str) -> tuple[Array, Array | None]:
        return average(np.stack([unit.get(f"head:{name}", unknown) for unit in units]), queries)

    found = {}
    for name, words in HEADS.items():
        value, error = over_texts(name)
        baseline: Array | None = over_texts(f"{name}_baseline")[0]
        if f"head:{name}" in weights:
            value, error = weights[f"head:{name}"], weights.get(f"error:{name}")
            baseline = weights.get(f"head:{name}_baseline")
        if baseline is not None and np.isnan(baseline).all():
            baseline = None
        known = not np.isnan(value).all()
        found[name] = (
            replace(words, value=value, error=error, baseline=baseline, reason="") if known else words
        )
    return found


def layer_measures(units: Sequence[Unit]) -> dict[str, LayerMeasure]:
    """Every measure of `definitions.PLACES` and `BLOCKS`, from the units of all texts."""
    tokens = np.array([float(unit["tokens"]) for unit in units])

    def over_texts(name: str) -> tuple[Array, Array | None]:
        return average(np.stack([unit[name] for unit in units]), tokens)

    places, blocks = ([str(x) for x in units[0][name]] for name in ("place_labels", "block_labels"))
    clouds = [cloud(_pooled([unit[f"sample:{i}"] for unit in units])) for i in range(len(places))]
    found = {name: over_texts(f"place:{name}") for name in ("hidden_norm", "first_norm")}
    for name in ("spread", "effective_rank", "anisotropy", "kurtosis", "sliced"):
        found[name] = np.array([getattr(c, name) for c in clouds]), None
    found["gaussian_p"] = holm(np.array([c.p for c in clouds])), None
    found["spectrum"] = np.array([c.spectrum for c in clouds]).reshape(len(places), -1), None
    measures = {name: _layer(words, places, *found[name]) for name, words in PLACES.items()}
    return measures | {
        name: _layer(words, blocks, *over_texts(f"block:{name}")) for name, words in BLOCKS.items()
    }


def _layer(words: HeadMeasure, places: list[str], value: Array, error: Array | None) -> LayerMeasure:
    text = (words.title, words.unit, words.about, words.assumes)
    if value.size == 0 or np.isnan(value).all():
        return LayerMeasure(*text, None, places, reason=words.reason)
    if value.ndim == 2:  # drop the components that no place has
        value = value[:, : int((~np.isnan(value)).sum(1).max())]
    return LayerMeasure(*text, value, places, error)


def _pooled(samples: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Samples of all texts together, thinned evenly to `SAMPLE`."""
    rows = np.concatenate(list(samples))
    if len(rows) > SAMPLE:
        rows = rows[np.linspace(0, len(rows) - 1, SAMPLE).round().astype(int)]
    return torch.from_numpy(rows)


def details(units: Sequence[Unit], names: Mapping[int, str]) -> list[HeadDetail]:
    """Histograms, tokens (by their names) and strip of every head, from the units of all texts."""
    ids, counts, tables = _tokens(units)
    common = counts >= RARE if (counts >= RARE).sum() >= TOP else counts > 0
    found = []
    for layer, heads in enumerate(units[0]["head_count"]):
        for head in range(int(heads)):
            counted = {name: _histogram([unit[name][layer, head] for unit in units]) for name in HISTOGRAMS}
            mass, drawn, even = tables[:, layer, head]
            lift = np.divide(drawn, even, out=np.full(even.shape, np.nan), where=common & (even > 0))
            top = [
                TokenMass(names[int(ids[i])], float(mass[i] / counts[i]), int(counts[i]), float(lift[i]))
                for i in np.argsort(-lift, kind="stable")[:TOP]
                if not np.isnan(lift[i])
            ]
            strip = np.nan_to_num(units[0]["strip"][layer, head]).round(4)
            found.append(HeadDetail(layer, head, counted, top, strip))
    return found


def _histogram(rows: Sequence[Array]) -> Histogram:
    """Histogram of a statistic over the queries of all texts."""
    values = np.concatenate(rows)
    counts, edges = np.histogram(values[np.isfinite(values)], BINS)
    return Histogram(edges.astype(np.float64), counts.astype(np.float64))


def _tokens(units: Sequence[Unit]) -> tuple[NDArray[np.int64], Array, Array]:
    """Tokens of all texts, their counts, and the quantities `TOKENS` as (3, layer, head, token)."""
    ids = np.unique(np.concatenate([unit["token_ids"] for unit in units]))
    counts = np.zeros(ids.size)
    tables = np.zeros((3, *units[0]["token_mass"].shape[:2], ids.size))
    for unit in units:
        place = np.searchsorted(ids, unit["token_ids"])
        counts[place] += unit["token_counts"]
        for table, name in zip(tables, TOKENS, strict=True):
            table[:, :, place] += unit[name]
    return ids, counts, tables
