"""What is measured of a memory: separations, basins, recall, metastable states, capacity; theory."""

import math

import pytest
import scipy.stats
import torch
from scipy.special import lambertw

from exptilt._support.errors import ExptiltWarning
from exptilt.claims.experiments.capacity import sphere, storage_capacity
from exptilt.memory import Hopfield, retrieval_error_bound, storage_bound
from exptilt.memory.landscape.metastable import jacobian, weights
from exptilt.memory.theory import guaranteed_radius, separation_needed
from oracles import memory as oracle

F64 = torch.float64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_constants_of_the_modern_theory():
    """C2: c = 3.1546 (K = 3, d = 20), 1.3718 (K = 1, d = 75; cut off in the paper), and W's equation."""
    first, second = (
        storage_bound(20, beta=1.0, radius=3.0, failure=0.001),
        storage_bound(75, beta=1.0, radius=1.0, failure=0.001),
    )
    assert round(first.base, 4) == 3.1546
    assert math.floor(second.base * 1e4) / 1e4 == 1.3718
    assert first.log_argument > 1.27  # as the paper states beside them
    assert second.log_argument < -0.94
    assert first.holds
    assert second.holds
    for bound, K, d in ((first, 3.0, 20), (second, 1.0, 75)):
        b = 2 * K**2 / 5
        w = b / bound.base
        assert w * math.exp(w) == pytest.approx(math.exp(bound.log_argument))
        assert w == pytest.approx(lambertw(math.exp(bound.log_argument)).real)
        assert bound.count == pytest.approx(math.sqrt(0.001) * bound.base ** ((d - 1) / 4))
    assert not storage_bound(4).holds


def test_the_bound_of_large_and_tiny_numbers():
    """Logarithms on the way: nothing overflows but what is returned."""
    large = storage_bound(4096, radius=3.0)
    assert large.count == math.inf
    assert large.log_count == pytest.approx(0.5 * math.log(0.001) + 4095 / 4 * math.log(large.base))
    assert storage_bound(20, beta=1e300).log_count > storage_bound(20, beta=1e299).log_count
    a, b = 2 / 19 * (1 + math.log(2e-3 * 19) - 300 * math.log(10)), 0.4e-300
    assert storage_bound(20, beta=1e-300).base == pytest.approx(
        math.exp(-a)
    )  # W₀(x) = x for small x: c = b / (e^a b)
    assert storage_bound(20, beta=1e-300).log_argument == pytest.approx(a + math.log(b))
    assert separation_needed(10, beta=1e-300, size=1e200) > 0


def test_separation_of_each_pattern():
    x = torch.randn(70, 5, dtype=F64, generator=seeded())
    for similarity in ("dot", "cosine", "euclidean"):
        memory = Hopfield(x, 1.0, similarity=similarity)
        assert torch.allclose(memory.separation(), oracle.separation(x, similarity), atol=1e-12)
        assert torch.allclose(
            memory.separation(index=[5, -1]), oracle.separation(x, similarity)[[5, -1]], atol=1e-12
        )
    assert Hopfield(x[:1], 1.0).separation().tolist() == [math.inf]


def test_duplicates_are_allowed_and_said():
    x = torch.randn(6, 3, generator=seeded())
    x = torch.cat([x, x[[1, 4]], x[[1]], torch.zeros(1, 3), -torch.zeros(1, 3)])
    memory = Hopfield(x, 1.0)
    assert memory.duplicates() == [[1, 6, 8], [4, 7], [9, 10]]
    assert Hopfield(x[:6], 1.0).duplicates() == []
    with pytest.warns(ExptiltWarning, match=r"patterns \[1, 6, 8\] and 2 more groups"):
        assert memory.separation()[1] == 0
    with pytest.warns(ExptiltWarning, match="are equal"):
        memory.capacity()
    heads = torch.stack([x, torch.randn(11, 3, generator=seeded(1))])
    assert Hopfield(heads, 1.0).duplicates() == []  # equal in one head only
    same = Hopfield(torch.ones(5, 3), 7.0)
    assert torch.equal(same.step(torch.zeros(3)), torch.ones(3))
    twice, once = Hopfield(torch.cat([x[:6], x[:6]]), 1.0), Hopfield(x[:6], 1.0)
    assert torch.allclose(twice.step(x), once.step(x), atol=1e-6)


def test_basin_of_two_patterns_ends_halfway():
    """Two patterns ±a: the border is the plane between them, ‖a‖ away along the axis, ‖a‖/cos φ elsewhere."""
    a = torch.tensor([2.0, 0.0], dtype=F64)
    memory = Hopfield(torch.stack([a, -a]), 2.0)
    found = memory.basin(directions=40, precision=1e-3, generator=seeded())
    u = torch.randn(2, 40, 2, dtype=F64, generator=seeded())
    u = u / u.norm(dim=-1, keepdim=True)
    towards = torch.stack([-u[0, :, 0], u[1, :, 0]])
    border = torch.where(towards > 0.25, 2.0 / towards.clamp_min(0.25), math.inf)
    assert (
        (found.low <= border + 1e-9) & (border <= found.high + 1e-9)
        | ((border > 8) & (found.high == math.inf))
    ).all()
    assert (found.high[found.high < math.inf] - found.low[found.high < math.inf]).max() <= 1e-3 * 2
    assert torch.equal(found.radius, found.low.amin(-1))
    assert (found.interval[:, 0] < found.mean).all()
    assert (found.interval[:, 1] > found.mean).all()


def test_measured_basins_hold_what_theory_guarantees():
    x = 6 * torch.eye(8, dtype=F64)
    memory = Hopfield(x, 1.0)
    found = memory.basin(directions=6, precision=1e-3, generator=seeded())
    assert (found.guaranteed > 0).all()
    assert (found.radius >= found.guaranteed).all()
    gap = memory.separation()
    assert (gap >= separation_needed(8, beta=1.0, size=6.0)).all()
    assert torch.equal(found.guaranteed, guaranteed_radius(gap, count=8, beta=1.0, size=6.0))
    assert (guaranteed_radius(gap, count=8, beta=0.01, size=6.0) == 0).all()
    start = x + 0.02 * torch.randn(8, 8, dtype=F64, generator=seeded())
    distance = (start - x).norm(dim=-1)
    error = (memory.step(start) - x).norm(dim=-1)
    bound = retrieval_error_bound(gap, distance, count=8, beta=1.0, size=6.0)
    assert (error <= bound).all()
    assert bound.max() < 1e-9
    assert (retrieval_error_bound(gap, 2 * distance, count=8, beta=1.0, size=6.0) > bound).all()


def test_recall_of_the_stored():
    x = torch.randn(40, 12, dtype=F64, generator=seeded())
    x = x / x.norm(dim=-1, keepdim=True)
    sharp, blunt = Hopfield(x, 60.0).capacity(), Hopfield(x, 0.1).capacity()
    assert sharp.count == 40
    assert sharp.fraction == 1.0
    assert sharp.interval[0] > 0.9
    assert blunt.count == 0
    assert (blunt.error > 0.5).all()
    noisy = Hopfield(x, 60.0).capacity(noise=0.3, trials=3, generator=seeded())
    assert noisy.recalled.shape == (3, 40)
    assert noisy.fraction > 0.8
    assert Hopfield(x, 60.0).capacity(noise=10.0, trials=2, generator=seeded()).fraction < 0.7


def test_metastable_states():
    """Two groups of near patterns: at β = ½ the memory has one attractor a group, the mean of its members."""
    near = 0.3 * torch.randn(6, 5, dtype=F64, generator=seeded())
    centre = torch.zeros(6, 5, dtype=F64)
    centre[:3, 0], centre[3:, 1] = 3.0, 3.0
    x = near + centre
    found = Hopfield(x, 0.5).metastable(count=60, generator=seeded())
    assert [sorted(m.tolist()) for m in found.members[:2]] in ([[0, 1, 2], [3, 4, 5]], [[3, 4, 5], [0, 1, 2]])
    assert found.stable[:2].all()
    assert (
        int(found.reached.sum()) == 6 + 20 + 20 + 1
    )  # patterns, means of some, points of the hull, the mean of all
    assert (found.residual <= 1e-9).all()
    memory = Hopfield(x, 0.5)
    for point, members, weight in zip(found.state, found.members, found.weight, strict=True):
        y = oracle.weights(point[None] @ x.T, 0.5, "softmax")[0]
        assert torch.allclose(weights(memory, point), y, atol=1e-9)
        assert torch.allclose(weight, y[members], atol=1e-9)
        assert y[members].sum() >= 0.9
        covariance = (x - y @ x).T @ ((x - y @ x) * y[:, None])
        assert torch.allclose(jacobian(memory, point[None])[0], 0.5 * covariance, atol=1e-9)
    assert torch.allclose(found.energy, memory.energy(found.state))
    sharp = Hopfield(x, 200.0, similarity="euclidean").metastable(x)
    assert sharp.single.all()
    assert sharp.stable.all()
    assert sorted(int(m[0]) for m in sharp.members) == list(range(6))
    blunt = Hopfield(x, 0.05).metastable(count=30, generator=seeded())
    assert len(blunt.state) == 1
    assert len(blunt.members[0]) == 6


def test_a_saddle_is_told_from_an_attractor():
    memory = Hopfield(torch.tensor([[2.0, 0.0], [-2.0, 0.0]], dtype=F64), 1.0)
    found = memory.metastable(torch.tensor([[0.0, 0.0], [1.0, 0.5], [-1.0, 0.5]], dtype=F64))
    middle = found.state.norm(dim=-1) < 1e-6
    assert middle.sum() == 1
    assert float(found.spectral_radius[middle]) == pytest.approx(4.0)  # β Cov = 1 · 4
    assert not found.stable[middle].any()
    assert found.stable[~middle].all()


@pytest.mark.parametrize("separation", ["sparsemax", "max", "polynomial"])
def test_metastable_states_of_other_separations(separation):
    x = torch.randn(12, 4, dtype=F64, generator=seeded())
    memory = Hopfield(x, 1.0, separation=separation)
    found = memory.metastable(count=20, generator=seeded())
    for point in found.state:
        y = oracle.weights(point[None] @ x.T, 1.0, separation)[0]
        assert torch.allclose(weights(memory, point), y, atol=1e-8)
    assert torch.allclose(memory.step(found.state), found.state, atol=1e-6)


def test_capacity_grows_exponentially_and_above_theory():
    found = storage_capacity([6, 9, 12], seeds=3, most=512)
    assert not found.limited.any()
    assert (found.mean.diff() > 0).all()
    assert 0.25 < found.exponent[0] < 0.7  # about ½ for β = K = 1; theory's ¼ log c is far below
    assert (found.mean > torch.tensor([b.count for b in found.bounds], dtype=F64)).all()
    assert (found.interval[:, 0] <= found.mean).all()
    for i, d in enumerate((6, 9)):  # the very edge: all of N are recalled, of one more not
        for j in range(3):
            patterns = sphere(512, d, math.sqrt(d - 1), seeded(1000 * j + d))
            N = int(found.count[i, j])
            assert N == 1 or Hopfield(patterns[:N], 1.0).capacity(max_steps=200).count == N
            assert N >= 32 or Hopfield(patterns[: N + 1], 1.0).capacity(max_steps=200).count <= N
    assert storage_capacity([6, 9], beta=5.0, seeds=1, most=8).limited.all()


def test_one_seed_has_no_interval():
    assert storage_capacity([4, 6], seeds=1, most=8).interval.isnan().all()
    assert (
        Hopfield(torch.eye(3, dtype=F64), 5.0).basin(directions=1, generator=seeded()).interval.isnan().all()
    )


def test_without_noise_one_trial_says_it():
    found = Hopfield(torch.eye(3, dtype=F64), 9.0).capacity(trials=5)
    assert found.recalled.shape == found.error.shape == (1, 3)
    low, high = scipy.stats.binomtest(3, 3).proportion_ci(0.95)
    assert found.interval == pytest.approx((low, high))
