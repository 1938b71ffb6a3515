"""Operators for `torch.compile`: attention and key mass, and the gradient of each.

The compiler refuses functions with forward derivatives of their own, as those of ``rules.py`` are. Inside a
compiled graph, ``attend.py`` therefore calls the operators here. They run the same sweeps and the same rules
as an ordinary call. (Compiled graphs have first derivatives only: the compiler itself has no double
backward.)
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from exptilt.tilting.derivatives import key_mass as masses
from exptilt.tilting.derivatives.rules import GRADIENT, Attend, Gradient
from exptilt.tilting.problem import MASS, Inputs, InputTangents, RowStatistics, Settings, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

# The compiler keeps graphs on disk, and finds them by the names of operators: change the namespace whenever
# the schema of an operator changes.
_NAMESPACE = "exptilt_5"
_OPTIONS = "Tensor? bias, Tensor? log_weight, Tensor? sink, Tensor? mask, Tensor? packing"
_NUMBERS = "float scale, bool causal, int? window, float? softcap, str backend, bool check"
_ATTEND = f"Tensor query, Tensor key, Tensor value, {_OPTIONS}"
_MASS = f"Tensor query, Tensor key, {_OPTIONS}, Tensor shift, Tensor weight, Tensor gap, Tensor variance"
_RESULTS = 1 + len(RowStatistics._fields) + 2  # output, statistics, shift, place of the maximum
_BARS = 6  # of the results, the first so many have gradients


def _operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator of a function; `fake` makes empty results of the same shapes."""
    made = torch.library.custom_op(f"{_NAMESPACE}::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made


def _list(count: int, kind: str, name: str = "") -> str:
    return ", ".join(f"{kind} {name}{i}" if name else kind for i in range(count))


def _settings(numbers: Any, **more: Any) -> Settings:
    *rule, backend, check = numbers
    return Settings(ScoreRule(*rule), backend, check, **more)


def _blank(x: Tensor | None, need: bool, like: Tensor) -> Tensor:
    """Zeros for the gradient of x, of shape (0,) if there is none: an operator returns no None."""
    return like.new_zeros(0) if x is None or not need else x.new_zeros(x.shape)


def _made(found: Sequence[Tensor | None], inputs: Any, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """Gradients in the dtype of their inputs; copied, because results of an operator share no memory."""
    return tuple(
        _blank(x, need, inputs[0]) if g is None or not need else g.to(x.dtype, copy=True)
        for g, x, need in zip(found, inputs, needs, strict=True)
    )


def _fake_gradients(inputs: Any, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(_blank(x, need, inputs[0]) for x, need in zip(inputs, needs, strict=True))


def _attend(*given: Any) -> Any:
    n = len(Inputs._fields)
    return Attend.forward(*given[:n], _settings(given[n:]))


def _fake_attend(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    lines = (query.new_empty(rows, dtype=wide) for _ in range(_RESULTS - 2))
    output = query.new_empty((*rows, value.shape[-1]), dtype=wide)
    return (output, *lines, query.new_empty(rows, dtype=torch.int64))


def _pull_attend(*given: Any) -> tuple[Tensor, ...]:
    """Gradients by the inputs, from inputs, results, cotangents, numbers, and which gradients are needed."""
    needs, n = given[-1], len(Inputs._fields)
    inputs, (o, _, _, _, variance, maximum, weight, gap, shift, best) = given[:n], given[n : n + _RESULTS]
    bars, numbers = given[n + _RESULTS : n + _RESULTS + _BARS], given[n + _RESULTS + _BARS : -1]
    saved = (*inputs, o, shift, weight, gap, variance, maximum, best)
    ctx = SimpleNamespace(saved_tensors=saved, settings=_settings(numbers), needs_input_grad=needs)
    return _made(Attend.backward(ctx, *bars)[: len(needs)], inputs[: len(needs)], needs)


attend = _operator(
    "attend", f"({_ATTEND}, {_NUMBERS}) -> ({_list(_RESULTS, 'Tensor')})", _attend, _fake_attend
)
_pulled_attend = _operator(
    "attend_backward",
    f"({_ATTEND}, {_list(_RESULTS, 'Tensor', 'result')}, {_list(_BARS, 'Tensor?', 'bar')}, {_NUMBERS}, "
    f"bool[] needs) -> ({_list(len(InputTangents._fields), 'Tensor')})",
    _pull_attend,
    lambda *given: _fake_gradients(given[: len(given[-1])], given[-1]),
)


def _key_mass(query: Tensor, key: Tensor, *given: Any) -> Tensor:
    """`key_mass.key_mass` as an operator."""
    options, known, numbers = given[:5], given[5:9], given[9:]
    inputs, bar, stats = masses.sum_of_G(Inputs(query, key, key, *options), *known)
    only = _settings(numbers, needs=MASS)
    return Gradient.forward(*GRADIENT.flat(only, inputs=inputs, bar=bar, stats=stats))[4]


def _pull_key_mass(bar: Tensor, query: Tensor, key: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Gradients by query, key, bias, log_weight and sink."""
    options, known, numbers, needs = given[:5], given[5:9], given[9:-1], given[-1]
    t, wanted = Inputs(query, key, key, *options), (*needs[:2], False, *needs[2:])
    shift, weight, gap, variance = known
    found = masses.pull_key_mass(t, shift, weight, gap, variance, bar, _settings(numbers), wanted)
    by = found.query, found.key, found.bias, found.log_weight, found.sink
    return _made(by, (query, key, *options[:3]), needs)


key_mass = _operator(
    "key_mass",
    f"({_MASS}, {_NUMBERS}) -> Tensor",
    _key_mass,
    lambda query, key, bias, log_weight, *_: log_weight.new_empty(log_weight.shape),
)
_pulled_mass = _operator(
    "key_mass_backward",
    f"(Tensor bar, {_MASS}, {_NUMBERS}, bool[] needs) -> ({_list(5, 'Tensor')})",
    _pull_key_mass,
    lambda bar, *given: _fake_gradients(given[:5], given[-1]),
)


def _differentiate(operator: Any, tensors: int, differentiable: int, pull: Callable[..., Any]) -> None:
    """Give an operator a backward pass: `pull` of the saved tensors, the cotangents, numbers and needs."""

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        results = output if isinstance(output, tuple) else ()
        ctx.save_for_backward(*inputs[:tensors], *results)
        ctx.numbers, ctx.count = inputs[tensors:], len(inputs)
        ctx.set_materialize_grads(False)

    def back(ctx: Any, *bars: Tensor | None) -> Any:
        needs = list(ctx.needs_input_grad[:differentiable])
        nothing = all(bar is None for bar in bars)
        found = () if nothing else pull(ctx.saved_tensors, bars, ctx.numbers, needs)
        kept = (g if need else None for g, need in zip(found, needs, strict=False))
        return (*kept, *(None,) * (ctx.count - len(found)))

    operator.register_autograd(back, setup_context=keep)


_differentiate(
    attend, 8, 6, lambda saved, bars, numbers, needs: _pulled_attend(*saved, *bars[:_BARS], *numbers, needs)
)
_differentiate(
    key_mass, 11, 5, lambda saved, bars, numbers, needs: _pulled_mass(*bars, *saved, *numbers, needs)
)
