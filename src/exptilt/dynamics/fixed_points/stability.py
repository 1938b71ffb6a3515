r"""How strongly a fixed point attracts: the spectrum and the size of the Jacobian J of f there.

- **Spectral radius** ρ(J) = max |λ|. Near the fixed point Picard's error shrinks by ρ a step; it is stable if
  ρ < 1.
- **Monotone operator.** If the symmetric part of J has its largest eigenvalue m < 1 *everywhere*, then <x −
  y, (x − f(x)) − (y − f(y))> ≥ (1 − m)‖x − y‖²: I − f is strongly monotone, and f has exactly one fixed
  point (THEORY B6). What is checked is m at the points given; a value below 1 there proves nothing
  elsewhere, a value of 1 or more anywhere refutes the condition.
- **Penalty.** tr(JJᵀ) ≥ ρ², estimated without bias, as a loss that keeps a layer easy to solve.

None needs J written out. For the spectrum it still is if samples have few numbers; for larger ones a Krylov
space (``krylov.py``) is built, and restarted from its best Ritz vector (real and imaginary part added, so
that complex pairs are found) until the residual ‖Jy − λy‖ of that vector is within the tolerance. For the
symmetric part the residual bounds the distance to an eigenvalue; for J that holds up to the condition
number of the eigenvalue. The first vector is always the same: results repeat. In half precision, or with
autocast, the results are float32, and as good as products with J in that precision are; a tolerance below
the eps of that precision is raised to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.checks import floating, number, whole
from exptilt._support.checks import generator as checked_generator
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import full_precision, in_transform
from exptilt.dynamics.fixed_points.jacobian import Jacobian
from exptilt.dynamics.fixed_points.krylov import Operator, arnoldi
from exptilt.dynamics.fixed_points.precision import Function, lifted
from exptilt.dynamics.fixed_points.problem import Problem

_DENSE = 64


@dataclass(frozen=True)
class SpectralRadius:
    """The spectral radius of the Jacobian of each sample.

    Args:
        value: ``(...)``, |λ|.
        eigenvalue: ``(...)``, complex, the λ of largest modulus (of a complex pair the one above the real
            axis).
        residual: ``(...)``, ‖Jy − λy‖ for a unit vector y: 0 up to rounding where J was written out.
    """

    value: Tensor
    eigenvalue: Tensor
    residual: Tensor

    @property
    def stable(self) -> Tensor:
        """``(...)``: whether radius plus residual is below 1, so that Picard's iteration converges."""
        return self.value + self.residual < 1


@dataclass(frozen=True)
class MonotoneOperator:
    """The condition (J + Jᵀ)/2 < 1, checked at the points given and nowhere else.

    Args:
        largest: ``(...)``, the largest eigenvalue m of the symmetric part.
        residual: ``(...)``, how far the nearest eigenvalue may be from `largest`.
    """

    largest: Tensor
    residual: Tensor

    @property
    def margin(self) -> Tensor:
        """``(...)``: 1 − m − residual, a lower bound on the strong monotonicity of I − f at the point."""
        return 1 - self.largest - self.residual

    @property
    def holds(self) -> bool:
        """Whether the margin is positive at every point given."""
        return bool((self.margin > 0).all())


def spectral_radius(
    function: Function, point: Tensor, *, event_dims: int = 1, tolerance: float = 1e-4, max_restarts: int = 50
) -> SpectralRadius:
    """The largest modulus among the eigenvalues of the Jacobian of f.

    Args:
        function: f, from ``(..., *event)`` to the same shape, as in `fixed_point`.
        point: ``(..., *event)``.
        event_dims: how many of the last axes make up one sample.
        tolerance: of the residual, relative to the value.
        max_restarts: most Krylov spaces; if they do not suffice, the residual stays above the tolerance.

    Returns:
        A `SpectralRadius` with fields ``(...)``.

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
    function: Function,
    points: Tensor,
    *,
    event_dims: int = 1,
    tolerance: float = 1e-4,
    max_restarts: int = 50,
) -> MonotoneOperator:
    """Check whether I − f is strongly monotone at the points given.

    Args:
        function: f, from ``(..., *event)`` to the same shape, as in `fixed_point`.
        points: ``(..., *event)``.
        event_dims: how many of the last axes make up one sample.
        tolerance: of the residual, relative to the eigenvalue.
        max_restarts: most Krylov spaces; if they do not suffice, the residual stays above the tolerance.

    Returns:
        A `MonotoneOperator` with fields ``(...)``.

    Example:
        >>> import torch
        >>> found = monotone_operator(lambda x: -5 * x, torch.ones(1, 3))  # not contracting, yet unique
        >>> found.largest, found.holds
        (tensor([-5.]), True)
    """
    value, residual = _eigenvalue(function, points, event_dims, tolerance, max_restarts, symmetric=True)
    return MonotoneOperator(value.real, residual)


def jacobian_penalty(
    function: Function, point: Tensor, *, draws: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    r"""An unbiased estimate of tr(JJᵀ)/n over all n numbers of a state, as a term of a loss.

        (1/n) E‖Jᵀv‖²,    v standard Gaussian

    by Hutchinson's rule. Derivatives flow to all that `function` uses, and to the point. Added to a loss
    with a small weight it keeps the Jacobian of a layer small, so that solvers need few steps (Bai, Koltun
    and Kolter, "Stabilizing equilibrium models by Jacobian regularization", 2021).

    Args:
        function: f, from ``(..., *event)`` to the same shape; its backward must be differentiable.
        point: ``(..., *event)``, such as the value that `fixed_point` has found.
        draws: how many v to average over.
        generator: draws v.

    Returns:
        ``()``.

    Example:
        >>> import torch
        >>> penalty = jacobian_penalty(lambda z: 0.5 * z, torch.zeros(3, 1000), draws=50)
        >>> bool((penalty - 0.25).abs() < 0.01)
        True
    """
    whole("jacobian_penalty", "draws", draws)
    floating("jacobian_penalty", "point", point)
    drawn = checked_generator("jacobian_penalty", generator, point.device)
    image, pull = torch.func.vjp(function, point)[:2]
    if image.shape != point.shape:
        shapes = f"{tuple(point.shape)} into {tuple(image.shape)}"
        raise ArgumentError(
            f"jacobian_penalty: function turned {shapes}. It must return the shape it was given."
        )
    total = torch.zeros((), dtype=point.dtype, device=point.device)
    for _ in range(draws):
        vector = torch.randn(point.shape, dtype=point.dtype, device=point.device, generator=drawn)
        total = total + pull(vector)[0].square().sum()
    return total / (draws * point.numel())


def _eigenvalue(
    function: Function,
    point: Tensor,
    event_dims: int,
    tolerance: float,
    max_restarts: int,
    *,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """The eigenvalue of J of largest modulus, or the largest of its symmetric part.

    Returns the eigenvalue, a complex number, and its residual, ``(...)`` each.
    """
    caller, name = ("monotone_operator", "points") if symmetric else ("spectral_radius", "point")
    whole(caller, "event_dims", event_dims, least=0)
    whole(caller, "max_restarts", max_restarts)
    number(caller, "tolerance", tolerance, above=0)
    if in_transform():
        raise ArgumentError(
            f"{caller}: a spectrum cannot be differentiated. Call it outside torch.func transforms."
        )
    with torch.no_grad():
        function, point, image, precision = lifted(caller, name, function, point, event_dims)
    if not bool(image.isfinite().all()):
        raise ArgumentError(
            f"{caller}: function returned NaN or infinity at the {name}: no spectrum is there. "
            f"Pass finite {name}."
        )
    batch = tuple(point.shape[: point.ndim - event_dims])
    with full_precision(point.device):
        jacobian = Jacobian(Problem(function, point.shape, event_dims), point)
        if jacobian.event <= _DENSE:
            matrix = jacobian.matrix()
            values = torch.linalg.eigvals((matrix + matrix.mT) / 2 if symmetric else matrix)
            value = _wanted(values, symmetric=symmetric)[0]
            return value.reshape(batch), torch.zeros_like(value.real).reshape(batch)

        def product(vector: Tensor) -> Tensor:
            stacked = vector.reshape(1, *point.shape)
            pushed = jacobian.push(stacked)
            return ((pushed + jacobian.pull(stacked)) / 2 if symmetric else pushed).reshape(vector.shape)

        least = max(tolerance, precision.eps)
        value, residual = _restarted(product, _begin(jacobian), least, max_restarts, symmetric=symmetric)
        return value.reshape(batch), residual.reshape(batch)


def _wanted(values: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The rightmost (`symmetric`) or largest in modulus of ``(S, n)``, and its place ``(S, 1)``."""
    place = (values.real if symmetric else values.abs()).argmax(-1, keepdim=True)
    return values.gather(-1, place).squeeze(-1), place


def _begin(jacobian: Jacobian) -> Tensor:
    """A fixed start ``(S, n)`` in no special direction, from multiples of the golden ratio modulo 1."""
    point = jacobian.point
    place = torch.arange(1, point.numel() + 1, dtype=torch.float64, device=point.device)
    return ((place * 0.6180339887498949).frac() - 0.5).to(point.dtype).reshape(-1, jacobian.event)


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
