"""Named constraints really contradict each other, and none of them can be left out.

Against a linear program over all points.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from exptilt import families as f
from exptilt.families.maximum_entropy import conflicting


def attainable(points: np.ndarray, mean: np.ndarray) -> bool:
    """Whether some law on the points has this mean."""
    rows = np.vstack([points.T, np.ones(len(points))])
    return linprog(np.zeros(len(points)), A_eq=rows, b_eq=[*mean, 1.0]).status == 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(2, 2500),
    dimension=st.integers(1, 8),
    reach=st.floats(0.1, 2.5),
)
def test_against_all_points(seed: int, count: int, dimension: int, reach: float) -> None:
    g = np.random.default_rng(seed)
    points = g.normal(size=(count, dimension)) * 10 ** g.uniform(-3, 3, dimension)
    mean = reach * g.normal(size=dimension) * np.abs(points).mean(0)
    named = conflicting(points, mean)
    if attainable(points, mean):
        assert named == []
        return
    assert not attainable(points[:, named], mean[named])
    alone = [j for j in range(dimension) if not attainable(points[:, [j]], mean[[j]])]
    if alone:
        assert named == alone
    else:
        assert all(
            attainable(points[:, rest], mean[rest]) for rest in ([i for i in named if i != j] for j in named)
        )


def test_more_than_sixteen_at_once() -> None:
    """Twenty columns that sum to zero, each attainable, all nineteen of any of them together too."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(2000, 40, dtype=torch.float64, generator=g)
    a[:, 19] = -a[:, :19].sum(1)
    mean = torch.zeros(40, dtype=torch.float64)
    mean[:20] = 0.02
    found = f.maximum_entropy(a, mean=mean)
    assert found.status is f.Status.OUTSIDE
    assert found.value.conflict == {(): tuple(map(str, range(20)))}
    assert float(found.distance) == pytest.approx(0.02 * 20**0.5, rel=1e-6)  # the plane Σ x = 0 is nearest


def test_a_search_outside_ends_early() -> None:
    g = torch.Generator().manual_seed(1)
    points = torch.randn(3000, 6, dtype=torch.float64, generator=g)
    far = f.Empirical(points).natural(torch.full((6,), 4.0, dtype=torch.float64))
    assert far.status is f.Status.OUTSIDE
    assert int(far.steps) <= 10
    points[:, 5] = points[:, 0]  # flat: told before the first step
    mean = points.mean(0)
    mean[5] += 1e-6
    off = f.Empirical(points).natural(mean)
    assert off.status is f.Status.OUTSIDE
    assert int(off.steps) == 0
    assert float(off.distance) == pytest.approx(1e-6 / 2**0.5, rel=1e-5)
