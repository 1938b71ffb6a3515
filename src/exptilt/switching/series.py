"""From what a user holds to what a kernel takes, and back.

A series is ``(T, m)`` (or ``(T,)`` where m = 1), a batch ``(B, T, m)`` or, where lengths differ, a list of series; numpy, torch or
pandas. Inside,
all series lie end to end in one ``(rows, m)`` array, with the row each begins at. NaN is a missing component.

A diffuse initial state (``inf`` on the diagonal of the initial covariance) becomes one of variance κ = 10⁷ · s², s² the largest variance
in sight (of the
data, and of the rest of the initial covariance), and ½ log κ is added to the log-likelihood for each: up to O(1/κ) that is the diffuse
log-likelihood of Durbin and Koopman, the limit of log p(y) + (d/2) log κ.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .._support.errors import ArgumentError
from .checks import Array, plain, safe_log
from .kernels.buffers import Parameters
from .model import SwitchingLinearGaussian


@dataclass(frozen=True)
class Data:
    """Series end to end: `tensor` (rows, m) float64, `starts` (B + 1,), and how they came: "single", "batch" or "list", of `kind` numpy,
    torch or pandas.
    """

    tensor: torch.Tensor
    starts: np.ndarray
    layout: str
    kind: str
    dtype: torch.dtype
    index: tuple[Any, ...] | None = None
    columns: tuple[Any, ...] | None = None

    @property
    def rows(self) -> np.ndarray:
        """The data as a numpy array."""
        return self.tensor.detach().numpy()

    @property
    def series(self) -> int:
        """How many series there are."""
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each series."""
        return np.diff(self.starts)


def _is_pandas(value: Any) -> bool:
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
            value = torch.from_numpy(np.require(value, np.float64, ["C", "W"]))
        except (TypeError, ValueError):
            raise ArgumentError(
                f"{what}: the series is not a numeric array. Pass (T, {m}) numbers, NaN where one is missing."
            ) from None
    tensor = value.to(device="cpu", dtype=torch.float64)
    if tensor.ndim == 1 and m == 1:
        tensor = tensor[:, None]
    return tensor


def read(y: Any, m: int, *, what: str = "filter", model_is_torch: bool = False, missing: bool = True) -> Data:
    """Bring `y` into one array; refuse wrong shapes, infinities and empty series.

    Args:
        y: series, batch or list of series.
        m: how many components each row must have.
        what: the caller, for messages.
        model_is_torch: results are tensors even if `y` is not.
        missing: whether NaN may stand for a missing component.
    """
    layout = (
        "list" if isinstance(y, (list, tuple)) and len(y) > 0 and getattr(y[0], "ndim", 0) > 0 else "single"
    )
    items = list(y) if layout == "list" else [y]
    lead = items[0]
    kind = (
        "pandas"
        if _is_pandas(lead)
        else "torch"
        if isinstance(lead, torch.Tensor) or model_is_torch
        else "numpy"
    )
    dtype = lead.dtype if isinstance(lead, torch.Tensor) and lead.is_floating_point() else torch.float64
    index = tuple(item.index for item in items) if kind == "pandas" else None
    columns = tuple(lead.columns) if kind == "pandas" and hasattr(lead, "columns") else None
    tensors = [_one(item, m, what) for item in items]
    if layout == "single" and tensors[0].ndim == 3:
        layout = "batch"
        tensors = list(tensors[0])
    for k, tensor in enumerate(tensors):
        which = f"series {k}" if len(tensors) > 1 else "the series"
        if tensor.ndim != 2 or tensor.shape[1] != m:
            raise ArgumentError(
                f"{what}: {which} has shape {tuple(tensor.shape)}, expected (T, {m}). Pass (T, m), (B, T, m) or a list of (T, m)."
            )
        if len(tensor) == 0:
            raise ArgumentError(
                f"{what}: {which} has no rows. Pass at least one step (NaN where nothing was observed)."
            )
        numbers = (
            tensor.detach().numpy()
        )  # numpy, not torch: a forked child may not enter torch's thread pool
        if np.isinf(numbers).any():
            raise ArgumentError(
                f"{what}: {which} holds infinite values. Remove them, or pass NaN where a value is missing."
            )
        if not missing and np.isnan(numbers).any():
            raise ArgumentError(f"{what}: {which} holds NaN. Inputs must be known at every step.")
    if not tensors or not len(tensors[0]):
        raise ArgumentError(f"{what}: the batch has no series. Pass at least one.")
    starts = np.concatenate([[0], np.cumsum([len(t) for t in tensors])]).astype(np.int64)
    graph = any(tensor.requires_grad for tensor in tensors)
    rows = (
        torch.cat(tensors)
        if graph
        else torch.from_numpy(np.concatenate([tensor.detach().numpy() for tensor in tensors]))
    )
    return Data(rows.contiguous(), starts, layout, kind, dtype, index, columns)


def diffuse(model: SwitchingLinearGaussian, data: Data) -> tuple[SwitchingLinearGaussian, float]:
    """The model with diffuse states made wide, and what to add to each log-likelihood for it."""
    P = plain(model.initial_covariance)
    infinite = np.isposinf(P[0].diagonal())
    if not infinite.any():
        return model, 0.0
    rows = data.rows
    spread = np.nanmax(np.abs(rows)) if np.isfinite(rows).any() else 1.0
    known = np.where(np.isfinite(P), P, 0.0)
    kappa = 1e7 * max(1.0, float(spread) ** 2, float(np.abs(known).max()))
    wide = np.where(np.isposinf(P), kappa, 0.0)
    old = model.initial_covariance
    new = (
        torch.where(torch.isinf(old), torch.as_tensor(wide, dtype=old.dtype), old)
        if isinstance(old, torch.Tensor)
        else known + wide
    )
    return model.replace(initial_covariance=new), 0.5 * float(infinite.sum()) * float(np.log(kappa))


def flatten(model: SwitchingLinearGaussian, data: Data, inputs: Any, what: str) -> list[torch.Tensor]:
    """The model's parameters as float64 tensors in the order and shapes of `Parameters` (without `first`), graphs kept."""
    M, n, m = model.modes, model.states, model.outputs
    steps = model.steps
    if steps is not None and data.lengths.max() > steps:
        raise ArgumentError(
            f"{what}: the model's parameters cover {steps} steps, the data have {data.lengths.max()}. Give parameters for every step."
        )

    def tensor(value: Array) -> torch.Tensor:
        return (value if isinstance(value, torch.Tensor) else torch.from_numpy(value)).to(
            device="cpu", dtype=torch.float64
        )

    def timed(value: Array, rank: int) -> torch.Tensor:
        value = tensor(value)
        return value.reshape(value.shape[0] if value.ndim == rank + 1 else 1, -1)

    inputs_of = _inputs(model, data, inputs, what)

    def offset(base: Array, matrix: Array, size: int) -> torch.Tensor:
        value = torch.zeros(1, 1, M * size, dtype=torch.float64) if base is None else timed(base, 2)[None]
        if matrix is None:
            return value
        weight = tensor(matrix)
        if weight.ndim == 4:
            if inputs_of.shape[1] > len(weight):
                raise ArgumentError(
                    f"{what}: input matrices cover {len(weight)} steps, the inputs {inputs_of.shape[1]}."
                )
            weight = weight[: inputs_of.shape[1]]
            effect = torch.einsum("tjkr,btr->btjk", weight, inputs_of)
        else:
            effect = torch.einsum("jkr,btr->btjk", weight, inputs_of)
        return value[:, : effect.shape[1]] + effect.reshape(effect.shape[0], effect.shape[1], M * size)

    empty = torch.zeros(0, dtype=torch.float64)
    maps = empty if model.maps is None else tensor(model.maps).reshape(-1)
    spread = (
        torch.zeros_like(maps) if model.map_covariance is None else tensor(model.map_covariance).reshape(-1)
    )
    return [
        timed(model.transition, 2),
        timed(model.dynamics, 3),
        offset(model.dynamics_offset, model.dynamics_input, n),
        timed(model.process_noise, 3),
        timed(model.observation, 3),
        offset(model.observation_offset, model.observation_input, m),
        timed(model.observation_noise, 3),
        tensor(model.initial_mean).reshape(-1),
        tensor(model.initial_covariance).reshape(-1),
        safe_log(tensor(model.initial_probability)),
        maps,
        spread,
    ]


def _inputs(model: SwitchingLinearGaussian, data: Data, inputs: Any, what: str) -> torch.Tensor:
    """Inputs as (1 or B, T, r), padded with zeros where series are shorter."""
    wanted = [value for value in (model.dynamics_input, model.observation_input) if value is not None]
    if not wanted:
        if inputs is not None:
            raise ArgumentError(
                f"{what}: inputs are given, but the model has neither dynamics_input nor observation_input. Give it one, or no inputs."
            )
        return torch.zeros(1, 1, 0, dtype=torch.float64)
    if inputs is None:
        raise ArgumentError(
            f"{what}: the model has input matrices but no inputs were given. Pass inputs=(T, {wanted[0].shape[-1]})."
        )
    given = read(inputs, int(wanted[0].shape[-1]), what=f"{what}: inputs", missing=False)
    if given.series == 1 and data.lengths.max() <= given.lengths[0]:
        return given.tensor[None]
    if given.series != data.series or (given.lengths < data.lengths).any():
        raise ArgumentError(
            f"{what}: inputs have {given.series} series of lengths {given.lengths[:5].tolist()}, the data "
            f"{data.series} of {data.lengths[:5].tolist()}. "
            "Pass one row of inputs for every step, for each series or for all alike."
        )
    padded = torch.zeros(given.series, int(given.lengths.max()), given.tensor.shape[1], dtype=torch.float64)
    for b in range(given.series):
        padded[b, : given.lengths[b]] = given.tensor[given.starts[b] : given.starts[b + 1]]
    return padded


def parameters(flat: list[torch.Tensor], first: int) -> Parameters:
    """The kernel's view of `flatten`'s tensors."""
    arrays = [np.ascontiguousarray(value.detach().numpy()) for value in flat]
    return Parameters._make([*arrays, first])


def without_graph(data: Data) -> Data:
    """The same data, cut from any graph."""
    return replace(data, tensor=data.tensor.detach())


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
