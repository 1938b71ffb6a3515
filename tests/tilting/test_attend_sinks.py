"""Statistics and derivatives beside a sink that has the largest score, or nearly all of the weight."""

import math

import mpmath
import pytest
import torch
from torch.func import grad, jvp

import exptilt as xt
from exptilt._support.errors import ArgumentError
from tilting.cases import FIELDS, normal

BACKENDS = ("reference", "tiled", "cpu")
RULES = ("tiled", "cpu")  # with derivatives of their own; torch differentiates the reference
ROWS = ("log_normalizer", "entropy", "score_mean", "score_variance", "output")
NAMES = ("query", "key", "value", "bias", "log_weight", "sink")


def draw(*shape, seed):
    """Numbers that float32 holds exactly, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def plain(t):
    """Every statistic as one would write it in plain torch, in the dtype of the tensors."""
    s = t["query"] @ t["key"].mT / t["query"].shape[-1] ** 0.5 + t["bias"] + t["log_weight"][..., None, :]
    s = torch.cat([s, t["sink"][..., None, None].expand(*s.shape[:-1], 1)], -1)
    p = s.softmax(-1)
    mean = (p * s).sum(-1)
    return {
        "output": p[..., :-1] @ t["value"],
        "log_normalizer": s.logsumexp(-1),
        "entropy": -(p * s.log_softmax(-1)).sum(-1),
        "score_mean": mean,
        "score_variance": (p * (s - mean[..., None]).square()).sum(-1),
        "key_mass": p[..., :-1].sum(-2),
    }


def ours(t, backend):
    options = {name: t[name] for name in ("bias", "log_weight", "sink")}
    found = xt.attend(t["query"], t["key"], t["value"], key_mass=True, backend=backend, **options)
    return {name: getattr(found, name) for name in (*ROWS, "key_mass")}


def problem(sink, spread=1.0, queries=5, keys=7):
    shapes = {"query": (2, queries, 4), "key": (2, keys, 4), "value": (2, keys, 3)}
    shapes |= {"bias": (2, queries, keys), "log_weight": (2, keys)}
    t = {name: draw(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    t = {name: x * spread if name != "value" else x for name, x in t.items()}
    t = {name: x.float().double() for name, x in t.items()}
    return t | {"sink": torch.full((2,), float(sink), dtype=torch.float64)}


def to(dtype, t):
    return {name: x.to(dtype) for name, x in t.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("spread", "sink"), [(0.02, 1.0), (0.02, 3.0), (0.1, 2.0), (0.3, 3.0)])
def test_a_mean_that_is_far_below_the_sink(backend, spread, sink):
    """The sink has the largest score, the keys much of the weight: the mean is not measured from the sink."""
    t = problem(sink, spread, queries=64, keys=50)
    exact, rival = plain(t), plain(to(torch.float32, t))
    found = ours(to(torch.float32, t), backend)
    for name in ROWS:
        error, theirs = ((x[name].double() - exact[name]).abs().max() for x in (found, rival))
        assert error <= 2 * theirs, (name, error, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [20.0, 25.0, 30.0])
def test_what_is_left_to_the_keys(backend, sink):
    """Weights of 1e-9 and less, at a distance that float32 rounds, are as exact as those of 1."""
    t = problem(sink, 0.1, queries=64, keys=50)
    exact, rival = plain(t), plain(to(torch.float32, t))
    found = ours(to(torch.float32, t), backend)
    for name in ("output", "score_variance", "key_mass"):
        error, theirs = ((x[name].double() - exact[name]).abs().max() for x in (found, rival))
        assert error <= 2 * theirs, (name, error, theirs)


def second_derivatives(function, t, field):
    """Forward derivatives, along every input, of the gradient of a random sum of one field, by name."""
    dtype = t["query"].dtype

    def total(*x):
        y = function(dict(zip(NAMES, x, strict=True)))[field]
        return (y * draw(*y.shape, seed=20).to(dtype)).sum()

    point = tuple(t[name] for name in NAMES)
    found = {}
    for moving in (*NAMES, "all"):
        along = tuple(
            draw(*x.shape, seed=30 + i).to(dtype) if moving in (name, "all") else torch.zeros_like(x)
            for i, (name, x) in enumerate(zip(NAMES, point, strict=True))
        )
        pushed = jvp(grad(total, tuple(range(len(NAMES)))), point, along)[1]
        found |= {(moving, name): x.double() for name, x in zip(NAMES, pushed, strict=True)}
    return found


@pytest.mark.parametrize("backend", RULES)
@pytest.mark.parametrize(
    "sink", [20.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (5.0, 10.0, 30.0))]
)
@pytest.mark.parametrize("field", ["output", "entropy", "score_mean", "score_variance", "key_mass"])
def test_second_derivatives(backend, sink, field):
    """By every pair of inputs; errors relative to the largest entry, at most 4 times those of plain torch.

    At a sink of 20 the second derivative of key_mass by the sink was 0.
    """
    t = problem(sink)
    exact, rival = second_derivatives(plain, t, field), second_derivatives(plain, to(torch.float32, t), field)
    found = second_derivatives(lambda t: ours(t, backend), to(torch.float32, t), field)
    for name, right in exact.items():
        size = right.abs().max()
        if size > 0:
            error, theirs = ((x[name] - right).abs().max() / size for x in (found, rival))
            assert error <= 4 * theirs + 2e-6, (name, error, theirs)


def third(scores, sink):
    """Σ_j of ∂²p_j/∂sink², by mpmath: P = 1 − p_s, P'' = P p_s (2 p_s − 1) of the keys' weight P."""
    with mpmath.workdps(60):
        keys, own = sum(mpmath.exp(x) for x in scores), mpmath.exp(sink)
        share, p = keys / (keys + own), own / (keys + own)
        return float(share * p * (2 * p - 1))


@pytest.mark.parametrize("backend", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sink", [-5.0, 0.0, 3.0, 10.0, 20.0, 30.0, 60.0])
def test_key_mass_twice_by_the_sink(backend, dtype, sink):
    scores = [0.5, -1.0, 2.0, 0.25]
    key = torch.tensor(scores, dtype=dtype)[None, :, None]
    one = torch.ones(1, 1, 1, dtype=dtype)

    def mass(sink):
        return xt.attend(one, key, key, scale=1.0, sink=sink, key_mass=True, backend=backend).key_mass.sum()

    at = torch.tensor([sink], dtype=dtype, requires_grad=True)
    (first,) = torch.autograd.grad(mass(at), at, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), at)
    pushed = jvp(grad(mass), (at.detach(),), (torch.ones_like(at),))[1]
    right = third(scores, sink)
    for found in (second, pushed):
        assert abs(found.item() - right) <= 30 * torch.finfo(dtype).eps * abs(right)


@pytest.mark.parametrize("backend", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sink", [10.0, 20.0, 30.0])
def test_entropy_and_variance_twice_by_the_sink(backend, dtype, sink):
    """One key at score 0: all weight but w = 1 / (1 + e^sink) is the sink's, in closed form by mpmath."""
    one = torch.ones(1, 1, 1, dtype=dtype)

    def statistics(sink):
        found = xt.attend(one, 0 * one, one, sink=sink, backend=backend)
        return found.entropy.sum(), found.score_variance.sum()

    at = torch.tensor([sink], dtype=dtype)
    found = [
        jvp(grad(lambda x, i=i: statistics(x)[i]), (at,), (torch.ones_like(at),))[1].item() for i in (0, 1)
    ]
    with mpmath.workdps(60):
        entropy = mpmath.diff(lambda s: mpmath.log1p(mpmath.exp(-s)) + s / (1 + mpmath.exp(s)), sink, 2)
        variance = mpmath.diff(lambda s: s * s * mpmath.exp(s) / (1 + mpmath.exp(s)) ** 2, sink, 2)
    for value, right in zip(found, (float(entropy), float(variance)), strict=True):
        assert abs(value - right) <= 60 * torch.finfo(dtype).eps * abs(right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edge", ["-inf", "finfo.min"])
def test_a_sink_that_nothing_falls_into(backend, dtype, edge):
    """As without a sink: every statistic, the key mass, every gradient and tangent."""
    at = -math.inf if edge == "-inf" else torch.finfo(dtype).min
    q, k, v = (
        normal(0, 2, 3, 4, dtype=dtype),
        normal(1, 2, 5, 4, dtype=dtype),
        normal(2, 2, 5, 3, dtype=dtype),
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sink = torch.full((2,), at, dtype=dtype, requires_grad=True)
    found = xt.attend(q, k, v, sink=sink, key_mass=True, backend=backend)
    expected = xt.attend(q, k, v, key_mass=True, backend="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=tolerance, atol=tolerance, msg=name
        )

    def total(a):
        return (
            a.output.sin().sum()
            + sum((i + 1) * getattr(a, name).sum() for i, name in enumerate(FIELDS[1:6]))
            + a.key_mass.square().sum()
        )

    *slopes, by_sink = torch.autograd.grad(total(found), (q, k, v, sink))
    for x, y in zip(slopes, torch.autograd.grad(total(expected), (q, k, v)), strict=True):
        torch.testing.assert_close(x, y, rtol=10 * tolerance, atol=10 * tolerance)
    assert (by_sink == 0).all()

    def mass(q, sink=None):
        a = xt.attend(q, k.detach(), v.detach(), sink=sink, key_mass=True, backend=backend)
        return a.key_mass, a.score_mean, a.score_variance

    moved = torch.func.jvp(mass, (q.detach(), sink.detach()), (torch.ones_like(q), torch.ones_like(sink)))[1]
    for x, y in zip(moved, torch.func.jvp(mass, (q.detach(),), (torch.ones_like(q),))[1], strict=True):
        torch.testing.assert_close(x, y, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_where_no_key_is_seen(backend):
    """Nothing at all is seen: zeros, and a log-normalizer of −inf; derivatives are 0."""
    q, k = normal(0, 1, 3, 4).requires_grad_(), normal(1, 1, 5, 4)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    a = xt.attend(q, k, k, mask=mask, sink=torch.tensor([-math.inf]), key_mass=True, backend=backend)
    assert a.log_normalizer[0, 1] == -math.inf
    assert a.score_max[0, 1] == -math.inf
    assert (a.output[0, 1] == 0).all()
    for name in ("entropy", "score_mean", "score_variance"):
        assert getattr(a, name)[0, 1] == 0
    (slope,) = torch.autograd.grad(
        a.output.sum() + a.entropy.sum() + a.score_variance.sum() + a.key_mass.sum(), q
    )
    assert slope.isfinite().all()
    assert (slope[0, 1] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sink_that_is_no_score(backend, bad):
    q, k = normal(0, 2, 3, 4), normal(1, 2, 5, 4)
    with pytest.raises(ArgumentError, match="sink"):
        xt.attend(q, k, k, sink=torch.tensor([0.0, bad]), check=True, backend=backend)
    with pytest.raises(ArgumentError, match="sink"):
        xt.log_normalizer(q, k, sink=torch.tensor([0.0, bad]), check=True, backend=backend)
