"""Each renormaliser gives what it promises, is the nearest way there, and says what it cannot do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exptilt._support.errors import ArgumentError
from exptilt.dynamics import RMS, Batch, Layer, Sphere, Whiten
from oracles import dynamics as oracle

F64 = torch.float64
EVERY = [Layer(), RMS(), Sphere(), Batch(), Whiten()]
NAMES = {"Layer": "layer", "RMS": "rms", "Sphere": "sphere", "Batch": "batch", "Whiten": "whiten"}


def cloud(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def spread(x):
    """Covariance of a batch of clouds."""
    centred = x - x.mean(-2, keepdim=True)
    return centred.mT @ centred / x.shape[-2]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(6, 12),
    st.integers(2, 5),
    st.sampled_from([1e-150, 1e-3, 1.0, 1e5, 1e150]),
)
def test_against_the_obvious(seed, count, dimension, scale):
    x = cloud(2, count, dimension, seed=seed)
    for renormalize in EVERY:
        found = renormalize(scale * x)
        wanted = torch.stack([oracle.RENORMALIZERS[NAMES[type(renormalize).__name__]](y) for y in x])
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(renormalize(found), found, rtol=1e-10, atol=1e-10)  # idempotent


def test_epsilon_is_that_of_torch():
    x = cloud(4, 5)
    torch.testing.assert_close(Layer(1e-2)(x), torch.nn.functional.layer_norm(x, (5,), eps=1e-2))
    torch.testing.assert_close(RMS(1e-2)(x), torch.nn.functional.rms_norm(x, (5,), eps=1e-2))
    torch.testing.assert_close(
        Batch(1e-2)(x), torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-2)
    )
    assert torch.equal(Layer(1e-2)(torch.ones(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("renormalize", [Layer(), RMS(), Sphere(2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_extreme_points_against_double_precision(renormalize, dtype):
    """Tiny, large and mixed lengths, and points far from 0, which lose as many digits as they are far."""
    tiny, large = (1e-30, 1e30) if dtype == torch.float32 else (1e-250, 1e250)
    for x, far in (
        (cloud(40, 7), 1),
        (cloud(40, 7) + 1e3, 1e3),
        (tiny * cloud(40, 7), 1),
        (large * cloud(40, 7), 1),
        (torch.cat([cloud(9, 7), tiny * cloud(9, 7)]), 1),
    ):
        x = x.to(dtype)
        unit = x.double() / x.double().abs().amax(-1, keepdim=True)
        wanted = getattr(renormalize, "radius", 1.0) * oracle.RENORMALIZERS[
            NAMES[type(renormalize).__name__]
        ](unit)
        limit = 32 * far * torch.finfo(dtype).eps
        torch.testing.assert_close(renormalize(x).double(), wanted, rtol=limit, atol=limit)


def test_whitening_at_any_scale_in_single_precision():
    x = cloud(20, 3).float()
    for scale in (1e-25, 1e25):
        torch.testing.assert_close(Whiten()(scale * x), Whiten()(x), rtol=1e-4, atol=1e-4)


def test_radius():
    torch.testing.assert_close(Sphere(2.5)(cloud(3, 4)).norm(dim=-1), torch.full((3,), 2.5, dtype=F64))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_whitening_hits_its_target(seed, dimension, batched):
    a, m, x = (
        cloud(dimension, dimension, seed=seed),
        cloud(dimension, seed=seed + 1),
        cloud(2, 12, dimension, seed=seed + 2),
    )
    S = a @ a.mT + 0.1 * torch.eye(dimension, dtype=F64)
    if batched:
        S, m = torch.stack([S, 2 * S]), torch.stack([m, -m])
    y = Whiten(m, S)(3 * x + 5)
    torch.testing.assert_close(spread(y), S.expand(2, dimension, dimension), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(y.mean(-2), m.expand(2, dimension), rtol=1e-8, atol=1e-8)


def test_whitening_moves_points_least():
    """Any other root of the covariance (turned by an orthogonal matrix) is farther from where the points
    were.
    """
    x = cloud(40, 3) @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.2, 0.3], [0.0, 0.0, 0.8]], dtype=F64)
    x = x - x.mean(0)
    S = torch.tensor([[1.5, 0.4, 0.0], [0.4, 1.0, 0.2], [0.0, 0.2, 0.7]], dtype=F64)
    y = Whiten(covariance=S)(x)
    root = torch.linalg.cholesky(S)
    for seed in range(20):
        turn = torch.linalg.qr(torch.eye(3, dtype=F64) + 0.3 * cloud(3, 3, seed=seed))[0]
        other = y @ torch.linalg.inv(root).mT @ turn @ root.mT
        torch.testing.assert_close(spread(other), S)
        assert (other - x).norm() >= (y - x).norm() - 1e-12


def test_derivatives_where_eigenvalues_coincide():
    """At a white cloud all eigenvalues are 1, where eigenvectors have no derivative."""
    x = Whiten()(cloud(5, 2)).requires_grad_()
    assert torch.autograd.gradcheck(Whiten(), (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(Whiten(), (x,), fast_mode=True)


def test_zero_vectors():
    x = cloud(2, 4, 3)
    x[1, 2] = 0
    for renormalize in (Sphere(), RMS()):
        with pytest.raises(ArgumentError, match=r"the point at index \(1, 2\) is zero and has no direction"):
            renormalize(x)
    x[1, 2] = 0.1  # three times 0.1 over three is not 0.1: equal but for rounding
    with pytest.raises(ArgumentError, match=r"all coordinates of the point at index \(1, 2\) are equal"):
        Layer()(x)
    x[0, :, 1] = 0.7
    with pytest.raises(ArgumentError, match=r"all points agree in the coordinate at index \(0, 1\)"):
        Batch()(x)


@pytest.mark.parametrize(("count", "dimension"), [(3, 4), (4, 4), (1, 2)])
def test_a_flat_cloud_cannot_be_white(count, dimension):
    x = cloud(count, dimension)
    with pytest.raises(
        ArgumentError, match=f"{count} points in {dimension} dimensions span only {count - 1}"
    ):
        Whiten()(x)


def test_a_flat_cloud_in_a_batch_is_named():
    batch = torch.stack([cloud(9, 2), torch.ones(9, 2, dtype=F64) * cloud(9, 1)])
    with pytest.raises(ArgumentError, match=r"at batch index \(1,\)"):
        Whiten()(batch)
