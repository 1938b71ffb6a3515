r"""Derivatives of a fixed point, without differentiating the solver's steps.

Let x(θ) = f(x(θ), θ), let x̂ be the solver's answer, a constant, and S = (I − J)⁻¹ with J = ∂f/∂x at x̂, a
constant too. The chord steps

    x₀ = x̂,      x_{k+1} = x_k + S (f(x_k, θ) − x_k)                                                     (∗)

leave the value unchanged, and each adds one order of derivatives: for smooth f, e_k(θ) = x_k(θ) − x(θ)
satisfies

    e_{k+1} = e_k + S (f(x + e_k, θ) − x − e_k) = [I − S (I − J(θ))] e_k + O(e_k²),

and S(I − J(θ)) = I + O(δ) for θ = θ̂ + δ. So if e_k = O(δ^{k+1}) then e_{k+1} = O(δ^{k+2}); and e₀ = x̂ −
x(θ) = O(δ). After `order` steps, derivatives up to that order are exact, in any mixture of forward and
backward. They are as good as the solver's answer: its error enters them linearly.

Nothing but f and the linear map S is in (∗), so autograd and `torch.func` do the rest once S has its rules:
S is constant, so its forward derivative is S and its backward derivative is Sᵀ. A gradient therefore costs
one solve with I − Jᵀ; memory holds `order` evaluations of f and not the solver's steps.

A gradient b reaches the last step first. This step solves u = Sᵀb, sends u through f to θ, and passes
the residual of its solve, b − u + Jᵀu, to the step before, which drops a small residual and solves for a
large one; so a bad solve is noticed without one more product.

Derivatives **beyond `order`** would be wrong, so they are refused. The transforms of `torch.func`, and a
tangent of `forward_ad`, are counted when x is made. Backward passes are counted as they run: the result of
each solve is differentiable, so the next pass runs its node, which knows the pass that made it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import (
    backward_pass,
    current_level,
    derivative_levels,
    forward_derivatives,
    has_tangent,
    in_forward_mode,
    in_transform,
    is_wrapped,
    without_tangent,
)
from exptilt.dynamics.fixed_points.jacobian import Jacobian, Resolvent
from exptilt.dynamics.fixed_points.problem import Problem, bare, plain

# Name of a ``vmap`` axis that the problem does not have; sorts before the problem's own.
_OTHER = 0


class _Orders:
    """Derivative order of each backward pass; `known` counts the torch.func levels and tangents around it."""

    def __init__(self, caller: str, order: int, known: int) -> None:
        self.caller, self.order, self.known = caller, order, known
        self.passes: dict[int, int] = {}
        self.mark: Tensor | None = None
        self.check(known)

    def bind(self, image: Tensor) -> None:
        """Store one entry of f's image as the mark, which depends on every tensor that f depends on."""
        if self.mark is None:
            with plain():
                mark = bare(image)[0].flatten()[0]
                self.mark = without_tangent(mark) if in_forward_mode() else mark

    def visit(self, made_in: int) -> None:
        """Record that the current backward pass runs a node made in the pass `made_in`, -1 for none."""
        now = backward_pass()
        found = max(self.passes.get(now, 0), self.passes.get(made_in, self.known) + 1)
        self.passes[now] = found
        self.check(found)

    def check(self, found: int) -> None:
        """Raise if derivatives of order `found` are not exact."""
        if found > self.order:
            raise ArgumentError(
                f"{self.caller}: a derivative of order {found} is asked for, and those beyond "
                f"order={self.order} would be wrong. Pass order={found}."
            )


@dataclass(frozen=True)
class _Solve:
    """The linear map S or Sᵀ of one of the steps (∗).

    Args:
        resolvent: S.
        orders: counts the derivatives.
        step: number of the step.
        axes: names of the axes that ``vmap`` has put in front: a level of the problem, or `_OTHER`.
        transposed: whether the map is Sᵀ.
        silent: return 0 as the value, since f(x̂) − x̂ is 0 within the solver's tolerance.
        made_in: the backward pass that made this map, -1 for none.
    """

    resolvent: Resolvent
    orders: _Orders
    step: int
    axes: tuple[int, ...] = ()
    transposed: bool = False
    silent: bool = False
    made_in: int = -1

    def __call__(self, vector: Tensor, *, verify: bool = True) -> Tensor | None:
        """The map of ``(*axes, *shape)``, or None if this is only the residual of another step's solve."""
        order = sorted(range(len(self.axes)), key=lambda place: self.axes[place])
        back = sorted(range(len(self.axes)), key=lambda place: order[place])
        rest = range(len(self.axes), vector.ndim)
        stacked = vector.permute(*order, *rest)
        right = stacked.reshape(-1, *self.resolvent.jacobian.problem.full)
        if self.resolvent.left_over(right, self.step, transposed=self.transposed):
            return None
        solved = self.resolvent.solve(right, transposed=self.transposed, verify=verify)
        return solved.reshape(stacked.shape).permute(*back, *rest)

    def under_vmap(self) -> "_Solve":
        """The map with one more axis in front, for the ``vmap`` whose rule calls this.

        Within its rule a transform is off, so its level is one above the current one. Level numbers are
        reused once a transform has ended, but the levels still to come for this operand are below all that
        have ended: a level of the problem that already has an axis belongs to a new transform.
        """
        level = current_level() + 1
        own = level in self.resolvent.jacobian.problem.levels and level not in self.axes
        return replace(self, axes=(level if own else _OTHER, *self.axes))


class _Inverse(Function):
    """A differentiable `_Solve`. If `mark` is set, later backward passes run this node and are counted."""

    @staticmethod
    def forward(vector: Tensor, mark: Tensor | None, solve: _Solve) -> Tensor:
        solved = torch.zeros_like(vector) if solve.silent else solve(vector)
        return vector.clone() if solved is None else solved

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        vector, _, ctx.solve = inputs
        ctx.save_for_backward(vector)
        ctx.save_for_forward(vector)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        solve: _Solve = ctx.solve
        inside = in_transform()
        if not inside:
            solve.orders.visit(solve.made_in)
            if not ctx.needs_input_grad[0]:
                return None, None, None
        vector = _like(bar, ctx.saved_tensors[0])
        made_in = -1 if inside else backward_pass()
        back = replace(solve, transposed=not solve.transposed, silent=False, made_in=made_in)
        if inside:
            return _inverse(vector, None, back), None, None
        if torch.is_grad_enabled():
            return _inverse(vector, solve.orders.mark, back), None, None
        # The common case, a first derivative: the step before receives the residual of this solve, so it is
        # computed here only for step 0.
        return back(vector, verify=not solve.silent or solve.step == 0), None, None

    @staticmethod
    def jvp(ctx: Any, dot: Tensor, *_: Any) -> Any:
        """S applied to a tangent, with the forward derivatives that torch switches off in a ``jvp``."""
        (saved,), ahead = ctx.saved_tensors, replace(ctx.solve, silent=False)
        if not in_transform():
            return _inverse(_like(dot, saved), None, ahead)
        with forward_derivatives():
            return _inverse(_like(dot, without_tangent(saved)), None, ahead)

    @staticmethod
    def vmap(info: Any, in_dims: Any, vector: Tensor, mark: Tensor | None, solve: _Solve) -> Any:
        return _inverse(vector.movedim(in_dims[0], 0), mark, solve.under_vmap()), 0


_inverse: Callable[[Tensor, Tensor | None, _Solve], Tensor] = _Inverse.apply


def _like(vector: Tensor, other: Tensor) -> Tensor:
    """The vector with every ``vmap`` axis that `other` has."""
    return vector + torch.zeros_like(other) if is_wrapped(other) else vector


def known_orders(image: Tensor) -> int:
    """The number of derivatives of f's image under way, in `torch.func` and in `forward_ad`."""
    levels = derivative_levels(image)
    with plain():
        return levels + has_tangent(bare(image)[0])


def attach(
    problem: Problem,
    state: Tensor,
    *,
    caller: str,
    order: int,
    known: int,
    tolerance: float,
    strict: bool,
    shared: bool,
) -> Tensor:
    """The solver's answer x̂ ``(*problem.full)`` with its derivatives, wrapped in the transforms.

    `known` comes from `known_orders`; `strict` makes a linear solve that misses the tolerance an error; with
    `shared` the evaluation that the Jacobian needs is also the first step's.
    """
    orders = _Orders(caller, order, known)
    with plain():
        recorded = Jacobian(problem, state)
        resolvent, state = Resolvent(recorded, tolerance, strict=strict), state.detach()
    x = problem.wrap(state)
    for step in range(order):
        image = recorded.seen if shared and step == 0 else problem.function(x)
        orders.bind(image)
        x = x + _inverse(_like(image, x) - x, None, _Solve(resolvent, orders, step, silent=True))
    return x
