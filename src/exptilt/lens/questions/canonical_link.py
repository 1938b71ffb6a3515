r"""Is a head's query–key map a canonical link (THEORY E7)?

Conjecture: W_q, W_k approximate the canonical link f = ∇G*, which takes a mean parameter μ to its natural
parameter η. Then

    symmetric    a gradient map has a symmetric Jacobian: M = W_q W_kᵀ should be symmetric;
    definite     G* is convex: its symmetric part should have no negative eigenvalue;
    linear       η_i should be a linear function of μ_i = ∇G(η_i). For Gaussian keys it is: η = C⁻¹(μ − m).

    symmetry      ‖(M + Mᵀ)/2‖² / ‖M‖²: 1 symmetric, ½ as any random matrix, 0 antisymmetric;
    definiteness  Σ of positive eigenvalues of (M + Mᵀ)/2 over Σ of absolute ones: 1 positive, ½ balanced;
    link R²       of the linear regression of η on μ, fitted on every other query, tested on the rest.

M is width × width but of rank D: everything is read off D × D matrices. W_q and W_k are the affine maps from
the attention module's input to query and key at one and the same position, where rotary embeddings cancel.
They are read off the model by feeding its attention module the origin and each unit vector in turn, on one
token at position 0:

    W_q = q(e_1) − q(0), q(e_2) − q(0), ...       W_k likewise,

whatever its projections are called and however they are fused; biases fall out. If q(x + y) − q(x) − q(y) +
q(0) is not 0, queries are not an affine function of x (they are normalised, say), the score is no bilinear
form, and there is no matrix to ask about.
"""

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exptilt.lens.questions.blocks import Arguments, DoesNotRunAgainError, Tracer, stream
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.record import by_layer
from exptilt.lens.watching.watch import watch

NOT_AFFINE = 1e-3  # share by which superposition may fail: rounding of bfloat16 passes, a norm does not


def symmetry(query_weight: Tensor, key_weight: Tensor) -> Tensor:
    r"""Share of W_q W_kᵀ that is symmetric, ½ + ½ tr(MM)/tr(MMᵀ): ``(head,)``, NaN for a map of 0.

    The weights are ``(head, width, D)``, grouped heads repeated.
    """
    q, k = query_weight.double(), key_weight.double()
    inner = k.mT @ q
    size: Tensor = ((q.mT @ q) * (k.mT @ k)).sum((-2, -1))
    return 0.5 + 0.5 * (inner * inner.mT).sum((-2, -1)) / size


def definiteness(query_weight: Tensor, key_weight: Tensor) -> Tensor:
    r"""Share of positive eigenvalues, by size, of the symmetric part of W_q W_kᵀ; shapes as in `symmetry`."""
    q, k = query_weight.double(), key_weight.double()
    D = q.shape[-1]
    # (M + Mᵀ)/2 = ½ [q k] J [q k]ᵀ, J swapping the two: its nonzero eigenvalues are those of ½ R J Rᵀ, where
    # [q k] = (orthonormal) R.
    R = torch.linalg.qr(torch.cat([q, k], -1), mode="r").R
    half = R[..., :D] @ R[..., D:].mT
    eigenvalues: Tensor = torch.linalg.eigvalsh((half + half.mT) / 2)
    return eigenvalues.clamp_min(0).sum(-1) / eigenvalues.abs().sum(-1)


def link_r2(natural: Tensor, mean: Tensor) -> Tensor:
    r"""Out-of-sample R² ``(head,)`` of a linear map from mean to natural parameters, over all coordinates.

    NaN if a half has fewer than 2(D + 1) queries: too few to test a fit. `natural` is η, the queries times
    scale, and `mean` is ∇G(η), the mean keys, both ``(head, query, D)``.
    """
    heads, Q, D = natural.shape
    if Q // 2 < 2 * (D + 1):
        return torch.full((heads,), torch.nan, dtype=torch.float64)
    x, y = mean.double(), natural.double()
    left = total = torch.zeros(heads, dtype=torch.float64, device=y.device)
    for fit, test in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        x_mean, y_mean = x[:, fit].mean(1, keepdim=True), y[:, fit].mean(1, keepdim=True)
        coefficients = _solve(x[:, fit] - x_mean, y[:, fit] - y_mean)
        left = left + (y[:, test] - y_mean - (x[:, test] - x_mean) @ coefficients).square().sum((-2, -1))
        total = total + (y[:, test] - y_mean).square().sum((-2, -1))
    return 1 - left / total


def _solve(x: Tensor, y: Tensor) -> Tensor:
    """Least squares without directions in which x varies by less than 10⁻⁴ of the most: they fit rounding."""
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(x.mT @ x)
    inverse = torch.where(values > 1e-8 * values[..., -1:], 1 / values, 0.0)
    return vectors @ (inverse[..., None] * (vectors.mT @ (x.mT @ y)))


def _probes(width: int, like: Tensor) -> Tensor:
    """(width + 4, 1, width): the origin, two points and their sum, and the unit vectors."""
    pair = torch.randn(2, width, generator=torch.Generator().manual_seed(0)).to(like)
    origin, units = torch.zeros_like(pair[:1]), torch.eye(width).to(like)
    return torch.cat([origin, pair, pair.sum(0, keepdim=True), units])[:, None]


def _affine_maps(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
    """W_q and W_k (Hq, width, D) from query (width + 4, Hq, 1, D) and key at probes; None if not affine."""
    maps = []
    for x in (query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)):
        origin, one, other, both, units = x[0], x[1], x[2], x[3], x[4:]
        gap = (both - one - other + origin).abs().max()
        if float(gap) > NOT_AFFINE * float((one - origin).abs().max()):
            return None
        maps.append((units - origin)[:, :, 0].transpose(0, 1))
    return maps[0], maps[1]


def measure_weights(model: nn.Module, inputs: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Symmetry and definiteness of every head's W_q W_kᵀ; NaN for cross-attention or without such a matrix.

    The model is in eval mode and reads `inputs`, best a single token.
    """
    tracer = Tracer(model, lambda name, passage: None)
    given: dict[nn.Module, Arguments] = {}
    rows: list[NDArray[np.float64]] = []

    def observe(call: AttentionCall) -> None:
        tracer.observe(call)
        rows.append(np.full((call.query.shape[1], 2), np.nan))
        arguments = given.get(call.module) if call.module is not None else None
        hidden = None if arguments is None else stream(arguments)
        if call.kind != "self" or call.module is None or arguments is None or hidden is None:
            return
        try:
            again = tracer.run_again(call.module, arguments, _probes(hidden.shape[-1], hidden))
        except DoesNotRunAgainError:
            return
        maps = _affine_maps(*again)
        if maps is not None:
            rows[-1] = torch.stack([symmetry(*maps), definiteness(*maps)], -1).cpu().numpy()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not tracer.stopping:
            given[module] = args, kwargs

    with torch.no_grad(), ExitStack() as hooks, watch(model, observe=observe) as seen, tracer.attached(seen):
        for module in seen.modules.attending():
            hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        model(**inputs)
    table = by_layer(rows)
    return {"head:link_symmetry": table[..., 0], "head:link_definiteness": table[..., 1]}
