"""Third and higher orders: the tiled sweeps, plain torch, are differentiated by torch itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import push
from exptilt.tilting.backends import tiled
from exptilt.tilting.derivatives import identities
from exptilt.tilting.derivatives.identities import Cotangents, Statistics, Tangents
from exptilt.tilting.derivatives.rows import of_some
from exptilt.tilting.problem import Inputs, InputTangents, Needs, RowStatistics
from exptilt.tilting.score_rule import ScoreRule

_DIFFERENTIABLE = 6  # of the inputs: all but mask and packing


def _statistics(t: Inputs, rule: ScoreRule) -> Statistics:
    output, stacked, _ = tiled.forward(t, rule)
    lines = RowStatistics(*stacked.unbind())
    shift = identities.shift_of(lines)
    if t.sink is not None:
        output, lines, shift = identities.join_sink(output, lines, t.sink)
    # The shift may be any number: it cancels. So it carries no derivative, and weight and gap carry those of
    # a fixed shift.
    fixed = shift.detach()
    return Statistics(output, fixed, lines.weight, lines.gap, lines.variance)


def _tangent(t: Inputs, dots: InputTangents, rule: ScoreRule) -> Tangents:
    stats = _statistics(t, rule)
    # with the output, the sums are about Σ p ṡ; about the keys' mean, a dominant sink would cancel them
    pushed, sums = tiled.tangent(t, dots, identities.tangent_rows(stats), rule, stats.output)
    return identities.finish_tangent(pushed, sums, stats, t.sink, dots.sink)


def _second(
    t: Inputs, bar: Cotangents, dots: InputTangents, rule: ScoreRule, needs: Needs
) -> tuple[Tensor, ...]:
    stats = _statistics(t, rule)
    dot = _tangent(t, dots, rule)
    rows = identities.second_rows(stats, bar, dot)
    found = tiled.gradient(t, bar.output, stats.output, rows, rule, needs, dots, dot.output)
    made = identities.spread(found, t, torch.zeros_like(bar.log_normalizer))
    if t.sink is not None:
        sink = identities.second_sink(stats, bar, dot, t.sink, dots.sink, found.row_sum)
        made = made._replace(sink=sink)
    return tuple(bar.log_normalizer.new_zeros(()) if x is None else x for x in made)


def _push(
    function: Callable[..., tuple[Tensor, ...]], arguments: list[Any], dots: list[Any]
) -> tuple[Tensor, ...]:
    moving = [i for i, x in enumerate(arguments) if x is not None and dots[i] is not None]
    return push(
        of_some(function, arguments, moving),
        tuple(arguments[i] for i in moving),
        tuple(dots[i] for i in moving),
    )


def _masked(inputs: Any, a: dict[str, Any]) -> Inputs:
    """The differentiable inputs with mask and packing of the given ones."""
    return Inputs(*inputs, *a["inputs"][_DIFFERENTIABLE:])


def push_tangent(a: dict[str, Any], moving: dict[str, Any], rule: ScoreRule) -> tuple[Tensor, ...]:
    """The forward derivative of `rules.Tangent`."""
    n = _DIFFERENTIABLE

    def function(*x: Any) -> tuple[Tensor, ...]:
        return tuple(_tangent(_masked(x[:n], a), InputTangents(*x[n:]), rule))

    return _push(function, [*a["inputs"][:n], *a["dots"]], [*moving["inputs"][:n], *moving["dots"]])


def _second_of(a: dict[str, Any], rule: ScoreRule, needs: Needs) -> Callable[..., tuple[Tensor, ...]]:
    n, m = _DIFFERENTIABLE, _DIFFERENTIABLE + len(Cotangents._fields)

    def function(*x: Any) -> tuple[Tensor, ...]:
        return _second(_masked(x[:n], a), Cotangents(*x[n:m]), InputTangents(*x[m:]), rule, needs)

    return function


def push_second(
    a: dict[str, Any], moving: dict[str, Any], rule: ScoreRule, needs: Needs
) -> tuple[Tensor, ...]:
    """The forward derivative of `rules.Second`."""
    n = _DIFFERENTIABLE
    arguments = [*a["inputs"][:n], *a["bar"], *a["dots"]]
    return _push(
        _second_of(a, rule, needs), arguments, [*moving["inputs"][:n], *moving["bar"], *moving["dots"]]
    )


def pull_second(a: dict[str, Any], bars: Any, rule: ScoreRule, needs: Needs) -> dict[str, Any]:
    """The backward derivative of `rules.Second`, by the groups of its arguments."""
    n, m = _DIFFERENTIABLE, _DIFFERENTIABLE + len(Cotangents._fields)
    arguments = [*a["inputs"][:n], *a["bar"], *a["dots"]]
    present = [i for i, x in enumerate(arguments) if x is not None]
    function = of_some(_second_of(a, rule, needs), arguments, present)
    # torch annotates vjp with the triple of has_aux=True as well
    outputs, pull = torch.func.vjp(function, *(arguments[i] for i in present))  # type: ignore[misc]
    found = pull(
        tuple(torch.zeros_like(like) if bar is None else bar for bar, like in zip(bars, outputs, strict=True))
    )
    result: list[Tensor | None] = [None] * len(arguments)
    for i, g in zip(present, found, strict=True):
        result[i] = g
    return {"inputs": result[:n], "bar": result[n:m], "dots": result[m:]}
