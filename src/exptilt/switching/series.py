"""Conversion of a user's data (arrays, tensors, tables, lists) to one array, and back.

A series is ``(T, m)`` (or ``(T,)`` where m = 1), a batch ``(B, T, m)`` or, where lengths differ, a list of
series; numpy, torch or pandas. Inside, all series lie end to end in one ``(rows, m)`` array, with the row
each begins at. NaN is a missing component. Results come back as the data came: tensors for tensors, tables
with the same index for tables, a list for a list.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike

from .._support.errors import ArgumentError

SeriesLike: TypeAlias = ArrayLike | Sequence[ArrayLike]
Values: TypeAlias = (
    Any  # arrays, tensors, tables or lists of these, as the data were; no static type says which
)


@dataclass(eq=False)
class Data:
    """All series end to end in one array, and the layout in which they were given."""

    given: torch.Tensor | np.ndarray  # (rows, m), float64; a tensor keeps its graph
    starts: np.ndarray  # (B + 1,), the row each series begins at, and the number of rows
    layout: str  # "single", "batch" or "list"
    kind: str  # "numpy", "torch" or "pandas"
    dtype: torch.dtype  # of the results, if they are tensors
    index: tuple[Any, ...] | None = None  # of each series, if they are tables
    columns: tuple[Any, ...] | None = None  # of the first table

    @property
    def rows(self) -> np.ndarray:
        """The data as a numpy array."""
        return self.given if isinstance(self.given, np.ndarray) else self.given.detach().numpy()

    @property
    def tensor(self) -> torch.Tensor:
        """The data as a tensor, its graph kept."""
        return torch.from_numpy(self.given) if isinstance(self.given, np.ndarray) else self.given

    @property
    def requires_grad(self) -> bool:
        """Whether the data require a derivative."""
        return isinstance(self.given, torch.Tensor) and self.given.requires_grad

    @property
    def series(self) -> int:
        """How many series there are."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each series."""
        return np.diff(self.starts)

    @property
    def cuts(self) -> list[slice]:
        """The rows of each series."""
        return [slice(a, b) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]

    def detached(self) -> "Data":
        """The same data, cut from any graph."""
        return replace(self, given=self.rows)

    def totals(self, terms: np.ndarray) -> np.ndarray:
        """Sums over each series of ``(rows,)`` numbers."""
        return np.add.reduceat(terms, self.starts[:-1])


def _is_pandas(value: object) -> bool:
    return type(value).__module__.split(".")[0] == "pandas"


def _one(value: Any, m: int, what: str) -> torch.Tensor:
    """One series as a (T, m) float64 tensor on the CPU."""
    if _is_pandas(value):
        try:
            value = value.to_numpy(dtype=np.float64, na_value=np.nan)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{what}: the table holds entries that are not numbers. Pass numeric columns."
            ) from None
    if not isinstance(value, torch.Tensor):
        try:
            array = np.asarray(value)
            value = torch.from_numpy(
                array if np.iscomplexobj(array) else np.require(array, np.float64, ["C", "W"])
            )
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{what}: the series is not a numeric array. Pass (T, {m}) numbers, NaN where one is missing."
            ) from None
    if value.is_complex():
        raise ArgumentError(
            f"{what}: the series is complex. Pass its real and imaginary parts as components."
        )
    tensor: torch.Tensor = value.to(device="cpu", dtype=torch.float64)
    return tensor[:, None] if tensor.ndim == 1 and m == 1 else tensor


def read(y: Any, m: int, *, what: str = "filter", model_is_torch: bool = False, missing: bool = True) -> Data:
    """Bring `y`, of `m` components, into one array; refuse wrong shapes, infinities and empty series.

    With `model_is_torch` results are tensors even if `y` is not; NaN may stand for a value if `missing`.
    """
    if type(y) is np.ndarray and y.dtype == np.float64 and y.ndim in (2, 3) and y.shape[-1] == m and y.size:
        whole = y.copy().reshape(-1, m)
        if math.isfinite(np.add.reduce(whole, axis=None)) or (missing and not np.isinf(whole).any()):
            starts = np.arange(0, len(whole) + 1, y.shape[-2])
            layout, kind = "single" if y.ndim == 2 else "batch", "torch" if model_is_torch else "numpy"
            return Data(whole, starts, layout, kind, torch.float64)
    many = isinstance(y, (list, tuple)) and len(y) > 0 and getattr(y[0], "ndim", 0) > 0
    layout, items = ("list", list(y)) if many else ("single", [y])
    lead = items[0]
    kind = "torch" if isinstance(lead, torch.Tensor) or model_is_torch else "numpy"
    kind = "pandas" if _is_pandas(lead) else kind
    dtype = lead.dtype if isinstance(lead, torch.Tensor) and lead.is_floating_point() else torch.float64
    index = tuple(item.index for item in items) if kind == "pandas" else None
    columns = tuple(lead.columns) if kind == "pandas" and hasattr(lead, "columns") else None
    tensors = [_one(item, m, what) for item in items]
    if layout == "single" and tensors[0].ndim == 3:
        layout, tensors = "batch", list(tensors[0])
    for k, tensor in enumerate(tensors):
        which = f"series {k}" if len(tensors) > 1 else "the series"
        if tensor.ndim != 2 or tensor.shape[1] != m:
            raise ArgumentError(
                f"{what}: {which} has shape {tuple(tensor.shape)}, expected (T, {m}). "
                "Pass (T, m), (B, T, m) or a list of (T, m)."
            )
        if len(tensor) == 0:
            raise ArgumentError(
                f"{what}: {which} has no rows. Pass at least one step (NaN where nothing was observed)."
            )
        numbers = tensor.detach().numpy()  # not torch: a forked child may not enter torch's thread pool
        if np.isinf(numbers).any():
            raise ArgumentError(
                f"{what}: {which} holds infinite values. Remove them, or pass NaN where a value is missing."
            )
        if not missing and np.isnan(numbers).any():
            raise ArgumentError(f"{what}: {which} holds NaN. Inputs must be known at every step.")
    if not tensors:
        raise ArgumentError(f"{what}: the batch has no series. Pass at least one.")
    starts = np.concatenate([[0], np.cumsum([len(t) for t in tensors])]).astype(np.int64)
    rows: torch.Tensor | np.ndarray
    if any(tensor.requires_grad for tensor in tensors):
        rows = torch.cat(tensors).contiguous()
    else:
        rows = np.ascontiguousarray(np.concatenate([tensor.detach().numpy() for tensor in tensors]))
    return Data(rows, starts, layout, kind, dtype, index, columns)


def columns_of(y: Any, what: str) -> int:
    """The number of observed components, from the shape of `y`."""
    lead = y[0] if isinstance(y, (list, tuple)) and len(y) and getattr(y[0], "ndim", 0) > 0 else y
    try:
        shape = np.shape(lead)
    except ValueError:
        raise ArgumentError(
            f"{what}: rows have different lengths. Pass a number for each component; series of different "
            "lengths as a list of arrays."
        ) from None
    return int(shape[-1]) if len(shape) > 1 else 1


def arrange(value: Any, data: Data, names: str | None, *, last: bool = False) -> Values:
    """Cut ``(rows, ...)``, one row per step (with `last`: per series), into the data's layout.

    `names` names the columns of a table: "mode", "state" or "output"; None for no table.
    """
    if data.kind == "torch":
        if not isinstance(value, torch.Tensor):
            value = torch.from_numpy(np.ascontiguousarray(value))
        value = value.to(data.dtype) if value.is_floating_point() else value
    elif isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if last:
        return value[0] if data.layout == "single" else value
    if data.layout == "batch":
        return value.reshape(data.series, -1, *value.shape[1:])
    pieces = [value[cut] for cut in data.cuts]
    if data.kind == "pandas":
        pieces = [_table(piece, data, k, names) for k, piece in enumerate(pieces)]
    return pieces if data.layout == "list" else pieces[0]


def arrange_total(total: Any, data: Data) -> Values:
    """One number per series in the data's kind: a plain number for a single series that is not a tensor."""
    if data.kind == "torch":
        tensor = total if isinstance(total, torch.Tensor) else torch.from_numpy(total)
        return (tensor if data.layout != "single" else tensor[0]).to(data.dtype)
    array = total.detach().numpy() if isinstance(total, torch.Tensor) else total
    return float(array[0]) if data.layout == "single" else array


def _table(piece: np.ndarray, data: Data, series: int, names: str | None) -> Values:
    """A pandas Series or DataFrame with the index of the data; arrays of more axes stay arrays."""
    import pandas as pd

    assert data.index is not None
    if piece.ndim == 1:
        return pd.Series(piece, index=data.index[series])
    if piece.ndim == 2 and names is not None:
        own = names == "output" and data.columns
        columns = list(data.columns or ()) if own else [f"{names} {k}" for k in range(piece.shape[1])]
        return pd.DataFrame(piece, index=data.index[series], columns=columns)
    return piece
