"""Contrastive losses equal their printed formulas with the whole matrix, in value and in all derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import losses as formulas

L = xt.losses
T = torch.float64


def batch(*shapes, dtype=T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in shapes]


TARGET, SAMPLED = torch.tensor([0, 1, 2, 0, 8, 1, 3]), torch.tensor([1, 3, 4, 1])
EACH = torch.randint(0, 9, (7, 4), generator=torch.Generator().manual_seed(0))
LABEL = torch.tensor([5, -2, 5, -2, 5, -2, -2])
TAU = torch.tensor(0.4, dtype=T)
PLACE = torch.arange(9.0, dtype=T).log_softmax(0)

# name: shapes, ours, the formula; each of them takes the tensors and gives one loss for each anchor
CASES = {
    "info_nce": (
        [(7, 3), (7, 3), ()],
        lambda q, k, x: L.info_nce(q, k, temperature=x.exp(), reduction="none"),
        lambda q, k, x: formulas.info_nce(q, k, x.exp()),
    ),
    "info_nce, negatives for all": (
        [(7, 3), (7, 3), (9, 3)],
        lambda q, k, n: L.info_nce(q, k, temperature=TAU, negatives=n, reduction="none"),
        lambda q, k, n: formulas.info_nce(q, k, TAU, n),
    ),
    "info_nce, negatives for each, symmetric": (
        [(7, 3), (7, 3), (7, 2, 3)],
        lambda q, k, n: L.info_nce(
            q, k, temperature=0.4, negatives=n, symmetric=True, similarity="dot", reduction="none"
        ),
        lambda q, k, n: formulas.info_nce(q, k, 0.4, n, symmetric=True, similarity="dot"),
    ),
    "info_nce, a memory bank alone": (
        [(7, 3), (7, 3), (9, 3)],
        lambda q, k, n: L.info_nce(q, k, temperature=0.4, negatives=n, in_batch=False, reduction="none"),
        lambda q, k, n: formulas.info_nce(q, k, 0.4, n, in_batch=False),
    ),
    "clip": (
        [(7, 3), (7, 3), ()],
        lambda q, k, x: L.clip(q, k, temperature=(-x).exp(), reduction="none"),
        lambda q, k, x: formulas.info_nce(q, k, (-x).exp(), symmetric=True),
    ),
    "nt_xent": (
        [(2, 3, 2), ()],
        lambda z, x: L.nt_xent(z, temperature=x.exp(), reduction="none"),
        lambda z, x: formulas.nt_xent(z, x.exp()),
    ),
    "nt_xent, three views": (
        [(3, 2, 3)],
        lambda z: L.nt_xent(z, temperature=0.3, reduction="none"),
        lambda z: formulas.nt_xent(z, 0.3),
    ),
    "supervised": (
        [(7, 3), ()],
        lambda z, x: L.supervised_contrastive(z, LABEL, temperature=x.exp(), reduction="none"),
        lambda z, x: formulas.supervised(z, LABEL, x.exp()),
    ),
    "sigmoid": (
        [(7, 3), (7, 3), (), ()],
        lambda q, k, x, b: L.sigmoid(q, k, temperature=x.exp(), bias=b, reduction="none"),
        lambda q, k, x, b: formulas.sigmoid(q, k, x.exp(), b),
    ),
    "sampled_softmax": (
        [(7, 3), (9, 3), (9,)],
        lambda h, W, b: L.sampled_softmax(h, W, TARGET, SAMPLED, log_noise=PLACE, bias=b, reduction="none"),
        lambda h, W, b: formulas.sampled_softmax(h, W, TARGET, SAMPLED, PLACE, b),
    ),
    "sampled_softmax, for each": (
        [(7, 3), (9, 3)],
        lambda h, W: L.sampled_softmax(h, W, TARGET, EACH, reduction="none"),
        lambda h, W: formulas.sampled_softmax(h, W, TARGET, EACH),
    ),
    "nce": (
        [(7, 3), (9, 3), (9,)],
        lambda h, W, b: L.nce(h, W, TARGET, EACH, log_noise=PLACE, bias=b, reduction="none"),
        lambda h, W, b: formulas.nce(h, W, TARGET, EACH, PLACE, b),
    ),
    "nce, noise for all": (
        [(7, 3), (9, 3)],
        lambda h, W: L.nce(h, W, TARGET, SAMPLED, reduction="none"),
        lambda h, W: formulas.nce(h, W, TARGET, SAMPLED),
    ),
}


def some_slow(names, quick):
    """All of the names, those that are not quick only among the slow tests."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in names]


@pytest.mark.parametrize("name", some_slow(CASES, ("info_nce", "sigmoid", "sampled_softmax")))
def test_values_and_derivatives(name):
    shapes, ours, formula = CASES[name]
    tensors = batch(*shapes)
    torch.testing.assert_close(ours(*tensors), formula(*tensors), rtol=1e-10, atol=1e-10)
    weight = torch.arange(1.0, 1 + ours(*tensors).numel(), dtype=T)

    def total(*tensors):
        return (weight * ours(*tensors).flatten()).sum()

    assert gradcheck(total, tensors, check_forward_ad=True)
    assert gradgradcheck(total, tensors, check_fwd_over_rev=True)


@pytest.mark.parametrize("name", CASES)
def test_transforms(name):
    shapes, ours, formula = CASES[name]
    tensors = [x.detach() for x in batch(*shapes)]
    found = torch.func.hessian(lambda x: ours(x, *tensors[1:]).sum())(tensors[0])
    want = torch.func.hessian(lambda x: formula(x, *tensors[1:]).sum())(tensors[0])
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-8)
    two = torch.stack([tensors[0], 2 * tensors[0] + 1])
    found = torch.func.vmap(lambda x: ours(x, *tensors[1:]))(two)
    want = torch.stack([formula(x, *tensors[1:]) for x in two])
    torch.testing.assert_close(found, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", some_slow(CASES, ("sigmoid", "sampled_softmax")))
def test_compiles_without_a_graph_break(name):
    shapes, ours, _ = CASES[name]
    tensors = batch(*shapes)
    found = torch.compile(ours, backend="aot_eager", fullgraph=True)(*tensors)
    torch.testing.assert_close(found, ours(*tensors))
    for x, y in zip(
        torch.autograd.grad(found.sum(), tensors),
        torch.autograd.grad(ours(*tensors).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


LABELS = torch.tensor([[5, -2, 5, -2, 5, -2, 9], [0, 1, 0, 1, 2, 2, 3], [1, 1, 1, 1, 3, 3, 4]])
TARGETS = torch.stack(
    [TARGET, TARGET.flip(0), torch.full_like(TARGET, 8)]
)  # of the last all are in `sampled`
SAMPLES = {"for all": torch.tensor([[1, 3, 4, 1], [0, 2, 7, 7], [8, 8, 8, 8]])}
SAMPLES["for each"] = torch.stack([EACH, EACH.flip(0), 8 - EACH])


def supervised(reduction, similarity, learned):
    """A loss of embeddings, a temperature, and what `vmap` maps beside them."""

    def loss(z, x, label):
        tau = x.exp() if learned else 0.4
        options = {"without_positives": "skip", "similarity": similarity, "reduction": reduction}
        return L.supervised_contrastive(z, label, temperature=tau, **options)

    return loss, batch((7, 3), ()), (LABELS,)


def sampled(name, kind, reduction, noise, biased):
    def loss(h, W, b, target, some):
        options = {
            "log_noise": PLACE if noise else None,
            "bias": b if biased else None,
            "reduction": reduction,
        }
        return getattr(L, name)(h, W, target, some, **options)

    return loss, batch((7, 3), (9, 3), (9,)), (TARGETS, SAMPLES[kind])


OPTIONS = {f"supervised {x}": (supervised, x) for x in (("mean", "dot", True), ("sum", "cosine", False))}
OPTIONS["supervised none"] = supervised, ("none", "cosine", True)
for _kind, _name in (("for all", "sampled_softmax"), ("for each", "sampled_softmax"), ("for all", "nce")):
    for _rest in (("mean", True, True), ("sum", False, True), ("none", True, False)):
        OPTIONS[f"{_name} {_kind} {_rest}"] = sampled, (_name, _kind, *_rest)


def gradients(loss, tensors, whole):
    """Value and gradients by the tensors, 0 where there is none."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    found = loss(*tensors, *whole)
    made = torch.autograd.grad(found.sum(), tensors, allow_unused=True)
    return found.detach(), *(
        torch.zeros_like(x) if g is None else g for x, g in zip(tensors, made, strict=True)
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_labels_and_samples_under_vmap(name):
    """Whole numbers are mapped too, alone and with the embeddings; gradients are taken inside."""
    make, given = OPTIONS[name]
    loss, tensors, whole = make(*given)
    tensors = [x.detach() for x in tensors]
    places = tuple(range(len(tensors)))

    def value_and_gradients(*x):
        made = torch.func.grad(lambda *y: loss(*y, *x[len(tensors) :]).sum(), places)(*x[: len(tensors)])
        return loss(*x), *made

    first = torch.stack([tensors[0], 2 * tensors[0], tensors[0] + 1])
    alone = tuple(None for _ in tensors), tuple(0 for _ in whole)
    for in_dims, x in ((alone[0], tensors[0]), ((0, *alone[0][1:]), first)):
        found = torch.vmap(value_and_gradients, (*in_dims, *alone[1]))(x, *tensors[1:], *whole)
        rows = x if in_dims[0] == 0 else [x] * 3
        right = [gradients(loss, [row, *tensors[1:]], some) for row, *some in zip(rows, *whole, strict=True)]
        for a, *b in zip(found, *right, strict=True):
            torch.testing.assert_close(a, torch.stack(b), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", some_slow(OPTIONS, ()))
def test_options_compile_without_a_graph_break(name):
    make, given = OPTIONS[name]
    loss, tensors, whole = make(*given)
    one = [x[0] for x in whole]
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled, tensors, one), gradients(loss, tensors, one), strict=True):
        torch.testing.assert_close(a, b)


def test_reductions_and_single_rows():
    z, label = batch((7, 3))[0], torch.tensor([0, 1, 0, 1, 2, 0, 3])
    each = L.supervised_contrastive(z, label, without_positives="skip", reduction="none")
    alone = torch.tensor([4, 6])
    assert (each[alone] == 0).all()
    want = formulas.supervised(z, label, 0.1)
    kept = torch.tensor([0, 1, 2, 3, 5])
    torch.testing.assert_close(each[kept], want[kept])
    mean = L.supervised_contrastive(z, label, without_positives="skip")
    torch.testing.assert_close(mean, want[kept].mean())
    torch.testing.assert_close(
        L.supervised_contrastive(z, label, without_positives="skip", reduction="sum"), each.sum()
    )
    q, k = batch((7, 3), (7, 3))
    each = L.info_nce(q, k, reduction="none")
    torch.testing.assert_close(L.info_nce(q, k), each.mean())
    torch.testing.assert_close(L.info_nce(q, k, reduction="sum"), each.sum())


@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "sigmoid", "supervised", "nce"])
def test_half_precision_is_summed_in_float32(name):
    shapes, ours, _ = CASES[name]
    tensors = [x.detach() for x in batch(*shapes, dtype=torch.float32)]
    half = [x.bfloat16() if x.ndim > 1 else x for x in tensors]
    wide = [x.float() for x in half]
    found = ours(*half)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, ours(*wide))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # embeddings stay as they are
        torch.testing.assert_close(ours(*wide), ours(*wide))
        assert ours(*wide).dtype == torch.float32


def test_sharp_temperatures():
    """τ = 0.005: scores reach 200, and the right key is nearly certain."""
    x = F.normalize(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    y = F.normalize(x + 0.1 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    for ours, formula in (
        (L.info_nce(x, y, temperature=0.005, reduction="none"), formulas.info_nce),
        (L.nt_xent(torch.stack([x, y]), temperature=0.005, reduction="none"), None),
    ):
        if formula is None:
            want = formulas.nt_xent(torch.stack([x, y]).double(), 0.005)
            theirs = formulas.nt_xent(torch.stack([x, y]), 0.005)
        else:
            want, theirs = formula(x.double(), y.double(), 0.005), formula(x, y, 0.005)
        assert (ours >= 0).all()
        assert (ours - want).abs().max() <= 2 * (theirs - want).abs().max() + 4e-5  # 4 roundings of 200


def test_a_certain_choice_has_a_small_gradient():
    """Where the right key is certain to 50 digits, the gradient is tiny, and not the rounding of 1 − p."""
    x = torch.eye(8, dtype=torch.float32).requires_grad_()
    y = torch.eye(8, dtype=torch.float32)
    for loss in (
        L.info_nce(x, y, temperature=0.01),
        L.clip(x, y, temperature=0.01),
        L.nt_xent(torch.stack([x, y]), temperature=0.01),
    ):
        assert loss.item() < 1e-40
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient.abs().max() < 1e-38


@pytest.mark.parametrize("name", ["info_nce", "nt_xent"])
def test_second_derivatives_where_scores_are_far_apart(name):
    """Scores up to ±300 in float32: those of `torch.logaddexp` are NaN 88 below the larger one."""
    g = torch.Generator().manual_seed(0)
    x, y, more = (3 * torch.randn(n, 4, dtype=torch.float64, generator=g) for n in (3, 3, 5))
    if name == "info_nce":
        tensors, options = (x, y, more), {"similarity": "dot"}
        ours = lambda q, k, n: L.info_nce(q, k, temperature=0.1, negatives=n, **options)  # noqa: E731
        theirs = lambda q, k, n: formulas.info_nce(q, k, 0.1, n, **options).mean()  # noqa: E731
    else:
        tensors = (torch.stack([x, y]),)
        ours = lambda z: L.nt_xent(z, temperature=0.1, similarity="dot")  # noqa: E731
        theirs = lambda z: formulas.nt_xent(z, 0.1, "dot").mean()  # noqa: E731
    vectors = [torch.randn(t.shape, dtype=torch.float64, generator=g) for t in tensors]
    found = torch.autograd.functional.vhp(
        ours, tuple(t.float() for t in tensors), tuple(v.float() for v in vectors)
    )[1]
    want = torch.autograd.functional.vhp(theirs, tensors, tuple(vectors))[1]
    size = max(float(w.abs().max()) for w in want)
    assert size > 1e-3
    for one, other in zip(found, want, strict=True):
        assert (one - other).abs().max() < 1e-4 * size


def test_diagnose_is_what_its_formulas_say():
    q, k = (x.detach() for x in batch((20, 4), (20, 4)))
    said = L.diagnose(q, k, temperature=0.3)
    s = formulas.scores(q, k, 0.3)
    p = s.softmax(-1)
    own = torch.eye(20, dtype=torch.bool)
    wrong = s.masked_fill(own, -torch.inf).softmax(-1)
    torch.testing.assert_close(said.loss, formulas.info_nce(q, k, 0.3))
    torch.testing.assert_close(said.log_normalizer, s.logsumexp(-1))
    torch.testing.assert_close(said.entropy, -(p * p.log()).sum(-1))
    torch.testing.assert_close(said.effective_negatives, torch.special.entr(wrong).sum(-1).exp())
    assert torch.equal(said.accuracy, s.argmax(-1) == torch.arange(20))
    x, y = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    torch.testing.assert_close(said.alignment, (x - y).square().sum(-1).mean())
    apart = torch.pdist(torch.cat([x, y])).square()
    torch.testing.assert_close(said.uniformity, (-2 * apart).exp().mean().log())
    assert "20 pairs" in repr(said)
    assert len(said.plot().axes) == 3


def test_matrices_need_no_axis_of_heads():
    q, k, v = batch((7, 3), (9, 3), (7, 3))
    bias, mask = torch.randn(7, 9, dtype=T), torch.rand(7, 9) < 0.8
    options = {"scale": 0.5, "log_weight": torch.randn(9, dtype=T), "bias": bias, "mask": mask}
    torch.testing.assert_close(
        xt.log_normalizer(q, k, **options), xt.log_normalizer(q[None], k[None], **options)[0]
    )
    product = xt.fisher_vector_product(q, k, v, **options)
    torch.testing.assert_close(product, xt.fisher_vector_product(q[None], k[None], v[None], **options)[0])
    with pytest.raises(ArgumentError, match="heads"):
        xt.log_normalizer(q, k[None])
