r"""How a fixed point attracts: the spectrum of the Jacobian J of f there.

- **Spectral radius** ρ(J) = max |λ|. Near the fixed point Picard's error shrinks by ρ a step; it is stable if ρ < 1.
- **Monotone operator.** If the symmetric part of J has its largest eigenvalue m < 1 *everywhere*, then
  <x − y, (x − f(x)) − (y − f(y))> ≥ (1 − m)‖x − y‖²: I − f is strongly monotone, and f has exactly one fixed point (THEORY B6). What is
  checked is m at the points given; a value below 1 there proves nothing elsewhere, a value of 1 or more anywhere refutes the condition.

Neither needs J written out. Samples of few numbers get it anyway; for larger ones a Krylov space (``krylov.py``) is built, and begun again
from its best Ritz vector (real and imaginary part added, so that complex pairs are found) until the residual ‖Jy − λy‖ of that vector is
within the tolerance. For the symmetric part the residual bounds the distance to an eigenvalue; for J that holds up to the condition number
of the eigenvalue. The first vector is always the same: results repeat. In half precision, or with autocast, the results are float32, and as
good as products with J in that precision are; a tolerance below its eps is raised to that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.dynamics.fixed_points.jacobian import Tape
from exptilt.dynamics.fixed_points.krylov import Operator, arnoldi
from exptilt.dynamics.fixed_points.options import integer, number
from exptilt.dynamics.fixed_points.precision import Precision, exact
from exptilt.dynamics.fixed_points.problem import Seat, plain
from exptilt.dynamics.fixed_points.solve import check_image, check_state

_DENSE = 64


@dataclass(frozen=True)
class SpectralRadius:
    """Of the Jacobian, sample by sample.

    Args:
        value: ``(...)``, |λ|.
        eigenvalue: ``(...)``, complex, the λ of largest modulus (of a complex pair the one above the real axis).
        residual: ``(...)``, ‖Jy − λy‖ for a unit vector y: 0 up to rounding where J was written out.
    """

    value: Tensor
    eigenvalue: Tensor
    residual: Tensor

    @property
    def stable(self) -> Tensor:
        """``(...)``: whether Picard's iteration is drawn in, the residual allowed for."""
        return self.value + self.residual < 1


@dataclass(frozen=True)
class MonotoneOperator:
    """The condition (J + Jᵀ)/2 < 1, checked at the points given and nowhere else.

    Args:
        largest: ``(...)``, the largest eigenvalue m of the symmetric part.
        residual: ``(...)``, how far an eigenvalue may be from it.
    """

    largest: Tensor
    residual: Tensor

    @property
    def margin(self) -> Tensor:
        """``(...)``: 1 − m − residual, the strong monotonicity of I − f at the point, at worst."""
        return 1 - self.largest - self.residual

    @property
    def holds(self) -> bool:
        """Whether the margin is positive at every point given."""
        return bool((self.margin > 0).all())


def spectral_radius(
    function: Callable[[Tensor], Tensor],
    point: Tensor,
    *,
    event_dims: int = 1,
    tolerance: float = 1e-4,
    max_restarts: int = 50,
) -> SpectralRadius:
    """The largest modulus among the eigenvalues of the Jacobian of f.

    Args:
        function: f, from ``(..., *event)`` to the same shape, as in `fixed_point`.
        point: ``(..., *event)``.
        event_dims: how many of the last axes make up one sample.
        tolerance: of the residual, relative to the value.
        max_restarts: most Krylov spaces. If they do not suffice the residual says so.

    Returns:
        Shapes ``(...)``.

    Example:
        >>> import torch
        >>> turn = torch.tensor([[0.0, -0.5], [0.5, 0.0]])
        >>> found = spectral_radius(lambda x: x @ turn.T, torch.zeros(2))
        >>> found.value, found.eigenvalue
        (tensor(0.5000), tensor(0.+0.5000j))
    """
    value, residual = _eigenvalue(function, point, event_dims, tolerance, max_restarts, symmetric=False)
    chosen = torch.complex(value.real, value.imag.abs())
    return SpectralRadius(chosen.abs(), chosen, residual)


def monotone_operator(
    function: Callable[[Tensor], Tensor],
    points: Tensor,
    *,
    event_dims: int = 1,
    tolerance: float = 1e-4,
    max_restarts: int = 50,
) -> MonotoneOperator:
    """Check at the points given whether I − f is strongly monotone.

    Args:
        function: f, from ``(..., *event)`` to the same shape, as in `fixed_point`.
        points: ``(..., *event)``.
        event_dims: how many of the last axes make up one sample.
        tolerance: of the residual, relative to the eigenvalue.
        max_restarts: most Krylov spaces. If they do not suffice the residual says so.

    Returns:
        Shapes ``(...)``.

    Example:
        >>> import torch
        >>> found = monotone_operator(
        ...     lambda x: -5 * x, torch.ones(1, 3)
        ... )  # no contraction, yet one fixed point
        >>> found.largest, found.holds
        (tensor([-5.]), True)
    """
    value, residual = _eigenvalue(function, points, event_dims, tolerance, max_restarts, symmetric=True)
    return MonotoneOperator(value.real, residual)


def _eigenvalue(
    function: Callable[[Tensor], Tensor],
    point: Tensor,
    event_dims: int,
    tolerance: float,
    max_restarts: int,
    *,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """Of J the eigenvalue of largest modulus, or of its symmetric part the largest; complex, with its residual, ``(...)``."""
    caller, name = ("monotone_operator", "points") if symmetric else ("spectral_radius", "point")
    integer(caller, "event_dims", event_dims, 0)
    integer(caller, "max_restarts", max_restarts, 1)
    number(caller, "tolerance", tolerance, above=0)
    check_state(caller, name, point, event_dims)
    with plain() as stack:
        if stack:
            raise ArgumentError(
                f"{caller}: a spectrum is looked at, not differentiated. Call this outside of torch.func transforms."
            )
        precision, point = Precision.of(point), point.detach()
        with torch.no_grad():
            image = function(point)
        check_image(caller, image, point, precision)
        if not bool(image.isfinite().all()):
            raise ArgumentError(
                f"{caller}: function returned NaN or infinity at the {name}: no spectrum is there. Pass finite {name}."
            )
        with exact(point.device):
            return _found(
                precision, function, point, event_dims, tolerance, max_restarts, symmetric=symmetric
            )


def _found(
    precision: Precision,
    function: Callable[[Tensor], Tensor],
    point: Tensor,
    event_dims: int,
    tolerance: float,
    max_restarts: int,
    *,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """With all arguments checked and autocast off."""
    batch = tuple(point.shape[: point.ndim - event_dims])
    tape = Tape(
        Seat(precision.lift(function), point.shape, event_dims, (), (), None), point.to(precision.own)
    )
    if tape.event <= _DENSE:
        matrix = tape.matrix()
        values = torch.linalg.eigvals((matrix + matrix.mT) / 2 if symmetric else matrix)
        value = _wanted(values, symmetric=symmetric)[0]
        return value.reshape(batch), torch.zeros_like(value.real).reshape(batch)

    def product(vector: Tensor) -> Tensor:
        stacked = vector.reshape(1, *point.shape)
        found = (tape.push(stacked) + tape.pull(stacked)) / 2 if symmetric else tape.push(stacked)
        return found.reshape(vector.shape)

    value, residual = _restarted(
        product, _begin(tape), max(tolerance, precision.eps), max_restarts, symmetric=symmetric
    )
    return value.reshape(batch), residual.reshape(batch)


def _wanted(values: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The rightmost of ``(S, n)``, or the one of largest modulus, and its place ``(S, 1)``."""
    place = (values.real if symmetric else values.abs()).argmax(-1, keepdim=True)
    return values.gather(-1, place).squeeze(-1), place


def _begin(tape: Tape) -> Tensor:
    """A vector with a part in every direction, the same each time: fractions of multiples of the golden ratio, centred."""
    place = torch.arange(1, tape.point.numel() + 1, dtype=torch.float64, device=tape.point.device)
    return ((place * 0.6180339887498949).frac() - 0.5).to(tape.point.dtype).reshape(-1, tape.event)


def _restarted(
    product: Operator, start: Tensor, tolerance: float, max_restarts: int, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """The wanted eigenvalue ``(S,)``, complex, and the residual of its Ritz vector."""
    vector = start
    for _ in range(max_restarts):
        basis, hessenberg = arnoldi(product, vector, min(_DENSE // 2, start.shape[-1]))
        square = hessenberg[:, :-1]
        values, vectors = torch.linalg.eig((square + square.mT) / 2 if symmetric else square)
        value, place = _wanted(values, symmetric=symmetric)
        ritz = vectors.gather(-1, place.unsqueeze(-1).expand(-1, vectors.shape[1], 1)).squeeze(-1)
        residual = hessenberg[:, -1, -1].abs() * ritz[:, -1].abs()
        if not bool((residual > tolerance * value.abs().clamp_min(tolerance)).any()):
            break
        vector = torch.bmm((ritz.real + ritz.imag).unsqueeze(1), basis[:, :-1]).squeeze(1)
    return value, residual
