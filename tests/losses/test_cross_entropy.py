"""The head's loss equals the loss of its matrix of logits, in value and in all derivatives."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import exptilt as xt
from oracles import losses as formulas

loss_of = xt.losses.linear_cross_entropy
OPTIONS = [
    {},
    {"bias": True, "label_smoothing": 0.1, "z_loss": 0.01},
    {"softcap": 2.0, "scale": 0.5, "label_smoothing": 0.2, "bias": True},
]


def problem(N=6, V=11, D=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h, W, b = (torch.randn(s, dtype=dtype, generator=generator) for s in ((N, D), (V, D), (V,)))
    t = torch.randint(0, V, (N,), generator=generator)
    t[1] = -100
    return h.requires_grad_(), W.requires_grad_(), b.requires_grad_(), t


def ours(h, W, b, t, options, **more):
    given = {**options, "bias": b if options.get("bias") else None}
    return loss_of(h, W, t, **given, **more)


def plain(h, W, b, t, options):
    given = {k: v for k, v in options.items() if k not in ("bias", "label_smoothing")}
    smoothing = options.get("label_smoothing", 0.0)
    return formulas.linear_cross_entropy(
        h, W, t, b if options.get("bias") else None, smoothing=smoothing, **given
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_values_and_gradients_on_random_options(data):
    draw = lambda *choices: data.draw(st.sampled_from(choices))  # noqa: E731
    N, V, D = draw(1, 2, 40), draw(1, 2, 300), draw(1, 7, 70)
    h, W, b, t = problem(max(N, 2), V, D, seed=data.draw(st.integers(0, 10**6)))
    options = {"bias": draw(True, False), "softcap": draw(None, 3.0), "scale": draw(1.0, 0.1, 20.0)}
    options |= {"z_loss": draw(0.0, 0.1), "label_smoothing": draw(0.0, 0.3, 1.0)}
    want = plain(h, W, b, t, options)
    for reduction in ("none", "sum", "mean"):
        found = ours(h, W, b, t, options, reduction=reduction)
        total = (
            want if reduction == "none" else want.sum() / ((t != -100).sum() if reduction == "mean" else 1)
        )
        torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-9)
        for x, y in zip(
            torch.autograd.grad(found.sum(), (h, W), retain_graph=True),
            torch.autograd.grad(total.sum(), (h, W), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS)
def test_derivatives_forwards_and_twice(options):
    *tensors, t = problem(4, 5, 3)
    assert gradcheck(lambda h, W, b: ours(h, W, b, t, options), tensors, check_forward_ad=True)
    assert gradgradcheck(lambda h, W, b: ours(h, W, b, t, options), tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_transforms(options):
    *tensors, t = problem()
    found = torch.func.hessian(lambda W: ours(tensors[0], W, tensors[2], t, options))(tensors[1])
    want = torch.func.hessian(lambda W: plain(tensors[0], W, tensors[2], t, options).sum() / 5)(tensors[1])
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-10)

    def one(h, t):  # per-sample gradients
        return ours(h[None], tensors[1], tensors[2], t[None], options, reduction="sum")

    each = torch.func.vmap(torch.func.grad(one))(tensors[0].detach(), t)
    (whole,) = torch.autograd.grad(ours(*tensors, t, options, reduction="sum"), tensors[0])
    torch.testing.assert_close(each, whole, rtol=1e-8, atol=1e-10)


def test_leading_axes_and_statistics():
    h, W, b, t = problem(24, 50, 8)
    said = loss_of(h.reshape(2, 3, 4, 8), W, t.reshape(2, 3, 4), bias=b, rank=True)
    s = h @ W.T + b
    kept = t != -100
    own = s.gather(1, t.clamp(min=0)[:, None])
    p = s.softmax(-1)
    want = {
        "log_normalizer": s.logsumexp(-1),
        "entropy": -(p * p.log()).sum(-1),
        "score_max": s.amax(-1),
        "target_score": own[:, 0],
    }
    for name, x in want.items():
        found = getattr(said, name)
        assert found.shape == (2, 3, 4)
        torch.testing.assert_close(found.flatten()[kept], x[kept])
        assert found.flatten()[~kept].isnan().all()
    assert torch.equal(said.rank.flatten()[kept], (s > own).sum(-1)[kept])
    assert (said.rank.flatten()[~kept] == -1).all()
    torch.testing.assert_close(said.loss, F.cross_entropy(s, t))


def test_ignored_rows_are_not_looked_at():
    h, W, _, t = problem()
    with torch.no_grad():
        h[1] = torch.nan
    loss = loss_of(h, W, t)
    (by_h,) = torch.autograd.grad(loss, h)
    assert loss.isfinite()
    assert (by_h[1] == 0).all()
    assert loss_of(h, W, torch.full_like(t, -100), reduction="sum") == 0


def test_certain_predictions_have_small_losses_and_never_negative_ones():
    torch.manual_seed(0)
    W = torch.randn(1000, 64)
    t = torch.arange(1000)
    h = 0.6 * W  # the target leads by about 38
    losses = loss_of(h, W, t, reduction="none")
    want = loss_of(h.double(), W.double(), t, reduction="none")
    theirs = F.cross_entropy(h @ W.T, t, reduction="none")
    assert (losses >= 0).all()
    assert (losses - want).abs().max() <= 2 * (theirs - want).abs().max() + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    h, W, _, t = problem(40, 300, 70, torch.float32)
    h, W = (x.detach().to(dtype).requires_grad_() for x in (h, W))
    loss = loss_of(h, W, t)
    assert loss.dtype == torch.float32
    want = formulas.linear_cross_entropy(h.double(), W.double(), t).sum() / 39
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    for x, y in zip(torch.autograd.grad(loss, (h, W)), torch.autograd.grad(want, (h, W)), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_autocast_casts_as_a_linear_layer_would():
    h, W, _, t = problem(40, 300, 70, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(h, W, t)
    want = loss_of(h.bfloat16(), W.bfloat16(), t)
    assert torch.equal(loss, want)


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    h, W, _, t = problem(40, 300, 70, torch.float32)

    def both(h, W):
        return loss_of(h, W, t, label_smoothing=0.1, z_loss=1e-3)

    found = torch.compile(both, backend="aot_eager", fullgraph=True)(h, W)
    torch.testing.assert_close(found, both(h, W))
    for x, y in zip(torch.autograd.grad(found, (h, W)), torch.autograd.grad(both(h, W), (h, W)), strict=True):
        torch.testing.assert_close(x, y)


def test_the_core_s_gradient_is_added_to_once():
    """Two losses of one weight, a hook on it, a second backward: nobody's gradient is written over."""
    h, W, _, t = problem(40, 300, 70)
    seen = []
    W.register_hook(lambda g: seen.append(g.clone()))
    loss = loss_of(h, W, t) + 2 * loss_of(h, W, t, label_smoothing=0.5) + W.square().sum()
    (first,) = torch.autograd.grad(loss, W, retain_graph=True)
    (second,) = torch.autograd.grad(loss, W)
    want = formulas.linear_cross_entropy(h, W, t) + 2 * formulas.linear_cross_entropy(h, W, t, smoothing=0.5)
    (want,) = torch.autograd.grad(want.sum() / 39 + W.square().sum(), W)
    for found in (first, second, *seen[:2]):
        torch.testing.assert_close(found, want)


def test_fisher_vector_product():
    h, W, b, _ = problem(6, 11, 5)
    v = tuple(torch.randn_like(x) for x in (h, W, b))

    def logits(h, W, b):
        return 0.7 * (h @ W.T) + b

    z, moved = torch.func.jvp(logits, (h, W, b), v)
    p = z.softmax(-1)
    want = torch.func.vjp(logits, h, W, b)[1](p * (moved - (p * moved).sum(-1, keepdim=True)))
    found = xt.losses.fisher_vector_product(h, W, v, bias=b, scale=0.7)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y)
    only = xt.losses.fisher_vector_product(h, W, (v[0], None, None), bias=b, scale=0.7)[0]
    torch.testing.assert_close(only, xt.fisher_vector_product(h, W, v[0], log_weight=b, scale=0.7))
    # The Gauss–Newton matrix is positive: <v, F v> is a sum of variances.
    assert sum((x * y).sum() for x, y in zip(v, found, strict=True)) > 0
