r"""Mixtures fitted to data by expectation maximisation.

    L(w, θ) = 1/N Σ_n log Σ_k w_k p(x_n|θ_k),     r_nk = w_k p(x_n|θ_k) / Σ_j w_j p(x_n|θ_j)

A step gives each component the expected statistic m_k = Σ_n r_nk u(x_n) / Σ_n r_nk and the weight Σ_n r_nk/N.
Since ∂L/∂θ_k = w'_k (m'_k − ∇A(θ_k)), where ' marks values after the step, the length of a step *is* that of
the gradient; in the metric of the complete data's Fisher information it is, to leading order,

    ‖∇L‖ = √2 [KL(w' ‖ w) + Σ_k w'_k KL(p'_k ‖ p_k)]^{1/2}

which does not depend on how the family is parametrised. This length is the residual: a fit has converged when
it is small, not when the likelihood grows slowly.

The likelihood of a mixture of densities is unbounded: a component that shrinks onto one point has a density
without limit there. A start with such a component ends as UNBOUNDED, and is returned only if all starts do.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from exptilt._support.checks import entries, finite, floating, number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt._support.solution import Solution, Status
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, make
from exptilt.families.members.diagonal_gaussian import DiagonalGaussian
from exptilt.families.members.gaussian import Gaussian
from exptilt.families.members.known_parameter import KnownParameter
from exptilt.families.members.mixture import Mixture

Family = TypeVar("Family", bound=ExponentialFamily)
_EMPTY = 1e-6  # a component with less mass than this part of one point is left out
_FLAT = 1e-12  # least eigenvalue of a correlation matrix; least ratio of variance to squared mean
_INSIDE = 1e-9  # a mean of counts this close to the boundary counts as on it, and is moved inside


@dataclass(frozen=True)
class _Problem:
    """The data ``(N, ...)`` in float64, their statistic ``(N, K)``, the family and its known parameter."""

    family: type[ExponentialFamily]
    x: Tensor
    statistic: Tensor
    known: Tensor | None

    @property
    def counts(self) -> bool:
        return self.typical().base is Base.COUNTING

    def typical(self) -> ExponentialFamily:
        """Some member of the family."""
        return self.family._some(self.known, self.statistic[0], "fit_mixture")

    def fitted(self, share: Tensor) -> tuple[ExponentialFamily, Tensor, Tensor]:
        """Members ``(S, K)`` for shares ``(N, S, K)``; which have collapsed, which are on the boundary."""
        weight = share / share.sum(0)
        mean = torch.einsum("nsk,nd->skd", weight, self.statistic)
        if issubclass(self.family, Gaussian | DiagonalGaussian):
            return self._gaussian(weight)
        edge = torch.zeros(mean.shape[:-1], dtype=torch.bool, device=mean.device)
        found = self.family.from_mean(mean, known=self.known)
        bad = found.code != Status.CONVERGED.code
        if self.counts:
            typical = self.typical()
            excess = typical._excess(mean, edge)
            edge = bad if excess is None else bad | (excess > -_INSIDE)
            inward = torch.where(edge.unsqueeze(-1), 2 * _INSIDE * (typical.mean_parameter - mean), 0.0)
            found = self.family.from_mean(mean + inward, known=self.known)
            bad = found.code != Status.CONVERGED.code
        return found.value, bad | self._narrow(found.value), edge

    def rounding(self, members: ExponentialFamily, weight: Tensor) -> Tensor:
        """``(S,)``: how far a change of E[u] in its last digits moves the members, as a residual."""
        if issubclass(self.family, Gaussian | DiagonalGaussian):
            return torch.zeros_like(weight[:, 0])  # not found from E[u]
        mean = members.mean_parameter
        signs = torch.ones_like(mean[0, 0]).cumsum(-1).remainder(2) * 2 - 1
        shifted = mean * (1 + 4 * torch.finfo(mean.dtype).eps * signs)
        found = self.family.from_mean(shifted, known=self.known)
        moved = torch.where(found.code == Status.CONVERGED.code, found.value._kl(members), 0.0)
        return (2 * (weight * moved.clamp_min(0)).sum(-1)).sqrt()

    def _gaussian(self, weight: Tensor) -> tuple[ExponentialFamily, Tensor, Tensor]:
        """`fitted` for Gaussians, from squares about each component's own mean, which lose least digits."""
        mean = torch.einsum("nsk,nd->skd", weight, self.x)
        offset = self.x[:, None, None] - mean
        none = torch.zeros(mean.shape[:-1], dtype=torch.bool, device=mean.device)
        variance = torch.einsum("nsk,nskd->skd", weight, offset**2)
        rounding = (8 * torch.finfo(mean.dtype).eps * self.x.abs().amax(0)) ** 2
        narrow = (variance <= _FLAT**2 * self.x.var(0) + rounding).any(-1)
        if issubclass(self.family, DiagonalGaussian):
            return make(self.family, mean_vector=mean, variance=variance), narrow, none
        covariance = torch.einsum("nsk,nskd,nske->skde", weight, offset, offset)
        covariance = (covariance + covariance.mT) / 2
        size = variance.sqrt().clamp_min(torch.finfo(variance.dtype).tiny)
        correlation = covariance / (size.unsqueeze(-1) * size.unsqueeze(-2))
        flat = torch.linalg.eigvalsh(correlation.nan_to_num())[..., 0] < _FLAT
        return make(self.family, mean_vector=mean, covariance_matrix=covariance), narrow | flat, none

    def _narrow(self, members: ExponentialFamily) -> Tensor:
        """``(S, K)``: whether the variance is lost in the rounding of E[u]; always False for counts."""
        mean, variance = (moment.flatten(2) for moment in members._event_moments())
        if self.counts:
            return torch.zeros(mean.shape[:-1], dtype=torch.bool, device=mean.device)
        narrow: Tensor = (variance <= _FLAT * (mean**2 + self.x.flatten(1).var(0))).any(-1)
        return narrow

    def shares(self, log_weight: Tensor, members: ExponentialFamily) -> tuple[Tensor, Tensor]:
        """Shares r ``(N, S, K)`` and mixture log-densities ``(N, S)``."""
        joint = log_weight + self.log_prob(members)
        total = torch.logsumexp(joint, -1)
        return (joint - total.unsqueeze(-1)).exp(), total

    def log_prob(self, members: ExponentialFamily) -> Tensor:
        """Log-densities ``(N, S, K)`` of data that are known to be in the support."""
        return members._log_prob(self.x.reshape(len(self.x), 1, 1, *self.x.shape[1:]))

    def start(self, starts: int, components: int, generator: torch.Generator | None) -> Tensor:
        """Shares ``(N, S, K)``, most of each for the nearest of centres drawn far apart (k-means++)."""
        u = (self.statistic - self.statistic.mean(0)) / self.statistic.std(0).clamp_min(1e-300)
        near = []
        for _ in range(starts):
            first = int(torch.randint(len(u), (), generator=generator))
            away = [((u - u[first]) ** 2).sum(-1)]
            while len(away) < components:
                least = torch.stack(away).amin(0)
                least = least if bool(least.sum() > 0) else torch.ones_like(least)
                chosen = int(torch.multinomial(least, 1, generator=generator))
                away.append(((u - u[chosen]) ** 2).sum(-1))
            near.append(torch.stack(away).argmin(0))
        hard = torch.nn.functional.one_hot(torch.stack(near, -1), components).to(u)
        return 0.8 * hard + 0.2 / components


def fit_mixture(
    x: Tensor,
    family: type[Family],
    components: int,
    *,
    known: Tensor | None = None,
    starts: int = 8,
    tolerance: float = 1e-6,
    max_steps: int = 1000,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Solution[Mixture]:
    """The mixture of largest likelihood among several starts of EM, and the status of its start.

    Args:
        x: ``(N, D)``, or ``(N,)`` for numbers, or events of the family such as matrices ``(N, D, D)``.
        family: of the components, such as `Gaussian`, `Gamma` or `BernoulliProduct`.
        components: number of components.
        known: ``()`` or ``(D,)`` as the constructor takes it: the parameter that a family such as `Binomial`
            does not learn.
        starts: number of starts, run side by side from centres drawn at random.
        tolerance: on the residual, the length of the gradient of the mean log-likelihood per observation in
            the metric of the complete data's Fisher information.
        max_steps: of each start.
        generator: for the centres.
        progress: show a bar after two seconds: True, False, or None for only in a terminal.

    Returns:
        A `Solution` of the best start. CONVERGED: the gradient is within the tolerance, a local maximum (or a
        saddle) of the likelihood. BOUNDARY: converged, but the mean of a component of counts is on the
        boundary of the attainable set (a coin that always fell on one side); the value is just inside.
        UNBOUNDED: every start shrank a component onto too few points. STALLED: rounding of the statistic
        moves a component by more than the tolerance (a Gamma of shape 1e9). MAX_STEPS: none of these yet. A
        component without points has log-weight −inf.

    Example:
        >>> x = torch.cat([torch.randn(200) - 4, torch.randn(100) + 4])
        >>> found = fit_mixture(x, Gaussian, 2)
        >>> found.status.name, found.value.log_probability.exp().sort().values.round(decimals=1)
        ('CONVERGED', tensor([0.3000, 0.7000]))
    """
    problem = _problem(x, family, components, known)
    whole("fit_mixture", "starts", starts)
    whole("fit_mixture", "max_steps", max_steps)
    number("fit_mixture", "tolerance", tolerance, above=0)
    count = len(problem.x)
    share = problem.start(starts, components, generator)
    log_weight = share.mean(0).log()
    members, collapsed, edge = problem.fitted(share)
    stuck = collapsed.any(-1)
    members = _kept(stuck[:, None].expand_as(collapsed), problem.typical(), members)
    residual = torch.full(log_weight.shape[:1], torch.inf, dtype=log_weight.dtype, device=log_weight.device)
    done, steps, edges = stuck.clone(), 0, edge
    for _ in track(range(max_steps), f"EM, {starts} starts", show=progress):
        if bool(done.all()):
            break
        steps += 1
        share, total = problem.shares(log_weight, members)
        mass = share.sum(0)
        empty = (mass < _EMPTY) & (mass / count <= log_weight.exp())  # and its weight is falling
        safe = torch.where(empty, 1.0 / count, share)
        after, collapsed, edge = problem.fitted(safe)
        after = _kept(empty, members, after)
        weight = torch.where(empty, 0.0, mass / count)
        lost = (collapsed & ~empty).any(-1) | ~total.isfinite().all(0)
        change = (weight * torch.where(empty, 0.0, after._kl(members).clamp_min(0))).sum(-1)
        # Add KL(w' ‖ w); for a component left out, take the gain from giving it a little weight.
        old = log_weight.exp()
        change = change + torch.where(empty, old, torch.xlogy(weight, weight / old) - weight + old).sum(-1)
        length = (2 * change.clamp_min(0)).sqrt()
        if bool(empty.any()):
            gain = (problem.log_prob(members) - total.unsqueeze(-1)).exp().mean(0) - 1
            length = torch.maximum(length, torch.where(old == 0, gain, 0.0).amax(-1))
        moving = ~done & ~lost
        residual = torch.where(moving, length, residual)
        stuck = stuck | (lost & ~done)
        done = done | lost | (moving & (length <= tolerance))
        still = (~done)[:, None].expand_as(empty)
        members = _kept(~still, members, after)
        log_weight = torch.where(still, weight.log(), log_weight)
        edges = torch.where(still, edge, edges)
    return _best(problem, x, Mixture(log_weight, members), residual, stuck, edges, tolerance, steps)


def _best(
    problem: _Problem,
    x: Tensor,
    every: Mixture,
    residual: Tensor,
    stuck: Tensor,
    edges: Tensor,
    tolerance: float,
    steps: int,
) -> Solution[Mixture]:
    """The start with the best status and, among equals, the largest likelihood, in the dtype of the data."""
    rounding = problem.rounding(every.components, every.log_probability.exp())
    close, residual = residual <= tolerance, torch.maximum(residual, rounding)
    coarse = close & (rounding > tolerance)
    at_edge = (edges & (every.log_weight > -torch.inf)).any(-1)
    code = torch.where(close, Status.CONVERGED.code, Status.MAX_STEPS.code)
    code = torch.where(close & at_edge, Status.BOUNDARY.code, code)
    code = torch.where(coarse, Status.STALLED.code, code)
    code = torch.where(stuck, Status.UNBOUNDED.code, code)
    likelihood = problem.shares(every.log_weight, every.components)[1].mean(0).nan_to_num(-torch.inf)
    grade = (close & ~coarse).int() - stuck.int()  # solved, unsolved, without a solution
    best = max(range(len(code)), key=lambda start: (int(grade[start]), float(likelihood[start])))
    status = list(Status)[int(code[best])]
    return Solution.of(every[best].to(x.dtype), status, residual[best].to(x.dtype), steps)


def _problem(x: Any, family: Any, components: int, known: Tensor | None) -> _Problem:
    """The problem, after checks of all arguments."""
    if (
        not (isinstance(family, type) and issubclass(family, ExponentialFamily))
        or len(family._event_ranks) > 1
    ):
        wanted = "an exponential family of vectors or matrices, such as Gaussian"
        raise ArgumentError(f"fit_mixture: family must be {wanted}; got {family!r}.")
    rank = family._event_ranks[0]
    x = x.unsqueeze(-1) if isinstance(x, Tensor) and x.ndim == 1 and rank == 1 else x
    data = floating("fit_mixture", "x", x, axes=rank + 1).detach().double()
    if data.ndim != rank + 1:
        raise ArgumentError(f"fit_mixture: x must be (N, {', '.join('D' * rank)}); got {tuple(x.shape)}.")
    finite("fit_mixture", x=data)
    most = whole("fit_mixture", "components", components)
    if len(data) <= most:
        raise ArgumentError(f"fit_mixture: {len(data)} points are too few for {most} components.")
    given = None if known is None else torch.as_tensor(known).double()
    like = data[0] if issubclass(family, KnownParameter) else family._statistic(data[0])
    member = family._some(given, like, "fit_mixture")
    # In the dtype of x: a float32 unit vector has length 1 to seven digits only.
    inside = member.to(x.dtype)._support(x)
    if inside is not None:
        wide = inside[(..., *[None] * rank)].expand(data.shape)
        entries("fit_mixture", "x", data, wide, f"in the support of {family.__name__}")
    return _Problem(family, data, member._whole_statistic(data), given)


def _kept(keep: Tensor, old: ExponentialFamily, new: ExponentialFamily) -> ExponentialFamily:
    """Members of a batch ``(S, K)``: the old ones where `keep`, else the new ones."""
    theirs = iter([leaf for leaf, _ in old.expand(tuple(keep.shape))._leaves()])
    return new.expand(tuple(keep.shape)).map(
        lambda leaf, event: torch.where(keep[(..., *[None] * event)], next(theirs), leaf)
    )
