"""The forward Laplacian of networks: batches, chunks, transforms, derivatives by weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import exptilt as xt
from exptilt._support.errors import ArgumentError

F64 = torch.float64


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    network = nn.Sequential(nn.Linear(3, 8), encoder, nn.Linear(8, 1)).to(F64).eval()
    return lambda x: network(x).square().sum((-2, -1))


def draw(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def trace(function, x):
    with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's with a second derivative
        return torch.func.hessian(function)(x).reshape(x.numel(), x.numel()).trace()


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_a_batch_is_as_good_as_its_samples(model, chunk_size):
    x = draw(3, 5, 3)
    found = xt.laplacian(model, x, batch_dims=1, chunk_size=chunk_size)
    for at, sample in enumerate(x):
        one = lambda y: model(y[None])[0]  # noqa: E731
        assert abs(found.laplacian[at] - trace(one, sample)) < 1e-10
        torch.testing.assert_close(found.gradient[at], torch.func.grad(one)(sample))
    torch.testing.assert_close(found.value, model(x))


def test_under_vmap(model):
    x = draw(3, 5, 3)
    found = torch.func.vmap(lambda y: xt.laplacian(lambda z: model(z[None])[0], y).laplacian)(x)
    torch.testing.assert_close(found, xt.laplacian(model, x, batch_dims=1).laplacian)


def test_derivatives_by_weights_and_by_x():
    x, w = draw(4, 3), draw(3, 5)

    def energy(w, x):
        def function(x):
            h = x @ w
            o = F.scaled_dot_product_attention(h[None], h[None].sin(), h[None].cos())[0]
            return F.layer_norm(o, (5,)).tanh().square().sum() + torch.linalg.slogdet(h[:3, :3])[1]

        return xt.laplacian(function, x).laplacian

    torch.autograd.gradcheck(energy, (w.requires_grad_(), x.requires_grad_()))


def test_float32_keeps_its_dtype(model):
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    found = xt.laplacian(network, draw(6, 3, dtype=torch.float32), batch_dims=1)
    assert [x.dtype for x in found] == [torch.float32] * 3
    assert [x.shape for x in found] == [(6, 1), (6, 1, 3), (6, 1)]


def test_harmonic_functions_and_a_hydrogen_atom():
    x = draw(3)
    assert abs(xt.laplacian(lambda x: 1 / x.norm(), x).laplacian) < 1e-10
    atom = xt.laplacian(lambda x: -x.norm(), x)  # log ψ of the ground state; its energy is −1/2
    energy = -0.5 * (atom.laplacian + atom.gradient.square().sum()) - 1 / x.norm()
    assert abs(energy + 0.5) < 1e-12


def test_a_classifier_of_this_package():
    x, weight, target = draw(5, 3), draw(7, 3), torch.arange(5)
    loss = lambda x: xt.losses.linear_cross_entropy(x, weight, target)  # noqa: E731
    plain = lambda x: F.cross_entropy(x @ weight.mT, target)  # noqa: E731
    assert abs(xt.laplacian(loss, x).laplacian - trace(plain, x)) < 1e-10


def test_a_laplacian_of_a_laplacian_is_refused():
    with pytest.raises(ArgumentError, match="within"):
        xt.laplacian(lambda x: xt.laplacian(lambda y: y.sum(), x).value, draw(3))
