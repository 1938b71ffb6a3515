r"""Fixed points of a memory, found from many starts: single patterns, averages of some, the average of all.

Retrievals from all starts are clustered (two ends closer than 10⁻³ M are one fixed point). Each fixed point
is described by the patterns it averages, the fewest that hold a stated share of the weight, and by its
stability: the eigenvalues of the Jacobian of a step,

    J = ∂T/∂ξ = β Cov_y(k)      (softmax; on the sphere, projected)

all below 1 in size: nearby states are drawn in. Between two attractors lie saddles with an eigenvalue above
1; retrieval finds those only from starts that lie exactly on their stable side, such as a mean of patterns.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.checks import number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.memory.landscape.margins import one_memory, places
from exptilt.memory.patterns import Block, Keys, check_state
from exptilt.memory.retrieval import settle
from exptilt.memory.similarity import SIMILARITIES

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_SAME = 1e-3  # ends closer than this, in units of M, are one fixed point
_JACOBIANS = 1 << 18  # numbers in the Jacobians computed at once


@dataclass(frozen=True)
class FixedPoints:
    """F fixed points, the most often reached first.

    Args:
        state: ``(F, D)``.
        reached: ``(F,)``, how many starts ended there.
        members: for each, the patterns it averages, the heaviest first.
        weight: for each, their weights.
        spectral_radius: ``(F,)``, the largest modulus of an eigenvalue of the step's Jacobian.
        energy: ``(F,)``.
        residual: ``(F,)``, of the retrieval that found it.
    """

    state: Tensor
    reached: Tensor
    members: tuple[Tensor, ...]
    weight: tuple[Tensor, ...]
    spectral_radius: Tensor
    energy: Tensor
    residual: Tensor

    @property
    def stable(self) -> Tensor:
        """``(F,)``: whether nearby states are drawn in."""
        return self.spectral_radius < 1

    @property
    def single(self) -> Tensor:
        """``(F,)``: whether a fixed point averages one pattern only."""
        return torch.tensor([len(m) == 1 for m in self.members])


def _starts(memory: "Hopfield", count: int, generator: torch.Generator | None) -> Tensor:
    """Starts ``(S, D)``: patterns, means of 2 to 8 and points of the hull, a third each; the mean of all."""
    x = memory.keys.chosen(places(memory, None, "metastable")[None])[0][0]
    third = max(1, count // 3)
    alone = x[torch.randperm(len(x), generator=generator)[:third]]
    means = [x[torch.randint(len(x), (2 + k % 7,), generator=generator)].mean(0) for k in range(third)]
    some = torch.randint(len(x), (third, min(len(x), 64)), generator=generator)
    share = torch.rand(some.shape, dtype=x.dtype, generator=generator).log().neg()
    spread = ((share / share.sum(-1, keepdim=True))[..., None] * x[some]).sum(-2)
    return torch.cat([alone, torch.stack(means), spread, x.mean(0, keepdim=True)])


def jacobian(memory: "Hopfield", state: Tensor) -> Tensor:
    """``(F, D, D)``: the derivative of a step at ``(F, D)``; [f, i, j] is ∂(step)_i/∂ξ_j at state f."""
    F, D = state.shape
    parts = [state.new_zeros(0, D, D)]
    for group in track(state.split(max(1, _JACOBIANS // (D * D))) if F else (), "Jacobians"):
        points = group.repeat_interleave(D, 0)
        along = torch.eye(D, dtype=state.dtype, device=state.device).repeat(len(group), 1)
        pushed = torch.func.jvp(lambda z: memory.advance(z[None])[0], (points,), (along,))[1]
        parts.append(pushed.reshape(len(group), D, D).mT)
    return torch.cat(parts)


@torch.no_grad()
def weights(memory: "Hopfield", state: Tensor) -> Tensor:
    """``(N,)``: the weights of the patterns at one state ``(D,)``: the derivative of Ψ by the scores."""
    query = memory.similarity.query(state.reshape(1, 1, -1))
    key, _, offset = memory.keys.chosen(places(memory, None, "metastable")[None])
    score = (query @ key.mT)[0, 0] + (0.0 if offset is None else offset[0])
    # Patterns whose one coordinate is the score have, at the state 1, the potential Ψ(s).
    with torch.enable_grad():
        leaf = score.detach().clone().requires_grad_()
        flat = Keys((Block(leaf[:, None], leaf.square()),), SIMILARITIES["dot"])
        potential = memory.rule.read(flat, torch.ones_like(query[..., :1]), memory.head_beta).potential
        return torch.autograd.grad(potential.sum(), leaf)[0]


@torch.no_grad()
def metastable(
    self: "Hopfield",
    starts: Tensor | None = None,
    *,
    count: int = 256,
    share: float = 0.9,
    generator: torch.Generator | None = None,
) -> FixedPoints:
    """The fixed points that many starts lead to: single patterns, averages of some, the mean of all.

    Args:
        starts: ``(S, D)``; None draws `count`: patterns, means of some, and points of the hull.
        count: how many to draw.
        share: a fixed point averages the fewest patterns that hold this share of the weight.
        generator: draws the starts.
    """
    one_memory(self, "metastable")
    whole("metastable", "count", count)
    number("metastable", "share", share, above=0, most=1)
    if starts is not None:
        check_state(self, starts, "starts")
    given = _starts(self, count, generator) if starts is None else starts
    if given.ndim != 2:
        shape, wanted = tuple(given.shape), f"(S, {self.dimension})"
        raise ArgumentError(f"metastable: starts has shape {shape}. Pass {wanted}.")
    if self.similarity.sphere:
        given = given[(given != 0).any(-1)]
    ends = settle(self, given, 1e-10 if given.dtype == torch.float64 else 1e-6, 2000)
    found: list[tuple[int, int]] = []  # how many starts ended there, and the one with the least residual
    left = torch.arange(len(given))
    while left.numel():
        best = left[ends.residual[left].argmin()]  # represents its cluster
        near = ((ends.value[left] - ends.value[best]).norm(dim=-1) <= _SAME * self.size) | (left == best)
        found.append((int(near.sum()), int(best)))
        left = left[~near]
    found.sort(key=lambda one: -one[0])
    at = torch.tensor([best for _, best in found], dtype=torch.int64)
    state = ends.value[at]
    members, weight = [], []
    for point in track(state, "fixed points"):
        y = weights(self, point)
        ranked, order = y.sort(descending=True)
        enough = int((ranked.cumsum(0) < share * y.sum() * (1 - 1e-12)).sum()) + 1
        members.append(order[:enough])
        weight.append(ranked[:enough])
    return FixedPoints(
        state,
        torch.tensor([reached for reached, _ in found]),
        tuple(members),
        tuple(weight),
        torch.linalg.eigvals(jacobian(self, state)).abs().amax(-1),
        self.energy(state),
        ends.residual[at],
    )
