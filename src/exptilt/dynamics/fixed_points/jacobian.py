r"""The Jacobian J of f at a point: products with it and its transpose, and solves with I − J.

f is evaluated once and its graph kept, below all `torch.func` transforms, where the axes of ``vmap`` are
plain axes. Running this graph backwards gives u ↦ Jᵀu, which is linear in u, so running its graph
backwards in turn gives v ↦ Jv. Neither evaluates f again or needs the transforms, which have often ended
when a gradient is asked for.

Within ``torch.no_grad`` a ``torch.func`` transform lets no graph be recorded. Then Jv comes from forward
derivatives, as long as the transforms are in place.

Samples of few numbers get their Jacobian written out, larger ones GMRES (``krylov.py``).
"""

import torch
from torch import Tensor

from exptilt._support.errors import ConvergenceError
from exptilt._support.transforms import forward_derivatives, full_precision, in_forward_mode, without_tangent
from exptilt.dynamics.fixed_points.krylov import gmres
from exptilt.dynamics.fixed_points.problem import Problem

# Largest sample whose Jacobian is written out, at n products; GMRES takes a handful where f contracts.
_DENSE = 8


class Jacobian:
    """f evaluated at a plain state ``(*problem.full)``, with products by its derivative."""

    def __init__(self, problem: Problem, state: Tensor) -> None:
        self.problem, self.event = problem, problem.event
        self.point = state.detach().requires_grad_()
        with torch.enable_grad():
            self.seen = problem.inside(problem.function, self.point)  # wrapped in the transforms
            image = problem.unwrap(self.seen)
            if in_forward_mode():
                image = without_tangent(image)
        self.image = image if image.requires_grad else None
        self._pulled: tuple[Tensor, Tensor] | None = None

    @property
    def value(self) -> Tensor:
        """f(x), ``(*problem.full)``, a constant."""
        return self.problem.unwrap(self.seen).detach()

    def pull(self, vectors: Tensor) -> Tensor:
        """Jᵀu for each u of ``(E, *problem.full)``."""
        if self.image is None:  # f does not depend on x
            return torch.zeros_like(vectors)
        return _backwards(self.image, self.point, vectors)

    def push(self, vectors: Tensor) -> Tensor:
        """Jv for each v of ``(E, *problem.full)``."""
        if self.image is None:
            return torch.stack([self._forwards(vector) for vector in vectors])
        if self._pulled is None:
            with torch.enable_grad(), forward_derivatives(False):
                cotangent = torch.zeros_like(self.image).requires_grad_()
                self._pulled = (_pull(self.image, self.point, cotangent, create_graph=True), cotangent)
        return _backwards(*self._pulled, vectors)

    def _forwards(self, vector: Tensor) -> Tensor:
        def jvp(x: Tensor, v: Tensor) -> Tensor:
            tangent: Tensor = torch.func.jvp(self.problem.function, (x,), (v,))[1]
            return tangent

        with torch.no_grad(), forward_derivatives(False):
            return self.problem.unwrap(self.problem.inside(jvp, self.point.detach(), vector)).detach()

    def matrix(self) -> Tensor:
        """J written out, ``(S, n, n)``."""
        basis = torch.eye(self.event, dtype=self.point.dtype, device=self.point.device)
        samples = self.point.numel() // self.event
        vectors = basis.unsqueeze(1).expand(-1, samples, -1).reshape(self.event, *self.point.shape)
        found = self.push(vectors) if self.image is None else self.pull(vectors)
        rows = found.reshape(self.event, samples, self.event).transpose(0, 1)
        return rows.mT if self.image is None else rows


def _pull(output: Tensor, leaf: Tensor, vector: Tensor, *, create_graph: bool = False) -> Tensor:
    """The gradient of ⟨output, vector⟩ in a leaf; the graph is kept."""
    (found,) = torch.autograd.grad(
        output, leaf, vector, True, create_graph, allow_unused=True, materialize_grads=True
    )
    return found


def _backwards(output: Tensor, leaf: Tensor, vectors: Tensor) -> Tensor:
    """`_pull` for each vector of ``(E, ...)``."""
    if not output.requires_grad:
        return torch.zeros_like(vectors)
    with forward_derivatives(False):
        if vectors.shape[0] == 1:
            return _pull(output, leaf, vectors[0]).unsqueeze(0)
        stacked: Tensor = torch.func.vmap(lambda vector: _pull(output, leaf, vector))(vectors)
        return stacked


class Resolvent:
    """S = (I − J)⁻¹ and Sᵀ at a fixed point, by linear solves; with `strict`, a solve that fails raises."""

    def __init__(self, jacobian: Jacobian, tolerance: float, *, strict: bool) -> None:
        self.jacobian, self.tolerance, self.strict = jacobian, tolerance, strict
        # Without a graph, products need the transforms, which may end: write J out now.
        self._dense = jacobian.matrix() if jacobian.image is None else None
        self._factors: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, int, bool] | None = None

    def solve(self, right: Tensor, *, transposed: bool, verify: bool = True) -> Tensor:
        """S b, or Sᵀ b, for plain ``(E, *problem.full)``, in full precision even under autocast."""
        event = self.jacobian.event
        flat = right.reshape(right.shape[0], -1, event)

        def product(vectors: Tensor) -> Tensor:
            return self._product(vectors.reshape(right.shape), transposed=transposed).reshape(vectors.shape)

        with full_precision(right.device):
            if self._dense is None and (event <= _DENSE or event < right.shape[0]):
                self._dense = self.jacobian.matrix()
            if self._dense is None:
                solution, missed = gmres(product, flat.reshape(-1, event), self.tolerance, verify=verify)
            else:
                if self._factors is None:
                    eye = torch.eye(event, dtype=right.dtype, device=right.device)
                    self._factors = torch.linalg.lu_factor_ex(eye - self._dense)[:2]
                columns = torch.linalg.lu_solve(*self._factors, flat.permute(1, 2, 0), adjoint=transposed)
                solution = columns.permute(2, 0, 1)
                if verify:
                    missed = torch.linalg.vector_norm(flat - solution + product(solution), dim=-1)
            if self.strict and verify:
                self._check(missed.flatten(), torch.linalg.vector_norm(flat, dim=-1).flatten())
            return solution.reshape(right.shape)

    def left_over(self, right: Tensor, step: int, *, transposed: bool) -> bool:
        """Whether b ``(E, *problem.full)`` is only the residual of the last solve, made for another step.

        A first derivative comes from one step alone: the next receives only the residual of that solve, of
        size tolerance · ‖b‖, and solving for it would double the cost for digits that nobody asked for.
        """
        size = torch.linalg.vector_norm(right.reshape(right.shape[0], -1, self.jacobian.event), dim=-1)
        if self._last is not None:
            before, other, way = self._last
            comparable = other != step and way == transposed and before.shape == size.shape
            if comparable and bool((size <= min(10 * self.tolerance, 1e-3) * before).all()):
                return True
        self._last = (size, step, transposed)
        return False

    def _check(self, missed: Tensor, size: Tensor) -> None:
        # Far above rounding errors, far below the residual of a wrong solve.
        allowed = min((100 * self.tolerance) ** 0.5, 0.1) * size
        if not bool((missed <= allowed).all()):
            worst = float((missed / size).masked_fill(size == 0, 0.0).max())
            raise ConvergenceError(
                f"Implicit derivative: (I − J) u = b was solved only to a relative residual of {worst:.3g}, "
                f"wanted {self.tolerance:.3g}. Either the Jacobian has an eigenvalue near 1 at the fixed "
                "point, where no derivative exists, or samples along the batch axes influence each other: "
                "then raise event_dims until one event holds all that interact."
            )

    def _product(self, vectors: Tensor, *, transposed: bool) -> Tensor:
        """Jᵀv if `transposed`, else Jv, for each v of ``(E, *problem.full)``."""
        if self.jacobian.image is not None:
            return self.jacobian.pull(vectors) if transposed else self.jacobian.push(vectors)
        assert self._dense is not None
        matrix = self._dense.mT if transposed else self._dense
        flat = vectors.reshape(vectors.shape[0], -1, self.jacobian.event)
        return torch.einsum("sij,esj->esi", matrix, flat).reshape(vectors.shape)
