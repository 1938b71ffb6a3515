"""The Triton kernel, run by Triton's interpreter, against the n×n reference.

The interpreter must be chosen before triton is first imported, so kernels run in a process of their own: the
cases of this file are drawn here, sent there, and judged here. A float64 case must equal the reference to
rounding; a float32 case may be twice as far from the float64 reference as the reference itself in float32 is,
plus a floor of a few roundings of the largest score.
"""

import json
import math
import os
import random
import subprocess
import sys

import pytest
import torch

import exptilt as xt
from exptilt.tilting.backends import reference
from exptilt.tilting.problem import Inputs, Lines
from exptilt.tilting.score_rule import ScoreRule

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")

WORKER = """
import sys, warnings, torch
import exptilt as xt
from exptilt.tilting.backends import triton as gpu
from exptilt.tilting.problem import Inputs
from exptilt.tilting.score_rule import ScoreRule

def attend(**arguments):
    doubles = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.dtype == torch.float64]
    leaves = [x.requires_grad_() for x in doubles]
    a = xt.attend(**arguments, backend="gpu")
    results = a.output, a.log_normalizer, a.entropy, a.score_mean, a.score_variance, a.score_max, a.key_mass
    gradients = torch.autograd.grad(sum(x.sin().sum() for x in results[:6]), leaves) if leaves else ()
    return tuple(None if x is None else x.detach() for x in (*results, *gradients))

results = []
for kind, arguments in torch.load(sys.argv[1]):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            if kind == "attend":
                found = attend(**arguments)
            else:
                found = gpu.forward(Inputs(*arguments[0]), ScoreRule(*arguments[1]))
        except Exception as problem:
            found = repr(problem)
    results.append((found, [str(w.message) for w in seen if "gpu" in str(w.message)]))
torch.save(results, sys.argv[2])
"""


def child(code, *arguments, **environment):
    kept = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def normal(g, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def draw(seed):
    """A problem with options mixed at random: small, but of several tiles."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = torch.float64 if seed % 3 == 0 else torch.float32
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


RANDOM = {seed: draw(seed) for seed in range(40)}
DEGENERATE = degenerate()


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
    return [base | extra | {"causal": True, "softcap": 3.0}, base | {"key_mass": True}, half]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the kernel makes of every case, by name."""
    folder = tmp_path_factory.mktemp("gpu")
    cases = {("random", seed): ("forward", case) for seed, case in RANDOM.items()}
    cases |= {("degenerate", name): ("forward", case) for name, case in DEGENERATE.items()}
    cases |= {("unseen", at): ("forward", case) for at, case in enumerate(unseen())}
    cases |= {("public", at): ("attend", call) for at, call in enumerate(public_calls())}
    torch.save(list(cases.values()), folder / "in.pt")
    child(WORKER, folder / "in.pt", folder / "out.pt", TRITON_INTERPRET="1")
    results = dict(zip(cases, torch.load(folder / "out.pt"), strict=True))
    failed = {name: result for name, (result, _) in results.items() if isinstance(result, str)}
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
    judge(found["random", seed][0], *RANDOM[seed])


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate(found, name):
    judge(found["degenerate", name][0], *DEGENERATE[name])


def test_first_of_equal_maxima(found):
    _, _, best = found["degenerate", "all scores equal"][0]
    assert (best == 0).all()
    _, _, best = found["degenerate", "late"][0]
    assert (best >= 35).all()


def test_closed_forms(found):
    """A few numbers that need no reference."""
    lines = Lines(*found["degenerate", "all scores -1e4"][0][1])
    expected = Lines(math.log(40) - 1e4, math.log(40), -1e4, 0.0, -1e4, 40.0, 0.0)
    for x, value in zip(lines, expected, strict=True):
        torch.testing.assert_close(x, torch.full_like(x, value), rtol=1e-14, atol=1e-11)
    for name in ("no keys", "all hidden", "window 0", "all weights zero"):
        output, lines, _ = found["degenerate", name][0]
        lines = Lines(*lines)
        assert (output == 0).all()
        assert lines.log_normalizer.isneginf().all()
        assert lines.maximum.isneginf().all()
        assert (torch.stack([lines.entropy, lines.mean, lines.variance, lines.weight]) == 0).all()


def test_tiles_that_nobody_sees_are_skipped(found):
    for at, (_, (output, lines, _)) in enumerate((at, found["unseen", at][0]) for at in range(2)):
        rows = slice(None) if at == 0 else slice(0, 32)  # of the second, the first tile of queries
        assert output[:, :, rows].isfinite().all()
        assert lines[:, :, :, rows].isfinite().all()
    assert found["unseen", 1][0][0][:, :, 32:].isnan().any()  # the second tile does look there


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


@pytest.mark.parametrize("at", range(3))
def test_attend(found, at):
    """Through the front door: sink, key mass, half precision, and the gradients that `tiled` sweeps."""
    (*results, mass), gradients = found["public", at][0][:7], found["public", at][0][7:]
    call = {
        name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x
        for name, x in public_calls()[at].items()
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


def test_fallback_is_said_once(found):
    said = [text for at in range(3) for text in found["public", at][1]]
    assert len(said) == 1
    assert "'gpu' backend has no gradient sweep; 'tiled' does it" in said[0]


COMPILE = r"""
import contextlib, io, json, re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from exptilt.tilting.backends import triton as gpu
from exptilt.tilting.problem import Inputs, Lines
from exptilt.tilting.score_rule import ScoreRule

NUMBERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.uint8: "*u8", torch.int64: "*i64"}

def kind(x):
    if isinstance(x, tuple):
        return tuple(map(kind, x))
    return NUMBERS[x.dtype] if isinstance(x, torch.Tensor) else "i32"

def compiled(capability, number, D, full):
    one = lambda *shape: torch.empty(*shape, dtype=number)
    extra = (one(1, 1, 99, 77), one(2, 2, 77), None, torch.ones(1, 1, 99, 77).bool()) if full else ()
    t = Inputs(one(2, 4, 99, D), one(2, 2, 77, D), one(2, 2, 77, D), *extra)
    rule = ScoreRule(0.1, causal=full, window=5 if full else None, softcap=2.0 if full else None)
    best = torch.empty(2, 4, 99, dtype=torch.int64)
    _, arguments = gpu.launch(t, rule, one(2, 4, 99, D), one(len(Lines._fields), 2, 4, 99), best)
    parameters = gpu._forward.params
    fixed = {p.name: arguments[p.name] for p in parameters if p.is_constexpr or arguments[p.name] is None}
    kinds = {p.name: p.annotation_type or kind(arguments[p.name]) for p in parameters if p.name not in fixed}
    signature = {p.name: kinds.get(p.name, "constexpr") for p in parameters}
    with contextlib.redirect_stdout(io.StringIO()) as log:  # the assembler's
        source, target = ASTSource(gpu._forward, signature, fixed), GPUTarget("cuda", capability, 32)
        kernel = triton.compile(source, target=target, options=gpu._COMPILED)
    ptx = kernel.asm["ptx"]
    spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())[1]
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    size, shared = len(kernel.asm["cubin"]), kernel.metadata.shared
    return {"target": target, "bytes": size, "shared": shared, "spilled": int(spilled), "tf32": "tf32" in ptx}

print(json.dumps([compiled(80, torch.float32, 64, True), compiled(90, torch.float64, 64, False)]))
"""


def test_compiles_for_real_gpus(tmp_path):
    """Machine code for two generations, without a GPU: within the smaller one's resources, no TF32."""
    kernels = json.loads(child(COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_DUMP_PTXAS_LOG="1"))
    assert [kernel["target"][:5] for kernel in kernels] == ["sm_80", "sm_90"]
    for kernel in kernels:
        assert kernel["bytes"] > 1000
        assert kernel["shared"] <= 99 * 1024  # what a program may have on any GPU from 8.0 on
        assert kernel["spilled"] == 0
        assert not kernel["tf32"]


def test_without_triton():
    """What is missing, and how to get it."""
    code = """
import sys
sys.modules["triton"] = None
import torch, exptilt as xt
from exptilt._support.errors import MissingExtraError
x = torch.zeros(1, 2, 3)
xt.attend(x, x, x, backend="tiled")
try:
    xt.attend(x, x, x, backend="gpu")
except MissingExtraError as problem:
    print(problem)
"""
    assert "pip install 'exptilt[gpu]'" in child(code, TRITON_INTERPRET="1")
