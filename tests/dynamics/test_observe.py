"""Gaussianity and clusters against their definitions, SciPy, and what is known beforehand."""

import math
import time

import pytest
import scipy.cluster.hierarchy as hierarchy
import scipy.stats
import statsmodels.stats.diagnostic
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exptilt.dynamics import clusters, gaussianity
from exptilt.dynamics.observe.clusters import cluster_labels
from oracles import dynamics as oracle

F64 = torch.float64


def cloud(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 60), st.integers(1, 6))
def test_mardia_is_the_double_sum(seed, count, dimension):
    x = cloud(2, count, dimension, seed=seed).sinh() + 3
    g = gaussianity(x)
    for place in range(2):
        b1, b2 = oracle.mardia(x[place])
        usual = dimension * (dimension + 2)
        assert g.skewness[place].item() == pytest.approx(b1, rel=1e-8, abs=1e-9)
        assert g.kurtosis[place].item() == pytest.approx(b2 / usual - 1, rel=1e-8, abs=1e-9)
        k = (dimension + 1) * (count + 1) * (count + 3) / (count * ((count + 1) * (dimension + 1) - 6))
        freedom = dimension * (dimension + 1) * (dimension + 2) / 6
        assert g.skewness_p[place].item() == pytest.approx(
            scipy.stats.chi2.sf(k * count * b1 / 6, freedom), rel=1e-6, abs=1e-12
        )
        score = (b2 - usual * (count - 1) / (count + 1)) / math.sqrt(8 * usual / count)
        assert g.kurtosis_p[place].item() == pytest.approx(
            2 * scipy.stats.norm.sf(abs(score)), rel=1e-6, abs=1e-12
        )


@pytest.mark.parametrize("count", [8, 12, 80, 2000])
@pytest.mark.parametrize("bend", [lambda x: x, torch.sinh, torch.tanh], ids=["none", "sinh", "tanh"])
def test_sliced_in_one_dimension_is_anderson_and_darling(count, bend):
    x = bend(cloud(count, 1))
    statistic, p = statsmodels.stats.diagnostic.normal_ad(x.flatten().numpy())
    found = gaussianity(x)
    assert found.sliced.item() == pytest.approx(statistic, rel=1e-9)
    assert found.sliced_p.item() == pytest.approx(p, rel=1e-6, abs=1e-12)


def test_p_values_are_uniform_for_gaussians():
    """400 clouds of a sheared Gaussian: each test rejects at 5% about 5% of the time (a binomial's 4
    standard deviations).
    """
    x = (
        cloud(400, 200, 3, seed=5)
        @ torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 9.0]], dtype=F64)
        + 100
    )
    g = gaussianity(x)
    for p in (g.skewness_p, g.kurtosis_p, g.sliced_p):
        assert abs(float((p < 0.05).double().mean()) - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 400)
        assert abs(float((p < 0.5).double().mean()) - 0.5) < 0.12
    assert 0.36 < float(g.sliced.mean()) < 0.41


@pytest.mark.parametrize(
    ("bend", "test"),
    [
        (torch.exp, "skewness_p"),
        (torch.sinh, "kurtosis_p"),
        (torch.sign, "sliced_p"),
        (lambda x: x.clamp(-0.5, 0.5), "sliced_p"),
    ],
)
def test_each_test_sees_what_it_should(bend, test):
    assert getattr(gaussianity(bend(cloud(500, 2))), test).item() < 1e-6


def test_gaussianity_does_not_see_affine_maps():
    x, a = cloud(200, 3).exp(), cloud(3, 3, seed=1)
    one, two = gaussianity(x), gaussianity(x @ a + 7)
    for name in ("skewness", "kurtosis"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name))


def test_both_ways_to_sum_cubes_agree():
    from exptilt.dynamics.observe.gaussianity import _cubes

    z = cloud(40, 6)
    pairs = float((z @ z.mT).pow(3).sum()) / 1600
    assert _cubes(z) == pytest.approx(pairs)  # 36 ≤ 40: triples
    assert _cubes(z[:30]) == pytest.approx(float((z[:30] @ z[:30].mT).pow(3).sum()) / 900)  # pairs


def test_rank_of_flat_clouds():
    flat = torch.cat([cloud(50, 2), torch.zeros(50, 1, dtype=F64)], -1)
    g = gaussianity(flat)
    assert g.rank.item() == 2
    torch.testing.assert_close(g.kurtosis, gaussianity(flat[:, :2]).kurtosis)
    assert gaussianity(torch.ones(9, 2)).rank.item() == 0
    assert gaussianity(torch.ones(9, 2)).sliced.isnan()
    wide = gaussianity(cloud(5, 20))
    assert (wide.rank.item(), bool(wide.sliced.isnan())) == (4, True)
    doubled = torch.cat([cloud(3, 9)] * 4)  # more coordinates than places
    assert gaussianity(doubled[:8]).rank.item() == 2
    assert not gaussianity(doubled[:8]).kurtosis.isnan()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.05, 0.3, 0.8]),
    st.booleans(),
)
def test_clusters_are_connected_components(seed, count, dimension, tolerance, clumped):
    x = cloud(count, dimension, seed=seed)
    if clumped:
        x = x[torch.randint(0, max(1, count // 4), (count,), generator=torch.Generator().manual_seed(seed))]
        x = x + 0.01 * cloud(count, dimension, seed=seed + 1)
    wanted = oracle.clusters(x, tolerance * math.sqrt(float((x**2).sum(-1).mean())))
    found = cluster_labels(x, tolerance=tolerance).tolist()
    assert [found[i] == found[j] for i in range(count) for j in range(i)] == [
        wanted[i] == wanted[j] for i in range(count) for j in range(i)
    ]
    sizes = torch.bincount(torch.tensor(found))
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)
    c = clusters(x, tolerance=tolerance)
    assert c.count.item() == len(set(wanted))
    assert c.sizes[: len(sizes)].tolist() == sizes[:16].tolist()
    assert int(c.sizes.sum()) <= count
    share = sizes.double() / count
    assert c.effective.item() == pytest.approx(math.exp(-float((share * share.log()).sum())))
    assert c.largest.item() == pytest.approx(float(share[0]))


def test_clusters_as_scipy_finds_them():
    x = cloud(400, 3)
    radius = 0.15 * math.sqrt(float((x**2).sum(-1).mean()))
    wanted = hierarchy.fcluster(hierarchy.linkage(x.numpy(), "single"), radius, "distance").max()
    assert clusters(x, tolerance=0.15).count.item() == wanted
    assert 1 < wanted < 400


def test_scale_does_not_matter():
    x = cloud(60, 2)
    for scale in (1e-200, 1e200):
        assert torch.equal(cluster_labels(scale * x, tolerance=0.2), cluster_labels(x, tolerance=0.2))
    assert clusters(torch.zeros(7, 2)).count.item() == 1


def test_collapsed_clouds_are_quick():
    x = cloud(5, 16, seed=1)[torch.arange(20000) % 5] + 1e-6 * cloud(20000, 16)
    clusters(x[:10])
    begin = time.thread_time()
    found = clusters(x)
    assert found.sizes[:6].tolist() == [4000] * 5 + [0]
    assert time.thread_time() - begin < 20  # all pairs would take minutes


def test_gaussianity_at_any_scale():
    x = cloud(60, 2)
    for scale in (1e-200, 1e200):
        torch.testing.assert_close(gaussianity(scale * x).kurtosis, gaussianity(x).kurtosis)
