"""The four sweeps as torch operators, so that compiled graphs can hold them; each call goes to a backend.

    exptilt::forward    output, lines, where the maximum is
    exptilt::tangent    sums of the forward derivative
    exptilt::gradient   a cotangent carried back
    exptilt::second     the gradient of a forward derivative

They know no derivatives themselves (``rules.py`` does) and take canonical tensors (``problem.py``).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, List  # noqa: UP035 (torch 2.6 reads List, not list, in an operator's signature)

import torch
from torch import Tensor

from exptilt._support.transforms import is_plain
from exptilt.tilting.backends import dispatch
from exptilt.tilting.problem import Dots, Gradients, Inputs, Lines, Needs, has_full_bias, wide_dtype
from exptilt.tilting.score_rule import ScoreRule


def _inputs(query: Tensor, key: Tensor, value: Tensor, bias: Any, log_weight: Any, mask: Any) -> Inputs:
    return Inputs(query, key, value, bias, log_weight, None, mask)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    log_weight: Tensor | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    backend: str,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (..., Hq, Q, Dv), the members of `Lines` stacked, where the maximum is (..., Hq, Q)."""
    t = _inputs(query, key, value, bias, log_weight, mask)
    return dispatch.forward(t, ScoreRule(scale, causal, window, softcap), backend, check)


def _fake_forward(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    lines = query.new_empty((len(Lines._fields), *rows), dtype=wide)
    return (
        query.new_empty((*rows, value.shape[-1]), dtype=wide),
        lines,
        query.new_empty(rows, dtype=torch.int64),
    )


def _tangent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    log_weight: Tensor | None,
    mask: Tensor | None,
    query_dot: Tensor | None,
    key_dot: Tensor | None,
    value_dot: Tensor | None,
    bias_dot: Tensor | None,
    weight_dot: Tensor | None,
    rows: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) (..., Hq, Q, Dv) and the four sums, stacked."""
    t = _inputs(query, key, value, bias, log_weight, mask)
    dots = Dots(query_dot, key_dot, value_dot, bias_dot, weight_dot)
    rule = ScoreRule(scale, causal, window, softcap)
    pushed, sums = dispatch.sweep(backend, "tangent")(t, dots, rows, rule)
    return pushed, sums


def _fake_tangent(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    return query.new_empty((*rows, value.shape[-1]), dtype=wide), query.new_empty((4, *rows), dtype=wide)


def _flat(found: Gradients, t: Inputs, needs: Needs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients with what was not asked for as tensors of shape (0,)."""
    wanted = [*needs.flags()[:5], needs.bias and has_full_bias(t)]
    none = found.row_sum.new_empty(0)
    flat: Any = tuple(x if w else none.clone() for x, w in zip(found, wanted, strict=True))
    return flat  # type: ignore[no-any-return]


def _fake_gradients(query: Any, key: Any, value: Any, bias: Any, needs: Any) -> tuple[Tensor, ...]:
    n, lead, wide = Needs(*needs), query.shape[:-3], wide_dtype(query.dtype)
    full = n.bias and bias is not None and bias.shape[-2] > 1 and bias.shape[-1] > 1
    shapes = (
        query.shape if n.query else (0,),
        (*lead, *key.shape[-3:]) if n.key else (0,),
        (*lead, *value.shape[-3:]) if n.value else (0,),
        (*query.shape[:-2], key.shape[-2]) if n.columns else (0,),
        query.shape[:-1] if n.rows else (0,),
        bias.shape if full else (0,),
    )
    return tuple(query.new_empty(shape, dtype=wide) for shape in shapes)


def _gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    log_weight: Tensor | None,
    mask: Tensor | None,
    cotangent: Tensor,
    output: Tensor,
    rows: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    backend: str,
    needs: List[bool],  # noqa: UP006
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, wanted = _inputs(query, key, value, bias, log_weight, mask), Needs(*needs)
    found = dispatch.sweep(backend, "gradient")(
        t, cotangent, output, rows, ScoreRule(scale, causal, window, softcap), wanted
    )
    return _flat(found, t, wanted)


def _fake_gradient(query: Any, key: Any, value: Any, bias: Any, *rest: Any) -> Any:
    return _fake_gradients(query, key, value, bias, rest[-1])


def _second(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    log_weight: Tensor | None,
    mask: Tensor | None,
    cotangent: Tensor,
    output: Tensor,
    output_dot: Tensor,
    query_dot: Tensor | None,
    key_dot: Tensor | None,
    value_dot: Tensor | None,
    bias_dot: Tensor | None,
    weight_dot: Tensor | None,
    rows: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    backend: str,
    needs: List[bool],  # noqa: UP006
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, wanted = _inputs(query, key, value, bias, log_weight, mask), Needs(*needs)
    dots, rule = (
        Dots(query_dot, key_dot, value_dot, bias_dot, weight_dot),
        ScoreRule(scale, causal, window, softcap),
    )
    return _flat(
        dispatch.sweep(backend, "second")(t, cotangent, output, output_dot, dots, rows, rule, wanted),
        t,
        wanted,
    )


def _operator(name: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator where a graph is traced or tensors are old-style batches, else the plain function."""
    operator = torch.library.custom_op(f"exptilt::{name}", plain, mutates_args=())
    operator.register_fake(fake)

    @wraps(plain)
    def call(*arguments: Any) -> Any:
        return (plain if all(is_plain(x) for x in arguments if isinstance(x, Tensor)) else operator)(
            *arguments
        )

    return call


forward = _operator("forward", _forward, _fake_forward)
tangent = _operator("tangent", _tangent, _fake_tangent)
gradient = _operator("gradient", _gradient, _fake_gradient)
second = _operator("second", _second, _fake_gradient)
