"""Means on, in and outside the hull are told apart, with their distance: against a quadratic program."""

import cvxpy
import numpy as np
import pytest
import scipy.spatial
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exptilt import families as f
from exptilt.families.numerics.hull import nearest_in_hull
from laws.registry import FAMILIES, Case


def distance_by_program(points: np.ndarray, target: np.ndarray) -> float:
    weight = cvxpy.Variable(len(points), nonneg=True)
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.norm(points.T @ weight - target)), [cvxpy.sum(weight) == 1])
    return float(problem.solve(solver=cvxpy.CLARABEL))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 30), dimension=st.integers(1, 5), reach=st.floats(0.1, 4)
)
def test_distance_against_a_quadratic_program(seed: int, count: int, dimension: int, reach: float) -> None:
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(count, dimension, dtype=torch.float64, generator=g)
    target = reach * torch.randn(dimension, dtype=torch.float64, generator=g)
    nearest = nearest_in_hull(points, target)
    assert float((target - nearest).norm()) == pytest.approx(
        distance_by_program(points.numpy(), target.numpy()), abs=2e-5
    )
    # The certificate: no point lies beyond the hyperplane through the nearest one.
    normal = target - nearest
    assert float(((points - nearest) @ normal).max()) <= 1e-9


SQUARE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]], dtype=torch.float64)


def test_inside_boundary_outside() -> None:
    means = torch.tensor(
        [[0.3, 0.6], [1.0, 0.5], [1.0, 1.0], [3.0, 0.5], [2.0, 2.0], [1 - 1e-9, 0.5], [1 + 1e-6, 0.5]],
        dtype=torch.float64,
    )
    solution = f.Empirical(SQUARE).natural(means)
    names = [list(f.Status)[int(code)].name for code in solution.code]
    assert names == ["CONVERGED", "BOUNDARY", "BOUNDARY", "OUTSIDE", "OUTSIDE", "CONVERGED", "OUTSIDE"]
    torch.testing.assert_close(
        solution.distance,
        torch.tensor([0, 0, 0, 2, 2**0.5, 0, 1e-6], dtype=torch.float64),
        rtol=1e-6,
        atol=1e-12,
    )
    assert bool(solution.value.isfinite().all())
    assert solution.status is f.Status.OUTSIDE
    assert f.Empirical(SQUARE).conjugate(means[3:5]).tolist() == [float("inf")] * 2


def test_points_left_out_do_not_span_the_hull() -> None:
    h = f.Empirical(SQUARE, torch.tensor([0.0, 0.0, 0.0, -torch.inf, -torch.inf], dtype=torch.float64))
    solution = h.natural(torch.tensor([0.75, 0.75], dtype=torch.float64))
    assert solution.status is f.Status.OUTSIDE
    assert float(solution.distance) == pytest.approx(0.5**0.5 / 2)


def test_one_point_and_flat_clouds() -> None:
    one = f.Empirical(torch.tensor([[2.0, -1.0]], dtype=torch.float64))
    assert one.natural(torch.tensor([2.0, -1.0], dtype=torch.float64)).converged
    assert one.natural(torch.tensor([2.0, 1.0], dtype=torch.float64)).status is f.Status.OUTSIDE
    flat = f.Empirical(torch.tensor([[0.0, 0.0], [1.0, 1.0], [3.0, 3.0]], dtype=torch.float64))
    found = flat.natural(torch.tensor([1.2, 1.2], dtype=torch.float64))
    assert found.converged
    torch.testing.assert_close(flat.mean(found.value), torch.tensor([1.2, 1.2], dtype=torch.float64))
    off = flat.natural(torch.tensor([1.0, 1.2], dtype=torch.float64))
    assert off.status is f.Status.OUTSIDE
    assert float(off.distance) == pytest.approx(0.2 / 2**0.5)


@pytest.mark.parametrize(
    ("h", "bad", "distance"),
    [
        (f.Poisson(torch.tensor([2.0, 1.0])), [[-3.0, 1.0], [0.0, 1.0]], [3.0, 0.0]),
        (f.Exponential(torch.tensor([2.0])), [[-1.0], [0.0]], [1.0, 0.0]),
        (f.Gamma(torch.tensor([2.0]), torch.tensor([2.0])), [[-1.0], [0.0]], [1.0, 0.0]),
        (f.BernoulliProduct(torch.zeros(2)), [[0.5, 1.5], [0.5, 1.0]], [0.5, 0.0]),
        (f.Categorical(torch.zeros(2)), [[2.0, 0.0], [1.0, 0.0]], [1.0, 0.0]),
        (f.VonMisesFisher(torch.zeros(2)), [[3.0, 0.0], [1.0, 0.0]], [2.0, 0.0]),
        (f.Wishart(torch.tensor(3.0), torch.eye(1)), [[-2.0], [0.0]], [2.0, 0.0]),
        (f.Dirichlet(torch.ones(2)), [[0.0, 0.0], [-0.6931471805599453] * 2], [0.6931472, 0.0]),
        (
            f.Mixture(torch.zeros(1), f.Gamma(torch.ones(1, 1), torch.ones(1, 1))),
            [[-2.0], [-1.0]],
            [2.0, 1.0],
        ),
        (
            f.FromDensity.quadrature(lambda x: 0 * x[..., 0], lower=[0.0], upper=[1.0]),
            [[2.0], [-0.5]],
            [1.0, 0.5],
        ),
    ],
)
def test_closed_forms_know_their_hull(h: f.Measure, bad: list[list[float]], distance: list[float]) -> None:
    h = h.to(torch.float64)
    solution = h.natural(torch.tensor(bad, dtype=torch.float64))
    torch.testing.assert_close(solution.distance, torch.tensor(distance, dtype=torch.float64))
    assert bool(solution.value.isfinite().all())
    assert [list(f.Status)[int(code)].name for code in solution.code] == [
        "OUTSIDE" if d else "BOUNDARY" for d in distance
    ]


def test_or_raise_names_the_problem() -> None:
    solution = f.Empirical(SQUARE).natural(torch.tensor([[0.5, 0.5], [1.0, 4.0]], dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"outside.*batch index \(1,\).*3 outside"):
        solution.or_raise()
    assert f.Empirical(SQUARE).natural(SQUARE[4]).or_raise().shape == (2,)


def test_max_steps_is_honest() -> None:
    h = f.GaussianMixture(torch.zeros(2), torch.tensor([[-30.0], [30.0]]), torch.eye(1)).to(torch.float64)
    solution = h.natural(torch.tensor([35.0], dtype=torch.float64), max_steps=1)
    assert solution.status is f.Status.MAX_STEPS
    assert h.natural(torch.tensor([35.0], dtype=torch.float64)).converged


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_from_mean_says_where_there_is_no_member(case: Case) -> None:
    """Outside, the status says so with a distance, and no parameter is NaN.

    The rest of the batch is not disturbed.
    """
    h = case.make(torch.Generator().manual_seed(0), (3,))
    mean = h.mean_parameter.clone()
    theta = h.natural_parameter[1]
    # Most attainable sets end somewhere along θ.
    mean[1] = mean[1] + 1e6 * (theta if float(theta.norm()) > 0 else torch.ones_like(theta))
    if case.cls in (f.Gaussian, f.DiagonalGaussian, f.Gamma, f.NormalGamma, f.Wishart, f.Exponential):
        mean[1] = -h.mean_parameter[1].abs() - 1  # second moments, rates and traces that are negative
    if case.cls in (f.Poisson, f.NegativeBinomial):
        mean[1] = -3.0
    found = case.cls.from_mean(mean, **case.known(h))
    names = [list(f.Status)[int(code)].name for code in found.code]
    assert names == ["CONVERGED", "OUTSIDE", "CONVERGED"]
    assert float(found.distance[1]) > 0
    assert all(bool(leaf.isfinite().all()) for leaf, _ in found.value._leaves())
    assert bool(found.value._in_domain().all())
    torch.testing.assert_close(found.value.mean_parameter[::2], mean[::2], rtol=1e-7, atol=1e-8)
    with pytest.raises(RuntimeError, match=r"outside of what can be attained.*batch index \(1,\)"):
        found.or_raise()


def test_conjugate_on_the_boundary() -> None:
    """Minus the log-mass of the face: −log P(x = corner) at a corner; infinite for a density, and outside."""
    double = torch.float64
    poisson, coin = (
        f.Poisson(torch.tensor([2.0], dtype=double)),
        f.BernoulliProduct(torch.logit(torch.tensor([0.3, 0.6], dtype=double))),
    )
    third = f.Categorical(torch.tensor([0.0, 1.0, 2.0], dtype=double))
    for h, corner in ((poisson, [0.0]), (coin, [0.0, 1.0]), (coin, [1.0, 1.0]), (third, [1.0, 0.0, 0.0])):
        x = torch.tensor(corner, dtype=double)
        torch.testing.assert_close(h.conjugate(x), -h.log_prob(x))
        assert bool(h.conjugate(x - 2) == torch.inf)
    mixed = poisson.conjugate(torch.tensor([[0.0], [3.0], [-1.0]], dtype=double))
    torch.testing.assert_close(mixed, torch.tensor([2.0, 3 * np.log(1.5) - 1, torch.inf], dtype=double))
    (slope,) = torch.autograd.functional.jacobian(
        lambda m: poisson.conjugate(m), torch.tensor([[3.0]], dtype=double)
    )
    assert float(slope.squeeze()) == pytest.approx(np.log(1.5))


def test_float32_points_far_from_the_origin_have_interior_means() -> None:
    """At an offset of 10⁴ float32 has three digits left of a spread of 1.

    Enough for the η of a mean inside.
    """
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        points = torch.randn(50, 3, generator=g) + 1e4
        weight = torch.softmax(torch.randn(50, generator=g).double(), 0)
        mean = (weight @ points.double()).float()
        found = f.Empirical(points).natural(mean)
        assert found.converged, found.status
        x = points.double() - 1e4
        reached = torch.softmax(x @ found.value.double(), 0) @ x
        torch.testing.assert_close(reached, mean.double() - 1e4, rtol=0, atol=1e-5)
        slope = torch.func.jacrev(lambda m, x=points: f.Empirical(x).natural(m).value)(mean)
        offset = x - reached
        covariance = (torch.softmax(x @ found.value.double(), 0)[:, None] * offset).mT @ offset
        torch.testing.assert_close(
            slope.double() @ covariance, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("depth", [1e-3, 1e-8, 1e-12, 1e-20, 1e-30])
def test_means_close_to_a_vertex_are_inside(dtype: torch.dtype, depth: float) -> None:
    """log p/(1 − p) for {0, 1}; whatever is not solved is not called the boundary, which it is not."""
    h = f.Empirical(torch.tensor([[0.0], [1.0]], dtype=dtype))
    found = h.natural(torch.tensor([depth], dtype=dtype))
    assert found.status in (f.Status.CONVERGED, f.Status.STALLED, f.Status.MAX_STEPS)
    assert found.converged or depth < 1e-20
    if found.converged:
        assert float(found.value) == pytest.approx(np.log(depth) - np.log1p(-depth), rel=1e-6)
    assert h.natural(torch.zeros(1, dtype=dtype)).status is f.Status.BOUNDARY
    assert h.natural(torch.full((1,), -depth, dtype=dtype)).status is not f.Status.CONVERGED


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), count=st.integers(4, 12), offset=st.sampled_from([0.0, 1e3, 1e6]))
def test_boundary_only_on_the_boundary(seed: int, count: int, offset: float) -> None:
    """In the plane, where the hull's sides are known: a little inside of their middles is solved.

    A middle is on the side but for its rounding, which may put it inside: then it has a tilt, and that is it.
    """
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 2, dtype=torch.float64, generator=g) + offset
    hull = scipy.spatial.ConvexHull(points.numpy())
    middles = points[torch.as_tensor(hull.simplices.astype(np.int64))].mean(1)
    inside = middles + 1e-3 * (points.mean(0) - middles)
    on, within = f.Empirical(points).natural(middles), f.Empirical(points).natural(inside)
    assert within.converged, within.status
    if not offset:
        assert int((on.code == f.Status.BOUNDARY.code).sum()) >= 1
    for index, code in enumerate(on.code.tolist()):
        assert code in (f.Status.BOUNDARY.code, f.Status.STALLED.code, f.Status.CONVERGED.code)
        if code == f.Status.CONVERGED.code:
            x = points - middles[index]
            reached = torch.softmax(x @ on.value[index], 0) @ x
            assert float(reached.norm()) < 1e-14 * (1 + offset)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_means_on_a_facet_are_on_the_boundary_with_the_conjugate_of_the_face(dtype: torch.dtype) -> None:
    """Σ v log v for a face that is a simplex, v the weights of its vertices; 0 for those that have none."""
    rng = np.random.default_rng(4)
    for size in (2, 3, 4):
        points = rng.integers(-40, 41, size=(12, size)).astype(float)
        cloud = f.Empirical(torch.tensor(points, dtype=dtype))
        hull = scipy.spatial.ConvexHull(points)
        for plane, corners in list(zip(hull.equations, hull.simplices, strict=True))[:2]:
            assert (np.abs(points @ plane[:-1] + plane[-1]) < 1e-9).sum() == size  # no other point on it
            weight = np.arange(size, dtype=float)
            weight[-1] = 16 - weight[:-1].sum()
            mean = torch.tensor(weight / 16 @ points[corners], dtype=dtype)
            found = cloud.natural(mean)
            assert found.status is f.Status.BOUNDARY
            assert not bool(found.distance)
            wanted = scipy.special.xlogy(weight / 16, weight / 16).sum()
            assert float(cloud.conjugate(mean)) == pytest.approx(wanted, abs=1e-6)


def test_separated_components_are_crossed() -> None:
    """At the mean 500 only the component at 100 counts: η = 400 and G* = ½ 400²."""
    h = f.GaussianMixture(torch.zeros(2), torch.tensor([[-100.0], [100.0]]), torch.eye(1)).to(torch.float64)
    mean = torch.tensor([[500.0], [150.0], [-1e6]], dtype=torch.float64)
    found = h.natural(mean)
    assert found.converged
    eta = torch.tensor([[400.0], [50.0], [-999900.0]], dtype=torch.float64)
    torch.testing.assert_close(found.value, eta)
    torch.testing.assert_close(h.conjugate(mean), eta[:, 0] ** 2 / 2)


def test_a_conjugate_whose_tilt_was_not_found_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    h = f.GaussianMixture(torch.zeros(2), torch.tensor([[-30.0], [30.0]]), torch.eye(1)).to(torch.float64)
    once = f.GaussianMixture.natural
    monkeypatch.setattr(f.GaussianMixture, "natural", lambda self, mean: once(self, mean, max_steps=1))
    with pytest.raises(RuntimeError, match="max_steps"):
        h.conjugate(torch.tensor([35.0], dtype=torch.float64))
