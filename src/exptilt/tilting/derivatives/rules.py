r"""Every derivative of attention, from the covariance identities.

A query sees outcomes j with scores s_j; p_j = e^{s_j − G}, and under p: the mean score μ, the variance V, the
centred score c = s − μ, the output o = E[v], the entropy H = G − μ. For any function f of the outcome, the
exponential family gives

    ∂E[f]/∂s_j = p_j (f_j − E[f])      and so      dE[f] = E[df] + Cov(f, ds).                   (∗)

**First derivatives.** With f = s, c², v in (∗), a change ṡ of the scores and v̇ of the values moves

    Ġ = E[ṡ]    μ̇ = Ġ + E[cṡ]    V̇ = E[(c² − V)ṡ] + 2E[cṡ]    ȯ = E[v̇] + Cov(v, ṡ)    Ḣ = Ġ − μ̇.     (tangent)

Read backwards, cotangents (ō, Ḡ, μ̄, V̄; an entropy's adds H̄ to Ḡ and −H̄ to μ̄) meet the scores as

    s̄_j = p_j t_j,   v̄_j = p_j ō,   t_j = ⟨ō,v_j⟩ + a0 + a1 c_j + a2 c_j²,                       (gradient)
    a0 = Ḡ − ⟨ō,o⟩ + μ̄ − V̄V,   a1 = μ̄ + 2V̄,   a2 = V̄.

**Second derivatives.** Apply a cotangent to a tangent: Φ = ⟨ō,ȯ⟩ + ḠĠ + μ̄μ̇ + V̄V̇ = E[t ṡ + ⟨ō,v̇⟩]. Since
the gradient is the transpose of the tangent, ∇Φ is at once the backward pass of the gradient (with q̇ the
cotangent of q̄), the forward derivative of the gradient, and the backward pass of the tangent.
Differentiating p by (∗) and t by (tangent), with x1 = E[cṡ] and ṡ' = ṡ − Ġ,

    ∂Φ/∂s_j = p_j r_j,   r_j = (t_j + a1 + 2V̄c_j) ṡ'_j + ⟨ō,v̇_j⟩ + e0 + e1 c_j,                  (second)
    e0 = −⟨ō,ȯ⟩ − a1 x1 − V̄V̇,   e1 = −2V̄ x1,
    ∂Φ/∂ṡ_j = p_j t_j,   ∂Φ/∂v_j = p_j ṡ'_j ō,   ∂Φ/∂v̇_j = p_j ō,

and ∂Φ by the cotangents are the tangents themselves. Scores depend on q, k through s = σ(z) + bias +
log_weight, z = scale⟨q,k⟩, ż = scale(⟨q̇,k⟩ + ⟨q,k̇⟩), which is where σ' and σ'' come in; the sweeps do that.

A **sink** is one more outcome with its own score and value 0: its share is added to each sum here. The
**maximum** moves as the score of the key it stands on. The **key mass** Σ_i p_ij is ∂(Σ_i G_i)/∂log_weight_j,
a gradient, so its derivatives are second derivatives.

Third and higher orders differentiate the tiled sweeps themselves: exact, O(n) memory forwards, n² backwards.

Each function below is a `torch.autograd.Function` with `backward`, `jvp` and `vmap`; it works on the
canonical tensors of ``problem.py``. Row statistics (o, shift, weight, gap, V) are handed along as constants:
what depends on them is already in the formulas above.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from exptilt._support.transforms import (
    apply,
    as_batch,
    derivatives_wanted,
    forward_derivatives,
    in_batches,
    in_transform,
    is_batch,
    is_wrapped,
    without_batch,
    without_tangent,
)
from exptilt.tilting.backends import dispatch
from exptilt.tilting.derivatives import higher, identities
from exptilt.tilting.derivatives.identities import Cotangents, Statistics, Tangents
from exptilt.tilting.problem import Inputs, InputTangents, RowStatistics, Settings


class Layout:
    """The order of an autograd function's flat arguments: named groups (NamedTuples), then one `Settings`."""

    def __init__(self, **groups: Any):
        self.groups: dict[str, Any] = groups
        ends = list(accumulate(len(group._fields) for group in groups.values()))
        self.slices = {name: slice(a, b) for name, a, b in zip(groups, [0, *ends], ends, strict=False)}
        self.count = ends[-1]

    def flat(self, settings: Any, **groups: Any) -> tuple[Any, ...]:
        """The flat arguments: the members of all groups, then the settings."""
        return (*(x for name in self.groups for x in groups[name]), settings)

    def read(self, arguments: Any) -> dict[str, Any]:
        """The groups, from arguments or saved tensors, by name."""
        return {name: self.groups[name](*arguments[part]) for name, part in self.slices.items()}

    def gradients(self, **groups: Any) -> tuple[Tensor | None, ...]:
        """Return value of a backward rule: the given groups' gradients, None for all other arguments."""
        result: list[Tensor | None] = [None] * (self.count + 1)
        for name, values in groups.items():
            start = self.slices[name].start
            result[start : start + len(values)] = values
        return tuple(result)


ATTEND = Layout(inputs=Inputs)
TANGENT = Layout(inputs=Inputs, dots=InputTangents, stats=Statistics)
GRADIENT = Layout(inputs=Inputs, bar=Cotangents, stats=Statistics)
SECOND = Layout(inputs=Inputs, bar=Cotangents, dots=InputTangents, stats=Statistics, dot=Tangents)


def _zero(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def _added(x: InputTangents, y: InputTangents) -> InputTangents:
    return InputTangents(*(_sum(a, b) for a, b in zip(x, y, strict=True)))


def _save(ctx: Any, settings: Settings, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.settings = settings


def _forwards_too(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Give the results of a `jvp` forward derivatives of their own, as nested torch.func.jvp and jacfwd need.

    torch switches them off inside a `jvp`, so that the inputs' own tangents do not count twice; here these
    tangents are stripped off instead. The decorated function gets the stripped saved tensors in place of
    ctx.saved_tensors.
    """

    @wraps(jvp)
    def tracked(ctx: Any, *dots: Any) -> Any:
        if not in_transform():
            return jvp(ctx, ctx.saved_tensors, *dots)
        with forward_derivatives():
            return jvp(ctx, [without_tangent(x) for x in ctx.saved_tensors], *dots)

    return tracked


def fold(function: Any, info: Any, in_dims: Any, *arguments: Any) -> Any:
    """The `vmap` rule of these functions: mapped axes become a batch axis in front; the rest is expanded."""

    def mapped(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    results = function.apply(*(mapped(x, dim) for x, dim in zip(arguments, in_dims, strict=True)))
    # () stands for what is not needed
    made = tuple(x if x.dim() else x.expand(info.batch_size) for x in results)
    return made, (0,) * len(made)


def fold_batches(forward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A forward rule that takes batches of ``grad(is_grads_batched=True)`` too, which ask no `vmap` rule."""

    @wraps(forward)
    def folded(*arguments: Any) -> tuple[Tensor, ...]:
        batch = next((x for x in arguments if isinstance(x, Tensor) and is_batch(x)), None)
        if batch is None:
            return forward(*arguments)
        level = in_batches()
        size = without_batch(batch, level, 1).shape[0]
        plain = (without_batch(x, level, size) if isinstance(x, Tensor) else x for x in arguments)
        return tuple(as_batch(x, level) if x.dim() else x for x in forward(*plain))

    return folded


def forward(t: Inputs, settings: Settings) -> tuple[Tensor, RowStatistics, Tensor | None, Tensor]:
    """Output, lines, shift (None: the maximum) and place of the maximum, the sink counted; no derivatives."""
    if t.sink is not None and settings.check:
        dispatch.check_sink(t.sink)
    output, stacked, best = dispatch.forward(t, settings.rule, settings.backend, settings.check)
    lines = RowStatistics(*stacked.unbind())
    if t.sink is None:
        return output, lines, None, best
    output, lines, shift = identities.join_sink(output, lines, t.sink)
    return output, lines, shift, best


class Attend(Function):
    """inputs → the six tensors of `AttentionResult`; then constants: weight, gap, shift, best key."""

    @staticmethod
    @fold_batches
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        output, lines, shift, best = forward(Inputs(*arguments[:-1]), arguments[-1])
        return (
            output,
            *(x.clone() for x in lines),
            identities.shift_of(lines) if shift is None else shift,
            best,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        o, _, _, _, variance, maximum, weight, gap, shift, best = output
        ctx.mark_non_differentiable(weight, gap, shift, best)
        _save(ctx, inputs[-1], *inputs[:-1], o, shift, weight, gap, variance, maximum, best)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        t, stats, maximum, best = _saved_of_attend(ctx.saved_tensors)
        o, G, entropy, mean, variance, at_maximum = bars[:6]
        found = InputTangents()
        if at_maximum is not None:
            found = identities.maximum_gradient(t, at_maximum, best, maximum, ctx.settings.rule)
        if any(x is not None for x in (o, G, entropy, mean, variance)):
            G, mean = _sum(G, entropy), _sum(mean, None if entropy is None else -entropy)
            if o is None:  # nothing flows through the values: leave them out of the sweep
                t, stats = t._replace(value=t.value[..., :0]), stats._replace(output=stats.output[..., :0])
                o = torch.zeros_like(stats.output)
            zero = torch.zeros_like(stats.gap)
            bar = Cotangents(o, *(zero if x is None else x for x in (G, mean, variance)))
            found = _added(found, gradient(t, bar, stats, ctx.settings, ctx.needs_input_grad))
        return ATTEND.gradients(inputs=found)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        t, stats, maximum, best = _saved_of_attend(saved)
        dots, settings = InputTangents(*tangents[: len(InputTangents._fields)]), ctx.settings
        moved = identities.maximum_tangent(t, dots, best, maximum, settings.rule)
        # where one key has most of the weight, no sum is as near to Σ p ṡ as that key's ṡ
        heavy = 2 * torch.exp(maximum - stats.shift) > stats.weight
        stats = stats._replace(near=torch.where(heavy, moved, math.nan))
        o, G, gap, variance = apply(Tangent, *TANGENT.flat(settings, inputs=t, dots=dots, stats=stats))
        return o, G, -gap, G + gap, variance, moved, None, None, None, None


def _saved_of_attend(saved: Any) -> tuple[Inputs, Statistics, Tensor, Tensor]:
    n = len(Inputs._fields)
    return Inputs(*saved[:n]), Statistics(*saved[n : n + 5]), saved[-2], saved[-1]


class Tangent(Function):
    """inputs, their tangents, statistics → `Tangents` of the results."""

    @staticmethod
    @fold_batches
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        a, settings = TANGENT.read(arguments), arguments[-1]
        t, dots, stats = a["inputs"], a["dots"], a["stats"]
        rows = identities.tangent_rows(stats)
        pushed, sums = dispatch.tangent(t, dots, stats.output, rows, settings.rule, settings.backend)
        return tuple(identities.finish_tangent(pushed, sums, stats, t.sink, dots.sink))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs[-1], *inputs[:-1], *output)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        a, dot = TANGENT.read(ctx.saved_tensors), Tangents(*ctx.saved_tensors[TANGENT.count :])
        o, G, gap, variance = (_zero(x, like) for x, like in zip(bars, dot, strict=True))
        bar = Cotangents(
            o, G - gap, gap, variance
        )  # the gap's tangent is the mean's less the log-normalizer's
        primal = second(a["inputs"], bar, a["dots"], a["stats"], dot, ctx.settings, ctx.needs_input_grad)
        wanted = ctx.needs_input_grad[TANGENT.slices["dots"]]
        linear = InputTangents()
        if any(wanted):
            linear = gradient(a["inputs"], bar, a["stats"], ctx.settings, wanted)
            linear = InputTangents(*(g if w else None for g, w in zip(linear, wanted, strict=True)))
        return TANGENT.gradients(inputs=primal, dots=linear)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *tangents: Any) -> tuple[Tensor, ...]:
        return higher.push_tangent(TANGENT.read(saved), TANGENT.read(tangents), ctx.settings.rule)


class Gradient(Function):
    """inputs, cotangents, statistics → gradients by the six inputs; of shape () where not needed."""

    @staticmethod
    @fold_batches
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        a = GRADIENT.read(arguments)
        return _filled(_gradient(a["inputs"], a["bar"], a["stats"], arguments[-1]), a["bar"].log_normalizer)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs[-1], *inputs[:-1])
        ctx.there = tuple(x.dim() > 0 for x in output)

    @staticmethod
    def backward(ctx: Any, *dots: Tensor | None) -> Any:
        a = GRADIENT.read(ctx.saved_tensors)
        moved = InputTangents(*(x if there else None for x, there in zip(dots, ctx.there, strict=True)))
        primal, dot = pull_gradient(
            a["inputs"], a["bar"], a["stats"], moved, ctx.settings, ctx.needs_input_grad
        )
        return GRADIENT.gradients(inputs=primal, bar=dot)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *tangents: Any) -> tuple[Tensor, ...]:
        a, moving = GRADIENT.read(saved), GRADIENT.read(tangents)
        t, bar, stats, settings, wanted = a["inputs"], a["bar"], a["stats"], ctx.settings, ctx.there
        dots, bar_dots = InputTangents(*moving["inputs"][:6]), moving["bar"]
        total = InputTangents()
        if any(x is not None for x in dots):
            total, _ = pull_gradient(t, bar, stats, dots, settings, wanted)
        if any(x is not None for x in bar_dots):
            moved = Cotangents(*(_zero(x, like) for x, like in zip(bar_dots, bar, strict=True)))
            total = _added(total, gradient(t, moved, stats, settings, wanted))
        return _filled(
            InputTangents(*(x if w else None for x, w in zip(total, wanted, strict=True))), bar.log_normalizer
        )


class Second(Function):
    """inputs, cotangents, tangents, statistics and their tangents → ∇Φ by the inputs; () if not needed."""

    @staticmethod
    @fold_batches
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        a, settings = SECOND.read(arguments), arguments[-1]
        t, bar, dots, stats, dot = (a[name] for name in ("inputs", "bar", "dots", "stats", "dot"))
        rows = identities.second_rows(stats, bar, dot)
        settled = settings.rule, settings.backend, settings.needs
        found = dispatch.gradient(t, bar.output, stats.output, rows, *settled, dots, dot.output)
        still = None if t.bias is None else torch.zeros_like(bar.log_normalizer)
        made = identities.spread(found, t, still)
        if t.sink is not None:
            sink = identities.second_sink(stats, bar, dot, t.sink, dots.sink, found.row_sum)
            made = made._replace(sink=sink)
        return _filled(made, bar.log_normalizer)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs[-1], *inputs[:-1])

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        found = higher.pull_second(
            SECOND.read(ctx.saved_tensors), bars, ctx.settings.rule, ctx.settings.needs
        )
        return SECOND.gradients(**found)

    @staticmethod
    @_forwards_too
    def jvp(ctx: Any, saved: Any, *tangents: Any) -> tuple[Tensor, ...]:
        return higher.push_second(
            SECOND.read(saved), SECOND.read(tangents), ctx.settings.rule, ctx.settings.needs
        )


for _rule in (Attend, Tangent, Gradient, Second):
    _rule.vmap = staticmethod(partial(fold, _rule))  # type: ignore[method-assign]
    # torch asks for the signature of `forward` at every call: found once, it costs nothing.
    _rule.forward.__signature__ = inspect.signature(_rule.forward)  # type: ignore[attr-defined]


def _gradient(t: Inputs, bar: Cotangents, stats: Statistics, settings: Any) -> InputTangents:
    """Gradients that `settings.needs` names, without derivatives of their own."""
    rows = identities.tangent_rows(stats) if settings.needs.mass else identities.gradient_rows(stats, bar)
    settled = settings.rule, settings.backend, settings.needs
    found = dispatch.gradient(t, bar.output, stats.output, rows, *settled)
    shifted = None if t.bias is None else identities.shift_gradient(stats, bar)
    dots = identities.spread(found, t, shifted)
    if t.sink is not None and not settings.needs.mass:
        dots = dots._replace(sink=identities.sink_gradient(stats, bar, t.sink))
    return dots


def _filled(dots: InputTangents, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_zeros(()) if x is None else x for x in dots)


def _present(grads: tuple[Tensor, ...], t: Inputs, wanted: Any) -> InputTangents:
    return InputTangents(
        *(
            g if w and x is not None and g.dim() > 0 else None
            for g, x, w in zip(grads, t[:6], wanted[:6], strict=True)
        )
    )


def _needing(t: Inputs, settings: Settings, wanted: Any) -> Settings:
    return Settings(
        settings.rule, settings.backend, needs=identities.needs_of(t, tuple(bool(w) for w in wanted[:6]))
    )


def gradient(t: Inputs, bar: Cotangents, stats: Statistics, settings: Settings, wanted: Any) -> InputTangents:
    """Gradients by the wanted inputs, differentiable."""
    needing, tensors = _needing(t, settings, wanted), (*t, *bar, *stats)
    # `apply` also unwraps tensors that a transform which has ended left wrapped
    held = [x for x in tensors if x is not None]
    if derivatives_wanted(held) or any(is_wrapped(x) or is_batch(x) for x in held):
        found = apply(Gradient, *GRADIENT.flat(needing, inputs=t, bar=bar, stats=stats))
        return _present(found, t, wanted)
    return InputTangents(
        *(x if w else None for x, w in zip(_gradient(t, bar, stats, needing), wanted[:6], strict=True))
    )


def second(
    t: Inputs,
    bar: Cotangents,
    dots: InputTangents,
    stats: Statistics,
    dot: Tangents,
    settings: Settings,
    wanted: Any,
) -> InputTangents:
    """∇Φ by the wanted inputs, differentiable."""
    if not any(wanted[:6]):
        return InputTangents()
    flat = SECOND.flat(_needing(t, settings, wanted), inputs=t, bar=bar, dots=dots, stats=stats, dot=dot)
    return _present(apply(Second, *flat), t, wanted)


def pull_gradient(
    t: Inputs, bar: Cotangents, stats: Statistics, dots: InputTangents, settings: Settings, wanted: Any
) -> tuple[InputTangents, Cotangents]:
    """Gradients by the wanted inputs, and by the statistics' cotangents, from a cotangent of the gradient."""
    plain = Settings(settings.rule, settings.backend)
    dot = Tangents(*apply(Tangent, *TANGENT.flat(plain, inputs=t, dots=dots, stats=stats)))
    by_bar = Cotangents(dot.output, dot.log_normalizer, dot.log_normalizer + dot.gap, dot.variance)
    return second(t, bar, dots, stats, dot, plain, wanted), by_bar
