"""What a key is worth equals what leaving it out changes; parts are taken away as they were joined."""

import math
import sys

import pytest
import torch
from torch.autograd import gradcheck

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import two_measures as plain

F64 = torch.float64
OPTIONS = [
    {},
    {"causal": True, "softcap": 2.0},
    {"window": 3, "sink": True},
    {"mask": True, "bias": True, "log_weight": True},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sys.modules["exptilt.tilting.key_side"], "CELLS", 20)


def problem(Q=7, K=7, heads=4, lead=(2,), seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, dtype=dtype, generator=generator)  # noqa: E731
    return draw(*lead, heads, Q, 3), draw(*lead, heads // 2, K, 3), 3 + draw(*lead, heads // 2, K, 2)


def filled(options, Q=7, K=7, heads=4):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *s: torch.randn(*s, dtype=F64, generator=generator)  # noqa: E731
    mask = torch.rand(Q, K, generator=generator) > 0.3
    made = {"log_weight": draw(heads // 2, K), "sink": draw(heads), "bias": draw(heads, Q, K), "mask": mask}
    return {name: made.get(name, value) for name, value in options.items()}


def without(q, k, v, j, options):
    """The call again, with key j hidden."""
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    hidden[:, j] = False
    mask = options.get("mask")
    return xt.attend(q, k, v, **options | {"mask": hidden if mask is None else mask & hidden})


@pytest.fixture(params=["compiled", "plain torch"])
def sweeps(request, monkeypatch):
    """The compiled sweeps of the keys' side, or none."""
    if request.param != "compiled":
        for name in ("key_side", "counterfactual"):
            monkeypatch.setattr(sys.modules[f"exptilt.tilting.{name}"], "swept", lambda _: False)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scale", [0.5, 30.0])  # at 30 some keys have all but 1e-16 of a query's weight
@pytest.mark.usefixtures("sweeps")
def test_as_calling_again_without_each_key(options, scale):
    (q, k, v), options = problem(), filled(options) | {"scale": scale}
    direction = torch.randn(2, 4, 7, 2, dtype=F64, generator=torch.Generator().manual_seed(2))
    norms, along = (
        xt.leave_one_out(q, k, v, **options),
        xt.leave_one_out(q, k, v, direction=direction, **options),
    )
    before = xt.attend(q, k, v, **options)
    for j in range(7):
        after = without(q, k, v, j, options)
        change = after.output - before.output

        def close(x, y, j=j):
            torch.testing.assert_close(x[..., j], y, rtol=1e-6, atol=1e-9)

        close(norms.total, change.norm(dim=-1).sum(-1))
        close(norms.largest, change.norm(dim=-1).amax(-1))
        dotted = (change * direction).sum(-1)
        close(along.total, dotted.sum(-1))
        close(along.largest, dotted.abs().amax(-1))
        gone = torch.isneginf(after.log_normalizer) & ~torch.isneginf(before.log_normalizer)
        assert torch.equal(norms.alone[..., j], gone.sum(-1))
        moved = torch.where(gone, 0.0, after.log_normalizer - before.log_normalizer).nan_to_num()
        close(norms.log_normalizer, moved.sum(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"causal": True, "scale": 4.0}, {"sink": True, "bias": True, "mask": True}]
)
def test_over_many_tiles_of_keys(options, dtype, monkeypatch):
    """Many light keys, a few heavy ones, and keys of the same value: one rounding of the sums' dtype."""
    q, k, v = (x.to(dtype) for x in problem(40, 1500, lead=()))
    v[:, 700:] = v[:, 700:701]
    options = {
        x: y.float() if y is not True and y is not False and x in ("sink", "bias") else y
        for x, y in filled(options, 40, 1500).items()
    }
    wide = [x.double() for x in (q, k, v)]
    exact = {x: y.double() if x in ("sink", "bias") else y for x, y in options.items()}
    for direction in (None, torch.ones(4, 40, 2)):
        found = xt.leave_one_out(q, k, v, direction=direction, **options)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["exptilt.tilting.counterfactual"], "swept", lambda _: False)
            along = direction if direction is None else direction.double()
            want = xt.leave_one_out(*wide, direction=along, **exact)
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=2e-5, atol=2e-6)
    found, p = xt.attend(q, k, v, top=8, **options), plain.weights(*wide[:2], **exact)
    torch.testing.assert_close(found.top_weight.double(), p.topk(8).values, rtol=1e-4, atol=1e-7)
    taken = torch.where(found.top_index < 0, 0.0, p.gather(-1, found.top_index.clamp(min=0)))
    torch.testing.assert_close(taken, p.topk(8).values, rtol=1e-4, atol=1e-7)
    whole = (found.top_weight.sum(-1) + found.top_rest).double()
    torch.testing.assert_close(whole, torch.ones_like(whole), rtol=1e-5, atol=0)


def test_the_heaviest_key_loses_no_digits_in_float32():
    q, k, v = problem(lead=(), dtype=torch.float32)
    found = xt.leave_one_out(q, k, v, scale=12.0)
    want = xt.leave_one_out(q.double(), k.double(), v.double(), scale=12.0)
    torch.testing.assert_close(found.total.double(), want.total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.usefixtures("sweeps")
def test_heaviest_keys_and_segments(options):
    (q, k, v), options = problem(), filled(options)
    ids = torch.tensor([0, 0, 2, 1, 2, 2, 1])
    found = xt.attend(q, k, v, top=3, segments=ids, **options)
    p = plain.weights(q, k, **options)
    want = p.topk(3)
    torch.testing.assert_close(found.top_weight, want.values)
    assert torch.equal(found.top_index, torch.where(want.values > 0, want.indices, -1))
    sees = ~torch.isneginf(found.log_normalizer)
    torch.testing.assert_close(found.top_rest, torch.where(sees, 1 - want.values.sum(-1), 0.0))
    for s in range(3):
        torch.testing.assert_close(found.segment_mass[..., s], p[..., ids == s].sum(-1))
    torch.testing.assert_close(found.output, xt.attend(q, k, v, **options).output)
    assert xt.attend(q, k, v, **options).top_index is None


def test_mass_of_segments_is_differentiable():
    q, k, v = (x.requires_grad_() for x in problem(3, 4, 2, ()))
    ids = torch.tensor([0, 1, 1, 0])
    assert gradcheck(lambda q, k: xt.attend(q, k, v, segments=ids).segment_mass, (q, k), fast_mode=True)


FIELDS = ("output", "log_normalizer", "entropy", "score_mean", "score_variance")


@pytest.mark.parametrize("cut", [1, 3])
def test_unmerge_is_the_inverse_of_merge(cut):
    q, k, v = (x.requires_grad_() for x in problem(3, 7, 2, ()))
    whole, part = xt.attend(q, k, v), xt.attend(q, k[:, :cut], v[:, :cut])
    rest, want = xt.unmerge(whole, part), xt.attend(q, k[:, cut:], v[:, cut:])
    for name in FIELDS:
        torch.testing.assert_close(getattr(rest, name), getattr(want, name), rtol=1e-9, atol=1e-10)
        bar = torch.linspace(1, 2, getattr(want, name).numel(), dtype=F64).reshape(getattr(want, name).shape)
        pair = (torch.autograd.grad(getattr(x, name), (q, k), bar, retain_graph=True) for x in (rest, want))
        for x, y in zip(*pair, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)
    known = ~rest.score_max.isnan()
    assert known.any() or cut > 1
    torch.testing.assert_close(rest.score_max[known], want.score_max[known])
    again = xt.merge([rest, part])
    torch.testing.assert_close(again.entropy, whole.entropy)


def test_a_value_is_replaced():
    q, k, v = problem(3, 7, 2, ())
    other = v.clone()
    other[:, 2] += 1
    part, new = (xt.attend(q, k[:, 2:3], x[:, 2:3]) for x in (v, other))
    found = xt.merge([xt.unmerge(xt.attend(q, k, v), part), new])
    torch.testing.assert_close(found.output, xt.attend(q, k, other).output)


def test_parts_that_see_nothing():
    q, k, v = problem(7, 7, 2, ())
    whole, part = xt.attend(q, k, v, causal=True), xt.attend(q, k[:, 4:], v[:, 4:], causal=True)
    early = xt.unmerge(
        xt.attend(q[:, 4:], k, v, causal=True), xt.attend(q[:, 4:], k[:, 4:], v[:, 4:], causal=True)
    )
    want = xt.attend(q[:, 4:], k[:, :4], v[:, :4])
    torch.testing.assert_close(early.output, want.output)
    dead = xt.unmerge(whole, part)
    torch.testing.assert_close(dead.output[:, :4], whole.output[:, :4])
    torch.testing.assert_close(dead.entropy[:, :4], whole.entropy[:, :4])


def test_bad_input():
    q, k, v = problem(3, 7, 2, ())
    whole, part = xt.attend(q, k, v), xt.attend(q, k[:, :2], v[:, :2])
    with pytest.raises(ArgumentError, match="not among the whole's"):
        xt.unmerge(part, whole)
    with pytest.raises(ArgumentError, match="all but 0 of the weight"):
        xt.unmerge(part, part)
    far = torch.cat([20 * q[:, :1], q], 1).float(), torch.cat([20 * q[:1, :1], k[:1]], 1).float()
    with pytest.raises(ArgumentError, match="over the other keys"):
        xt.unmerge(xt.attend(far[0][:1], far[1], far[1]), xt.attend(far[0][:1], far[1][:, :1], far[1][:, :1]))
    with pytest.raises(ArgumentError, match="same queries"):
        xt.unmerge(whole, xt.attend(q[:, :2], k, v))
    with pytest.raises(ArgumentError, match="top is 8, there are 7 keys"):
        xt.attend(q, k, v, top=8)
    with pytest.raises(ArgumentError, match="top is 0"):
        xt.attend(q, k, v, top=0)
    with pytest.raises(ArgumentError, match="for each of 7 keys"):
        xt.attend(q, k, v, segments=torch.zeros(6, dtype=torch.long))
    with pytest.raises(ArgumentError, match="negative"):
        xt.attend(q, k, v, segments=torch.full((7,), -1))
    with pytest.raises(ArgumentError, match="direction"):
        xt.leave_one_out(q, k, v, direction=q[:, :1])
    with pytest.raises(ArgumentError, match="value"):
        xt.leave_one_out(q, k, v * torch.nan)


def test_keys_whose_weight_underflows_are_still_there():
    k = torch.tensor([[[0.0], [1.0], [1000.0]]])
    v = torch.tensor([[[5.0], [7.0], [11.0]]])
    q = torch.ones(1, 1, 1)
    found = xt.leave_one_out(q, k, v, scale=1.0)
    rest = torch.tensor([1.0, math.e]) / (1 + math.e)  # of the keys that had no weight
    moved = 11 - float(rest @ v[0, :2, 0])
    torch.testing.assert_close(found.total[0, 2], torch.tensor(moved))
    torch.testing.assert_close(found.log_normalizer[0, 2], torch.tensor(math.log(1 + math.e) - 1000))
    assert not found.alone.any()
    assert xt.attend(q, k, v, scale=1.0, top=3).top_index.tolist() == [[[2, 1, 0]]]


def test_half_precision_is_not_rounded_on_the_way():
    q, k, v = (x.bfloat16() for x in problem(lead=()))
    wide = [x.double() for x in (q, k, v)]
    found, want = xt.leave_one_out(q, k, v), xt.leave_one_out(*wide)
    torch.testing.assert_close(found.total.double(), want.total, rtol=1e-5, atol=1e-5)
    ids = torch.arange(7) // 3
    found, want = xt.attend(q, k, v, segments=ids), xt.attend(*wide, segments=ids)
    torch.testing.assert_close(found.segment_mass.double(), want.segment_mass, rtol=1e-5, atol=1e-6)


def test_equal_values_change_nothing_in_float32():
    q, k, v = problem(lead=(), dtype=torch.float32)
    v[:, 1:] = v[:, 1:2]
    mask = torch.arange(7) > 0
    mask = mask.expand(7, 7)
    assert float(xt.leave_one_out(q, k, v, mask=mask).largest.max()) < 2e-6
    assert float(xt.leave_one_out(q, k + 0 * q[:2], v, mask=mask).total.max()) < 1e-5


def test_weights_of_exact_scores_are_exact_at_large_scores():
    k = torch.tensor([[[9999.0], [10000.0]]])
    found = xt.attend(torch.ones(1, 1, 1), k, k, scale=1.0, top=2)
    torch.testing.assert_close(
        found.top_weight[0, 0].double(), torch.tensor([1.0, 0.0], dtype=F64).softmax(0)
    )


def test_autocast_does_not_round_weights():
    q, k, v = problem(lead=(), dtype=torch.float32)
    want, few = xt.leave_one_out(q, k, v).total, xt.compact(k, v, 3, q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(xt.leave_one_out(q, k, v).total, want)
        torch.testing.assert_close(xt.compact(k, v, 3, q).error, few.error)
        half = [x.bfloat16().double() for x in (q, k, v)]  # as torch casts the inputs of attention
        found, exact = xt.attend(q, k, v, top=3), xt.attend(*half, top=3)
    torch.testing.assert_close(found.top_weight.double(), exact.top_weight, rtol=1e-5, atol=1e-6)


def test_segments_of_a_call_that_is_made_again():
    q, k, v = problem(lead=(), dtype=torch.float32)
    ids = torch.tensor([0, 0, 2, 1, 2, 2, 1])
    first = xt.attend(q, k, v, segments=ids).segment_mass
    for _ in range(3):
        torch.testing.assert_close(xt.attend(q, k, v, segments=ids).segment_mass, first)
    assert xt.attend(q, k[:, :0], v[:, :0], segments=ids[:0]).segment_mass.shape == (4, 7, 0)


def test_key_side_without_numbers_and_in_batches():
    q, k, v = (torch.empty(2, 6, 4, device="meta") for _ in range(3))
    assert xt.attend(q, k, v, top=3).top_index.shape == (2, 6, 3)
    assert xt.leave_one_out(q, k, v).total.shape == (2, 6)
    assert xt.divergence(q, k, q, k).shape == (2, 6)
    with pytest.raises(ArgumentError, match="on meta the number"):
        xt.attend(q, k, v, segments=torch.zeros(6, dtype=torch.int64, device="meta"))
    q, k, v = problem()
    found = torch.func.vmap(lambda q: xt.attend(q, k[0], v[0], top=2).top_weight)(q)
    torch.testing.assert_close(found[1], xt.attend(q[1], k[0], v[0], top=2).top_weight)
    with pytest.raises(ArgumentError, match=r"torch\.func"):
        torch.func.vmap(lambda q: xt.leave_one_out(q, k[0], v[0]).total)(q)


def test_nan_counts_only_where_it_is_seen():
    q, k, v = problem(lead=())
    mask = (torch.arange(7) < 6).expand(7, 7)
    want = xt.leave_one_out(q, k, v, mask=mask).total
    k[:, 6] = torch.nan
    torch.testing.assert_close(xt.leave_one_out(q, k, v, mask=mask).total, want)
    with pytest.raises(ArgumentError, match="key"):
        xt.leave_one_out(q, k, v)
    with pytest.raises(ArgumentError, match="a result is NaN"):
        xt.leave_one_out(q, k.nan_to_num(), v, bias=torch.full((7, 7), torch.inf, dtype=F64))


def test_unmerge_knows_the_digits_of_half_precision():
    q, k, v = (x.bfloat16() for x in problem(5, 6, 2, ()))
    bias = 6.0 * (torch.arange(6) < 2).expand(5, 6)
    whole, part = (xt.attend(q, k[:, :n], v[:, :n], bias=bias[:, :n]) for n in (6, 2))
    with pytest.raises(ArgumentError, match="nothing is known"):
        xt.unmerge(whole, part)
    whole, part = (xt.attend(q, k[:, :n], v[:, :n], bias=-bias[:, :n]) for n in (6, 2))
    rest = xt.attend(q, k[:, 2:], v[:, 2:])
    torch.testing.assert_close(xt.unmerge(whole, part).output, rest.output, rtol=0.02, atol=0.02)


def test_unmerge_where_nothing_is_seen_and_bad_arguments():
    q, k, v = problem(3, 4, 2, ())
    mask = torch.tensor([[False], [True], [True]])
    whole, part = (xt.attend(q, k[:, :n], v[:, :n], mask=mask) for n in (4, 2))
    assert xt.unmerge(whole, part).score_max[0, 0] == -torch.inf
    for call in (
        lambda: xt.unmerge(whole, part, tolerance=0.0),
        lambda: xt.unmerge(None, part),
        lambda: xt.merge(whole),
        lambda: xt.attend(q, k, v, dropout="much"),
        lambda: xt.attend(q, k, v, dropout=0.1, seed=1.5),
    ):
        with pytest.raises(ArgumentError, match="Pass"):
            call()


def test_dropout_keeps_the_digits_of_large_scores():
    q, k = 300 * torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0)), torch.ones(1, 1, 16)
    k = k + torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(1))
    found = xt.attend(q, k, torch.ones(1, 1, 1), dropout=0.5, seed=3).output  # one key: its weight is 1
    torch.testing.assert_close(found, 2 * (found > 0).float(), rtol=1e-6, atol=0)
    assert 0 < int((found > 0).sum()) < 64
