"""THEORY A13 and A14 in float64, for every measure that they hold for."""

import math

import mpmath as mp
import pytest
import torch

from laws.registry import CASES, F64, Case, f, rand, randn, t

every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_sum_of_exponentials_is_a_maximum_over_masses(g: torch.Generator) -> None:
    """A13: Σ h e^s = max_m <s, m> − D(m ‖ h) + Σ h at m = h e^s, as log Σ h e^s is over probabilities."""
    h, s = rand(g, 50, 6, low=0.1, high=2), randn(g, 50, 6)

    def value(m: torch.Tensor) -> torch.Tensor:
        return (s * m).sum(-1) - f.unnormalized_kl(m, h) + h.sum(-1)

    best = h * s.exp()
    close(value(best), best.sum(-1))
    for _ in range(20):
        assert bool((value(best * rand(g, 50, 6, low=0, high=3)) < best.sum(-1)).all())
    share = best / best.sum(-1, keepdim=True)
    kl = f.unnormalized_kl(share, h) + 1 - h.sum(-1)
    close((s * share).sum(-1) - kl, torch.logsumexp(s + h.log(), -1))


@every
def test_bregman_of_the_mass(case: Case, g: torch.Generator) -> None:
    """A13: B_M(a, b) by its definition, and for points as the unnormalised KL of the tilted masses."""
    h = case.make(g, (3,))
    a, b = case.tilt(h, g), case.tilt(h, g) * 0.3
    mass = f.exponential_sum(h, b)
    definition = f.exponential_sum(h, a) - mass - mass * (h.mean(b) * (a - b)).sum(-1)
    got = f.exponential_bregman(h, a, b)
    close(got, definition, 1e-7)
    assert bool((got > 0).all())
    if isinstance(h, f.Empirical):
        tilted = [(h.log_weight + (h.points @ eta.unsqueeze(-1)).squeeze(-1)).exp() for eta in (b, a)]
        close(got, f.unnormalized_kl(*tilted), 1e-9)


def test_least_loss_of_adaboost(g: torch.Generator) -> None:
    """A13: Σh − min_η M(η) is the least D(m ‖ h) of masses under which the features have mean 0."""
    h = f.Empirical(randn(g, 12, 2), randn(g, 12))
    eta = h.natural(torch.zeros(2, dtype=F64)).or_raise()  # ∇M = M ∇G, so both are least at the same tilt
    weight = h.log_weight.exp()
    best = weight * (h.points @ eta).exp()
    close(best @ h.points, torch.zeros(2, dtype=F64), 1e-7)
    least = f.unnormalized_kl(best, weight)
    close(weight.sum() - f.exponential_sum(h, eta), least)
    basis = torch.linalg.svd(h.points.T).Vh[2:]  # masses that change no mean
    for _ in range(20):
        other = best + 0.3 * best.min() * torch.nn.functional.normalize(randn(g, 10), dim=0) @ basis
        assert bool((other > 0).all())
        assert float(f.unnormalized_kl(other, weight)) > float(least)


def test_unnormalized_kl_at_its_edges() -> None:
    assert f.unnormalized_kl(t(0.0, 1.0), t(3.0, 1.0)) == 3.0
    assert f.unnormalized_kl(t(1.0, 1.0), t(0.0, 1.0)) == math.inf
    with mp.workdps(50):
        p, q = mp.mpf(1e8), mp.mpf(1e8 + 8)
        exact = float(p * mp.log(p / q) - p + q)
    assert float(f.unnormalized_kl(t(1e8), t(1e8 + 8))) == pytest.approx(exact, rel=1e-12)
    inner = t(0.0, 1.0, 2.0).requires_grad_()
    f.unnormalized_kl(inner, t(1.0, 0.5, 2.0)).backward()
    assert inner.grad is not None
    assert bool(inner.grad.isfinite().all())
    with pytest.raises(ValueError, match=r"p\[0\] must be at least 0; got -1.0"):
        f.unnormalized_kl(t(-1.0), t(1.0))
    with pytest.raises(ValueError, match=r"q must be a floating-point tensor; got list"):
        f.unnormalized_kl(t(1.0), [1.0])  # type: ignore[arg-type]


@every
def test_keys_as_expected_statistics(case: Case, g: torch.Generator) -> None:
    """A14: <q, ∇G(η_j)> = G(q) + G*(k_j) − KL(p_j ‖ p_q), and its dual over natural parameters."""
    h = case.make(g)
    eta = torch.stack([case.tilt(h, g) for _ in range(4)])
    query = case.tilt(h, g) * 0.5
    keys = f.measure_of_members(h, eta)
    close(keys.points, h.mean(eta))
    divergence = h.bregman(query, eta)  # KL(p_j ‖ p_q)
    score = keys.points @ query
    close(score, h.log_normalizer(query) + h.conjugate(keys.points) - divergence, 1e-7)
    near = f.measure_of_members(h, eta, by_divergence=True).tilt(query)
    close(near.log_probability, torch.log_softmax(-divergence, -1), 1e-7)
    states = f.measure_of_members(h, eta, over="natural", by_divergence=True)
    back = h.bregman(eta, query)  # KL(p_q ‖ p_j)
    close(states.tilt(h.mean(query)).log_probability, torch.log_softmax(-back, -1), 1e-7)


def test_states_of_a_batch_of_measures(g: torch.Generator) -> None:
    h = f.Poisson(rand(g, 3, 2, low=1, high=2))
    eta = randn(g, 3, 5, 2)
    for over in ("mean", "natural"):
        whole = f.measure_of_members(h, eta, over=over, by_divergence=True)
        alone = f.stack([f.measure_of_members(h[i], eta[i], over=over, by_divergence=True) for i in range(3)])
        close(whole.points, alone.points)
        close(whole.log_weight, alone.log_weight)
    with pytest.raises(ValueError, match=r"over is 'both'. Pass one of 'mean', 'natural'"):
        f.measure_of_members(h, eta, over="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"eta has shape \(2,\). Pass \(..., N, 2\)"):
        f.measure_of_members(h, eta[0, 0])
