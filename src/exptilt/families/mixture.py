r"""Mixtures.

    h = Σ_k w_k p_k,     G(η) = log Σ_k w_k e^{G_k(η)},     ∇G(η) = Σ_k w̃_k ∇G_k(η),   w̃_k ∝ w_k e^{G_k(η)}

Tilting a mixture tilts every component and moves weight to those with much mass where e^{<t,η>} is large (THEORY A5). `AnyMixture` says
so once for all; `Mixture` holds components of any exponential family, `GaussianMixture` means and covariances.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions
from torch.utils import _pytree as pytree

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution, Status
from exptilt.families import mixture_bounds
from exptilt.families.checks import check_log_weight
from exptilt.families.estimate import Estimate
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, Measure, make


class AnyMixture(Measure):
    """What follows from log-weights ``(..., K)`` and components with batch ``(..., K)``."""

    log_weight: Tensor

    @property
    @abstractmethod
    def components(self) -> ExponentialFamily:
        """The components, one family with batch axes ``(..., K)``."""

    @property
    def base(self) -> Base:
        """As for the components."""
        return self.components.base

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        """As for the components."""
        return self.components.event_shapes

    @property
    def log_probability(self) -> Tensor:
        """Normalised log-weights, ``(..., K)``."""
        return torch.log_softmax(self.log_weight, -1)

    def _coordinate(self, x: Any) -> Tensor:
        return self.components._coordinate(x)

    def component_log_prob(self, x: Any) -> Tensor:
        """Log-density of x under each component.

        Args:
            x: an event, or a batch of them.

        Returns:
            ``(..., K)``.
        """
        leaves, spec = pytree.tree_flatten(self._event(x))
        spread = [leaf.unsqueeze(leaf.ndim - len(shape)) for leaf, shape in zip(leaves, self.event_shapes, strict=True)]
        return self.components.log_prob(pytree.tree_unflatten(spread, spec))

    def _log_prob(self, x: Any) -> Tensor:
        """Log-density of the normalised mixture at x."""
        return torch.logsumexp(self.log_probability + self.component_log_prob(x), -1)

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Any:
        """Draws ``shape + batch + event``: a component by weight, then one draw of it."""
        draws = self.components._sample(shape, generator)
        batch = (*shape, *self.batch_shape)
        cumulative = torch.softmax(self.log_weight.detach().double(), -1).cumsum(-1)
        uniform = torch.rand((*batch, 1), dtype=torch.float64, device=self.device, generator=generator) * cumulative[..., -1:]
        index = (uniform >= cumulative).sum(-1).clamp_max(self.log_weight.shape[-1] - 1)

        def pick(leaf: Tensor) -> Tensor:
            event = leaf.shape[len(batch) + 1 :]
            chosen = index.reshape(*batch, *[1] * (len(event) + 1))
            return torch.take_along_dim(leaf.expand(*batch, leaf.shape[len(batch)], *event), chosen, len(batch)).squeeze(len(batch))

        return pytree.tree_map(pick, draws)

    def entropy(self, samples: int = 4096, *, generator: torch.Generator | None = None) -> Estimate:
        """−E log p: no closed form, so a sample mean with its standard error and a bracket that holds for certain.

        Args:
            samples: how many draws are taken; 0 gives the bracket alone.
            generator: for those draws.

        Returns:
            An `Estimate` of shape ``(...)``, in nats.
        """
        lower, upper = mixture_bounds.entropy_bounds(self.log_probability, self.components)
        if samples == 0:
            return Estimate.bounded(lower, upper)
        if samples < 2:
            raise ArgumentError(f"entropy: samples must be 0 (bounds alone) or at least 2; got {samples}.")
        return Estimate.sampled(-self.log_prob(self.sample((samples,), generator=generator)), lower, upper)

    def _scores(self, eta: Tensor) -> Tensor:
        present = self.log_weight > -torch.inf
        return torch.where(present, self.log_weight + self.components._log_normalizer(eta.unsqueeze(-2)), -torch.inf)

    def _diverges(self, eta: Tensor) -> Tensor | None:
        diverges = self.components._diverges(eta.unsqueeze(-2))
        return None if diverges is None else (diverges & (self.log_weight > -torch.inf)).any(-1)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return torch.logsumexp(self._scores(eta), -1)

    def _mean(self, eta: Tensor) -> Tensor:
        weight = torch.softmax(self._scores(eta), -1)
        return (weight.unsqueeze(-1) * self.components._mean(eta.unsqueeze(-2))).sum(-2)

    def _covariance(self, eta: Tensor) -> Tensor:
        weight = torch.softmax(self._scores(eta), -1)
        spread = eta.unsqueeze(-2).expand(*weight.shape, eta.shape[-1])
        means = self.components._mean(spread)
        offset = means - (weight.unsqueeze(-1) * means).sum(-2, keepdim=True)
        within = (weight[..., None, None] * self.components._covariance(spread)).sum(-3)
        return within + (weight.unsqueeze(-1) * offset).mT @ offset

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        excess = self.components._excess(mean.unsqueeze(-2), where.unsqueeze(-1))
        return None if excess is None else excess.amin(-1)

    def _step_for(self, reached: Tensor, wanted: Tensor) -> Tensor:
        return self.components._step_for(reached, wanted)

    def _natural(self, mean: Tensor, tolerance: float | None, max_steps: int) -> Solution[Tensor]:
        """The components know their hull exactly: on its boundary the search has no end, however far it came."""
        solution = super()._natural(mean, tolerance, max_steps)
        excess = self._excess(mean, torch.ones_like(mean[..., 0], dtype=torch.bool))
        if excess is None:
            return solution
        return replace(solution, code=torch.where(excess == 0, Status.BOUNDARY.code, solution.code).to(torch.int8))

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        excess = None if self.base is Base.COUNTING else self._excess(mean, torch.ones_like(reached, dtype=torch.bool))
        return reached if excess is None else torch.where(excess >= 0, torch.inf, reached)


@dataclass(frozen=True, eq=False)
class Mixture(AnyMixture):
    """A mixture of members of one exponential family.

    Args:
        log_weight: ``(..., K)``, log-weights of the components up to a constant; −inf leaves one out.
        family: the components, an exponential family with batch axes ``(..., K)``.

    Example:
        >>> from exptilt.families import Poisson
        >>> Mixture(torch.zeros(2), Poisson(torch.tensor([[1.0], [5.0]]))).mean()
        tensor([3.])
    """

    log_weight: Tensor
    family: ExponentialFamily
    event_dims: ClassVar = {"log_weight": 1}

    def __post_init__(self) -> None:
        if not isinstance(self.family, ExponentialFamily):
            raise ArgumentError(f"Mixture: family must be an ExponentialFamily with batch (..., K); got {type(self.family).__name__}.")
        batch = self.family.batch_shape
        if not isinstance(self.log_weight, Tensor) or not batch or self.log_weight.shape[-1] != batch[-1]:
            got = tuple(self.log_weight.shape) if isinstance(self.log_weight, Tensor) else type(self.log_weight).__name__
            raise ArgumentError(f"Mixture: log_weight must be (..., K) for components with batch (..., K); got {got} and {tuple(batch)}.")
        check_log_weight("Mixture", self.log_weight)

    @property
    def components(self) -> ExponentialFamily:
        """The components."""
        return self.family

    @property
    def dimension(self) -> int:
        """D of the components."""
        return self.family.dimension

    def _leaves(self) -> list[tuple[Tensor, int]]:
        return [(self.log_weight, 1), *((leaf, event + 1) for leaf, event in self.family._leaves())]

    def _tilt(self, eta: Tensor) -> Self:
        spread = eta.unsqueeze(-2)
        return make(type(self), log_weight=self._scores(eta), family=self.family._tilt(spread))

    def _to_torch(self) -> distributions.MixtureSameFamily:
        """The same as a `torch.distributions.MixtureSameFamily`, where the components exist there."""
        return distributions.MixtureSameFamily(distributions.Categorical(logits=self.log_weight), self.family.to_torch())
