"""Half precision and autocast: f sees what the caller chose, the solver works in float32, and answers are
right to a few eps.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap

from dynamics.fixed_points.problems import SOLVERS, contraction, generator
from exptilt._support.errors import ArgumentError
from exptilt.dynamics import Equilibrium, fixed_point, monotone_operator, spectral_radius

halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
COS = 0.7390851332151607


class Layer(nn.Module):
    """tanh(Wz) + x, of a Lipschitz constant of 0.7."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(dim, dim), set()
        with torch.no_grad():
            self.linear.weight.copy_(contraction(dim, 0.7, 1))
            self.linear.bias.zero_()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        product = self.linear(z)
        self.seen.add((z.dtype, product.dtype))
        return torch.tanh(product) + x


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().float() - wanted).norm() / wanted.norm())


def reference(layer: Layer, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The equilibrium and the gradients of its weighted sum, in float64."""
    layer, x = copy.deepcopy(layer).double(), x.double().requires_grad_()
    z = Equilibrium(layer)(x)
    return z.detach().float(), [
        g.float() for g in torch.autograd.grad((z * weight(x)).sum(), (x, *layer.parameters()))
    ]


def weight(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=generator(3)).to(x.dtype)


@halves
@pytest.mark.parametrize("solver", SOLVERS)
def test_value_in_half_precision(solver: str, dtype: torch.dtype) -> None:
    seen = set()
    found = fixed_point(lambda x: (seen.add(x.dtype), x.cos())[1], torch.zeros(2, dtype=dtype), solver=solver)
    assert found.value.dtype == dtype
    assert seen == {dtype}
    assert found.residual.dtype == torch.float32
    assert float(found.residual) <= 4 * torch.finfo(dtype).eps
    assert far(found.value, torch.full((2,), COS)) < 4 * torch.finfo(dtype).eps


@halves
@pytest.mark.parametrize("dim", [4, 20])  # Jacobian written out, and GMRES
def test_layer_in_half_precision(dtype: torch.dtype, dim: int) -> None:
    layer, x = Layer(dim), torch.randn(3, dim, generator=generator(2))
    wanted, slopes = reference(layer, x)
    model, state = Equilibrium(layer.to(dtype)), x.to(dtype).requires_grad_()
    z = model(state)
    assert z.dtype == dtype
    limit = 10 * torch.finfo(dtype).eps
    assert far(z, wanted) < limit
    found = torch.autograd.grad((z * weight(x).to(dtype)).sum(), (state, *layer.parameters()))
    assert all(far(a, b) < limit for a, b in zip(found, slopes, strict=True))


def test_transforms_in_half_precision() -> None:
    a, b = contraction(4, 0.5, 4), torch.randn(2, 4, generator=generator(4))

    def loss(t: Tensor) -> Tensor:
        weights, shift = a.to(t.dtype), b.to(t.dtype)
        return (
            fixed_point(lambda x: torch.tanh(t * x @ weights) + shift, torch.zeros_like(shift))
            .value.float()
            .square()
            .sum()
        )

    low, high = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    for transform in (
        lambda f: vmap(grad(f)),
        lambda f: vmap(hessian(f)),
        lambda f: lambda t: jvp(vmap(f), (t,), (t,))[1],
    ):
        assert far(transform(loss)(low), transform(loss)(high).float()) < 0.08


@halves
@pytest.mark.parametrize("n", [2, 80])
def test_spectrum_in_half_precision(dtype: torch.dtype, n: int) -> None:
    point = torch.full((n,), COS, dtype=dtype)
    slope = -((1 - COS**2) ** 0.5)
    radius, check = spectral_radius(torch.cos, point), monotone_operator(torch.cos, point)
    assert abs(float(radius.value) + slope) < 2 * torch.finfo(dtype).eps
    assert abs(float(check.largest) - slope) < 2 * torch.finfo(dtype).eps
    assert radius.value.dtype == check.largest.dtype == torch.float32


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dim", [4, 20])
def test_forward_and_backward_under_autocast(dim: int, inside: bool) -> None:
    """Gradients asked for within autocast and after it; f does see it, the solver does not."""
    layer, x = Layer(dim), torch.randn(3, dim, generator=generator(2))
    wanted, slopes = reference(layer, x)
    layer.seen.clear()
    state = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = Equilibrium(layer)(state)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            found = torch.autograd.grad((z * weight(x)).sum(), (state, *layer.parameters()))
    assert layer.seen == {(torch.float32, torch.bfloat16)}
    assert z.dtype == torch.float32
    assert far(z, wanted) < 0.08
    assert all(far(a, b) < 0.08 for a, b in zip(found, slopes, strict=True))


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_under_autocast(solver: str) -> None:
    weights, shift = contraction(20, 0.7, 5).float(), torch.randn(3, 20, generator=generator(5))
    wanted = torch.linalg.solve(torch.eye(20) - weights, shift.mT).mT
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for start in (torch.zeros(3, 20), torch.zeros(3, 20, dtype=torch.bfloat16)):
            found = fixed_point(lambda z: z @ weights.mT + shift, start, solver=solver).value
            assert found.dtype == start.dtype
            assert far(found, wanted) < 0.08
        close = fixed_point(
            lambda z: z @ weights.mT.double() + shift, torch.zeros(3, 20, dtype=torch.float64), solver=solver
        )
        assert far(close.value, wanted) < 1e-5  # float64 is never cast
        radius = spectral_radius(lambda z: z @ weights.mT, torch.zeros(20)).value
    assert abs(float(radius) - float(torch.linalg.eigvals(weights).abs().max())) < 0.02


def test_without_autocast_dtypes_must_agree() -> None:
    with pytest.raises(ArgumentError, match=r"bfloat16.*float32"):
        fixed_point(lambda x: x.float() / 2, torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="float8_e5m2"):
        fixed_point(lambda x: x, torch.zeros(2, dtype=torch.float8_e5m2))
