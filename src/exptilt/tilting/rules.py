r"""Every derivative of attention, from the covariance identities.

A query sees outcomes j with scores s_j; p_j = e^{s_j − G}, and under p: the mean score μ, the variance V, the centred score c = s − μ,
the output o = E[v], the entropy H = G − μ. For any function f of the outcome, the exponential family gives

    ∂E[f]/∂s_j = p_j (f_j − E[f])      and so      dE[f] = E[df] + Cov(f, ds).                                            (∗)

**First derivatives.** With f = s, c², v in (∗), a change ṡ of the scores and v̇ of the values moves

    Ġ = E[ṡ]     μ̇ = Ġ + E[cṡ]     V̇ = E[(c² − V)ṡ] + 2E[cṡ]     ȯ = E[v̇] + Cov(v, ṡ)     Ḣ = Ġ − μ̇.                       (tangent)

Read backwards, cotangents (ō, Ḡ, μ̄, V̄; an entropy's adds H̄ to Ḡ and −H̄ to μ̄) meet the scores as

    s̄_j = p_j t_j,   t_j = <ō,v_j> + a0 + a1 c_j + a2 c_j²,   a0 = Ḡ − <ō,o> + μ̄ − V̄V,  a1 = μ̄ + 2V̄,  a2 = V̄,   v̄_j = p_j ō.     (gradient)

**Second derivatives.** Apply a cotangent to a tangent: Φ = <ō,ȯ> + ḠĠ + μ̄μ̇ + V̄V̇ = E[t ṡ + <ō,v̇>]. Since the gradient is the
transpose of the tangent, ∇Φ is at once the backward pass of the gradient (with q̇ the cotangent of q̄), the forward derivative of the
gradient, and the backward pass of the tangent. Differentiating p by (∗) and t by (tangent), with x1 = E[cṡ] and ṡ' = ṡ − Ġ,

    ∂Φ/∂s_j = p_j r_j,   r_j = (t_j + a1 + 2V̄c_j) ṡ'_j + <ō,v̇_j> + e0 + e1 c_j,   e0 = −<ō,ȯ> − a1 x1 − V̄V̇,  e1 = −2V̄ x1,          (second)
    ∂Φ/∂ṡ_j = p_j t_j,   ∂Φ/∂v_j = p_j ṡ'_j ō,   ∂Φ/∂v̇_j = p_j ō,

and ∂Φ by the cotangents are the tangents themselves. Scores depend on q, k through s = σ(z) + bias + log_weight, z = scale<q,k>,
ż = scale(<q̇,k> + <q,k̇>), which is where σ' and σ'' come in; the sweeps do that.

A **sink** is one more outcome with its own score and value 0: its share is added to each sum here. The **maximum** moves as the score of
the key it stands on. The **key mass** Σ_i p_ij is ∂(Σ_i G_i)/∂log_weight_j, a gradient, so its derivatives are second derivatives.

Third and higher orders differentiate the tiled sweeps themselves: exact, O(n) memory forwards, n² backwards.

Each function below is a `torch.autograd.Function` with `backward`, `jvp` and `vmap`; it works on the canonical tensors of ``problem.py``.
Row statistics (o, G, μ, V) are handed along as constants: what depends on them is already in the formulas above.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from exptilt.tilting import operators, rows, tiled
from exptilt.tilting.problem import Gradients, Needs, Options, Tensors
from exptilt.tilting.rows import Cotangents, Statistics

# Every Function takes first the seven inputs query, key, value, bias, log_weight, sink, mask.
_INPUTS = 7
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _tensors(inputs: Any) -> Tensors:
    query, key, value, bias, log_weight, _, mask = inputs
    return Tensors(query, key, value, bias, log_weight, mask)


def _numbers(options: Options) -> tuple[float, bool, int | None, float | None]:
    return options.scale, options.causal, options.window, options.softcap


def _zero(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def _in_transform() -> bool:
    """Whether a torch.func transform is under way (rather than plain autograd or forward_ad.dual_level, which does not nest)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _forwards_too(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Let what a `jvp` computes have forward derivatives of its own, as nested torch.func.jvp and jacfwd need.

    torch switches them off inside a `jvp`, so that the inputs' own tangents do not come in twice; here these are stripped off instead. The
    decorated function gets the stripped saved tensors in place of ctx.saved_tensors.
    """

    @wraps(jvp)
    def tracked(ctx: Any, *dots: Any) -> Any:
        if not _in_transform():
            return jvp(ctx, ctx.saved_tensors, *dots)
        with forward_ad._set_fwd_grad_enabled(True):
            saved = [None if x is None else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            return jvp(ctx, saved, *dots)

    return tracked


def forward(inputs: Any, options: Options, backend: str, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Output (N, Hq, Q, Dv), statistics (5, N, Hq, Q) and where the maximum is, the sink counted; no derivatives."""
    output, statistics, best = operators.forward(*_tensors(inputs), *_numbers(options), backend, check)
    if inputs[5] is not None:
        output, statistics = rows.join_sink(output, statistics, inputs[5])
    return output, statistics, best


def derivatives_wanted(inputs: Any) -> bool:
    """Whether anyone may ask for a derivative of what is computed from these inputs."""
    if _in_transform() or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


class Attend(Function):
    """inputs → output, G, entropy, mean, variance, maximum, and where the maximum is (an index, not differentiable)."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        output, statistics, best = forward(arguments[:_INPUTS], *arguments[_INPUTS:])
        return output, *(x.clone() for x in statistics), best

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        o, G, _, mean, variance, maximum, best = output
        _save(ctx, *inputs[:_INPUTS], o, G, mean, variance, maximum, best)
        ctx.mark_non_differentiable(best)
        ctx.options, ctx.backend, _ = inputs[_INPUTS:]

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        inputs, stats, (maximum, best) = _split(ctx.saved_tensors)
        o, G, entropy, mean, variance, at_maximum, _ = bars
        grads: tuple[Tensor | None, ...] = (None,) * 6
        if at_maximum is not None:
            grads = rows.maximum_gradient(_tensors(inputs), at_maximum, best, maximum, ctx.options)
        if any(x is not None for x in (o, G, entropy, mean, variance)):
            G, mean = _sum(G, entropy), _sum(mean, None if entropy is None else -entropy)
            if o is None:  # nothing flows through the values: leave them out of the sweep
                inputs = (*inputs[:2], inputs[2][..., :0], *inputs[3:])
                stats = stats._replace(output=stats.output[..., :0])
                o = torch.zeros_like(stats.output)
            bar = Cotangents(o, *(_zero(x, stats.mean) for x in (G, mean, variance)))
            found = _gradient(inputs, bar, stats, ctx.options, ctx.backend, ctx.needs_input_grad)
            grads = tuple(_sum(a, b) for a, b in zip(grads, found, strict=True))
        return (*grads, None, None, None, None)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *dots: Any) -> tuple[Tensor | None, ...]:
        inputs, stats, (maximum, best) = _split(saved)
        o, G, mean, variance = Tangent.apply(*inputs, *dots[:6], *stats, ctx.options, ctx.backend)
        return o, G, G - mean, mean, variance, rows.maximum_tangent(_tensors(inputs), dots[:6], best, maximum, ctx.options), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Attend, info, in_dims, arguments)


class Tangent(Function):
    """inputs, their tangents (six, or None), statistics → tangents of output, G, mean, variance."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, dots, stats = arguments[:7], arguments[7:13], Statistics(*arguments[13:17])
        options, backend = arguments[17:]
        pushed, sums = operators.tangent(*_tensors(inputs), *dots[:5], rows.tangent_rows(stats), *_numbers(options), backend)
        return tuple(rows.finish_tangent(pushed, sums, stats, inputs[5], dots[5]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, *inputs[:17], *output)
        ctx.options, ctx.backend = inputs[17:]

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        inputs, dots, stats, dot = saved[:7], saved[7:13], Statistics(*saved[13:17]), Cotangents(*saved[17:])
        bar = Cotangents(*(_zero(x, like) for x, like in zip(bars, dot, strict=True)))
        primal = _second(inputs, bar, dots, stats, dot, ctx.options, ctx.backend, ctx.needs_input_grad)
        wanted = ctx.needs_input_grad[7:13]
        linear = _gradient(inputs, bar, stats, ctx.options, ctx.backend, wanted) if any(wanted) else (None,) * 6
        linear = tuple(g if w else None for g, w in zip(linear, wanted, strict=True))
        return (*primal, None, *linear, *(None,) * 6)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *dots: Any) -> tuple[Tensor, ...]:
        return _push(lambda *x: _tiled_tangent(x, saved[6], ctx.options), (*saved[:6], *saved[7:13]), (*dots[:6], *dots[7:13]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Tangent, info, in_dims, arguments)


class Gradient(Function):
    """inputs, cotangents of output, G, mean, variance, statistics → gradients by the six inputs; of shape (0,) where not needed."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, bar, stats = _gradient_arguments(arguments)
        options, backend, needs = arguments[15:]
        t = _tensors(inputs)
        found = operators.gradient(*t, bar.output, rows.gradient_rows(stats, bar), *_numbers(options), backend, needs.flags())
        sink = None if inputs[5] is None else rows.sink_gradient(stats, bar, inputs[5])
        return _filled((*rows.spread(Gradients(*found), t), sink), inputs[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, *inputs[:15])
        ctx.options, ctx.backend, ctx.needs = inputs[15:]
        ctx.there = tuple(x.dim() > 1 for x in output)

    @staticmethod
    def backward(ctx: Any, *dots: Tensor | None) -> Any:
        dots = tuple(x if there else None for x, there in zip(dots, ctx.there, strict=True))
        inputs, bar, stats = _gradient_arguments(ctx.saved_tensors)
        dot = Tangent.apply(*inputs, *dots, *stats, ctx.options, ctx.backend)
        primal = _second(inputs, bar, dots, stats, Cotangents(*dot), ctx.options, ctx.backend, ctx.needs_input_grad)
        return (*primal, None, *dot, *(None,) * 7)

    @staticmethod
    def pull(arguments: Any, dots: Any, options: Options, backend: str, wanted: Any) -> tuple[Tensor | None, ...]:
        """The part of `backward` that belongs to the inputs, from the first fifteen arguments."""
        inputs, bar, stats = _gradient_arguments(arguments)
        dot = Tangent.apply(*inputs, *dots, *stats, options, backend)
        return _second(inputs, bar, dots, stats, Cotangents(*dot), options, backend, wanted)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *tangents: Any) -> tuple[Tensor, ...]:
        inputs, bar, stats = _gradient_arguments(saved)
        dots, bar_dots = tangents[:6], tangents[7:11]
        wanted = ctx.there
        total: tuple[Tensor | None, ...] = (None,) * 6
        if any(x is not None for x in dots):
            dot = Tangent.apply(*inputs, *dots, *stats, ctx.options, ctx.backend)
            total = _second(inputs, bar, dots, stats, Cotangents(*dot), ctx.options, ctx.backend, wanted)
        if any(x is not None for x in bar_dots):
            moved = Cotangents(*(_zero(x, like) for x, like in zip(bar_dots, bar, strict=True)))
            linear = _gradient(inputs, moved, stats, ctx.options, ctx.backend, wanted)
            total = tuple(_sum(a, b) for a, b in zip(total, linear, strict=True))
        return _filled(tuple(x if w else None for x, w in zip(total, wanted, strict=True)), inputs[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Gradient, info, in_dims, arguments)


class Second(Function):
    """inputs, cotangents, tangents, statistics, tangents of the statistics → ∇Φ by the six inputs; of shape (0,) where not needed."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, bar, dots = arguments[:7], Cotangents(*arguments[7:11]), arguments[11:17]
        stats, dot = Statistics(*arguments[17:21]), Cotangents(*arguments[21:25])
        options, backend, needs = arguments[25:]
        t = _tensors(inputs)
        ten = rows.second_rows(stats, bar, dot)
        found = operators.second(*t, bar.output, *dots[:5], ten, *_numbers(options), backend, needs.flags())
        sink = None if inputs[5] is None else rows.second_sink(stats, bar, dot, inputs[5], dots[5])
        return _filled((*rows.spread(Gradients(*found), t), sink), inputs[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, *inputs[:17])
        ctx.options, _, ctx.needs = inputs[25:]

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        function, arguments = _tiled_second(saved[6], ctx.options, ctx.needs), (*saved[:6], *saved[7:17])
        primal = _pull(function, arguments, bars)
        return (*primal[:6], None, *primal[6:], *(None,) * 11)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *dots: Any) -> tuple[Tensor, ...]:
        return _push(_tiled_second(saved[6], ctx.options, ctx.needs), (*saved[:6], *saved[7:17]), (*dots[:6], *dots[7:17]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _fold(Second, info, in_dims, arguments)


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _split(saved: Any) -> tuple[Any, Statistics, tuple[Tensor, ...]]:
    return saved[:_INPUTS], Statistics(*saved[_INPUTS : _INPUTS + 4]), saved[_INPUTS + 4 :]


def _gradient_arguments(arguments: Any) -> tuple[Any, Cotangents, Statistics]:
    return arguments[:7], Cotangents(*arguments[7:11]), Statistics(*arguments[11:15])


def _filled(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_zeros(0) if x is None else x for x in grads)


def _needs(inputs: Any, wanted: Any) -> Needs:
    """What the sweep must compute for the wanted ones of query, key, value, bias, log_weight."""
    bias = bool(wanted[3]) and inputs[3] is not None
    columns = bias and inputs[3].shape[3] > 1 and inputs[3].shape[2] == 1
    value = bool(wanted[2]) and inputs[2].shape[3] > 0
    return Needs(bool(wanted[0]), bool(wanted[1]), value, (bool(wanted[4]) and inputs[4] is not None) or columns, bias)


def _present(grads: tuple[Tensor, ...], inputs: Any, wanted: Any) -> tuple[Tensor | None, ...]:
    return tuple(g if w and x is not None and g.dim() > 1 else None for g, x, w in zip(grads, inputs[:6], wanted[:6], strict=True))


def _gradient(inputs: Any, bar: Cotangents, stats: Statistics, options: Options, backend: str, wanted: Any) -> tuple[Tensor | None, ...]:
    found = Gradient.apply(*inputs, *bar, *stats, options, backend, _needs(inputs, wanted))
    return _present(found, inputs, wanted)


def _second(
    inputs: Any, bar: Cotangents, dots: Any, stats: Statistics, dot: Cotangents, options: Options, backend: str, wanted: Any
) -> tuple[Tensor | None, ...]:
    if not any(wanted[:6]):
        return (None,) * 6
    found = Second.apply(*inputs, *bar, *dots, *stats, *dot, options, backend, _needs(inputs, wanted))
    return _present(found, inputs, wanted)


# ---- vmap: a mapped axis becomes part of the batch axis


def _fold(function: type[Function], info: Any, in_dims: Any, arguments: Any) -> Any:
    B = info.batch_size
    query, bias = arguments[0], arguments[3]
    N = query.shape[0] if in_dims[0] is None else query.movedim(in_dims[0], 0).shape[1]
    shared_bias = bias is not None and (bias.shape[0] if in_dims[3] is None else bias.movedim(in_dims[3], 0).shape[1]) == 1
    backward = function in (Gradient, Second)

    def fold(index: int, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dim = in_dims[index]
        if dim is None and x.shape[0] == 1 and (index == 6 or (index == 3 and not backward)):
            return x
        x = x.unsqueeze(0).expand(B, *x.shape) if dim is None else x.movedim(dim, 0)
        if x.shape[1] != N:
            x = x.expand(B, N, *x.shape[2:])
        return x.flatten(0, 1)

    def unfold(index: int, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return x.new_zeros(B, 0)
        x = x.unflatten(0, (B, N))
        return x.sum(1, keepdim=True) if backward and index == 3 and shared_bias and N > 1 else x

    results = function.apply(*(fold(i, x) for i, x in enumerate(arguments)))
    return tuple(unfold(i, x) for i, x in enumerate(results)), (0,) * len(results)


# ---- third and higher orders: differentiate the tiled sweeps


def _tiled_statistics(inputs: Any, mask: Tensor | None, options: Options) -> tuple[Tensors, Statistics]:
    query, key, value, bias, log_weight, sink = inputs
    t = Tensors(query, key, value, bias, log_weight, mask)
    output, statistics, _ = tiled.forward(t, options)
    if sink is not None:
        output, statistics = rows.join_sink(output, statistics, sink)
    return t, Statistics(output, statistics[0], statistics[2], statistics[3])


def _tiled_tangent(arguments: Any, mask: Tensor | None, options: Options) -> tuple[Tensor, ...]:
    inputs, dots = arguments[:6], arguments[6:12]
    t, stats = _tiled_statistics(inputs, mask, options)
    pushed, sums = tiled.tangent(t, Tensors(*dots[:5]), rows.tangent_rows(stats), options)
    return tuple(rows.finish_tangent(pushed, sums, stats, inputs[5], dots[5]))


def _tiled_second(mask: Tensor | None, options: Options, needs: Needs) -> Callable[..., tuple[Tensor, ...]]:
    def function(*arguments: Any) -> tuple[Tensor, ...]:
        inputs, bar, dots = arguments[:6], Cotangents(*arguments[6:10]), arguments[10:16]
        t, stats = _tiled_statistics(inputs, mask, options)
        dot = Cotangents(*_tiled_tangent((*inputs, *dots), mask, options))
        found = tiled.second(t, bar.output, Tensors(*dots[:5]), rows.second_rows(stats, bar, dot), options, needs)
        sink = None if inputs[5] is None else rows.second_sink(stats, bar, dot, inputs[5], dots[5])
        return _filled((*rows.spread(found, t), sink), inputs[0])

    return function


def _push(function: Callable[..., tuple[Tensor, ...]], arguments: Any, dots: Any) -> tuple[Tensor, ...]:
    """Forward derivative of a plain function whose arguments may be None."""
    moving = [i for i, x in enumerate(arguments) if x is not None and dots[i] is not None]

    def of_moving(*x: Tensor) -> tuple[Tensor, ...]:
        full = list(arguments)
        for i, value in zip(moving, x, strict=True):
            full[i] = value
        return function(*full)

    primals, tangents = tuple(arguments[i] for i in moving), tuple(dots[i] for i in moving)
    if not _in_transform():  # torch.func.jvp would open a level inside that of forward_ad, which torch refuses: use the open one
        with forward_ad._set_fwd_grad_enabled(True):
            arguments = [None if x is None else forward_ad.unpack_dual(x).primal for x in arguments]
            duals = (forward_ad.make_dual(arguments[i], dots[i]) for i in moving)
            unpacked = [forward_ad.unpack_dual(x) for x in of_moving(*duals)]
        return tuple(torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in unpacked)
    return torch.func.jvp(of_moving, primals, tangents)[1]


def _pull(function: Callable[..., tuple[Tensor, ...]], arguments: Any, bars: Any) -> tuple[Tensor | None, ...]:
    """Backward derivative of a plain function whose arguments may be None."""
    present = [i for i, x in enumerate(arguments) if x is not None]

    def of_present(*x: Tensor) -> tuple[Tensor, ...]:
        full = list(arguments)
        for i, value in zip(present, x, strict=True):
            full[i] = value
        return function(*full)

    # torch annotates vjp with the triple of has_aux=True as well
    outputs, pull = torch.func.vjp(of_present, *(arguments[i] for i in present))  # type: ignore[misc]
    found = pull(tuple(_zero(bar, like) for bar, like in zip(bars, outputs, strict=True)))
    result: list[Tensor | None] = [None] * len(arguments)
    for i, g in zip(present, found, strict=True):
        result[i] = g
    return tuple(result)
