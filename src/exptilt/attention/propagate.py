r"""Attention that carries uncertainty: means and covariances of the hidden states through one layer.

Position i holds x_i with mean μ_i and covariance Σ_i, value v_i = W x_i; query j gives it the weight A_ij.
There are two readings of the output of query j, which have the same mean o_j = Σ_i A_ij W μ_i.

**A mixture** (E6): the output is the value of one position, drawn with probability A_ij, as IMM mixes its
modes:

    Σ'_j = Σ_i A_ij (W Σ_i W' + (W μ_i − o_j)(W μ_i − o_j)')

**An average**, what a transformer computes when its input is noisy: the output is Σ_i A_ij W x_i, whose
noise averages out, and unequal means do not count as noise:

    Σ'_j = Σ_i A_ij² W Σ_i W'

The first is larger by Σ_i A_ij (1 − A_ij) W Σ_i W' + Σ_i A_ij (Wμ_i − o_j)(Wμ_i − o_j)', the spread within
the mixture. Squares of weights need no matrix of weights: a measure tilted twice as far is A² but for its
normalizer,

    A_ij² = e^{G(2q) − 2G(q)} softmax_i(2 s_ij),

so both readings are attention again. Both hold the weights fixed. In truth A depends on x too, through
query and key:

    do_j = Σ_i A_ij W dx_i + Σ_i A_ij (v_i − o_j) ds_ij,
    ds_ij = scale (⟨q_j, W_k dx_i⟩ + ⟨W_q dx_j, k_i⟩)

which matters once the noise moves scores by about 1 (‖W_k' q‖ times the noise, times the scale) and values
differ where the weights are; `query_weight` and `key_weight` add this term.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exptilt._support.checks import choice
from exptilt._support.errors import ArgumentError
from exptilt.attention.moments import Moments, gathered
from exptilt.tilting import attend
from exptilt.tilting.arguments import Call, prepare
from exptilt.tilting.problem import per_query_head

_NUMBERS = 1 << 22  # entries of the largest intermediate tensor, roughly


class _Layer(NamedTuple):
    """A layer at the mean of its hidden states: its attention, and the linear maps around it."""

    call: Call
    given: Moments  # of the hidden states
    value: Tensor  # (Hkv, Dv, E)
    output: Tensor | None  # (E', Hq, Dv)
    query: Tensor | None  # (Hq, D, E)
    key: Tensor | None  # (Hkv, D, E)
    reading: str


def propagate(
    mean: Tensor,
    covariance: Tensor,
    query: Tensor,
    key: Tensor,
    value_weight: Tensor,
    *,
    form: str | None = None,
    reading: str = "mixture",
    value_bias: Tensor | None = None,
    output_weight: Tensor | None = None,
    output_bias: Tensor | None = None,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Mean and covariance of the output of attention for uncertain hidden states (THEORY E6).

    A diagonal covariance is streamed like attention itself: coordinates, heads and positions count as
    independent. A full covariance also keeps the correlations of heads and coordinates, a low-rank one those
    of positions too; the full one holds the weights of a few queries at a time. For a whole block, with its
    norms and residuals, use `Moments.through`.

    Args:
        mean: ``(..., K, E)``, of the hidden states.
        covariance: ``(..., K, E, E)``, ``(..., K, E)`` or ``(..., K, E, rank)``; see `Moments`.
        query: ``(..., Hq, Q, D)``, at the mean.
        key: ``(..., Hkv, K, D)``, at the mean.
        value_weight: ``(Hkv, Dv, E)``, W of v = W x + b.
        form: of the covariance: "full", "diagonal" or "low-rank"; None decides by its shape.
        reading: "mixture" (E6: one position is drawn) or "average" (what a network computes). A low-rank
            covariance needs "average": the spread of a mixture has full rank.
        value_bias: ``(Hkv, Dv)``, b.
        output_weight: ``(E', Hq·Dv)``, as that of `torch.nn.Linear`; None keeps heads separate.
        output_bias: ``(E',)``.
        query_weight: ``(Hq, D, E)``, the matrix that makes the query of each position (Q = K); with
            key_weight, the dependence of the attention weights on the hidden states is added, by the delta
            method. A diagonal covariance is then not streamed.
        key_weight: ``(Hkv, D, E)``.
        scale: as in `attend`, like all that follow.
        log_weight: ``(..., Hkv, K)``.
        bias: broadcasts to ``(..., Hq, Q, K)``.
        mask: broadcasts to ``(..., Hq, Q, K)``.
        causal: whether query i sees no key after its own place.
        window: how far a query sees.
        softcap: of the scores.
        sink: ``(..., Hq)``, one more outcome with value 0.
        backend: as in `attend`.

    Returns:
        Mean and covariance, in the form given, of the output ``(..., Q, E')``; without output_weight, of the
        output of each head ``(..., Hq, Q, Dv)``.

    Example:
        >>> x = torch.tensor([[-1.0], [1.0]])  # two positions, known exactly
        >>> zero = torch.zeros(1, 2, 1)  # both have weight ½
        >>> propagate(x, torch.zeros(2, 1), zero, zero, torch.ones(1, 1, 1))
        (tensor([[[0.],
                 [0.]]]), tensor([[[1.],
                 [1.]]]))
        >>> propagate(x, torch.ones(2, 1), zero, zero, torch.ones(1, 1, 1), reading="average")[1]
        tensor([[[0.5000],
                 [0.5000]]])
    """
    choice("propagate", "reading", reading, ("mixture", "average"))
    given = Moments(mean, covariance, form)
    if given.form == "low-rank" and reading == "mixture":
        raise ArgumentError(
            "propagate: the spread of a mixture has full rank, a low-rank covariance cannot hold it. "
            'Pass reading="average", or a full or diagonal covariance.'
        )
    if (query_weight is None) != (key_weight is None):
        raise ArgumentError("propagate: query_weight and key_weight go together. Pass both, or neither.")
    wanted = _shapes(mean, query, key, value_weight, output_weight)
    weights = (value_weight, output_weight, query_weight, key_weight)
    for (name, shape), weight in zip(wanted.items(), weights, strict=True):
        if weight is not None and tuple(weight.shape) != shape:
            raise ArgumentError(f"propagate: {name} has shape {tuple(weight.shape)}. Pass {shape}.")
    heads = None if output_weight is None else output_weight.unflatten(-1, (query.shape[-3], -1))
    if query_weight is not None and query.shape[-2] != key.shape[-2]:
        raise ArgumentError(
            "propagate: query_weight needs a query at each position; "
            f"got {query.shape[-2]} queries for {key.shape[-2]} keys."
        )
    value = torch.einsum("...ie,hde->...hid", mean, value_weight)
    value = value if value_bias is None else value + value_bias.unsqueeze(-2)
    call = prepare(
        "propagate", query, key, value, scale, log_weight, bias, mask, causal, window, softcap, sink, backend
    )
    maps = (value_weight, heads, query_weight, key_weight)
    layer = _Layer(call, given, *maps, reading)
    if given.form == "low-rank":
        output, second = _factor(layer)
    elif given.form == "diagonal" and query_weight is None:
        output, second = _streamed(layer)
    else:
        output, second = _blocks(layer)
    if heads is None:
        return output, second
    out = torch.einsum("...hjd,ohd->...jo", output, heads)
    return (out if output_bias is None else out + output_bias), second


def _shapes(
    mean: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor | None
) -> dict[str, tuple[int, ...]]:
    """The required shape of each weight, by name."""
    size, (Hq, Hkv, D) = mean.shape[-1], (query.shape[-3], key.shape[-3], key.shape[-1])
    return {
        "value_weight": (Hkv, value.shape[-2] if value.ndim == 3 else -1, size),
        "output_weight": (0 if output is None else output.shape[0], Hq * value.shape[-2]),
        "query_weight": (Hq, D, size),
        "key_weight": (Hkv, D, size),
    }


def _attend(call: Call, value: Tensor, times: float = 1.0) -> tuple[Tensor, Tensor]:
    """Output and G of the call with another value and all scores multiplied by `times`."""
    t, (scale, causal, window, softcap) = call.inputs, call.settings.rule.numbers

    def more(x: Tensor | None) -> Tensor | None:
        return None if x is None else times * x

    found = attend(
        *(t.query, t.key, value),
        scale=times * scale,
        log_weight=more(t.log_weight),
        bias=more(t.bias),
        mask=t.mask,
        causal=causal,
        window=window,
        softcap=more(softcap),  # type: ignore[arg-type]
        sink=more(t.sink),
        backend=call.settings.backend,
    )
    return found.output, found.log_normalizer


def _streamed(layer: _Layer) -> tuple[Tensor, Tensor]:
    """Output of the heads, and the variances ``(..., Q, E')`` or ``(..., Hq, Q, Dv)``."""
    call, v = layer.call, layer.call.inputs.value
    noise = torch.einsum("...ie,hde->...hid", layer.given.covariance, layer.value.square())
    if layer.reading == "average":
        output, G = _attend(call, v)
        square, twice = _attend(call, noise, 2.0)
        variance = square * torch.where(torch.isneginf(G), 0.0, (twice - 2 * G).exp()).unsqueeze(-1)
    else:
        centre = v.mean(-2, keepdim=True)  # second moments about it lose no digits to the values' common size
        one = [] if call.inputs.sink is None else [torch.ones_like(v[..., :1])]
        found, _ = _attend(call, torch.cat([v, noise + (v - centre).square(), *one], -1))
        output, second = found[..., : v.shape[-1]], found[..., v.shape[-1] : 2 * v.shape[-1]]
        middle = per_query_head(centre, output.shape[-3], -3)
        if one:  # the sink has value 0
            second = second + (1 - found[..., -1:]) * middle.square()
        variance = (second - (output - middle).square()).clamp_min(0)
    if layer.output is None:
        return output, variance
    return output, torch.einsum("...hjd,ohd->...jo", variance, layer.output.square())


def _factor(layer: _Layer) -> tuple[Tensor, Tensor]:
    """Output of the heads, and the factor of the low-rank covariance."""
    call, t = layer.call, layer.call.inputs
    moved = layer.given.directions()
    dv = torch.einsum("m...ie,hde->m...hid", moved, layer.value)
    if layer.query is None or layer.key is None:
        rank = len(dv)
        output, _ = _attend(call, t.value)
        steps, _ = _attend(call, dv.movedim(0, -1).flatten(-2))
        steps = steps.unflatten(-1, (-1, rank)).movedim(-1, 0)
    else:
        dq, dk = (torch.einsum("m...ie,hde->m...hid", moved, w) for w in (layer.query, layer.key))

        def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = call.inputs._replace(query=q, key=k)
            return _attend(Call(turned, call.settings, call.dtype, call.autocast, True), v)[0]

        def push(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            tangent: Tensor = torch.func.jvp(heads, (t.query, t.key, t.value), (a, b, c))[1]
            return tangent

        output, steps = heads(t.query, t.key, t.value), torch.func.vmap(push)(dq, dk, dv)
    if layer.output is not None:
        steps = torch.einsum("m...hjd,ohd->m...jo", steps, layer.output)
    return output, gathered(steps, "low-rank")


def _blocks(layer: _Layer) -> tuple[Tensor, Tensor]:
    """Output of the heads, and the covariance, from derivatives by each position, in blocks of queries."""
    call, form = layer.call, str(layer.given.form)
    t, rule = call.inputs, call.settings.rule
    heads, length = t.query.shape[-3:-1]
    output, G = _attend(call, t.value)
    moved = layer.given.directions()
    value, key = per_query_head(t.value, heads, -3), per_query_head(t.key, heads, -3)
    dv, dq, dk = (
        None if w is None else torch.einsum("m...ie,hde->m...hid", moved, per_query_head(w, heads, 0))
        for w in (layer.value, layer.query, layer.key)
    )
    assert dv is not None
    block = max(1, _NUMBERS // (dv.numel() or 1))
    parts = []
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        z = rule.scale * (t.query[..., rows, :] @ key.mT)
        s, slope, _ = rule.block(t, z, 0, key.shape[-2], rows)
        level = G[..., rows, None]
        A = torch.where(level == -torch.inf, 0.0, (s - level.masked_fill(level == -torch.inf, 0.0)).exp())
        o = output[..., rows, :]
        gap = value.unsqueeze(-3) - o.unsqueeze(-2)  # (..., h, j, i, d)
        change = A.unsqueeze(-1) * dv.unsqueeze(-3)  # (m, ..., h, j, i, d), by each position i
        if dq is not None and dk is not None:
            rate = rule.scale * A if slope is None else rule.scale * A * slope
            change = change + (rate * (t.query[..., rows, :] @ dk.mT)).unsqueeze(-1) * gap
            turned = torch.einsum("m...hji,...hjid->m...hjd", rate * (dq[..., rows, :] @ key.mT), gap)
            change[..., range(rows.stop - start), range(start, rows.stop), :] += turned
        if layer.output is not None:
            change = torch.einsum("m...hjid,ohd->m...jio", change, layer.output)
        found = gathered(change.movedim(-2, 0).flatten(0, 1), form)
        if layer.reading == "mixture":
            found = found + _spread(A, gap, dv, o, layer.output, form)
        parts.append(found)
    return output, torch.cat(parts, -3 if form == "full" else -2)


def _spread(A: Tensor, gap: Tensor, dv: Tensor, o: Tensor, out: Tensor | None, form: str) -> Tensor:
    """Σ_i A(1−A) W Σ_i W' + Σ_i A (v_i − o)(v_i − o)'; heads draw independently, the sink has value 0."""
    steps = torch.cat(
        [
            ((A * (1 - A)).clamp_min(0).sqrt().unsqueeze(-1) * dv.unsqueeze(-3)).movedim(-2, 0).flatten(0, 1),
            (A.sqrt().unsqueeze(-1) * gap).movedim(-2, 0),
            ((1 - A.sum(-1, keepdim=True)).clamp_min(0).sqrt() * o).unsqueeze(0),
        ]
    )
    if out is None:
        return gathered(steps, form)
    apart = torch.einsum("m...hjd,ohd->hm...jo", steps, out)
    return gathered(apart.flatten(0, 1), form)
