"""Packed sequences and dropped weights, on kernels in Triton's interpreter and in plain torch.

Kernels run in a process of their own (the interpreter must be chosen before triton is imported), which gets
the very source of `everything`.
"""

import inspect
import sys
from functools import partial

import numpy as np
import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.tilting import attend_packed
from oracles.processes import child
from tilting import cases

pytestmark = pytest.mark.slow
normal = partial(cases.normal, dtype=torch.float64)
linux = pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")


def everything(call, primals):
    """Statistics; then the tangent, gradient and second derivative of a function of all of them."""

    def total(*x):
        a = call(*x)
        parts = (
            a.output,
            a.log_normalizer,
            a.entropy,
            a.score_mean,
            a.score_variance,
            a.score_max,
            a.key_mass,
        )
        seen = [torch.where(p == -torch.inf, 0.0, p) for p in parts if p is not None]
        return sum((p.sin() * torch.linspace(1, 2, p.numel()).reshape(p.shape)).sum() for p in seen)

    with torch.no_grad():
        a = call(*primals)
    plain = [a.output, a.log_normalizer, a.entropy, a.score_mean, a.score_variance, a.score_max, a.key_mass]
    dots = tuple(x.flip(-2).cos() for x in primals)
    leaves = [x.clone().requires_grad_() for x in primals]
    first = torch.autograd.grad(total(*leaves), leaves, create_graph=True)
    second = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, dots, strict=True)), leaves)
    pushed = torch.func.jvp(total, tuple(primals), dots)[1]
    return [x.detach() for x in (*plain, pushed, *first, *second) if x is not None]


WORKER = f"""
import sys, torch
import exptilt as xt
from oracles.triton_interpreter import mend

mend()
{inspect.getsource(everything)}
results = []
for name, primals, options, plain in torch.load(sys.argv[1]):
    call = lambda *x: getattr(xt.tilting, name)(*x, **options, backend="gpu")
    if plain:
        with torch.no_grad():
            a = call(*primals)
        results.append([a.output, a.log_normalizer, a.entropy, a.score_mean, a.score_variance, a.score_max])
    else:
        results.append(everything(call, primals))
torch.save(results, sys.argv[2])
"""


# Sequences of 5, 0, 7 and 8 queries against 3, 2, 0 and 9 keys: some see nothing, some are seen by nobody.
STARTS = {"query_starts": torch.tensor([0, 5, 5, 12, 20]), "key_starts": torch.tensor([0, 3, 5, 5, 14])}
PACKED = (normal(1, 4, 20, 8), normal(2, 2, 14, 8), normal(3, 2, 14, 5))
EXTRA = {"log_weight": normal(4, 2, 14), "sink": normal(5, 4), "softcap": 1.5}

CASES = {
    "plain": ("attend_packed", PACKED, STARTS, False),
    "causal window": (
        "attend_packed",
        PACKED,
        STARTS | {"causal": True, "window": 3, "key_mass": True},
        False,
    ),
    "window": ("attend_packed", PACKED, STARTS | {"window": 2}, False),
    "all options": ("attend_packed", PACKED, STARTS | EXTRA | {"causal": True}, False),
    "float32": ("attend_packed", [x.float() for x in PACKED], STARTS | {"causal": True}, True),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    torch.save([*CASES.values(), *DROPPED.values()], folder / "in.pt")
    child(WORKER, folder / "in.pt", folder / "out.pt", TRITON_INTERPRET="1")
    return dict(zip([*CASES, *DROPPED], torch.load(folder / "out.pt"), strict=True))


@linux
@pytest.mark.parametrize("name", CASES)
def test_packed_is_a_loop_over_sequences(kernels, name):
    _, primals, options, _ = CASES[name]

    def call(*x):
        return attend_packed(*x, **options, backend="reference")

    wanted = everything(call, [x.double() for x in primals] if name == "float32" else primals)
    wanted = wanted[: len(kernels[name])]
    tolerance = {"rtol": 2e-6, "atol": 2e-6} if name == "float32" else {"rtol": 1e-11, "atol": 1e-11}
    for x, y in zip(kernels[name], wanted, strict=True):
        torch.testing.assert_close(x.double(), y, **tolerance)


def test_a_loop_is_what_it_says():
    """Against `attend` on each sequence."""
    q, k, v = PACKED
    for backend in ("tiled", "reference"):
        found = attend_packed(q, k, v, **STARTS, causal=True, key_mass=True, backend=backend)
        for b in range(4):
            i, j = (slice(*STARTS[name][b : b + 2].tolist()) for name in ("query_starts", "key_starts"))
            options = {"causal": True, "key_mass": True, "backend": backend}
            one = xt.attend(q[:, i], k[:, j], v[:, j], **options)
            torch.testing.assert_close(found.output[:, i], one.output)
            torch.testing.assert_close(found.entropy[:, i], one.entropy)
            torch.testing.assert_close(found.key_mass[:, j], one.key_mass)


BAD = {
    "does not rise": {"query_starts": torch.tensor([0, 6, 5, 12, 20])},
    "rise from 0": {"key_starts": torch.tensor([1, 3, 5, 5, 14])},
    "ends at 13, but key has 14": {"key_starts": torch.tensor([0, 3, 5, 5, 13])},
    "ends at 19, but query has 20": {"query_starts": torch.tensor([0, 5, 5, 12, 19])},
    "query_starts has 4 sequences, key_starts 1": {"key_starts": torch.tensor([0, 14])},
    "vector of at least two integers": {"query_starts": torch.tensor([0.0, 20.0])},
}


@pytest.mark.parametrize("words", BAD)
def test_errors(words):
    with pytest.raises(ArgumentError, match=words):
        attend_packed(*PACKED, **STARTS | BAD[words])
    with pytest.raises(ArgumentError, match="query has shape"):
        attend_packed(PACKED[0][None], *PACKED[1:], **STARTS)


Q, K, V = normal(11, 2, 4, 9, 8), normal(12, 2, 2, 14, 8), normal(13, 2, 2, 14, 5)
MASK = torch.rand(2, 1, 9, 14, generator=torch.Generator().manual_seed(0)) < 0.8
DROP = {"dropout": 0.3, "seed": 7}
DROPPED = {
    "dropped": ("attend", (Q, K, V), DROP | {"causal": True}, False),
    "dropped, masked": ("attend", (Q, K, V), DROP | {"mask": MASK, "sink": normal(14, 4)}, False),
    "dropped, packed": (
        "attend_packed",
        PACKED,
        STARTS | DROP | {"sink": EXTRA["sink"], "causal": True},
        False,
    ),
}


def mixed(x):
    """lowbias32, in numpy's own unsigned numbers."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def keep(heads, queries, keys, seed, dropout):
    """(heads, queries, keys): 0 or 1/(1 − dropout), as documented in ``plan.py``, written out."""
    head = mixed(np.uint32(seed) ^ mixed(np.arange(heads, dtype=np.uint32)))
    row = mixed(head[:, None] + np.arange(queries, dtype=np.uint32))
    column = mixed(np.arange(1, keys + 1, dtype=np.uint32))
    seen = mixed(row[:, :, None] ^ column) >= np.uint32(round(dropout * 2**32))
    return torch.from_numpy(seen).double() / (1 - dropout)


def dropped_by_hand(q, k, v, causal=False, mask=None, sink=None, dropout=0.0, seed=0):
    """Statistics of attention without dropout, and softmax(s) ∘ d times v for its output."""
    a = xt.attend(q, k, v, causal=causal, mask=mask, sink=sink, backend="reference")
    s = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(~torch.ones(9, 14).bool().tril(14 - 9), -torch.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[None, :, None, None].expand(2, 4, 9, 1)], -1)
    weights = s.softmax(-1)[..., :14] * keep(8, 9, 14, seed, dropout).reshape(2, 4, 9, 14).to(s.dtype)
    return xt.AttentionResult(weights @ v.repeat_interleave(2, 1), *(getattr(a, x) for x in STATISTICS))


def dropped_packed_by_hand(q, k, v, query_starts, key_starts, dropout, seed, **options):
    """The same of packed sequences: a weight is dropped by where its query and key stand among all."""
    a = attend_packed(q, k, v, query_starts, key_starts, **options, backend="reference")
    kept = keep(q.shape[0], q.shape[1], k.shape[1], seed, dropout).to(q.dtype)
    outputs = []
    for b in range(len(query_starts) - 1):
        i, j = (slice(*starts[b : b + 2].tolist()) for starts in (query_starts, key_starts))
        one, eye = (q[:, i], k[:, j]), torch.eye(j.stop - j.start, dtype=q.dtype).expand(k.shape[0], -1, -1)
        weights = xt.attend(*one, eye, **options, backend="reference").output
        outputs.append((weights * kept[:, i, j]) @ v[:, j].repeat_interleave(2, 0))
    return xt.AttentionResult(torch.cat(outputs, 1), *(getattr(a, x) for x in STATISTICS))


STATISTICS = "log_normalizer", "entropy", "score_mean", "score_variance", "score_max"


@linux
@pytest.mark.parametrize("name", DROPPED)
def test_dropped_weights(kernels, name):
    """Every derivative drops what the forward pass drops, on a GPU and in plain torch."""
    call, primals, options, _ = DROPPED[name]
    by_hand = dropped_by_hand if call == "attend" else dropped_packed_by_hand
    wanted = everything(lambda *x: by_hand(*x, **options), primals)
    tiled = everything(lambda *x: getattr(xt.tilting, call)(*x, **options, backend="tiled"), primals)
    for found in (kernels[name], tiled):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_seeds():
    """One seed drops the same again, another one others; without a seed torch's random numbers decide."""
    call = {"query": Q, "key": K, "value": V, "dropout": 0.3, "backend": "tiled"}
    first, again, other = (xt.attend(**call, seed=seed).output for seed in (5, torch.tensor(5), 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(xt.attend(**call).output)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert xt.attend(**call).entropy.equal(xt.attend(Q, K, V, backend="tiled").entropy)


def test_dropped_weights_are_a_fair_draw():
    """As many as asked for, alike by head, query and key, and unrelated between neighbours."""
    seen = (keep(64, 100, 100, 3, 0.25) > 0).double() - 0.75
    spread = (0.25 * 0.75) ** 0.5
    assert abs(seen.mean()) < 5 * spread / 800
    for axes in ((0, 1), (0, 2), (1, 2)):
        count = seen.numel() / seen.mean(axes).numel()
        assert seen.mean(axes).abs().max() < 5 * spread / count**0.5
    for axis in range(3):
        size = seen.shape[axis] - 1
        both = (seen.narrow(axis, 0, size) * seen.narrow(axis, 1, size)).mean()
        assert abs(both) < 5 * spread**2 / 790


@pytest.mark.parametrize("dropout", [-0.1, 1.0, True, float("nan")])
def test_dropout_is_a_share(dropout):
    with pytest.raises(ArgumentError, match="0 <= p < 1"):
        xt.attend(Q, K, V, dropout=dropout)
    with pytest.raises(ArgumentError, match="0 <= p < 1"):
        attend_packed(*PACKED, **STARTS, dropout=dropout)
