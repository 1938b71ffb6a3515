"""Many Gaussians at once."""

import torch

from exptilt import families as f
from exptilt.families.members import gaussian

F64 = torch.float64


def spread(count: int, size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(size)
    root = torch.randn(count, size, size, dtype=F64, generator=g)
    scale = 10 ** (4 * torch.rand(count, size, dtype=F64, generator=g) - 2)
    return (root @ root.mT + 0.1 * torch.eye(size, dtype=F64)) * scale[..., None] * scale[..., None, :]


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


def test_a_matrix_without_inverse_spoils_no_other() -> None:
    matrix = spread(2000, 2)
    matrix[3] = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    matrix[4, 0, 0] = torch.nan
    found = gaussian._inverse(matrix)
    assert found.isnan().all((-1, -2)).nonzero().squeeze(-1).tolist() == [3, 4]
