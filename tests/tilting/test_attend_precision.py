"""How exact sums over many keys and over many queries are, and scores far from zero."""

import math

import pytest
import torch

import exptilt as xt
from tilting.cases import normal


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("far", [1e4, 1e7, -1e7])
def test_four_equal_scores_far_from_zero(backend, far):
    """Four queries on keys whose scores are all alike: a mass of 4 in all, however far the scores."""
    q, k = torch.zeros(1, 4, 2), normal(0, 1, 4, 2)
    v = torch.ones(1, 4, 1, requires_grad=True)
    a = xt.attend(q, k, v, bias=torch.full((4, 4), far), key_mass=True, backend=backend)
    assert abs(a.key_mass.sum().item() - 4) < 1e-5
    torch.testing.assert_close(a.key_mass, torch.ones(1, 4), rtol=1e-6, atol=0)
    torch.testing.assert_close(a.output, torch.ones(1, 4, 1), rtol=1e-6, atol=0)
    torch.testing.assert_close(a.entropy, torch.full((1, 4), math.log(4)), rtol=1e-6, atol=0)
    (slope,) = torch.autograd.grad(a.output.sum(), v)
    torch.testing.assert_close(slope, torch.ones(1, 4, 1), rtol=1e-6, atol=0)


def _rival(q, k, v):
    """Plain torch with the whole matrix; its own sum adds pairwise, where matrix products differ from
    machine to machine.
    """
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    p, log_p = torch.softmax(s, -1), torch.log_softmax(s, -1)
    top = s.amax(-1)
    mean = top + (p * (s - top[..., None])).sum(-1)
    variance = (p * (s - mean[..., None]).square()).sum(-1)
    return {
        "output": (p[..., None] * v[..., None, :, :]).sum(-2),
        "log_normalizer": torch.logsumexp(s, -1),
        "entropy": -(p * log_p).sum(-1),
        "score_mean": mean,
        "score_variance": variance,
        "key_mass": p.sum(-2),
    }


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("pattern", ["uniform", "normal"])
@pytest.mark.parametrize("keys", [10**4, 3 * 10**5, 10**6])
def test_sums_over_many_keys(backend, pattern, keys):
    """float32 within twice the error of plain torch, which adds pairwise, plus 12 eps of the largest."""
    g = torch.Generator().manual_seed(keys)
    make = torch.rand if pattern == "uniform" else torch.randn
    q, k = make(1, 2, 4, generator=g), make(1, keys, 4, generator=g)
    v = make(1, keys, 2, generator=g)
    truth, plain = _rival(q.double(), k.double(), v.double()), _rival(q, k, v)
    found = xt.attend(q, k, v, key_mass=True, backend=backend)
    eps, wrong = torch.finfo(torch.float32).eps, []
    for name, y in truth.items():
        ours, theirs = (getattr(found, name) - y).abs().max().item(), (plain[name] - y).abs().max().item()
        if not ours <= 2 * theirs + 12 * eps * y.abs().max().item():
            wrong.append(f"{name}: {ours:.2e}, plain torch {theirs:.2e}")
    assert not wrong, wrong


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_gradients_of_sums_over_many_queries(backend):
    """The keys' gradient and mass sum over queries, the queries' over keys."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.rand(1, 20000, 4, generator=g),
        torch.rand(1, 6, 4, generator=g),
        torch.rand(1, 6, 2, generator=g),
    )
    bar = torch.rand(1, 20000, 2, generator=g)

    def slopes(attend, *x):
        x = [y.detach().requires_grad_() for y in x]
        return torch.autograd.grad((attend(*x) * bar.to(x[0].dtype)).sum(), x)

    def plain(q, k, v):
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v

    truth, theirs = slopes(plain, q.double(), k.double(), v.double()), slopes(plain, q, k, v)
    found = slopes(lambda *x: xt.attend(*x, backend=backend).output, q, k, v)
    eps = torch.finfo(torch.float32).eps
    for name, x, y, z in zip(("query", "key", "value"), found, theirs, truth, strict=True):
        ours, rival = (x - z).abs().max().item(), (y - z).abs().max().item()
        assert ours <= 2 * rival + 12 * eps * z.abs().max().item(), (
            f"{name}: {ours:.2e}, plain torch {rival:.2e}"
        )
