"""A model and data together, in the form of the kernels.

Parameters of a model of numpy arrays without inputs are converted once and kept with the model
(`kept_parameters`), so that filtering a short series takes little more than the kernel. A diffuse initial
state (``inf`` on the diagonal of the initial covariance) has variance 0 here; `diffuse.py` takes the limit.
Particles and posterior draws need a proper law, and refuse diffuse states (`proper`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import KeptParameters, Parameters
from ..checks import Array, plain, safe_log
from ..parameters import RANKS, ModelParameters
from ..series import Data, SeriesLike, read


@dataclass(eq=False)
class Problem:
    """Data and parameters, ready to run.

    Attributes:
        data: the series.
        first: 1 if the initial law is the prior of the first observation.
        sizes: M, n, m.
        diffuse: ``(n,)``, True for states that start diffuse.
        begins_diffuse: whether there are such states.
        given: the parameters as tensors with their graphs, or as arrays.
    """

    data: Data
    first: int
    sizes: tuple[int, int, int]
    diffuse: np.ndarray
    begins_diffuse: bool
    given: tuple[torch.Tensor, ...] | Parameters

    @cached_property
    def flat(self) -> tuple[torch.Tensor, ...]:
        """The parameters as float64 tensors in the order and shapes of `Parameters`, graphs kept."""
        if isinstance(self.given, Parameters):
            return tuple(map(torch.from_numpy, self.given[:-1]))
        return self.given

    @property
    def parameters(self) -> Parameters:
        """The parameters as arrays."""
        return self.given if isinstance(self.given, Parameters) else self._arrays

    @cached_property
    def _arrays(self) -> Parameters:
        return as_arrays(self.flat, self.first)

    @property
    def wants_grad(self) -> bool:
        """Whether data or parameters require a derivative."""
        asked = self.data.requires_grad
        if not isinstance(self.given, Parameters):
            asked = asked or any(value.requires_grad for value in self.given)
        return asked and torch.is_grad_enabled()


class Matrices:
    """One series' parameters, unflattened."""

    def __init__(self, problem: Problem, series: int) -> None:
        M, n, m = problem.sizes
        maps, spread = problem.flat[-2:]
        self.mapped = len(maps) > 0
        *values, mean, cov, self.log_probability = (
            value[series if len(value) > 1 else 0] for value in problem.flat[:-2]
        )
        shapes = [(M, M), (M, n, n), (M, n), (M, n, n), (M, m, n), (M, m), (M, m, m)]
        self.values = [value.reshape(len(value), *shape) for value, shape in zip(values, shapes, strict=True)]
        self.mean, self.cov = mean.reshape(M, n), cov.reshape(M, n, n)
        full = (M, M, n, n)
        self.maps = maps.reshape(full) if self.mapped else torch.eye(n, dtype=mean.dtype).expand(full)
        self.spread = spread.reshape(full) if self.mapped else torch.zeros(full, dtype=mean.dtype)

    def at(self, t: int) -> list[torch.Tensor]:
        """transition, W, c, Q, H, d, R of step t."""
        return [value[t if len(value) > 1 else 0] for value in self.values]


def stopped(where: str, mode: int, modes: int) -> ArgumentError:
    """The error for a step that failed in a mode, or (`mode` = M) in all of them."""
    if mode == modes:
        return ArgumentError(
            f"{where} the observation has zero density in every mode that can be reached. "
            "Scale the data, or widen observation_noise."
        )
    return ArgumentError(
        f"{where} the innovation covariance H P H' + R of mode {mode} is not positive definite. Some "
        "combination of the observed components has no variance at all: give observation_noise "
        "(or process_noise) a positive one."
    )


def as_arrays(flat: tuple[torch.Tensor, ...], first: int) -> Parameters:
    """`Problem.flat` as arrays for the kernel."""
    return Parameters._make([*(np.ascontiguousarray(value.detach().numpy()) for value in flat), first])


def as_models(model: ModelParameters | Sequence[ModelParameters], what: str) -> list[ModelParameters]:
    """One model for all series, or one for each; refused unless they agree in all but their numbers."""
    if isinstance(model, ModelParameters):
        return [model]
    models = list(model)
    if not models or not all(isinstance(one, ModelParameters) for one in models):
        raise ArgumentError(f"{what}: pass a model, or a list of models, one for each series.")
    optional = ("dynamics_offset", "observation_offset", "dynamics_input", "observation_input")
    shapes = [
        (
            *(one.modes, one.states, one.outputs, one.start, one.is_torch),
            *(None if (value := getattr(one, name)) is None else value.shape[-1] for name in optional),
        )
        for one in models
    ]
    first = models[0]
    for k, one in enumerate(models):
        alike = all(
            (mine is None) == (other is None) and (mine is None or np.array_equal(plain(mine), plain(other)))
            for mine, other in ((one.maps, first.maps), (one.map_covariance, first.map_covariance))
        )
        if shapes[k] != shapes[0] or (one.diffuse != first.diffuse).any() or not alike:
            raise ArgumentError(
                f"{what}: model {k} differs from model 0 in modes, states, outputs, inputs, start, maps, "
                "kind, in which parameters it has, or in which states are diffuse. Models of one batch may "
                "differ in the numbers of their matrices alone."
            )
    return models


def prepare(
    model: ModelParameters | Sequence[ModelParameters],
    y: SeriesLike,
    inputs: SeriesLike | None,
    what: str,
    proper: bool = False,
) -> Problem:
    """Read data and inputs and make the problem; `what` is the caller, for messages.

    In place of one model there may be a list, one for each series. With `proper` diffuse states are refused.
    """
    models = as_models(model, what)
    if proper and models[0].diffuse.any():
        raise ArgumentError(
            f"{what}: the initial state is diffuse, and there is no law to draw it from. Give it a finite "
            "initial_covariance: a wide one, or the law after the first steps."
        )
    data = read(y, models[0].outputs, what=what, model_is_torch=models[0].is_torch)
    if len(models) == 1:
        return pose(models[0], data, read_inputs(models[0], data, inputs, what), what)
    if len(models) != data.series:
        raise ArgumentError(
            f"{what}: there are {len(models)} models and {data.series} series. "
            "Pass one model for each series."
        )
    u = read_inputs(models[0], data, inputs, what)
    own = [u[k : k + 1] if len(u) > 1 else u for k in range(len(models))]
    problems = [pose(one, data, rows, what) for one, rows in zip(models, own, strict=True)]
    columns = zip(*(problem.flat[:-2] for problem in problems), strict=True)
    flat = tuple(_joined(column) for column in columns)
    one = problems[0]
    return replace(one, given=(*flat, *one.flat[-2:]))


def _joined(values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One parameter of many models, stacked; if one varies in time, the others are repeated over time."""
    if values[0].ndim == 3:
        length = max(value.shape[1] for value in values)
        values = tuple(value.expand(-1, length, -1) for value in values)
    return torch.cat(values)


class _Kept:
    """A model's parameters in the form of the kernels, and other values that depend on the model alone."""

    __slots__ = ("begins_diffuse", "diffuse", "own", "parameters", "sizes", "steps", "written")

    def __init__(self, model: ModelParameters, written: tuple[bytes, bytes]) -> None:
        M, n, m = self.sizes = model.modes, model.states, model.outputs
        self.diffuse, self.steps, self.written = model.diffuse, model.steps, written

        def over_time(name: str) -> np.ndarray:
            value: np.ndarray = getattr(model, name)
            return value.reshape(1, len(value) if value.ndim > RANKS[name] else 1, -1)

        def offsets(name: str, size: int) -> np.ndarray:
            return np.zeros((1, 1, M * size)) if getattr(model, name) is None else over_time(name)

        maps = np.zeros(0) if model.maps is None else model.maps.reshape(-1)
        spread = np.zeros_like(maps) if model.map_covariance is None else model.map_covariance.reshape(-1)
        covariance = model.initial_covariance
        self.begins_diffuse = bool(self.diffuse.any())
        if self.begins_diffuse:
            covariance = np.where(np.isinf(covariance), 0.0, covariance)
        with np.errstate(divide="ignore"):
            log_probability = np.log(model.initial_probability)
        values = (
            over_time("transition"),
            over_time("dynamics"),
            offsets("dynamics_offset", n),
            over_time("process_noise"),
            over_time("observation"),
            offsets("observation_offset", m),
            over_time("observation_noise"),
            model.initial_mean.reshape(1, -1),
            covariance.reshape(1, -1),
            log_probability.reshape(1, -1),
            maps,
            spread,
        )
        contiguous: list[Any] = [np.ascontiguousarray(value) for value in values]
        self.parameters = KeptParameters._make([*contiguous, int(model.start == "first")])
        given = (getattr(model, name) for name in (*RANKS, "maps", "map_covariance"))
        self.own = all(value is None or value.flags.c_contiguous for value in given)


_kept: WeakKeyDictionary[ModelParameters, _Kept] = WeakKeyDictionary()


def kept_parameters(model: ModelParameters) -> _Kept | None:
    """Kernel parameters of a model of plain arrays without inputs; None for other models.

    The kept arrays share memory with the model's, so writing into these takes effect; the two that are
    converted, probability and covariance of the initial law, are compared at every call.
    """
    found = _kept.get(model)
    if found is None:
        given = [getattr(model, name) for name in (*RANKS, "maps", "map_covariance")]
        if any(isinstance(value, torch.Tensor) for value in given):
            return None
        if model.dynamics_input is not None or model.observation_input is not None:
            return None
    written = model.initial_probability.tobytes(), model.initial_covariance.tobytes()
    if found is None or found.written != written:
        found = _Kept(model, written)
        if found.own:
            _kept[model] = found
    return found


def pose(model: ModelParameters, data: Data, inputs: torch.Tensor, what: str) -> Problem:
    """The problem for data and inputs that are already read; a fit calls this at every step."""
    kept = kept_parameters(model)
    steps = model.steps if kept is None else kept.steps
    if steps is not None and data.lengths.max() > steps:
        raise ArgumentError(
            f"{what}: the model's parameters cover {steps} steps, the data have {data.lengths.max()}. "
            "Give parameters for every step."
        )
    if kept is not None:
        p = kept.parameters
        return Problem(data, p.first, kept.sizes, kept.diffuse, kept.begins_diffuse, p)
    M, n, m = model.modes, model.states, model.outputs
    maps = as_double(np.zeros(0) if model.maps is None else model.maps).reshape(-1)
    spread = (
        torch.zeros_like(maps)
        if model.map_covariance is None
        else as_double(model.map_covariance).reshape(-1)
    )
    covariance, diffuse = as_double(model.initial_covariance), model.diffuse
    if diffuse.any():
        covariance = torch.where(torch.isinf(covariance), 0.0, covariance)
    flat = (
        timed(model, "transition"),
        timed(model, "dynamics"),
        offset(model, "dynamics", n, inputs, what),
        timed(model, "process_noise"),
        timed(model, "observation"),
        offset(model, "observation", m, inputs, what),
        timed(model, "observation_noise"),
        as_double(model.initial_mean).reshape(1, -1),
        covariance.reshape(1, -1),
        safe_log(as_double(model.initial_probability)).reshape(1, -1),
        maps,
        spread,
    )
    return Problem(data, int(model.start == "first"), (M, n, m), diffuse, bool(diffuse.any()), flat)


def timed(model: ModelParameters, name: str) -> torch.Tensor:
    """A parameter as ``(1, L, ...)``, flattened; L is 1 or the number of steps."""
    value = as_double(getattr(model, name))
    return value.reshape(1, value.shape[0] if value.ndim == RANKS[name] + 1 else 1, -1)


def offset(model: ModelParameters, name: str, size: int, inputs: torch.Tensor, what: str) -> torch.Tensor:
    """An offset with the effect of the inputs ``(C, T, r)`` added, ``(C, L, M·size)``."""
    base, matrix = getattr(model, f"{name}_offset"), getattr(model, f"{name}_input")
    value = (
        as_double(np.zeros((1, 1, model.modes * size))) if base is None else timed(model, f"{name}_offset")
    )
    if matrix is None:
        return value
    weight, steps = as_double(matrix), inputs.shape[1]
    if weight.ndim == 4 and steps > len(weight):
        raise ArgumentError(f"{what}: input matrices cover {len(weight)} steps, the inputs {steps}.")
    weight = weight[:steps] if weight.ndim == 4 else weight[None]
    effect = torch.einsum("tjkr,btr->btjk", weight.expand(steps, -1, -1, -1), inputs)
    return value[:, :steps] + effect.reshape(len(inputs), steps, -1)


def as_double(value: Array) -> torch.Tensor:
    """A float64 tensor on the CPU, its graph kept."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    return tensor.to(device="cpu", dtype=torch.float64)


_NO_INPUTS = torch.zeros(1, 1, 0, dtype=torch.float64)


def read_inputs(model: ModelParameters, data: Data, inputs: SeriesLike | None, what: str) -> torch.Tensor:
    """Inputs of a model as `inputs_of` gives them."""
    wanted = [value for value in (model.dynamics_input, model.observation_input) if value is not None]
    words = "the model has neither dynamics_input nor observation_input", "the model has input matrices"
    return inputs_of(int(wanted[0].shape[-1]) if wanted else 0, data, inputs, what, words)


def inputs_of(
    r: int, data: Data, inputs: SeriesLike | None, what: str, words: tuple[str, str]
) -> torch.Tensor:
    """Inputs as (1 or B, T, r), padded with zeros where series are shorter.

    `words` say why there should be none, and why there should be some.
    """
    if not r:
        if inputs is not None:
            raise ArgumentError(f"{what}: inputs are given, but {words[0]}. Give it one, or no inputs.")
        return _NO_INPUTS
    if inputs is None:
        raise ArgumentError(f"{what}: {words[1]} but no inputs were given. Pass inputs=(T, {r}).")
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


def input_rows(inputs: torch.Tensor, data: Data) -> np.ndarray:
    """Inputs (1 or B, T, r) row by row as the data, ``(rows, r)``."""
    u = plain(inputs)
    if not u.shape[-1]:
        return np.zeros((len(data.rows), 0))
    return np.concatenate([u[b if len(u) > 1 else 0, :length] for b, length in enumerate(data.lengths)])
