"""The Triton kernels, run by Triton's interpreter, against the n×n reference and plain torch.

The interpreter must be chosen before triton is first imported, so kernels run in a process of their own: the
cases of this file are drawn here, sent there, and judged here. A float64 case must equal the reference to
rounding; others may be twice as far from float64 as plain torch in float32 is, plus a floor of a few
roundings. ``oracles/triton_interpreter.py`` says what the interpreter does as a GPU would.
"""

import itertools
import math
import random
import sys

import pytest
import torch

import exptilt as xt
from exptilt.tilting.backends import reference, tiled
from exptilt.tilting.problem import MASS, Inputs, InputTangents, Needs, RowStatistics, wide_dtype
from exptilt.tilting.score_rule import ScoreRule
from oracles.processes import child

pytestmark = [
    pytest.mark.slow,  # kernels run in Triton's interpreter, or are compiled for GPUs that are not here
    pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only"),
]

WORKER = """
import sys, torch
import exptilt as xt
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.tilting.backends.triton import launch as gpu
from exptilt.tilting.problem import MASS, InputTangents, Inputs, Needs
from exptilt.tilting.score_rule import ScoreRule
from oracles.triton_interpreter import mend, tiles

mend()

def attend(compiled=False, **arguments):
    doubles = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.dtype == torch.float64]
    leaves = [x.requires_grad_() for x in doubles]
    call = torch.compile(xt.attend, backend="aot_eager", fullgraph=True) if compiled else xt.attend
    a = call(**arguments, backend="gpu")
    results = a.output, a.log_normalizer, a.entropy, a.score_mean, a.score_variance, a.score_max, a.key_mass
    gradients = torch.autograd.grad(sum(x.sin().sum() for x in results[:6]), leaves) if leaves else ()
    return tuple(None if x is None else x.detach() for x in (*results, *gradients))

def derivatives(tensors, options, dots, bar, output, output_dot, rows):
    t, rule, dots = Inputs(*tensors), ScoreRule(*options), InputTangents(*dots)
    needs = Needs(bias=t.bias is not None and min(t.bias.shape[-2:]) > 1)
    return (
        gpu.tangent(t, dots, torch.cat([rows[:3], torch.full_like(rows[:1], torch.nan)]), rule),
        tuple(gpu.gradient(t, bar, output, rows[:6], rule, needs)),
        tuple(gpu.gradient(t, bar, output, rows, rule, needs, dots, output_dot)),
        gpu.gradient(t, 0 * bar, output, rows[:3], rule, MASS).column_sum,
    )

def both(query, key, value, tangents, bar, tile=None, **options):
    def call(*x):
        return xt.attend(*x, backend="gpu", **options).output

    primals = query, key, value
    with tiles(tile, tile):
        output, pushed = torch.func.jvp(call, primals, tangents)
        return output, pushed, torch.func.vjp(call, *primals)[1](bar)

KINDS = {"attend": lambda x: attend(**x), "both": lambda x: both(**x)}
KINDS["derivatives"] = lambda x: derivatives(*x)
KINDS["forward"] = lambda x: gpu.forward(Inputs(*x[0]), ScoreRule(*x[1]))
results = []
for kind, arguments in torch.load(sys.argv[1]):
    try:
        found = KINDS[kind](arguments)
    except Exception as problem:
        found = repr(problem)
    results.append(found)
torch.save(results, sys.argv[2])
"""


def normal(g, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def draw(seed, dtype=None):
    """A problem with options mixed at random: small, but of several tiles."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = dtype or (torch.float64 if seed % 3 == 0 else torch.float32)
    N, Hkv, group = r.choice([(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 3)])
    Hq, Q, K = Hkv * group, r.choice([1, 5, 17, 70]), r.choice([1, 7, 33, 64, 80])
    D, Dv = r.choice([1, 3, 16, 20, 64, 130]), r.choice([0, 1, 9, 64, 130])
    big = r.random() < 0.25  # scores of size 10⁴

    def some(chance):
        return r.random() < chance

    def holes(x):
        return torch.where(torch.rand(x.shape, generator=g) < 0.3, -torch.inf, x) if some(0.4) else x

    def pairs():
        return tuple(size if some(0.6) else 1 for size in (N, Hq, Q, K))

    query, key, value = (
        normal(g, N, Hq, Q, D, dtype=dtype),
        normal(g, N, Hkv, K, D, dtype=dtype),
        normal(g, N, Hkv, K, Dv, dtype=dtype),
    )
    dtype = wide_dtype(dtype)
    if some(0.3):  # other strides: the heads behind the positions, a stride of 2, one key for the whole batch
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        key = key[:1].expand_as(key)
        value = torch.stack([value, value + 1], -1)[..., 0]
    bias = holes(normal(g, *pairs(), dtype=dtype) * (1e4 if big else 1)) if some(0.4) else None
    log_weight = holes(normal(g, N, r.choice([Hkv, Hq]), K, dtype=dtype)) if some(0.4) else None
    mask = torch.rand(pairs(), generator=g) < 0.6 if some(0.4) else None
    scale = (1e4 if big and bias is None else 1.0) / math.sqrt(D) * r.choice([1.0, 0.3, -1.0])
    options = (
        scale,
        some(0.4),
        r.choice([0, 1, 5, 40, 10**12]) if some(0.5) else None,
        r.choice([0.5, 2.0, 30.0]) if some(0.4) else None,
    )
    return (query, key, value, bias, log_weight, None, mask), options


def degenerate():
    g = torch.Generator().manual_seed(1)
    q, k, v = normal(g, 1, 2, 20, 8), normal(g, 1, 1, 40, 8), normal(g, 1, 1, 40, 3)
    plain = (0.5, False, None, None)
    hidden = torch.ones(1, 1, 20, 1, dtype=torch.bool)
    hidden[0, 0, 3:9] = False
    late = torch.full((1, 1, 1, 40), -torch.inf, dtype=torch.float64)
    late[..., 35:] = -1e4  # nothing in the first tiles, then scores far below 0
    far = torch.zeros(1, 1, 1, 40, dtype=torch.float64)
    far[..., 0] = 1e4  # one key takes it all, then tiles whose weights underflow
    rising = torch.linspace(-1e4, 1e4, 40, dtype=torch.float64).reshape(1, 1, 1, 40)
    return {
        "no keys": ((q, k[:, :, :0], v[:, :, :0]), plain),
        "no queries": ((q[:, :, :0], k, v), plain),
        "no batch": ((q[:0], k[:0], v[:0]), plain),
        "some rows hidden": ((q, k, v, None, None, None, hidden), plain),
        "all hidden": ((q, k, v, None, None, None, hidden & False), plain),
        "all weights zero": ((q, k, v, None, torch.full((1, 1, 40), -torch.inf, dtype=torch.float64)), plain),
        "window 0": ((q, k, v), (0.5, False, 0, None)),
        "causal, more queries than keys": ((q, k[:, :, :7], v[:, :, :7]), (0.5, True, None, None)),
        "window, more queries than keys": ((q, k[:, :, :7], v[:, :, :7]), (0.5, False, 3, None)),
        "all scores equal": ((q * 0, k, v), plain),
        "all scores -1e4": ((q * 0, k, v, torch.full((1, 1, 1, 1), -1e4, dtype=torch.float64)), plain),
        "late": ((q, k, v, late), plain),
        "one takes all": ((q, k, v, far), plain),
        "rising by 512 a key": ((q, k, v, rising), plain),
        "falling by 512 a key": ((q, k, v, -rising), plain),
        "rising in float32": ((q.float(), k.float(), v.float(), rising.float()), plain),
        "softcap of 1e-3": ((q, k, v), (0.5, False, None, 1e-3)),
        "softcap of 1e6": ((q.float(), k.float(), v.float()), (0.5, False, None, 1e6)),
    }


HALF = {2: torch.bfloat16, 5: torch.float16}  # seeds, modulo 6
RANDOM = {seed: draw(seed) for seed in range(40)}
DEGENERATE = degenerate()


def full_bias(t):
    return t.bias is not None and min(t.bias.shape[-2:]) > 1


def derivative_case(seed):
    """A problem in one of four dtypes, with tangents, cotangents and what its forward sweep has found."""
    tensors, options = draw(seed, HALF.get(seed % 6))
    t, rule, g = Inputs(*tensors), ScoreRule(*options), torch.Generator().manual_seed(seed + 1000)
    wide = wide_dtype(t.query.dtype)
    output, lines, _ = tiled.forward(t, rule)
    lines = RowStatistics(*lines)
    dead = lines.weight == 0
    known = torch.where(dead, 0.0, lines.maximum), torch.where(dead, 0.0, 1 / lines.weight), lines.gap

    def like(x, dtype=None):
        return None if x is None else normal(g, *x.shape, dtype=dtype or x.dtype)

    dots = InputTangents(*(like(x) for x in t[:5]))
    dots = dots._replace(key=None, value=None) if seed % 4 == 0 else dots
    size = 1 + float(lines.variance.max().sqrt()) if lines.variance.numel() else 1.0
    factors = (1, 1 / size, 1 / size**2, 1, 1, 1 / size)  # of a0, a1, a2, pushed, e0, e1
    rows = torch.stack([*known, *(f * like(lines.gap) for f in factors)])
    # the tangent of the output about the random `pushed`: kernels with one tile of keys sum it themselves
    moved, _ = tiled.tangent(t, dots, rows[[0, 1, 2, 6]], rule)
    return tensors, options, tuple(dots), like(output), output.to(wide), moved, rows


DERIVATIVES = {seed: derivative_case(seed) for seed in range(9)}


def plain_derivatives(tensors, options, dots, bar, output, output_dot, rows, dtype=None):
    """The same by plain torch, in another dtype if one is given."""

    def cast(x):
        return x if dtype is None or x is None or not x.is_floating_point() else x.to(dtype)

    t, dots, rule = Inputs(*map(cast, tensors)), InputTangents(*map(cast, dots)), ScoreRule(*options)
    bar, output, output_dot, rows = map(cast, (bar, output, output_dot, rows))
    return (
        tiled.tangent(t, dots, torch.cat([rows[:3], torch.full_like(rows[:1], torch.nan)]), rule),
        tiled.gradient(t, bar, output, rows[:6], rule, Needs(bias=full_bias(t))),
        tiled.gradient(t, bar, output, rows, rule, Needs(bias=full_bias(t)), dots, output_dot),
        tiled.gradient(t, 0 * bar, output, rows[:3], rule, MASS).column_sum,
    )


def flat_derivatives(found, output):
    """All tensors by name; of the tangent what does not depend on the tiles, which choose its reference r."""
    (pushed, sums), first, twice, mass = found
    r = sums[0]
    named = {
        "tangent": pushed + r.unsqueeze(-1) * output.to(pushed.dtype),
        "mean tangent": r + sums[1],
        "mass": mass,
    }
    names = "query", "key", "value", "columns", "rows", "bias"
    for kind, gradients in (("gradient", first), ("second", twice)):
        named |= {f"{kind} by {name}": x for name, x in zip(names, gradients, strict=True)}
    return named


def unseen():
    """NaN where no query of a tile looks: it would show in every number that is made of it."""
    g = torch.Generator().manual_seed(2)
    q, k, v = normal(g, 1, 1, 1, 8), normal(g, 1, 1, 80, 8), normal(g, 1, 1, 80, 8)
    k[:, :, :75], v[:, :, :75] = torch.nan, torch.nan
    early = normal(g, 1, 1, 64, 8), normal(g, 1, 1, 64, 8), normal(g, 1, 1, 64, 8)
    early[1][:, :, 32:], early[2][:, :, 32:] = torch.nan, torch.nan
    return [((q, k, v), (1.0, True, 5, None)), (early, (1.0, True, None, None))]


def public_calls():
    g = torch.Generator().manual_seed(3)
    base = {"query": normal(g, 2, 4, 9, 8), "key": normal(g, 2, 2, 12, 8), "value": normal(g, 2, 2, 12, 5)}
    extra = {"sink": normal(g, 4), "log_weight": normal(g, 2, 12), "bias": normal(g, 9, 12)}
    half = {name: x.bfloat16() for name, x in base.items()}
    return [
        base | extra | {"causal": True, "softcap": 3.0},
        base | {"key_mass": True},
        half,
        base | extra | {"compiled": True},
        base
        | {
            "query": base["query"][:, :, :1],
            "key": normal(g, 2, 2, 900, 8),
            "value": normal(g, 2, 2, 900, 5),
        },
    ]


# The table of the package jvp_flash_attention, in whose own results two additive masks of 28 cases are off.
LENGTHS = 32, 64, 128, 256, 512, 1024, 2048
MASKS = "none", "causal", "boolean", "additive"


def mask_case(length, mask, dtype):
    """Output, tangent and gradients of attention under one kind of mask, as users of a jvp kernel call it."""
    g = torch.Generator().manual_seed(length)
    query, key, value, *tangents, bar = (normal(g, 1, 1, length, 32, dtype=dtype) for _ in range(7))
    options = {"causal": True} if mask == "causal" else {}
    if length > 32:  # tiles of half the length: four to a matrix, and as many numbers as in many small ones
        options["tile"] = length // 2
    if mask == "boolean":
        options["mask"] = torch.rand(1, 1, length, length, generator=g) < 0.7
    if mask == "additive":
        options["bias"] = normal(g, 1, 1, length, length, dtype=torch.float32)
    return {"query": query, "key": key, "value": value, "tangents": tuple(tangents), "bar": bar} | options


HALVES = torch.float16, torch.bfloat16, torch.float32


def judge_mask(found, query, key, value, tangents, bar, tile=None, **options):
    """Against attention written out in float64; off by two roundings of the dtype at most, or sixteen of
    float32, in which sums are taken; and float32 at most twice as far as plain torch, plus four roundings.
    """
    eps = max(torch.finfo(query.dtype).eps, 8 * torch.finfo(torch.float32).eps)

    def call(q, k, v):
        s = q @ k.mT / math.sqrt(q.shape[-1]) + options.get("bias", torch.zeros(())).to(q.dtype)
        if options.get("causal"):
            s = s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), -torch.inf)
        if "mask" in options:
            s = s.masked_fill(~options["mask"], -torch.inf)
        return s.softmax(-1) @ v

    def both(dtype):
        primals = tuple(x.to(dtype) for x in (query, key, value))
        moved = torch.func.jvp(call, primals, tuple(x.to(dtype) for x in tangents))
        return *moved, *torch.func.vjp(call, *primals)[1](bar.to(dtype))

    for x, y, z in zip((*found[:2], *found[2]), both(torch.float64), both(torch.float32), strict=True):
        assert x.dtype == query.dtype
        size = max(1.0, float(y.abs().max()) / 4)
        torch.testing.assert_close(x.double(), y, rtol=2 * eps, atol=2 * eps * size)
        if x.dtype == torch.float32:
            assert (x - y).abs().max() <= 2 * (z - y).abs().max() + eps / 2 * size


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the kernel makes of every case, by name."""
    folder = tmp_path_factory.mktemp("gpu")
    cases = {("random", seed): ("forward", case) for seed, case in RANDOM.items()}
    cases |= {("degenerate", name): ("forward", case) for name, case in DEGENERATE.items()}
    cases |= {("unseen", at): ("forward", case) for at, case in enumerate(unseen())}
    cases |= {("public", at): ("attend", call) for at, call in enumerate(public_calls())}
    cases |= {("derivatives", seed): ("derivatives", case) for seed, case in DERIVATIVES.items()}
    cases |= {
        ("mask", *case): ("both", mask_case(*case)) for case in itertools.product(LENGTHS[:-2], MASKS, HALVES)
    }
    torch.save(list(cases.values()), folder / "in.pt")
    child(WORKER, folder / "in.pt", folder / "out.pt", TRITON_INTERPRET="1")
    results = dict(zip(cases, torch.load(folder / "out.pt"), strict=True))
    failed = {name: result for name, result in results.items() if isinstance(result, str)}
    assert failed == {}
    return results


NAMES = ["output", "log_normalizer", "entropy", "mean", "variance", "maximum"]


def judge(result, tensors, options):
    """Hold (output, lines, best) against the float64 reference."""
    output, lines, best = result
    t, rule = Inputs(*tensors), ScoreRule(*options)
    wide = Inputs(*(x if x is None or x.dtype == torch.bool else x.double() for x in t))
    exact, plain = reference.attend(wide, rule)[:6], reference.attend(t, rule)[:6]
    s = reference.scores(wide, rule)
    finite = s[s > -torch.inf].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    rounding = 8 * torch.finfo(t.query.dtype).eps * (1 + largest)
    for name, x, y, z in zip(NAMES, (output, *lines[:5]), exact, plain, strict=True):
        assert x.dtype == t.query.dtype
        assert x.shape == y.shape
        assert torch.equal(x == -torch.inf, y == -torch.inf), name
        y, x, z = (torch.where(y == -torch.inf, 0.0, a).double() for a in (y, x, z))
        # a score that is off by `rounding` moves a probability by as much, and an average by that times its
        # size; the reference itself has such an error in its mean, which it takes about 0
        if y.numel():
            size = 1 + y.abs().max().item()
            floor = (
                rounding * (size if name in ("output", "variance") else 1)
                + 8 * torch.finfo(torch.float64).eps * (1 + largest) * size
            )
            assert (x - y).abs().max().item() <= 2 * (z - y).abs().max().item() + floor, name
    assert best.dtype == torch.int64
    dead = exact[5] == -torch.inf
    assert (best[dead] == 0).all()
    if s.shape[3]:
        gap = exact[5] - s.gather(3, best[..., None])[..., 0]
        assert (gap[~dead] <= rounding).all()


@pytest.mark.parametrize("seed", RANDOM)
def test_options_mixed_at_random(found, seed):
    judge(found["random", seed], *RANDOM[seed])


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate(found, name):
    judge(found["degenerate", name], *DEGENERATE[name])


def test_first_of_equal_maxima(found):
    _, _, best = found["degenerate", "all scores equal"]
    assert (best == 0).all()
    _, _, best = found["degenerate", "late"]
    assert (best >= 35).all()


def test_closed_forms(found):
    """A few numbers that need no reference."""
    lines = RowStatistics(*found["degenerate", "all scores -1e4"][1])
    expected = RowStatistics(math.log(40) - 1e4, math.log(40), -1e4, 0.0, -1e4, 40.0, 0.0)
    for x, value in zip(lines, expected, strict=True):
        torch.testing.assert_close(x, torch.full_like(x, value), rtol=1e-14, atol=1e-11)
    for name in ("no keys", "all hidden", "window 0", "all weights zero"):
        output, lines, _ = found["degenerate", name]
        lines = RowStatistics(*lines)
        assert (output == 0).all()
        assert lines.log_normalizer.isneginf().all()
        assert lines.maximum.isneginf().all()
        assert (torch.stack([lines.entropy, lines.mean, lines.variance, lines.weight]) == 0).all()


def test_tiles_that_nobody_sees_are_skipped(found):
    for at, (_, (output, lines, _)) in enumerate((at, found["unseen", at]) for at in range(2)):
        rows = slice(None) if at == 0 else slice(0, 32)  # of the second, the first tile of queries
        assert output[:, :, rows].isfinite().all()
        assert lines[:, :, :, rows].isfinite().all()
    assert found["unseen", 1][0][:, :, 32:].isnan().any()  # the second tile does look there


def test_cases_are_mixed():
    """The draw holds every option on and off, alone and with others, in both precisions."""
    drawn = [(Inputs(*tensors), ScoreRule(*options)) for tensors, options in RANDOM.values()]
    facts = {
        "float32": [t.query.dtype == torch.float32 for t, _ in drawn],
        "grouped": [t.query.shape[1] > t.key.shape[1] for t, _ in drawn],
        "odd D": [t.query.shape[3] in (1, 3, 20) for t, _ in drawn],
        "D in pieces": [t.query.shape[3] > 128 for t, _ in drawn],
        "Dv in pieces": [t.value.shape[3] > 128 for t, _ in drawn],
        "no value": [t.value.shape[3] == 0 for t, _ in drawn],
        "strides": [not t.query.is_contiguous() for t, _ in drawn],
        "bias": [t.bias is not None for t, _ in drawn],
        "broadcast bias": [t.bias is not None and 1 in t.bias.shape[2:] for t, _ in drawn],
        "mask": [t.mask is not None for t, _ in drawn],
        "log_weight": [t.log_weight is not None for t, _ in drawn],
        "log_weight by query head": [
            t.log_weight is not None and t.log_weight.shape[1] > t.key.shape[1] for t, _ in drawn
        ],
        "causal": [o.causal for _, o in drawn],
        "window": [o.window is not None for _, o in drawn],
        "causal window": [o.causal and o.window is not None for _, o in drawn],
        "softcap": [o.softcap is not None for _, o in drawn],
        "several tiles": [t.query.shape[2] > 64 and t.key.shape[2] > 32 for t, _ in drawn],
    }
    assert {name for name, seen in facts.items() if not 3 <= sum(seen) <= len(drawn) - 3} == set()


@pytest.mark.parametrize("at", range(len(public_calls())))
def test_attend(found, at):
    """Through the front door: sink, key mass, half precision, compiled, one query with its keys in parts."""
    (*results, mass), gradients = found["public", at][:7], found["public", at][7:]
    call = {
        name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x
        for name, x in public_calls()[at].items()
        if name != "compiled"
    }
    exact = xt.attend(**call, backend="reference")
    wanted = (
        exact.output,
        exact.log_normalizer,
        exact.entropy,
        exact.score_mean,
        exact.score_variance,
        exact.score_max,
    )
    for x, y in zip(results, wanted, strict=True):
        torch.testing.assert_close(x, y.detach())
    if call.get("key_mass"):
        torch.testing.assert_close(mass, exact.key_mass.detach())
    leaves = [x for x in call.values() if isinstance(x, torch.Tensor) and x.dtype == torch.float64]
    assert len(gradients) == len(leaves)
    if leaves:
        for x, y in zip(
            gradients, torch.autograd.grad(sum(x.sin().sum() for x in wanted), leaves), strict=True
        ):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("seed", DERIVATIVES)
def test_derivatives_mixed_at_random(found, seed):
    judge_derivatives(found["derivatives", seed], DERIVATIVES[seed])


@pytest.mark.zoo
@pytest.mark.parametrize("start", range(9, 63, 27))
def test_many_more_derivatives(tmp_path, start):
    cases = [derivative_case(seed) for seed in range(start, start + 27)]
    torch.save([("derivatives", case) for case in cases], tmp_path / "in.pt")
    child(WORKER, tmp_path / "in.pt", tmp_path / "out.pt", TRITON_INTERPRET="1")
    for result, case in zip(torch.load(tmp_path / "out.pt"), cases, strict=True):
        judge_derivatives(result, case)


def judge_derivatives(result, case):
    t, output = Inputs(*case[0]), case[4]
    kernels, plain = (flat_derivatives(x, output) for x in (result, plain_derivatives(*case)))
    exact = flat_derivatives(plain_derivatives(*case, dtype=torch.float64), output)
    s = reference.scores(
        Inputs(*(x if x is None or x.dtype == torch.bool else x.double() for x in t)), ScoreRule(*case[1])
    )
    largest = max(1.0, s[s > -torch.inf].abs().max().item()) if (s > -torch.inf).any() else 1.0
    rounding = 64 * torch.finfo(wide_dtype(t.query.dtype)).eps * largest
    for name, y in exact.items():
        x, z = kernels[name], plain[name]
        assert x.shape == y.shape, name
        assert x.dtype == wide_dtype(t.query.dtype), name
        if y.numel():
            floor = rounding * (1 + y.abs().max().item())
            assert (x.double() - y).abs().max().item() <= 2 * (z.double() - y).abs().max().item() + floor, (
                name
            )


@pytest.mark.parametrize("length", LENGTHS[:-2])
@pytest.mark.parametrize("mask", MASKS)
def test_forward_mode_under_masks(found, mask, length):
    for dtype in HALVES:
        judge_mask(found["mask", length, mask, dtype], **mask_case(length, mask, dtype))


@pytest.mark.parametrize("length", [LENGTHS[-2], pytest.param(LENGTHS[-1], marks=pytest.mark.zoo)])
def test_forward_mode_under_masks_of_long_sequences(tmp_path, length):
    cases = [mask_case(length, mask, dtype) for mask in MASKS for dtype in HALVES]
    torch.save([("both", case) for case in cases], tmp_path / "in.pt")
    child(WORKER, tmp_path / "in.pt", tmp_path / "out.pt", TRITON_INTERPRET="1")
    for result, case in zip(torch.load(tmp_path / "out.pt"), cases, strict=True):
        judge_mask(result, **case)
