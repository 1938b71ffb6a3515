r"""Gibbs sampling: the exact chain, and the chain that attention resembles (THEORY E8).

**Exact.** Each site is drawn from its conditional given the others: its own measure, tilted. Such a chain
keeps the joint law: if the first state has that law, so has every later state.

**With a linear link and a skip connection**, as in a transformer: the exact natural parameter is replaced
by a linear map of x, added to the previous one,

    x ~ h tilted by η,      η ← η + M x + c

This keeps no law. Each step adds M ∇G(η) on average, so η climbs a convex G without end: linearly if the
support of h is bounded, towards an extreme point, and exponentially if ∇G grows with η: by 1 + λ a step
for h = N(0, Σ), with λ the largest eigenvalue of MΣ. Without the skip connection η stays bounded if λ < 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.checks import entries, floating, whole
from exptilt._support.checks import generator as check_generator
from exptilt._support.errors import ArgumentError
from exptilt.families import Measure
from exptilt.families.theory.link import LinearLink
from exptilt.sampling.joint import Joint, State


def gibbs(
    joint: Joint,
    sweeps: int,
    *,
    chains: int = 1,
    start: Mapping[str, Tensor] | None = None,
    given: Mapping[str, Tensor] | None = None,
    discard: int = 0,
    generator: torch.Generator | None = None,
) -> State:
    """Draws of a joint exponential family by exact alternating conditionals.

    Args:
        joint: the law.
        sweeps: number of states kept of each chain, one per sweep through all sites.
        chains: number of chains, run side by side.
        start: the first state, ``(chains, *event)`` by site; independent draws of the sites if not given.
        given: known sites, which are not drawn, ``(*event)`` or ``(chains, *event)``.
        discard: number of sweeps before the first kept state.
        generator: the source of randomness; torch's own if not given.

    Returns:
        By site, ``(sweeps, chains, *event)``.

    Example:
        >>> from exptilt.families import BernoulliProduct
        >>> coin = BernoulliProduct(torch.zeros(1))
        >>> alike = Joint(
        ...     {"a": coin, "b": coin}, {("a", "b"): torch.full((1, 1), 4.0)}, {"a": torch.tensor([-2.0])}
        ... )
        >>> drawn = gibbs(alike, 500, chains=20, discard=10)
        >>> bool((drawn["a"] * drawn["b"]).mean() > 0.6)
        True
    """
    sweeps, chains = whole("gibbs", "sweeps", sweeps), whole("gibbs", "chains", chains)
    discard = whole("gibbs", "discard", discard, least=0)
    check_generator("gibbs", generator)
    state = _started(joint, chains, start, given or {}, generator)
    t = joint.statistics(state)
    kept: dict[str, list[Tensor]] = {name: [] for name in joint.sites}
    for step in range(discard + sweeps):
        joint.advance(state, t, generator=generator, keep=tuple(given or ()))
        if step >= discard:
            for name, x in state.items():
                kept[name].append(x)
    return {name: torch.stack(xs) for name, xs in kept.items()}


def _started(
    joint: Joint,
    chains: int,
    start: Mapping[str, Tensor] | None,
    given: Mapping[str, Tensor],
    generator: torch.Generator | None,
) -> State:
    drawn = joint.independent((chains,), generator)
    for source, values in (("start", start or {}), ("given", given)):
        for name, x in values.items():
            if name not in drawn:
                raise ArgumentError(f"gibbs: {source} names {name!r}, which is none of {list(drawn)}.")
            try:
                drawn[name] = x.expand(drawn[name].shape)
            except RuntimeError:
                wanted = f"{tuple(drawn[name].shape)}, or that of one event"
                raise ArgumentError(
                    f"gibbs: {source}[{name!r}] has shape {tuple(x.shape)}. Pass {wanted}."
                ) from None
            inside = joint.sites[name].log_prob(drawn[name]) > -torch.inf
            entries("gibbs", f"{source}[{name!r}]", drawn[name], inside, "in the support of its site")
    return drawn


@dataclass(frozen=True)
class LinkChain:
    """The path of natural parameters under a linear link, and its growth.

    Attributes:
        natural: ``(steps + 1, chains, D)``, η.
        norm: ``(steps + 1, chains)``, ‖η‖.
        speed: growth of ‖η‖ per step, averaged over the last half of the steps and all chains.
        rate: growth of log ‖η‖ per step, averaged likewise; tends to 0 for linear growth.
    """

    natural: Tensor
    norm: Tensor
    speed: float
    rate: float


def link_chain(
    measure: Measure,
    link: LinearLink | Tensor,
    start: Tensor,
    steps: int,
    *,
    skip: bool = True,
    generator: torch.Generator | None = None,
) -> LinkChain:
    """The path of η when x ~ h tilted by η and η ← η + M x + c alternate: the chain that attention resembles.

    Args:
        measure: h; from an `Empirical`, x is a key drawn with the attention weights of the query η.
        link: the map M x + c, or M alone, ``(D, D)``.
        start: ``(chains, D)``, the first η.
        steps: number of steps. If η overflows, an error names the step.
        skip: whether to add the previous η, the skip connection; without it η ← M x + c.
        generator: the source of randomness; torch's own if not given.

    Example:
        >>> from exptilt.families import Gaussian
        >>> h = Gaussian(torch.zeros(1), torch.eye(1))
        >>> grown = link_chain(h, torch.eye(1), torch.ones(100, 1), 40)
        >>> round(grown.rate, 2)  # log 2: η doubles at each step
        0.69
    """
    floating("link_chain", "start", start, axes=2, shape="(chains, D)")
    steps = whole("link_chain", "steps", steps, least=2)
    check_generator("link_chain", generator)
    if not isinstance(measure, Measure) or start.shape[-1] != measure.dimension:
        raise ArgumentError(
            f"link_chain: start has shape {tuple(start.shape)}, measure is {type(measure).__name__}. "
            "Pass a measure of D dimensions and a start (chains, D)."
        )
    if isinstance(link, Tensor) and link.shape != (measure.dimension,) * 2:
        raise ArgumentError(
            f"link_chain: link has shape {tuple(link.shape)}. Pass {(measure.dimension,) * 2}."
        )
    path = [start]
    for step in range(1, steps + 1):
        x = measure.tilt(path[-1]).sample(generator=generator)
        t = measure.coordinate(x)
        moved = t @ link.mT if isinstance(link, Tensor) else link(t)
        moved = path[-1] + moved if skip else moved
        if not bool(moved.isfinite().all()):
            raise ArgumentError(
                f"link_chain: η is not finite at step {step}: it grew without end. Pass fewer steps."
            )
        path.append(moved)
    natural = torch.stack(path)
    norm = torch.linalg.vector_norm(natural, dim=-1)
    half = steps // 2
    late = norm[half:].clamp_min(torch.finfo(norm.dtype).tiny)
    speed = float((late[-1] - late[0]).mean()) / (steps - half)
    return LinkChain(natural, norm, speed, float((late[-1].log() - late[0].log()).mean()) / (steps - half))
