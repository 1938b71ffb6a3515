"""Results of filters and smoothers: one class each, over the laws of any kind of model.

`Laws` holds mode probabilities and the law of the state for each row and mode. Moments over modes are
computed when first used. Subclasses add predictions (linear modes, `gaussian_laws.py`), angles in means
(modes that are functions) and laws in other families (beliefs).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.plotting import html_curves, html_table
from ..arrays import Parameters
from ..series import Data, SeriesLike, Values, arrange, arrange_total
from .forecast import Forecast
from .moments import mixture, unknown
from .window import collapse_order

AnyModel = TypeVar("AnyModel")


class Laws:
    """Mode probabilities ``(rows, M)`` and laws of the state by mode: Gaussians, given by their moments.

    Values are arrays, or tensors that may have a graph. A filter's laws also have the log-likelihood of each
    series and its terms ``(rows,)``.
    """

    parameters: Parameters | None = None  # of linear modes

    def __init__(
        self, log_mode: Any, mean: Any, covariance: Any, terms: Any = None, total: Any = None
    ) -> None:
        self.log_mode, self.mode_mean, self.mode_covariance = log_mode, mean, covariance
        self.terms, self.total = terms, total

    def live(self, k: int) -> Any:
        """Log mode probabilities (k = 0), means or covariances by mode, with their graph if one is wanted."""
        return getattr(self, ("log_mode", "mode_mean", "mode_covariance")[k])

    def mixture(self, weight: Any, mean: Any, cov: Any) -> tuple[Any, Any]:
        """Moments over modes."""
        with np.errstate(invalid="ignore"):
            mean, cov = mixture(weight, mean, cov)
        return mean, unknown(cov)

    @property
    def belief(self) -> Any:
        """The laws as members of a family, batch ``(rows, M)``."""
        from exptilt.families import Gaussian

        return Gaussian(*(torch.as_tensor(self.live(k)) for k in (1, 2)))

    def known(self, name: str) -> Any:
        """Value of a property that only some filters have, by its name."""
        raise ArgumentError(f"{name} exists for linear modes only. Use the moments by mode, or forecast.")

    def refuse_grad(self, what: str) -> None:
        """Raise if a derivative is wanted."""

    def forecast(self, post: Any, steps: int, inputs: SeriesLike | None, level: float) -> Forecast:
        """Forecast of the steps after the data."""
        raise ArgumentError(
            "forecast: for beliefs in a family, call model.forecast(post, steps), which draws the future."
        )


def shown(take: Callable[[Any], Any], names: str | None, doc: str) -> Any:
    """A property: `take` of the result, in the layout of the data; `names` labels the columns."""

    def get(self: Any) -> Any:
        return arrange(take(self), self.data, names, last=self._last)

    return property(get, doc=doc)


def of_linear(name: str, names: str | None, doc: str) -> Any:
    """A property that exists for linear modes only."""
    return shown(lambda s: s._law.known(name), names, doc)


@dataclass(frozen=True, eq=False)
class ByMode:
    """Mode probabilities, moments and laws of the state, by mode and over modes.

    Leading axes are as in the data: ``(T, ...)``, ``(B, T, ...)``, or a list of ``(T, ...)``.

    Attributes:
        method: the filter that was used.
        data: the data, as the kernels take them.
    """

    method: str
    data: Data
    _law: Laws = field(repr=False)

    _last = False  # whether there is one row per series instead of one per step

    @property
    def _weight(self) -> Any:
        log_mode = self._law.live(0)
        return torch.exp(log_mode) if isinstance(log_mode, torch.Tensor) else np.exp(log_mode)

    @cached_property
    def _plain_moments(self) -> tuple[Any, Any]:
        return self._mixed()

    @property
    def _moments(self) -> tuple[Any, Any]:
        log_mode = self._law.live(0)
        graph = isinstance(log_mode, torch.Tensor) and log_mode.requires_grad
        return self._mixed() if graph else self._plain_moments

    def _mixed(self) -> tuple[Any, Any]:
        return self._law.mixture(self._weight, self._law.live(1), self._law.live(2))

    def _repr_html_(self) -> str:
        """The result in a notebook: each mode's share, and the probabilities along the first series."""
        weight = np.asarray(torch.as_tensor(self._weight).detach())
        first = weight if self._last else weight[: self.data.starts[1]]
        rows = [(f"mode {j}", float(x.mean()), float(first[-1, j])) for j, x in enumerate(weight.T)]
        caption = f"{type(self).__name__}: {self.data.starts[-1]} steps of {self.data.series} series"
        table = html_table(("mode", "mean probability", "at the end of the first series"), rows, caption)
        return table + ("" if self._last else html_curves(first, "mode probabilities, a colour each"))

    @property
    def log_likelihood(self) -> Values:
        """log p(y) by the filter, a number or ``(B,)``; differentiable in tensors that require grad."""
        return arrange_total(self._law.total, self.data)

    @property
    def belief(self) -> Any:
        """The law of the state in each mode, a member of `exptilt.families` of batch ``(T, M)``."""
        if self.data.layout == "list":
            raise ArgumentError(
                "belief: series of different lengths have no common batch. Filter each alone."
            )
        lead = {"single": (), "batch": (self.data.series,)}[self.data.layout]
        found = self._law.belief
        return found.reshape((*lead, *(() if self._last else (-1,)), found.batch_shape[-1]))

    @property
    def state(self) -> Any:
        """The law of the state over modes, a `Mixture` of batch ``(T,)``."""
        from exptilt.families import Mixture

        belief = self.belief
        weight = torch.as_tensor(self._weight).to(belief.dtype)
        return Mixture(weight.reshape(tuple(belief.batch_shape)).log(), belief)

    mode_probability = shown(lambda s: s._weight, "mode", "P(mode_t | y), ``(T, M)``.")
    mode_mean = shown(lambda s: s._law.live(1), None, "Mean of the state in each mode, ``(T, M, n)``.")
    mode_covariance = shown(
        lambda s: s._law.live(2), None, "Covariance of the state in each mode, ``(T, M, n, n)``."
    )
    mean = shown(lambda s: s._moments[0], "state", "Mean of the state over modes, ``(T, n)``.")
    covariance = shown(lambda s: s._moments[1], None, "Covariance of the state over modes, ``(T, n, n)``.")


@dataclass(frozen=True, eq=False)
class Filtered(ByMode, Generic[AnyModel]):
    """Mode probabilities and laws of the state after each step of a filter.

    With ``store="last"`` there is one entry per series, its last step, in place of the T axis.

    Attributes:
        model: the model.
        stored: "all" or "last".
    """

    model: AnyModel
    stored: str = "all"

    @property
    def _last(self) -> bool:  # type: ignore[override]
        return self.stored == "last"

    @property
    def parameters(self) -> Parameters | None:
        """Linear modes as the kernels take them; None for other models."""
        return self._law.parameters

    def _need_all(self, what: str) -> None:
        if self.stored == "last":
            raise ArgumentError(f'{what}: only the last step was stored. Call filter with store="all".')

    @property
    def _end(self) -> tuple[Any, Any, Any]:
        """Log mode probabilities and moments by mode after the last step of each series."""
        last = np.arange(self.data.series) if self._last else self.data.starts[1:] - 1
        law = self._law
        return law.log_mode[last], law.mode_mean[last], law.mode_covariance[last]

    @property
    def _terms(self) -> Any:
        return self._law.terms

    @property
    def _ahead(self) -> Any:  # of linear modes: probabilities and moments by mode before y_t is seen
        return getattr(self._law, "ahead", None) or self._law.known("a prediction")

    @property
    def _output(self) -> Any:  # of linear modes: moments of y_t before it is seen, by mode and over modes
        return getattr(self._law, "output", None) or self._law.known("a prediction")

    @property
    def log_likelihood_terms(self) -> Values:
        """log p(y_t | y_1 … y_{t−1}), ``(T,)``."""
        self._need_all("log_likelihood_terms")
        return arrange(self._law.terms, self.data, None)

    @property
    def ess(self) -> Values:
        """Effective number of particles at each step, ``(T,)``; None for methods other than "rbpf"."""
        found = getattr(self._law, "ess", None)
        return None if found is None else arrange(found, self.data, None)

    @property
    def laws_kept(self) -> int | None:
        """Number of laws kept from step to step: 1 for GPB1, M for IMM and GPB2, M^{k−1} for GPB_k.

        With "exact" the number of paths at the end of the longest series; None for particles.
        """
        first = 0 if self.parameters is None else self.parameters.first
        M, steps = self._law.log_mode.shape[1], int(self.data.lengths.max()) + 1 - first
        powers = {"gpb1": 0, "exact": steps, "imm": 1}
        power = powers.get(self.method, collapse_order(self.method) - 1)
        return None if self.method == "rbpf" else int(M**power)

    log_mode_probability = shown(
        lambda s: s._law.live(0),
        "mode",
        "log P(mode_t | y_1 … y_t), ``(T, M)``; it ranks modes even where P is 0.",
    )
    mixing_probability = of_linear(
        "mixing_probability",
        None,
        "[i, j] = P(mode i before | mode j now), ``(T, M, M)``: given y up to now for GPB_k, exact and rbpf, "
        "up to the step before for IMM and GPB1.",
    )
    predicted_mode_probability = of_linear(
        "predicted_mode_probability", "mode", "P(mode_t | y_1 … y_{t−1}), ``(T, M)``."
    )
    predicted_mode_mean = of_linear(
        "predicted_mode_mean", None, "Mean of x_t in each mode given y_1 … y_{t−1}, ``(T, M, n)``."
    )
    predicted_mode_covariance = of_linear(
        "predicted_mode_covariance",
        None,
        "Covariance of x_t in each mode given y_1 … y_{t−1}, ``(T, M, n, n)``.",
    )
    predicted_mean = of_linear("predicted_mean", "state", "Mean of x_t given y_1 … y_{t−1}, ``(T, n)``.")
    predicted_covariance = of_linear(
        "predicted_covariance", None, "Covariance of x_t given y_1 … y_{t−1}, ``(T, n, n)``."
    )
    innovation = of_linear(
        "innovation", "output", "y_t minus its mean given y_1 … y_{t−1}, ``(T, m)``, NaN where y is missing."
    )
    innovation_covariance = of_linear(
        "innovation_covariance", None, "Covariance of y_t given y_1 … y_{t−1}, ``(T, m, m)``."
    )

    def forecast(self, steps: int, *, inputs: SeriesLike | None = None, level: float = 0.9) -> Forecast:
        """Means, covariances, intervals and mode probabilities of the steps after the data.

        The forecast starts from the law of each mode. After `gpb1`, which merges these laws before every
        step, it differs from the next `predicted_mean` of the same filter.

        Args:
            steps: how many.
            inputs: ``(h, r)``, or one for each series: those of the steps ahead, where the
                model takes inputs.
            level: of the intervals, between 0 and 1.
        """
        self._law.refuse_grad("forecast")
        return self._law.forecast(self, steps, inputs, level)


@dataclass(frozen=True, eq=False)
class Smoothed(ByMode):
    """The law of modes and states given all of y; `log_likelihood` is that of the filter underneath."""

    _pairs: Any = field(repr=False, default=None)

    @property
    def pair_probability(self) -> Values:
        """[t, i, j] = P(mode_{t−1} = i, mode_t = j | y), ``(T, M, M)``.

        At t = 0 mode_{−1} is that of the initial law; with ``start="first"`` there is none, and the matrix is
        diagonal.
        """
        if self._pairs is None:
            raise ArgumentError(
                "pair_probability is not available for modes that are functions. Use a linear model for it."
            )
        return arrange(self._pairs, self.data, None)
