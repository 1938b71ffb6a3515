r"""Sums over all pairs of a row of this process and a row of any process, for losses that compare all rows.

    f_i = Σ_s f(x_i, Y_s)        x_i a row of this process, Y_s the rows of process s

The rows Y go around the ring; in a backward pass they go around again, with their gradients behind them. No
process holds more than two processes' rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.transforms import apply, push
from exptilt.distributed.collectives import Final
from exptilt.distributed.group import Members
from exptilt.distributed.travel import Homewards, Shape, tour

Block = Callable[..., Tensor]  # (travelling rows, whether they are this process's, *own tensors) → (rows,)
_TWICE = (
    "second derivatives of a sum over all pairs are not known where rows lie on several processes. "
    "Compute the loss without group= for them."
)


def pair_sum(
    function: Block, rows: Tensor, own: Sequence[Tensor], members: Members, sizes: tuple[int, ...]
) -> Tensor:
    """Σ_s function(rows of process s, whether s is this process, *own), with first derivatives.

    The rows ``(n, d)``, `sizes` of them on each process, go around; the tensors `own` stay.
    """
    found: Tensor = apply(_PairSum, function, members, sizes, rows, *own)
    return found


def _shapes(sizes: tuple[int, ...], *rows: Tensor | None) -> list[list[Shape]]:
    return [[None if x is None else ((n, *x.shape[1:]), x.dtype) for x in rows] for n in sizes]


class _PairSum(Function):
    @staticmethod
    def forward(
        function: Block, members: Members, sizes: tuple[int, ...], rows: Tensor, *own: Tensor
    ) -> Tensor:
        found: Any = 0.0
        with torch.no_grad():
            for source, (block,) in tour(members, [rows], _shapes(sizes, rows), "pair_sum"):
                found = found + function(block, source == members.rank, *own)
        result: Tensor = found
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, ctx.members, ctx.sizes, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        run = partial(_gradient, ctx.function, ctx.members, ctx.sizes)
        return None, None, None, *apply(Final, run, _TWICE, bar, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> Tensor:
        rows, *own = ctx.saved_tensors
        moving = [
            torch.zeros_like(x) if dot is None else dot for x, dot in zip((rows, *own), dots[3:], strict=True)
        ]
        found: Any = 0.0
        visits = tour(ctx.members, [rows, moving[0]], _shapes(ctx.sizes, rows, moving[0]), "pair_sum")
        for source, (block, dot) in visits:

            def some(block: Tensor, *own: Tensor, here: bool = source == ctx.members.rank) -> tuple[Tensor]:
                return (ctx.function(block, here, *own),)

            found = found + push(some, (block, *own), (dot, *moving[1:]))[0]
        result: Tensor = found
        return result


def _gradient(
    function: Block, members: Members, sizes: tuple[int, ...], bar: Tensor, rows: Tensor, *own: Tensor
) -> tuple[Tensor, ...]:
    """Gradients with respect to the rows and to the tensors `own`."""
    mine = [x.detach().requires_grad_() for x in own]
    sums = [torch.zeros_like(x) for x in mine]
    shapes = _shapes(sizes, rows)
    behind = Homewards(members, lambda source: shapes[source], "pair_sum")
    for source, (block,) in tour(members, [rows], shapes, "pair_sum"):
        assert block is not None
        with torch.enable_grad():
            here = block.detach().requires_grad_()
            found = function(here, source == members.rank, *mine)
        by_rows, *by_own = torch.autograd.grad(found, [here, *mine], bar)
        sums = [a + b for a, b in zip(sums, by_own, strict=True)]
        behind.add(source, [by_rows.contiguous()], rows.device)
    (home,) = behind.arrive()
    assert home is not None
    return home, *sums
