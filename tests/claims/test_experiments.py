"""The experiments say what theory says, small; and their intervals, starts and pictures."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from exptilt._support.intervals import mean_interval, share_interval
from exptilt.claims.experiments.capacity import recalled, sphere, storage_capacity
from exptilt.claims.experiments.circle import growth_rates, metastable_counts
from exptilt.claims.experiments.divergence import divergence_rate
from exptilt.claims.experiments.equal_cosine import cosine_rate, equal_cosine
from exptilt.claims.experiments.starts import STARTS, start
from exptilt.claims.experiments.sweep import equilibrium_sweep
from exptilt.claims.experiments.theorem_one import theorem_one
from exptilt.dynamics import Flow, gaussianity
from exptilt.memory import Hopfield

F64 = torch.float64


@pytest.mark.parametrize("name", STARTS)
def test_starts(name):
    x = start(name, (40_000, 2), torch.Generator().manual_seed(0))
    assert x.mean(0).abs().max() < 0.03
    assert (x.var(0) - 1).abs().max() < 0.05
    assert x.isfinite().all()
    assert (float(gaussianity(x).sliced_p) > 1e-3) == (name == "gaussian")
    laws = {
        "laplace": scipy.stats.laplace(scale=math.sqrt(0.5)),
        "uniform": scipy.stats.uniform(-math.sqrt(3), 2 * math.sqrt(3)),
    }
    if name in laws:
        assert scipy.stats.kstest(x[:, 0].numpy(), laws[name].cdf).pvalue > 1e-3


def test_intervals():
    x = torch.tensor([[1.0, 2.0, 4.0, math.nan], [0.0, 0.0, 1.0, 3.0]], dtype=F64)
    found = mean_interval(x)
    for row, values in enumerate((x[0, :3], x[1])):
        wanted = scipy.stats.t.interval(
            0.95, len(values) - 1, float(values.mean()), scipy.stats.sem(values.numpy())
        )
        assert (float(found.low[row]), float(found.high[row])) == pytest.approx(wanted)
        assert float(found.mean[row]) == pytest.approx(float(values.mean()))
    for hits in (0, 3, 10):
        interval = scipy.stats.binomtest(hits, 10).proportion_ci(0.95)
        assert share_interval(hits, 10) == pytest.approx((hits / 10, interval.low, interval.high))


def test_theorem_one_and_its_scope():
    found = theorem_one(count=600, steps=3)
    fixed, other, laplace = found.row("fixed point"), found.row("gaussian"), found.row("laplace")
    assert max(fixed.drift) < 1e-12  # every point of the fixed law is fixed
    assert (
        other.covariance_error[0] > 1 > 1e-12 > other.covariance_error[1]
    )  # any Gaussian arrives in one step
    length = (found.mean.square().sum() + found.covariance.trace()).sqrt()
    assert other.mean_error[0] == pytest.approx(
        float((1 - found.mean).norm() / length), rel=0.2
    )  # the start is about 1
    assert other.mean_error[0] > 0.5 > 1e-12 > other.mean_error[1]
    assert min(other.gaussian_p) > 0.01
    assert laplace.covariance_error[1] < 1e-12
    assert max(laplace.gaussian_p) < 1e-6  # moments arrive, the shape never does
    for kind in ("batch", "layer"):
        assert min(found.row("gaussian", kind).covariance_error[1:]) > 0.1
        assert found.row("fixed point", kind).drift[0] > 0.1
    # batch norm keeps a Gaussian one but flattens it, layer norm does not even keep it
    assert min(found.row("gaussian", "batch").gaussian_p) > 0.01
    assert max(found.row("gaussian", "layer").gaussian_p[1:]) < 1e-6


@pytest.fixture(scope="module")
def sweep():
    return equilibrium_sweep(
        counts=(100,), dimensions=(2, 3), starts=("laplace",), seeds=3, steps=150, measure_every=50
    )


def test_equilibria_are_clusters(sweep):
    """THEORY B5: one point on the sphere, a simplex of D + 1 under whitening; under layer and batch norm a
    few.
    """
    assert len(sweep) == 8
    for s in sweep:
        if s.renormalizer == "sphere":
            assert s.final == {1: 3}
            torch.testing.assert_close(s.path.mean_cosine[-1], torch.ones(3, dtype=F64), rtol=1e-3, atol=1e-3)
        elif s.renormalizer == "whiten":
            assert s.final == {s.dimension + 1: 3}
        else:
            assert max(s.final) <= 4
        assert s.path.clusters.count[0].min() > 20


def test_every_renormaliser_gets_the_same_starts(sweep):
    starts = {tuple(s.path.gaussianity.sliced[0].tolist()) for s in sweep if s.dimension == 3}
    assert len(starts) == 1


def test_divergence_is_linear_along_extreme_points():
    found = divergence_rate(count=30, patterns=20, steps=400, seed=3)
    assert found.error.max() < 2e-3
    assert found.extreme.min() > 0
    assert len(found.pattern.unique()) > 1
    assert found.moving_factor == pytest.approx(2.0, rel=1e-6)


def test_equal_cosine_equation():
    """The rate against the derivative of the simulator itself at a state of equal cosines."""
    n, beta, cosine = 5, 1.7, 0.3
    gram = torch.full((n, n), cosine, dtype=F64).fill_diagonal_(1.0)
    x = torch.linalg.cholesky(gram)
    g = Flow(None, beta=beta).slope(x).gradient
    v = g - x * (x * g).sum(-1, keepdim=True)
    rates = (v @ x.mT + x @ v.mT)[~torch.eye(n, dtype=torch.bool)]
    torch.testing.assert_close(rates, torch.full_like(rates, cosine_rate(cosine, count=n, beta=beta)))
    assert cosine_rate(1.0, count=n, beta=beta) == 0.0
    assert cosine_rate(-1 / (n - 1), count=n, beta=beta) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.slow
def test_equal_cosine_simulation():
    found = equal_cosine(count=8, beta=2.0, time=4.0, samples=5, substeps=32)
    assert found.continuous_error < 1e-7
    assert found.stepped_error < 3e-2
    finer = Flow("sphere", beta=2.0, step=1 / 64).run(
        torch.eye(8, dtype=F64), 256, keep="last", measure_every=64, progress=False
    )
    assert found.stepped_error / float((finer.mean_cosine - found.theory).abs().max()) == pytest.approx(
        2.0, abs=0.1
    )
    assert 0.9 < float(found.theory[-1]) < 1.0


def test_ripples_on_the_circle_grow_as_predicted():
    found = metastable_counts(count=60, seeds=2, step=0.5, time=5.0)
    torch.testing.assert_close(found.rate, found.rate_theory, rtol=1e-4, atol=1e-4)
    k = np.arange(1, 5)
    wanted = k**2 * scipy.special.iv(k, 2.0) / (2.0 * scipy.special.iv(0, 2.0))
    np.testing.assert_allclose(growth_rates(2.0, 4).numpy(), wanted)


@pytest.mark.parametrize(("beta", "wave"), [(0.1, 1), (2.0, 2), (5.0, 3), (9.0, 4)])
def test_predicted_counts(beta, wave):
    assert int(growth_rates(beta, 12).argmax()) + 1 == wave


def test_three_clusters_on_the_circle():
    """β = 5 gives 3 from a nearly uniform law; from few random points other counts come up as well."""
    found = metastable_counts(beta=5.0, count=300, noise=0.001, seeds=4, step=0.5, time=45.0)
    assert (found.predicted, found.tally) == (3, {3: 4})
    assert found.share[0] == 1.0
    assert found.share[1] < 0.7  # four seeds do not prove much
    gaps = found.angles[0].sort().values.diff().sort().values[-2:]
    assert (gaps > 1.0).all()
    random = metastable_counts(beta=5.0, count=60, noise=None, seeds=4, step=0.5)
    assert set(random.tally) <= {1, 2, 3, 4}


def test_counts_are_reported_at_the_time_they_were_taken():
    assert metastable_counts(count=20, seeds=1, step=0.4, time=1.1).time == pytest.approx(1.2)


@pytest.mark.parametrize("beta", [20.0, 200.0, 2000.0])
def test_fastest_ripple_of_large_beta(beta):
    largest = math.ceil(2 * math.sqrt(beta)) + 2
    found = int(growth_rates(beta, 4 * largest).argmax()) + 1
    assert found <= largest
    assert found == pytest.approx(math.sqrt(2 * beta), rel=0.1, abs=1)


def test_capacity_grows_exponentially_and_above_theory():
    found = storage_capacity([6, 9, 12], seeds=3, most=512)
    assert not found.limited.any()
    assert (found.mean.diff() > 0).all()
    assert 0.25 < found.exponent[0] < 0.7  # about ½ for β = K = 1; theory's ¼ log c is far below
    assert (found.mean > torch.tensor([b.count for b in found.bounds], dtype=F64)).all()
    assert (found.interval[:, 0] <= found.mean).all()
    for i, d in enumerate((6, 9)):  # the very edge: all of N are recalled, of one more not
        for j in range(3):
            patterns = sphere(512, d, math.sqrt(d - 1), torch.Generator().manual_seed(1000 * j + d))
            N = int(found.count[i, j])
            assert N == 1 or recalled(Hopfield(patterns[:N]), 0.0, torch.Generator())
            assert N >= 32 or not recalled(Hopfield(patterns[: N + 1]), 0.0, torch.Generator())
    assert storage_capacity([6, 9], beta=5.0, seeds=1, most=8).limited.all()


def test_one_seed_has_no_interval():
    assert storage_capacity([4, 6], seeds=1, most=8).interval.isnan().all()


def test_recall_of_the_stored():
    """Patterns that are far apart for β are recalled, from noisy cues too; others are not."""
    x = torch.randn(40, 12, dtype=F64, generator=torch.Generator().manual_seed(0))
    x, generator = x / x.norm(dim=-1, keepdim=True), torch.Generator().manual_seed(0)
    assert recalled(Hopfield(x, 60.0), 0.0, generator)
    assert recalled(Hopfield(x, 60.0), 0.2, generator)
    assert not recalled(Hopfield(x, 60.0), 10.0, generator)
    assert not recalled(Hopfield(x, 0.1), 0.0, generator)
    assert not recalled(Hopfield(torch.cat([x, (x[:1] + x[1:2]) / 2]), 1.0), 0.0, generator)
