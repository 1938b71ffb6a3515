"""THEORY A14 in float64, for every measure."""

import pytest
import torch

from laws.registry import CASES, Case

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every
def test_keys_as_expected_statistics(case: Case, g: torch.Generator) -> None:
    """A14: <q, ∇G(η_j)> = G(q) + G*(k_j) − KL(p_j ‖ p_q), and its dual over natural parameters."""
    h = case.make(g)
    eta = torch.stack([case.tilt(h, g) for _ in range(4)])
    query = case.tilt(h, g) * 0.5
    keys = h.mean(eta)
    divergence = h.bregman(query, eta)  # KL(p_j ‖ p_q)
    close(keys @ query, h.log_normalizer(query) + h.conjugate(keys) - divergence, 1e-7)
    mean, back = h.mean(query), h.bregman(eta, query)  # KL(p_q ‖ p_j)
    close(eta @ mean, h.log_normalizer(eta) + h.conjugate(mean) - back, 1e-7)
