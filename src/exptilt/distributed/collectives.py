r"""Sums over the processes of a group that torch can differentiate.

A tensor is *common* if all processes hold the same, and *own* if each has its own. Two maps lead from one to
the other:

    total   own → common    y = Σ_r x_r       tangent: ẏ = Σ_r ẋ_r     cotangent: x̄_r = ȳ
    share   common → own    y_r = x           tangent: ẏ_r = ẋ         cotangent: x̄ = Σ_r ȳ_r

Each is the transpose of the other, so derivatives of every order come out of these two alone. What all
processes compute from common tensors is common again, derivatives included: a loss that every process
computes from common results counts once, and its gradients are those of one process that holds everything.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.transforms import apply
from exptilt.distributed.group import GroupError, Members


def total(x: Tensor, members: Members) -> Tensor:
    """The sum of `x` over all processes; the result is common."""
    return _mapped(x, members, "sum") if members.count > 1 else x


def share(x: Tensor, members: Members) -> Tensor:
    """A common tensor as one of this process's: its gradients are summed over the processes."""
    return _mapped(x, members, "share") if members.count > 1 else x


def largest(x: Tensor, members: Members) -> Tensor:
    """The maximum over all processes, without a derivative; also under torch.func."""
    return _mapped(x, members, "max")


def _mapped(x: Tensor, members: Members, how: str) -> Tensor:
    found: Tensor = apply(_Map, x, members, how)
    return found


class _Map(Function):
    """`total` ("sum"), `share` or `largest` ("max")."""

    @staticmethod
    def forward(x: Tensor, members: Members, how: str) -> Tensor:
        return x.clone() if how == "share" else members.reduce(x, how, "attend")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.members, ctx.how = inputs
        if ctx.how == "max":
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        transpose = {"sum": "share", "share": "sum"}.get(ctx.how)
        return None if transpose is None else _mapped(bar, ctx.members, transpose), None, None

    @staticmethod
    def jvp(ctx: Any, dot: Tensor, *_: Any) -> Tensor | None:
        return None if ctx.how == "max" else _mapped(dot, ctx.members, ctx.how)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, members: Members, how: str) -> Any:
        return _mapped(x, members, how), in_dims[0]


def highest(x: Tensor, members: Members) -> Tensor:
    """The maximum over all processes, common, with the derivative of the largest, averaged over ties."""
    top = largest(x.detach(), members)
    own = x.detach() == top
    ties = total(own.to(x.dtype), members)
    moved = total(torch.where(own, x, 0.0) / ties, members)
    return top + (moved - moved.detach())


class Final(Function):
    """Calls a function of tensors whose derivatives raise a `GroupError` with the message `why`."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], why: str, *given: Tensor) -> tuple[Tensor, ...]:
        """Result of ``run(*given)``."""
        return run(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Store the error message."""
        ctx.why = inputs[1]

    @staticmethod
    def backward(ctx: Any, *bars: Any) -> Any:
        """Raise GroupError: there is no derivative here."""
        raise GroupError(ctx.why)

    jvp = backward
