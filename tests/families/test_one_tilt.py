"""One tilt of many points in one sweep: against dense sums, whatever the weights, and not where derivatives are wanted."""

import pytest
import torch

from exptilt import families as f
from exptilt.families.numerics.one_tilt import _MANY, suits, tilt_once

F64 = torch.float64


def cloud(count: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(count, size, dtype=F64, generator=g) + 3
    weight = torch.where(
        torch.rand(count, generator=g) < 0.3, -torch.inf, 2 * torch.randn(count, dtype=F64, generator=g)
    )
    return points, weight, torch.randn(size, dtype=F64, generator=g)


@pytest.mark.parametrize(
    ("count", "size"), [(_MANY, 1), (_MANY // 3 + 1, 3), (5000, 17), (2050, 64), (63, 1100)]
)
def test_against_dense_sums(count: int, size: int) -> None:
    """Counts that leave parts, blocks and groups of four unfilled; scores that grow, so that the largest is overtaken again and again."""
    points, weight, eta = cloud(count, size)
    weight[: count // 4] = -torch.inf  # whole parts without any mass
    points = points[(points @ eta).argsort()]
    assert suits(points, weight, eta)
    value, mean, score = tilt_once(points, weight, eta)
    dense = points @ eta + weight
    torch.testing.assert_close(score, dense, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value, torch.logsumexp(dense, 0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(mean, torch.softmax(dense, 0) @ points, rtol=1e-12, atol=1e-12)


def test_scores_far_out() -> None:
    """Scores of ±10⁵, which no exponential can bear, and float32 sums of 200,000 points that lose nothing to their number."""
    points, weight, eta = cloud(30000, 4)
    value, mean, _ = tilt_once(points, weight, 1e5 * eta)
    best = (1e5 * (points @ eta) + weight).argmax()
    torch.testing.assert_close(mean, points[best])
    torch.testing.assert_close(value, 1e5 * (points[best] @ eta) + weight[best])
    points, weight, eta = (t.float() for t in cloud(200_000, 2))
    exact = torch.softmax(points.double() @ eta.double() + weight, 0) @ points.double()
    assert float((tilt_once(points, weight, eta)[1] - exact).abs().max()) < 2e-6


def test_threads_make_no_difference() -> None:
    points, weight, eta = cloud(20000, 7)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(tilt_once(points, weight, eta))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_only_where_it_can_be_used() -> None:
    points, weight, eta = cloud(_MANY, 2)
    h = f.Empirical(points, weight)
    expected = torch.softmax(points @ eta + weight, 0) @ points
    assert suits(points, weight, eta)
    assert not suits(points[:9], weight[:9], eta)
    assert not suits(points, weight, eta.expand(3, 2))
    assert not suits(points.mT.contiguous().mT, weight, eta)
    assert not suits(points, weight, eta.clone().requires_grad_())
    for shape in ((2,), (1, 2), (1, 1, 2)):
        found = h.mean(eta.reshape(shape))
        assert found.shape == shape
        torch.testing.assert_close(found.reshape(2), expected)
    slope = torch.func.jacrev(h.mean)(eta)
    torch.testing.assert_close(slope, h.covariance(eta))
    torch.testing.assert_close(torch.func.vmap(h.mean)(torch.stack([eta, eta]))[1], expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(eta, torch.ones_like(eta))
        tangent = torch.autograd.forward_ad.unpack_dual(h.mean(dual)).tangent
    torch.testing.assert_close(tangent, h.covariance(eta).sum(-1))
