r"""Switching models whose state is a conjugate exponential family (THEORY E3).

The state ξ is the parameter of the observed law: the rate of counts, the probability of an event, a mean and
variance. The belief about it, in each mode, is a member of the family conjugate to the observation. One step:

    a belief is moved by the dynamics of the mode it goes to,   belief_i → D_j(belief_i);
    the observation updates it, θ ← θ + e(y), and weighs it by its marginal likelihood;
    components that agree on the mode become one, with the same expected statistics (the M-projection).

    GPB2   log weight_ij = λ_i + log π_ij + log p_ij(y),   M² components, collapsed to one a mode
    IMM    collapses by w_{i|j} = e^{λ_i} π_ij / c_j first, then M components
    GPB1   collapses all modes to one belief, then M components

**Smoothing.** P(mode before = i | mode = j, y) uses the observations up to mode j's own; Kim's smoother
leaves that last one out, which GPB2 has already weighed. Discounting defines how much evidence of earlier
observations is left, but no joint law of successive states; given the modes, evidence of later observations
is discounted in the same way on its way back:

    r_t = δ_{t+1} (e(y_{t+1}) + r_{t+1}),     belief given all of y:  θ_t + r_t

Of a Gaussian level in its steady state this is Rauch's smoother exactly: two-sided exponential weights. Over
later modes r is averaged. GPB_k merges components that agree on the last k − 1 modes instead of those that
agree on the last one: the same pass over M^{k−1} windows of modes. With k > T nothing is merged.

Discounted Gammas, Betas, Dirichlets, NormalGammas, NormalInverseWisharts, Wisharts and Gaussians, and pushed
Gammas, go through the compiled core (``csrc/families/conjugate.hpp``), pushed Gaussians through that of
`SwitchingLinearGaussian`. Other beliefs and dynamics, and models that require a derivative, use the families'
own functions, step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.checks import choice, entries, finite, number, whole
from exptilt._support.checks import generator as check_generator
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import derivatives_wanted, pytree
from exptilt.families import ExponentialFamily, Gamma, Gaussian, Wishart, predictive
from exptilt.families.relations import evidence_of, moved, supports

from ..arrays import METHODS
from ..checks import Array, Checker
from ..inference.results import Filtered, Laws, Smoothed
from ..inference.window import check_method, collapse_order, follows, merged_modes, newest
from ..learning.summary import Fit
from ..model import SwitchingLinearGaussian
from ..series import Data, SeriesLike, Values, arrange, columns_of, read
from .compiled import COMPILED, Compiled, Passed, centre_of, smooth
from .dynamics import DiscountedDynamics, Dynamics, LinearDynamics
from .learning import fit_family
from .steps import by_steps, merged, own

_check = Checker("SwitchingFamily")


class FamilyLaws(Laws):
    """Beliefs in a family, batch ``(rows, M)``; moments of the state are those of its members."""

    def __init__(self, log_mode: Tensor, belief: ExponentialFamily, terms: Any, total: Any) -> None:
        self.log_mode, self._belief, self.terms, self.total = log_mode, belief, terms, total

    @property
    def belief(self) -> ExponentialFamily:
        """The beliefs."""
        return self._belief

    @property
    def mode_mean(self) -> Tensor:
        """Means of the state by mode."""
        found = self._belief.event_mean
        if not isinstance(found, Tensor):
            kind = type(self._belief).__name__
            raise ArgumentError(f"the state of a {kind} is a pair. Ask `belief` or `state` for its moments.")
        return found

    @property
    def mode_covariance(self) -> Tensor:
        """Covariances of the state by mode."""
        return self._belief._event_covariance()


@dataclass(frozen=True)
class SwitchingFamily:
    """A Markov chain of modes, each of which moves a belief in a conjugate family in its own way.

    Args:
        transition: ``(M, M)``, [i, j] = P(mode j next | mode i now).
        prior: the belief before the first step, batch ``()`` or ``(M,)``.
        likelihood: a family conjugate to the prior, or a member of it that holds the known parameters; see
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

    transition: Array
    prior: ExponentialFamily
    likelihood: type[ExponentialFamily] | ExponentialFamily
    dynamics: Sequence[Dynamics]
    initial_probability: Array = None

    def __post_init__(self) -> None:
        M = len(self.dynamics)
        if self.initial_probability is None:
            object.__setattr__(self, "initial_probability", torch.full((M,), 1 / M, dtype=torch.float64))
        for name, shape in (("transition", (M, M)), ("initial_probability", (M,))):
            given = getattr(self, name)
            x = _check.convert(name, given, True)
            if not isinstance(given, Tensor) or not given.is_floating_point():
                x = x.to(getattr(self.prior, "dtype", x.dtype))
            object.__setattr__(self, name, x)
            if tuple(x.shape) != shape:
                got = tuple(x.shape)
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
        predictive(self.prior, self.likelihood)  # raises unless they are conjugate

    @cached_property
    def _size(self) -> int:
        """K, the size of the natural parameter."""
        return self.prior.natural_parameter.shape[-1]

    def _series(self, y: Any, what: str) -> tuple[Data, Tensor, Tensor]:
        """The data, observations ``(rows, D)``, and where they are not missing ``(rows,)``."""
        caller = f"SwitchingFamily.{what}"
        if isinstance(y, Tensor) and y.is_floating_point() and y.ndim in (2, 3) and y.numel():
            starts = np.arange(0, y.shape[:-1].numel() + 1, y.shape[-2])
            layout = "single" if y.ndim == 2 else "batch"
            data = Data(y.reshape(-1, y.shape[-1]), starts, layout, "torch", self.prior.dtype)
            rows = data.tensor
        else:
            data = replace(
                read(y, columns_of(y, caller), what=caller, model_is_torch=True), dtype=self.prior.dtype
            )
            rows = data.tensor.to(self.prior.dtype)
        if bool(rows.isfinite().all()):
            wide, there = rows, torch.ones(len(rows), dtype=torch.bool)
        else:
            missing = rows.isnan()
            entries(caller, "y", rows, missing.all(-1) | ~missing.any(-1), "NaN throughout or nowhere")
            there = ~missing[:, 0]
            if not bool(there.any()):
                return data, rows.nan_to_num(), there
            some = rows[there]
            finite(caller, y=some)
            wide = rows.where(there.unsqueeze(-1), some[0])  # fill missing rows with a valid one
        self._evidence(wide[:1])  # raises if the dimension is wrong
        inside = supports(self.likelihood, wide)
        if inside is not None and not bool(inside.all()):
            row = int((~inside).nonzero()[0])
            series = int(np.searchsorted(data.starts, row, "right")) - 1
            kind = self.likelihood if isinstance(self.likelihood, type) else type(self.likelihood)
            where = f"at step {row - data.starts[series]}"
            where = where if data.layout == "single" else f"of series {series} {where}"
            raise ArgumentError(
                f"{caller}: y {where} is {wide[row].tolist()}, which {kind.__name__} cannot give. "
                "Pass observations in its support, NaN where there is none."
            )
        return data, wide, there

    def _evidence(self, y: Tensor) -> Tensor:
        """The evidence e(y) ``(..., K)`` of observations ``(..., D)``."""
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
    def _is_compiled(self) -> bool:
        """Whether the compiled core supports these beliefs and dynamics."""
        if all(isinstance(move, DiscountedDynamics) for move in self.dynamics):
            return type(self.prior) in COMPILED
        return isinstance(self.prior, Gamma) and all(isinstance(m, LinearDynamics) for m in self.dynamics)

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

    def _pass(self, y: Any, method: str, what: str) -> tuple[Passed, Data, Tensor, Tensor]:
        """Filter all series; returns the pass, the data, the observations and where they are not missing."""
        data, rows, there = self._series(y, what)
        slow = derivatives_wanted([rows, *self._tensors])
        if not slow and self._is_compiled:
            return Compiled(self, rows, there, data.starts).run(method, what), data, rows, there
        linear = None if slow else self._linear()
        if linear is None:
            return by_steps(self, rows, there, data.starts, method, what), data, rows, there
        with torch.no_grad():
            post = linear.filter(self._seen(data, rows, there), method=method)
        law, mixing = post._law, post._law.known("mixing_probability")
        values = (law.terms, law.log_mode, law.mode_mean, law.mode_covariance, mixing)
        terms, level, mean, cov, mixing = (torch.from_numpy(x).to(rows) for x in values)
        return Passed(terms, level, Gaussian(mean, cov), mixing), data, rows, there

    @staticmethod
    def _seen(data: Data, rows: Tensor, there: Tensor) -> list[np.ndarray]:
        """The series one by one, NaN where nothing was observed."""
        whole = rows.where(there.unsqueeze(-1), torch.nan).double().numpy()
        return [whole[cut] for cut in data.cuts]

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

    def filter(self, y: SeriesLike, *, method: str = "gpb2") -> Filtered["SwitchingFamily"]:
        """Mode probabilities and beliefs after each observation.

        Args:
            y: ``(T, D)``, ``(B, T, D)`` or a list of series; tensors, numpy, pandas or lists, whole numbers
                too. A row of NaN is missing.
            method: "gpb2", "imm", "gpb1", or "gpb3" and so on, as for `SwitchingLinearGaussian`.
        """
        model, name, M = self._windowed(method, 1, "filter")
        passed, data, _, _ = model._pass(y, name, "filter")
        level, belief = passed.log_level, passed.belief
        if M:
            level, weight, _ = merged_modes(M, level)
            belief = _merged_windows(M, weight, belief)
        return Filtered(
            method, data, FamilyLaws(level, belief, passed.terms, _totals(passed.terms, data)), self
        )

    def smooth(self, y: SeriesLike, *, method: str = "gpb2", lag: int = 1) -> Smoothed:
        """Mode probabilities and beliefs at each step given the whole series, without derivatives.

        Args:
            y: as for `filter`.
            method: the filter underneath: "gpb2", "imm", "gpb1", or "gpb3" and so on.
            lag: components that agree on their last `lag` modes are merged; a lag of L with "gpb2" is
                "gpb{L+1}". The error falls with the lag; the cost is that of a model of M^lag modes.
        """
        model, name, M = self._windowed(method, whole("SwitchingFamily.smooth", "lag", lag), "smooth")
        with torch.no_grad():
            passed, data, rows, there = model._pass(y, name, "smooth")
            linear = model._linear()
            if linear is not None:
                back = linear.smooth(self._seen(data, rows, there), method=name)
                laws = (
                    np.exp(back._law.log_mode),
                    back._pairs,
                    back._law.mode_mean,
                    back._law.mode_covariance,
                )
                probability, pairs, mean, covariance = (torch.from_numpy(x).to(rows) for x in laws)
                belief: ExponentialFamily = Gaussian(mean, covariance)
            else:
                probability, pairs, belief = model._smoothed(passed, data, rows, there)
            if M:
                _, weight, _ = merged_modes(M, probability.log())
                belief = _merged_windows(M, weight, belief)
                pairs = probability.reshape(len(rows), -1, M, M).sum(1)
                probability = pairs.sum(1)
        laws_found = FamilyLaws(probability.log(), belief, None, _totals(passed.terms, data))
        return Smoothed(method, data, laws_found, pairs)

    def _windowed(self, method: str, lag: int, what: str) -> tuple["SwitchingFamily", str, int]:
        """The model over windows of modes, its method, and M; this model and 0 if there are no windows."""
        caller = f"SwitchingFamily.{what}"
        check_method(method, caller)
        k = max(collapse_order(method), lag + 1)
        if k == 2:
            return self, method, 0
        now = newest(M := len(self.dynamics), k, caller)
        chosen = torch.from_numpy(now)
        big = SwitchingFamily(
            self.transition[chosen][:, chosen] * torch.from_numpy(follows(now)).to(self.transition),
            self.prior[chosen] if self.prior.batch_shape else self.prior,
            self.likelihood,
            [self.dynamics[j] for j in now],
            self.initial_probability[chosen] * (M / len(now)),
        )
        return big, "gpb2" if collapse_order(method) > 2 else method, M

    def _smoothed(
        self, passed: Passed, data: Data, rows: Tensor, there: Tensor
    ) -> tuple[Tensor, Tensor, ExponentialFamily]:
        moves = [move for move in self.dynamics if isinstance(move, DiscountedDynamics)]
        if len(moves) < len(self.dynamics):
            raise ArgumentError(
                "SwitchingFamily.smooth: the dynamics are neither all discounted, nor all pushed Gaussians, "
                "so there is no joint law of successive states. Use filter."
            )
        belief, centre = passed.belief, centre_of(self.prior, rows, there)
        evidence = self._evidence(rows if centre is None else rows - centre) * there.unsqueeze(-1)
        shifted = belief if centre is None else moved(belief, -centre)
        theta, discount = shifted.natural_parameter, [float(move.discount) for move in moves]
        level, mixing = passed.log_level, passed.mixing
        probability, pairs, later = smooth(evidence.to(theta), discount, level, mixing, data.starts)
        found = type(belief).from_natural(theta + later)
        return probability, pairs, found if centre is None else moved(found, centre)

    def most_likely_path(self, y: SeriesLike, *, method: str = "gpb2") -> Values:
        """The most likely sequence of modes given the whole series.

        Args:
            y: as for `filter`.
            method: the filter underneath: "gpb2", "imm" or "gpb1".

        Returns:
            ``(T,)`` or ``(B, T)``, whole numbers.
        """
        choice("SwitchingFamily.most_likely_path", "method", method, METHODS)
        with torch.no_grad():
            passed, data, rows, _ = self._pass(y, method, "most_likely_path")
        path = torch.empty(len(rows), dtype=torch.long)
        for cut in data.cuts:
            best, steps = torch.zeros_like(passed.log_level[0]), []
            for mixing in passed.mixing[cut][1:].log():
                best, chosen = (best.unsqueeze(-1) + mixing).max(-2)
                steps.append(chosen)
            mode = int((best + passed.log_level[cut.stop - 1]).argmax())
            for t in range(cut.stop - 1, cut.start - 1, -1):
                path[t] = mode
                mode = int(steps[t - cut.start - 1][mode]) if t > cut.start else mode
        return arrange(path, data, None)

    def fit(
        self,
        y: SeriesLike,
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

        Prior and initial probability stay as they are. Beliefs must be Gamma, Beta, Dirichlet, NormalGamma or
        NormalInverseWishart and all dynamics discounted; for pushed Gaussians there is
        `SwitchingLinearGaussian.fit`.

        Args:
            y: ``(T, D)`` or ``(B, T, D)``, as for `filter`; of several series the likelihoods are multiplied.
            method: the filter whose likelihood is climbed.
            fixed: which of "transition", "discount" and "rest" are not learned.
            restarts: how many more starts, drawn around this model.
            spread: standard deviation of these starts, in logarithms and logits.
            max_steps: of each start.
            tolerance: stop when the log-likelihood rises by less than this.
            generator: randomness of the restarts.
            progress: show a bar: True, False, or None for only on a terminal.
        """
        choice("SwitchingFamily.fit", "method", method, METHODS)
        data, rows, there = self._series(y.detach() if isinstance(y, Tensor) else y, "fit")
        fitted = type(self.prior) in COMPILED and not isinstance(self.prior, Gaussian | Wishart)
        if not fitted or not all(isinstance(m, DiscountedDynamics) for m in self.dynamics):
            kinds = sorted({type(move).__name__ for move in self.dynamics})
            raise ArgumentError(
                f"SwitchingFamily.fit: beliefs are {type(self.prior).__name__}, dynamics {kinds}. Only "
                "discounted Gamma, Beta, Dirichlet, NormalGamma and NormalInverseWishart beliefs are fitted; "
                "for pushed Gaussians use SwitchingLinearGaussian.fit."
            )
        if not bool(there.any()):
            raise ArgumentError(
                "SwitchingFamily.fit: every row is missing. Pass data with something observed."
            )
        with torch.no_grad():
            compiled = Compiled(self, rows, there, data.starts)
        return fit_family(
            self, compiled, method, fixed, restarts, spread, max_steps, tolerance, generator, progress
        )

    def forecast(
        self,
        post: Filtered[Any],
        steps: int,
        *,
        levels: Sequence[float] = (0.5, 0.9),
        draws: int = 4000,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Central intervals of the next observations, from draws of their law.

        Args:
            post: a result of `filter`.
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
        M, batch = len(self.dynamics), () if post.data.layout == "single" else (post.data.series,)
        ends = torch.from_numpy(post.data.starts[1:] - 1)
        log_level, belief, found = post._law.log_mode[ends], post._law.belief[ends], []
        log_level, belief = log_level.reshape(*batch, M), belief.reshape((*batch, M))
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


def _totals(terms: Tensor, data: Data) -> Tensor:
    """The sum of the terms of each series."""
    return torch.stack([terms[cut].sum() for cut in data.cuts])


def _merged_windows(M: int, weight: Tensor, belief: ExponentialFamily) -> ExponentialFamily:
    """Beliefs by mode, from those by window ``(rows, M^{k−1})`` with their shares ``(rows, M^{k−2}, M)``."""
    rows, parts, _ = weight.shape
    order = torch.arange(parts * M).reshape(-1, M).mT.reshape(-1)  # windows that end alike, side by side
    return merged(weight.mT.log(), belief[:, order].reshape((rows, M, parts)))
