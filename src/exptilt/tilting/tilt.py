r"""The primitive: tilt the measure that the keys carry by each query.

    p(j | q) = h_j e^{<q,k_j> scale} / e^{G(q)},     G(q) = log Σ_j h_j e^{<q,k_j> scale},     h_j = e^{log_weight_j}.

`tilt` returns the mean of the values under p (attention) with the statistics of the scores; `log_normalizer` is G alone; `fisher_vector_product`
is G's Hessian times a vector: the covariance of the keys under p.
"""

from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.tilting import reference
from exptilt.tilting.arguments import Call, prepare
from exptilt.tilting.merge import Tilted
from exptilt.tilting.problem import Needs, Options, Tensors, per_query_head
from exptilt.tilting.rules import Attend, Gradient


def _sweep(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, sink: Tensor | None, mask: Tensor | None,
    scale: float, causal: bool, window: int | None, softcap: float | None, backend: str, check: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = Options(scale, causal, window, softcap)
    return Attend.apply(query, key, value, bias, log_weight, sink, mask, options, backend, check)[:6]  # type: ignore[no-any-return]


def _mass(
    query: Tensor, key: Tensor, bias: Tensor | None, log_weight: Tensor | None, sink: Tensor | None, mask: Tensor | None,
    G: Tensor, mean: Tensor, variance: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str,
) -> Tensor:  # fmt: skip
    """(N, Hq, K): ∂(Σ_i G_i)/∂log_weight_j, with a log_weight of its own for each query head."""
    options = Options(scale, causal, window, softcap)
    heads = query.shape[1]
    zero = key.new_zeros(query.shape[0], heads, key.shape[2])
    weight = zero if log_weight is None else per_query_head(log_weight, heads)
    nothing = query[..., :0].detach()
    bar = (nothing, torch.ones_like(G), torch.zeros_like(G), torch.zeros_like(G))
    inputs = (query, key, key[..., :0], bias, weight, sink, mask)
    needs = Needs(query=False, key=False, value=False, log_weight=True, bias=False)
    return Gradient.apply(*inputs, *bar, nothing, G, mean, variance, options, backend, needs)[4]  # type: ignore[no-any-return]


def _numbers(call: Call) -> tuple[Any, ...]:
    o = call.options
    return o.scale, o.causal, o.window, o.softcap


def run(call: Call, *, key_mass: bool) -> Tilted:
    """Carry out a checked call."""
    query, key, value, bias, log_weight, sink, mask = call.inputs
    if call.backend == "reference":
        tensors = Tensors(query, key, value, bias, log_weight, mask)
        *found, mass = reference.attend(tensors, sink, call.options)
        mass_or_none = mass if key_mass else None
    else:
        found = list(_sweep(*call.inputs, *_numbers(call), call.backend, call.check))
        mass_or_none = None
        if key_mass:
            rows = (x.detach() for x in (found[1], found[3], found[4]))
            mass_or_none = _mass(query, key, bias, log_weight, sink, mask, *rows, *_numbers(call), call.backend)
    output, *statistics = (call.restore(x) for x in found)
    return Tilted(output.to(call.dtype), *statistics, None if mass_or_none is None else call.restore(mass_or_none))


def log_normalizer(
    query: Tensor, key: Tensor, *, scale: float | None = None, log_weight: Tensor | None = None, bias: Tensor | None = None,
    mask: Tensor | None = None, causal: bool = False, window: int | None = None, softcap: float | None = None, sink: Tensor | None = None,
    backend: str | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    r"""The log-normalizer G of the measure of the keys tilted by each query, in one sweep over the keys.

        G(q) = log Σ_j e^{s_j}

    Differentiable in every tensor, twice, forwards and backwards: its gradient in the query is the mean of the (scaled) keys, its Hessian their covariance.

    Args:
        query: ``(..., Hq, Q, D)``.
        key: ``(..., Hkv, K, D)``; Hkv divides Hq.
        scale: factor of <q,k>; 1/sqrt(D) if None.
        log_weight: ``(..., Hkv, K)``, log h of each key.
        bias: broadcasts to ``(..., Hq, Q, K)``; added to the scores.
        mask: booleans that broadcast to ``(..., Hq, Q, K)``; True where a query may see a key.
        causal: query i sees key j where j <= i + K − Q.
        window: see `attend`.
        softcap: c, for scores c·tanh(s/c).
        sink: ``(..., Hq)``, the score of one more outcome.
        backend: see `attend`.
        check: see `attend`.

    Returns:
        ``(..., Hq, Q)``; −inf for a query that sees nothing.

    Example:
        >>> log_normalizer(torch.zeros(1, 1, 2), torch.randn(1, 8, 2)).exp().round()
        tensor([[8.]])
    """
    call = prepare(
        "log_normalizer", query, key, None, scale=scale, log_weight=log_weight, bias=bias, mask=mask, causal=causal,
        window=window, softcap=softcap, sink=sink, backend=backend, check=check,
    )  # fmt: skip
    return run(call, key_mass=False).log_normalizer


def fisher_vector_product(
    query: Tensor, key: Tensor, vector: Tensor, *, scale: float | None = None, log_weight: Tensor | None = None, bias: Tensor | None = None,
    mask: Tensor | None = None, causal: bool = False, window: int | None = None, softcap: float | None = None, sink: Tensor | None = None,
    backend: str | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    r"""G's Hessian in the query times a vector, without the Hessian: the forward derivative of G's gradient.

        ∇²G(q) v = scale² Cov_p(k) v

    (a sink counts as a key of 0; with a softcap the Hessian has the term of its curvature as well). Differentiable.

    Args:
        query: ``(..., Hq, Q, D)``.
        key: ``(..., Hkv, K, D)``.
        vector: ``(..., Hq, Q, D)``, one for each query.
        scale: as in `log_normalizer`, like all that follow.
        log_weight: ``(..., Hkv, K)``.
        bias: broadcasts to ``(..., Hq, Q, K)``.
        mask: broadcasts to ``(..., Hq, Q, K)``.
        causal: see `attend`.
        window: see `attend`.
        softcap: see `attend`.
        sink: ``(..., Hq)``.
        backend: see `attend`.
        check: see `attend`.

    Returns:
        ``(..., Hq, Q, D)``.

    Example:
        >>> q, k = torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
        >>> fisher_vector_product(q, k, torch.ones(1, 1, 2), scale=1.0)
        tensor([[[1., 0.]]])
    """
    if not isinstance(vector, Tensor) or vector.shape[-1:] != query.shape[-1:]:
        got = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
        raise ArgumentError(f"fisher_vector_product: vector is {got}, query is {tuple(query.shape)}. Pass one vector for each query, of the same shape.")
    settings = {
        "scale": scale, "log_weight": log_weight, "bias": bias, "mask": mask, "causal": causal, "window": window, "softcap": softcap,
        "sink": sink, "backend": backend, "check": check,
    }  # fmt: skip
    try:
        vector = vector.to(query.dtype).expand(query.shape)
    except RuntimeError:
        raise ArgumentError(
            f"fisher_vector_product: vector has shape {tuple(vector.shape)}, query {tuple(query.shape)}. Pass one vector for each query, of the same shape."
        ) from None

    def gradient(q: Tensor) -> Tensor:
        G, pull = torch.func.vjp(lambda x: log_normalizer(x, key, **settings), q)  # type: ignore[arg-type]
        return pull(torch.where(G == -torch.inf, 0.0, torch.ones_like(G)))[0]  # type: ignore[no-any-return]

    return torch.func.jvp(gradient, (query,), (vector,))[1]  # type: ignore[no-any-return]
