"""Attention under a forward Laplacian, against the trace of torch's Hessian."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import exptilt as xt

F64 = torch.float64
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(5, 3, dtype=F64, generator=DRAW)
WQ, WK = torch.randn(3, 16, dtype=F64, generator=DRAW), torch.randn(3, 8, dtype=F64, generator=DRAW)
MASK = torch.rand(5, 5, generator=DRAW) > 0.3
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"window": 2},
    "softcap": {"softcap": 1.3},
    "mask": {"mask": MASK},
    "a query without keys": {"mask": MASK & (torch.arange(5) != 2)[:, None]},
    "log_weight": {"log_weight": lambda x: x.sum(-1).expand(2, 5)},
    "bias": {"bias": lambda x: x @ x.mT},
    "sink": {"sink": lambda x: x[:4, 0].sin(), "softcap": 2.0},
}
STATISTICS = "log_normalizer", "entropy", "score_mean", "score_variance", "score_max"


def attention(x, options, **more):
    """Four query heads, two key heads, all of them functions of x."""
    heads = lambda y, count: y.view(-1, count, 4).transpose(0, 1)  # noqa: E731
    q, k = heads(x @ WQ, 4), heads(x @ WK, 2)
    options = {name: value(x) if callable(value) else value for name, value in options.items()}
    return xt.attend(q, k, k.sin(), **options, **more)


def holds(function, oracle, x=X):
    found, value = xt.laplacian(function, x), oracle(x)
    hessian = torch.func.hessian(oracle)(x).reshape(*value.shape, x.numel(), x.numel())
    wanted = value, torch.func.jacrev(oracle)(x), hessian.diagonal(dim1=-2, dim2=-1).sum(-1)
    for ours, theirs in zip(found, wanted, strict=True):
        there = theirs.isfinite()
        assert (ours - theirs)[there].abs().max() <= 1e-10 * (1 + theirs[there].abs().max())


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(name):
    options = OPTIONS[name]
    holds(lambda x: attention(x, options).output, lambda x: attention(x, options, backend="reference").output)


@pytest.mark.parametrize("name", ["plain", "softcap", "sink"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_statistics(name, statistic):
    options = OPTIONS[name]
    reference = lambda x: getattr(attention(x, options, backend="reference"), statistic)  # noqa: E731
    holds(lambda x: getattr(attention(x, options), statistic), reference)


def test_key_mass_and_the_log_normalizer_alone():
    holds(
        lambda x: attention(x, {}, key_mass=True).key_mass,
        lambda x: attention(x, {}, key_mass=True, backend="reference").key_mass,
    )
    holds(lambda x: xt.log_normalizer(x, x.sin()), lambda x: torch.logsumexp(x @ x.sin().mT / 3**0.5, -1))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_queries_and_torch_s_own_attention(causal):
    x = torch.randn(37, 1, dtype=F64, generator=torch.Generator().manual_seed(2))  # more than two blocks
    mask = None if causal else (torch.arange(37) - torch.arange(37)[:, None]).abs() < 9

    def function(x):
        h = torch.tanh(x * torch.arange(1.0, 5.0, dtype=F64))[None]
        return F.scaled_dot_product_attention(h, h.sin(), h.cos(), mask, is_causal=causal).sum((0, 2))

    def math(x):
        with sdpa_kernel(SDPBackend.MATH):
            return function(x)

    holds(function, math, x)


def test_numbers_that_torch_adds_to_the_scores_and_grouped_heads():
    bias = torch.randn(5, 5, dtype=F64, generator=torch.Generator().manual_seed(4))

    def function(x):
        q, k = ((x @ w).view(5, -1, 4).transpose(0, 1) for w in (WQ, WK))
        return F.scaled_dot_product_attention(q, k, k.cos(), bias, scale=0.7, enable_gqa=True)

    def math(x):
        with sdpa_kernel(SDPBackend.MATH):
            return function(x)

    holds(function, math)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, xt.MultiheadAttention])
def test_modules(kind):
    torch.manual_seed(0)
    layer = kind(8, 2, batch_first=True).to(F64)

    def function(x):
        h = (x @ WK)[None]
        return layer(h, h.sin(), h, need_weights=False)[0]

    def math(x):
        with sdpa_kernel(SDPBackend.MATH):
            return function(x)

    holds(function, math)


def test_memory_of_a_block_does_not_grow_with_the_square():
    """The largest tensor made at n = 256 is at most four times that at n = 64, or little more."""
    sizes = {}
    for n in (64, 256):
        largest = [0]

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, largest=largest):
                found = func(*args, **(kwargs or {}))
                if isinstance(found, torch.Tensor):
                    largest[0] = max(largest[0], found.untyped_storage().nbytes())
                return found

        rest = torch.randn(n, 4, dtype=F64)
        with Watch():  # two directions, whatever the length
            xt.laplacian(lambda c, rest=rest: _moved(c, rest).sum(), X[0, :2])
        sizes[n] = largest[0]
    assert sizes[256] <= 4.5 * sizes[64]


def _moved(c, rest):
    h = (rest * c[0] + torch.sin(rest) * c[1])[None]
    return xt.attend(h, h.sin(), h.cos()).output
