r"""Sums over the processes of a group that torch can differentiate.

A tensor is *common* if all processes hold the same, and *own* if each has its own. Two maps lead from one to
the other:

    total   own → common    y = Σ_r x_r       tangent: ẏ = Σ_r ẋ_r     cotangent: x̄_r = ȳ
    share   common → own    y_r = x           tangent: ẏ_r = ẋ         cotangent: x̄ = Σ_r ȳ_r

Each is the transpose of the other, so derivatives of every order come out of these two alone. What all
processes compute from common tensors is common again, derivatives included: a loss that every process
computes from common results counts once, and its gradients are those of one process that holds everything.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.transforms import apply
from exptilt.distributed.group import Members


def total(x: Tensor, members: Members) -> Tensor:
    """The sum over all processes of what each of them has; the result is common."""
    return _mapped(x, members, True) if members.count > 1 else x


def share(x: Tensor, members: Members) -> Tensor:
    """A common tensor, for use with what differs from process to process: its gradients are added up."""
    return _mapped(x, members, False) if members.count > 1 else x


def _mapped(x: Tensor, members: Members, adds: bool) -> Tensor:
    found: Tensor = apply(_Map, x, members, adds)
    return found


class _Map(Function):
    """`total` if it adds, else `share`."""

    @staticmethod
    def forward(x: Tensor, members: Members, adds: bool) -> Tensor:
        return members.reduce(x, "sum", "attend") if adds else x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.members, ctx.adds = inputs

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        return _mapped(bar, ctx.members, not ctx.adds), None, None

    @staticmethod
    def jvp(ctx: Any, dot: Tensor, *_: Any) -> Tensor:
        return _mapped(dot, ctx.members, ctx.adds)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, members: Members, adds: bool) -> Any:
        return _mapped(x, members, adds), in_dims[0]


def largest(x: Tensor, members: Members) -> Tensor:
    """The maximum over all processes, without a derivative; also under torch.func."""
    found: Tensor = apply(_Largest, x, members)
    return found


class _Largest(Function):
    @staticmethod
    def forward(x: Tensor, members: Members) -> Tensor:
        return members.reduce(x, "max", "attend")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: object, bar: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: object, *dots: object) -> None:
        return None

    @staticmethod
    def vmap(info: object, in_dims: tuple[int, None], x: Tensor, members: Members) -> tuple[Tensor, int]:
        return largest(x, members), in_dims[0]


def highest(x: Tensor, members: Members) -> Tensor:
    """The largest of the processes' numbers, common, with the derivative of the one that it is."""
    top = largest(x.detach(), members)
    own = x.detach() == top
    ties = total(own.to(x.dtype), members)
    moved = total(torch.where(own, x, 0.0) / ties, members)
    return top + (moved - moved.detach())
