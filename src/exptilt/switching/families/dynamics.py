r"""Dynamics of beliefs: from a belief about the state to a belief about the next state.

**Discounted**: a belief is drawn towards a law of rest, θ ← δθ + (1 − δ)θ_rest, a geometric mean of both,
which is always a member: the power steady model.

**Linear**: the state goes through a linear map with noise. A Gaussian stays one. A Gamma stays one where the
map only scales it; otherwise it is replaced by the Gamma with the same mean and variance. Any other member of
an exponential family, pushed through an invertible W without noise, is a member of another family, with the
same natural parameter and the statistic u(W⁻¹x): a `Pushforward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exptilt._support.checks import alike, entries, finite, number
from exptilt._support.errors import ArgumentError
from exptilt.families import ExponentialFamily, Gamma, Gaussian

Dynamics = Callable[[Any], Any]


@dataclass(frozen=True)
class DiscountedDynamics:
    """Dynamics that forget: the natural parameter goes from θ to δθ + (1 − δ)θ_rest.

    Args:
        discount: δ in (0, 1]; 1 keeps everything.
        rest: the law of rest, towards which beliefs go without data; no batch axes.

    Example:
        >>> half = DiscountedDynamics(0.5, Gamma(torch.tensor([1.0]), torch.tensor([0.0001])))
        >>> half(Gamma(torch.tensor([9.0]), torch.tensor([4.0]))).shape
        tensor([5.])
    """

    discount: float
    rest: ExponentialFamily

    def __post_init__(self) -> None:
        number("DiscountedDynamics", "discount", self.discount, above=0, most=1)
        if not isinstance(self.rest, ExponentialFamily) or self.rest.batch_shape:
            raise ArgumentError(
                f"DiscountedDynamics: rest must be one member of a family; got {self.rest!r}."
            )

    def __call__(self, belief: ExponentialFamily) -> ExponentialFamily:
        """The belief one step later."""
        if type(belief) is not type(self.rest):
            kinds = f"{type(self.rest).__name__}, the belief a {type(belief).__name__}"
            raise ArgumentError(f"DiscountedDynamics: rest is a {kinds}. Pass the same family.")
        theta = torch.lerp(self.rest.natural_parameter, belief.natural_parameter, self.discount)
        return belief.from_natural(theta)


@dataclass(frozen=True)
class Pushforward:
    """The law of W x, where x has the law `base`: density p(W⁻¹x)/|det W|, statistic u(W⁻¹x), the same θ.

    Args:
        base: a member of an exponential family.
        dynamics: ``(D, D)``, W, invertible.
    """

    base: Any
    dynamics: Tensor

    @property
    def natural_parameter(self) -> Tensor:
        """θ, the same as of `base`."""
        theta: Tensor = self.base.natural_parameter
        return theta

    @property
    def event_mean(self) -> Tensor:
        """The mean, W times that of `base`."""
        mean: Tensor = (self.dynamics @ self.base.event_mean.unsqueeze(-1)).squeeze(-1)
        return mean

    def _back(self, x: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve(self.dynamics, x.unsqueeze(-1)).squeeze(-1)
        return found

    def statistic(self, x: Tensor) -> Tensor:
        """u(W⁻¹x), for points ``(..., D)``."""
        found: Tensor = self.base.statistic(self._back(x))
        return found

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density at points ``(..., D)``."""
        density: Tensor = self.base.log_prob(self._back(x)) - torch.linalg.slogdet(self.dynamics).logabsdet
        return density

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws, ``(*shape, ..., D)``."""
        drawn: Tensor = self.base.sample(shape, generator=generator)
        return drawn @ self.dynamics.mT


@dataclass(frozen=True)
class LinearDynamics:
    """Dynamics by a linear map: ξ ← W ξ + noise.

    Gaussian and Gamma beliefs stay in their family; any other member of an exponential family becomes a
    `Pushforward`, if W is invertible and there is no noise.

    Args:
        dynamics: ``(D, D)``, W; for Gammas at least 0.
        process_noise: ``(D, D)``, the covariance of the noise, whose mean is 0; of Gammas, which are
            independent, only its diagonal counts.

    Example:
        >>> LinearDynamics(torch.eye(1), 3 * torch.eye(1))(Gamma(torch.tensor([4.0]), torch.tensor([2.0])))
        Gamma(shape=tensor([1.]), rate=tensor([0.5000]))
    """

    dynamics: Tensor
    process_noise: Tensor

    def __post_init__(self) -> None:
        W, Q = self.dynamics, self.process_noise
        for name, x in (("dynamics", W), ("process_noise", Q)):
            if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[0] != x.shape[1]:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ArgumentError(f"LinearDynamics: {name} must be a tensor (D, D); got {got}.")
        if W.shape != Q.shape:
            sizes = f"dynamics {tuple(W.shape)}, process_noise {tuple(Q.shape)}"
            raise ArgumentError(f"LinearDynamics: got {sizes}. Pass matrices of one size.")
        alike("LinearDynamics", dynamics=W, process_noise=Q)
        finite("LinearDynamics", dynamics=W, process_noise=Q)
        entries("LinearDynamics", "process_noise", Q, Q.diagonal() >= 0, "at least 0 on the diagonal")

    def __call__(self, belief: Any) -> Any:
        """The belief one step later."""
        W, Q = self.dynamics, self.process_noise
        if isinstance(belief, Gaussian):
            mean = (W @ belief.mean_vector.unsqueeze(-1)).squeeze(-1)
            return Gaussian(mean, W @ belief.covariance_matrix @ W.mT + Q)
        if not isinstance(belief, Gamma):
            kind = f"the belief is a {type(belief).__name__}"
            if not isinstance(belief, ExponentialFamily) or bool(Q.any()):
                raise ArgumentError(
                    f"LinearDynamics: {kind}. Only Gaussian and Gamma beliefs are pushed with noise, and "
                    "only members of exponential families without. Pass process_noise of 0."
                )
            if not bool(torch.linalg.matrix_rank(W) == len(W)):
                raise ArgumentError(
                    f"LinearDynamics: {kind}, and dynamics is singular. Pass an invertible matrix."
                )
            return Pushforward(belief, W)
        entries(
            "LinearDynamics",
            "dynamics",
            W,
            (W >= 0).all(-1) & (W > 0).any(-1),
            "at least 0, and not 0 in a row",
        )
        mean = (W @ belief.event_mean.unsqueeze(-1)).squeeze(-1)
        variance = (W.square() @ belief.event_variance.unsqueeze(-1)).squeeze(-1) + Q.diagonal()
        return Gamma(mean.square() / variance, mean / variance)


Discounted, Pushed = DiscountedDynamics, LinearDynamics  # the names in older pickles
