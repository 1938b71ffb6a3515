"""SwitchingFamily: against the enumeration of all mode paths, conjugate updates, and the Gaussian model.

Discounted beliefs go through a compiled pass; a model whose transition
wants a gradient goes step by step. Both are asked for the same numbers.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from exptilt import families as f
from exptilt._support.errors import ArgumentError
from exptilt.switching import (
    DiscountedDynamics,
    FitStatus,
    LinearDynamics,
    SwitchingFamily,
    SwitchingLinearGaussian,
)
from exptilt.switching.families.learning import Chosen

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
        "Wishart–Gaussian": (
            f.Wishart(torch.tensor(4.0, dtype=F64), eye),
            f.Gaussian,
            f.Wishart(torch.tensor(5.0, dtype=F64), 0.1 * eye + 0.05),
            torch.cat([counts, counts.flip(0)], 1),
        ),
        "Gaussian–Gaussian": (
            f.Gaussian(one(0, 1), eye + 0.5),
            f.Gaussian(one(0, 0), 2 * eye - 0.5),
            f.Gaussian(one(5, 3), 3 * eye),
            torch.cat([counts, counts.flip(0)], 1) + 100,
        ),
    }


def model_of(name: str) -> tuple[SwitchingFamily, torch.Tensor]:
    prior, likelihood, rest, y = cases()[name]
    dynamics = [DiscountedDynamics(0.9, prior), DiscountedDynamics(0.4, rest)]
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
    model = SwitchingFamily(torch.ones(1, 1, dtype=F64), prior, likelihood, [DiscountedDynamics(1.0, prior)])
    post = model.filter(y, method=method)
    wanted = f.posterior(prior, likelihood, y)
    torch.testing.assert_close(
        post.belief[-1, 0].natural_parameter, wanted.natural_parameter, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(
        post.log_likelihood, f.log_marginal_likelihood(prior, likelihood, y), rtol=1e-7, atol=1e-7
    )


def step_by_step(model: SwitchingFamily) -> SwitchingFamily:
    """The same model on the path that keeps derivatives."""
    transition = model.transition.clone().requires_grad_()
    return SwitchingFamily(transition, model.prior, model.likelihood, model.dynamics, START)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize(
    "method", ["gpb2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("imm", "gpb1"))]
)
def test_the_compiled_pass_and_batches(name: str, method: str) -> None:
    model, y = model_of(name)
    y = torch.cat([y, y.flip(0)])
    y[3] = torch.nan
    both = torch.stack([y, y.flip(0)])
    found, wanted = (m.filter(both, method=method) for m in (model, step_by_step(model)))
    torch.testing.assert_close(
        found.log_likelihood_terms, wanted.log_likelihood_terms.detach(), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(found.mode_probability, wanted.mode_probability.detach(), rtol=1e-9, atol=1e-9)
    for got, right in zip(vars(found.belief).values(), vars(wanted.belief).values(), strict=True):
        torch.testing.assert_close(got, right.detach(), rtol=1e-7, atol=1e-9)
    alone = model.filter(y.flip(0), method=method)
    assert torch.equal(found.mode_probability[1], alone.mode_probability)
    assert torch.equal(found.log_likelihood[1], alone.log_likelihood)


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_pushed_gammas_are_compiled(method: str) -> None:
    maps = [([0.9, 0.0], [0.0, 0.5]), ([0.5, 0.6], [0.1, 1.2])]
    moves = [LinearDynamics(one(*W), torch.diag(one(0.1, 2.0))) for W in maps]
    model = SwitchingFamily(TRANSITION, f.Gamma(one(2, 6), one(1, 2)), f.Poisson, moves, START)
    y = torch.tensor([[1.0, 4], [0, 2], [torch.nan, torch.nan], [9, 6], [2, 0]], dtype=F64)
    found, wanted = (m.filter(y, method=method) for m in (model, step_by_step(model)))
    torch.testing.assert_close(found.log_likelihood_terms, wanted.log_likelihood_terms.detach())
    torch.testing.assert_close(found.belief.shape, wanted.belief.shape.detach())
    torch.testing.assert_close(found.belief.rate, wanted.belief.rate.detach())


@pytest.mark.parametrize("method", ["gpb2", pytest.param("imm", marks=pytest.mark.slow)])
def test_concentrations_of_very_different_sizes(method: str) -> None:
    """Newton's method for merged Dirichlets does not settle there, and another one takes over."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        rests = [f.Dirichlet(torch.from_numpy(10 ** rng.uniform(-5, 4, 3))) for _ in range(2)]
        law = f.Multinomial(one(0, 0, 0), torch.tensor(12.0, dtype=F64))
        moves = [DiscountedDynamics(0.5, rest) for rest in rests]
        model = SwitchingFamily(TRANSITION, rests[0], law, moves, START)
        y = torch.from_numpy(rng.multinomial(12, rng.dirichlet(np.ones(3)), 6).astype(float))
        found, wanted = (m.filter(y, method=method) for m in (model, step_by_step(model)))
        terms = wanted.log_likelihood_terms.detach()
        torch.testing.assert_close(found.log_likelihood_terms, terms, rtol=1e-8, atol=1e-8)
        reached = wanted.belief.mean_parameter.detach()
        torch.testing.assert_close(found.belief.mean_parameter, reached, rtol=1e-6, atol=1e-8)


def test_the_likelihood_has_a_gradient() -> None:
    model, y = model_of("Gamma–Poisson")
    free = step_by_step(model)
    free.filter(y).log_likelihood.backward()
    h, step = 1e-6, torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=F64)
    ends = [
        SwitchingFamily(TRANSITION + s * h * step, model.prior, f.Poisson, model.dynamics, START).filter(y)
        for s in (1, -1)
    ]
    slope = (ends[0].log_likelihood - ends[1].log_likelihood) / (2 * h)
    assert float((free.transition.grad * step).sum()) == pytest.approx(float(slope), rel=1e-5)


def smoothed_by_paths(model: SwitchingFamily, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mode probabilities, pairs, E[u] of the state and the likeliest path given all of y, from all paths."""
    T, logs, means = len(y), [], []
    paths = torch.tensor(list(itertools.product(range(2), repeat=T + 1)))
    seen = ~y.isnan().any(-1, keepdim=True)
    evidence = model._evidence(y.nan_to_num(1.0)) * seen
    for path in paths.tolist():
        belief, log_p, theta = model.prior, START[path[0]].log(), []
        for t, (before, mode) in enumerate(itertools.pairwise(path)):
            belief = model.dynamics[mode](belief)
            log_p = log_p + TRANSITION[before, mode].log()
            if seen[t]:
                log_p = log_p + f.log_marginal_likelihood(belief, model.likelihood, y[t : t + 1])
                belief = f.posterior(belief, model.likelihood, y[t : t + 1])
            theta.append(belief.natural_parameter)
        later = torch.zeros_like(theta[-1])
        for t in reversed(range(T)):
            theta[t] = theta[t] + later
            later = model.dynamics[path[t + 1]].discount * (evidence[t] + later)
        logs.append(log_p)
        means.append(type(model.prior).from_natural(torch.stack(theta)).mean_parameter)
    weight = torch.softmax(torch.stack(logs), 0)
    at = torch.nn.functional.one_hot(paths, 2).to(F64)  # (paths, T + 1, M)
    pairs = torch.einsum("p,pti,ptj->tij", weight, at[:, :-1], at[:, 1:])
    mean = torch.einsum("p,ptk->tk", weight, torch.stack(means))
    return pairs.sum(-2), pairs, mean, paths[weight.argmax(), 1:]


@pytest.mark.parametrize("name", cases())
def test_smoothing_against_all_mode_paths(name: str) -> None:
    model, y = model_of(name)
    y = y.clone()
    y[3] = torch.nan
    modes, pairs, mean, path = smoothed_by_paths(model, y)
    size = mean.abs().mean(0)

    def error(found: torch.Tensor) -> float:
        return float(((found - mean) / size).abs().max())

    kept = model.smooth(y, lag=4)  # nothing is merged before the last step
    torch.testing.assert_close(kept.mode_probability, modes, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kept.pair_probability, pairs, rtol=1e-9, atol=1e-9)
    averages = (kept.mode_probability.unsqueeze(-1) * kept.belief.mean_parameter).sum(-2)
    filtered = model.filter(y)
    before = (filtered.mode_probability.unsqueeze(-1) * filtered.belief.mean_parameter).sum(-2)
    assert error(averages) < 0.15 < error(before)  # later modes are averaged, states are not known before
    near = model.smooth(y)
    assert float((near.mode_probability - modes).abs().max()) < 0.25
    assert int((model.most_likely_path(y) != path).sum()) <= 1
    two = model.smooth(torch.stack([y, y.flip(0)]))
    torch.testing.assert_close(two.mode_probability[0], near.mode_probability)
    assert two.belief.batch_shape == (2, 5, 2)


def test_one_mode_is_smoothed_exactly() -> None:
    prior, likelihood, _, y = cases()["Gamma–Poisson"]
    model = SwitchingFamily(torch.ones(1, 1, dtype=F64), prior, likelihood, [DiscountedDynamics(1.0, prior)])
    whole = f.posterior(prior, likelihood, y).natural_parameter
    torch.testing.assert_close(
        model.smooth(y).belief.natural_parameter, whole.expand(5, 1, -1), rtol=1e-9, atol=1e-9
    )


def test_two_sided_discounting_is_rauchs_smoother_of_a_steady_level() -> None:
    """A level with Q, R in its steady state: P⁻¹ δ = (P + Q)⁻¹. Both give the same means and variances."""
    Q, R = 0.3, 2.0
    P = (-Q + (Q * Q + 4 * Q * R) ** 0.5) / 2  # filtered variance
    discount = P / (P + Q)
    flat = f.Gaussian(one(0), torch.full((1, 1), 1e12, dtype=F64))
    prior = f.Gaussian(one(0), torch.full((1, 1), P, dtype=F64))
    known = f.Gaussian(one(0), torch.full((1, 1), R, dtype=F64))
    y = torch.randn(160, 1, dtype=F64, generator=torch.Generator().manual_seed(0)).cumsum(0)
    single = torch.ones(1, 1, dtype=F64)
    found = SwitchingFamily(single, prior, known, [DiscountedDynamics(discount, flat)]).smooth(y).belief
    mean, level = 0.0, []
    for value in y[:, 0].tolist():  # the steady filter, gain P/R
        mean += P / R * (value - mean)
        level.append(mean)
    gain, variance = P / (P + Q), P
    for t in reversed(range(len(level) - 1)):
        level[t] += gain * (level[t + 1] - level[t])
        variance = P + gain**2 * (variance - P - Q)
        if 60 <= t < 100:  # far from both ends
            assert float(found.mean_vector[t, 0]) == pytest.approx(level[t], rel=1e-6, abs=1e-8)
            assert float(found.covariance_matrix[t, 0]) == pytest.approx(variance, rel=1e-6)


def test_what_is_learned() -> None:
    """Counts that were drawn: the fit is no worse than the truth, and a maximum."""
    rng = np.random.default_rng(0)
    modes = np.cumsum(rng.random(250) < 0.08) % 2
    y = torch.from_numpy(rng.poisson(np.where(modes, 20.0, 4.0)).astype(float))[:, None]
    rests = [f.Gamma(one(8), one(2)), f.Gamma(one(40), one(2))]
    truth = SwitchingFamily(
        torch.tensor([[0.92, 0.08], [0.08, 0.92]], dtype=F64),
        rests[0],
        f.Poisson,
        [DiscountedDynamics(0.7, rest) for rest in rests],
    )
    fit = truth.fit(y, max_steps=60)
    assert fit.log_likelihood > float(truth.filter(y).log_likelihood)
    assert fit.log_likelihood == pytest.approx(float(fit.model.filter(y).log_likelihood), abs=1e-6)
    assert (fit.free_parameters, fit.observations) == (8, 250)
    means = [float(move.rest.event_mean) for move in fit.model.dynamics]
    assert means[0] == pytest.approx(4, abs=0.5)
    assert means[1] == pytest.approx(20, abs=1.5)
    assert float(fit.model.transition.diagonal().min()) > 0.8
    assert set(fit.standard_errors) == {"transition", "discount", "shape", "rate", "mean"}
    assert fit.aic == pytest.approx(16 - 2 * fit.log_likelihood)
    held = truth.fit(y, fixed=("transition", "rest"), max_steps=20)
    assert torch.equal(held.model.transition, truth.transition)
    assert set(held.standard_errors) == {"discount"}
    assert float(truth.filter(y).log_likelihood) - 1e-9 <= held.log_likelihood <= fit.log_likelihood + 1e-3


def test_gammas_are_pushed_by_scaling_or_by_their_moments() -> None:
    belief = f.Gamma(one(3, 5), one(2, 4))
    scaled = LinearDynamics(torch.diag(one(2, 7)), torch.zeros(2, 2, dtype=F64))(belief)
    torch.testing.assert_close(scaled.shape, belief.shape)  # closed: only the rate changes
    torch.testing.assert_close(scaled.rate, belief.rate / one(2, 7))
    W, Q = torch.tensor([[1.0, 2.0], [0.5, 0.0]], dtype=F64), torch.diag(one(0.3, 0.1))
    mixed = LinearDynamics(W, Q)(belief)
    torch.testing.assert_close(mixed.event_mean, W @ belief.event_mean)
    torch.testing.assert_close(mixed.event_variance, W**2 @ belief.event_variance + Q.diagonal())
    model = SwitchingFamily(
        TRANSITION, belief, f.Poisson, [LinearDynamics(W, Q), DiscountedDynamics(0.5, belief)], START
    )
    assert model.filter(torch.ones(3, 2, dtype=F64)).log_likelihood.isfinite()
    with pytest.raises(ArgumentError, match="Use filter"):
        model.smooth(torch.ones(3, 2, dtype=F64))


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
        [LinearDynamics(*map(torch.from_numpy, pair)) for pair in zip(W, Q, strict=True)],
        START,
    )
    wanted, data = linear.filter(y, method=method), torch.from_numpy(y)
    with torch.no_grad():
        handed_over = family.filter(data, method=method)
    slow = step_by_step(family).filter(data, method=method)
    for found in (handed_over, slow):
        terms, probability = (x.detach() for x in (found.log_likelihood_terms, found.mode_probability))
        np.testing.assert_allclose(terms, wanted.log_likelihood_terms, atol=1e-8)
        np.testing.assert_allclose(probability, wanted.mode_probability, atol=1e-8)
        np.testing.assert_allclose(found.state.event_mean.detach(), wanted.mean, atol=1e-7)
    back, given = linear.smooth(y, method=method), family.smooth(data, method=method)
    np.testing.assert_allclose(given.mode_probability, back.mode_probability)
    np.testing.assert_allclose(given.state.event_mean, back.mean, atol=1e-12)


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
        model = SwitchingFamily(still, prior, f.Poisson, [DiscountedDynamics(0.9, prior)] * 2, one(1, 0))
        post = model.filter(one(3, 4, 2)[:, None], method=method)
        assert post.mode_probability[-1].tolist() == [1.0, 0.0]
        assert post.belief.natural_parameter.isfinite().all()


def test_only_discounted_dynamics_are_learned() -> None:
    belief, eye = f.Gamma(one(3), one(1)), torch.eye(1, dtype=F64)
    moves = [LinearDynamics(eye, 0 * eye), DiscountedDynamics(0.5, belief)]
    model = SwitchingFamily(TRANSITION, belief, f.Poisson, moves, START)
    with pytest.raises(ArgumentError, match="Only discounted"):
        model.fit(torch.ones(30, 1, dtype=F64))


def test_any_family_is_pushed_through_an_invertible_map():
    """The density is that of the change of variables: it sums to 1, and has the mean of draws."""
    W = one([2.0, 1.0], [0.5, -1.5])
    law = f.Beta(one(2.0, 3.0), one(4.0, 2.0))
    pushed = LinearDynamics(W, torch.zeros_like(W))(law)
    line = (torch.arange(400, dtype=F64) + 0.5) / 400
    x = torch.cartesian_prod(line, line)
    density = pushed.log_prob(x @ W.mT).exp() * torch.linalg.det(W).abs() / 400**2
    assert float(density.sum()) == pytest.approx(1, abs=1e-4)
    torch.testing.assert_close(density @ (x @ W.mT), pushed.event_mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pushed.statistic(x @ W.mT), law.statistic(x))
    assert torch.equal(pushed.natural_parameter, law.natural_parameter)
    drawn = pushed.sample((20_000,), generator=torch.Generator().manual_seed(0)).mean(0)
    torch.testing.assert_close(drawn, pushed.event_mean, rtol=0, atol=0.02)


@pytest.mark.parametrize("discounts", [(0.8, 0.3), (1.0, 0.5)])
def test_gpb_k_against_all_paths(discounts) -> None:
    """With k > T nothing is merged: every path of modes, step by step with the families' own functions."""
    y, T = [2, 9, 4, 0], 4
    rests = [f.Gamma(one(a), one(b)) for a, b in ((2.0, 1.0), (8.0, 1.0))]
    moves = [DiscountedDynamics(d, rest) for d, rest in zip(discounts, rests, strict=True)]
    model = SwitchingFamily([[0.9, 0.1], [0.3, 0.7]], rests[0], f.Poisson, moves, [0.4, 0.6])
    found = {}
    for path in itertools.product(range(2), repeat=T + 1):
        belief, score = rests[0], math.log([0.4, 0.6][path[0]])
        for t in range(T):
            score += math.log([[0.9, 0.1], [0.3, 0.7]][path[t]][path[t + 1]])
            belief, seen = moves[path[t + 1]](belief), one(float(y[t]))[None]
            score += float(f.log_marginal_likelihood(belief, f.Poisson, seen))
            belief = f.posterior(belief, f.Poisson, seen)
        found[path] = score, float(belief.event_mean)
    scores = torch.tensor([score for score, _ in found.values()], dtype=F64)
    total = float(scores.logsumexp(0))
    mean = sum(math.exp(score - total) * value for score, value in found.values())
    post = model.filter(y, method="gpb5")
    assert float(post.log_likelihood) == pytest.approx(total, abs=1e-10)
    assert float(post.mean[-1]) == pytest.approx(mean, rel=1e-10)
    last = sum(math.exp(score - total) for path, (score, _) in found.items() if path[-1] == 1)
    assert float(post.mode_probability[-1, 1]) == pytest.approx(last, abs=1e-10)
    gaps = [abs(float(model.filter(y, method=f"gpb{k}").log_likelihood) - total) for k in (1, 3, 5)]
    assert gaps[0] > gaps[1] > gaps[2]


def test_data_of_any_kind() -> None:
    """Lists, whole numbers, numpy, pandas and lists of series give what tensors give."""
    pd = pytest.importorskip("pandas")
    rest = f.Gamma(one(2.0), one(1.0))
    parts = (rest, f.Poisson, [DiscountedDynamics(0.8, rest), DiscountedDynamics(0.3, rest)])
    model = SwitchingFamily([[0.9, 0.1], [0.3, 0.7]], *parts)
    want = model.filter(one(3, 1, 4)[:, None])
    for y in ([3, 1, 4], [[3], [1], [4]], np.array([3, 1, 4]), torch.tensor([[3], [1], [4]])):
        got = model.filter(y)
        assert torch.equal(got.mode_probability, want.mode_probability)
        assert torch.equal(model.smooth(y).mean, model.smooth(one(3, 1, 4)[:, None]).mean)
        assert model.most_likely_path(y).tolist() == model.most_likely_path(one(3, 1, 4)[:, None]).tolist()
    table = model.filter(pd.DataFrame({"count": [3, 1, 4]}, index=[7, 8, 9]))
    assert table.mode_probability.index.tolist() == [7, 8, 9]
    np.testing.assert_allclose(table.mean["state 0"], want.mean[:, 0])
    short = model.filter([np.array([3, 1, 4]), np.array([2])])
    torch.testing.assert_close(short.mean[0], want.mean)
    assert len(short.mean[1]) == 1
    whole = SwitchingFamily(np.array([[1, 0], [0, 1]]), *parts, initial_probability=[1, 0])
    assert whole.filter([3, 1]).mode_probability[:, 0].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_normal_inverse_wishart_of_one_component_is_fitted_as_the_normal_gamma():
    rng, ends = np.random.default_rng(0), []
    y = torch.tensor(np.where(np.arange(120) // 10 % 2, 3.0, 0.0)[:, None] + rng.normal(size=(120, 1)))
    P, one = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64), torch.ones(1, dtype=F64)
    for wide in (False, True):
        laws = [
            f.NormalInverseWishart(level * one, 2 * one[0], 6 * one[0], 6 * torch.eye(1, dtype=F64))
            if wide
            else f.NormalGamma(level * one, 2 * one, 3 * one, 3 * one)
            for level in (0.0, 3.0)
        ]
        moves = [DiscountedDynamics(0.9, law) for law in laws]
        model = SwitchingFamily(P, laws[0], f.Gaussian if wide else f.DiagonalGaussian, moves)
        ends.append(model.fit(y, fixed=("discount", "transition"), progress=False))
    gamma, wishart = ends
    assert wishart.status is gamma.status is FitStatus.CONVERGED
    assert wishart.log_likelihood == pytest.approx(gamma.log_likelihood, abs=1e-6)
    np.testing.assert_allclose(wishart.estimates["location"], gamma.estimates["location"], atol=1e-3)
    np.testing.assert_allclose(wishart.estimates["degrees"], 2 * gamma.estimates["shape"][:, 0], rtol=0.02)
    np.testing.assert_allclose(wishart.estimates["scale"][:, 0], 2 * gamma.estimates["rate"], rtol=0.02)


def test_numbers_of_normal_inverse_wisharts_are_their_parameters():
    """The vector of a fit goes to laws of rest and back; zero is the start."""
    eye, number = torch.eye(2, dtype=F64), lambda x: torch.tensor(x, dtype=F64)
    scales = [4 * eye + 1, 3 * eye - 0.5]
    laws = [f.NormalInverseWishart(number([1.0, 2.0]), number(2.0), number(1.5), scale) for scale in scales]
    moves = [DiscountedDynamics(0.8, law) for law in laws]
    chosen = Chosen(SwitchingFamily(torch.full((2, 2), 0.5, dtype=F64), laws[0], f.Gaussian, moves), ())
    assert chosen.free.size == 2 + 2 + 2 * (2 + 1 + 1 + 3)
    rest = chosen.every(chosen.natural(torch.zeros(chosen.free.size, dtype=F64)))["rest"]
    torch.testing.assert_close(rest.scale, torch.stack(scales))
    torch.testing.assert_close(rest.degrees, number([1.5, 1.5]))  # above D − 1 = 1
    theta = torch.from_numpy(np.random.default_rng(0).normal(size=chosen.free.size))
    back = chosen.free.vector({k: v.numpy() for k, v in chosen.natural(theta).items()} | {})
    np.testing.assert_allclose(back, theta, atol=1e-10)
