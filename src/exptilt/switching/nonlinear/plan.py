"""The part that all states of an online filter share, for modes that are functions."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..._support import native
from ..._support.errors import ArgumentError
from ..arrays import LOG_TWO_PI
from ..checks import plain
from ..inference.forecast import Forecast
from ..inference.online import OnlineState, Plan
from ..inference.online.state import _state
from ..inference.simulate import root
from ..series import Data, SeriesLike
from .laws import FactorRows, check_linearize, collapse, triangles, wrap

if TYPE_CHECKING:
    from .model import SwitchingNonlinear


class NonlinearPlan(Plan):
    """The plan of modes that are functions: laws hold factors, and inputs take the place of matrices."""

    kind = "nonlinear"
    kernel = "step_nonlinear_rows"

    def __init__(self, model: "SwitchingNonlinear", method: str, linearize: str, batch: int | None) -> None:
        check_linearize(linearize, "online")
        (M, n), m = model.initial_mean.shape, model.observation_noise.shape[-1]
        self._size(method, batch, M, n, m)
        self.model, self.linearize, self.torch = model, linearize, False
        self.first, self.core = model.start == "first", model._core
        self.r, self.constant = model.inputs, None if model.inputs else np.zeros((1, 0))

    def state(self, law: FactorRows, total: np.ndarray, t: int) -> OnlineState:
        """The state after `t` steps, at which `law` is known."""
        shape = (len(law.mean), self.M, -1)
        factor = law.factor.reshape(*shape[:2], self.n, self.n)
        return _state(self, self.rows(law.log_mode, law.mean.reshape(shape), factor, total), t)

    def matrices(self, t: int, inputs: ArrayLike | None) -> np.ndarray:
        """The inputs of a step, ``(members or 1, r)``."""
        if not self.r:
            raise ArgumentError("online: the functions take no inputs. Make the model with inputs=r.")
        return np.ascontiguousarray(self.inputs(inputs))

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
        del every  # there is no clock
        laws = rows[:, self.part["laws"]].reshape(len(rows), self.M, self.law)
        mean, factor = laws[..., : self.n].reshape(len(rows), -1), laws[..., self.n :].reshape(len(rows), -1)
        law = FactorRows(mean, factor, np.ascontiguousarray(rows[:, self.part["log_mode"]]))
        return self.model._forecast(data, law, steps, inputs, level, self.linearize)

    def frame(self) -> Any:
        """A frame for the kernel, with the fields that are the same at every step."""
        made = native.frame("NonlinearRows")()
        made.model = self.core.address(self.linearize)
        return made

    def judge(self, state: Any, y: np.ndarray) -> tuple[int, tuple[np.ndarray, ...]]:
        """Failure (−1 if none); innovations, covariances, distances, log-densities of y ``(B, K, m)``."""
        _, mean, cov = state._laws(True)
        factor = triangles(root(cov))
        center, S = self.model._sight(mean, factor, state._matrices, self.linearize)
        e = wrap(y[:, :, None] - center[:, None], self.model.observation_angles)
        seen = ~np.isnan(e)
        both = seen[..., None] & seen[..., None, :]
        part = np.where(both, S[:, None], np.eye(self.m))  # missing components add nothing below
        try:
            L = np.linalg.cholesky(part)
        except np.linalg.LinAlgError:
            worst = np.unravel_index(np.linalg.eigvalsh(part)[..., 0].argmin(), part.shape[:3])
            return int(worst[0] * (self.M + 1) + worst[2]), (e, S, S, S)
        z = np.linalg.solve(L, np.where(seen, e, 0.0)[..., None])[..., 0]
        distance = (z * z).sum(-1)
        logs = np.log(np.diagonal(L, axis1=-2, axis2=-1)).sum(-1)
        return -1, (e, S, distance, -0.5 * (distance + seen.sum(-1) * LOG_TWO_PI) - logs)

    def covariance(self, laws: np.ndarray) -> np.ndarray:
        """Covariances of laws ``(..., law)``."""
        L = super().covariance(laws)
        return np.asarray(L @ L.mT)

    def mixture(self, weight: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moments over the axis of the weights."""
        return collapse(weight, mean, cov, self.model.angles)

    def stored(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The model as `save` writes it: its numbers, which `load` compares."""
        names = ("transition", "process_noise", "observation_noise")
        return {name: plain(getattr(self.model, name)) for name in names}, {"linearize": self.linearize}
