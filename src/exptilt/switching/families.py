r"""Switching models whose state is a conjugate exponential family (THEORY E3).

The state ξ is the parameter of what is observed: the rate of counts, the probability of an event, a mean and
variance. The belief about it, in each mode, is a member of the family conjugate to the observation. One step:

    a belief is moved by the dynamics of the mode it goes to,   belief_i → D_j(belief_i);
    the observation updates it, θ ← θ + e(y), and weighs it by its marginal likelihood;
    components that agree on the mode become one, with the same expected statistics (the M-projection).

    GPB2   log weight_ij = λ_i + log π_ij + log p_ij(y),   M² components, collapsed to one a mode
    IMM    collapses by w_{i|j} = e^{λ_i} π_ij / c_j first, then M components
    GPB1   collapses all modes to one belief, then M components

Dynamics are maps of beliefs. `discounted` draws a belief towards a law of rest, θ ← δθ + (1 − δ)θ_rest, a
geometric mean of both, which is always a member: the power steady model. `pushed` moves a Gaussian belief
by a linear map with noise, and the model is then `SwitchingLinearGaussian`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exptilt._support.checks import choice, entries, number, whole
from exptilt._support.checks import generator as check_generator
from exptilt._support.errors import ArgumentError
from exptilt.families import (
    ExponentialFamily,
    Gaussian,
    Mixture,
    log_marginal_likelihood,
    posterior,
    predictive,
    project,
    stack,
)

Dynamics = Callable[[Any], Any]
METHODS = ("gpb2", "imm", "gpb1")


def discounted(discount: float, rest: ExponentialFamily) -> Dynamics:
    """Dynamics that forget: the natural parameter goes from θ to δθ + (1 − δ)θ_rest.

    Args:
        discount: δ in (0, 1]; 1 keeps everything.
        rest: the law that is left when all is forgotten, without batch axes.

    Example:
        >>> from exptilt.families import Gamma
        >>> half = discounted(0.5, Gamma(torch.tensor([1.0]), torch.tensor([0.0001])))
        >>> half(Gamma(torch.tensor([9.0]), torch.tensor([4.0]))).shape
        tensor([5.])
    """
    number("discounted", "discount", discount, above=0, most=1)
    if not isinstance(rest, ExponentialFamily) or rest.batch_shape:
        raise ArgumentError(f"discounted: rest must be one member of a family; got {rest!r}.")

    def move(belief: ExponentialFamily) -> ExponentialFamily:
        if type(belief) is not type(rest):
            kinds = f"{type(rest).__name__}, the belief a {type(belief).__name__}"
            raise ArgumentError(f"discounted: rest is a {kinds}. Pass the same family.")
        return belief.from_natural(torch.lerp(rest.natural_parameter, belief.natural_parameter, discount))

    return move


def pushed(dynamics: Tensor, process_noise: Tensor) -> Dynamics:
    """Dynamics of Gaussian beliefs: ξ ← W ξ + noise.

    Args:
        dynamics: ``(D, D)``, W.
        process_noise: ``(D, D)``, the covariance of the noise.
    """

    def move(belief: Gaussian) -> Gaussian:
        if not isinstance(belief, Gaussian):
            raise ArgumentError(
                f"pushed: the belief is a {type(belief).__name__}. Only Gaussians are pushed."
            )
        mean = (dynamics @ belief.mean_vector.unsqueeze(-1)).squeeze(-1)
        return Gaussian(mean, dynamics @ belief.covariance_matrix @ dynamics.mT + process_noise)

    return move


@dataclass(frozen=True)
class FamilyFiltered:
    """What a `SwitchingFamily` says after each observation.

    Attributes:
        log_likelihood: ``()``.
        log_likelihood_terms: ``(T,)``, log p(y_t | y_1 … y_{t−1}); 0 where nothing was observed.
        mode_probability: ``(T, M)``.
        belief: the law of the state in each mode, batch ``(T, M)``.
    """

    log_likelihood: Tensor
    log_likelihood_terms: Tensor
    mode_probability: Tensor
    belief: ExponentialFamily

    @property
    def state(self) -> Mixture:
        """The law of the state, modes mixed, batch ``(T,)``."""
        return Mixture(self.mode_probability.log(), self.belief)


@dataclass(frozen=True)
class SwitchingFamily:
    """A Markov chain of modes, each of which moves a belief in a conjugate family in its own way.

    Args:
        transition: ``(M, M)``, [i, j] = P(mode j next | mode i now).
        prior: the belief before the first step, batch ``()`` or ``(M,)``.
        likelihood: a family conjugate to the prior, or a member that holds what is known; see
            `families.posterior`.
        dynamics: a map of beliefs for each mode, such as `discounted` or `pushed`.
        initial_probability: ``(M,)``, of the mode before the first step; uniform if not given.

    Example:
        >>> from exptilt.families import Gamma, Poisson
        >>> calm, busy = (Gamma(torch.tensor([a]), torch.tensor([1.0])) for a in (2.0, 30.0))
        >>> model = SwitchingFamily(
        ...     transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]),
        ...     prior=calm,
        ...     likelihood=Poisson,
        ...     dynamics=[discounted(0.8, calm), discounted(0.2, busy)],
        ... )
        >>> seen = model.filter(torch.tensor([[1.0], [3.0], [2.0], [33.0], [29.0]]))
        >>> seen.mode_probability[:, 1].round()
        tensor([0., 0., 0., 1., 1.])
    """

    transition: Tensor
    prior: ExponentialFamily
    likelihood: type[ExponentialFamily] | ExponentialFamily
    dynamics: Sequence[Dynamics]
    initial_probability: Tensor | None = None

    def __post_init__(self) -> None:
        M = len(self.dynamics)
        start = (
            torch.full((M,), 1 / M).to(self.transition)
            if self.initial_probability is None
            else self.initial_probability
        )
        object.__setattr__(self, "initial_probability", start)
        for name, x, shape in (("transition", self.transition, (M, M)), ("initial_probability", start, (M,))):
            if not isinstance(x, Tensor) or tuple(x.shape) != shape:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ArgumentError(
                    f"SwitchingFamily: {name} must be {shape}, one mode for each of dynamics; got {got}."
                )
            sums = ((x >= 0).all(-1) & ((x.sum(-1) - 1).abs() < 1e-4)).reshape(shape[:-1])
            entries("SwitchingFamily", name, x, sums, "probabilities that sum to 1")
        if not isinstance(self.prior, ExponentialFamily) or tuple(self.prior.batch_shape) not in ((), (M,)):
            raise ArgumentError(f"SwitchingFamily: prior must be one member, or {M}; got {self.prior!r}.")
        for j, move in enumerate(self.dynamics):
            if not callable(move):
                raise ArgumentError(
                    f"SwitchingFamily: dynamics[{j}] is {move!r}. Pass a map of beliefs, such as discounted."
                )
        predictive(self.prior, self.likelihood)  # refuses what is not conjugate

    def _rows(self, y: Tensor) -> Tensor:
        """The observations ``(T, D)``, checked; NaN throughout a row is missing."""
        if not isinstance(y, Tensor) or not y.is_floating_point() or y.ndim != 2 or not len(y):
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ArgumentError(f"SwitchingFamily: y must be a floating-point tensor (T, D); got {got}.")
        missing = y.isnan()
        entries("SwitchingFamily", "y", y, missing.all(-1) | ~missing.any(-1), "NaN throughout or nowhere")
        return y

    def _moved(self, belief: ExponentialFamily) -> ExponentialFamily:
        """D_j(belief), the modes j along a last batch axis; a belief ``(..., M)`` is moved mode by mode."""
        found: ExponentialFamily = stack([move(belief) for move in self.dynamics], -1)
        return found

    def _own(self, belief: ExponentialFamily) -> ExponentialFamily:
        """D_j(belief_j) of a belief ``(M,)``."""
        found: ExponentialFamily = stack([move(belief[j]) for j, move in enumerate(self.dynamics)], -1)
        return found

    def _seen(self, belief: ExponentialFamily, y: Tensor) -> tuple[ExponentialFamily, Tensor]:
        """The belief after an observation, and its log marginal likelihood."""
        if bool(y.isnan().all()):
            return belief, torch.zeros(belief.batch_shape, dtype=y.dtype)
        wide = y.expand(*belief.batch_shape, 1, len(y))
        return posterior(belief, self.likelihood, wide), log_marginal_likelihood(
            belief, self.likelihood, wide
        )

    def _merged(self, log_weight: Tensor, belief: ExponentialFamily) -> ExponentialFamily:
        """One member for each mixture ``(..., K)``; where all weights are 0 they count as equal."""
        nothing = log_weight.isneginf().all(-1, keepdim=True)
        return project(Mixture(torch.where(nothing, 0.0, log_weight), belief), type(belief))

    def filter(self, y: Tensor, *, method: str = "gpb2") -> FamilyFiltered:
        """The mode and the state after each observation.

        Args:
            y: ``(T, D)``; a row of NaN is missing.
            method: "gpb2", "imm" or "gpb1".
        """
        choice("SwitchingFamily.filter", "method", method, METHODS)
        M = len(self.dynamics)
        assert self.initial_probability is not None
        level, log_transition = self.initial_probability.log(), self.transition.log()
        belief = self.prior if self.prior.batch_shape else self.prior.expand((M,))
        terms, levels, beliefs = [], [], []
        for step, row in enumerate(self._rows(y)):
            joint = level.unsqueeze(-1) + log_transition  # [i, j]
            try:
                if method == "gpb2":
                    after, gain = self._seen(self._moved(belief), row)
                    joint = joint + gain
                    belief = self._merged(joint.mT, after.reshape(M, M).map(_turned))
                    level = torch.logsumexp(joint, 0)
                else:
                    level = torch.logsumexp(joint, 0)
                    if method == "imm":
                        each = belief.expand((M, M))  # [j, i]
                        before = self._own(self._merged(joint.mT, each))
                    else:
                        before = self._moved(self._merged(joint.logsumexp(1), belief))
                    belief, gain = self._seen(before, row)
                    level = level + gain
            except ArgumentError as error:
                raise ArgumentError(
                    f"SwitchingFamily.filter: at step {step}, y = {row.tolist()}: {error}"
                ) from None
            total = torch.logsumexp(level, 0)
            if not bool(total.isfinite()):
                raise ArgumentError(
                    f"SwitchingFamily.filter: at step {step} no mode can give y = {row.tolist()}."
                )
            level = level - total
            terms.append(total)
            levels.append(level)
            beliefs.append(belief)
        per_step = torch.stack(terms)
        return FamilyFiltered(per_step.sum(), per_step, torch.stack(levels).exp(), stack(beliefs, 0))

    def forecast(
        self,
        post: FamilyFiltered,
        steps: int,
        *,
        levels: Sequence[float] = (0.5, 0.9),
        draws: int = 4000,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Central intervals of the observations to come, from draws of their law.

        Args:
            post: what the filter found.
            steps: how many observations ahead.
            levels: the probability of each interval.
            draws: how many.
            generator: the source of randomness; torch's own if not given.

        Returns:
            ``(steps, levels, 2, D)``, the lower and the upper end; ends are observations that were drawn,
            so those of counts are counts.
        """
        steps, draws = whole("forecast", "steps", steps), whole("forecast", "draws", draws)
        check_generator("forecast", generator)
        for level in levels:
            number("forecast", "levels", level, above=0, below=1)
        log_level, belief, found = post.mode_probability[-1].log(), post.belief[-1], []
        M = len(self.dynamics)
        for _ in range(steps):
            joint = log_level.unsqueeze(-1) + self.transition.log()
            belief = self._own(self._merged(joint.mT, belief.expand((M, M))))
            log_level = torch.logsumexp(joint, 0)
            mode = torch.multinomial(log_level.exp(), draws, True, generator=generator)
            drawn = predictive(belief, self.likelihood).sample((draws,), generator=generator)
            y = drawn[torch.arange(draws), mode].sort(0).values
            ends = [[(1 - level) / 2, (1 + level) / 2] for level in levels]
            found.append(
                torch.stack([torch.stack([y[round(e * (draws - 1))] for e in pair]) for pair in ends])
            )
        return torch.stack(found)


def _turned(leaf: Tensor, event: int) -> Tensor:
    """A tensor of a belief with batch axes (i, j), as (j, i)."""
    return leaf.transpose(-1 - event, -2 - event)
