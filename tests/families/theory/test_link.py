"""Linear links against what is known of them."""

import pytest
import torch

from exptilt import families as f

F64 = torch.float64


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def test_gaussians_of_one_covariance_have_a_linear_link() -> None:
    root = randn(3, 3)
    covariance = root @ root.mT + 0.1 * torch.eye(3)
    found = f.fit_linear_link(f.Gaussian(randn(60, 3, seed=1), covariance))
    torch.testing.assert_close(found.matrix, torch.linalg.inv(covariance))
    torch.testing.assert_close(found.offset, torch.zeros(3, dtype=F64), atol=1e-10, rtol=0)
    assert 1 - found.r_squared < 1e-13
    assert found.asymmetry < 1e-12
    assert found.least_eigenvalue > 0
    assert found.worst_weight_error < 1e-9
    means = randn(4, 3, seed=5)
    torch.testing.assert_close(found(means), means @ torch.linalg.inv(covariance))


@pytest.mark.parametrize("family", [f.Poisson, f.Exponential, f.BernoulliProduct])
def test_other_links_are_not_linear(family: type) -> None:
    eta = {f.Exponential: -randn(200, 2).exp()}.get(family, randn(200, 2))
    found = f.fit_linear_link(family.from_natural(eta))
    mean = family.from_natural(eta).mean_parameter
    design = torch.cat([mean, torch.ones_like(mean[:, :1])], 1)
    fitted = design @ torch.linalg.solve(design.mT @ design, design.mT @ eta)
    off = (eta - fitted).square().sum() / (eta - eta.mean(0)).square().sum()
    assert abs(found.r_squared - float(1 - off)) < 1e-10
    assert 0.1 < found.r_squared < 0.99
    exact, linear = (torch.softmax(score @ mean.mT, -1) for score in (eta, fitted))
    assert abs(found.weight_error - float((exact - linear).abs().sum(-1).mean() / 2)) < 1e-10
    assert 0 < found.weight_error < found.worst_weight_error <= 1
    assert found.least_eigenvalue > 0
    again = f.fit_linear_link((mean, eta))
    torch.testing.assert_close(again.matrix, found.matrix)


def test_a_map_that_is_no_gradient_is_found_out() -> None:
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64)
    mean = randn(40, 2)
    found = f.fit_linear_link((mean, mean @ (turn + 0.5 * torch.eye(2)).mT))
    assert abs(found.asymmetry - 2.0) < 1e-10
    assert abs(found.least_eigenvalue - 0.5) < 1e-10
