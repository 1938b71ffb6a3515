"""Results joined from parts have at most about twice the error of plain torch over all keys at once."""

import itertools

import pytest
import torch

import exptilt as xt

BACKENDS = ("reference", "tiled", "cpu")
ROWS = ("log_normalizer", "entropy", "score_mean", "score_variance", "output")
CUTS = ((0, 20, 40), (0, 10, 20, 30, 40), (0, 5, 40))


def plain(s, v):
    """As one would write it, in the dtype of the scores."""
    p = s.softmax(-1)
    mean = (p * s).sum(-1)
    return {
        "log_normalizer": s.logsumexp(-1),
        "entropy": -(p * s.log_softmax(-1)).sum(-1),
        "score_mean": mean,
        "score_variance": (p * (s - mean[..., None]).square()).sum(-1),
        "output": p @ v,
    }


def scores(spread, apart, common):
    """(1, 64, 40) in float32, the second half of the keys below the first, and values."""
    generator = torch.Generator().manual_seed(0)
    s, v = torch.randn(1, 64, 40, generator=generator), torch.randn(1, 40, 3, generator=generator)
    return spread * s + common - apart * (torch.arange(40) >= 20), v


def joined(s, v, cuts, backend):
    """`merge` of parts of the keys; the scores come in by a bias, so nobody rounds them."""
    none = torch.zeros(1, 64, 1, dtype=s.dtype), torch.zeros(1, 40, 1, dtype=s.dtype)
    return xt.merge(
        [
            xt.attend(none[0], none[1][:, a:b], v[:, a:b], bias=s[..., a:b], backend=backend)
            for a, b in itertools.pairwise(cuts)
        ]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("common", [1.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("apart", [0.0, 5.0, 40.0, 3e4, 1e6])
def test_float32_is_as_good_as_plain_torch(backend, apart, common):
    """The parts of a reference result were once made up from its rounded log-normalizer: 6 % off at 1e6."""
    for spread, cuts in itertools.product((0.01, 1.0, 30.0), CUTS):
        s, v = scores(spread, apart, common)
        exact, rival = plain(s.double(), v.double()), plain(s, v)
        found = joined(s, v, cuts, backend)
        for name in ROWS:
            error, theirs = (
                (x.double() - exact[name]).abs().max() for x in (getattr(found, name), rival[name])
            )
            rounding = (
                2.4e-7 * exact[name].abs().max()
            )  # two units in the last place: plain torch may be lucky
            assert error <= 2 * theirs + rounding, (name, spread, cuts, error, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_mean_of_parts_on_both_sides(backend):
    """Keys near 1 and near −1, and one at 2: the mean is smaller than the largest score."""
    generator = torch.Generator().manual_seed(0)
    s = torch.cat([1 + 0.01 * torch.randn(1, 64, 20, generator=generator), torch.zeros(1, 64, 20)], -1)
    s[..., 20:] = -s[..., :20]
    s[..., 0] = 2.0
    v = torch.randn(1, 40, 3, generator=generator)
    exact, rival = plain(s.double(), v.double()), plain(s, v)
    for cuts in CUTS:
        found = joined(s, v, cuts, backend)
        error, theirs = (
            (x.double() - exact["score_mean"]).abs().max() for x in (found.score_mean, rival["score_mean"])
        )
        assert error <= 2 * theirs


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_certain_part(backend):
    """Where a part has all weight but 1e-9, entropy and variance keep their digits."""
    s, v = scores(0.1, 21.0, 0.0)
    exact = plain(s.double()[..., 19:], v.double()[:, 19:])  # one key above, twenty below
    zero = torch.zeros(1, 64, 1), torch.zeros(1, 40, 1)
    parts = [
        xt.attend(zero[0], zero[1][:, a:b], v[:, a:b], bias=s[..., a:b], backend=backend)
        for a, b in ((19, 20), (20, 40))
    ]
    found = xt.merge(parts)
    for name in ("entropy", "score_variance"):
        assert ((getattr(found, name).double() - exact[name]).abs() <= 1e-6 * exact[name]).all(), name


def test_half_precision_is_joined_in_float32():
    """Outputs are rounded once, at the end."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 8, generator=generator).bfloat16() for n in (64, 40, 40))
    parts = [xt.attend(q, k[:, i : i + 5], v[:, i : i + 5]) for i in range(0, 40, 5)]
    outputs = torch.stack([part.output.double() for part in parts])
    w = torch.stack([part.log_normalizer.double() for part in parts]).softmax(0)
    right, found = (w[..., None] * outputs).sum(0), xt.merge(parts)
    assert found.output.dtype == torch.bfloat16
    assert ((found.output.double() - right).abs() <= 1.02 * 2**-8 * right.abs() + 1e-6).all()


def test_gradients_of_reference_parts_agree():
    """Values come from shift, weight and gap of a part, derivatives from its results, for any backend."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 4, generator=generator, dtype=torch.float64) for n in (3, 9))
    found = {}
    for backend in (*BACKENDS, "whole"):
        x = (3 * k).requires_grad_()
        if backend == "whole":
            a = xt.attend(q, x, x)
        else:
            a = xt.merge([xt.attend(q, y, y, backend=backend) for y in x.split((2, 3, 4), 1)])
        total = (
            a.output.sin().sum()
            + (a.entropy.square() + a.score_mean + a.score_variance + a.log_normalizer).sum()
        )
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        found[backend] = first.detach(), *torch.autograd.grad(first.square().sum(), x)
    for backend in BACKENDS:
        for a, b in zip(found[backend], found["whole"], strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), backend
