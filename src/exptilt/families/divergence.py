r"""Kullback–Leibler divergence between any two measures that can be compared.

    KL(p‖q) = E_p[log p − log q]

Within one exponential family it is a Bregman divergence of A, arguments swapped (THEORY A10):

    KL(p_θ ‖ p_θ') = A(θ') − A(θ) − ⟨∇A(θ), θ' − θ⟩.

Mixtures have no closed form. They get a sample mean with its standard error and a bracket that holds for
certain (`mixture_bounds`). The `kind` of the returned `Estimate` says whether it is exact.

Points are compared with points and with counts. A point may be listed twice: P(x) is the mass of all points
listed at x.
"""

from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import common_shape
from exptilt._support.transforms import derivatives_wanted, is_concrete, pytree
from exptilt.families.estimate import Estimate, samples_wanted
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, Measure
from exptilt.families.members.empirical import Empirical
from exptilt.families.members.from_density import FromDensity
from exptilt.families.members.mixture import AnyMixture
from exptilt.families.mixture_bounds import kl_bounds
from exptilt.families.relations import common_family


def kl(p: Measure, q: Measure, *, samples: int = 4096, generator: torch.Generator | None = None) -> Estimate:
    """KL(p‖q), batched: an `Estimate` of shape ``(...)`` whose `kind` says whether it is exact.

    Args:
        p: a measure, taken as normalised.
        q: another measure on the same space.
        samples: how many draws of p are taken where no closed form exists; 0 gives the deterministic bracket
            alone. The estimate has derivatives in all parameters of p and q.
        generator: for those draws.

    Example:
        >>> from exptilt.families import Exponential
        >>> kl(Exponential(torch.tensor([1.0])), Exponential(torch.tensor([2.0]))).value  # 2 − 1 − log 2
        tensor(0.3069)
    """
    for name, measure in (("p", p), ("q", q)):
        if not isinstance(measure, Measure):
            raise ArgumentError(f"kl: {name} must be a measure; got {type(measure).__name__}.")
    _check_batches(p, q)
    if isinstance(p, Empirical):
        return _from_points(p, q)
    if isinstance(q, Empirical) and p.base is Base.COUNTING:
        name = type(p).__name__
        raise ArgumentError(
            f"kl: KL({name} ‖ Empirical) is infinite unless the points are all the outcomes of the {name}. "
            "If they are, pass p as Empirical(points, p.log_prob(points))."
        )
    if isinstance(q, Empirical):
        raise ArgumentError(_not_continuous(p, q))
    p, q = common_family(p, q)
    _check_events(p, q)
    if isinstance(p, ExponentialFamily) and type(p) is type(q):
        return Estimate.exact(p._kl(q))
    if isinstance(p, FromDensity):
        return _weighted(p, q)
    beyond = _beyond(p, q)
    tracked = derivatives_wanted(x for x, _ in (*p._leaves(), *q._leaves()))
    if beyond is not None and not tracked and is_concrete(beyond) and bool(beyond.all()):
        return Estimate.exact(torch.full(beyond.shape, torch.inf, dtype=p.dtype, device=p.device))
    found = _sampled(p, q, samples, generator)
    if beyond is None:
        return found
    value, lower, upper = (torch.where(beyond, torch.inf, x) for x in (found.value, found.lower, found.upper))
    return Estimate(value, torch.where(beyond, 0.0, found.standard_error), lower, upper, found.kind)


def _beyond(p: Measure, q: Measure) -> Tensor | None:
    """``(...)``: where KL is infinite because of supports or tails; None if there is no reason to think so.

    No component of q covers the support of some component of p, or −log q has no mean under p. Draws need not
    show it: those of N(10, 1) are all positive.
    """
    batch = common_shape(p.batch_shape, q.batch_shape)
    heavy = None
    if p._moments is not None and (power := p._moments[0] * q._decay) > 0:
        heavy = (power >= p._moments[1]).any(-1).expand(batch)
    if p._reach is None or q._reach is None:
        return heavy
    (low, high, total), (least, most, wanted) = _by_pairs(p, -2), _by_pairs(q, -3)
    inside = (low >= least) & (high <= most)
    if q._reach[2] is not None:
        inside = inside & (total == wanted)  # NaN, so False, if p has no fixed total
    rows, columns = _present(p), _present(q)
    covered = (inside.all(-1) & columns.unsqueeze(-2)).any(-1)
    missed = (rows & ~covered).any(-1).expand(batch)
    return missed if heavy is None else missed | heavy


def _by_pairs(measure: Measure, axis: int) -> list[Tensor]:
    """The entries of `_reach` ``(..., D)`` by component, with an axis at `axis` for the other measure."""
    found = []
    for part in measure._reach or ():
        x = torch.as_tensor(torch.nan if part is None else part, dtype=measure.dtype, device=measure.device)
        if x.ndim == 0:
            found.append(x.unsqueeze(0))
        else:
            found.append(x.unsqueeze(axis) if isinstance(measure, AnyMixture) else x[..., None, None, :])
    return found


def _present(measure: Measure) -> Tensor:
    """``(..., K)``: which components have weight; one component if the measure is no mixture."""
    if isinstance(measure, AnyMixture):
        return measure.log_weight > -torch.inf
    return torch.ones(1, dtype=torch.bool, device=measure.device)


def _sampled(p: Measure, q: Measure, samples: int, generator: torch.Generator | None) -> Estimate:
    """KL(p‖q) as the mean over `samples` draws, with its bracket; the bracket alone for 0 samples.

    All in float64: in float32 densities of draws may be off by more than the divergence.
    """
    if p.dtype != torch.float64:
        return _sampled(p.to(torch.float64), q.to(torch.float64), samples, generator).to(p.dtype)
    lower, upper = _bracket(p, q)
    if samples_wanted("kl", samples) == 0:
        return Estimate.bounded(lower, upper)
    y, score = _aligned(p._sample_scored(samples, generator), p, lower.ndim)
    own = p._log_prob_inner(y)
    ratio = (own - _log_prob_of(q, p, y, own)).expand(samples, *lower.shape)
    return Estimate.sampled(ratio, lower, upper, score)


def _log_prob_of(q: Measure, p: Measure, y: Any, own: Tensor) -> Tensor:
    """Log q at inner draws y of p, where log p is `own`; an error if some y has no x in this dtype."""
    if q._inner_form == p._inner_form:
        return q._log_prob_inner(y)
    x = p._from_inner(y)
    off = (p.log_prob(x) - own).abs() > torch.finfo(own.dtype).eps ** 0.5 * (1 + own.abs())
    if is_concrete(off) and bool(off.any()):
        kinds = f"{int(off.sum())} of {off.numel()} draws of p ({type(p).__name__}) at all"
        raise ArgumentError(
            f"kl: {own.dtype} does not hold {kinds}, and q ({type(q).__name__}) cannot be evaluated at their "
            "logarithms. Pass both in float64, or a q of p's family."
        )
    return torch.where(off, torch.nan, q.log_prob(x))


def _aligned(x: Any, p: Measure, ndim: int) -> Any:
    """Draws ``(S,) + batch + event`` of p, the batch padded in front with ones to ``ndim`` axes."""
    leaves, spec = pytree.tree_flatten(x)
    ones = [1] * (ndim - len(p.batch_shape))
    return pytree.tree_unflatten(
        [leaf.reshape(leaf.shape[0], *ones, *leaf.shape[1:]) for leaf in leaves], spec
    )


def _check_batches(p: Measure, q: Measure) -> None:
    """Raise unless p and q share a dtype and their batches broadcast."""
    if p.dtype != q.dtype:
        raise ArgumentError(f"kl: p is {p.dtype}, q is {q.dtype}. Convert one with .to(dtype).")
    try:
        common_shape(p.batch_shape, q.batch_shape)
    except RuntimeError:
        got = f"{tuple(p.batch_shape)} and {tuple(q.batch_shape)}"
        raise ArgumentError(f"kl: the batch axes of p and q do not broadcast together; got {got}.") from None


def _check_events(p: Measure, q: Measure) -> None:
    if p.base is not q.base or p.event_shapes != q.event_shapes:
        got = " and ".join(f"{type(m).__name__} ({m.base.value}, events {m.event_shapes})" for m in (p, q))
        why = "neither has a density with respect to the other"
        raise ArgumentError(f"kl: p and q live in different spaces, {got}: {why}.")


def _bracket(p: Measure, q: Measure) -> tuple[Tensor, Tensor]:
    """Lower and upper bound on KL(p‖q) for mixtures of one family; 0 and infinity otherwise."""
    first, second = _parts(p), _parts(q)
    if first is not None and second is not None:
        f, g = common_family(first[1], second[1])
        if isinstance(f, ExponentialFamily) and isinstance(g, ExponentialFamily) and type(f) is type(g):
            return kl_bounds(first[0], f, second[0], g)
    zero = torch.zeros(common_shape(p.batch_shape, q.batch_shape), dtype=p.dtype, device=p.device)
    return zero, zero + torch.inf


def _parts(measure: Measure) -> tuple[Tensor, ExponentialFamily] | None:
    """Log-weights ``(..., K)`` and components ``(..., K)``; one component if the measure is no mixture."""
    if isinstance(measure, AnyMixture):
        return measure.log_probability, measure.components
    if isinstance(measure, ExponentialFamily):
        single = measure.map(lambda leaf, event: leaf.unsqueeze(leaf.ndim - event))
        return torch.zeros((*measure.batch_shape, 1), dtype=measure.dtype, device=measure.device), single
    return None


def _weighted(p: FromDensity, q: Measure) -> Estimate:
    """KL(p‖q) as a weighted sum over the nodes or draws of p."""
    batch = common_shape(p.batch_shape, q.batch_shape)
    points = p.points.reshape(-1, *[1] * len(batch), p.dimension)
    weight = torch.softmax(p.log_weight, -1)
    ratio = (p.log_prob(points) - q.log_prob(points)).movedim(0, -1).expand(*batch, -1)
    # Ignore nodes of negligible weight that rounding put on the edge of q's support.
    least = torch.where(ratio.isinf(), torch.finfo(p.dtype).eps, 0.0)
    ratio = torch.where(weight > least, ratio, 0.0)
    value = (weight * ratio).sum(-1)
    if q._reach is not None and not isinstance(q, AnyMixture):
        least, most, _ = q._reach
        outside = ((p.points < least) | (p.points > most)).any(-1) & (p.log_weight > -torch.inf)
        value = torch.where(outside.any(-1), torch.inf, value)
    error = torch.where(value.isinf(), 0.0, p._expectation_error(ratio, -1.0))  # log p = log h − G
    return Estimate(value, error, torch.zeros_like(value), torch.full_like(value, torch.inf), p.kind)


def _from_points(p: Empirical, q: Measure) -> Estimate:
    """Σ_n p_n (log P(x_n) − log Q(x_n)), where P(x) is the mass of every point listed at x."""
    if not isinstance(q, Empirical) and q.base is not Base.COUNTING:
        raise ArgumentError(_not_continuous(p, q))
    if not is_concrete(p.points, *pytree.tree_leaves(q)):  # compare all pairs: slow, but needs no values
        log_p, log_q = _at_points(p, p), _at_points(q, p)
    elif isinstance(q, Empirical):
        if p.points is not q.points and not torch.equal(p.points, q.points):
            raise ArgumentError(
                "kl: two Empirical measures must list the same points in the same order; "
                "give missing ones log_weight −inf."
            )
        group = _repeated(p.points)
        log_p, log_q = _merged(p.log_probability, group), _merged(q.log_probability, group)
    else:
        log_p, log_q = _merged(p.log_probability, _repeated(p.points)), _at_points(q, p)
    weight = p.log_probability.exp()
    ratio = torch.where(p.log_weight > -torch.inf, log_p - log_q, 0.0)
    value = (weight * ratio).sum(-1)
    if not isinstance(q, FromDensity):
        return Estimate.exact(value)
    error = q._expectation_error(torch.zeros_like(q.log_weight), 1.0).expand_as(value)  # log q = log h − G
    return Estimate(value, error, torch.zeros_like(value), torch.full_like(value, torch.inf), q.kind)


def _at_points(q: Measure, p: Empirical) -> Tensor:
    """Log q at the points of p, ``(..., N)``."""
    ndim = len(common_shape(p.batch_shape, q.batch_shape))
    points = p.points.reshape(*[1] * (ndim + 2 - p.points.ndim), *p.points.shape)
    return q.log_prob(points.movedim(-2, 0)).movedim(0, -1)


def _repeated(points: Tensor) -> Tensor | None:
    """``(..., N)``: an index per point of ``(..., N, D)``, the same for equal points; None if all differ."""
    first = points[..., 0].sort(-1).values
    if bool((first.diff(dim=-1) != 0).all()):
        return None
    clouds = points.detach().reshape(-1, *points.shape[-2:])
    places = [torch.unique(cloud, dim=0, return_inverse=True)[1] for cloud in clouds]
    return torch.stack(places).reshape(points.shape[:-1])


def _merged(log_weight: Tensor, group: Tensor | None) -> Tensor:
    """``(..., N)``: for each point, log of the total weight of all points in its `group`."""
    if group is None:
        return log_weight
    log_weight, group = torch.broadcast_tensors(log_weight, group)
    top = torch.full_like(log_weight, -torch.inf).scatter_reduce(-1, group, log_weight.detach(), "amax")
    top = top.gather(-1, group)
    top = torch.where(top > -torch.inf, top, 0.0)
    total = torch.zeros_like(log_weight).scatter_add(-1, group, (log_weight - top).exp())
    return total.gather(-1, group).log() + top


def _not_continuous(p: Measure, q: Measure) -> str:
    names = f"KL({type(p).__name__} ‖ {type(q).__name__})"
    why = "points and a density are never absolutely continuous to each other"
    return f"kl: {why}, {names} is infinite. Project first."
