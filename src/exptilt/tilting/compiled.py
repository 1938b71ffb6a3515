"""Attention and key mass as operators that carry their own derivative, for graphs made by `torch.compile`.

The compiler refuses functions with forward derivatives of their own, as those of ``rules.py`` are. Inside a compiled graph, ``tilt.py`` therefore calls
the two operators here: the same forward sweep, and the same backward rules, taken from ``rules.py``. (Compiled graphs have first derivatives only: the
compiler itself has no double backward.)
"""

from typing import Any

import torch
from torch import Tensor

from exptilt.tilting.problem import Needs, Options
from exptilt.tilting.rules import Attend, Gradient


class _Kept:
    """What a rule's setup_context expects of its ctx, kept on an operator's ctx."""

    def __init__(self, ctx: Any):
        self.ctx = ctx

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.ctx.save_for_backward(*tensors)

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Operators have no forward derivative."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Integers get no gradient anyway."""

    def set_materialize_grads(self, value: bool) -> None:
        self.ctx.set_materialize_grads(value)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name == "ctx" else self.ctx, name, value)


@torch.library.custom_op("exptilt::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, sink: Tensor | None, mask: Tensor | None,
    scale: float, causal: bool, window: int | None, softcap: float | None, backend: str, check: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``rules.Attend`` as an operator."""
    options = Options(scale, causal, window, softcap)
    return Attend.forward(query, key, value, bias, log_weight, sink, mask, options, backend, check)  # type: ignore[return-value]


@attend.register_fake
def _(query, key, value, bias, log_weight, sink, mask, scale, causal, window, softcap, backend, check):  # type: ignore[no-untyped-def]
    rows = query.shape[:3]
    best = query.new_empty(rows, dtype=torch.int64)
    return query.new_empty((*rows, value.shape[3])), *(query.new_empty(rows) for _ in range(5)), best


def _attend_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, scale, causal, window, softcap, backend, check = inputs
    Attend.setup_context(_Kept(ctx), (*tensors, Options(scale, causal, window, softcap), backend, check), output)


def _attend_backward(ctx: Any, *bars: Tensor | None) -> Any:
    return (*Attend.backward(ctx, *bars)[:7], *(None,) * 6)


attend.register_autograd(_attend_backward, setup_context=_attend_context)

_ONLY_MASS = Needs(query=False, key=False, value=False, log_weight=True, bias=False)


def sum_of_G(
    query: Tensor, key: Tensor, bias: Tensor | None, log_weight: Tensor | None, sink: Tensor | None, mask: Tensor | None,
    G: Tensor, mean: Tensor, variance: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """Inputs, cotangents and statistics of ``rules.Gradient`` for derivatives of Σ_i G_i."""
    nothing = query[..., :0].detach()
    bar = (nothing, torch.ones_like(G), torch.zeros_like(G), torch.zeros_like(G))
    return query, key, key[..., :0], bias, log_weight, sink, mask, *bar, nothing, G, mean, variance


def hessian_product(inputs: Any, vector: Tensor, options: Options, backend: str, check: bool) -> Tensor:
    """(N, Hq, Q, D): the derivative along vector of ∇(Σ_i G_i) by the query, a second derivative of G."""
    _, G, _, mean, variance, _, _ = (x.detach() for x in Attend.apply(*inputs, options, backend, check))
    query, key, _, bias, log_weight, sink, mask = inputs
    arguments = sum_of_G(query, key, bias, log_weight, sink, mask, G, mean, variance)
    product = Gradient.pull(arguments, (vector, None, None, None, None, None), options, backend, (True, False, False, False, False, False))[
        0
    ]
    assert product is not None
    return product


def key_mass_rule(
    query: Tensor, key: Tensor, bias: Tensor | None, log_weight: Tensor, sink: Tensor | None, mask: Tensor | None,
    G: Tensor, mean: Tensor, variance: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str,
) -> Tensor:  # fmt: skip
    """(N, Hq, K): the key mass outside compiled graphs, with all of its derivatives; log_weight (N, Hq, K)."""
    arguments = sum_of_G(query, key, bias, log_weight, sink, mask, G, mean, variance)
    return Gradient.apply(*arguments, Options(scale, causal, window, softcap), backend, _ONLY_MASS)[4]  # type: ignore[no-any-return]


@torch.library.custom_op("exptilt::key_mass", mutates_args=())
def key_mass(
    query: Tensor, key: Tensor, bias: Tensor | None, log_weight: Tensor, sink: Tensor | None, mask: Tensor | None,
    G: Tensor, mean: Tensor, variance: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str,
) -> Tensor:  # fmt: skip
    """``key_mass_rule`` as an operator."""
    arguments = sum_of_G(query, key, bias, log_weight, sink, mask, G, mean, variance)
    return Gradient.forward(*arguments, Options(scale, causal, window, softcap), backend, _ONLY_MASS)[4]


@key_mass.register_fake
def _(query, key, bias, log_weight, sink, mask, G, mean, variance, scale, causal, window, softcap, backend):  # type: ignore[no-untyped-def]
    return query.new_empty(log_weight.shape)


def _mass_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.numbers = inputs[9:]
    ctx.set_materialize_grads(False)


def _mass_backward(ctx: Any, bar: Tensor | None) -> Any:
    if bar is None:
        return (None,) * 14
    *numbers, backend = ctx.numbers
    arguments = sum_of_G(*ctx.saved_tensors)
    wanted = ctx.needs_input_grad
    query, key, _, bias, log_weight, sink = Gradient.pull(
        arguments,
        (None, None, None, None, bar, None),
        Options(*numbers),
        backend,
        (wanted[0], wanted[1], False, wanted[2], wanted[3], wanted[4]),
    )
    return (query, key, bias, log_weight, sink, *(None,) * 9)


key_mass.register_autograd(_mass_backward, setup_context=_mass_context)
