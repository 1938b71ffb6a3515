r"""Exchanges between the processes of a group that torch can differentiate.

A tensor is *common* if all processes hold the same, and *own* if each has its own. Four linear maps lead from
one to the other or stay among own tensors; they are two pairs of transposes:

    total   own → common    y = Σ_r x_r             share   common → own    y_r = x
    every   own → own       y_r = (x_1, …, x_P)     home    own → own       y_r = Σ_s (part r of x_s)
    stack   own → common    y = (x_1, …, x_P)       pick    common → own    y_r = x_r

so derivatives of every order come out of these alone. What all processes compute from common tensors is
common again, derivatives included: a loss that every process computes from common results counts once, and
its gradients are those of one process that holds everything.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.transforms import apply
from exptilt.distributed.group import Members, agree

_TRANSPOSE = {"total": "share", "share": "total", "every": "home", "home": "every", "stack": "pick"}
_TRANSPOSE["pick"] = "stack"


def total(x: Tensor, members: Members) -> Tensor:
    """The sum of `x` over all processes; the result is common."""
    return _mapped("total", members, (x,))[0] if members.count > 1 else x


def share(x: Tensor, members: Members) -> Tensor:
    """A common tensor as one of this process's: its gradients are summed over the processes."""
    return _mapped("share", members, (x,))[0] if members.count > 1 else x


def stack(x: Tensor, members: Members) -> Tensor:
    """The tensors of all processes (count, ...), of one shape; the result is common."""
    found: Tensor = _mapped("stack", members, (x,))[0]
    return found


def every(members: Members, sizes: tuple[int, ...], *rows: Tensor | None) -> list[Tensor | None]:
    """The rows (axis −2) of all processes, `sizes` of them each; gradients are summed and go back."""
    found: list[Tensor | None] = _mapped("every", members, rows, sizes)
    return found


def home(x: Tensor, members: Members, sizes: tuple[int, ...]) -> Tensor:
    """This process's rows (axis −2) of the sum over the processes, each of which has all rows."""
    found: Tensor = _mapped("home", members, (x,), sizes)[0]
    return found


def largest(x: Tensor, members: Members) -> Tensor:
    """The maximum over all processes, without a derivative; also under torch.func."""
    found: Tensor = _mapped("max", members, (x,))[0]
    return found


def highest(x: Tensor, members: Members) -> Tensor:
    """The maximum over all processes, common, with the derivative of the largest, averaged over ties."""
    top = largest(x.detach(), members)
    own = x.detach() == top
    ties = total(own.to(x.dtype), members)
    moved = total(torch.where(own, x, 0.0) / ties, members)
    return top + (moved - moved.detach())


def _mapped(how: str, members: Members, tensors: Any, sizes: tuple[int, ...] = (), ask: bool = False) -> Any:
    """The results of a map; None for a tensor that is None."""
    found = iter(apply(_Map, how, members, sizes, ask, *tensors))
    return [None if x is None else next(found) for x in tensors]


class _Map(Function):
    """One of the maps of the module, or "max"; `ask`: compare first which tensors the processes have."""

    @staticmethod
    def forward(how: str, members: Members, sizes: Any, ask: bool, *tensors: Tensor | None) -> Any:
        if ask:
            there = [None if x is None else tuple(x.shape) for x in tensors]
            agree(members, "the derivative of attend", {"the gradients that are asked for": there})
        start, rank = sum(sizes[: members.rank]), members.rank

        def one(x: Tensor) -> Tensor:
            if how == "share":
                return x.clone()
            if how == "pick":
                return x[rank].clone()
            if how == "stack":
                return torch.stack(members.collect(x, "attend"))
            if how == "every":
                return torch.cat(members.rows(x, sizes, "attend"), -2)
            found = members.reduce(x, "max" if how == "max" else "sum", "attend")
            return found if how != "home" else found.narrow(-2, start, sizes[rank]).clone()

        return tuple(one(x) for x in tensors if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.how, ctx.members, ctx.sizes, _, *tensors = inputs
        ctx.there = [x is not None for x in tensors]
        ctx.made = [(x.shape, x.dtype, x.device) for x in output]
        ctx.set_materialize_grads(False)
        if ctx.how == "max":
            ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        found: list[Tensor | None] = [None] * len(ctx.there)
        if ctx.how != "max":
            given, how = iter(bars), _TRANSPOSE[ctx.how]
            full = [next(given) if there else None for there in ctx.there]
            found = _mapped(how, ctx.members, full, ctx.sizes, ctx.how == "every")
        return None, None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *dots: Any) -> Any:
        moving = dots[4:]
        if ctx.how == "max":
            return (None,) * sum(ctx.there)
        found = _mapped(ctx.how, ctx.members, moving, ctx.sizes)
        kept = [x for x, there in zip(found, ctx.there, strict=True) if there]
        made = zip(kept, ctx.made, strict=True)  # torch takes no None where others move
        return tuple(torch.zeros(n, dtype=d, device=at) if x is None else x for x, (n, d, at) in made)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, how: str, members: Members, sizes: Any, ask: bool, *tensors: Any
    ) -> Any:
        put = 1 if how == "pick" else 0  # the axis of the processes comes first

        def batched(x: Any, dim: int | None) -> Any:
            if x is None or dim is not None:
                return x if x is None else x.movedim(dim, put)
            return x.unsqueeze(put).expand(*x.shape[:put], info.batch_size, *x.shape[put:])

        moved = map(batched, tensors, in_dims[4:])
        found = apply(_Map, how, members, sizes, ask, *moved)
        return found, (1 if how == "stack" else 0,) * len(found)
