"""The third cumulant of the scores, against the whole matrix and the entropy's second derivative."""

from importlib import import_module

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import exptilt as xt
from oracles import two_measures as plain

F64 = torch.float64
CASES = [
    {},
    {"causal": True, "softcap": 2.0, "scale": 0.7},
    {"window": 3, "log_weight": True, "sink": True},
    {"mask": True, "bias": True, "softcap": 3.0},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(import_module("exptilt.taylor.skewness"), "CELLS", 100)


def problem(options, Q=5, K=7):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, dtype=F64, generator=generator)  # noqa: E731
    made = {
        "log_weight": draw(2, K),
        "sink": draw(4),
        "bias": draw(4, Q, K),
        "mask": torch.rand(Q, K, generator=generator) > 0.3,
    }
    given = {name: made[name] if value is True and name in made else value for name, value in options.items()}
    return 2 * draw(2, 4, Q, 3), draw(2, 2, K, 3), given


def dense(q, k, options):
    s = plain.scores(q, k, **options)  # the sink is one more column
    p = s.softmax(-1)
    s = torch.where(p == 0, 0.0, s)
    centred = torch.where(p == 0, 0.0, s - (p * s).sum(-1, keepdim=True))
    return (p * centred**3).sum(-1), (p * centred**2).sum(-1)


@pytest.mark.parametrize("options", CASES)
def test_equals_the_whole_matrix(options):
    q, k, given = problem(options)
    third, variance = dense(q, k, given)
    torch.testing.assert_close(xt.score_skewness(q, k, **given, standardized=False), third)
    torch.testing.assert_close(xt.score_skewness(q, k, **given), third / variance**1.5)


def test_the_entropy_bends_by_it():
    """d²H/dβ² = −(Var + β κ₃), by differentiating the entropy of attend twice."""
    q, k, _ = problem({})
    beta = 0.8

    def entropy(b):
        return xt.attend(b * q, k, k, scale=1.0).entropy

    one = torch.ones((), dtype=F64)
    slope = lambda b: torch.func.jvp(entropy, (b,), (one,))[1]  # noqa: E731
    _, bend = torch.func.jvp(slope, (beta * one,), (one,))
    at = xt.attend(beta * q, k, k, scale=1.0)
    third = xt.score_skewness(beta * q, k, scale=1.0, standardized=False) / beta**3
    torch.testing.assert_close(bend, -(at.score_variance / beta**2 + beta * third))


@pytest.mark.parametrize("standardized", [True, False])
def test_derivatives(standardized):
    q, k, _ = problem({}, Q=2, K=4)
    function = lambda q, k: xt.score_skewness(q, k, softcap=2.0, standardized=standardized)  # noqa: E731
    inputs = q[0, :1].clone().requires_grad_(), k[0, :1].clone().requires_grad_()
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)


def test_no_spread_and_no_keys():
    q, k = torch.zeros(1, 2, 3), torch.ones(1, 4, 3)
    mask = torch.tensor([[True] * 4, [False] * 4])
    assert xt.score_skewness(q, k, mask=mask).tolist() == [[0, 0]]
    assert xt.score_skewness(q, k[:, :0]).tolist() == [[0, 0]]
    q.requires_grad_()
    xt.score_skewness(q, k, mask=mask).sum().backward()
    assert bool(q.grad.isfinite().all())


def test_far_scores_keep_their_digits():
    """Scores near 1e4 in float32: the sum about zero would have no digit left."""
    s = torch.tensor([0.0, 0.5, 1.0, 2.0])
    key = torch.ones(1, 4, 1)
    found = xt.score_skewness(torch.full((1, 1, 1), 1e4), key, scale=1.0, bias=s.reshape(1, 1, 4))
    wanted = xt.score_skewness(
        torch.zeros(1, 1, 1, dtype=F64), key.double(), bias=s.reshape(1, 1, 4).double()
    )
    assert abs(found.item() - wanted.item()) < 5e-3
