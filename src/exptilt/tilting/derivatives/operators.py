"""The four sweeps as torch operators, so that compiled graphs can hold them; each call goes to a backend.

    forward    output, lines, where the maximum is
    tangent    sums of the forward derivative
    gradient   a cotangent carried back
    second     the gradient of a forward derivative

Each takes canonical tensors (``problem.py``) as `Inputs`, then arguments of its own, then the score rule and
the backend's name. Ordinary tensors go to the backend at once; an operator gets every member one by one, as
in `SCHEMAS`. The operators have no derivatives; those are in ``rules.py``.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import is_plain
from exptilt.tilting.backends import dispatch
from exptilt.tilting.problem import (
    Gradients,
    Inputs,
    InputTangents,
    Needs,
    RowStatistics,
    has_full_bias,
    wide_dtype,
)
from exptilt.tilting.score_rule import ScoreRule

# The compiler keeps graphs on disk, and finds them by the names of operators: change the namespace whenever
# the schema of an operator changes.
NAMESPACE = "exptilt_3"
OPTIONS = "Tensor? bias, Tensor? log_weight, Tensor? sink, Tensor? mask"
NUMBERS = "float scale, bool causal, int? window, float? softcap, str backend"
_INPUTS = f"Tensor query, Tensor key, Tensor value, {OPTIONS}"
_DOTS = ", ".join(f"Tensor? {name}_dot" for name in InputTangents._fields)
_SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = {
    "forward": f"({_INPUTS}, {NUMBERS}, bool check) -> (Tensor, Tensor, Tensor)",
    "tangent": f"({_INPUTS}, {_DOTS}, Tensor output, Tensor rows, {NUMBERS}) -> (Tensor, Tensor)",
    "gradient": f"({_INPUTS}, Tensor cotangent, Tensor output, Tensor rows, {NUMBERS}, "
    f"bool[] needs) -> {_SIX}",
    "second": f"({_INPUTS}, {_DOTS}, Tensor cotangent, Tensor output, Tensor output_dot, Tensor rows, "
    f"{NUMBERS}, bool[] needs) -> {_SIX}",
}
_INPUT_COUNT, _DOT_COUNT, _RULE_COUNT = (
    len(Inputs._fields),
    len(InputTangents._fields),
    len(fields(ScoreRule)),
)


def _one_by_one(given: Iterable[Any]) -> list[Any]:
    """The members of groups of tensors, of the rule and of the needs, in the order of `SCHEMAS`."""
    flat: list[Any] = []
    for x in given:
        if isinstance(x, tuple):
            flat += x
        elif isinstance(x, ScoreRule):
            flat += x.numbers
        else:
            flat.append(x.flags() if isinstance(x, Needs) else x)
    return flat


def _grouped(name: str, flat: tuple[Any, ...]) -> list[Any]:
    """The arguments of a sweep from those of its operator."""
    groups: list[Any] = [Inputs(*flat[:_INPUT_COUNT])]
    rest = list(flat[_INPUT_COUNT:])
    if name in ("tangent", "second"):
        groups, rest = [*groups, InputTangents(*rest[:_DOT_COUNT])], rest[_DOT_COUNT:]
    if name in ("gradient", "second"):
        rest[-1] = Needs(*rest[-1])
    first = len(rest) - _RULE_COUNT - (1 if name == "tangent" else 2)
    rule = ScoreRule(*rest[first : first + _RULE_COUNT])
    return [*groups, *rest[:first], rule, *rest[first + _RULE_COUNT :]]


def _without_sink(t: Inputs) -> Inputs:
    """The inputs without the sink, whose share ``identities.py`` adds."""
    return t if t.sink is None else t._replace(sink=None)


def _forward(t: Inputs, rule: ScoreRule, backend: str, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Output (..., Hq, Q, Dv), the members of `RowStatistics` stacked, where the maximum is (..., Hq, Q)."""
    return dispatch.forward(_without_sink(t), rule, backend, check)


def _fake_forward(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    output = query.new_empty((*rows, value.shape[-1]), dtype=wide)
    lines = query.new_empty((len(RowStatistics._fields), *rows), dtype=wide)
    return output, lines, query.new_empty(rows, dtype=torch.int64)


def _tangent(
    t: Inputs, dots: InputTangents, output: Tensor, rows: Tensor, rule: ScoreRule, backend: str
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) (..., Hq, Q, Dv) and the four sums, stacked."""
    more = {"output": output} if dispatch.registered(backend) is None else {}  # of no use to sharded keys
    pushed, sums = dispatch.sweep(backend, "tangent")(_without_sink(t), dots, rows, rule, **more)
    return pushed, sums


def _fake_tangent(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    return query.new_empty((*rows, value.shape[-1]), dtype=wide), query.new_empty((4, *rows), dtype=wide)


def _asked(found: Gradients, t: Inputs, needs: Needs) -> tuple[Tensor, ...]:
    """The gradients, of shape (0,) where not asked for."""
    wanted = [*needs.flags()[:5], needs.bias and has_full_bias(t)]
    none = found.row_sum.new_empty(0)
    return tuple(x if w else none.clone() for x, w in zip(found, wanted, strict=True))


def _fake_gradients(*given: Any) -> tuple[Tensor, ...]:
    t, n = Inputs(*given[:_INPUT_COUNT]), Needs(*given[-1])
    q, lead = t.query, t.query.shape[:-3]
    shapes = (
        q.shape if n.query else (0,),
        (*lead, *t.key.shape[-3:]) if n.key else (0,),
        (*lead, *t.value.shape[-3:]) if n.value else (0,),
        (*q.shape[:-2], t.key.shape[-2]) if n.columns else (0,),
        q.shape[:-1] if n.rows else (0,),
        t.bias.shape if t.bias is not None and n.bias and has_full_bias(t) else (0,),
    )
    return tuple(q.new_empty(shape, dtype=wide_dtype(q.dtype)) for shape in shapes)


def _gradient(t: Inputs, *given: Any) -> tuple[Tensor, ...]:
    """The members of `Gradients`, of shape (0,) where not needed."""
    *own, rule, backend, needs = given
    return _asked(dispatch.sweep(backend, "gradient")(_without_sink(t), *own, rule, needs), t, needs)


def _second(t: Inputs, dots: InputTangents, *given: Any) -> tuple[Tensor, ...]:
    """The members of `Gradients`, of shape (0,) where not needed."""
    cotangent, output, output_dot, rows, rule, backend, needs = given
    given = _without_sink(t), cotangent, output, output_dot, dots, rows, rule, needs
    return _asked(dispatch.sweep(backend, "second")(*given), t, needs)


def all_plain(given: Iterable[Any]) -> bool:
    """Whether all tensors are ordinary ones."""
    for x in given:
        kind = x.__class__
        if kind is Inputs or kind is InputTangents:
            if not all_plain(x):
                return False
        elif isinstance(x, Tensor) and not is_plain(x):
            return False
    return True


def _operator(name: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `plain` if all tensors are ordinary, else `plain` as a torch operator."""

    def flat(*given: Any) -> Any:
        return plain(*_grouped(name, given))

    operator = torch.library.custom_op(f"{NAMESPACE}::{name}", flat, mutates_args=(), schema=SCHEMAS[name])
    operator.register_fake(fake)

    def call(*given: Any) -> Any:
        return plain(*given) if all_plain(given) else operator(*_one_by_one(given))

    return call


forward = _operator("forward", _forward, _fake_forward)
tangent = _operator("tangent", _tangent, _fake_tangent)
gradient = _operator("gradient", _gradient, _fake_gradients)
second = _operator("second", _second, _fake_gradients)
