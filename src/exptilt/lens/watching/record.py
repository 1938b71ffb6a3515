r"""What a watch saw, as plain tensors and a table.

Every attention call leaves one `CallRecord`. `Record.to_frame` puts them into a table. Over the calls of one layer (decoding steps, or
several forward passes) means join weighted by their numbers of queries, maxima by the maximum, and variances by the law of total variance:

    n = Σ n_t,   μ = Σ n_t μ_t / n,   σ² = Σ n_t (σ_t² + (μ_t − μ)²) / n.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.lens.heads.statistics import FIELDS

Array = NDArray[np.float64]
_PLACE = {name: place for place, name in enumerate(FIELDS)}
_COLUMNS = (
    "queries", "visible_keys", "entropy", "relative_entropy", "effective_keys", "log_normalizer", "log_normalizer_std",
    "score_mean", "score_variance", "score_max", "first_key_mass", "key_mass_concentration",
)  # fmt: skip


@dataclass(frozen=True)
class CallRecord:
    """One attention call.

    Attributes:
        layer, name, kind, step: as in `AttentionCall`.
        values: ``(fields, batch, heads)``, the statistics of `lens.statistics.FIELDS`.
        per_token: by name of a statistic, ``(batch, heads, Q)``; None unless the watch was asked for it.
        real_query: ``(batch, Q)`` booleans, False at padding; None if nothing is padded.
        key_mass: ``(batch, heads, K)``, from real queries; None unless the watch was asked for it.
        dim: of queries and keys.
        softcap: c, if scores were c·tanh(s/c).
        biased: whether something was added to the scores.
    """

    layer: int
    name: str
    kind: str
    step: int
    values: Tensor
    per_token: Mapping[str, Tensor] | None = None
    real_query: Tensor | None = None
    key_mass: Tensor | None = None
    dim: int = 0
    softcap: float | None = None
    biased: bool = False


@dataclass
class Record:
    """All attention calls of one watch, in the order in which they happened.

    Attributes:
        calls: one `CallRecord` each.
    """

    calls: list[CallRecord] = field(default_factory=list)

    def to_frame(self, *, by_step: bool = False) -> Any:
        """The record as a pandas DataFrame, one row per layer, head and batch item.

        Args:
            by_step: one row for each call instead, with a column ``step``; else the calls of a layer are joined by the rule of the module.

        Returns:
            A DataFrame with columns layer, name, kind, head, item, (step,) queries, visible_keys, entropy, relative_entropy,
            effective_keys, log_normalizer, log_normalizer_std, score_mean, score_variance, score_max, first_key_mass and, if key mass
            was asked for, key_mass_concentration. ``item`` is the place in the batch.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "hf") from None
        groups = self._groups(by_step)
        frames: dict[str, list[Any]] = {
            name: [] for name in ("layer", "name", "kind", "head", "item", "step", *_COLUMNS)
        }
        for (layer, kind, step), (name, values) in groups.items():
            _, items, heads = values.shape
            head, item = np.meshgrid(np.arange(heads), np.arange(items))
            labels = {"layer": layer, "name": name, "kind": kind, "step": step}
            for label, value in labels.items():
                frames[label].append(
                    np.full(items * heads, value, dtype=object if isinstance(value, str) else np.int64)
                )
            frames["head"].append(head.ravel())
            frames["item"].append(item.ravel())
            for column, value in _columns(values).items():
                frames[column].append(value.ravel())
        columns = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in frames.items()}
        if not by_step:
            del columns["step"]
        if np.isnan(columns["key_mass_concentration"]).all():
            del columns["key_mass_concentration"]
        columns["queries"] = columns["queries"].astype(np.int64)
        order = ["layer", "item", "head"] if not by_step else ["layer", "step", "item", "head"]
        return pd.DataFrame(columns).sort_values(order, kind="stable", ignore_index=True)

    def by_head(self, name: str) -> Array:
        """One statistic as an array ``(layer, head)``, over all calls and batch items; NaN where a layer was not called or has fewer heads.

        Args:
            name: a column of `to_frame`, such as "entropy" or "score_max".
        """
        if name not in _COLUMNS:
            raise ArgumentError(
                f"Record.by_head: there is no statistic {name!r}. Pass one of {', '.join(_COLUMNS)}."
            )
        parts: dict[int, list[Array]] = {}
        for (layer, _, _), (_, values) in self._groups(False).items():
            parts.setdefault(layer, []).extend(values[:, item : item + 1] for item in range(values.shape[1]))
        joined = {layer: _columns(_join(some))[name][0] for layer, some in parts.items() if some}
        if not joined:
            return np.empty((0, 0))
        table = np.full((max(joined) + 1, max(len(row) for row in joined.values())), np.nan)
        for layer, row in joined.items():
            table[layer, : len(row)] = row
        return table

    def _groups(self, by_step: bool) -> dict[tuple[int, str, int], tuple[str, Array]]:
        """Name and values (fields, items, heads) by layer, kind and step (−1 if joined)."""
        parts: dict[tuple[int, str, int], list[CallRecord]] = {}
        for call in self.calls:
            parts.setdefault((call.layer, call.kind, call.step if by_step else -1), []).append(call)
        return {
            key: (calls[0].name, _join([c.values.double().cpu().numpy() for c in calls]))
            for key, calls in parts.items()
        }


def _join(parts: list[Array]) -> Array:
    """Values (fields, items, heads) of several calls as one; a batch with fewer items adds to the first ones."""
    if len(parts) == 1:
        return parts[0]
    items, heads = max(x.shape[1] for x in parts), max(x.shape[2] for x in parts)
    stack = np.full((len(parts), len(FIELDS), items, heads), np.nan)
    stack[:, [_PLACE["queries"], _PLACE["relative_queries"]]] = 0.0
    for place, x in enumerate(parts):
        stack[place, :, : x.shape[1], : x.shape[2]] = x
    n, r = stack[:, _PLACE["queries"]], stack[:, _PLACE["relative_queries"]]
    joined = np.empty(stack.shape[1:])

    def average(x: Array, weight: Array) -> Array:
        total = weight.sum(0)
        summed = np.where(weight > 0, x, 0.0) * weight
        return np.divide(summed.sum(0), total, out=np.full(total.shape, np.nan), where=total > 0)

    for name, place in _PLACE.items():
        x = stack[:, place]
        if name in ("queries", "relative_queries"):
            joined[place] = x.sum(0)
        elif name == "score_max":
            joined[place] = np.where(n > 0, x, -np.inf).max(0)
        elif name == "log_normalizer_variance":
            means = stack[:, _PLACE["log_normalizer"]]
            joined[place] = average(x + (means - average(means, n)) ** 2, n)
        else:
            joined[place] = average(x, r if name == "relative_entropy" else n)
    return joined


def _columns(values: Array) -> dict[str, Array]:
    """The columns of the table, each (items, heads)."""
    found = {name: values[place] for name, place in _PLACE.items()}
    found["log_normalizer_std"] = np.sqrt(found["log_normalizer_variance"])
    return {name: found[name] for name in _COLUMNS}
