"""A model and data brought together in the form that the kernels take.

A diffuse initial state (``inf`` on the diagonal of the initial covariance) has no variance here, and is dealt
with in `diffuse.py`. Particles, the most likely path and posterior draws have no such limit: for them
(`wide`) it has variance κ = 10⁷ · s², s² the largest variance in sight (of the data, and of the rest of the
initial covariance), and ½ log κ is added to the log-likelihood for each.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..checks import Array, plain, safe_log
from ..kernels.buffers import Parameters
from ..parameters import RANKS, ModelParameters
from ..series import Data, SeriesLike, read


@dataclass(frozen=True)
class Problem:
    """Data and parameters, ready to run.

    Attributes:
        data: the series.
        flat: the parameters as float64 tensors in the order and shapes of `Parameters`, graphs kept.
        first: 1 if the initial law is the prior of the first observation.
        sizes: M, n, m.
        diffuse: ``(n,)``, True for states that start diffuse.
        shift: what each log-likelihood gains because diffuse states were made wide.
    """

    data: Data
    flat: tuple[torch.Tensor, ...]
    first: int
    sizes: tuple[int, int, int]
    diffuse: np.ndarray
    shift: float

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters as arrays."""
        return as_arrays(self.flat, self.first)

    @property
    def wants_grad(self) -> bool:
        """Whether a derivative is asked for."""
        tensors = (self.data.tensor, *self.flat)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def as_arrays(flat: tuple[torch.Tensor, ...], first: int) -> Parameters:
    """The kernel's view of `Problem.flat`."""
    return Parameters._make([*(np.ascontiguousarray(value.detach().numpy()) for value in flat), first])


def prepare(
    model: ModelParameters, y: SeriesLike, inputs: SeriesLike | None, what: str, wide: bool = False
) -> Problem:
    """Read the data and inputs and bring them together with the model; `what` is the caller, for messages."""
    data = read(y, model.outputs, what=what, model_is_torch=model.is_torch)
    return pose(model, data, read_inputs(model, data, inputs, what), what, wide)


def pose(model: ModelParameters, data: Data, inputs: torch.Tensor, what: str, wide: bool = False) -> Problem:
    """The problem for data and inputs that have been read: what a fit calls at every step, without checks."""
    M, n, m = model.modes, model.states, model.outputs
    if model.steps is not None and data.lengths.max() > model.steps:
        raise ArgumentError(
            f"{what}: the model's parameters cover {model.steps} steps, the data have {data.lengths.max()}. "
            "Give parameters for every step."
        )

    def timed(name: str) -> torch.Tensor:
        value = as_double(getattr(model, name))
        return value.reshape(value.shape[0] if value.ndim == RANKS[name] + 1 else 1, -1)

    def offset(name: str, size: int) -> torch.Tensor:
        base, matrix = getattr(model, f"{name}_offset"), getattr(model, f"{name}_input")
        value = as_double(np.zeros((1, M * size))) if base is None else timed(f"{name}_offset")
        if matrix is None:
            return value[None]
        weight, steps = as_double(matrix), inputs.shape[1]
        if weight.ndim == 4 and steps > len(weight):
            raise ArgumentError(f"{what}: input matrices cover {len(weight)} steps, the inputs {steps}.")
        weight = weight[:steps] if weight.ndim == 4 else weight[None]
        effect = torch.einsum("tjkr,btr->btjk", weight.expand(steps, -1, -1, -1), inputs)
        return value[None, :steps] + effect.reshape(len(inputs), steps, M * size)

    maps = as_double(np.zeros(0) if model.maps is None else model.maps).reshape(-1)
    spread = (
        torch.zeros_like(maps)
        if model.map_covariance is None
        else as_double(model.map_covariance).reshape(-1)
    )
    covariance, shift, diffuse = as_double(model.initial_covariance), 0.0, model.diffuse
    if wide:
        (covariance, shift), diffuse = _made_wide(model, data), np.zeros(n, dtype=bool)
    elif diffuse.any():
        covariance = torch.where(torch.isinf(covariance), 0.0, covariance)
    flat = (
        timed("transition"),
        timed("dynamics"),
        offset("dynamics", n),
        timed("process_noise"),
        timed("observation"),
        offset("observation", m),
        timed("observation_noise"),
        as_double(model.initial_mean).reshape(-1),
        covariance.reshape(-1),
        safe_log(as_double(model.initial_probability)),
        maps,
        spread,
    )
    return Problem(data, flat, int(model.start == "first"), (M, n, m), diffuse, shift)


def as_double(value: Array) -> torch.Tensor:
    """A float64 tensor on the CPU, its graph kept."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    return tensor.to(device="cpu", dtype=torch.float64)


def _made_wide(model: ModelParameters, data: Data) -> tuple[torch.Tensor, float]:
    """The initial covariance with diffuse states made wide, and what each log-likelihood gains for it."""
    covariance = as_double(model.initial_covariance)
    if not model.diffuse.any():
        return covariance, 0.0
    P = plain(covariance)
    spread = np.nanmax(np.abs(data.rows)) if np.isfinite(data.rows).any() else 1.0
    kappa = 1e7 * max(1.0, float(spread) ** 2, float(np.abs(P[np.isfinite(P)]).max(initial=0.0)))
    wide = torch.where(torch.isinf(covariance), kappa, covariance)
    return wide, 0.5 * float(model.diffuse.sum()) * float(np.log(kappa))


def read_inputs(model: ModelParameters, data: Data, inputs: SeriesLike | None, what: str) -> torch.Tensor:
    """Inputs as (1 or B, T, r), padded with zeros where series are shorter."""
    wanted = [value for value in (model.dynamics_input, model.observation_input) if value is not None]
    if not wanted:
        if inputs is not None:
            raise ArgumentError(
                f"{what}: inputs are given, but the model has neither dynamics_input nor observation_input. "
                "Give it one, or no inputs."
            )
        return torch.zeros(1, 1, 0, dtype=torch.float64)
    r = int(wanted[0].shape[-1])
    if inputs is None:
        raise ArgumentError(
            f"{what}: the model has input matrices but no inputs were given. Pass inputs=(T, {r})."
        )
    given = read(inputs, r, what=f"{what}: inputs", missing=False)
    if given.series == 1 and data.lengths.max() <= given.lengths[0]:
        return given.tensor[None]
    if given.series != data.series or (given.lengths < data.lengths).any():
        raise ArgumentError(
            f"{what}: inputs have {given.series} series of lengths {given.lengths[:5].tolist()}, the data "
            f"{data.series} of {data.lengths[:5].tolist()}. "
            "Pass one row of inputs for every step, for each series or for all alike."
        )
    padded = torch.zeros(given.series, int(given.lengths.max()), r, dtype=torch.float64)
    for b, cut in enumerate(given.cuts):
        padded[b, : given.lengths[b]] = given.tensor[cut]
    return padded
