r"""Mixtures.

    h = Σ_k w_k p_k,     G(η) = log Σ_k w_k e^{G_k(η)},     ∇G(η) = Σ_k w̃_k ∇G_k(η),   w̃_k ∝ w_k e^{G_k(η)}

Tilting a mixture tilts every component and moves weight to components with much mass where e^{⟨t,η⟩} is large
(THEORY A5). `AnyMixture` is the base of all mixtures; `Mixture` holds components of any exponential family,
`GaussianMixture` means and covariances.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, distributions

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete, pytree
from exptilt.families import mixture_bounds
from exptilt.families.checks import check_log_weight, check_tensors
from exptilt.families.estimate import Estimate, samples_wanted
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, Measure, make
from exptilt.families.numerics.draws import categories


class AnyMixture(Measure):
    """Base of the mixtures with log-weights ``(..., K)`` and components with batch ``(..., K)``."""

    log_weight: Tensor
    _knows_hull = True

    @property
    @abstractmethod
    def components(self) -> ExponentialFamily:
        """The components, one family with batch axes ``(..., K)``."""

    @property
    def base(self) -> Base:
        """The measure that densities are taken with respect to: that of the components."""
        return self.components.base

    @property
    def _inner_form(self) -> tuple[str, tuple[int, ...]] | None:  # type: ignore[override]
        return self.components._inner_form

    @property
    def _reach(self) -> tuple[Any, Any, Any] | None:  # type: ignore[override]
        return self.components._reach

    @property
    def _decay(self) -> float:  # type: ignore[override]
        return self.components._decay

    @property
    def _moments(self) -> tuple[float, Tensor] | None:
        found = self._own_components()._moments
        if found is None:
            return None
        present = (self.log_weight > -torch.inf).unsqueeze(-1)
        return found[0], torch.where(present, found[1], torch.inf).amin(-2)

    @property
    def event_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that makes up one x, as in the components."""
        return self.components.event_shapes

    @property
    def log_probability(self) -> Tensor:
        """Normalised log-weights, ``(..., K)``."""
        return torch.log_softmax(self.log_weight, -1)

    def _coordinate(self, x: Any) -> Tensor:
        return self.components._coordinate(x)

    def _event_moments(self) -> tuple[Any, Any]:
        """E[x] and Var[x]: averages over the components with weight, plus the variance of their means."""
        moments = self._own_components()._event_moments()
        leaves, spec = pytree.tree_flatten(moments[0])
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for mean, variance, shape in zip(
            leaves, pytree.tree_leaves(moments[1]), self.event_shapes, strict=True
        ):
            axis = -1 - len(shape)
            weight = self.log_probability.exp()[(..., *[None] * len(shape))]
            mean, variance = (torch.where(weight > 0, x, 0.0) for x in (mean, variance))
            found[0].append((weight * mean).sum(axis))
            offset = mean - found[0][-1].unsqueeze(axis)
            found[1].append((weight * (variance + offset**2)).sum(axis))
        return pytree.tree_unflatten(found[0], spec), pytree.tree_unflatten(found[1], spec)

    def _event_covariance(self) -> Tensor:
        parts, weight = self._own_components(), self.log_probability.exp()
        means, within = parts._event_moments()[0], parts._event_covariance()
        means = torch.where(weight.unsqueeze(-1) > 0, means, 0.0)
        within = torch.where(weight[..., None, None] > 0, within, 0.0)
        offset = means - (weight.unsqueeze(-1) * means).sum(-2, keepdim=True)
        between = (weight.unsqueeze(-1) * offset).mT @ offset
        return (weight[..., None, None] * within).sum(-3) + between

    def component_log_prob(self, x: Any) -> Tensor:
        """Log-density of x under each component.

        Args:
            x: an event, or a batch of them.

        Returns:
            ``(..., K)``.
        """
        return self.components.log_prob(_spread(self._event(x), tuple(map(len, self.event_shapes))))

    def _log_prob(self, x: Any) -> Tensor:
        return torch.logsumexp(self.log_probability + self.component_log_prob(x), -1)

    def _cdf(self, x: Tensor) -> Tensor:
        return (self.log_probability.exp().unsqueeze(-1) * self.components._cdf(x.unsqueeze(-2))).sum(-2)

    def _from_inner(self, y: Any) -> Any:
        return self.components._from_inner(y)

    def _log_prob_inner(self, y: Any) -> Tensor:
        form = self._inner_form
        if form is None:
            return self.log_prob(y)
        return torch.logsumexp(
            self.log_probability + self.components._log_prob_inner(_spread(y, form[1])), -1
        )

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Any:
        """Draws ``shape + batch + event``: a component by weight, then a draw from it."""
        draws = self._own_components()._sample(shape, generator)
        size = (*shape, *self.batch_shape, 1)
        uniform = torch.rand(size, dtype=torch.float64, device=self.device, generator=generator)
        return pytree.tree_map(self._chosen(uniform), draws)

    def _sample_scored(self, count: int, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        """Inner draws, stratified so that each component gets its share, and their `score`."""
        draws, score = self._own_components()._sample_scored(count, generator)
        size = (count, *self.batch_shape, 1)
        uniform = torch.rand(size, dtype=torch.float64, device=self.device, generator=generator)
        first = torch.arange(count, dtype=torch.float64, device=self.device)
        pick = self._chosen((uniform + first.reshape(count, *[1] * (len(size) - 1))) / count)
        return pytree.tree_map(pick, draws), pick(score + self.log_probability)

    def _chosen(self, uniform: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that picks from ``(S..., K, event)`` the component drawn by ``uniform (S..., 1)``."""
        index = categories(self.log_weight, uniform)

        def pick(leaf: Tensor) -> Tensor:
            chosen = index.reshape(*index.shape, *[1] * (leaf.ndim - index.ndim))
            return torch.take_along_dim(leaf, chosen, index.ndim - 1).squeeze(index.ndim - 1)

        return pick

    def entropy(self, samples: int = 4096, *, generator: torch.Generator | None = None) -> Estimate:
        """−E log p: a sample mean with its standard error, and a bracket that holds for certain.

        Args:
            samples: how many draws are taken; 0 gives the bracket alone.
            generator: for those draws.

        Returns:
            An `Estimate` of shape ``(...)``, in nats.
        """
        if self.dtype != torch.float64:  # in float32 densities of draws may be off by more than their mean
            return self.to(torch.float64).entropy(samples, generator=generator).to(self.dtype)
        lower, upper = mixture_bounds.entropy_bounds(self.log_probability, self.components)
        if samples_wanted("entropy", samples) == 0:
            return Estimate.bounded(lower, upper)
        x, score = self._sample_scored(samples, generator)
        return Estimate.sampled(-self._log_prob_inner(x), lower, upper, score)

    def _to_torch(self) -> distributions.MixtureSameFamily:
        weight = distributions.Categorical(logits=self.log_weight.expand(*self.batch_shape, -1))
        return distributions.MixtureSameFamily(weight, self._own_components().to_torch())

    def _own_components(self) -> ExponentialFamily:
        """The components expanded to the whole batch ``(..., K)``, so that no two mixtures share a draw."""
        parts, batch = self.components, (*self.batch_shape, self.log_weight.shape[-1])
        if tuple(parts.batch_shape) == batch:
            return parts
        return parts.map(lambda leaf, event: leaf.expand(*batch, *leaf.shape[leaf.ndim - event :]))

    def _each(self, eta: Tensor) -> Tensor:
        """η for every component, ``(..., K, D)`` or ``(..., 1, D)``; 0 for components without weight."""
        present = self.log_weight > -torch.inf
        if is_concrete(present) and bool(present.all()):
            return eta.unsqueeze(-2)
        return torch.where(present.unsqueeze(-1), eta.unsqueeze(-2), 0.0)

    def _scores(self, eta: Tensor) -> Tensor:
        return self.log_weight + self.components._log_normalizer(self._each(eta))

    def _diverges(self, eta: Tensor) -> Tensor | None:
        diverges = self.components._diverges(self._each(eta))
        return None if diverges is None else diverges.any(-1)

    def _log_normalizer(self, eta: Tensor) -> Tensor:
        return torch.logsumexp(self._scores(eta), -1)

    def _mean(self, eta: Tensor) -> Tensor:
        weight = torch.softmax(self._scores(eta), -1)
        return (weight.unsqueeze(-1) * self.components._mean(self._each(eta))).sum(-2)

    def _covariance(self, eta: Tensor) -> Tensor:
        weight = torch.softmax(self._scores(eta), -1)
        spread = self._each(eta).expand(*weight.shape, eta.shape[-1])
        means = self.components._mean(spread)
        offset = means - (weight.unsqueeze(-1) * means).sum(-2, keepdim=True)
        within = (weight[..., None, None] * self.components._covariance(spread)).sum(-3)
        return within + (weight.unsqueeze(-1) * offset).mT @ offset

    def _excess(self, mean: Tensor, where: Tensor) -> Tensor | None:
        excess = self.components._excess(mean.unsqueeze(-2), where.unsqueeze(-1))
        return None if excess is None else excess.amin(-1)

    def _centred(self, mean: Tensor) -> tuple[Measure, Tensor]:
        return self.to(torch.float64), mean.double()

    def _step_for(self, reached: Tensor, wanted: Tensor) -> Tensor:
        return self.components._step_for(reached, wanted)

    def _boundary_conjugate(self, mean: Tensor, reached: Tensor) -> Tensor:
        every = torch.ones_like(reached, dtype=torch.bool)
        excess = None if self.base is Base.COUNTING else self._excess(mean, every)
        return reached if excess is None else torch.where(excess >= 0, torch.inf, reached)


def _spread(x: Any, ranks: tuple[int, ...]) -> Any:
    """The event x with an axis of length one for the components before its `ranks` event axes."""
    leaves, spec = pytree.tree_flatten(x)
    spread = [leaf.unsqueeze(leaf.ndim - rank) for leaf, rank in zip(leaves, ranks, strict=True)]
    return pytree.tree_unflatten(spread, spec)


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
            got = type(self.family).__name__
            raise ArgumentError(
                f"Mixture: family must be an ExponentialFamily with batch (..., K); got {got}."
            )
        # A field that all components share gets a component axis, so that it is not mistaken for batch.
        shared = self.family.map(lambda leaf, event: leaf if leaf.ndim > event else leaf.unsqueeze(0))
        names = [f"{type(shared).__name__}.{name}" for name in shared.event_dims]
        parts = {name: (leaf, event + 1) for name, (leaf, event) in zip(names, shared._leaves(), strict=True)}
        check_tensors("Mixture", {"log_weight": (self.log_weight, 1), **parts})
        batch = self.family.batch_shape
        if not batch or self.log_weight.shape[-1] != batch[-1]:
            got = f"{tuple(self.log_weight.shape)} and {tuple(batch)}"
            raise ArgumentError(
                f"Mixture: log_weight must be (..., K) for components with batch (..., K); got {got}."
            )
        check_log_weight("Mixture", self.log_weight)
        object.__setattr__(self, "family", shared)

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
        return make(type(self), log_weight=self._scores(eta), family=self.family._tilt(self._each(eta)))
