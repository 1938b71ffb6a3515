"""Inverses of many small matrices: against torch, matrix by matrix, and where a matrix has none."""

import pytest
import torch

from exptilt import families as f
from exptilt._support.linalg import indefiniteness
from exptilt.families.numerics import small_inverse

F64 = torch.float64


def spread(count: int, size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(size)
    root = torch.randn(count, size, size, dtype=F64, generator=g)
    scale = 10 ** (4 * torch.rand(count, size, dtype=F64, generator=g) - 2)
    return (root @ root.mT + 0.1 * torch.eye(size, dtype=F64)) * scale[..., None] * scale[..., None, :]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_against_torch(size: int) -> None:
    matrix = spread(20000, size).reshape(4, 5000, size, size)
    assert small_inverse._many(matrix)
    found = small_inverse.invert(matrix)
    assert torch.equal(found, found.mT)
    scale = matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    product = (found @ matrix) * (scale[..., None] / scale[..., None, :])
    eye = torch.eye(size, dtype=F64).expand_as(matrix)
    torch.testing.assert_close(product, eye, rtol=0, atol=1e-9)
    torch.testing.assert_close(small_inverse.definite(matrix), indefiniteness(matrix), rtol=1e-9, atol=0)
    single = small_inverse.invert(matrix.float())
    assert single.dtype == torch.float32


def test_a_matrix_without_inverse_spoils_no_other() -> None:
    matrix = spread(20000, 2)
    matrix[3] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    matrix[4, 0, 0] = torch.nan
    found = small_inverse.invert(matrix)
    assert found.isnan().all((-1, -2)).nonzero().squeeze(-1).tolist() == [3, 4]
    excess = small_inverse.definite(matrix)
    assert (excess >= 0).nonzero().squeeze(-1).tolist()[0] == 3
    torch.testing.assert_close(float(excess[3]), 1.0)


def test_derivatives_come_from_torch() -> None:
    matrix = spread(20000, 2).requires_grad_()
    (slope,) = torch.autograd.grad(small_inverse.invert(matrix).diagonal(dim1=-2, dim2=-1).sum(), matrix)
    inverse = small_inverse.invert(matrix.detach())
    torch.testing.assert_close((slope + slope.mT) / 2, -inverse @ inverse, rtol=1e-7, atol=1e-7)


def test_round_trip_of_many_gaussians() -> None:
    """With what is wrong told as for few: one covariance that is none, one on the boundary."""
    mean = f.Gaussian(torch.zeros(20000, 3, dtype=F64), spread(20000, 3)).mean_parameter
    member = f.Gaussian.from_mean(mean).value
    again = f.Gaussian.from_natural(member.natural_parameter)
    torch.testing.assert_close(again.mean_parameter, mean, rtol=1e-7, atol=1e-9)
    mean[7, 3] = -1.0
    few, many = f.Gaussian.from_mean(mean[5:9]), f.Gaussian.from_mean(mean)
    assert torch.equal(many.code[5:9], few.code)
    assert int((many.code != few.code[0]).sum()) == 1
    torch.testing.assert_close(many.distance[5:9], few.distance)
