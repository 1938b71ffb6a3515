r"""The record of a watch, as plain tensors and as a table.

Every attention call leaves one `CallRecord`. `Record.to_frame` puts them into a table. Over the calls of one
layer (decoding steps, or several forward passes) means join weighted by their numbers of queries, maxima by
the maximum, and variances by the law of total variance:

    n = Σ n_t,   μ = Σ n_t μ_t / n,   σ² = Σ n_t (σ_t² + (μ_t − μ)²) / n.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exptilt._support.checks import choice
from exptilt._support.errors import MissingExtraError
from exptilt._support.plotting import html_table
from exptilt._support.transforms import in_transform
from exptilt.lens.heads.statistics import FIELDS, rows, summarise
from exptilt.lens.heads.visibility import Visibility

Array = NDArray[np.float64]
_PLACE = {name: place for place, name in enumerate(FIELDS)}
_COLUMNS = tuple(
    name.replace("_variance", "_std") if name == "log_normalizer_variance" else name
    for name in FIELDS
    if name != "relative_queries"
)
_LABELS = ("layer", "name", "kind", "head", "item", "step")
_SHOWN, _MOST_ROWS = ("entropy", "effective_keys", "score_max", "first_key_mass"), 24
_MOST_WAITING = 1 << 20  # numbers of calls that wait to be summarised: 4 MB in float32
_KEY_MASS = ("key_mass_simpson", "key_mass_divergence")


@dataclass(frozen=True)
class CallRecord:
    """Statistics of one attention call.

    Attributes:
        layer, name, kind, step: as in `AttentionCall`.
        values: ``(fields, batch, heads)``, the statistics `FIELDS` of ``lens.heads.statistics``.
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


class Waiting(NamedTuple):
    """A call that has not been summarised yet."""

    place: tuple[int, str, str, int]  # the first fields of its `CallRecord`
    about: tuple[Any, ...]  # the last ones, from `per_token` on
    lines: list[Tensor]  # (batch, heads, Q) each, those of `statistic_lines`
    products: Tensor  # (batch, heads, Q), those of `first_products`
    options: Mapping[str, Any]  # of `attend`
    visible: Visibility

    @property
    def alike(self) -> tuple[Any, ...]:
        """Calls that have this in common are summarised together."""
        options = [(name, id(x) if isinstance(x, Tensor) else x) for name, x in self.options.items()]
        apart = id(self) if self.visible.first is not None else 0  # first keys are at other places
        like = (self.products.shape, self.lines[0].dtype, self.products.device)
        return id(self.visible), apart, self.about[2] is None, *like, *options


class Record:
    """All attention calls of one watch, in the order in which they happened.

    A small call takes longer to summarise than to compute, so calls wait until there are many numbers, the
    record is read or the watch ends; those that see alike are then summarised together.

    Args:
        calls: one `CallRecord` each.

    Attributes:
        spent: whether `clip_qk_` has changed the weights, so that the record no longer describes them.
    """

    spent: bool = False

    def __init__(self, calls: Iterable[CallRecord] = ()) -> None:
        self._calls, self._waiting, self._size = list(calls), list[Waiting](), 0

    @property
    def calls(self) -> list[CallRecord]:
        """One `CallRecord` for each call."""
        self.settle()
        return self._calls

    def add(self, call: Waiting) -> None:
        """Add a call, to be summarised later.

        Args:
            call: what a watch has seen of it.
        """
        self._waiting.append(call)
        self._size += 6 * call.products.numel()
        if self._size > _MOST_WAITING or in_transform():
            self.settle()

    def settle(self) -> None:
        """Summarise the calls that were added and not summarised yet."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        groups: dict[Any, list[int]] = {}
        for index, call in enumerate(waiting):
            groups.setdefault(call.alike, []).append(index)
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for some in groups.values():
                calls = [waiting[index] for index in some]
                found |= dict(zip(some, _summaries(calls), strict=True))
        for index, call in enumerate(waiting):
            self._calls.append(CallRecord(*call.place, found[index], *call.about))

    def __repr__(self) -> str:
        layers = len({call.layer for call in self.calls})
        return f"<Record of {len(self.calls)} attention calls in {layers} layers; to_frame() is a table>"

    def to_frame(self, *, by_step: bool = False) -> Any:
        """The record as a pandas DataFrame, one row per layer, head and batch item.

        Args:
            by_step: one row for each call instead, with a column ``step``; else the calls of a layer are
                joined into one row by weighted means and maxima.

        Returns:
            A DataFrame with columns layer, name, kind, head, item, (step,) queries, visible_keys, entropy,
            relative_entropy, effective_keys, log_normalizer, log_normalizer_std, score_mean, score_variance,
            score_max, first_key_mass and, if key mass was asked for, key_mass_simpson and
            key_mass_divergence. ``item`` is the place in the batch.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "hf") from None
        columns: dict[str, list[Any]] = {name: [] for name in (*_LABELS, *_COLUMNS)}
        for (layer, kind, step), (name, values) in self._groups(by_step).items():
            items, heads = values.shape[1:]
            head, item = np.meshgrid(np.arange(heads), np.arange(items))
            words = [np.full(head.size, word, dtype=object) for word in (name, kind)]
            labels = (np.full(head.size, layer), *words, head.ravel(), item.ravel(), np.full(head.size, step))
            for label, value in zip(_LABELS, labels, strict=True):
                columns[label].append(value)
            for column, value in _columns(values).items():
                columns[column].append(value.ravel())
        table = pd.DataFrame(
            {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in columns.items()}
        )
        table["queries"] = table["queries"].astype(np.int64)
        table = table if by_step else table.drop(columns="step")
        if table[_KEY_MASS[0]].isna().all():
            table = table.drop(columns=list(_KEY_MASS))
        order = ["layer", "step", "item", "head"] if by_step else ["layer", "item", "head"]
        return table.sort_values(order, kind="stable", ignore_index=True)

    def _repr_html_(self) -> str:
        """The record in a notebook: one row a head, over all calls and batch items."""
        joined = {name: self.by_head(name) for name in _SHOWN}
        layers, heads = next(iter(joined.values())).shape
        places = list(np.ndindex(layers, heads))
        rows = [(f"L{i}H{j}", *(float(x[i, j]) for x in joined.values())) for i, j in places[:_MOST_ROWS]]
        more = f", the first {_MOST_ROWS} shown" if len(places) > _MOST_ROWS else ""
        caption = f"{len(self.calls)} attention calls, {layers} layers of {heads} heads{more}"
        return html_table([name.replace("_", " ") for name in ("head", *_SHOWN)], rows, caption)

    def by_head(self, name: str) -> Array:
        """One statistic over all calls and batch items.

        Args:
            name: a column of `to_frame`, such as "entropy" or "score_max".

        Returns:
            An array ``(layer, head)``; NaN where a layer was not called or has fewer heads.
        """
        choice("Record.by_head", "name", name, _COLUMNS)
        return _columns(self.joined())[name]

    def joined(self) -> Array:
        """All statistics over all calls and batch items, ``(fields, layer, head)``; NaN as in `by_head`."""
        parts: dict[int, list[Array]] = {}
        for call in self.calls:
            values = call.values.detach().double().cpu().numpy()
            parts.setdefault(call.layer, []).extend(values[:, [item]] for item in range(values.shape[1]))
        rows = {layer: _join(some)[:, 0].T for layer, some in parts.items() if some}
        if not rows:
            return np.empty((len(FIELDS), 0, 0))
        nothing = np.empty((0, len(FIELDS)))
        return np.moveaxis(by_layer([rows.get(layer, nothing) for layer in range(max(rows) + 1)]), -1, 0)

    def _groups(self, by_step: bool) -> dict[tuple[int, str, int], tuple[str, Array]]:
        """Name and values (fields, items, heads) by layer, kind and step (−1 if joined)."""
        parts: dict[tuple[int, str, int], list[CallRecord]] = {}
        for call in self.calls:
            parts.setdefault((call.layer, call.kind, call.step if by_step else -1), []).append(call)
        return {
            key: (calls[0].name, _join([c.values.double().cpu().numpy() for c in calls]))
            for key, calls in parts.items()
        }


def _summaries(calls: list[Waiting]) -> Sequence[Tensor]:
    """Values of calls that see alike."""
    one = calls[0]
    masses = [call.about[2] for call in calls]
    lines, products, mass = one.lines, one.products, masses[0]
    if len(calls) > 1:
        lines = [torch.stack(some) for some in zip(*(call.lines for call in calls), strict=True)]
        products = torch.stack([call.products for call in calls])
        mass = None if masses[0] is None else torch.stack(masses)
    every = rows(lines, products, one.options, one.visible)
    values = summarise(every, mass, one.visible, one.options.get("sink") is not None)
    return [values] if len(calls) == 1 else values.unbind(1)


def by_layer(parts: Sequence[Array], heads: int = 0) -> Array:
    """Arrays ``(head, ...)`` of all layers as one ``(layer, head, ...)``, NaN where a layer has fewer heads.

    The result has at least `heads` heads.
    """
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    found = np.full((len(parts), max(heads, shape[0]), *shape[1:]), np.nan)
    for row, part in zip(found, parts, strict=True):
        row[tuple(slice(0, size) for size in part.shape)] = part
    return found


def _join(parts: list[Array]) -> Array:
    """Values (fields, items, heads) joined over several calls; a smaller batch counts for the first items."""
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
        mean: Array = np.divide(summed.sum(0), total, out=np.full(total.shape, np.nan), where=total > 0)
        return mean

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
