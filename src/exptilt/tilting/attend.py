r"""The primitive: tilt the measure that the keys carry by each query.

    p(j | q) = h_j e^{⟨q,k_j⟩ scale} / e^{G(q)},   G(q) = log Σ_j h_j e^{⟨q,k_j⟩ scale},   h = e^{log_weight}.

`attend` returns the mean of the values under p with the statistics of the scores; `log_normalizer` is G
alone; `fisher_vector_product` is G's Hessian times a vector: the covariance of the keys under p.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import apply, in_transform, is_batch, transform_compiled
from exptilt.tilting import plan
from exptilt.tilting.arguments import Call, explain_keywords, prepare_again
from exptilt.tilting.backends import dispatch, reference
from exptilt.tilting.derivatives import compiled
from exptilt.tilting.derivatives import key_mass as masses
from exptilt.tilting.derivatives.rules import Attend, forward
from exptilt.tilting.key_side import segment_values, top_keys
from exptilt.tilting.problem import Inputs, Settings, wide_dtype
from exptilt.tilting.result import AttentionResult, of_lines, share_of


def _flat(*tensors: Tensor) -> bool:
    """Whether all are matrices, (N, D): one head, whose axis the caller has left out."""
    return all(isinstance(x, Tensor) and x.dim() == 2 for x in tensors)


def run(call: Call, *, key_mass: bool = False) -> AttentionResult:
    """The result of a checked call."""
    if call.autocast:  # inputs have been cast already; the sweeps choose their own precision
        with torch.autocast(call.inputs.query.device.type, enabled=False):
            return run(replace(call, autocast=False), key_mass=key_mass)
    t, settings = call.inputs, call.settings
    compiling = torch.compiler.is_compiling()
    mass: Tensor | None = None
    if key_mass and call.tracked:  # gradients of two sweeps are added up before they are rounded
        wide = wide_dtype(t.query.dtype)
        t = t._replace(query=t.query.to(wide), key=t.key.to(wide))
    # the compiler cannot see derivatives inside transforms
    if settings.backend == "reference" or (compiling and transform_compiled()):
        if settings.check and t.sink is not None and not (compiling or in_transform()):
            dispatch.check_sink(t.sink)
        found = reference.attend(t, settings.rule)
        output, G, entropy, mean, variance, maximum, mass, shift, weight, gap = found
        parts, mass = (shift, weight, gap), mass if key_mass else None
        return AttentionResult(output.to(call.dtype), G, entropy, mean, variance, maximum, mass, parts)
    if call.tracked:
        if compiling:
            found = compiled.attend(*t, *settings.rule.numbers, settings.backend, settings.check)
        else:
            found = apply(Attend, *t, settings)
        output, G, entropy, mean, variance, maximum, weight, gap, shift, _ = found
    elif call.layout is not None and not any(map(is_batch, t[:3])):  # straight to the kernel
        rule, backend, check = settings.rule, settings.backend, settings.check
        output, stacked, _ = dispatch.forward(t, rule, backend, check, call.layout)
        if not key_mass:
            return of_lines(output if output.dtype == call.dtype else output.to(call.dtype), stacked)
        G, entropy, mean, variance, maximum, weight, gap = stacked
        shift = maximum
    else:
        output, lines, sink_shift, _ = forward(t, settings)
        G, entropy, mean, variance, maximum, weight, gap = lines
        shift = maximum if sink_shift is None else sink_shift
    if key_mass:
        own = masses.with_own_weights(t)
        known = torch.where(shift == -torch.inf, 0.0, shift), weight, gap, variance.detach()
        if compiling:
            tensors = own.query, own.key, own.bias, own.log_weight, own.sink, own.mask, own.packing
            mass = compiled.key_mass(*tensors, *known, *settings.rule.numbers, settings.backend, False)
        else:
            mass = masses.key_mass(own, *known, settings)
    output = output if output.dtype == call.dtype else output.to(call.dtype)
    parts = (shift.detach(), weight.detach(), gap.detach()) if call.tracked else (shift, weight, gap)
    return AttentionResult(output, G, entropy, mean, variance, maximum, mass, parts)


def run_dropped(call: Call, dropout: float, seed: int | Tensor | None, key_mass: bool) -> AttentionResult:
    """The result of a call with a share `dropout` of the weights dropped from the output."""
    check_dropout(dropout)
    t = call.inputs
    # Without values, so not by the layout that a remembered call has for them. In the same backend as the
    # kept weights: a share of two sums has digits if both round their scores alike.
    call = replace(call, settings=_torch_on_cpu(call.settings), layout=None)
    whole = run(replace(call, inputs=t._replace(value=t.value[..., :0])), key_mass=key_mass)
    starts = torch.tensor([[0, t.query.shape[-2]], [0, t.key.shape[-2]]], device=t.query.device)
    return drop(call, whole, starts[0], starts[1], dropout, seed)


def _torch_on_cpu(settings: Settings) -> Settings:
    return replace(settings, backend="tiled") if settings.backend == "cpu" else settings


def check_dropout(dropout: float) -> None:
    """Raise unless dropout is a share of the weights."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise ArgumentError(f"attend: dropout is {dropout!r}. Pass the share of weights to drop, 0 <= p < 1.")


def drop(
    call: Call, whole: AttentionResult, query_starts: Tensor, key_starts: Tensor, dropout: float, seed: Any
) -> AttentionResult:
    r"""The result `whole` with the output of the kept weights alone: attention over the kept keys, rescaled.

        Σ_j d_j p_j v_j = o' e^{G' − G} / (1 − dropout),     d_j = 0 or 1/(1 − dropout),

    where o' and G' belong to the kept keys, G to all. The starts of sequences are those of ``plan.py``.
    """
    t, settings = call.inputs, _torch_on_cpu(call.settings)
    device, lead = t.query.device, t.query.dim() - 3
    drawn = torch.randint(2**31, (), device=device) if seed is None else _seed(seed, device)
    made = plan.make(query_starts, key_starts[:-1], key_starts[1:], drawn, dropout)[(None,) * lead]
    kept = t._replace(packing=made)
    part = run(replace(call, inputs=kept, settings=settings, dtype=wide_dtype(t.query.dtype), layout=None))
    output = part.output * (share_of(part, whole) / (1 - dropout)).unsqueeze(-1)
    return replace(whole, output=output.to(call.dtype))


def _seed(seed: Any, device: torch.device) -> Tensor:
    """The seed as a tensor."""
    whole = isinstance(seed, Tensor) and seed.dim() == 0 and not seed.is_floating_point()
    if not whole and (isinstance(seed, bool) or not isinstance(seed, int)):
        got = f"a tensor {tuple(seed.shape)} {seed.dtype}" if isinstance(seed, Tensor) else repr(seed)
        raise ArgumentError(f"attend: seed is {got}. Pass an integer, or a tensor () of one.")
    return torch.as_tensor(seed, device=device)


@explain_keywords
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    key_mass: bool = False,
    backend: str | None = None,
    check: bool | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    top: int | None = None,
    segments: Tensor | None = None,
) -> AttentionResult:
    r"""Exact softmax attention, with the statistics of its scores from the same sweep over the keys.

        s_ij = softcap(scale ⟨q_i, k_j⟩) + bias_ij + log_weight_j,  p_ij = e^{s_ij − G_i},  o_i = Σ_j p_ij v_j

    Differentiable in query, key, value, bias, log_weight and sink through every statistic: backwards,
    forwards and twice, in O(n) memory.

    Args:
        query: ``(..., Hq, Q, D)``; float64, float32, bfloat16 or float16 (the last two are summed in float32,
            and statistics are float32).
        key: ``(..., Hkv, K, D)``; Hkv divides Hq, and query head h reads key head h // (Hq/Hkv).
        value: ``(..., Hkv, K, Dv)``.
        scale: factor of ⟨q,k⟩; 1/sqrt(D) if None.
        log_weight: ``(..., Hkv, K)``, the log of each key's own weight h.
        bias: broadcasts to ``(..., Hq, Q, K)``; added to the scores, −inf hides a key.
        mask: booleans that broadcast to ``(..., Hq, Q, K)``; True where a query may see a key.
        causal: query i sees key j where j <= i + K − Q: the two sequences end together.
        window: w keeps keys with i' − j < w, i' = i + K − Q; without causal also j − i' < w.
        softcap: c > 0, for scores c·tanh(s/c).
        sink: ``(..., Hq)``, the score of one more outcome per head with value 0; −inf for none.
            It counts in G, entropy, mean and variance, not in score_max.
        key_mass: also return the attention each key receives (a second sweep).
        backend: ``reference``, ``tiled``, ``cpu`` or ``gpu``; None chooses by device and dtype.
        check: raise if NaN or an infinity in query, key, bias or log_weight reaches a result; None means yes
            on the CPU, no elsewhere.
        dropout: share of the weights that are dropped from the output, others divided by 1 − dropout;
            statistics are those of all weights. The seed alone decides which are dropped, so nothing of size
            Q × K is kept, and every derivative drops the same ones. On the CPU the kept weights are found in
            plain torch.
        seed: an integer of at most 32 bits, or a tensor ``()``; None draws one from torch's random numbers.
        top: k also returns the k heaviest keys of each query, their weights, and the weight left over
            (another sweep).
        segments: ``(K,)``, the number of the segment of each key, from 0: also return the attention that each
            segment gets (another sweep).

    Returns:
        `AttentionResult`: output ``(..., Hq, Q, Dv)``, statistics ``(..., Hq, Q)``, key_mass ``(..., Hq, K)``
        or None.
        A query that sees nothing has output 0, log_normalizer −inf, score_max −inf, and 0 for the rest.

    Example:
        >>> q, k = torch.zeros(1, 2, 4), torch.randn(1, 8, 4)
        >>> attend(q, k, k).entropy.exp()  # effective number of keys
        tensor([[8., 8.]])
    """
    options = scale, log_weight, bias, mask, causal, window, softcap, sink, backend, check
    call = prepare_again("attend", query, key, value, options)
    found = run_dropped(call, dropout, seed, key_mass) if dropout else run(call, key_mass=key_mass)
    if top is None and segments is None:
        return found
    index, weight, rest = (None, None, None) if top is None else top_keys(call, top, found.parts)
    mass = None
    if segments is not None:
        parts = call.inputs._replace(value=segment_values(segments, call.inputs.key))
        # Other values, so not by the layout that a remembered call has for its own.
        mass = run(replace(call, inputs=parts, dtype=wide_dtype(call.dtype), layout=None)).output
    more = {"top_index": index, "top_weight": weight, "top_rest": rest, "segment_mass": mass}
    given = {f.name: getattr(found, f.name) for f in fields(found)}
    return AttentionResult(**given | more)


@explain_keywords
def log_normalizer(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
    check: bool | None = None,
) -> Tensor:
    r"""The log-normalizer G of the measure of the keys tilted by each query, in one sweep over the keys.

        G(q) = log Σ_j e^{s_j}

    Differentiable in every tensor, twice, forwards and backwards: its gradient in the query is the mean of
    the (scaled) keys, its Hessian their covariance.

    Args:
        query: ``(..., Hq, Q, D)``, or ``(Q, D)``.
        key: ``(..., Hkv, K, D)``; Hkv divides Hq; or ``(K, D)``, if the query is a matrix too.
        scale: factor of ⟨q,k⟩; 1/sqrt(D) if None.
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
        ``(..., Hq, Q)``, or ``(Q,)`` for matrices; −inf for a query that sees nothing.

    Example:
        >>> log_normalizer(torch.zeros(1, 2), torch.randn(8, 2)).exp().round()
        tensor([8.])
    """
    flat = _flat(query, key)
    query, key = (query[None], key[None]) if flat else (query, key)
    options = scale, log_weight, bias, mask, causal, window, softcap, sink, backend, check
    call = prepare_again("log_normalizer", query, key, None, options)
    G = run(call).log_normalizer
    return G[0] if flat else G


@explain_keywords
def fisher_vector_product(
    query: Tensor,
    key: Tensor,
    vector: Tensor,
    *,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
    check: bool | None = None,
) -> Tensor:
    r"""G's Hessian in the query times a vector, without the Hessian: the forward derivative of G's gradient.

        ∇²G(q) v = scale² Cov_p(k) v

    (a sink counts as a key of 0; with a softcap the Hessian has the term of its curvature as well).
    Differentiable.

    Args:
        query: ``(..., Hq, Q, D)``, or ``(Q, D)``.
        key: ``(..., Hkv, K, D)``, or ``(K, D)``, if the query is a matrix too.
        vector: ``(..., Hq, Q, D)``, or ``(Q, D)``, one for each query.
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
        ``(..., Hq, Q, D)``, or ``(Q, D)``, the shape of query.

    Example:
        >>> q, k = torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> fisher_vector_product(q, k, torch.ones(1, 2), scale=1.0)
        tensor([[1., 0.]])
    """
    flat = _flat(query, key, vector)
    query, key, vector = (query[None], key[None], vector[None]) if flat else (query, key, vector)
    options = scale, log_weight, bias, mask, causal, window, softcap, sink, backend, check
    call = prepare_again("fisher_vector_product", query, key, None, options)
    if not isinstance(vector, Tensor) or vector.shape != query.shape or vector.dtype != query.dtype:
        got = f"{tuple(vector.shape)} {vector.dtype}" if isinstance(vector, Tensor) else type(vector).__name__
        raise ArgumentError(
            f"fisher_vector_product: vector is {got}, query is {tuple(query.shape)} {query.dtype}. "
            "Pass one vector for each query, alike in shape and dtype."
        )
    t, settings = call.inputs, call.settings
    along = vector.to(t.query.dtype).expand(t.query.shape)
    if settings.backend == "reference" or (torch.compiler.is_compiling() and transform_compiled()):
        product = _reference_product(call, along)
    else:  # which the compiler does not look into
        product = masses.hessian_product(t, along, settings)
    product = product.to(call.dtype)
    return product[0] if flat else product


def _reference_product(call: Call, along: Tensor) -> Tensor:
    t: Inputs = call.inputs

    def total(query: Tensor) -> Tensor:
        return reference.attend(t._replace(query=query), call.settings.rule)[1].nan_to_num(neginf=0.0).sum()

    query = t.query.contiguous()  # torch gives tangents the strides of their tensor: none may be 0
    product: Tensor = torch.func.jvp(torch.func.grad(total), (query,), (along,))[1]
    return product
