"""Statistics beside a sink that has the largest score, or nearly all of the weight."""

import pytest
import torch

import exptilt as xt

BACKENDS = ("reference", "tiled", "cpu")
ROWS = ("log_normalizer", "entropy", "score_mean", "score_variance", "output")


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
