"""The divergence of two heads equals that of their matrices of logits, in value and in all derivatives."""

import sys

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import two_measures as plain

F64 = torch.float64
loss_of = xt.losses.linear_kl
DIRECTIONS = ["forward", "reverse", "js"]


@pytest.fixture(params=[2**23, 22])
def chunks(monkeypatch, request):
    """All rows at once, or two at a time and looked at one by one."""
    heads = sys.modules["exptilt.losses.heads"]
    monkeypatch.setattr(heads, "CHUNK", request.param)
    monkeypatch.setattr(heads, "BLOCK", 11)


def problem(N=5, V=11, D=3, E=4, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (N, D), (V, D), (N, E), (V, E), (V,), (V,)
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in shapes]


def ours(h, W, th, tW, b, tb, **options):
    return loss_of(h, W, th, tW, bias=b, teacher_bias=tb, softcap=2.0, temperature=1.7, **options)


def theirs(h, W, th, tW, b, tb, direction, mixing=0.5):
    return plain.linear_kl(h, W, th, tW, b=b, tb=tb, softcap=2.0, T=1.7, direction=direction, mixing=mixing)


def close(found, want, tolerance=1e-10):
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_values_and_gradients(chunks, direction):
    tensors = problem()
    how = {"direction": direction, "mixing": 0.3}
    want = theirs(*tensors, **how)
    skip = torch.tensor([False, True, False, False, False])
    for reduction in ("none", "sum", "mean"):
        for ignore in (None, skip):
            found = ours(*tensors, reduction=reduction, ignore=ignore, **how)
            counted = torch.ones(5, dtype=F64) if ignore is None else (~ignore).double()
            wanted = want * counted
            if reduction != "none":
                wanted = wanted.sum() / (counted.sum() if reduction == "mean" else 1)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
            bar = torch.linspace(1, 2, 5, dtype=F64) if reduction == "none" else torch.tensor(3.0, dtype=F64)
            first = torch.autograd.grad(found, tensors, bar, retain_graph=True)
            close(first, torch.autograd.grad(wanted, tensors, bar, retain_graph=True))
            close(first, torch.autograd.grad(found, tensors, bar), 1e-14)  # a second pass finds the same


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_derivatives_forwards_and_twice(chunks, direction):
    tensors = problem(3, 4, 2, 2)
    assert gradcheck(lambda *x: ours(*x, direction=direction), tensors, check_forward_ad=True, fast_mode=True)
    quick = [tensors[0], tensors[1], tensors[3]]
    run = lambda h, W, tW: ours(h, W, tensors[2], tW, *tensors[4:], direction=direction)  # noqa: E731
    assert gradgradcheck(run, quick, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_transforms(chunks, direction):
    h, W, *others = problem()
    found = torch.func.hessian(lambda W: ours(h, W, *others, direction=direction))(W)
    want = torch.func.hessian(lambda W: theirs(h, W, *others, direction).mean())(W)
    close([found], [want])

    def one(h, th):  # per-sample gradients
        return ours(h[None], W, th[None], *others[1:], direction=direction)

    each = torch.func.vmap(torch.func.grad(one))(h.detach(), others[0].detach())
    (whole,) = torch.autograd.grad(ours(h, W, *others, direction=direction, reduction="sum"), h)
    close([each], [whole])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("k", [1, 3, 11])
def test_a_teacher_of_top_outcomes(chunks, direction, k):
    h, W, th, tW, b, _ = problem()
    log_p, log_q = (th @ tW.T).log_softmax(-1), (h @ W.T + b).log_softmax(-1)
    top = log_p.detach().topk(k)
    known = top.values.requires_grad_()

    def coarse(log_p, at):
        kept = log_p.gather(-1, at)
        hidden = torch.zeros_like(log_p).scatter(-1, at, 1.0).bool()
        return torch.cat([kept, log_p.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)], -1)

    rest = (
        (1 - known.exp().sum(-1, keepdim=True)).log() if k < 11 else torch.full((5, 1), -torch.inf, dtype=F64)
    )
    p, q = torch.cat([known, rest], -1), coarse(log_q, top.indices)
    p, q = (p, q) if k < 11 else (p[:, :11], q[:, :11])
    want = plain.between(p, q, direction).sum()
    found = loss_of(h, W, teacher_top=(top.indices, known), bias=b, direction=direction, reduction="sum")
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
    leaves = [h, W, b, known] if k < 11 else [h, W, b]
    close(torch.autograd.grad(found, leaves), torch.autograd.grad(want, leaves), 1e-9)
    full = loss_of(h, W, th, tW, bias=b, direction=direction, reduction="sum")
    assert found <= full + 1e-12  # outcomes that are joined can be told apart no better
    if k == 11:
        torch.testing.assert_close(found, full)


def test_double_backward_of_top_outcomes(chunks):
    h, W, th, tW, b, _ = problem(3, 5)
    values, index = (th @ tW.T).log_softmax(-1).topk(2)
    run = lambda h, W, v: loss_of(h, W, teacher_top=(index, v), bias=b)  # noqa: E731
    assert gradgradcheck(
        run, [h, W, values.detach().requires_grad_()], check_fwd_over_rev=True, fast_mode=True
    )


def test_statistics_and_leading_axes(chunks):
    h, W, th, tW, b, tb = problem(6)
    skip = torch.tensor([[False, True, False], [False, False, False]])
    said = ours(h.reshape(2, 3, 3), W, th.reshape(2, 3, 4), tW, b, tb, statistics=True, ignore=skip)
    s, t = (2 * torch.tanh(h @ W.T / 2) + b) / 1.7, (th @ tW.T + tb) / 1.7
    entropy = lambda s: -(s.softmax(-1) * s.log_softmax(-1)).sum(-1)  # noqa: E731
    want = {
        "divergence": theirs(h, W, th, tW, b, tb, "forward"),
        "log_normalizer": s.logsumexp(-1),
        "entropy": entropy(s),
        "teacher_log_normalizer": t.logsumexp(-1),
        "teacher_entropy": entropy(t),
    }
    for name, x in want.items():
        found = getattr(said, name)
        assert not found.requires_grad
        torch.testing.assert_close(found[~skip], x.reshape(2, 3)[~skip])
        assert found[skip].isnan().all()
    said.loss.backward()
    assert h.grad is not None
    with torch.no_grad():
        assert loss_of(h, W, th, tW, statistics=True).loss == loss_of(h, W, th, tW)


def test_second_derivatives_of_js_where_one_side_excludes_an_outcome():
    h, W, th, tW, _, _ = problem()
    bias = torch.zeros(11, dtype=F64)
    bias[0] = -torch.inf

    def twice(scale, hidden):
        x = (scale * h).detach().requires_grad_()
        loss = xt.losses.linear_kl(x, W, th, tW, teacher_bias=hidden, direction="js")
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(slope.sum(), x)[0]

    close([twice(1.0, bias)], [twice(1.0, bias.clamp(min=-1000.0))])
    assert twice(1e4, None).isfinite().all()


def test_log_probabilities_keep_their_digits_beside_large_scores():
    h, W, th, tW = (x.detach().float() for x in problem()[:4])
    bias = torch.full((11,), 4099.0)
    found = xt.losses.linear_kl(h, W, th, tW, bias=bias, direction="reverse")
    log_q, log_p = (h @ W.T + bias).double().log_softmax(-1), (th @ tW.T).double().log_softmax(-1)
    exact = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_statistics_under_vmap_and_meta_gradients():
    h, W, th, tW, _, _ = problem()
    found = torch.func.vmap(lambda h: xt.losses.linear_kl(h, W, th, tW, statistics=True))(
        torch.stack([h, 2 * h])
    )
    want = xt.losses.linear_kl(2 * h, W, th, tW, statistics=True)
    close([x[1] for x in found], want)
    h, W, th, tW = (x.detach().to("meta") for x in (h, W, th, tW))
    xt.losses.linear_kl(h.requires_grad_(), W, th, tW).backward()
    assert h.grad.shape == h.shape


def test_half_precision_small_divergences_and_ignored_rows():
    h, W, *_ = (x.detach() for x in problem(8, 300, 32, dtype=torch.float32))
    near = W * (1 + 1e-4)
    found = loss_of(h, W, h, near, reduction="none")
    want = loss_of(h.double(), W.double(), h.double(), near.double(), reduction="none")
    assert (found - want).abs().max() < 0.05 * want.max()
    assert (found >= 0).all()
    loss = loss_of(h.bfloat16().requires_grad_(), W.bfloat16(), h.bfloat16(), near.bfloat16())
    assert loss.dtype == torch.float32
    h[1] = torch.nan
    skip = torch.arange(8) == 1
    assert loss_of(h, W, h, near, ignore=skip).isfinite()
    with pytest.raises(ArgumentError, match="hidden"):
        loss_of(h, W, h, near)


def test_infinite_where_the_student_excludes_an_outcome():
    h, W, th, tW, b, _ = (x.detach() for x in problem())
    b = b.clone()
    b[2] = -torch.inf
    assert loss_of(h, W, th, tW, bias=b).isposinf()
    close(
        [loss_of(h, W, th, tW, bias=b, direction="reverse")],
        [plain.linear_kl(h, W, th, tW, b=b, direction="reverse").mean()],
    )
    assert 0 < loss_of(h, W, th, tW, bias=b, direction="js") < 0.7


@pytest.mark.slow
def test_compiled():
    tensors = problem(dtype=torch.float32)
    run = torch.compile(ours, backend="aot_eager")
    close([run(*tensors)], [ours(*tensors)], 1e-5)
    close(torch.autograd.grad(run(*tensors), tensors), torch.autograd.grad(ours(*tensors), tensors), 1e-4)


TOP = torch.tensor([[0, 1]] * 5), torch.full((5, 2), -1.0, dtype=F64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_weight": torch.zeros(10, 4, dtype=F64)}, "weight has 11 outcomes, teacher_weight has 10"),
        ({"teacher_hidden": torch.zeros(4, 4, dtype=F64)}, "one row of each"),
        ({"teacher_hidden": None}, "no teacher"),
        ({"teacher_top": TOP}, "Leave its other tensors out"),
        ({"direction": "backward"}, "'forward', 'reverse', 'js'"),
        ({"mixing": 1.0}, "mixing is 1.0"),
        ({"temperature": 0}, "temperature is 0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"ignore": torch.zeros(5)}, "True for tokens not to count"),
        ({"ignore": torch.ones(5, dtype=torch.bool)}, "no token counts"),
        ({"reduction": "max"}, "reduction is 'max'"),
    ],
)
def test_bad_input(change, message):
    h, W, th, tW, *_ = (x.detach() for x in problem())
    with pytest.raises(ArgumentError, match=message):
        loss_of(**{"hidden": h, "weight": W, "teacher_hidden": th, "teacher_weight": tW} | change)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ((TOP[0], TOP[1] + 0.9), "add up to"),
        ((TOP[0] + 10, TOP[1]), "from 0 to 10"),
        ((TOP[0] * 0, TOP[1]), "twice"),
        ((TOP[0][:, :1], TOP[1]), "one shape"),
        ((TOP[0].double(), TOP[1]), "whole numbers"),
        ((TOP[0], TOP[1][:4]), "floating-point numbers"),
    ],
)
def test_bad_tops(top, message):
    h, W, *_ = (x.detach() for x in problem())
    with pytest.raises(ArgumentError, match=message):
        loss_of(h, W, teacher_top=top)
