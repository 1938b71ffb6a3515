"""Flows against the double loop, with options mixed at random; measures; causal and masked; bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exptilt as xt
from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.dynamics import Flow, Whiten
from oracles import dynamics as oracle

F64 = torch.float64
D, F = xt.dynamics, xt.families


def cloud(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@st.composite
def flows(draw):
    """(flow, points, oracle's options by batch item)."""
    seed = draw(st.integers(0, 10**6))
    g = torch.Generator().manual_seed(seed)
    batch = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    N, dim = draw(st.integers(6, 9)), draw(st.integers(2, 4))
    rn = draw(st.sampled_from(list(oracle.RENORMALIZERS)))
    beta, step = draw(st.sampled_from([0.0, 0.3, 1.0, 4.0])), draw(st.sampled_from([0.1, 1.0, 2.5]))
    points = torch.randn(*batch, N, dim, dtype=F64, generator=g)
    M = N
    patterns = weight = mask = None
    kind = draw(st.sampled_from(["moving", "tensor", "batched tensor", "empirical"]))
    if kind != "moving":
        M = draw(st.integers(1, 9))
        patterns = torch.randn(*(batch if kind == "batched tensor" else ()), M, dim, dtype=F64, generator=g)
    if kind == "empirical":
        weight = torch.randn(M, dtype=F64, generator=g)
    causal = draw(st.booleans())
    if draw(st.booleans()):
        mask = torch.rand(*(batch if draw(st.booleans()) else ()), N, M, generator=g) < 0.7
    given_patterns = F.Empirical(patterns, weight) if kind == "empirical" else patterns
    flow = Flow(rn, beta=beta, step=step, patterns=given_patterns, causal=causal, mask=mask)
    return flow, points, patterns, weight, mask


@settings(max_examples=120, deadline=None)
@given(flows())
def test_one_update_is_the_double_loop(case):
    flow, points, patterns, weight, mask = case
    batch, (N, dim) = points.shape[:-2], points.shape[-2:]
    moved, slope = flow(points), flow.slope(points.expand(*flow(points).shape))
    M = N if patterns is None else patterns.shape[-2]
    all_patterns = points if patterns is None else patterns.expand(*batch, M, dim)
    all_masks = None if mask is None else mask.expand(*batch, N, M)
    for index in (
        torch.cartesian_prod(*map(torch.arange, batch)).reshape(-1, len(batch)).tolist() if batch else [[]]
    ):
        i = tuple(index)
        options = {
            "causal": flow.causal,
            "mask": None if all_masks is None else all_masks[i],
            "log_weight": weight,
        }
        G, gradient = oracle.slope(points[i], all_patterns[i], flow.beta, **options)
        torch.testing.assert_close(slope.log_normalizer[i], G, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(slope.gradient[i], gradient, rtol=1e-11, atol=1e-11)
        wanted = oracle.RENORMALIZERS[flow.renormalize](points[i] + flow.step * gradient)
        torch.testing.assert_close(moved[i], wanted, rtol=1e-7, atol=1e-7)


def test_the_gradient_is_that_of_log_normalizer_over_beta():
    points, patterns, beta = cloud(5, 3), cloud(7, 3, seed=1), 2.5
    points.requires_grad_()
    flow = Flow(None, beta=beta, patterns=patterns)
    [slope] = torch.autograd.grad(torch.logsumexp(beta * points @ patterns.mT, -1).sum() / beta, points)
    torch.testing.assert_close(flow.slope(points).gradient, slope)


@pytest.mark.parametrize("seed", range(3))
def test_any_measure(seed):
    """∇G of a Gaussian is μ + Σβη; of a mixture it is what autograd says."""
    m, a = cloud(3, seed=seed), cloud(3, 3, seed=seed + 10)
    S, points, beta = a @ a.mT + torch.eye(3, dtype=F64), cloud(2, 6, 3, seed=seed + 20), 0.7
    flow = Flow(None, beta=beta, step=0.5, patterns=F.Gaussian(m, S))
    torch.testing.assert_close(flow(points), points + 0.5 * (m + beta * points @ S))
    torch.testing.assert_close(
        flow.slope(points).log_normalizer,
        beta * points @ m + beta**2 / 2 * torch.einsum("...i,ij,...j", points, S, points),
    )
    mixture = F.GaussianMixture(cloud(2, seed=seed), cloud(2, 3, seed=seed + 1), torch.stack([S, 2 * S]))
    eta = points.clone().requires_grad_()
    [slope] = torch.autograd.grad(mixture.log_normalizer(beta * eta).sum() / beta, eta)
    torch.testing.assert_close(Flow(None, beta=beta, patterns=mixture).slope(points).gradient, slope)


def test_batch_of_measures_goes_with_the_batch_of_points():
    means, points = cloud(2, 3), cloud(2, 6, 3, seed=1)
    found = Flow(None, patterns=F.Gaussian(means, torch.eye(3, dtype=F64)))(points)
    torch.testing.assert_close(found, 2 * points + means.unsqueeze(-2))
    patterns = cloud(2, 4, 3, seed=2)
    torch.testing.assert_close(Flow(patterns=F.Empirical(patterns))(points), Flow(patterns=patterns)(points))


def test_batch_axes_of_patterns_or_mask_alone():
    points, patterns, mask = cloud(4, 3), cloud(2, 5, 3, seed=1), torch.ones(2, 4, 4, dtype=torch.bool).tril()
    for flow in (
        Flow(patterns=patterns),
        Flow("sphere", patterns=F.Empirical(patterns)),
        Flow("sphere", mask=mask),
    ):
        both = torch.stack([points, points])
        torch.testing.assert_close(flow.run(points, 2).states, flow.run(both, 2).states)
        torch.testing.assert_close(flow(points), flow(both))
    torch.testing.assert_close(flow.ode(points, 0.1, samples=2).last, flow.ode(both, 0.1, samples=2).last)
    for other in (patterns, F.Gaussian(cloud(2, 3), torch.eye(3, dtype=F64))):
        with pytest.raises(ArgumentError, match=r"batch axes do not match: points \(3,\), .* \(2,\)"):
            Flow(patterns=other).run(cloud(3, 4, 3), 1)


@pytest.mark.parametrize("kind", ["whiten", "layer", lambda x: x @ (0.5 * torch.eye(3))])
def test_autocast_changes_nothing(kind):
    points = cloud(50, 3).float()
    flow = Flow(kind, patterns=F.Gaussian(torch.ones(3), torch.eye(3) + 0.3))
    plain = flow.run(points, 2).states
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flow.run(points, 2).states, plain)
        assert torch.equal(
            Whiten(covariance=torch.eye(3))(points), Whiten(covariance=torch.eye(3))(points.clone()).float()
        )


def test_out_of_the_natural_domain():
    one = torch.ones(2, dtype=F64)
    with pytest.raises(ArgumentError, match=r"Gamma: .* inside the natural domain"):
        Flow(None, patterns=F.Gamma(2 * one, one)).run(0.1 * cloud(6, 2), 9)


def test_a_causal_flow_does_not_look_ahead():
    points = cloud(8, 3)
    changed = torch.cat([points[:5], cloud(3, 3, seed=1)])
    flow = Flow("rms", causal=True)
    assert torch.equal(flow(points)[:5], flow(changed)[:5])
    assert not torch.equal(flow(points)[5:], flow(changed)[5:])


def test_a_point_that_sees_nothing_stays():
    points, mask = cloud(4, 3), torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    path = Flow(None, mask=mask).run(points, 2)
    assert torch.equal(path.last[2], points[2])
    assert path.log_normalizer.isfinite().all()  # the mean is over the points that see something


def test_beta_zero_adds_the_mean():
    points = cloud(6, 2)
    torch.testing.assert_close(Flow(None, beta=0.0)(points), points + points.mean(0))


def test_large_scores_do_not_overflow():
    points = cloud(6, 2, scale=1e4)
    found = Flow("sphere", beta=50.0)(points)
    torch.testing.assert_close(found, oracle.update(points, "sphere", 50.0, 1.0))


def test_single_precision_is_as_good_as_plain_torch():
    points = cloud(300, 16)
    exact = Flow("layer")(points)
    x = points.float()
    plain = torch.nn.functional.layer_norm(x + torch.softmax(x @ x.mT, -1) @ x, (16,), eps=0.0)
    ours = Flow("layer")(x)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-7


def test_differentiable_twice():
    points = cloud(5, 2).requires_grad_()
    for kind in ("sphere", "whiten", "batch"):
        flow = Flow(kind, beta=1.3, step=0.7)
        assert torch.autograd.gradcheck(flow, (points,), fast_mode=True)
        assert torch.autograd.gradgradcheck(flow, (points,), atol=1e-4, fast_mode=True)


def test_torch_func():
    points = cloud(5, 2)
    for kind in ("sphere", "whiten", "batch", "rms"):
        flow = Flow(kind, beta=1.3)
        forward, backward = torch.func.jacfwd(flow)(points), torch.func.jacrev(flow)(points)
        torch.testing.assert_close(forward, backward)
        torch.testing.assert_close(torch.func.vmap(flow)(cloud(2, 5, 2)), flow(cloud(2, 5, 2)))


def test_any_function_may_renormalise():
    points = cloud(5, 3)
    torch.testing.assert_close(Flow(torch.tanh)(points), torch.tanh(Flow(None)(points)))
    with pytest.raises(
        ArgumentError, match=r"shape \(5, 3\) and torch.float64; got shape \(3,\) and torch.float64"
    ):
        Flow(lambda x: x.mean(0))(points)


def test_bad_points():
    flow = Flow("sphere")
    for points in (torch.ones(3), torch.ones(0, 3), torch.ones(2, 3, dtype=torch.int64), [[1.0]]):
        with pytest.raises(ArgumentError, match=r"floating tensor \(..., N, D\)"):
            flow.run(points, 1)
        with pytest.raises(ArgumentError, match=r"floating tensor \(..., N, D\)"):
            flow(points)
    bad = cloud(2, 4, 3)
    bad[1, 2, 0] = math.nan
    with pytest.raises(ArgumentError, match=r"points\[1, 2\] holds NaN or infinity"):
        flow.run(bad, 1)
    with pytest.raises(ArgumentError, match=r"points\[1, 2\] holds NaN or infinity"):
        flow(bad)
    assert torch.func.vmap(flow)(bad)[0].isfinite().all()  # here nothing can be looked at
    with pytest.raises(ArgumentError, match="has dimension 2"):
        Flow(patterns=cloud(4, 2))(cloud(4, 3))
    with pytest.raises(ArgumentError, match="has dimension 2"):
        Flow(patterns=cloud(4, 2)).run(cloud(4, 3), 1)
    with pytest.raises(ArgumentError, match=r"the Gaussian has dimension 3 and dtype torch\.float32"):
        Flow(patterns=F.Gaussian(torch.zeros(3), torch.eye(3))).run(cloud(4, 3), 1)
    with pytest.raises(ArgumentError, match="does not broadcast"):
        Flow(mask=torch.ones(3, 3, dtype=torch.bool)).run(cloud(4, 3), 1)


def test_a_state_that_is_not_finite_names_step_and_point():
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=F64)
    count = 0

    def spoil(x):
        nonlocal count
        count += 1
        return (
            x.clone().index_put_((torch.tensor(1),), torch.tensor(math.inf, dtype=F64))
            if count == 3
            else x / x.norm()
        )

    with pytest.raises(ConvergenceError, match=r"after step 3 the point at index \(1,\) is not finite"):
        Flow(spoil).run(points, 5)
    with pytest.raises(ConvergenceError, match=r"after step \d+ the point at index"):
        Flow(None, step=1e3).run(1e3 * points, 200, measure_every=None, keep="last")
    with pytest.raises(
        ConvergenceError, match=r"after step \d+ the point at index"
    ):  # not an error of what measures it
        Flow(None).run(cloud(9, 3, scale=1e150), 60)


def test_one_point_and_equal_points():
    one = Flow("sphere").run(torch.tensor([[3.0, 4.0]], dtype=F64), 3)
    torch.testing.assert_close(one.last, torch.tensor([[0.6, 0.8]], dtype=F64))
    assert one.clusters.count.tolist() == [1] * 4
    assert one.mean_cosine.isnan().all()
    same = Flow("layer").run(torch.tensor([[1.0, 2.0, 4.0]] * 5, dtype=F64), 3)
    assert same.clusters.count.tolist() == [1] * 4
    assert same.gaussianity.kurtosis.isnan().all()
    torch.testing.assert_close(same.mean_cosine, torch.ones(4, dtype=F64))


def test_one_dimension():
    points = cloud(30, 1)
    assert set(Flow("sphere").run(points, 40).last.flatten().tolist()) <= {-1.0, 1.0}
    path = Flow("whiten").run(points, 60)
    assert path.clusters.count[-1] == 2  # D + 1
    torch.testing.assert_close(Flow("batch")(points), Flow("whiten")(points))
    with pytest.raises(ArgumentError, match="Layer: points have one coordinate"):
        Flow("layer")(points)


def test_theorem_of_the_target():
    """Whitening to N(Σ⁻¹μ, Σ⁻¹) after ∇G of N(μ, Σ): each point of a cloud with those moments is fixed.

    Nor is Σ⁻¹ special: η ↦ (1 + Σ)η + μ has a symmetric positive matrix, and its inverse is the
    least-moving map back, whatever the target.
    """
    m, a = cloud(3), cloud(3, 3, seed=1)
    S = a @ a.mT + torch.eye(3, dtype=F64)
    inverse = torch.linalg.inv(S)
    inverse = (inverse + inverse.mT) / 2
    target = Whiten(inverse @ m, inverse)
    points = target(cloud(50, 3, seed=2))
    torch.testing.assert_close(Flow(target, patterns=F.Gaussian(m, S))(points), points)
    other = torch.diag(torch.tensor([1.0, 5.0, 25.0], dtype=F64))
    torch.testing.assert_close(Flow(target, patterns=F.Gaussian(-m, other))(points), points)
    stranger = cloud(50, 3, seed=3)
    assert (Flow(target, patterns=F.Gaussian(m, S))(stranger) - stranger).abs().max() > 0.1
