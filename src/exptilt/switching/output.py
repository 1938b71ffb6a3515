"""Results in the form the data came in: tensors for tensors, tables with the same index for tables, a list for a list."""

from typing import Any

import numpy as np
import torch

from .inputs import Data


def arrange(value: Any, data: Data, names: str | None, *, last: bool) -> Any:
    """Cut ``(rows, ...)`` into the data's layout.

    Args:
        value: array or tensor with one row per step (or, with `last`, per series).
        data: what the user gave.
        names: what the columns of a two-dimensional result are called in a table: "mode", "state" or "output"; None for no table.
        last: one row per series, with no time axis.
    """
    if data.kind == "torch":
        value = (
            value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        ).to(data.dtype)
    elif isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if last:
        return value[0] if data.layout == "single" else value
    if data.layout == "batch":
        return value.reshape(data.series, -1, *value.shape[1:])
    pieces = [value[a:b] for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)]
    if data.kind == "pandas":
        pieces = [table(piece, data, k, names) for k, piece in enumerate(pieces)]
    return pieces if data.layout == "list" else pieces[0]


def table(piece: np.ndarray, data: Data, series: int, names: str | None) -> Any:
    """A pandas Series or DataFrame with the index of the data; arrays of more axes stay arrays."""
    import pandas as pd

    assert data.index is not None
    if piece.ndim == 1:
        return pd.Series(piece, index=data.index[series])
    if piece.ndim == 2 and names is not None:
        columns = (
            list(data.columns)
            if names == "output" and data.columns
            else [f"{names} {k}" for k in range(piece.shape[1])]
        )
        return pd.DataFrame(piece, index=data.index[series], columns=columns)
    return piece
