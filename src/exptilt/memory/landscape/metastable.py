r"""Fixed points of a memory, found from many starts: single patterns, metastable averages of some, the average of all.

Retrievals from all starts are clustered (two ends closer than 10⁻³ M are one fixed point). Each fixed point is told by the patterns
it averages, the fewest that hold a stated share of the weight, and by its stability: the eigenvalues of the Jacobian of a step,

    J = ∂T/∂ξ = β Cov_y(k)      (softmax; on the sphere, projected)

all below 1 in size: nearby states are drawn in. Between two attractors lie saddles with an eigenvalue above 1; retrieval finds those
only from starts that lie exactly on their stable side, such as a mean of patterns.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.memory.checks import check_count, check_state
from exptilt.memory.landscape.basins import one_memory
from exptilt.memory.patterns import Keys
from exptilt.memory.retrieval import settle
from exptilt.memory.similarity import SIMILARITIES

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_SAME = 1e-3  # in units of M
_JACOBIANS = 1 << 18  # numbers of the states that Jacobians are pushed through at once


@dataclass(frozen=True)
class FixedPoints:
    """F fixed points, the most often reached first.

    Args:
        state: ``(F, D)``.
        reached: ``(F,)``, how many starts ended there.
        members: for each, the patterns it averages, the heaviest first.
        weight: for each, their weights.
        spectral_radius: ``(F,)``, the largest eigenvalue of the step's Jacobian, in size.
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
        """``(F,)``: whether it stands for one pattern."""
        return torch.tensor([len(m) == 1 for m in self.members])


def default_starts(memory: "Hopfield", count: int, generator: torch.Generator | None) -> Tensor:
    """A third patterns, a third means of 2 to 8 of them, a third points of the hull, and the mean of all."""
    x = memory.keys.part(0, memory.count)[0][0]
    third = max(1, count // 3)
    alone = x[torch.randperm(len(x), generator=generator)[:third]]
    means = [x[torch.randint(len(x), (2 + k % 7,), generator=generator)].mean(0) for k in range(third)]
    few = torch.randint(len(x), (third, min(len(x), 64)), generator=generator)
    share = torch.rand(few.shape, dtype=x.dtype, generator=generator).log().neg()
    spread = ((share / share.sum(-1, keepdim=True))[..., None] * x[few]).sum(-2)
    return torch.cat([alone, torch.stack(means), spread, x.mean(0, keepdim=True)])


def jacobian(memory: "Hopfield", state: Tensor) -> Tensor:
    """``(F, D, D)``: the derivative of a step at ``(F, D)``; entry [f, i, j] is that of coordinate i along j."""
    F, D = state.shape
    parts = []
    for group in track(state.split(max(1, _JACOBIANS // (D * D))), "Jacobians"):
        points = group.repeat_interleave(D, 0)
        along = torch.eye(D, dtype=state.dtype, device=state.device).repeat(len(group), 1)
        pushed = torch.func.jvp(lambda z: memory.advance(z[None])[0], (points,), (along,))[1]
        parts.append(pushed.reshape(len(group), D, D).mT)
    return torch.cat(parts) if parts else state.new_zeros(F, D, D)


@torch.no_grad()
def weights(memory: "Hopfield", state: Tensor) -> Tensor:
    """``(N,)``: the weights of the patterns at one state ``(D,)``: the derivative of Ψ by the scores."""
    keys = memory.keys
    query = memory.similarity.query(state.reshape(1, 1, -1))
    key, offset = keys.part(0, keys.count)
    score = (query @ key.mT)[:, 0] + (0.0 if offset is None else offset)
    # Patterns of one coordinate, the score, met by the state 1: Ψ of these is Ψ(s), and its gradient by them the weights.
    with torch.enable_grad():
        leaf = score.detach().clone().requires_grad_()
        flat = Keys(leaf[..., None], leaf.square(), SIMILARITIES["dot"])
        potential = memory.rule.read(flat, torch.ones_like(query[..., :1]), memory.head_beta).potential
        return torch.autograd.grad(potential.sum(), leaf)[0][0]


@torch.no_grad()
def find(
    memory: "Hopfield", starts: Tensor | None, *, count: int, share: float, generator: torch.Generator | None
) -> FixedPoints:
    """See `Hopfield.metastable`."""
    one_memory(memory, "metastable")
    check_count("metastable", "count", count)
    if not 0 < share <= 1:
        raise ArgumentError(f"metastable: share is {share}. Pass 0 < share <= 1.")
    if starts is not None:
        check_state(memory, starts)
    given = default_starts(memory, count, generator) if starts is None else starts
    if given.ndim != 2 or given.shape[-1] != memory.dimension:
        raise ArgumentError(
            f"metastable: starts has shape {tuple(given.shape)}. Pass (S, {memory.dimension})."
        )
    if memory.similarity.sphere:
        given = given[(given != 0).any(-1)]
    ends = settle(memory, given, 1e-10 if given.dtype == torch.float64 else 1e-6, 2000)
    found: list[Tensor] = []
    residual, reached = [], []
    left = torch.arange(len(given))
    while left.numel():
        best = left[ends.residual[left].argmin()]  # the best settled of those left speaks for its cluster
        near = ((ends.value[left] - ends.value[best]).norm(dim=-1) <= _SAME * memory.size) | (left == best)
        found.append(ends.value[best])
        residual.append(ends.residual[best])
        reached.append(int(near.sum()))
        left = left[~near]
    order = sorted(range(len(found)), key=lambda f: -reached[f])
    state = torch.stack([found[f] for f in order]) if order else given[:0]
    members, weight = [], []
    for point in track(state, "fixed points"):
        y = weights(memory, point)
        ranked, at = y.sort(descending=True)
        enough = int((ranked.cumsum(0) < share * y.sum() * (1 - 1e-12)).sum()) + 1
        members.append(at[:enough])
        weight.append(ranked[:enough])
    spectrum = torch.linalg.eigvals(jacobian(memory, state)).abs().amax(-1)
    return FixedPoints(
        state, torch.tensor([reached[f] for f in order]), tuple(members), tuple(weight), spectrum, memory.energy(state),
        torch.stack([residual[f] for f in order]) if order else ends.residual,
    )  # fmt: skip
