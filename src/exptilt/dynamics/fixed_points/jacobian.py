r"""Products with the Jacobian of f at a point, and with its transpose.

f is evaluated once and its graph kept, below all `torch.func` transforms, where the axes of ``vmap`` are plain axes. Running it backwards
gives u ↦ Jᵀu, and since that is linear in u, running its own graph backwards gives v ↦ Jv. Neither evaluates f again, and neither needs the
transforms to be there still: a gradient is often asked for when they are gone.

Within ``torch.no_grad`` a ``torch.func`` transform lets no graph be recorded. Then Jv comes from forward derivatives, as long as the
transforms are in place.
"""

import torch
from torch import Tensor

from exptilt._support.transforms import forward_derivatives, in_forward_mode, without_tangent
from exptilt.dynamics.fixed_points.problem import Seat


class Tape:
    """One evaluation of f at a point, to be called from the seat.

    Args:
        seat: the problem.
        state: ``(*seat.full)``, plain, not to be changed.
    """

    def __init__(self, seat: Seat, state: Tensor) -> None:
        self.seat = seat
        self.point = state.detach().requires_grad_()
        with torch.enable_grad():
            self.seen = seat.inside(seat.function, self.point)  # as the transforms know it
            image = seat.unwrap(self.seen)
            if in_forward_mode():
                image = without_tangent(image)
        self.image = image if image.requires_grad else None
        self.cotangent: Tensor | None = None
        self.pulled: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """f(x), ``(*seat.full)``, a constant."""
        return self.seat.unwrap(self.seen).detach()

    @property
    def event(self) -> int:
        """How many numbers one sample has."""
        return self.seat.event

    def pull(self, vectors: Tensor) -> Tensor:
        """Jᵀu for each of ``(E, *seat.full)``."""
        if self.image is None:  # f does not depend on x
            return torch.zeros_like(vectors)
        return _backwards(self.image, self.point, vectors)

    def push(self, vectors: Tensor) -> Tensor:
        """J v for each of ``(E, *seat.full)``."""
        if self.image is None:
            flat = (-1, self.event)
            return torch.stack(
                [self.seat.push(self.point.reshape(flat), v.reshape(flat)).reshape(v.shape) for v in vectors]
            )
        if self.pulled is None:
            with torch.enable_grad(), forward_derivatives(False):
                self.cotangent = torch.zeros_like(self.image).requires_grad_()
                (self.pulled,) = torch.autograd.grad(
                    self.image,
                    self.point,
                    self.cotangent,
                    create_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
        assert self.cotangent is not None
        return _backwards(self.pulled, self.cotangent, vectors)

    def matrix(self) -> Tensor:
        """J written out, ``(S, n, n)``."""
        basis = torch.eye(self.event, dtype=self.point.dtype, device=self.point.device)
        samples = self.point.numel() // self.event
        vectors = basis.unsqueeze(1).expand(-1, samples, -1).reshape(self.event, *self.point.shape)
        found = self.push(vectors) if self.image is None else self.pull(vectors)
        rows = found.reshape(self.event, samples, self.event).transpose(0, 1)
        return rows.mT if self.image is None else rows


def _backwards(output: Tensor, leaf: Tensor, vectors: Tensor) -> Tensor:
    """Pull each of ``(E, ...)`` back along a graph that is kept."""
    if not output.requires_grad:
        return torch.zeros_like(vectors)

    def pull(vector: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(
            output, leaf, vector, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return found

    with forward_derivatives(False):
        if vectors.shape[0] == 1:
            return pull(vectors[0]).unsqueeze(0)
        stacked: Tensor = torch.func.vmap(pull)(vectors)
        return stacked
