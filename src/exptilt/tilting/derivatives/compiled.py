"""Operators for `torch.compile`: attention, key mass and Fisher products, each with its own derivative.

The compiler refuses functions with forward derivatives of their own, as those of ``rules.py`` are. Inside a
compiled graph, ``attend.py`` therefore calls the operators here: the same forward sweep, and the same
backward rules, taken from ``rules.py``. (Compiled graphs have first derivatives only: the compiler itself has
no double backward.)
"""

from typing import Any

import torch
from torch import Tensor

from exptilt.tilting.backends.dispatch import NAMESPACE, NUMBERS, OPTIONS
from exptilt.tilting.derivatives import key_mass as masses
from exptilt.tilting.derivatives.rules import GRADIENT, Attend, Gradient
from exptilt.tilting.problem import MASS, Inputs, RowStatistics, Settings, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

_TENSORS = len(Inputs._fields)


class _Kept:
    """The ctx that a rule's setup_context expects, kept on an operator's ctx."""

    def __init__(self, ctx: Any):
        self.ctx = ctx

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.ctx.save_for_backward(*tensors)

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Does nothing: operators have no forward derivative."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Does nothing: gradients of these tensors are ignored."""

    def set_materialize_grads(self, value: bool) -> None:
        self.ctx.set_materialize_grads(value)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name == "ctx" else self.ctx, name, value)


def _settings(numbers: Any, **more: Any) -> Settings:
    scale, causal, window, softcap, backend, *check = numbers
    return Settings(ScoreRule(scale, causal, window, softcap), backend, *check, **more)


def _attend(*given: Any) -> Any:
    """`rules.Attend` as an operator."""
    return Attend.forward(*given[:_TENSORS], _settings(given[_TENSORS:]))


_TEN = f"({', '.join(['Tensor'] * 10)})"
_SCHEMA = f"(Tensor query, Tensor key, Tensor value, {OPTIONS}, {NUMBERS}, bool check) -> {_TEN}"
attend = torch.library.custom_op(f"{NAMESPACE}::attend", _attend, mutates_args=(), schema=_SCHEMA)


@attend.register_fake
def _(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    lines = tuple(query.new_empty(rows, dtype=wide) for _ in range(len(RowStatistics._fields) + 1))
    return (
        query.new_empty((*rows, value.shape[-1]), dtype=wide),
        *lines,
        query.new_empty(rows, dtype=torch.int64),
    )


def _attend_context(ctx: Any, inputs: Any, output: Any) -> None:
    Attend.setup_context(_Kept(ctx), (*inputs[:_TENSORS], _settings(inputs[_TENSORS:])), output)


def _attend_backward(ctx: Any, *bars: Tensor | None) -> Any:
    found = Attend.backward(ctx, *bars)[:_TENSORS]
    return (*(_narrowed(g, x) for g, x in zip(found, ctx.saved_tensors, strict=False)), *(None,) * 6)


def _narrowed(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient in the dtype of its input; plain autograd does that by itself."""
    return gradient if gradient is None or like is None else gradient.to(like.dtype)


attend.register_autograd(_attend_backward, setup_context=_attend_context)


_KNOWN = ("shift", "weight", "gap", "variance")
_MASS_TENSORS = _TENSORS - 1 + len(_KNOWN)  # a mass has no values
_OPTIONS, _LAST = _TENSORS - 3, _MASS_TENSORS - 2


def _key_mass(query: Tensor, key: Tensor, *given: Any) -> Tensor:
    """`key_mass.key_mass` as an operator."""
    options, (shift, weight, gap, variance), numbers = given[:_OPTIONS], given[_OPTIONS:_LAST], given[_LAST:]
    t = Inputs(query, key, key, *options)
    inputs, bar, stats = masses.sum_of_G(t, shift, weight, gap, variance)
    return Gradient.forward(
        *GRADIENT.flat(_settings(numbers, needs=MASS), inputs=inputs, bar=bar, stats=stats)
    )[4]


_SCHEMA = f"(Tensor query, Tensor key, {OPTIONS}, Tensor {', Tensor '.join(_KNOWN)}, {NUMBERS}) -> Tensor"
key_mass = torch.library.custom_op(f"{NAMESPACE}::key_mass", _key_mass, mutates_args=(), schema=_SCHEMA)


@key_mass.register_fake
def _(query: Any, key: Any, bias: Any, log_weight: Any, *_: Any) -> Any:
    return torch.empty_like(log_weight, memory_format=torch.contiguous_format)


def _mass_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:_MASS_TENSORS])
    ctx.numbers = inputs[_MASS_TENSORS:]
    ctx.set_materialize_grads(False)


def _mass_backward(ctx: Any, bar: Tensor | None) -> Any:
    if bar is None:
        return (None,) * (_MASS_TENSORS + len(ctx.numbers))
    query, key, *options, shift, weight, gap, variance = ctx.saved_tensors
    t = Inputs(query, key, key, *options)
    need = ctx.needs_input_grad
    wanted = (need[0], need[1], False, need[2], need[3], need[4])
    found = masses.pull_key_mass(t, shift, weight, gap, variance, bar, _settings(ctx.numbers), wanted)
    made = found.query, found.key, found.bias, found.log_weight, found.sink
    given = zip(made, (query, key, *options[:3]), strict=True)
    return (*(_narrowed(g, x) for g, x in given), *(None,) * (_MASS_TENSORS + len(ctx.numbers) - 5))


key_mass.register_autograd(_mass_backward, setup_context=_mass_context)


def _hessian_product(query: Tensor, key: Tensor, vector: Tensor, *given: Any) -> Tensor:
    """`key_mass.hessian_product` as an operator."""
    options, numbers = given[: _TENSORS - 3], given[_TENSORS - 3 :]
    t = Inputs(query, key, key[..., :0], *options)
    return masses.hessian_product(t, vector, _settings(numbers))


_PRODUCT = f"Tensor query, Tensor key, Tensor vector, {OPTIONS}, {NUMBERS}"
hessian_product = torch.library.custom_op(
    f"{NAMESPACE}::hessian_product",
    _hessian_product,
    mutates_args=(),
    schema=f"({_PRODUCT}, bool check) -> Tensor",
)


@hessian_product.register_fake
def _(query: Any, *_: Any) -> Any:
    return torch.empty_like(query, dtype=wide_dtype(query.dtype), memory_format=torch.contiguous_format)


def _pull_product(bar: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    query, *_ = given = arguments[:6]
    hidden, settings = arguments[6:_TENSORS], _settings(arguments[_TENSORS:])
    present = [i for i, x in enumerate(given) if x is not None]

    def product(*some: Tensor) -> Tensor:
        full: list[Any] = list(given)
        for i, x in zip(present, some, strict=True):
            full[i] = x
        q, k, v, b, w, s = full
        return masses.hessian_product(Inputs(q, k, k[..., :0], b, w, s, *hidden), v, settings)

    _, pull = torch.func.vjp(product, *(given[i] for i in present))  # type: ignore[misc]
    found: list[Tensor] = [query.new_zeros(0) for _ in given]
    for i, g in zip(present, pull(bar), strict=True):
        found[i] = g.clone(memory_format=torch.contiguous_format)
    return tuple(found)


_pulled_product = torch.library.custom_op(
    f"{NAMESPACE}::hessian_product_backward",
    _pull_product,
    mutates_args=(),
    schema=f"(Tensor bar, {_PRODUCT}) -> ({', '.join(['Tensor'] * 6)})",
)


@_pulled_product.register_fake
def _(bar: Any, query: Any, key: Any, vector: Any, bias: Any, log_weight: Any, sink: Any, *_: Any) -> Any:
    made = (query, key, vector, bias, log_weight, sink)
    return tuple(
        query.new_zeros(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in made
    )


def _product_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    *ctx.numbers, _check = inputs[_TENSORS:]


def _product_backward(ctx: Any, bar: Tensor) -> Any:
    found = _pulled_product(bar, *ctx.saved_tensors, *ctx.numbers)
    given = zip(found, ctx.saved_tensors[:6], strict=True)
    return (*(None if x is None else g for g, x in given), *(None,) * (_TENSORS - 6 + len(ctx.numbers) + 1))


hessian_product.register_autograd(_product_backward, setup_context=_product_context)
