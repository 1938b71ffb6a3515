r"""Kullback–Leibler divergence between any two measures that can be compared.

    KL(p‖q) = E_p[log p − log q]

Within one exponential family it is a Bregman divergence of A, arguments swapped (THEORY A10):

    KL(p_θ ‖ p_θ') = A(θ') − A(θ) − <∇A(θ), θ' − θ>.

Mixtures have no closed form. They get a sample mean with its standard error and a bracket that holds for certain (`mixture_bounds`). The
`Estimate` that comes back says which it is.
"""

from typing import cast

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.families.diagonal_gaussian import DiagonalGaussian
from exptilt.families.empirical import Empirical
from exptilt.families.estimate import Estimate, Kind
from exptilt.families.exponential import Exponential
from exptilt.families.family import ExponentialFamily
from exptilt.families.from_density import FromDensity
from exptilt.families.gamma import Gamma
from exptilt.families.gaussian import Gaussian
from exptilt.families.measure import Measure, make
from exptilt.families.mixture import AnyMixture
from exptilt.families.mixture_bounds import kl_bounds


def kl(p: Measure, q: Measure, *, samples: int = 4096, generator: torch.Generator | None = None) -> Estimate:
    """KL(p‖q), batched: an `Estimate` of shape ``(...)`` whose `kind` says whether it is exact.

    Args:
        p: a measure, taken as normalised.
        q: another on the same space.
        samples: how many draws of p are taken where no closed form exists; 0 gives the deterministic bracket alone.
        generator: for those draws.

    Example:
        >>> kl(Exponential(torch.tensor([1.0])), Exponential(torch.tensor([2.0]))).value  # 2 − 1 − log 2
        tensor(0.3069)
    """
    for name, measure in (("p", p), ("q", q)):
        if not isinstance(measure, Measure):
            raise ArgumentError(f"kl: {name} must be a measure; got {type(measure).__name__}.")
    _check_batches(p, q)
    if isinstance(p, Empirical) or isinstance(q, Empirical):
        return Estimate.exact(_empirical(p, q))
    p, q = _common(p, q)
    _check_events(p, q)
    if isinstance(p, ExponentialFamily) and type(p) is type(q):
        return Estimate.exact(p._kl(q))
    if isinstance(p, FromDensity):
        return _weighted(p, q)
    lower, upper = _bracket(p, q)
    if samples == 0:
        return Estimate.bounded(lower, upper)
    if samples < 2:
        raise ArgumentError(f"kl: samples must be 0 (bounds alone) or at least 2; got {samples}.")
    x = p.sample((samples,), generator=generator)
    return Estimate.sampled(p.log_prob(x) - q.log_prob(x), lower, upper)


def _common(p: Measure, q: Measure) -> tuple[Measure, Measure]:
    """Both in the larger family where one contains the other."""
    for small, large, widen in ((DiagonalGaussian, Gaussian, _full), (Exponential, Gamma, _gamma)):
        if isinstance(p, small) and isinstance(q, large):
            return widen(p), q
        if isinstance(p, large) and isinstance(q, small):
            return p, widen(q)
    return p, q


def _full(p: Measure) -> Measure:
    p = cast(DiagonalGaussian, p)
    return make(Gaussian, mean_vector=p.mean_vector, covariance_matrix=torch.diag_embed(p.variance))


def _gamma(p: Measure) -> Measure:
    p = cast(Exponential, p)
    return make(Gamma, shape=torch.ones_like(p.rate), rate=p.rate)


def _check_batches(p: Measure, q: Measure) -> None:
    """Raise unless the two share a dtype and their batches broadcast."""
    if p.dtype != q.dtype:
        raise ArgumentError(f"kl: p is {p.dtype}, q is {q.dtype}. Convert one with .to(dtype).")
    try:
        torch.broadcast_shapes(p.batch_shape, q.batch_shape)
    except RuntimeError:
        got = f"{tuple(p.batch_shape)} and {tuple(q.batch_shape)}"
        raise ArgumentError(f"kl: the batch axes of p and q do not broadcast together; got {got}.") from None


def _check_events(p: Measure, q: Measure) -> None:
    if p.base is not q.base or p.event_shapes != q.event_shapes:
        got = " and ".join(f"{type(m).__name__} ({m.base.value}, events {m.event_shapes})" for m in (p, q))
        raise ArgumentError(f"kl: p and q live in different spaces, {got}: neither has a density with respect to the other.")


def _bracket(p: Measure, q: Measure) -> tuple[Tensor, Tensor]:
    """Bounds for mixtures of one family; nothing but KL >= 0 for anything else."""
    parts = [_parts(measure) for measure in (p, q)]
    if parts[0] is not None and parts[1] is not None:
        (log_p, f), (log_q, g) = _common_parts(parts[0], parts[1])
        if type(f) is type(g):
            return kl_bounds(log_p, f, log_q, g)
    zero = torch.zeros(torch.broadcast_shapes(p.batch_shape, q.batch_shape), dtype=p.dtype, device=p.device)
    return zero, zero + torch.inf


Parts = tuple[Tensor, ExponentialFamily]


def _parts(measure: Measure) -> Parts | None:
    if isinstance(measure, AnyMixture):
        return measure.log_probability, measure.components
    if isinstance(measure, ExponentialFamily):
        single = measure.map(lambda leaf, event: leaf.unsqueeze(leaf.ndim - event))
        return torch.zeros((*measure.batch_shape, 1), dtype=measure.dtype, device=measure.device), single
    return None


def _common_parts(first: Parts, second: Parts) -> tuple[Parts, Parts]:
    f, g = _common(first[1], second[1])
    return (first[0], cast(ExponentialFamily, f)), (second[0], cast(ExponentialFamily, g))


def _weighted(p: FromDensity, q: Measure) -> Estimate:
    """E_p by the nodes or draws that stand for p."""
    weight = torch.softmax(p.log_weight, -1)
    ratio = p.log_prob(p.points) - q.log_prob(p.points) if not p.batch_shape else _batched_ratio(p, q)
    ratio = torch.where(weight > 0, ratio, 0.0)
    value = (weight * ratio).sum(-1)
    error = torch.where(value.isinf(), 0.0, p.expectation_error(ratio, -1.0))  # log p = log h − G
    return Estimate(value, error, torch.zeros_like(value), torch.full_like(value, torch.inf), Kind.ESTIMATED)


def _batched_ratio(p: FromDensity, q: Measure) -> Tensor:
    points = p.points.reshape(-1, *[1] * len(p.batch_shape), p.dimension)
    return (p.log_prob(points) - q.log_prob(points)).movedim(0, -1)


def _empirical(p: Measure, q: Measure) -> Tensor:
    if not (isinstance(p, Empirical) and isinstance(q, Empirical)):
        names = f"{type(p).__name__} and {type(q).__name__}"
        raise ArgumentError(
            f"kl: points and a density are never absolutely continuous to each other, KL({names}) is infinite. Project first."
        )
    if p.points is not q.points and not (p.points.shape == q.points.shape and bool((p.points == q.points).all())):
        raise ArgumentError("kl: two Empirical measures must list the same points in the same order; give missing ones log_weight −inf.")
    log_p, log_q = p.log_probability, q.log_probability
    alive = log_p > -torch.inf
    safe_p = torch.where(alive, log_p, 0.0)
    return torch.where(alive, safe_p.exp() * (safe_p - torch.where(alive, log_q, 0.0)), 0.0).sum(-1)
