"""Gibbs sampling of a joint exponential family (THEORY E8).

Each site is drawn from its conditional given the others: its own measure, tilted. Such a chain keeps the
joint law: if the first state has that law, so has every later state.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from exptilt._support.checks import entries, whole
from exptilt._support.checks import generator as check_generator
from exptilt._support.errors import ArgumentError
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
    t = joint._statistics(state)
    kept: dict[str, list[Tensor]] = {name: [] for name in joint.sites}
    for step in range(discard + sweeps):
        joint._advance(state, t, generator=generator, keep=tuple(given or ()))
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
    drawn = joint._independent((chains,), generator)
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
