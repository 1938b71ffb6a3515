r"""Derivatives of a fixed point, without differentiating the way to it.

Let x(θ) = f(x(θ), θ), let x̂ be the solver's answer, a constant, and S = (I − J)⁻¹ with J = ∂f/∂x at x̂, a constant too. The chord steps

    x₀ = x̂,      x_{k+1} = x_k + S (f(x_k, θ) − x_k)                                                                       (∗)

leave the value where it is and add one order of derivatives each. For e_k(θ) = x_k(θ) − x(θ) satisfies, f being smooth,

    e_{k+1} = e_k + S (f(x + e_k, θ) − x − e_k) = [I − S (I − J(θ))] e_k + O(e_k²),

and S(I − J(θ)) = I + O(δ) for θ = θ̂ + δ. So if e_k = O(δ^{k+1}) then e_{k+1} = O(δ^{k+2}); and e₀ = x̂ − x(θ) = O(δ). After `order`
steps, derivatives up to that order are exact, in any mixture of forward and backward. They are as good as the solver's answer: its error
enters them linearly.

Nothing but f and the linear map S is in (∗), so autograd and `torch.func` do the rest once S has its rules: S is constant, so its forward
derivative is S and its backward derivative is Sᵀ. `_Attach` is S(r) with its value left out (r is zero but for the solver's tolerance),
`_Inverse` is S or Sᵀ worked out. A gradient therefore costs one solve with I − Jᵀ; memory holds `order` evaluations of f and not the
solver's steps. The first of them is the solver's last, where it could be recorded.

A gradient b comes to the last step first. That solves u = Sᵀb, sends u through f to θ, and b − u + Jᵀu to the step before: the residual of
its solve. If this is small it is sent no further, else it is solved for in turn; so a bad solve is noticed without a product more.

Products with J and Jᵀ come from ``tape.py``. Samples of few numbers get their Jacobian written out, larger ones GMRES (``krylov.py``).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.errors import ConvergenceError
from exptilt._support.transforms import (
    current_level,
    forward_derivatives,
    in_transform,
    is_wrapped,
    without_tangent,
)
from exptilt.dynamics.fixed_points.jacobian import Tape
from exptilt.dynamics.fixed_points.krylov import gmres
from exptilt.dynamics.fixed_points.precision import exact
from exptilt.dynamics.fixed_points.problem import Seat, plain

# Written out, a Jacobian of n columns costs n products, GMRES a handful where f contracts. At n = 32 writing it out took thrice the time.
_DENSE = 8
# The name of an axis that is none of the seat's: before them in order.
_OTHER = 0


class Jacobian:
    """Solves with I − J and I − Jᵀ at the fixed point.

    Args:
        tape: f at x̂.
        tolerance: relative, of the solves.
        strict: whether a solve that misses the tolerance is an error.
    """

    def __init__(self, tape: Tape, tolerance: float, *, strict: bool) -> None:
        self.tape, self.tolerance, self.strict = tape, tolerance, strict
        self.event = tape.event
        # Without a graph there are products only as long as the transforms are in place: use them now.
        self.dense = tape.matrix() if tape.image is None else None
        self.factors: tuple[Tensor, Tensor] | None = None
        self.last: tuple[Tensor, int, bool] | None = None

    def solve(self, right: Tensor, *, transposed: bool, verify: bool = True) -> Tensor:
        """(I − J)⁻¹ b, or (I − Jᵀ)⁻¹ b, for plain ``(E, *seat.full)``. Whoever asks for a derivative may do so under autocast."""
        with exact(right.device):
            return self._solve(right, transposed=transposed, verify=verify)

    def _solve(self, right: Tensor, *, transposed: bool, verify: bool) -> Tensor:
        flat = right.reshape(right.shape[0], -1, self.event)
        if self.dense is None and (self.event <= _DENSE or self.event < right.shape[0]):
            self.dense = self.tape.matrix()
        if self.dense is None:

            def operator(vector: Tensor) -> Tensor:
                return self.product(vector.reshape(right.shape), transposed=transposed).reshape(vector.shape)

            solution, missed = gmres(operator, flat.reshape(-1, self.event), self.tolerance, verify=verify)
        else:
            if self.factors is None:
                self.factors = torch.linalg.lu_factor_ex(
                    torch.eye(self.event, dtype=right.dtype, device=right.device) - self.dense
                )[:2]
            solution = torch.linalg.lu_solve(
                *self.factors, flat.permute(1, 2, 0), adjoint=transposed
            ).permute(2, 0, 1)
            if verify:
                left = (
                    flat
                    - solution
                    + self.product(solution.reshape(right.shape), transposed=transposed).reshape(flat.shape)
                )
                missed = torch.linalg.vector_norm(left, dim=-1)
        if self.strict and verify:
            self._check(missed.flatten(), torch.linalg.vector_norm(flat, dim=-1).flatten())
        return solution.reshape(right.shape)

    def spent(self, right: Tensor, step: int, *, transposed: bool) -> bool:
        """Whether b ``(E, *seat.full)`` is what the solve of another of the steps (∗) left over.

        To first order one step alone contributes: what reaches the next is its residual, b times the tolerance, and solving for that would
        double the cost for digits that nobody asked for.
        """
        size = torch.linalg.vector_norm(right.reshape(right.shape[0], -1, self.event), dim=-1)
        if self.last is not None:
            before, other, way = self.last
            comparable = other != step and way == transposed and before.shape == size.shape
            if comparable and bool((size <= min(10 * self.tolerance, 1e-3) * before).all()):
                return True
        self.last = (size, step, transposed)
        return False

    def _check(self, missed: Tensor, size: Tensor) -> None:
        allowed = (
            min((100 * self.tolerance) ** 0.5, 0.1) * size
        )  # far above what rounding may do, far below what a wrong solve does
        if not bool((missed <= allowed).all()):
            worst = float((missed / size).masked_fill(size == 0, 0.0).max())
            raise ConvergenceError(
                f"Implicit derivative: (I − J) u = b was solved only to a relative residual of {worst:.3g}, wanted {self.tolerance:.3g}. "
                "Either the Jacobian has an eigenvalue near 1 at the fixed point, where no derivative exists, or samples along the batch "
                "axes influence each other: then raise event_dims until one event holds all that interact."
            )

    def product(self, vectors: Tensor, *, transposed: bool) -> Tensor:
        """Jᵀu or Jv for each of ``(E, *seat.full)``."""
        if self.tape.image is None:
            assert self.dense is not None
            matrix = self.dense.mT if transposed else self.dense
            return torch.einsum(
                "sij,esj->esi", matrix, vectors.reshape(vectors.shape[0], -1, self.event)
            ).reshape(vectors.shape)
        return self.tape.pull(vectors) if transposed else self.tape.push(vectors)


def _solve(
    vector: Tensor,
    jacobian: Jacobian,
    step: int,
    axes: tuple[int, ...],
    transposed: bool,
    *,
    verify: bool = True,
) -> Tensor | None:
    """S v or Sᵀ v, on behalf of one of the steps (∗); None if v is but what another step left over.

    Args:
        vector: v, ``(*axes, *shape)``, with the axes that ``vmap`` has put in front so far.
        jacobian: at the fixed point.
        step: number of the step.
        axes: names of these axes: the level of the seat that each belongs to, or `_OTHER`.
        transposed: whether it is Sᵀ v.
        verify: whether the residual is to be looked at.
    """
    order = sorted(range(len(axes)), key=lambda place: axes[place])
    back = sorted(range(len(axes)), key=lambda place: order[place])
    stacked = vector.permute(*order, *range(len(axes), vector.ndim))
    right = stacked.reshape(-1, *jacobian.tape.seat.full)
    if jacobian.spent(right, step, transposed=transposed):
        return None
    solved = jacobian.solve(right, transposed=transposed, verify=verify)
    return solved.reshape(stacked.shape).permute(*back, *range(len(axes), vector.ndim))


class _Inverse(Function):
    """`_solve`, open to derivatives."""

    @staticmethod
    def forward(
        vector: Tensor, jacobian: Jacobian, step: int, axes: tuple[int, ...], transposed: bool
    ) -> Tensor:
        solved = _solve(vector, jacobian, step, axes, transposed)
        return vector.clone() if solved is None else solved

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        return (
            _Inverse.apply(
                _like(bar, ctx.saved_tensors[0]), ctx.jacobian, ctx.step, ctx.axes, not ctx.transposed
            ),
            None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, dot: Tensor, *_: Any) -> Any:
        return _forwards(ctx, dot)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        vector: Tensor,
        jacobian: Jacobian,
        step: int,
        axes: tuple[int, ...],
        transposed: bool,
    ) -> Any:
        return _Inverse.apply(
            vector.movedim(in_dims[0], 0), jacobian, step, _named(jacobian, axes), transposed
        ), 0


class _Attach(Function):
    """Zero in value, S r in derivative. Its last argument is False, so that both functions keep the same things."""

    @staticmethod
    def forward(
        residual: Tensor, jacobian: Jacobian, step: int, axes: tuple[int, ...], transposed: bool
    ) -> Tensor:
        return torch.zeros_like(residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Any:
        vector = _like(bar, ctx.saved_tensors[0])
        if torch.is_grad_enabled() or in_transform():
            found = _Inverse.apply(vector, ctx.jacobian, ctx.step, ctx.axes, True)
        else:  # The common case: a first derivative. A step's residual comes to the step before it, and need not be computed here too.
            found = _solve(vector, ctx.jacobian, ctx.step, ctx.axes, True, verify=ctx.step == 0)
        return found, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dot: Tensor, *_: Any) -> Any:
        return _forwards(ctx, dot)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        residual: Tensor,
        jacobian: Jacobian,
        step: int,
        axes: tuple[int, ...],
        transposed: bool,
    ) -> Any:
        return _Attach.apply(
            residual.movedim(in_dims[0], 0), jacobian, step, _named(jacobian, axes), transposed
        ), 0


def _named(jacobian: Jacobian, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Names of the axes with the one in front that a ``vmap`` now adds.

    Within its rule a transform is off, so its level is one above the current one. Numbers are given out anew once a transform has ended,
    but levels still to come for this operand are below all that have ended: one of the seat's that has an axis already is new.
    """
    level = current_level() + 1
    return (level if level in jacobian.tape.seat.levels and level not in axes else _OTHER, *axes)


def _keep(ctx: Any, inputs: Any) -> None:
    vector, ctx.jacobian, ctx.step, ctx.axes, ctx.transposed = inputs
    ctx.save_for_backward(vector)
    ctx.save_for_forward(vector)


def _forwards(ctx: Any, dot: Tensor) -> Any:
    """S applied to a tangent, itself open to forward derivatives, which torch switches off inside a ``jvp`` (nested ones need them)."""
    (saved,) = ctx.saved_tensors
    if not in_transform():
        return _Inverse.apply(_like(dot, saved), ctx.jacobian, ctx.step, ctx.axes, ctx.transposed)
    with forward_derivatives():
        return _Inverse.apply(
            _like(dot, without_tangent(saved)), ctx.jacobian, ctx.step, ctx.axes, ctx.transposed
        )


def _like(vector: Tensor, other: Tensor) -> Tensor:
    """The same numbers, with every ``vmap`` axis that `other` has."""
    return vector + torch.zeros_like(other) if is_wrapped(other) else vector


def attach(
    seat: Seat, state: Tensor, tape: Tape | None, *, order: int, tolerance: float, strict: bool
) -> Tensor:
    """The solver's answer with its derivatives.

    Args:
        seat: the problem; called with the transforms in place.
        state: x̂, plain, ``(*seat.full)``.
        tape: f at x̂, recorded without any transform in place, or None if there is no such.
        order: derivatives up to this order are exact.
        tolerance: relative, of the linear solves.
        strict: whether a linear solve that misses it is an error.

    Returns:
        x̂ as the transforms know it.
    """
    with plain():
        jacobian = Jacobian(Tape(seat, state) if tape is None else tape, tolerance, strict=strict)
        state = state.detach()
    x = seat.wrap(state)
    for step in range(order):
        # The tape's own evaluation will do for the first step, if the answer requires grad anyway and not only because of the tape's leaf.
        image = seat.function(x) if step or tape is None else tape.seen
        x = x + _Attach.apply(_like(image, x) - x, jacobian, step, (), False)
    return x
