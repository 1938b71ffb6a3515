"""The divergence of two attentions equals that of their matrices, in value and in all derivatives."""

import sys

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import two_measures as plain

F64 = torch.float64
OPTIONS = [
    {},
    {"causal": True, "softcap": (2.0, None), "scale": (0.7, 1.3)},
    {"window": 3, "log_weight": True, "sink": True},
    {"mask": True, "bias": True, "softcap": 3.0},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sys.modules["exptilt.tilting.divergences"], "CELLS", 100)


def problem(Q=5, K=7, heads=4, lead=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, dtype=F64, generator=generator).requires_grad_()  # noqa: E731
    return draw(*lead, heads, Q, 3), draw(*lead, heads // 2, K, 3), draw(heads, Q, 2), draw(heads, K, 2)


def filled(options, Q=5, K=7, heads=4):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *s: torch.randn(*s, dtype=F64, generator=generator)  # noqa: E731
    made = {
        "log_weight": (draw(heads // 2, K), draw(heads, K)),
        "sink": (draw(heads), draw(heads)),
        "bias": (draw(heads, Q, K), draw(1, 1, K)),
        "mask": torch.rand(Q, K, generator=generator) > 0.3,
    }
    return {name: made[name] if value is True and name in made else value for name, value in options.items()}


def oracle(qp, kp, qq, kq, options, average=False):
    pick = lambda side: {  # noqa: E731
        n: v[side] if isinstance(v, tuple) else v for n, v in options.items()
    }
    log_p = plain.scores(qp, kp, **pick(0)).log_softmax(-1)
    log_q = plain.scores(qq, kq, **pick(1)).log_softmax(-1)
    if average:
        p = log_p.exp().mean(-3, keepdim=True)
        log_p = torch.where(p > 0, torch.where(p > 0, p, 1.0).log(), -torch.inf)
    return plain.kl(log_p, log_q)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_values_and_gradients(options, average, lead):
    tensors, options = problem(lead=lead), filled(options)
    found = xt.divergence(*tensors, average_heads=average, **options)
    want = oracle(*tensors, options, average)
    assert found.shape == want.shape
    assert (found >= 0).all()
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
    cotangent = torch.linspace(-1, 1, found.numel(), dtype=F64).reshape(found.shape)
    ours, theirs = (torch.autograd.grad(x, tensors, cotangent) for x in (found, want))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS[1:3])
def test_derivatives_forwards_and_twice(options):
    tensors, options = problem(3, 4, 2), filled(options, 3, 4, 2)
    run = lambda *x: xt.divergence(*x, **options).sum(-1)  # noqa: E731
    assert gradcheck(run, tensors, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(run, tensors, check_fwd_over_rev=True, fast_mode=True)


def test_gradients_reach_biases_weights_and_sinks():
    tensors, options = problem(), filled({"bias": True, "log_weight": True, "sink": True})
    extra = [x.requires_grad_() for name in ("bias", "log_weight", "sink") for x in options[name]]
    ours = torch.autograd.grad(xt.divergence(*tensors, **options).sum(), extra)
    theirs = torch.autograd.grad(oracle(*tensors, options).sum(), extra)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_under_transforms():
    q, k, r, s = (x.detach() for x in problem(lead=(3,)))
    each = torch.func.vmap(lambda q, k: torch.func.grad(lambda q: xt.divergence(q, k, r, s).sum())(q))(q, k)
    want = torch.func.grad(lambda q: oracle(q, k, r, s, {}).sum())(q)
    torch.testing.assert_close(each, want, rtol=1e-10, atol=1e-12)
    ours, theirs = (
        torch.func.jvp(lambda x, f=f: torch.func.jvp(f, (x,), (q,))[1], (q,), (q * q,))[1]
        for f in (lambda x: xt.divergence(x, k, r, s), lambda x: oracle(x, k, r, s, {}))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_small_divergences_keep_their_digits_in_float32():
    q, k, _, _ = problem(16, 64, 2)
    r = q.detach() * (1 + 1e-4)
    want = xt.divergence(q, k, r, k)
    q, k, r = (x.detach().float() for x in (q, k, r))
    found = xt.divergence(q, k, r, k)
    want = xt.divergence(q.double(), k.double(), r.double(), k.double())
    rough = plain.kl(plain.scores(q, k).log_softmax(-1), plain.scores(r, k).log_softmax(-1))
    assert (found - want).abs().max() < 0.02 * want.max()
    assert (found - want).abs().max() < 0.1 * (rough - want).abs().max()  # the plain sum is all rounding


def test_what_sees_nothing_and_what_only_one_side_sees():
    q, k = torch.randn(1, 3, 2, dtype=F64), torch.randn(1, 2, 2, dtype=F64)
    found = xt.divergence(q, k, 2 * q, k, causal=True)
    assert found[0, 0] == 0  # sees nothing
    assert found[0, 1] == 0  # sees one key: both are certain
    hidden = torch.tensor([0.0, -torch.inf], dtype=F64)
    assert xt.divergence(q, k, q, k, log_weight=(None, hidden)).isposinf().all()
    assert xt.divergence(q, k, q, k, log_weight=(hidden, None)).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: (t[0][:, :-1], *t[1:]), "p has 4 queries, q has 5"),
        (lambda t: (t[0], t[1][:, :-1], *t[2:]), "p has 6 keys, q has 7"),
        (lambda t: (*t[:2], t[2][:2], t[3][:2]), "average_heads=True"),
        (lambda t: (*t[:2], t[2].float(), t[3].float()), "torch.float32"),
        (lambda t: (t[0] * torch.nan, *t[1:]), "query_p"),
        (lambda t: (t[0], *t[1:3], t[3][..., :1]), r"divergence \(q\): query has dimension 2"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ArgumentError, match=message):
        xt.divergence(*change([x.detach() for x in problem()]))


def test_an_excluded_key_counts_however_small_its_weight():
    q, k = torch.tensor([[[1.0]]]), torch.tensor([[[0.0], [800.0]]])
    hidden = torch.tensor([[-torch.inf, 0.0]])
    assert (
        xt.divergence(q, k, q, k, scale=1.0, log_weight=(None, hidden)).item() == torch.inf
    )  # weight e^-800


def test_no_queries():
    q, k = torch.zeros(2, 0, 4), torch.zeros(2, 3, 4)
    assert xt.divergence(q, k, q, k).shape == (2, 0)
