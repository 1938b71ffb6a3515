"""`attend` against the n×n reference, and the reference against one key at a time."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import exptilt as xt
from exptilt.tilting.backends import cpu, layout, tiled
from oracles import attention as oracle
from tilting.cases import FIELDS, close, normal, problems

BACKENDS = ("cpu", "tiled")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles as for a processor with hardly any cache, and plain torch's alike."""
    small = layout.Tuning(cache_bytes=1 << 10)
    monkeypatch.setattr(cpu, "tuning", lambda: small)
    monkeypatch.setattr(tiled, "_TILE_CELLS", 1 << 16)


@pytest.fixture
def many_parts(small_tiles, monkeypatch):
    """Any work is worth a thread; a function that sets how many there are, and the parts joined each time."""
    tuned = cpu.tuning()._replace(worth_a_thread=1)
    monkeypatch.setattr(cpu, "tuning", lambda: tuned)
    joined, run = [], layout.Layout.run

    def spy(self, f, sweep, units):
        if sweep == "forward" and f.key_parts > 1:
            joined.append(f.key_parts)
        run(self, f, sweep, units)

    monkeypatch.setattr(layout.Layout, "run", spy)
    before = torch.get_num_threads()
    yield joined
    torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(problems(largest=7, batch_axes=0))
def test_reference_against_one_key_at_a_time(problem):
    query, key, value, options = problem
    options = {name: x.reshape(x.shape[-2:]) if name == "log_weight" else x for name, x in options.items()}
    if "log_weight" in options:
        options["log_weight"] = options["log_weight"].expand(key.shape[:2])
    found = xt.attend(query, key, value, key_mass=True, backend="reference", **options)
    expected = oracle.attend(query, key, value, **options)
    for name in FIELDS:
        assert close(getattr(found, name), expected[name], 1e-10), name


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_backends_against_reference(backend, problem):
    query, key, value, options = problem
    found = xt.attend(query, key, value, key_mass=True, backend=backend, **options)
    expected = xt.attend(query, key, value, key_mass=True, backend="reference", **options)
    for name in FIELDS:
        a, b = getattr(found, name), getattr(expected, name)
        assert a.shape == b.shape
        assert close(a, b, 1e-11), name
    G = xt.log_normalizer(query, key, backend=backend, **options)
    assert close(G, expected.log_normalizer, 1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 70}, {"window": 300}])
def test_many_tiles(backend, options, small_tiles):
    """Lengths that are not multiples of a tile, with several tiles each way."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 777, 16), torch.randn(1, 1, 1301, 16), torch.randn(1, 1, 1301, 24)
    query, key, value = query.double(), key.double(), value.double()
    found = xt.attend(query, key, value, key_mass=True, backend=backend, **options)
    expected = xt.attend(query, key, value, key_mass=True, backend="reference", **options)
    for name in FIELDS:
        assert close(getattr(found, name), getattr(expected, name), 1e-11), name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(largest=150), threads=st.integers(2, 9))
def test_keys_in_parts(many_parts, problem, threads):
    """More threads than tiles of queries: each takes a part of the keys, some of them hidden from all."""
    query, key, value, options = problem
    torch.set_num_threads(threads)
    found = xt.attend(query, key, value, **options)
    expected = xt.attend(query, key, value, backend="reference", **options)
    for name in FIELDS[:-1]:
        assert close(getattr(found, name), getattr(expected, name), 1e-11), name


@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 70}, {"window": 300}])
def test_gradients_of_queries_in_turns(many_parts, monkeypatch, heads, options):
    """Many rows are swept in turns, each with a copy for each part of the keys that its rows see."""
    tuned = cpu.tuning()._replace(copies_bytes=1)
    monkeypatch.setattr(cpu, "tuning", lambda: tuned)
    torch.set_num_threads(2)
    turns, run = [], layout.Layout.run

    def spy(self, f, sweep, units):
        turns.append((f.row_tile_from, f.row_tile_to))
        run(self, f, sweep, units)

    monkeypatch.setattr(layout.Layout, "run", spy)
    g = torch.Generator().manual_seed(0)
    shapes = (1, heads[0], 777, 16), (1, heads[1], 901, 16), (1, heads[1], 901, 16)
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]

    def gradients(backend):
        found = xt.attend(*tensors, backend=backend, **options)
        total = found.output.square().sum() + found.entropy.sum() + found.log_normalizer.square().sum()
        return torch.autograd.grad(total, tensors)

    for a, b in zip(gradients("cpu"), gradients("reference"), strict=True):
        assert close(a, b, 1e-10)
    begins = [begin for begin, _ in turns]
    assert len([x for x in begins if x > 0]) >= 2
    assert turns[-1][1] == -(-heads[0] * 777 // 132)


def test_a_batch_of_one_that_the_keys_do_not_have():
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 1, 3, 4, generator=g), torch.randn(1, 5, 4, generator=g)
    torch.testing.assert_close(xt.attend(query, key, key).output[0], xt.attend(query[0], key, key).output)


def test_the_first_of_equal_maxima_wins_across_parts(many_parts):
    """The maximum's derivative goes to one key: that of the lowest place, wherever parts begin."""
    torch.set_num_threads(4)
    query, key = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 100, 1, dtype=torch.float64)
    key[0, [40, 90]] = 2.0
    key.requires_grad_()
    (slope,) = torch.autograd.grad(xt.attend(query, key, key.detach(), scale=1.0).score_max.sum(), key)
    assert slope.nonzero()[:, 1].tolist() == [40]
    assert many_parts
    assert min(many_parts) > 1


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_query_that_sees_nothing(backend):
    q, k = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    for options in (
        {"mask": torch.zeros(3, 5, dtype=torch.bool)},
        {"window": 0},
        {"bias": torch.full((3, 5), -torch.inf)},
    ):
        a = xt.attend(q, k, k, key_mass=True, backend=backend, **options)
        assert (a.log_normalizer == -torch.inf).all()
        assert (a.score_max == -torch.inf).all()
        for name in ("output", "entropy", "score_mean", "score_variance", "key_mass"):
            assert (getattr(a, name) == 0).all(), name


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_no_keys_no_queries_no_batch(backend):
    for Q, K, N in ((3, 0, 2), (0, 3, 2), (0, 0, 1), (3, 3, 0)):
        a = xt.attend(
            torch.ones(N, 2, Q, 4),
            torch.ones(N, 2, K, 4),
            torch.ones(N, 2, K, 5),
            key_mass=True,
            backend=backend,
        )
        assert a.output.shape == (N, 2, Q, 5)
        assert a.entropy.shape == (N, 2, Q)
        assert a.key_mass.shape == (N, 2, K)
        if K == 0:
            assert (a.log_normalizer == -torch.inf).all()
            assert (a.output == 0).all()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_sink_where_no_key_is_seen(backend):
    q, k = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 0, 4, dtype=torch.float64)
    sink = torch.tensor([0.5, -2.0], dtype=torch.float64)
    a = xt.attend(q, k, k, sink=sink, backend=backend)
    assert torch.allclose(a.log_normalizer, sink[:, None].expand(2, 3))
    assert torch.allclose(a.score_mean, sink[:, None].expand(2, 3))
    assert (a.entropy.abs() < 1e-12).all()
    assert (a.output == 0).all()
    assert (a.score_max == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores(backend, size):
    """Scores of ±1e4 with −inf among them: entropy, variance and output as without the offset."""
    torch.manual_seed(1)
    s = torch.randn(6, 9, dtype=torch.float64)
    s[0, :4], s[1, 2:], s[2, :] = -torch.inf, -torch.inf, -torch.inf
    q, k, v = (
        torch.zeros(1, 6, 2, dtype=torch.float64),
        torch.zeros(1, 9, 2, dtype=torch.float64),
        torch.randn(1, 9, 3, dtype=torch.float64),
    )
    far, near = (
        xt.attend(q, k, v, bias=s + size, backend=backend),
        xt.attend(q, k, v, bias=s, backend="reference"),
    )
    for name in ("output", "entropy", "score_variance"):
        assert close(getattr(far, name), getattr(near, name), 1e-10), name
    assert close(far.log_normalizer - size, near.log_normalizer, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_score_towers_over_the_rest(backend):
    q, k = torch.tensor([[[1e4]]]), torch.tensor([[[1.0], [-1.0], [0.0]]])
    a = xt.attend(q, k, k, scale=1.0, backend=backend)
    assert a.output.item() == 1.0
    assert a.log_normalizer.item() == 1e4
    assert a.entropy.item() == 0.0
    assert a.score_variance.item() == 0.0


@settings(max_examples=40, deadline=None)
@given(problem=problems(largest=60, dtype=torch.float32, least_keys=1), size=st.sampled_from([0.3, 1.0, 3.0]))
def test_float32_is_as_good_as_plain_torch(problem, size):
    """Error against float64 at most twice that of plain float32 torch, plus a few units in the last place."""
    query, key, value, options = problem
    query = query * size
    wide = {
        name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in options.items()
    }
    exact = xt.attend(
        query.double(), key.double(), value.double(), key_mass=True, backend="reference", **wide
    )
    plain = xt.attend(query, key, value, key_mass=True, backend="reference", **options)
    ours = xt.attend(query, key, value, key_mass=True, **options)
    for name in FIELDS:
        e, p, o = (getattr(x, name).double() for x in (exact, plain, ours))
        finite = torch.isfinite(e)
        assert torch.equal(torch.isfinite(o), finite), name
        if finite.any():
            scale = 1 + e[finite].abs().max()
            score = (
                1 + exact.score_max[torch.isfinite(exact.score_max)].abs().max()
                if torch.isfinite(exact.score_max).any()
                else 1
            )
            floor = 4e-7 * scale * score
            assert (o - e)[finite].abs().max() <= 2 * (p - e)[finite].abs().max() + floor, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 50, 16).to(dtype) for _ in range(3))
    a = xt.attend(q, k, v, causal=True)
    exact = xt.attend(q.double(), k.double(), v.double(), causal=True, backend="reference")
    assert a.output.dtype == dtype
    assert a.entropy.dtype == torch.float32
    assert torch.allclose(
        a.output.double(), exact.output, atol=torch.finfo(dtype).eps * exact.output.abs().max().item()
    )
    assert torch.allclose(a.entropy.double(), exact.entropy, atol=1e-5)
    assert torch.allclose(a.log_normalizer.double(), exact.log_normalizer, atol=1e-5)


def test_variance_does_not_cancel():
    """Nearly all weight at score 0 and one key at 1: a variance of 1e-5, found to five digits in float32."""
    n = 1 << 18
    q, k = torch.zeros(1, 1, 1), torch.zeros(1, n, 1)
    weight = torch.zeros(1, n)
    weight[0, 17] = 1.0
    p = torch.tensor(1.0, dtype=torch.float64).exp() / (n - 1 + torch.tensor(1.0, dtype=torch.float64).exp())
    a = xt.attend(q, k, k, log_weight=weight)
    assert torch.allclose(a.score_variance.double(), p * (1 - p), rtol=1e-5)


def test_key_mass_counts_queries():
    q, k = torch.randn(2, 7, 4), torch.randn(2, 5, 4)
    mass = xt.attend(q, k, k, key_mass=True).key_mass
    assert torch.allclose(mass.sum(-1), torch.full((2,), 7.0))


def test_decoding_step_equals_last_row():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    whole, step = xt.attend(q, k, v, causal=True), xt.attend(q[:, :, -1:], k, v, causal=True)
    for name in FIELDS[:-1]:
        assert torch.allclose(getattr(whole, name)[:, :, -1:], getattr(step, name), atol=1e-5), name


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [10**6, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 10**30])
def test_a_window_without_end(backend, causal, window):
    """As if there were none, and its gradients too."""
    q, k = normal(0, 2, 5, 4).requires_grad_(), normal(1, 2, 9, 4)
    found, expected = (
        xt.attend(q, k, k, causal=causal, window=w, key_mass=True, backend=backend) for w in (window, None)
    )
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)
    x, y = (torch.autograd.grad(a.output.sum() + a.key_mass.square().sum(), q)[0] for a in (found, expected))
    torch.testing.assert_close(x, y)


def test_dropout_again():
    """The second call of a kind takes the short way to the kernel, which knows nothing of dropped weights."""
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 40, 8, generator=g)
    mask = torch.rand(40, 40, generator=g) > 0.3
    for options in ({}, {"mask": mask}):
        first, again = (xt.attend(query, key, value, dropout=0.5, seed=3, **options) for _ in range(2))
        expected = xt.attend(query, key, value, dropout=0.5, seed=3, backend="tiled", **options)
        torch.testing.assert_close(first.output, expected.output)
        torch.testing.assert_close(again.output, expected.output)
