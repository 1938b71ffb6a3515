r"""The primitive: tilt the measure that the keys carry by each query.

    p(j | q) = h_j e^{<q,k_j> scale} / e^{G(q)},     G(q) = log Σ_j h_j e^{<q,k_j> scale},     h_j = e^{log_weight_j}.

`run` returns the mean of the values under p (attention) with the statistics of the scores; `log_normalizer` is G alone;
`fisher_vector_product` is G's Hessian times a vector: the covariance of the keys under p.
"""

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.tilting import compiled, reference
from exptilt.tilting.arguments import Call, prepare
from exptilt.tilting.merge import Tilted
from exptilt.tilting.problem import Options, Tensors, per_query_head
from exptilt.tilting.rules import Attend, derivatives_wanted, forward


def _numbers(options: Options) -> tuple[float, bool, int | None, float | None]:
    return options.scale, options.causal, options.window, options.softcap


def _transformed() -> bool:
    """Whether a torch.func transform is being compiled: the compiler cannot see the rules' derivatives, so plain torch has to do."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


# As `torch.compiler.assume_constant_result` would mark it, which loads the compiler: asked while tracing, and not traced.
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def run(call: Call, *, key_mass: bool) -> Tilted:
    """Carry out a checked call."""
    query, key, value, bias, log_weight, sink, mask = call.inputs
    compiling = torch.compiler.is_compiling()
    if call.backend == "reference" or (compiling and _transformed()):
        tensors = Tensors(query, key, value, bias, log_weight, mask)
        *found, mass = reference.attend(tensors, sink, call.options)
        mass_or_none = mass if key_mass else None
    else:
        if compiling:
            found = list(compiled.attend(*call.inputs, *_numbers(call.options), call.backend, call.check)[:6])
        elif derivatives_wanted(call.inputs):
            found = list(Attend.apply(*call.inputs, call.options, call.backend, call.check)[:6])
        else:
            output, statistics, _ = forward(call.inputs, call.options, call.backend, call.check)
            found = [output, *statistics.unbind()]
        mass_or_none = None
        if key_mass:
            zero = key.new_zeros(key.shape[0], query.shape[1], key.shape[2])
            weight = zero if log_weight is None else per_query_head(log_weight, query.shape[1])
            rule = compiled.key_mass if compiling else compiled.key_mass_rule
            G, mean, variance = found[1].detach(), found[3].detach(), found[4].detach()
            mass_or_none = rule(query, key, bias, weight, sink, mask, G, mean, variance, *_numbers(call.options), call.backend)
    output, G, entropy, mean, variance, maximum = [call.restore(x) for x in found]
    mass_or_none = None if mass_or_none is None else call.restore(mass_or_none)
    return Tilted(output.to(call.dtype), G, entropy, mean, variance, maximum, mass_or_none)


def log_normalizer(
    query: Tensor, key: Tensor, *, scale: float | None = None, log_weight: Tensor | None = None, bias: Tensor | None = None,
    mask: Tensor | None = None, causal: bool = False, window: int | None = None, softcap: float | None = None, sink: Tensor | None = None,
    backend: str | None = None, check: bool | None = None,
) -> Tensor:  # fmt: skip
    r"""The log-normalizer G of the measure of the keys tilted by each query, in one sweep over the keys.

        G(q) = log Σ_j e^{s_j}

    Differentiable in every tensor, twice, forwards and backwards: its gradient in the query is the mean of the (scaled) keys,
    its Hessian their covariance.

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
    call = prepare(
        "fisher_vector_product", query, key, None, scale=scale, log_weight=log_weight, bias=bias, mask=mask, causal=causal,
        window=window, softcap=softcap, sink=sink, backend=backend, check=check,
    )  # fmt: skip
    if not isinstance(vector, Tensor) or vector.shape != query.shape or vector.dtype != query.dtype:
        got = f"{tuple(vector.shape)} {vector.dtype}" if isinstance(vector, Tensor) else type(vector).__name__
        raise ArgumentError(
            f"fisher_vector_product: vector is {got}, query is {tuple(query.shape)} {query.dtype}. "
            "Pass one vector for each query, alike in shape and dtype."
        )
    if call.backend == "reference":
        t = Tensors(*call.inputs[:5], call.inputs[6])
        gradient = torch.func.grad(
            lambda q: reference.attend(t._replace(query=q), call.inputs[5], call.options)[1].nan_to_num(neginf=0.0).sum()
        )
        product = torch.func.jvp(gradient, (t.query,), (call.flat(vector),))[1]
    else:
        product = compiled.hessian_product(call.inputs, call.flat(vector), call.options, call.backend, call.check)
    return call.restore(product).to(call.dtype)
