r"""Switching models whose state is a conjugate exponential family (THEORY E3).

The state ξ is the parameter of what is observed: the rate of counts, the probability of an event, a mean and
variance. The belief about it, in each mode, is a member of the family conjugate to the observation. One step:

    a belief is moved by the dynamics of the mode it goes to,   belief_i → D_j(belief_i);
    the observation updates it, θ ← θ + e(y), and weighs it by its marginal likelihood;
    components that agree on the mode become one, with the same expected statistics (the M-projection).

    GPB2   log weight_ij = λ_i + log π_ij + log p_ij(y),   M² components, collapsed to one a mode
    IMM    collapses by w_{i|j} = e^{λ_i} π_ij / c_j first, then M components
    GPB1   collapses all modes to one belief, then M components

**Smoothing.** P(mode before = i | mode = j, y) is taken from the observations up to mode j's, as in Kim's
smoother but for the last of them, which GPB2 has weighed already. Discounting says how much of the evidence
of earlier observations is left, not how states go together; given the modes, the evidence of later ones is
discounted alike on its way back:

    r_t = δ_{t+1} (e(y_{t+1}) + r_{t+1}),     belief given all of y:  θ_t + r_t

Of a Gaussian level in its steady state this is Rauch's smoother exactly: two-sided exponential weights. Over
later modes r is averaged. With a `lag` of L, components that agree on the last L modes are merged instead of
those that agree on the last one: the same pass over M^L modes. With a lag of T nothing is merged.

Gammas, Betas, Dirichlets, NormalGammas and NormalInverseWisharts that are discounted go through the compiled
core (``csrc/conjugate.hpp``), pushed Gaussians through that of `SwitchingLinearGaussian`; other beliefs and
dynamics, and models of which a derivative is wanted, through the families' own functions, step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.checks import choice, entries, finite, number, whole
from exptilt._support.checks import generator as check_generator
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import derivatives_wanted, pytree
from exptilt.families import ExponentialFamily, Gaussian, Mixture, predictive
from exptilt.families.relations import evidence_of, moved, supports

from ..learning.summary import Fit
from ..model import SwitchingLinearGaussian
from .compiled import COMPILED, FITTED, METHODS, Compiled, Passed, centre_of, smooth
from .dynamics import DiscountedDynamics, Dynamics, LinearDynamics
from .learning import fit_family
from .steps import by_steps, merged, own

_MOST = 1024  # modes of a smoother with a lag


@dataclass(frozen=True)
class FamilyFiltered:
    """What a `SwitchingFamily` says after each observation; of B series all have a leading axis B.

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
class FamilySmoothed:
    """What a `SwitchingFamily` says given the whole series; of B series all have a leading axis B.

    Attributes:
        log_likelihood: ``()``, of the filter underneath.
        mode_probability: ``(T, M)``.
        pair_probability: ``(T, M, M)``, [t, i, j] = P(mode_{t−1} = i, mode_t = j | y); at t = 0 mode_{−1} is
            the one before the first step.
        belief: the law of the state in each mode, batch ``(T, M)``.
    """

    log_likelihood: Tensor
    mode_probability: Tensor
    pair_probability: Tensor
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
        dynamics: a map of beliefs for each mode, such as `DiscountedDynamics` or `LinearDynamics`.
        initial_probability: ``(M,)``, of the mode before the first step; uniform if not given.

    Example:
        >>> from exptilt.families import Gamma, Poisson
        >>> from exptilt.switching import DiscountedDynamics
        >>> calm, busy = (Gamma(torch.tensor([a]), torch.tensor([1.0])) for a in (2.0, 30.0))
        >>> model = SwitchingFamily(
        ...     transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]),
        ...     prior=calm,
        ...     likelihood=Poisson,
        ...     dynamics=[DiscountedDynamics(0.8, calm), DiscountedDynamics(0.2, busy)],
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
        size = self._size
        for j, move in enumerate(self.dynamics):
            if not callable(move):
                raise ArgumentError(
                    f"SwitchingFamily: dynamics[{j}] is {move!r}. Pass a map of beliefs, "
                    "such as DiscountedDynamics."
                )
            rest = move.rest if isinstance(move, DiscountedDynamics) else self.prior
            if type(rest) is not type(self.prior) or rest.natural_parameter.shape[-1] != size:
                own = f"a {type(self.prior).__name__} of {size} parameters"
                other = f"a {type(rest).__name__} of {rest.natural_parameter.shape[-1]}"
                raise ArgumentError(
                    f"SwitchingFamily: prior is {own}, dynamics[{j}] rests at {other}. "
                    "Pass the same family in the same dimension."
                )
        predictive(self.prior, self.likelihood)  # refuses what is not conjugate

    @cached_property
    def _size(self) -> int:
        """K, how many numbers the natural parameter has."""
        return self.prior.natural_parameter.shape[-1]

    def _series(self, y: Tensor, what: str) -> tuple[Tensor, Tensor]:
        """The observations ``(B, T, D)``, checked, and which are there ``(B, T)``; others hold any value."""
        caller = f"SwitchingFamily.{what}"
        if not isinstance(y, Tensor) or not y.is_floating_point() or y.ndim not in (2, 3) or not y.numel():
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ArgumentError(
                f"{caller}: y must be a floating-point tensor (T, D) or (B, T, D), not empty; got {got}."
            )
        rows = y if y.ndim == 3 else y.unsqueeze(0)
        if bool(y.isfinite().all()):
            wide, there = rows, torch.ones_like(rows[..., 0], dtype=torch.bool)
        else:
            missing = y.isnan()
            entries(caller, "y", y, missing.all(-1) | ~missing.any(-1), "NaN throughout or nowhere")
            there = ~rows[..., 0].isnan()
            if not bool(there.any()):
                return rows.nan_to_num(), there
            some = rows[there]
            finite(caller, y=some)
            wide = rows.where(there.unsqueeze(-1), some[0])  # a missing one is as good as any that is there
        self._evidence(wide[0, :1])  # refuses another dimension
        inside = supports(self.likelihood, wide)
        if inside is not None and not bool(inside.all()):
            series, step = (~inside).nonzero()[0].tolist()
            kind = self.likelihood if isinstance(self.likelihood, type) else type(self.likelihood)
            where = f"at step {step}" if y.ndim == 2 else f"of series {series} at step {step}"
            value = wide[series, step].tolist()
            raise ArgumentError(
                f"{caller}: y {where} is {value}, which {kind.__name__} cannot give. "
                "Pass observations in its support, NaN where there is none."
            )
        return wide, there

    def _evidence(self, y: Tensor) -> Tensor:
        """What observations ``(..., D)`` add to the natural parameter, ``(..., K)``."""
        found = evidence_of(self.prior, self.likelihood)(y)
        size = self._size
        if found.shape[-1] != size:
            raise ArgumentError(
                f"SwitchingFamily: y has {y.shape[-1]} columns, which do not fit the dimension of this "
                f"{type(self.prior).__name__}."
            )
        return found.expand(*y.shape[:-1], size)

    def _started(self) -> ExponentialFamily:
        return self.prior if self.prior.batch_shape else self.prior.expand((len(self.dynamics),))

    @cached_property
    def _tensors(self) -> list[Tensor]:
        """All tensors of the model."""
        parts: list[Any] = [self.transition, self.initial_probability, *pytree.tree_leaves(self.prior)]
        for move in self.dynamics:
            if isinstance(move, DiscountedDynamics):
                parts += pytree.tree_leaves(move.rest)
            elif isinstance(move, LinearDynamics):
                parts += [move.dynamics, move.process_noise]
        return [x for x in parts if isinstance(x, Tensor)]

    def _derivatives(self, y: Tensor) -> bool:
        """Whether a derivative of a pass may be asked for."""
        return derivatives_wanted([y, *self._tensors])

    def _pass(self, y: Tensor, method: str, what: str) -> tuple[Passed, Tensor, Tensor]:
        """The pass over all series, and the observations with which of them are there."""
        choice(f"SwitchingFamily.{what}", "method", method, METHODS)
        rows, there = self._series(y, what)
        if self._derivatives(y):
            return by_steps(self, rows, there, method, what), rows, there
        if type(self.prior) in COMPILED and all(
            isinstance(move, DiscountedDynamics) for move in self.dynamics
        ):
            return Compiled(self, rows, there).run(method, what), rows, there
        linear = self._linear()
        if linear is None:
            return by_steps(self, rows, there, method, what), rows, there
        with torch.no_grad():
            post = linear.filter(rows.where(there.unsqueeze(-1), torch.nan).double().numpy(), method=method)
        mean, covariance = (torch.from_numpy(x).to(y) for x in (post.mode_mean, post.mode_covariance))
        level, mixing = (torch.from_numpy(x).to(y) for x in (post.mode_probability, post.mixing_probability))
        terms = torch.from_numpy(post.log_likelihood_terms).to(y)
        return Passed(terms, level.log(), Gaussian(mean, covariance), mixing), rows, there

    def _linear(self) -> SwitchingLinearGaussian | None:
        """The same model as a `SwitchingLinearGaussian`, if it is one."""
        law, moves = self.likelihood, [move for move in self.dynamics if isinstance(move, LinearDynamics)]
        if not isinstance(law, Gaussian) or len(moves) < len(self.dynamics):
            return None
        prior = self._started()
        assert isinstance(prior, Gaussian)
        assert self.initial_probability is not None
        size = prior.mean_vector.shape[-1]
        wide = prior.covariance_matrix.expand(len(moves), size, size)
        return SwitchingLinearGaussian(
            transition=self.transition.double().numpy(),
            dynamics=np.stack([move.dynamics.double().numpy() for move in moves]),
            process_noise=np.stack([move.process_noise.double().numpy() for move in moves]),
            observation=np.eye(size),
            observation_noise=law.covariance_matrix.double().numpy(),
            initial_mean=prior.mean_vector.expand(len(moves), size).double().numpy(),
            initial_covariance=wide.double().numpy(),
            initial_probability=self.initial_probability.double().numpy(),
        )

    def filter(self, y: Tensor, *, method: str = "gpb2") -> FamilyFiltered:
        """The mode and the state after each observation.

        Args:
            y: ``(T, D)``, or ``(B, T, D)`` of B series; a row of NaN is missing.
            method: "gpb2", "imm" or "gpb1".
        """
        (terms, level, belief, _), _, _ = self._pass(y, method, "filter")
        found = FamilyFiltered(terms.sum(-1), terms, level.exp(), belief)
        if y.ndim == 3:
            return found
        return FamilyFiltered(found.log_likelihood[0], terms[0], found.mode_probability[0], belief[0])

    def smooth(self, y: Tensor, *, method: str = "gpb2", lag: int = 1) -> FamilySmoothed:
        """The mode and the state at each step, given the whole series; derivatives are not kept.

        Args:
            y: ``(T, D)`` or ``(B, T, D)``, as for `filter`.
            method: the filter underneath, "gpb2", "imm" or "gpb1".
            lag: how many modes components must share to be merged. The error falls and the cost grows with
                it, as of a model of M^lag modes.
        """
        lag = whole("SwitchingFamily.smooth", "lag", lag)
        if lag > 1:
            return self._with_lag(y, method, lag)
        with torch.no_grad():
            passed, rows, there = self._pass(y, method, "smooth")
            linear = self._linear()
            if linear is not None:
                back = linear.smooth(
                    rows.where(there.unsqueeze(-1), torch.nan).double().numpy(), method=method
                )
                laws = (back.mode_mean, back.mode_covariance, back.mode_probability, back.pair_probability)
                mean, covariance, probability, pairs = (torch.from_numpy(x).to(y) for x in laws)
                belief: ExponentialFamily = Gaussian(mean, covariance)
            else:
                probability, pairs, belief = self._smoothed(passed, rows, there)
        found = FamilySmoothed(passed.terms.sum(-1), probability, pairs, belief)
        if y.ndim == 3:
            return found
        return FamilySmoothed(found.log_likelihood[0], probability[0], pairs[0], belief[0])

    def _with_lag(self, y: Tensor, method: str, lag: int) -> FamilySmoothed:
        """The smoother of the model whose modes are the last `lag` modes, the present one first."""
        M = len(self.dynamics)
        if M**lag > _MOST:
            raise ArgumentError(
                f"SwitchingFamily.smooth: {M} modes at a lag of {lag} are {M**lag}, more than {_MOST}. "
                "Pass a smaller lag."
            )
        window = torch.cartesian_prod(*[torch.arange(M)] * lag)
        follows = (window[:, None, :-1] == window[None, :, 1:]).all(-1)
        now = window[:, 0]
        assert self.initial_probability is not None
        start = torch.where((window == now[:, None]).all(-1), self.initial_probability[now], 0.0)
        big = SwitchingFamily(
            torch.where(follows, self.transition[now[:, None], now], 0.0),
            self.prior[now] if self.prior.batch_shape else self.prior,
            self.likelihood,
            [self.dynamics[j] for j in now],
            start,
        )
        back = big.smooth(y, method=method)
        shape = (*back.mode_probability.shape[:-1], M, -1)
        share = back.mode_probability.log().reshape(shape)
        belief = merged(share, back.belief.reshape(shape))
        pairs = back.pair_probability.unflatten(-1, (M, -1)).sum(-1).unflatten(-2, (M, -1)).sum(-2)
        return FamilySmoothed(back.log_likelihood, share.exp().sum(-1), pairs, belief)

    def _smoothed(
        self, passed: Passed, rows: Tensor, there: Tensor
    ) -> tuple[Tensor, Tensor, ExponentialFamily]:
        moves = [move for move in self.dynamics if isinstance(move, DiscountedDynamics)]
        if len(moves) < len(self.dynamics):
            raise ArgumentError(
                "SwitchingFamily.smooth: the dynamics are neither all discounted, nor all pushed Gaussians, "
                "so how their states go together is not known. Use filter."
            )
        belief, centre = passed.belief, centre_of(self.prior, rows, there)
        evidence = self._evidence(rows if centre is None else rows - centre) * there.unsqueeze(-1)
        shifted = belief if centre is None else moved(belief, -centre)
        theta, discount = shifted.natural_parameter, [float(move.discount) for move in moves]
        probability, pairs, later = smooth(evidence.to(theta), discount, passed.log_level, passed.mixing)
        found = type(belief).from_natural(theta + later)
        return probability, pairs, found if centre is None else moved(found, centre)

    def most_likely_path(self, y: Tensor, *, method: str = "gpb2") -> Tensor:
        """The likeliest sequence of modes, given the whole series.

        Args:
            y: ``(T, D)`` or ``(B, T, D)``, as for `filter`.
            method: the filter underneath.

        Returns:
            ``(T,)`` or ``(B, T)``, whole numbers.
        """
        with torch.no_grad():
            passed, _, _ = self._pass(y, method, "most_likely_path")
        best, steps = torch.zeros_like(passed.log_level[:, 0]), []
        for t in range(1, y.shape[-2]):
            best, chosen = (best.unsqueeze(-1) + passed.mixing[:, t].log()).max(-2)
            steps.append(chosen)
        path = [(best + passed.log_level[:, -1]).argmax(-1)]
        for chosen in reversed(steps):
            path.append(torch.take_along_dim(chosen, path[-1].unsqueeze(-1), -1).squeeze(-1))
        found = torch.stack(path[::-1], -1)
        return found if y.ndim == 3 else found[0]

    def fit(
        self,
        y: Tensor,
        *,
        method: str = "gpb2",
        fixed: Sequence[str] = (),
        restarts: int = 0,
        spread: float = 0.5,
        max_steps: int = 200,
        tolerance: float = 1e-6,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Fit[Any]:
        """Learn the transition matrix, the discounts and the laws of rest by maximum likelihood.

        Prior and initial probability stay as they are. Beliefs must be Gamma, Beta, Dirichlet or NormalGamma
        and all dynamics discounted; for pushed Gaussians use `SwitchingLinearGaussian.fit`.

        Args:
            y: ``(T, D)`` or ``(B, T, D)``, as for `filter`; of several series the likelihoods are multiplied.
            method: the filter whose likelihood is climbed.
            fixed: what stays as it is, of "transition", "discount" and "rest".
            restarts: how many more starts, drawn around this model.
            spread: their standard deviation, in logarithms and logits.
            max_steps: of each start.
            tolerance: stop when the log-likelihood rises by less than this.
            generator: randomness of the restarts.
            progress: show a bar always, never, or (None) where somebody looks.
        """
        choice("SwitchingFamily.fit", "method", method, METHODS)
        rows, there = self._series(y.detach() if isinstance(y, Tensor) else y, "fit")
        if type(self.prior) not in FITTED or not all(
            isinstance(m, DiscountedDynamics) for m in self.dynamics
        ):
            kinds = sorted({type(move).__name__ for move in self.dynamics})
            raise ArgumentError(
                f"SwitchingFamily.fit: beliefs are {type(self.prior).__name__}, dynamics {kinds}. Only "
                "discounted Gamma, Beta, Dirichlet and NormalGamma beliefs are fitted; for pushed Gaussians "
                "use SwitchingLinearGaussian.fit."
            )
        if not bool(there.any()):
            raise ArgumentError(
                "SwitchingFamily.fit: every row is missing. Pass data with something observed."
            )
        with torch.no_grad():
            compiled = Compiled(self, rows, there)
        return fit_family(
            self, compiled, method, fixed, restarts, spread, max_steps, tolerance, generator, progress
        )

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
            ``(steps, levels, 2, D)``, of B series ``(B, steps, levels, 2, D)``: the lower and the upper end.
            Ends are observations that were drawn, so those of counts are counts.
        """
        steps, draws = whole("forecast", "steps", steps), whole("forecast", "draws", draws)
        check_generator("forecast", generator)
        for level in levels:
            number("forecast", "levels", level, above=0, below=1)
        log_level, belief, found = post.mode_probability[..., -1, :].log(), post.belief[..., -1, :], []
        M, batch = len(self.dynamics), tuple(post.mode_probability.shape[:-2])
        place = torch.tensor([[(1 - level) / 2, (1 + level) / 2] for level in levels]) * (draws - 1)
        for _ in range(steps):
            joint = log_level.unsqueeze(-1) + self.transition.log()
            each = belief.reshape(*batch, 1, M).expand((*batch, M, M))
            belief = own(self, merged(joint.mT, each))
            log_level = torch.logsumexp(joint, -2)
            chance = log_level.exp().reshape(-1, M)
            mode = torch.multinomial(chance, draws, True, generator=generator).mT.reshape(draws, *batch, 1, 1)
            drawn = predictive(belief, self.likelihood).sample((draws,), generator=generator)
            y = torch.take_along_dim(drawn, mode, -2).squeeze(-2).sort(0).values
            found.append(y[place.round().long()].movedim((0, 1), (-3, -2)))
        return torch.stack(found, len(batch))
