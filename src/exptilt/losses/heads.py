r"""Two linear heads over one vocabulary, compared a few tokens at a time.

The products of a chunk of rows are made once for each side. Loss and derivative by them are found a block of
rows at a time, in a processor's cache, and the derivative takes the products' place: a chunk holds one block
of scores for each side, and nothing else of that size. Where the backward pass is differentiated in turn, and
under torch.func, ``tilting/derivatives/rows.py`` computes the same in plain torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from exptilt._support.transforms import apply, in_forward_mode, in_transform
from exptilt.distributed.collectives import largest
from exptilt.losses.cross_entropy import Vocabulary, capped
from exptilt.tilting.derivatives.rows import Results, Rows
from exptilt.tilting.divergences import divergence_terms

CHUNK = 3 * 2**21  # scores of a chunk: 25 MB in float32, once for the student and once for the teacher
BLOCK = 2**18  # scores of a chunk that are looked at together: 1 MB


@dataclass(frozen=True, eq=False)
class Heads:
    """Both heads of a divergence: their vocabulary, the names of their tensors, and their numbers."""

    own: Vocabulary
    rows: tuple[str, ...]
    shared: tuple[str, ...]
    softcap: float | None
    teacher_softcap: float | None
    temperature: float
    direction: str
    mixing: float
    statistics: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, rows first."""
        return *self.rows, *self.shared

    def losses(self, tensors: list[Tensor], uniform: bool) -> list[Tensor]:
        """The loss of each row, then its four statistics if they are asked for.

        `uniform` promises that all rows have one cotangent, so that a gradient may be found at once.
        """
        widest = self.own.here if self.own.among is None else max(self.own.among.sizes)
        size = max(1, CHUNK // max(1, widest))
        plan = Rows(self._row_losses, len(self.rows), size)
        if torch.compiler.is_compiling():
            pieces = zip(*(x.split(size) for x in tensors[: len(self.rows)]), strict=True)

            def loss(*piece: Tensor) -> Tensor:
                return self._row_losses(piece, tensors[len(self.rows) :])[0][0]

            found = [torch.cat([checkpoint(loss, *piece, use_reentrant=False) for piece in pieces])]
        elif in_transform() or in_forward_mode():
            return list(plan(*tensors))
        else:
            needed = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
            kept: dict[str, Any] = {"at once": uniform and any(needed), "needed": needed}
            losses, *said = apply(Losses, self, plan, kept, *tensors)
            return [losses, *said]
        said = self.sweep([x.detach() for x in tensors], size)[1][1:] if self.statistics else []
        return [*found, *said]

    def scores(self, side: str, h: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """The scores of one side divided by the temperature."""
        return self._finished(side, self.own.common(h) @ W.mT, b)

    def _finished(self, side: str, product: Tensor, b: Tensor | None) -> Tensor:
        s = capped(product, self.softcap if side == "student" else self.teacher_softcap)
        return (s if b is None else s + b) / self.temperature

    def _row_losses(self, rows: Sequence[Tensor], shared: Sequence[Tensor]) -> Results:
        """The losses of some rows, in plain torch."""
        x = dict(zip(self.names, (*rows, *shared), strict=True))
        s = self.scores("student", x["hidden"], x["weight"], x.get("bias"))
        t = None
        if "teacher_hidden" in x:
            t = self.scores("teacher", x["teacher_hidden"], x["teacher_weight"], x.get("teacher_bias"))
        return tuple(self.compare(s, t, x)), ()

    def normalized(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and the log-normalizer of scores (rows, outcomes here)."""
        top = s.detach().amax(-1)
        top = top if self.own.among is None else largest(top, self.own.among.members)
        s = s - top[:, None]  # first, as G is rounded in proportion to the largest score
        G = self.own.total(s.exp().sum(-1)).log()
        return s - self.own.common(G)[:, None], top + G

    def compare(self, s: Tensor, t: Tensor | None, x: dict[str, Tensor]) -> list[Tensor]:
        """Loss, and student's and teacher's log-normalizers and entropies, of rows with scores s and t."""
        log_q, G = self.normalized(s)
        if t is not None:
            log_p, G_t = self.normalized(t)
            total = self.own.total
            loss = total(self._between(log_p, log_q).sum(-1))
            if not self.statistics:
                return [loss]
            with torch.no_grad():
                return [loss, G.detach(), total(_entropy(log_q)), G_t.detach(), total(_entropy(log_p))]
        log_p, at, here = self._top(x["log_probability"], x["index"])
        met = log_q.gather(-1, at)
        if here is None:
            others, coarse = log_q.scatter(-1, at, -torch.inf), met
        else:  # places of outcomes that other processes have are 0, and must not hide the outcome 0 here
            away = torch.zeros_like(log_q).scatter_add(-1, at, here.to(met.dtype)) > 0
            others, coarse = log_q.masked_fill(away, -torch.inf), self.own.total(torch.where(here, met, 0.0))
        top = others.detach().amax(-1)
        top = top if self.own.among is None else largest(top, self.own.among.members)
        top = torch.where(top == -torch.inf, 0.0, top)
        left = self.own.total((others - top[:, None]).exp().sum(-1))
        some = left > 0
        rest = torch.where(some, top + torch.where(some, left, 1.0).log(), -torch.inf)
        coarse = torch.cat([coarse, rest[:, None]], -1)
        loss = self._between(log_p, coarse).sum(-1)
        if not self.statistics:
            return [loss]
        with torch.no_grad():
            return [loss, G.detach(), self.own.total(_entropy(log_q)), torch.zeros_like(G), _entropy(log_p)]

    def _top(self, log_probability: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The teacher's coarse log-probabilities (rows, k + 1), places of the k, and which are here."""
        mass = log_probability.exp().sum(-1, keepdim=True)
        some = (mass < 1) & (index.shape[-1] < self.own.outcomes)  # with all outcomes named none is left over
        rest = torch.where(some, torch.log1p(-torch.where(some, mass, 0.0)), -torch.inf)
        return torch.cat([log_probability, rest], -1), *self.own.place(index)

    def _between(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Terms of the loss, teacher p and student q, none of them negative."""
        if self.direction == "forward":
            return divergence_terms(log_p, log_q)
        if self.direction == "reverse":
            return divergence_terms(log_q, log_p)
        beta = torch.tensor(self.mixing, dtype=log_p.dtype, device=log_p.device)
        a, b = log_p + beta.log(), log_q + torch.log1p(-beta)
        near = (a - b).abs() < 40  # beyond, the smaller counts nothing, and second derivatives would overflow
        both = torch.logaddexp(torch.where(near, a, 0.0), torch.where(near, b, 0.0))
        log_m = torch.where(near, both, torch.where(a > b, a, b))
        return beta * divergence_terms(log_p, log_m) + (1 - beta) * divergence_terms(log_q, log_m)

    def sweep(
        self, tensors: Sequence[Tensor], size: int, needed: Sequence[bool] = (), bars: Tensor | None = None
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Gradients by the `needed` tensors from cotangents of the rows, and losses with statistics.

        Products of a chunk of rows are made once; loss and derivative by them are found a block of rows at a
        time, the derivative in place, so that a chunk holds one block of scores for each side.
        """
        needs = dict(zip(self.names, needed or [False] * len(tensors), strict=True))
        x = dict(zip(self.names, tensors, strict=True))
        grads: dict[str, Tensor] = {name: torch.zeros_like(x[name]) for name, need in needs.items() if need}
        N, V = x["hidden"].shape[0], x["weight"].shape[0]
        sides = [("student", "hidden", "weight", "bias")]
        if "teacher_hidden" in x:
            sides.append(("teacher", "teacher_hidden", "teacher_weight", "teacher_bias"))
        step = size if self.own.among is not None else max(1, BLOCK // V)
        # made once: small results among blocks that come and go would keep the heap from shrinking
        said = [x["hidden"].new_empty(N) for _ in range(5 if self.statistics else 1)]
        held = {side: x["hidden"].new_empty(min(size, N), V) for side, *_ in sides}
        for start in range(0, N, size):
            chunk = slice(start, min(start + size, N))
            products = {side: y[: chunk.stop - start] for side, y in held.items()}
            for side, h, W, _ in sides:
                torch.mm(x[h][chunk], x[W].mT, out=products[side])
            for first in range(start, chunk.stop, step):
                block = slice(first, min(first + step, chunk.stop))
                local = slice(first - start, block.stop - start)
                found = self._block(x, needs, grads, sides, products, block, local, bars)
                for y, part in zip(said, found, strict=True):
                    y[block] = part
            for side, h, W, _ in sides:
                if needs[h]:
                    by_h, among = products[side] @ x[W], self.own.among
                    grads[h][chunk] = (
                        by_h if among is None else among.members.reduce(by_h, "sum", "linear_kl")
                    )
                if needs[W]:
                    grads[W].addmm_(products[side].mT, x[h][chunk])
        return [grads.get(name) for name in self.names], said

    def _block(
        self,
        x: dict[str, Tensor],
        needs: dict[str, bool],
        grads: dict[str, Tensor],
        sides: list[tuple[str, str, str, str]],
        products: dict[str, Tensor],
        block: slice,
        local: slice,
        bars: Tensor | None,
    ) -> list[Tensor]:
        """Losses and statistics of a block; its products become the loss's derivatives by them."""
        leaves: dict[str, Tensor] = {}
        scores: list[Tensor] = []
        here = {name: y[block] for name, y in x.items() if name in ("index", "log_probability")}
        with torch.set_grad_enabled(any(needs.values())):
            for side, h, W, b in sides:
                z = products[side][local].detach()
                if needs[h] or needs[W] or needs.get(b):
                    leaves[side] = z.requires_grad_()
                vector = x[b].detach() if b in x else None
                if vector is not None and needs[b]:
                    leaves[b] = vector.requires_grad_()
                scores.append(self._finished(side, z, vector))
            if needs.get("log_probability"):
                leaves["log_probability"] = here["log_probability"].detach().requires_grad_()
                here["log_probability"] = leaves["log_probability"]
            found = self.compare(scores[0], scores[1] if len(scores) > 1 else None, here)
            if leaves:
                ones = torch.ones_like(found[0]) if bars is None else bars[block]
                slopes = torch.autograd.grad(found[0], list(leaves.values()), ones)
        for name, slope in zip(leaves, slopes if leaves else (), strict=True):
            if name in products:
                products[name][local] = slope
            elif name == "log_probability":
                grads[name][block] = slope
            else:
                grads[name] += slope
        return [y.detach() for y in found]


def _entropy(log_p: Tensor) -> Tensor:
    """The entropy of each row of log-probabilities, or this process's part of it."""
    return -(log_p.exp() * torch.where(log_p != -torch.inf, log_p, 0.0)).sum(-1)


class Losses(Function):
    """Heads, plan, what is kept, tensors → the loss of each row, then statistics without derivatives."""

    @staticmethod
    def forward(head: Heads, plan: Rows, kept: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The losses; the gradient for cotangents of 1 as well, if it is wanted at once."""
        found, said = head.sweep(tensors, plan.size, kept["needed"] if kept["at once"] else ())
        if kept["at once"]:
            kept["gradients"] = found
        return tuple(said)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the tensors, and the gradient until it is asked for."""
        ctx.head, ctx.plan, ctx.kept, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, bars: Tensor | None, *_: Any) -> Any:
        """Gradients by the tensors: those kept, times the one cotangent; else computed again."""
        if bars is None:
            return (None,) * (3 + len(ctx.saved_tensors))
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # differentiable in turn
            wanted = [i for i, need in enumerate(needed) if need]
            found = dict(zip(wanted, ctx.plan.gradient(tensors, wanted, [bars]), strict=True))
            return (None, None, None, *(found.get(i) for i in range(len(needed))))
        if not bars.numel() or bars.is_meta or not bool((bars == bars[0]).all()):
            return (None, None, None, *ctx.head.sweep(tensors, ctx.plan.size, needed, bars)[0])
        kept = ctx.kept.pop("gradients", None)  # handed out once: whoever gets it may write into it
        kept = ctx.head.sweep(tensors, ctx.plan.size, needed)[0] if kept is None else kept
        return (None, None, None, *(y if y is None else y.mul_(bars[0]) for y in kept))
