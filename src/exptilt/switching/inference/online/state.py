"""A filter that takes one observation at a time, and may be saved between two of them.

`OnlineState` holds one row of numbers for each member of a batch (layout: csrc/switching/switching.hpp), the
matrices of the step, and the number of steps; `plan.py` does the step. A step makes a new state and leaves
the old one unchanged, so several continuations may be tried from one state. While something is diffuse, all
observations are kept and filtered again; after that a step is one call of a compiled kernel.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from ...._support.checks import number
from ...._support.errors import ArgumentError, MissingExtraError
from ...._support.files import draft
from ...arrays import address
from ...checks import plain
from ...parameters import ModelParameters
from ...series import Values, read
from ..filter import filter_series
from ..forecast import Forecast
from ..gaussian_laws import GaussianLaws
from ..problem import stopped
from ..results import Filtered
from .plan import Plan

_FORMAT = "exptilt.switching.OnlineState 1"


class Innovations(NamedTuple):
    """Innovations of candidate observations in each mode; leading axes are those of the observations.

    Attributes:
        innovation: y minus its prediction, ``(..., M, m)``, NaN where y is missing.
        covariance: of the innovation, ``(..., M, m, m)``, the same for all candidates of a member.
        distance: e' S⁻¹ e, ``(..., M)``, the squared Mahalanobis distance. A gate compares it with a quantile
            of χ² with as many degrees of freedom as components were seen.
        log_likelihood: log p(y | mode, the past), ``(..., M)``.
    """

    innovation: Values
    covariance: Values
    distance: Values
    log_likelihood: Values


def _known(take: Callable[[Any], np.ndarray], doc: str) -> Any:
    """A property computed from the current log probabilities and moments by mode."""
    return property(lambda self: self._one(take(self._laws())), doc=doc)


def _over_modes(which: int, doc: str) -> Any:
    """A property made of the moments over modes."""

    def value(self: "OnlineState") -> Values:
        log_mode, mean, cov = self._laws()
        return self._one(self._plan.mixture(np.exp(log_mode), mean, cov)[which])

    return property(value, doc=doc)


class OnlineState:
    """State of a filter that is fed one observation at a time.

    Made by `online` of a model, or by `OnlineState.begin` for a list of models. States are not
    changed: each step gives a new one. After `predict` the moments below are those before the next
    observation; after `update` or `step`, those given it. With a batch of B they have a leading axis B.
    """

    __slots__ = ("_history", "_matrices", "_numbers", "_place", "_plan", "_predicted", "_seen", "t", "time")
    t: int
    time: float | None  # of the last step, where there is a clock
    _plan: Plan
    _numbers: np.ndarray  # rows and, if `_seen`, the last observation
    _place: int
    _predicted: bool
    _seen: bool
    _matrices: np.ndarray | None
    _history: tuple[Any, ...] | None

    def __init__(self) -> None:
        raise ArgumentError(
            "OnlineState cannot be constructed directly. Call model.online() or OnlineState.begin(model)."
        )

    @classmethod
    def begin(
        cls,
        model: ModelParameters | Sequence[ModelParameters],
        *,
        method: str = "imm",
        batch: int | None = None,
        clock: Callable[[float], ModelParameters] | None = None,
        time: float = 0.0,
    ) -> "OnlineState":
        """The state before the first observation.

        Args:
            model: a model, or a list of models of the same sizes, one for each member of a batch.
            method: "imm", "gpb2" or "gpb1".
            batch: how many members; None for one, whose results have no batch axis.
            clock: function from the time since the last step to the model of a step of that length; steps
                then take `time=`.
            time: time of the initial law, with a clock.
        """
        if not isinstance(model, (ModelParameters, list, tuple)):
            raise ArgumentError(
                f"online: got {type(model).__name__}. Pass a list of models, or call its online."
            )
        models = [model] if isinstance(model, ModelParameters) else list(model)
        plan = Plan(models, method, batch if isinstance(model, ModelParameters) else len(models), clock)
        p, M, n = plan.p, plan.M, plan.n
        cov = np.where(np.diag(plan.diffuse), np.inf, p.initial_covariance.reshape(-1, M, n, n))
        rows = plan.rows(p.initial_log_probability, p.initial_mean.reshape(-1, M, n), cov, np.zeros(1))
        begun = None if clock is None else number("online", "time", time)
        return _state(plan, rows, 0, history=() if plan.diffuse.any() else None, time=begun)

    @classmethod
    def after(cls, post: Any) -> "OnlineState":
        """The state after the last step of a filter, to continue where the data end.

        Args:
            post: a result of `filter` by "imm", "gpb2" or "gpb1".
        """
        law: Any = post._law if isinstance(post, Filtered) else None
        if hasattr(law, "online"):
            own: OnlineState = law.online(post)
            return own
        if not isinstance(law, GaussianLaws):
            raise ArgumentError(
                f"online: got {type(post).__name__}. Pass what `filter` of linear or nonlinear modes gave."
            )
        data = post.data
        plan = Plan(law.models, post.method, None if data.layout == "single" else data.series)
        if (plan.steps is not None or plan.first) and len(set(data.lengths.tolist())) > 1:
            raise ArgumentError(
                "online: the series end at different steps, and the model depends on the step. "
                "Continue each series by itself."
            )
        if not np.isfinite(post._end[2]).all():
            raise ArgumentError(
                "online: the series ends while a state is diffuse. Begin with model.online()."
            )
        log_mode, mean, cov = post._end
        rows = plan.rows(log_mode, mean, cov, plain(law.total))
        return _state(plan, rows, int(data.lengths.max()))

    def __repr__(self) -> str:
        said = "predicted" if self._predicted else "updated"
        return f"OnlineState({self._plan.method}, t={self.t}, {said}, batch={self._plan.batch})"

    def step(
        self, y: ArrayLike | None, *, inputs: ArrayLike | None = None, time: float | None = None
    ) -> "OnlineState":
        """The state one step later, given the observation there: `predict`, then `update`.

        Args:
            y: ``(m,)``, or ``(B, m)`` for a batch; NaN, or None for all, where nothing was seen.
            inputs: ``(r,)`` or ``(B, r)`` where the model has input matrices.
            time: time of the observation, with a clock; not before the last step.
        """
        if self._history is not None and time is None:
            return self._diffuse_step(y, inputs)
        return self._go(self._plan.read(y), True, inputs, time)

    def predict(self, *, inputs: ArrayLike | None = None, time: float | None = None) -> "OnlineState":
        """The state before the next observation; calling it twice skips an observation.

        Args:
            inputs: ``(r,)`` or ``(B, r)`` where the model has input matrices.
            time: time of the observation, with a clock; not before the last step.
        """
        self._check_known()
        return self._go(None, True, inputs, time)

    def forecast(
        self, steps: int, *, inputs: ArrayLike | None = None, level: float = 0.9, every: float | None = None
    ) -> Forecast:
        """Forecast of the next observations: means, intervals and mode probabilities, as of `filter`.

        Args:
            steps: how many.
            inputs: ``(steps, r)``, or ``(B, steps, r)`` for a batch, where the model has input matrices.
            level: of the intervals.
            every: the time from step to step, where there is a clock.
        """
        self._check_known()
        plan = self._plan
        if self.t == 0 and plan.first:
            raise ArgumentError("online: nothing was seen yet, so nothing can be forecast. Call step first.")
        if (every is None) is not (plan.clock is None):
            raise ArgumentError(
                f"online: every is {every!r}, and the state has {'no' if plan.clock is None else 'a'} clock. "
                "Pass the time between steps with a clock, and none without."
            )
        now = self._go(plan.read(None), False, None) if self._predicted else self
        blank = np.zeros((plan.members, 1, plan.m))
        data = read(torch.from_numpy(blank) if plan.torch else blank, plan.m)
        layout = "single" if plan.batch is None else data.layout
        data = replace(data, starts=np.arange(plan.members + 1) * now.t, layout=layout)
        return plan.forecast(now._rows, data, steps, inputs, level, every)

    def _check_known(self) -> None:
        if self._history is not None:
            raise ArgumentError(
                "online: a state is still diffuse, so nothing can be predicted. Call step until it is seen."
            )

    def update(self, y: ArrayLike | None) -> "OnlineState":
        """The predicted state, updated by an observation.

        Args:
            y: ``(m,)``, or ``(B, m)`` for a batch; NaN, or None for all, where nothing was seen.
        """
        if not self._predicted:
            raise ArgumentError("online: update without a prediction. Call predict first, or step.")
        return self._go(self._plan.read(y), False, None)

    def _go(
        self, y: np.ndarray | None, ahead: bool, inputs: ArrayLike | None, time: float | None = None
    ) -> "OnlineState":
        plan, t, matrices, before = self._plan, self.t, self._matrices, self
        begun = False
        if ahead:
            if self._predicted:  # nothing was seen at that step
                before = self._go(plan.read(None), False, None)
            begun = t == 0 and plan.first
            if plan.clock is not None or time is not None:
                matrices = plan.at(self.time, time).step_matrices(0, inputs)
            else:
                matrices = plan.step_matrices(t, inputs)
            t += 1
        else:
            time = self.time
        assert matrices is not None
        numbers, place, bad = plan.advance(matrices, before._place, y, ahead, begun)
        if bad >= 0:
            raise _failure(plan, bad, t, np.empty(0) if y is None else y)
        made = object.__new__(OnlineState)
        made._plan, made._numbers, made._place, made.t, made.time = plan, numbers, place, t, time
        made._predicted, made._seen, made._matrices, made._history = y is None, y is not None, matrices, None
        return made

    @property
    def _rows(self) -> np.ndarray:
        return self._numbers[: self._plan.end].reshape(self._plan.members, -1)

    @property
    def _y(self) -> np.ndarray | None:
        return self._numbers[self._plan.end :].reshape(self._plan.shape) if self._seen else None

    def _diffuse_step(self, y: ArrayLike | None, inputs: ArrayLike | None) -> "OnlineState":
        """The next state, by filtering all observations again: only a few first steps are diffuse."""
        plan, history = self._plan, (*(self._history or ()), (self._plan.read(y).copy(), inputs))
        data = np.stack([row.reshape(plan.members, plan.m) for row, _ in history], 1)
        u = None
        if plan.takes:
            u = np.stack([np.broadcast_to(plain(one), (plan.members, plan.r)) for _, one in history], 1)
        model: Any = plan.models if len(plan.models) > 1 else plan.models[0]
        post = filter_series(model, data, method=plan.method, inputs=u)
        rows = plan.rows(*post._end, plain(post._law.total))
        left = None if np.isfinite(post._end[2]).all() else history
        rows[:, plan.part["term"].start] = plain(post._law.terms)[post.data.starts[1:] - 1]
        return _state(plan, rows, self.t + 1, history=left)

    def innovations(self, y: ArrayLike | None = None) -> Innovations:
        """Innovations of observations under the prediction of each mode, to gate and associate them.

        Args:
            y: candidates, ``(..., m)``, for a batch ``(B, ..., m)``; None for the one of the last update.
        """
        plan = self._plan
        if self._matrices is None:
            raise ArgumentError("online: there is no prediction yet. Call predict (or step) first.")
        if y is None and self._y is None:
            raise ArgumentError("online: nothing was seen since the prediction. Pass candidates y.")
        lead = () if plan.batch is None else (plan.batch,)
        z = np.asarray(self._y if y is None else y, dtype=np.float64)
        if z.ndim < 1 + len(lead) or z.shape[-1] != plan.m or z.shape[: len(lead)] != lead:
            raise ArgumentError(f"online: candidates have shape {z.shape}. Pass {(*lead, '...', plan.m)}.")
        flat = np.ascontiguousarray(z.reshape(plan.members, -1, plan.m))
        bad, (e, S, distance, density) = plan.judge(self, flat)
        if bad >= 0:
            raise _failure(plan, bad, self.t, flat)
        S = np.broadcast_to(S[:, None], (*e.shape, plan.m))
        shape = z.shape[:-1]
        return Innovations(
            *(self._shown(value.reshape(*shape, *value.shape[2:])) for value in (e, S, distance, density))
        )

    def _shown(self, value: np.ndarray) -> Values:
        return torch.from_numpy(np.ascontiguousarray(value)) if self._plan.torch else value

    def _one(self, value: np.ndarray) -> Values:
        return self._shown(value[0] if self._plan.batch is None else value)

    def _laws(self, predicted: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log probabilities and moments by mode of the current law, or of the last prediction."""
        plan, rows = self._plan, self._rows
        M, n, B = plan.M, plan.n, plan.members
        if not (predicted or self._predicted):
            laws, log_mode = rows[:, plan.part["laws"]], rows[:, plan.part["log_mode"]]
        else:
            laws, log_mode = rows[:, plan.part["ahead"]], rows[:, plan.part["prior"]]
        laws = laws.reshape(B, -1, plan.law)
        mean, cov = laws[..., :n], plan.covariance(laws)
        if mean.shape[1] > M:
            score = rows[:, plan.part["score"]].reshape(B, M, M).swapaxes(1, 2)
            with np.errstate(invalid="ignore"):
                weight = np.exp(score - log_mode[..., None])
            weight = np.where(np.isnan(weight), 1.0 / M, weight)
            mean, cov = plan.mixture(weight, mean.reshape(B, M, M, n), cov.reshape(B, M, M, n, n))
        return log_mode, mean, cov

    @property
    def laws_updated(self) -> int:
        """Number of predicted laws that one observation updates: M, with GPB2 M²."""
        ahead = self._plan.part["ahead"]
        return int(ahead.stop - ahead.start) // self._plan.law

    @property
    def log_likelihood(self) -> Values:
        """log p of all observations so far, a number or ``(B,)``."""
        return self._one(self._rows[:, self._plan.part["term"].start + 1])

    @property
    def log_likelihood_term(self) -> Values:
        """log p of the last observation given those before, a number or ``(B,)``."""
        return self._one(self._rows[:, self._plan.part["term"].start])

    log_mode_probability = _known(lambda law: law[0], "log P(mode), ``(M,)`` or ``(B, M)``.")
    mode_probability = _known(lambda law: np.exp(law[0]), "P(mode), ``(M,)`` or ``(B, M)``.")
    mode_mean = _known(lambda law: law[1], "Mean of the state in each mode, ``(M, n)`` or ``(B, M, n)``.")
    mode_covariance = _known(
        lambda law: law[2], "Covariance of the state in each mode, ``(M, n, n)`` or ``(B, M, n, n)``."
    )
    mean = _over_modes(0, "Mean of the state over modes, ``(n,)`` or ``(B, n)``.")
    covariance = _over_modes(1, "Covariance of the state over modes, ``(n, n)`` or ``(B, n, n)``.")

    def save(self, path: str | PathLike[str]) -> None:
        """Write state and models to one safetensors file; a failure leaves an existing file as it was.

        Functions of modes cannot be written: `load` then takes the model.

        Args:
            path: the file; an existing one is replaced in one move.
        """
        plan = self._plan
        kept, about = plan.stored()
        kept["rows"] = self._rows
        if self._matrices is not None:
            kept["matrices"] = self._matrices
        if self._y is not None:
            kept["y"] = self._y
        for k, (row, inputs) in enumerate(self._history or ()):
            kept[f"history.{k}"] = row
            if inputs is not None:
                kept[f"history_inputs.{k}"] = plain(inputs)
        about |= {
            "kind": plan.kind,
            "method": plan.method,
            "batch": plan.batch,
            "t": self.t,
            "time": self.time,
            "predicted": self._predicted,
            "history": None if self._history is None else len(self._history),
        }
        whole = {name: np.ascontiguousarray(value) for name, value in kept.items()}
        text = _safetensors().numpy.save(whole, {"format": _FORMAT, "about": json.dumps(about)})
        with draft(Path(path)) as place:
            place.write_bytes(text)

    @classmethod
    def load(cls, path: str | PathLike[str], model: Any = None) -> "OnlineState":
        """The state that `save` wrote, with its models.

        Args:
            path: the file.
            model: the `SwitchingNonlinear` or the clock of the saved state, which the file cannot hold.
        """
        library = _safetensors()
        if not Path(path).is_file():
            raise ArgumentError(f"OnlineState.load: there is no file {path}.")
        try:
            with library.safe_open(str(path), framework="numpy") as opened:
                said = opened.metadata() or {}
                if said.get("format") != _FORMAT:
                    raise ArgumentError(f"OnlineState.load: {path} was not written by OnlineState.save.")
                kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except library.SafetensorError as problem:
            got = f"{path} is not a whole safetensors file ({problem})"
            raise ArgumentError(
                f"OnlineState.load: {got}. The file is truncated, or is not an online state."
            ) from None
        about = json.loads(said["about"])
        if about.get("kind", "linear") == "linear":
            plan = Plan.restored(kept, about, model)
        elif hasattr(model, "_restored"):
            plan = model._restored(kept, about)
        else:
            raise ArgumentError(
                "OnlineState.load: the modes of this state are functions, which are not in the file. Pass "
                "model=, the SwitchingNonlinear it was saved from."
            )
        rows = range(about["history"] or 0)
        history = tuple((kept[f"history.{k}"], kept.get(f"history_inputs.{k}")) for k in rows)
        return _state(
            plan,
            kept["rows"],
            about["t"],
            predicted=about["predicted"],
            matrices=kept.get("matrices"),
            y=kept.get("y"),
            history=None if about["history"] is None else history,
            time=about.get("time"),
        )


def _state(
    plan: Plan,
    rows: np.ndarray,
    t: int,
    predicted: bool = False,
    matrices: np.ndarray | None = None,
    y: np.ndarray | None = None,
    history: tuple[Any, ...] | None = None,
    time: float | None = None,
) -> OnlineState:
    made = object.__new__(OnlineState)
    numbers = np.full(plan.room, np.nan)
    numbers[: plan.end] = rows.ravel()
    if y is not None:
        numbers[plan.end :] = y.ravel()
    made._plan, made._numbers, made._place, made.t, made.time = plan, numbers, address(numbers), t, time
    made._predicted, made._seen, made._matrices, made._history = predicted, y is not None, matrices, history
    return made


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as problem:
        raise MissingExtraError("safetensors", "memory") from problem
    return safetensors


def _failure(plan: Plan, bad: int, t: int, y: np.ndarray) -> ArgumentError:
    """The error for a failed step."""
    member, mode = divmod(bad, plan.M + 1)
    where = f"online: at step {t}" + (f" of member {member}" if plan.batch is not None else "")
    if np.isinf(y).any():
        return ArgumentError(f"{where} y holds infinite values. Pass NaN where something is missing.")
    return stopped(where, mode, plan.M)
