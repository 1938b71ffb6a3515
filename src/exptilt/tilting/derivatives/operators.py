"""The four sweeps as torch operators, so that compiled graphs can hold them; each call goes to a backend.

    forward    output, lines, where the maximum is
    tangent    sums of the forward derivative
    gradient   a cotangent carried back
    second     the gradient of a forward derivative

Each takes canonical tensors (``problem.py``): the members of `Inputs`, then what is its own, then the numbers
of the score rule and the backend's name, all one by one, as `SCHEMAS` has them. They know no derivatives
themselves (``rules.py`` does).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import is_plain
from exptilt.tilting.backends import dispatch
from exptilt.tilting.problem import Dots, Gradients, Inputs, Lines, Needs, has_full_bias, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

# The compiler keeps graphs on disk, and finds them by the names of operators: with another schema of any
# operator comes another namespace.
NAMESPACE = "exptilt_2"
OPTIONS = "Tensor? bias, Tensor? log_weight, Tensor? sink, Tensor? mask"
NUMBERS = "float scale, bool causal, int? window, float? softcap, str backend"
_INPUTS = f"Tensor query, Tensor key, Tensor value, {OPTIONS}"
_DOTS = ", ".join(f"Tensor? {name}_dot" for name in Dots._fields)
_SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = {
    "forward": f"({_INPUTS}, {NUMBERS}, bool check) -> (Tensor, Tensor, Tensor)",
    "tangent": f"({_INPUTS}, {_DOTS}, Tensor rows, {NUMBERS}) -> (Tensor, Tensor)",
    "gradient": f"({_INPUTS}, Tensor cotangent, Tensor output, Tensor rows, {NUMBERS}, "
    f"bool[] needs) -> {_SIX}",
    "second": f"({_INPUTS}, {_DOTS}, Tensor cotangent, Tensor output, Tensor output_dot, Tensor rows, "
    f"{NUMBERS}, bool[] needs) -> {_SIX}",
}
_INPUT_COUNT, _DOT_COUNT = len(Inputs._fields), len(Dots._fields)


def _taken(given: tuple[Any, ...], dots: bool = False) -> tuple[Any, ...]:
    """The inputs, with `dots` their tangents too, and all further arguments.

    Sweeps know nothing of a sink: ``identities.py`` adds what it does.
    """
    t, rest = Inputs(*given[:_INPUT_COUNT])._replace(sink=None), given[_INPUT_COUNT:]
    return (t, Dots(*rest[:_DOT_COUNT]), *rest[_DOT_COUNT:]) if dots else (t, *rest)


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output (..., Hq, Q, Dv), the members of `Lines` stacked, where the maximum is (..., Hq, Q)."""
    t, *numbers, backend, check = _taken(given)
    return dispatch.forward(t, ScoreRule(*numbers), backend, check)


def _fake_forward(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    output = query.new_empty((*rows, value.shape[-1]), dtype=wide)
    lines = query.new_empty((len(Lines._fields), *rows), dtype=wide)
    return output, lines, query.new_empty(rows, dtype=torch.int64)


def _tangent(*given: Any) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) (..., Hq, Q, Dv) and the four sums, stacked."""
    t, dots, rows, *numbers, backend = _taken(given, dots=True)
    pushed, sums = dispatch.sweep(backend, "tangent")(t, dots, rows, ScoreRule(*numbers))
    return pushed, sums


def _fake_tangent(query: Any, key: Any, value: Any, *_: Any) -> Any:
    rows, wide = query.shape[:-1], wide_dtype(query.dtype)
    return query.new_empty((*rows, value.shape[-1]), dtype=wide), query.new_empty((4, *rows), dtype=wide)


def _flat(found: Gradients, t: Inputs, needs: Needs) -> tuple[Tensor, ...]:
    """Gradients with what was not asked for as tensors of shape (0,)."""
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


def _gradient(*given: Any) -> tuple[Tensor, ...]:
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, cotangent, output, rows, *numbers, backend, needs = _taken(given)
    rule, wanted = ScoreRule(*numbers), Needs(*needs)
    return _flat(dispatch.sweep(backend, "gradient")(t, cotangent, output, rows, rule, wanted), t, wanted)


def _second(*given: Any) -> tuple[Tensor, ...]:
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, dots, cotangent, output, output_dot, rows, *numbers, backend, needs = _taken(given, dots=True)
    rule, wanted = ScoreRule(*numbers), Needs(*needs)
    sweep = dispatch.sweep(backend, "second")
    return _flat(sweep(t, cotangent, output, output_dot, dots, rows, rule, wanted), t, wanted)


def _operator(name: str, plain: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The operator where a graph is traced or tensors are old-style batches, else the plain function."""
    operator = torch.library.custom_op(f"{NAMESPACE}::{name}", plain, mutates_args=(), schema=SCHEMAS[name])
    operator.register_fake(fake)

    def call(*arguments: Any) -> Any:
        known = all(is_plain(x) for x in arguments if isinstance(x, Tensor))
        return (plain if known else operator)(*arguments)

    return call


forward = _operator("forward", _forward, _fake_forward)
tangent = _operator("tangent", _tangent, _fake_tangent)
gradient = _operator("gradient", _gradient, _fake_gradients)
second = _operator("second", _second, _fake_gradients)
