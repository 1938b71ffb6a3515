"""The part that all states of one online filter share; the states themselves are in `state.py`."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from ...._support import native
from ...._support.checks import number, whole
from ...._support.errors import ArgumentError
from ...._support.threads import run_kernel
from ...arrays import METHODS, KeptParameters, address
from ...checks import plain
from ...parameters import RANKS, ModelParameters
from ...series import Data, SeriesLike
from ..forecast import Forecast, forecast
from ..moments import mixture, unknown
from ..problem import as_models, prepare

MANY = 1000  # least number of batch members for each thread
INPUTS = ("dynamics_input", "observation_input")


class Plan:
    """Shared part of an online filter's states: method, sizes, the layout of a row, and how to step.

    `NonlinearPlan` is the plan of modes that are functions, with its own kernel and frame. Every frame has
    the fields that csrc/switching/switching.hpp calls ONLINE_FIELDS.
    """

    kind = "linear"
    kernel = "step_gaussian_rows"
    constant: np.ndarray | None
    clock: Callable[[float], ModelParameters] | None = None
    first: bool
    r: int

    def _size(self, method: str, batch: int | None, M: int, n: int, m: int) -> None:
        """Set the attributes that follow from sizes and method."""
        if method not in METHODS:
            raise ArgumentError(f"online: method is {method!r}. Pass one of {[*METHODS]}.")
        self.method, self.batch, self.M, self.n, self.m = method, batch, M, n, m
        self.members = 1 if batch is None else whole("online", "batch", batch, otherwise=", or None")
        law, laws = n + n * n, M * M if method == "gpb2" else M
        marks = np.cumsum([0, M * law, M, 2, laws * law, M * M, M]).tolist()
        self.law, self.length = law, marks[-1]
        names = ("laws", "log_mode", "term", "ahead", "score", "prior")
        self.part = {name: slice(a, b) for name, a, b in zip(names, marks, marks[1:], strict=False)}
        self.shape = (m,) if batch is None else (batch, m)
        self.end = self.members * self.length
        self.room = self.end + self.members * m
        self._frames = list[tuple[Any, ...]]()  # unused frames; each thread takes one
        self._function = native.function(self.kernel)

    def __init__(
        self,
        models: Sequence[ModelParameters],
        method: str,
        batch: int | None,
        clock: Callable[[float], ModelParameters] | None = None,
    ) -> None:
        self.models = as_models(list(models), "online")
        first = self.models[0]
        self._size(method, batch, first.modes, first.states, first.outputs)
        if len(self.models) not in (1, self.members):
            raise ArgumentError(f"online: batch is {batch}, models are {len(self.models)}. Pass one of each.")
        self.torch, self.first = first.is_torch, first.start == "first"
        self.steps = min((one.steps for one in self.models if one.steps is not None), default=None)
        self.takes = [name for name in INPUTS if getattr(first, name) is not None]
        self.r = first.dynamics_input.shape[-1] if "dynamics_input" in self.takes else 0
        self.r = self.r or (first.observation_input.shape[-1] if self.takes else 0)
        blank = np.full((len(self.models), 1, self.m), np.nan)
        quiet = [one._replaced(dynamics_input=None, observation_input=None) for one in self.models]
        problem = prepare(quiet, blank, None, "online")
        if problem.wants_grad:
            raise ArgumentError(
                "online: online steps have no derivative, and a parameter requires one. Use filter, or begin "
                "under torch.no_grad()."
            )
        self.p, self.diffuse = KeptParameters(*problem.parameters), problem.diffuse
        self.clock, self._at = clock, dict[float, Plan]()
        if clock is not None and (self.diffuse.any() or self.steps is not None):
            raise ArgumentError(
                "online: with a clock the initial law must be proper, and no parameter may vary by step. "
                "Give initial_covariance finite numbers."
            )
        M, n, sensor = self.M, self.n, self.m * self.n + self.m + self.m**2
        move = 3 * n * n + n
        self.width = 2 * M * M + M * (move + sensor) + len(self.p.maps) // (n * n) * move
        self.constant = None if self.takes or self.steps is not None else self.matrices(0, None)

    def at(self, before: float | None, time: float | None) -> "Plan":
        """The plan of a step from time `before` to `time`; plans of the last few step lengths are cached."""
        if self.clock is None or before is None:
            raise ArgumentError(f"online: time is {time}, and the state has no clock. Pass clock= to online.")
        if time is None:
            raise ArgumentError("online: the state has a clock. Pass time=, when this was seen.")
        if number("online", "time", time) < before:
            raise ArgumentError(
                f"online: time is {time}, the last step was at {before}: an observation out of sequence. "
                "Pass observations in order of time, or go on from an earlier state."
            )
        return self.lasting(time - before)

    def lasting(self, length: float) -> "Plan":
        """The plan of steps of this length."""
        if length not in self._at:
            assert self.clock is not None
            model = self.clock(length)
            sizes = (self.M, self.n, self.m)
            if not isinstance(model, ModelParameters) or (model.modes, model.states, model.outputs) != sizes:
                raise ArgumentError(
                    f"online: clock({length}) gave {model!r:.100}. Return a model with {self.M} modes, "
                    f"{self.n} states and {self.m} outputs."
                )
            if len(self._at) > 100:
                self._at.clear()
            self._at[length] = Plan([model], self.method, self.batch)
        return self._at[length]

    def step_matrices(self, t: int, inputs: ArrayLike | None) -> np.ndarray:
        """The matrices of step t, cached if they do not depend on the step."""
        return self.constant if inputs is None and self.constant is not None else self.matrices(t, inputs)

    def forecast(
        self,
        rows: np.ndarray,
        data: Data,
        steps: int,
        inputs: SeriesLike | None,
        level: float,
        every: float | None,
    ) -> Forecast:
        """Forecast from the laws in `rows`."""
        M, n, laws = self.M, self.n, rows[:, self.part["laws"]].reshape(len(rows), self.M, self.law)
        law = rows[:, self.part["log_mode"]], laws[..., :n], laws[..., n:].reshape(-1, M, n, n)
        every = None if every is None else number("online", "every", every, least=0.0)
        models = self.models if every is None else self.lasting(every).models
        return forecast(models, data, law, steps, inputs, level)

    def frame(self) -> Any:
        """A frame for the kernel, with the fields that are the same at every step."""
        made = native.frame("GaussianRows")()
        made.states, made.outputs, made.mapped = self.n, self.m, len(self.p.maps) > 0
        return made

    def advance(
        self, matrices: np.ndarray, before: int, y: np.ndarray | None, ahead: bool, begun: bool
    ) -> tuple[np.ndarray, int, int]:
        """Rows one step after those at address `before`, their address, and where the step failed (or −1).

        The array holds the rows up to `end`, then the observations.

        Args:
            matrices: those of the step, ``(members or 1, ...)``.
            before: the address of the rows.
            y: the observation as `read` returns it; None to predict without an update.
            ahead: whether to predict.
            begun: whether the initial law is itself the prediction.
        """
        members, update = self.members, y is not None
        try:
            frame, place, fixed, known = self._frames.pop()
        except IndexError:
            frame = self.frame()
            frame.modes, frame.method, frame.members, frame.failed = self.M, METHODS[self.method], members, -1
            place, fixed, known = ctypes.addressof(frame), None, None
        task = ahead, begun, update
        if fixed is not matrices or known != task:
            frame.matrices, frame.predict, frame.begun, frame.update = address(matrices), ahead, begun, update
            frame.matrices_step = matrices.shape[1] if len(matrices) > 1 else 0
        numbers, end = np.empty(self.room), self.end
        after = address(numbers)
        frame.next, frame.before, frame.after = 0, before, after
        if y is not None:
            numbers[end:] = y.ravel()
            frame.y = after + 8 * end
        if members < 2 * MANY:
            if self._function(place) == native.OUT_OF_MEMORY:
                raise native.no_memory(self.kernel)
        else:
            run_kernel(self.kernel, frame, min(torch.get_num_threads(), members // MANY))
        failed: int = frame.failed
        if failed < 0:  # a frame is not reused after a failure
            self._frames.append((frame, place, matrices, task))
        return numbers, after, failed

    def judge(self, state: Any, y: np.ndarray) -> tuple[int, tuple[np.ndarray, ...]]:
        """Failure (−1 if none); innovations, covariances, distances, log-densities of y ``(B, K, m)``."""
        (B, K, m), M, matrices = y.shape, self.M, state._matrices
        out = np.empty((B, K, M, m)), np.empty((B, M, m, m)), np.empty((B, K, M)), np.empty((B, K, M))
        frame = native.frame("Candidates")()
        frame.modes, frame.states, frame.outputs, frame.method = M, self.n, m, METHODS[self.method]
        frame.members, frame.candidates, frame.failed = B, K, -1
        frame.matrices, frame.matrices_step = address(matrices), matrices.shape[1] if len(matrices) > 1 else 0
        frame.rows, frame.y = address(state._rows), address(y)
        frame.innovation, frame.covariance, frame.distance, frame.log_density = map(address, out)
        native.call("judge_candidates", frame)
        return frame.failed, out

    def covariance(self, laws: np.ndarray) -> np.ndarray:
        """Covariances of laws ``(..., law)``."""
        return laws[..., self.n :].reshape(*laws.shape[:-1], self.n, self.n)

    def mixture(self, weight: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moments over the axis of the weights."""
        with np.errstate(invalid="ignore"):
            mean, cov = mixture(weight, mean, cov)
        return mean, unknown(cov)

    def stored(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The models as `save` writes them: arrays by name, and other settings."""
        kept = {}
        for k, one in enumerate(self.models):
            for field in fields(one):
                if field.name != "start" and getattr(one, field.name) is not None:
                    kept[f"model.{k}.{field.name}"] = plain(getattr(one, field.name))
        about = {"start": self.models[0].start, "models": len(self.models), "torch": self.torch}
        about["clock"] = self.clock is not None
        return kept, about

    @classmethod
    def restored(cls, kept: Mapping[str, np.ndarray], about: Mapping[str, Any], model: Any) -> "Plan":
        """The plan of models that `stored` has written."""
        if about.get("clock", False) is not callable(model):
            raise ArgumentError(
                "OnlineState.load: the file already contains its models. Leave model out."
                if model is not None
                else "OnlineState.load: the state has a clock, which is not in the file. Pass it as model=."
            )
        models = []
        for k in range(about["models"]):
            lead = f"model.{k}."
            values: dict[str, Any] = {n[len(lead) :]: x for n, x in kept.items() if n.startswith(lead)}
            if about["torch"]:
                values = {name: torch.from_numpy(value) for name, value in values.items()}
            models.append(ModelParameters(**values, start=about["start"]))
        return cls(models, about["method"], about["batch"], model)

    @cached_property
    def input_matrices(self) -> list[np.ndarray]:
        """Input matrices by name, ``(C, L, M·size, r)``."""
        out = []
        for name in self.takes:
            values = [plain(getattr(one, name)) for one in self.models]
            values = [value if value.ndim == RANKS[name] + 1 else value[None] for value in values]
            out.append(np.stack([value.reshape(len(value), -1, self.r) for value in values]))
        return out

    def matrices(self, t: int, inputs: ArrayLike | None) -> np.ndarray:
        """The matrices of step t, in rows with the layout of `Matrices` in csrc/switching/series.hpp."""
        if self.steps is not None and t >= self.steps:
            raise ArgumentError(
                f"online: the model's parameters cover {self.steps} steps, and this is step {t + 1}. "
                "Give parameters for every step."
            )
        run, changes = type(self.p.frame).from_buffer_copy(self.p.frame), list[np.ndarray]()
        if self.takes:
            u = self.inputs(inputs)
            for name, weight in zip(self.takes, self.input_matrices, strict=True):
                name = name.replace("input", "offset")
                base = getattr(self.p, name)
                now = weight[:, t if weight.shape[1] > 1 else 0]
                effect = (now @ u[..., None])[..., 0]
                changes.append(np.ascontiguousarray(base[:, t if base.shape[1] > 1 else 0] + effect))
                setattr(run, name, address(changes[-1]))
                setattr(run, f"{name}_step", 0)
                setattr(run, f"{name}_series", changes[-1].shape[1] if len(changes[-1]) > 1 else 0)
        elif inputs is not None:
            raise ArgumentError("online: the model has no input matrices. Give it one, or no inputs.")
        out = np.empty((max(len(value) for value in (*self.p[:7], *changes)), self.width))
        pack = native.frame("Pack")()
        pack.run, pack.step, pack.rows, pack.out = ctypes.addressof(run), t, len(out), address(out)
        native.call("pack_matrices", pack)
        return out

    def inputs(self, given: ArrayLike | None) -> np.ndarray:
        """The inputs of a step, ``(members or 1, r)``."""
        u = None if given is None else np.asarray(given, dtype=np.float64)
        if u is None or u.shape not in ((self.r,), (self.members, self.r)) or not np.isfinite(u).all():
            got = "none" if u is None else f"{u.shape}"
            raise ArgumentError(f"online: inputs are {got}. Pass ({self.r},) finite numbers at each step.")
        return u.reshape(-1, self.r)

    def read(self, y: ArrayLike | None) -> np.ndarray:
        """An observation, ``(m,)``, or one of each member of a batch, ``(B, m)``."""
        if y is None:
            return np.full(self.shape, np.nan)
        try:
            row = np.asarray(y, np.float64)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise ArgumentError(
                f"online: y cannot be read ({problem}). Pass real numbers, without a derivative."
            ) from None
        if row.shape == self.shape:
            return row
        if self.m != 1 or row.shape != self.shape[:-1]:
            raise ArgumentError(
                f"online: y has shape {row.shape}. Pass {self.shape}, NaN where something is missing."
            )
        return row.reshape(self.shape)

    def rows(self, log_mode: np.ndarray, mean: np.ndarray, cov: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Rows with the given laws."""
        out = np.zeros((self.members, self.length))
        laws = np.concatenate([mean, cov.reshape(*cov.shape[:2], -1)], -1)
        out[:, self.part["laws"]] = laws.reshape(len(laws), -1)
        out[:, self.part["log_mode"]] = log_mode
        out[:, self.part["term"].start + 1] = total
        return out
