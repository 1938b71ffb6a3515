"""SwitchingFamily: against the enumeration of all mode paths, conjugate updates, and the Gaussian model."""

import itertools

import numpy as np
import pytest
import torch

from exptilt import families as f
from exptilt._support.errors import ArgumentError
from exptilt.switching import SwitchingFamily, SwitchingLinearGaussian, discounted, pushed

F64 = torch.float64
TRANSITION = torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=F64)
START = torch.tensor([0.3, 0.7], dtype=F64)


def one(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def cases() -> dict[str, tuple]:
    """Prior, likelihood, two laws of rest and observations, for each pair."""
    eye = torch.eye(2, dtype=F64)
    counts = torch.tensor([[1.0], [0.0], [7.0], [6.0], [2.0]], dtype=F64)
    flags = torch.tensor([[1.0], [1.0], [0.0], [1.0], [0.0]], dtype=F64)
    return {
        "Gamma–Poisson": (f.Gamma(one(2), one(1)), f.Poisson, f.Gamma(one(6), one(1)), counts),
        "Gamma–Exponential": (f.Gamma(one(2), one(1)), f.Exponential, f.Gamma(one(6), one(1)), counts + 0.1),
        "Beta–Bernoulli": (f.Beta(one(2), one(3)), f.BernoulliProduct, f.Beta(one(5), one(1)), flags),
        "Dirichlet–multinomial": (
            f.Dirichlet(one(2, 1, 1)),
            f.Multinomial(one(0, 0, 0), torch.tensor(4.0, dtype=F64)),
            f.Dirichlet(one(1, 1, 9)),
            torch.tensor([[3.0, 1, 0], [2, 1, 1], [0, 0, 4], [1, 0, 3], [0, 1, 3]], dtype=F64),
        ),
        "normal–gamma": (
            f.NormalGamma(one(0), one(1), one(2), one(2)),
            f.DiagonalGaussian,
            f.NormalGamma(one(4), one(2), one(3), one(1)),
            counts,
        ),
        "normal–inverse-Wishart": (
            f.NormalInverseWishart(
                one(0, 0), torch.tensor(1.0, dtype=F64), torch.tensor(4.0, dtype=F64), eye
            ),
            f.Gaussian,
            f.NormalInverseWishart(
                one(3, 1), torch.tensor(2.0, dtype=F64), torch.tensor(5.0, dtype=F64), 2 * eye
            ),
            torch.cat([counts, counts.flip(0)], 1),
        ),
    }


def model_of(name: str) -> tuple[SwitchingFamily, torch.Tensor]:
    prior, likelihood, rest, y = cases()[name]
    dynamics = [discounted(0.9, prior), discounted(0.4, rest)]
    return SwitchingFamily(TRANSITION, prior, likelihood, dynamics, START), y


def by_paths(model: SwitchingFamily, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log of the marginal likelihood and the last mode's law, from all mode paths."""
    logs = {}
    for path in itertools.product(range(2), repeat=len(y) + 1):
        belief, log_p = model.prior, START[path[0]].log()
        for before, mode, row in zip(path, path[1:], y, strict=False):
            belief = model.dynamics[mode](belief)
            log_p = (
                log_p
                + TRANSITION[before, mode].log()
                + f.log_marginal_likelihood(belief, model.likelihood, row[None])
            )
            belief = f.posterior(belief, model.likelihood, row[None])
        logs[path] = log_p
    ends = [
        torch.logsumexp(torch.stack([x for path, x in logs.items() if path[-1] == m]), 0) for m in range(2)
    ]
    return torch.logsumexp(torch.stack(ends), 0), torch.softmax(torch.stack(ends), 0)


@pytest.mark.parametrize("name", cases())
def test_against_all_mode_paths(name: str) -> None:
    model, y = model_of(name)
    for length, tolerance in (
        (1, 1e-10),
        (3, 0.15),
    ):  # nothing is merged before the first observation but equals
        exact, last = by_paths(model, y[:length])
        found = {method: model.filter(y[:length], method=method) for method in ("gpb2", "imm", "gpb1")}
        for post in found.values():
            assert abs(float(post.log_likelihood - exact)) < tolerance * max(1.0, abs(float(exact)))
            assert float((post.mode_probability[-1] - last).abs().max()) < max(tolerance, 1e-8)
    two, _ = by_paths(model, y[:2])
    got = model.filter(y[:2]).log_likelihood
    assert abs(float(got - two)) < 1e-8  # of two observations GPB2 merges only what came from one belief


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_one_mode_is_the_conjugate_update(name: str, method: str) -> None:
    prior, likelihood, _, y = cases()[name]
    model = SwitchingFamily(torch.ones(1, 1, dtype=F64), prior, likelihood, [discounted(1.0, prior)])
    post = model.filter(y, method=method)
    wanted = f.posterior(prior, likelihood, y)
    torch.testing.assert_close(
        post.belief[-1, 0].natural_parameter, wanted.natural_parameter, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        post.log_likelihood, f.log_marginal_likelihood(prior, likelihood, y), rtol=1e-7, atol=1e-7
    )


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_gaussians_give_the_numbers_of_the_linear_model(method: str) -> None:
    g = np.random.default_rng(0)
    W, Q = 0.8 * g.standard_normal((2, 2, 2)), np.stack([0.3 * np.eye(2), 2.0 * np.eye(2)])
    y = g.standard_normal((12, 2)).cumsum(0)
    y[4] = np.nan
    linear = SwitchingLinearGaussian(
        transition=TRANSITION.numpy(),
        dynamics=W,
        process_noise=Q,
        observation=np.eye(2),
        observation_noise=0.5 * np.eye(2),
        initial_mean=np.zeros(2),
        initial_covariance=np.eye(2),
        initial_probability=START.numpy(),
    )
    family = SwitchingFamily(
        TRANSITION,
        f.Gaussian(one(0, 0), torch.eye(2, dtype=F64)),
        f.Gaussian(one(0, 0), 0.5 * torch.eye(2, dtype=F64)),
        [pushed(*map(torch.from_numpy, pair)) for pair in zip(W, Q, strict=True)],
        START,
    )
    wanted, found = linear.filter(y, method=method), family.filter(torch.from_numpy(y), method=method)
    np.testing.assert_allclose(found.log_likelihood_terms, wanted.log_likelihood_terms, atol=1e-8)
    np.testing.assert_allclose(found.mode_probability, wanted.mode_probability, atol=1e-8)
    np.testing.assert_allclose(found.state.event_mean, wanted.mean, atol=1e-7)


def test_forecasts_are_intervals_of_counts() -> None:
    model, y = model_of("Gamma–Poisson")
    post = model.filter(y)
    g = torch.Generator().manual_seed(0)
    ends = model.forecast(post, 3, levels=(0.5, 0.9), generator=g)
    assert ends.shape == (3, 2, 2, 1)
    assert torch.equal(ends, ends.round())
    assert (ends[:, 1, 0] <= ends[:, 0, 0]).all()
    assert (ends[:, 1, 1] >= ends[:, 0, 1]).all()
    law, weight = [], (post.mode_probability[-1] @ TRANSITION)
    for j in range(2):
        shares = post.mode_probability[-1] * TRANSITION[:, j]
        merged = f.project(f.Mixture(shares.log(), post.belief[-1]), f.Gamma)
        law.append(f.predictive(model.dynamics[j](merged), f.Poisson))
    counts = torch.arange(200, dtype=F64)[:, None]
    table = sum(w * p.log_prob(counts).exp() for w, p in zip(weight, law, strict=True)).cumsum(0)
    for level, (low, high) in zip((0.5, 0.9), ends[0].squeeze(-1), strict=True):
        assert abs(int((table < (1 - level) / 2).sum()) - int(low)) <= 1
        assert abs(int((table < (1 + level) / 2).sum()) - int(high)) <= 1


def test_a_mode_that_cannot_be_reached() -> None:
    prior = f.Gamma(one(2), one(1))
    still = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=F64)
    for method in ("gpb2", "imm", "gpb1"):
        model = SwitchingFamily(still, prior, f.Poisson, [discounted(0.9, prior)] * 2, one(1, 0))
        post = model.filter(one(3, 4, 2)[:, None], method=method)
        assert post.mode_probability[-1].tolist() == [1.0, 0.0]
        assert post.belief.natural_parameter.isfinite().all()


GAMMA = f.Gamma(torch.ones(1), torch.ones(1))
MODEL = SwitchingFamily(torch.ones(1, 1), GAMMA, f.Poisson, [discounted(0.9, GAMMA)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: discounted(0.0, GAMMA), "discount is 0.0"),
        (lambda: discounted(1.5, GAMMA), "discount is 1.5"),
        (lambda: discounted(0.5, "rest"), "one member"),
        (lambda: discounted(0.5, GAMMA)(f.Beta(torch.ones(1), torch.ones(1))), "same family"),
        (lambda: pushed(torch.eye(1), torch.eye(1))(GAMMA), "Only Gaussians"),
        (
            lambda: SwitchingFamily(torch.ones(1, 1), GAMMA, f.BernoulliProduct, [discounted(1, GAMMA)]),
            "not conjugate",
        ),
        (
            lambda: SwitchingFamily(torch.ones(2, 2), GAMMA, f.Poisson, [discounted(1, GAMMA)]),
            "transition must be",
        ),
        (
            lambda: SwitchingFamily(torch.full((1, 1), 0.5), GAMMA, f.Poisson, [discounted(1, GAMMA)]),
            "sum to 1",
        ),
        (lambda: SwitchingFamily(torch.ones(1, 1), GAMMA, f.Poisson, [3]), "map of beliefs"),
        (lambda: MODEL.filter(torch.tensor([[1.0], [-2.0]])), "step 1"),
        (lambda: MODEL.filter(torch.tensor([1.0, 2.0])), "floating-point tensor"),
        (lambda: MODEL.filter(torch.tensor([[1.0]]), method="gpb3"), "method is 'gpb3'"),
        (lambda: MODEL.forecast(MODEL.filter(torch.tensor([[1.0]])), 1, levels=(1.0,)), "levels is 1.0"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
