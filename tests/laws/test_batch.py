"""Batch axes of every measure: indexing, iterating, reshaping, expanding, stacking."""

import pytest
import torch
from torch.utils import _pytree as pytree

from laws.registry import LAWS, Case, f

every = pytest.mark.parametrize("case", LAWS, ids=lambda case: case.name)


def mean_of(h: f.Measure | f.StudentT) -> torch.Tensor:
    return h.mean() if isinstance(h, f.Measure) else h.event_mean


def same(a: f.Measure, b: f.Measure) -> None:
    """The two have the same batch, mean and covariance."""
    assert type(a) is type(b)
    assert a.batch_shape == b.batch_shape
    torch.testing.assert_close(mean_of(a), mean_of(b), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.covariance(), b.covariance(), rtol=1e-12, atol=1e-12)


@every
def test_an_index_picks_members(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2, 3))
    mean = mean_of(h)
    mask = torch.tensor([True, False, True])
    indices = (
        1,
        (0, 2),
        (..., 1),
        (slice(None), slice(1, None)),
        (..., None),
        (None, 1),
        torch.tensor([1, 0, 1]),
        (slice(None), mask),
        (1, ..., -1),
    )
    for index in indices:
        picked = h[index]
        batch_only = index if isinstance(index, tuple) else (index,)
        wanted = mean[(*batch_only, slice(None))] if ... in batch_only else mean[batch_only]
        assert tuple(picked.batch_shape) == tuple(wanted.shape[:-1])
        torch.testing.assert_close(mean_of(picked), wanted, rtol=1e-12, atol=1e-12)


@every
def test_stacking_undoes_iterating(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2, 3))
    rows = list(h)
    assert len(h) == len(rows) == 2
    assert bool(h)
    same(type(h).stack(rows), h)
    same(type(h).stack([h[:, i] for i in range(3)], dim=-1), h)


@every
def test_reshape_and_expand(case: Case, g: torch.Generator) -> None:
    h = case.make(g, (2, 3))
    flat = h.reshape(-1)
    assert tuple(flat.batch_shape) == (6,)
    same(flat.reshape(2, 3), h)
    same(flat.reshape((2, 3))[1], h[1])
    wide = h.expand(4, -1, 3)
    assert tuple(wide.batch_shape) == (4, 2, 3)
    same(wide[3], h)
    alone = case.make(g)
    same(alone.expand(2, 3)[1, 2], alone)
    same(alone[None].reshape(()), alone)
    same(type(h).stack([alone, alone])[1], alone)


def test_fields_that_are_shared_stay_shared() -> None:
    h = f.Gaussian(torch.zeros(5, 2), torch.eye(2))
    assert h[1:].covariance_matrix.shape == (2, 2)
    assert h.expand(3, 5).covariance_matrix.shape == (3, 5, 2, 2)
    part = f.Gaussian(torch.zeros(5, 2), torch.eye(2).expand(3, 1, 2, 2))[:, 4]
    assert tuple(part.batch_shape) == (3,)


def test_gradients_flow_through_an_index() -> None:
    rate = torch.ones(3, 1, requires_grad=True)
    f.Poisson.stack(list(f.Poisson(rate))[::-1])[0].mean().sum().backward()
    assert rate.grad is not None
    assert rate.grad.flatten().tolist() == [0.0, 0.0, 1.0]


def test_errors_say_what_was_got() -> None:
    h = f.Poisson(torch.ones(3, 2))
    with pytest.raises(
        IndexError, match=r"Poisson with batch \(3,\): cannot be indexed by \(0, 1\).*too many indices"
    ):
        h[0, 1]
    with pytest.raises(IndexError, match=r"Poisson with batch \(3,\).*7.*out of bounds"):
        h[7]
    with pytest.raises(IndexError, match=r"Poisson with batch \(\): cannot be indexed by 0"):
        h[0][0]
    with pytest.raises(TypeError, match="no batch axes, so len"):
        len(h[0])
    with pytest.raises(ValueError, match=r"reshape: shape '\[2, 2\]' is invalid"):
        h.reshape(2, 2)
    with pytest.raises(ValueError, match=r"expand: .*"):
        h.expand(4)
    with pytest.raises(ValueError, match=r"pass sizes such as"):
        h.reshape("3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"in one dtype; got"):
        f.Poisson.stack([h, h.to(torch.float64)])
    densities = [f.FromDensity.quadrature(lambda x: -(x[..., 0] ** 2)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"FromDensity.stack: measures have"):
        f.FromDensity.stack(densities)


def test_a_mixture_keeps_its_components() -> None:
    h = f.Mixture(torch.zeros(4, 2), f.Poisson(torch.tensor([[1.0], [3.0]])))
    assert tuple(h[2].batch_shape) == ()
    torch.testing.assert_close(h[2].mean(), torch.tensor([2.0]))
    assert len(pytree.tree_leaves(h[2])) == 2
