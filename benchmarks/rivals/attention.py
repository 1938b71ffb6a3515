"""Ways to get attention with its statistics and derivatives: ours, and what people do today.

    SDPA           F.scaled_dot_product_attention: PyTorch's fused kernel, the output alone
    two-pass       SDPA, then SDPA again with value = key: the mean key gives the mean score, nothing else
    FlexAttention  torch.nn.attention.flex_attention, not compiled: the output and the log-normalizer
    materialised   the n×n matrix in plain torch, from which anything can be had

`cases(...)` makes one function without arguments for each thing that is timed, in three groups with a
baseline each. Every function returns what it computed, so that a test can hold the rivals against each other.
A rival computes no more than what is differentiated.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import exptilt as xt

Case = Callable[[], Any]
# The materialised score of a hidden key: e to it is 0, and so is that times its square, unlike for −inf.
HIDDEN = -1e9
STATISTICS = ("output", "log_normalizer", "entropy", "score_mean", "score_variance", "score_max")


@dataclass(frozen=True)
class Group:
    """Cases that are timed in one interleaved run."""

    name: str
    baseline: str
    cases: dict[str, Case]


def inputs(shape: tuple[int, int, int, int], seed: int = 0) -> list[Tensor]:
    """Query, key, value, a cotangent of the output, and a tangent (or second cotangent) for each of three."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(7)]


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def two_pass(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the mean score."""
    return sdpa(q, k, v, causal), (q * sdpa(q, k, k, causal)).sum(-1) * q.shape[-1] ** -0.5


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    s = (q * q.shape[-1] ** -0.5) @ k.mT
    return s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool).triu_(1), HIDDEN) if causal else s


def materialised(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Tensor]:
    """The same statistics as `attend`, from the whole matrix."""
    s = scores(q, k, causal)
    p = torch.softmax(s, -1)
    mean = (p * s).sum(-1)
    variance = (p * (s - mean[..., None]).square()).sum(-1)
    G = torch.logsumexp(s, -1)
    return dict(zip(STATISTICS, (p @ v, G, G - mean, mean, variance, s.amax(-1)), strict=True))


def materialised_output(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.softmax(scores(q, k, causal), -1) @ v


def materialised_three(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    s = scores(q, k, causal)
    p, G = torch.softmax(s, -1), torch.logsumexp(s, -1)
    return p @ v, G - (p * s).sum(-1), G


def attend_output(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return xt.attend(q, k, v, causal=causal).output


def attend_three(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    a = xt.attend(q, k, v, causal=causal)
    return a.output, a.entropy, a.log_normalizer


def forward(function: Callable[..., Any], tensors: list[Tensor], *words: Any) -> Case:
    """The function alone, nothing recorded for a backward pass."""

    def run() -> Any:
        with torch.no_grad():
            return function(*tensors[:3], *words)

    return run


def backward(function: Callable[..., Any], tensors: list[Tensor], causal: bool) -> Case:
    """Forward, then backward to query, key and value. Returns the outputs and the gradients."""
    qkv = [x.clone().requires_grad_() for x in tensors[:3]]
    cotangent = tensors[3]
    rows = (
        cotangent[..., 0].contiguous(),
        cotangent[..., 1].contiguous(),
    )  # for statistics with one number a query

    def run() -> Any:
        out = function(*qkv, causal)
        outs = out if isinstance(out, tuple) else (out,)
        return outs, torch.autograd.grad(outs, qkv, (cotangent, *rows)[: len(outs)])

    return run


def forward_mode(function: Callable[..., Tensor], tensors: list[Tensor], causal: bool) -> Case:
    """The output and its derivative along a tangent in all three inputs."""
    return lambda: torch.func.jvp(
        lambda q, k, v: function(q, k, v, causal), tuple(tensors[:3]), tuple(tensors[4:])
    )


def double_backward(function: Callable[..., Tensor], tensors: list[Tensor], causal: bool) -> Case:
    """Forward, recorded backward, and backward of the gradients to query, key, value and the cotangent."""
    qkv, cotangent = [x.clone().requires_grad_() for x in tensors[:3]], tensors[3].clone().requires_grad_()

    def run() -> Any:
        out = function(*qkv, causal)
        first = torch.autograd.grad(out, qkv, cotangent, create_graph=True)
        second = torch.autograd.grad(first, [*qkv, cotangent], tensors[4:])
        return out.detach(), [g.detach() for g in first], second

    return run


def flex(n: int, causal: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention for sequences of n; its block mask is made here, outside of what is timed."""
    from torch.nn.attention.flex_attention import (
        AuxRequest,
        create_block_mask,
        flex_attention,
    )  # takes seconds: only for those who use it

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu") if causal else None

    def run(q: Tensor, k: Tensor, v: Tensor, _: bool) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "flex_attention called without torch.compile"
            )  # that is what is measured
            output, more = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
        return output, more.lse

    return run


def groups(
    shape: tuple[int, int, int, int], causal: bool, *, leave_out: frozenset[str] = frozenset()
) -> list[Group]:
    """Everything that is timed at one shape (batch, heads, n, d), but for the cases named in `leave_out`."""
    x = inputs(shape)

    def mass(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> xt.AttentionResult:
        return xt.attend(q, k, v, causal=causal, key_mass=True)

    everything = [
        Group(
            "forward",
            "SDPA",
            {
                "SDPA": forward(sdpa, x, causal),
                "attend": forward(lambda q, k, v, c: xt.attend(q, k, v, causal=c), x, causal),
                "attend, key_mass": forward(mass, x, causal),
                "two-pass SDPA": forward(two_pass, x, causal),
                "FlexAttention eager": forward(flex(shape[2], causal), x, causal),
                "materialised": forward(materialised, x, causal),
            },
        ),
        Group(
            "forward + backward",
            "SDPA, backward",
            {
                "SDPA, backward": backward(sdpa, x, causal),
                "attend, backward": backward(attend_output, x, causal),
                "attend, backward of three": backward(attend_three, x, causal),
                "materialised, backward": backward(materialised_output, x, causal),
                "materialised, backward of three": backward(materialised_three, x, causal),
            },
        ),
        Group(
            "forward mode and double backward",
            "SDPA",
            {
                "SDPA": forward(sdpa, x, causal),
                "attend, forward mode": forward_mode(attend_output, x, causal),
                "attend, double backward": double_backward(attend_output, x, causal),
                "materialised, forward mode": forward_mode(materialised_output, x, causal),
                "materialised, double backward": double_backward(materialised_output, x, causal),
            },
        ),
    ]
    return [
        Group(g.name, g.baseline, {name: case for name, case in g.cases.items() if name not in leave_out})
        for g in everything
    ]


def refusals() -> dict[str, str]:
    """What fused rivals were asked for and refused, with the first line of what they said."""
    x = inputs((1, 2, 128, 64))
    flexible = flex(128, False)
    tried = {
        "SDPA, forward mode": forward_mode(sdpa, x, False),
        "SDPA, double backward": double_backward(sdpa, x, False),
        "FlexAttention eager": forward(flexible, x, False),
        "FlexAttention eager, backward": backward(lambda *a: flexible(*a)[0], x, False),
        "FlexAttention eager, forward mode": forward_mode(lambda *a: flexible(*a)[0], x, False),
        "FlexAttention eager, double backward": double_backward(lambda *a: flexible(*a)[0], x, False),
    }
    said = {}
    for name, case in tried.items():
        try:
            case()
        except Exception as error:  # whatever it is, it is what a user would get
            said[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return said
