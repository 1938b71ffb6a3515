"""The edges: what was found wrong by use, one test or more for each, so that it stays mended.

Few queries and far scores, sinks at −inf, sums over many keys, forked processes, compiled and batched
derivatives, windows without end, autocast, the names that torch's own attention uses, and what a result
looks like in a terminal.
"""

import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles.tilting_fuzz import small_tiles

BACKENDS = ("reference", "cpu", "tiled")
ROWS = ("log_normalizer", "entropy", "score_mean", "score_variance", "score_max")


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# 1. One score routine for all sweeps, and weights bounded by 1.


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("size", [1e6, 1e10, 1e20, 1e30])
def test_mass_of_a_large_query(backend, size):
    torch.manual_seed(3)
    q, k = torch.randn(1, 1, 64) * size, torch.randn(1, 128, 64)
    mass = xt.attend(q, k, k, key_mass=True, backend=backend).key_mass
    assert (mass >= 0).all()
    assert (mass <= 1).all()
    assert abs(mass.double().sum().item() - 1) < 1e-6


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("queries", [1, 4, 7, 8, 9, 16, 17, 40])
def test_mass_of_large_queries_whatever_their_number(backend, queries):
    """Last tiles of a few rows, too; the gradient by the values is the mass again."""
    q, k = normal(queries, 1, queries, 64) * 1e6, normal(0, 1, 128, 64)
    v = torch.zeros(1, 128, 1, requires_grad=True)
    a = xt.attend(q, k, v, key_mass=True, backend=backend)
    (slope,) = torch.autograd.grad(a.output.sum(), v)
    for mass in (a.key_mass, slope):
        assert (mass >= 0).all()
        assert (mass <= queries * (1 + 1e-6)).all()
        assert abs(mass.double().sum().item() - queries) < 1e-6 * queries


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


# 2. Sinks at the edge of the dtype.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edge", ["-inf", "finfo.min"])
def test_a_sink_that_nothing_falls_into(backend, dtype, edge):
    """As without a sink: every statistic, the key mass, every gradient and tangent."""
    at = -math.inf if edge == "-inf" else torch.finfo(dtype).min
    q, k, v = (
        normal(0, 2, 3, 4, dtype=dtype),
        normal(1, 2, 5, 4, dtype=dtype),
        normal(2, 2, 5, 3, dtype=dtype),
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    sink = torch.full((2,), at, dtype=dtype, requires_grad=True)
    found = xt.attend(q, k, v, sink=sink, key_mass=True, backend=backend)
    expected = xt.attend(q, k, v, key_mass=True, backend="reference")
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for name in ("output", *ROWS, "key_mass"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=tolerance, atol=tolerance, msg=name
        )

    def total(a):
        return (
            a.output.sin().sum()
            + sum((i + 1) * getattr(a, name).sum() for i, name in enumerate(ROWS))
            + a.key_mass.square().sum()
        )

    *slopes, by_sink = torch.autograd.grad(total(found), (q, k, v, sink))
    for x, y in zip(slopes, torch.autograd.grad(total(expected), (q, k, v)), strict=True):
        torch.testing.assert_close(x, y, rtol=10 * tolerance, atol=10 * tolerance)
    assert (by_sink == 0).all()

    def mass(q, sink=None):
        a = xt.attend(q, k.detach(), v.detach(), sink=sink, key_mass=True, backend=backend)
        return a.key_mass, a.score_mean, a.score_variance

    moved = torch.func.jvp(mass, (q.detach(), sink.detach()), (torch.ones_like(q), torch.ones_like(sink)))[1]
    for x, y in zip(moved, torch.func.jvp(mass, (q.detach(),), (torch.ones_like(q),))[1], strict=True):
        torch.testing.assert_close(x, y, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_where_no_key_is_seen(backend):
    """Nothing at all is seen: zeros, and a log-normalizer of −inf; derivatives are 0."""
    q, k = normal(0, 1, 3, 4).requires_grad_(), normal(1, 1, 5, 4)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    a = xt.attend(q, k, k, mask=mask, sink=torch.tensor([-math.inf]), key_mass=True, backend=backend)
    assert a.log_normalizer[0, 1] == -math.inf
    assert a.score_max[0, 1] == -math.inf
    assert (a.output[0, 1] == 0).all()
    for name in ("entropy", "score_mean", "score_variance"):
        assert getattr(a, name)[0, 1] == 0
    (slope,) = torch.autograd.grad(
        a.output.sum() + a.entropy.sum() + a.score_variance.sum() + a.key_mass.sum(), q
    )
    assert slope.isfinite().all()
    assert (slope[0, 1] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sink_that_is_no_score(backend, bad):
    q, k = normal(0, 2, 3, 4), normal(1, 2, 5, 4)
    with pytest.raises(ArgumentError, match="sink"):
        xt.attend(q, k, k, sink=torch.tensor([0.0, bad]), check=True, backend=backend)
    with pytest.raises(ArgumentError, match="sink"):
        xt.log_normalizer(q, k, sink=torch.tensor([0.0, bad]), check=True, backend=backend)


# 3. Sums over many keys.


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


# 4. A forked child.

FORK = """
import os, sys, threading
import numpy as np
import torch
import exptilt as xt
torch.set_num_threads(2)
torch.ones(10**7).sum()
x = torch.randn(600, 600)
x @ x
{before}
child = os.fork()
if child == 0:
    q = torch.randn(4, {n}, 16)
    a = xt.attend(q, q, q, causal=True)
    os._exit(0 if np.isfinite(a.output.numpy()).all() else 3)  # torch's own threads hang in a child
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("n", [8, 700])
@pytest.mark.parametrize(
    "before", ["", "xt.attend(x[None], x[None], x[None])"], ids=["never attended", "attended"]
)
def test_a_forked_child_attends(before, n):
    """The parent used torch's threads, then forks; a child that hangs is killed after a minute and a half.

    In such a child torch's own parallel loops hang too (a sum of 10⁷ numbers does), so attend must not run
    any there.
    """
    script = FORK.format(before=before, n=n)
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, text = run.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        pytest.fail("attend hangs in a forked child")
    assert run.returncode == 0, text.decode()


# 5. Compiled and batched derivatives, windows, NaN behind a mask.


@pytest.mark.parametrize(
    ("compiler", "fullgraph"),
    [("aot_eager", False), ("aot_eager", True), pytest.param("inductor", True, marks=pytest.mark.slow)],
)
def test_compiled_fisher_product(compiler, fullgraph):
    torch._dynamo.reset()
    q, k, v = normal(0, 2, 5, 4), normal(1, 1, 9, 4), normal(2, 2, 5, 4)

    def product(q, k, v):
        return xt.fisher_vector_product(q.sin(), k, v, causal=True, softcap=3.0).cos()

    compiled = torch.compile(product, backend=compiler, fullgraph=fullgraph)
    torch.testing.assert_close(compiled(q, k, v), product(q, k, v), rtol=1e-5, atol=1e-6)


def test_gradient_of_a_compiled_fisher_product():
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in (normal(0, 2, 5, 4), normal(1, 1, 9, 4), normal(2, 2, 5, 4))]

    def product(q, k, v):
        return xt.fisher_vector_product(q, k, v, scale=0.5).square().sum()

    expected = torch.autograd.grad(product(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(product, backend="aot_eager")(*inputs), inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("at", [0.3, -math.inf])
def test_third_derivatives_of_key_mass_with_a_sink(backend, at):
    """Backwards three times, with a row that sees nothing; against the reference, which plain torch
    differentiates.
    """
    q0, k0 = normal(0, 1, 3, 2, dtype=torch.float64), normal(1, 1, 4, 2, dtype=torch.float64)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    steps = [normal(i + 2, 1, 3, 2, dtype=torch.float64) for i in range(3)]

    def third(backend):
        q, k = q0.clone().requires_grad_(), k0.clone().requires_grad_()
        sink = torch.tensor([at], dtype=torch.float64, requires_grad=True)
        x = (
            xt.attend(q, k, k, mask=mask, sink=sink, key_mass=True, backend=backend).key_mass
            * torch.arange(1.0, 5.0)
        ).sum()
        for step in steps[:2]:
            (slope,) = torch.autograd.grad(x, q, create_graph=True)
            x = (slope * step).sum()
        return torch.autograd.grad(x, (q, k, sink))

    for name, x, y in zip(("query", "key", "sink"), third(backend), third("reference"), strict=True):
        assert x.isfinite().all(), name
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_third_derivatives_of_key_mass_against_differences(backend):
    """The second derivative's slope, by central differences of the backend's own."""
    q0, k = normal(0, 1, 3, 2, dtype=torch.float64), normal(1, 1, 4, 2, dtype=torch.float64)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2] = False
    a, b, c = (normal(i + 2, 1, 3, 2, dtype=torch.float64) for i in range(3))
    sink = torch.tensor([0.3], dtype=torch.float64)

    def second(q):
        q = q.detach().requires_grad_()
        mass = xt.attend(q, k, k, mask=mask, sink=sink, key_mass=True, backend=backend).key_mass
        (slope,) = torch.autograd.grad((mass * torch.arange(1.0, 5.0)).sum(), q, create_graph=True)
        (slope,) = torch.autograd.grad((slope * a).sum(), q, create_graph=True)
        return (slope * b).sum(), q

    x, q = second(q0)
    (slope,) = torch.autograd.grad(x, q)
    h = 1e-5
    expected = (second(q0 + h * c)[0] - second(q0 - h * c)[0]) / (2 * h)
    torch.testing.assert_close((slope * c).sum(), expected.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [10**6, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 10**30])
def test_a_window_without_end(backend, causal, window):
    """As if there were none, and its gradients too."""
    q, k = normal(0, 2, 5, 4).requires_grad_(), normal(1, 2, 9, 4)
    found, expected = (
        xt.attend(q, k, k, causal=causal, window=w, key_mass=True, backend=backend) for w in (window, None)
    )
    for name in ("output", *ROWS, "key_mass"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)
    x, y = (torch.autograd.grad(a.output.sum() + a.key_mass.square().sum(), q)[0] for a in (found, expected))
    torch.testing.assert_close(x, y)


def _everything(q, k, backend, **options):
    a = xt.attend(q, k, k, key_mass=True, backend=backend, **options)
    return torch.cat(
        [a.output.flatten(), a.entropy.flatten(), a.score_variance.flatten(), a.key_mass.flatten()]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_gradients(backend):
    """`is_grads_batched=True`: many cotangents in one go, as one by one."""
    q, k = (normal(i, 1, n, 3, dtype=torch.float64).requires_grad_() for i, n in ((0, 4), (1, 6)))
    y = _everything(q, k, backend, causal=True, sink=torch.tensor([0.2], dtype=torch.float64))
    bars = normal(2, 5, len(y), dtype=torch.float64)
    found = torch.autograd.grad(y, (q, k), bars, is_grads_batched=True, retain_graph=True)
    expected = [
        torch.stack(x)
        for x in zip(*(torch.autograd.grad(y, (q, k), b, retain_graph=True) for b in bars), strict=True)
    ]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian(backend, strategy):
    q, k = normal(0, 1, 3, 2, dtype=torch.float64), normal(1, 1, 4, 2, dtype=torch.float64)

    def function(q, k):
        return _everything(q, k, backend, scale=0.7)

    jacobian = torch.autograd.functional.jacobian
    found = jacobian(function, (q, k), vectorize=True, strategy=strategy)
    for a, b in zip(found, jacobian(function, (q, k)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("hide", ["mask", "causal"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_key_that_is_no_number(backend, queries, hide, bad):
    """What no query sees reaches neither a result, nor a gradient, nor a tangent."""
    K = 30
    q, k, v = normal(0, 1, queries, 4), normal(1, 1, K, 4), normal(2, 1, K, 3)
    place = K - 1 if hide == "causal" else 7
    k_bad = k.clone()
    k_bad[0, place] = bad
    seen = torch.ones(K, dtype=torch.bool)
    seen[place] = False
    if hide == "causal":  # the last key is hidden from all but the last query, which is left out
        padded = torch.cat([q, q[:, :1]], 1)

        def function(q_, k_):
            a = xt.attend(
                torch.cat([q_, padded[:, -1:]], 1), k_, v, causal=True, backend=backend, check=False
            )
            return a.output[:, :-1], a.entropy[:, :-1], a.score_variance[:, :-1], a.score_max[:, :-1]
    else:

        def function(q_, k_):
            a = xt.attend(q_, k_, v, backend=backend, key_mass=True, mask=seen)
            return a.output, a.entropy, a.score_variance, a.score_max, a.key_mass

    for x, y in zip(function(q, k_bad), function(q, k), strict=True):
        torch.testing.assert_close(x, y)
    if hide == "causal":
        moved = torch.func.jvp(lambda x: function(x, k_bad), (q,), (torch.ones_like(q),))[1]
    else:
        leaf, leaf_k = q.clone().requires_grad_(), k_bad.clone().requires_grad_()
        slopes = torch.autograd.grad(sum(x.sin().sum() for x in function(leaf, leaf_k)), (leaf, leaf_k))
        assert slopes[0].isfinite().all()
        assert slopes[1].isfinite().all()
        moved = torch.func.jvp(lambda x: function(x, k_bad), (q,), (torch.ones_like(q),))[1]
    for x, y in zip(
        moved, torch.func.jvp(lambda x: function(x, k), (q,), (torch.ones_like(q),))[1], strict=True
    ):
        torch.testing.assert_close(x, y)


# 6. Autocast.


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32,) * 3,
        (torch.bfloat16,) * 3,
    ],
)
def test_autocast_as_torch_does(dtypes):
    q, k, v = (
        normal(i, 2, 2, n, 8).to(dtype) for i, (n, dtype) in enumerate(zip((5, 7, 7), dtypes, strict=True))
    )
    bias = normal(3, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v)
        found = xt.attend(q, k, v)
        xt.attend(q, k, v, bias=bias)
        G = xt.log_normalizer(q, k)
        product = xt.fisher_vector_product(q, k, torch.ones_like(q))
    assert found.output.dtype == expected.dtype
    assert found.entropy.dtype == torch.float32
    assert G.dtype == torch.float32
    assert product.isfinite().all()
    torch.testing.assert_close(found.output, expected, rtol=2e-2, atol=2e-2)
    cast = xt.attend(*(x.to(expected.dtype) for x in (q, k, v)))
    torch.testing.assert_close(found.output, cast.output)
    torch.testing.assert_close(found.entropy, cast.entropy)


def test_autocast_gradients_come_back_in_their_own_dtype():
    q, k = normal(0, 1, 5, 8).requires_grad_(), normal(1, 1, 7, 8).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = xt.attend(q, k, k).output
    by_q, by_k = torch.autograd.grad(output.float().square().sum(), (q, k))
    assert (by_q.dtype, by_k.dtype) == (torch.float32, torch.bfloat16)
    assert by_q.isfinite().all()
    assert by_q.abs().max() > 0


def test_mixed_dtypes_outside_autocast_are_an_error():
    q, k = normal(0, 1, 5, 8), normal(1, 1, 7, 8).bfloat16()
    with pytest.raises(ArgumentError, match="bfloat16"):
        xt.attend(q, k, k)
    with torch.autocast("cpu", torch.bfloat16, enabled=False), pytest.raises(ArgumentError, match="bfloat16"):
        xt.attend(q, k, k)


# 7. The names of torch's own attention.


@pytest.mark.parametrize("function", ["attend", "log_normalizer"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_causal": True}, ("causal=",)),
        ({"casual": True}, ("Did you mean causal=",)),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, ("mask=", "bias=")),
        ({"attn_mask": torch.zeros(5, 5)}, ("mask=", "bias=")),
    ],
)
def test_names_of_torch_say_what_to_write(function, options, words):
    q = normal(0, 1, 5, 8)
    tensors = (q, q, q) if function == "attend" else (q, q)
    with pytest.raises(TypeError) as error:
        getattr(xt, function)(*tensors, **options)
    text = str(error.value)
    for word in (next(iter(options)), *words):
        assert word.replace("mask=", " mask=") in " " + text.replace("`", " ").replace("(", " "), text


def test_any_other_name_is_refused_as_ever():
    q = normal(0, 1, 5, 8)
    with pytest.raises(TypeError, match="casual"):
        xt.attend(q, q, q, casual=True)


# 8. A result in a terminal.


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4, 300, 64), (1, 0, 4)])
def test_a_short_repr(shape):
    q = normal(0, *shape)
    a = xt.attend(q, q, q, key_mass=True)
    text = repr(a)
    assert text == str(a)
    assert len(text.splitlines()) <= 15
    assert max(map(len, text.splitlines())) <= 120
    assert "AttentionResult" in text
    assert "float32" in text
    for name in ("output", *ROWS, "key_mass"):
        assert name in text
    assert str(tuple(q.shape)) in text
    assert str(tuple(q.shape[:-1])) in text


def test_a_repr_shows_ranges():
    q = torch.zeros(1, 2, 4)
    k = torch.zeros(1, 8, 4)
    a = xt.attend(q, k, k, bias=torch.full((2, 8), 1.25))
    assert "1.25" in repr(a)
    assert "key_mass=tensor" not in repr(a)
    nothing = xt.attend(q, k, k, mask=torch.zeros(2, 8, dtype=torch.bool))
    assert "-inf" in repr(nothing).replace("−", "-")


def test_a_repr_of_a_traced_or_differentiated_result():
    """Printing must not need numbers: under a transform, on the meta device or with a graph."""
    q = normal(0, 2, 1, 5, 4).requires_grad_()
    assert len(repr(xt.attend(q, q, q)).splitlines()) <= 15
    seen = []

    def function(x):
        a = xt.attend(x, x, x)
        seen.append(repr(a))
        return a.output

    torch.func.vmap(function)(q.detach())
    torch.func.jvp(function, (q.detach(),), (q.detach(),))
    assert all(len(text.splitlines()) <= 15 for text in seen)


def test_ranges_are_those_of_numpy():
    """What is printed is what is there: the smallest and largest entropy to three digits appear."""
    q, k = normal(0, 1, 50, 4), normal(1, 1, 60, 4)
    a = xt.attend(q, k, k)
    low, high = np.min(a.entropy.numpy()), np.max(a.entropy.numpy())
    text = repr(a)
    assert f"{low:.2f}"[:4] in text
    assert f"{high:.2f}"[:4] in text


@pytest.mark.parametrize(("window", "causal"), [(5, True), (7, False)])
def test_a_windows_column_sums_belong_to_their_own_keys(window, causal):
    """The last rows of a tile see none of a tile of keys that the first rows do see."""
    g = torch.Generator().manual_seed(0)
    q, k, v, bar = (torch.randn(2, 700, 8, generator=g, dtype=torch.float64) for _ in range(4))
    weight = torch.randn(2, 700, generator=g, dtype=torch.float64).requires_grad_()

    def gradient(backend):
        found = xt.attend(q, k, v, log_weight=weight, window=window, causal=causal, backend=backend)
        return torch.autograd.grad((found.output * bar).sum() + found.entropy.sum(), weight)[0]

    torch.testing.assert_close(gradient("cpu"), gradient("reference"), rtol=1e-9, atol=1e-9)
    with small_tiles():
        torch.testing.assert_close(gradient("cpu"), gradient("reference"), rtol=1e-9, atol=1e-9)
