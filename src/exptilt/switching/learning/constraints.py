"""Constraints between parameters, as text: ``"observation_noise[1] = 4 * observation_noise[0]"``.

The left side is a parameter or an entry of one; it is not learned but computed from the right side, an
expression of numbers and (entries of) parameters with + − * / and **. In a row of transition probabilities
the other entries are rescaled so that the row sums to 1.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@dataclass(frozen=True)
class Constraint:
    """One constraint: `name[where]` is computed by the expression `right`."""

    text: str
    name: str
    where: tuple[int, ...]
    right: ast.expr


def read_constraints(
    texts: str | Sequence[str], values: Mapping[str, np.ndarray]
) -> tuple[list[Constraint], dict[str, np.ndarray]]:
    """Parse constraints on the parameters `values`; returns them, and masks of the entries they compute."""
    found, masks = list[Constraint](), dict[str, np.ndarray]()
    for text in [texts] if isinstance(texts, str) else texts:
        left, equals, right = text.partition("=")
        try:
            sides = [ast.parse(side.strip(), mode="eval").body for side in (left, right)]
        except SyntaxError:
            sides = []
        if not equals or not sides:
            raise _refuse(text, "it is not of the form 'a[0] = 2 * b[1]'")
        name, where = _place(text, sides[0], values)
        target = np.zeros(values[name].shape, dtype=bool)
        target[where] = True
        tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in values.items()}
        result = torch.as_tensor(_value(text, sides[1], tensors))
        if result.ndim and result.shape != values[name][where].shape:
            raise _refuse(
                text, f"the left side has shape {values[name][where].shape}, the right {tuple(result.shape)}"
            )
        if (masks.get(name, np.zeros_like(target)) & target).any():
            raise _refuse(text, "another constraint has the same left side")
        for other, place in _places(text, sides[1], values):
            if other == name and target[place].any():
                raise _refuse(text, "its left side also appears on the right")
        masks[name] = masks.get(name, np.zeros_like(target)) | target
        found.append(Constraint(text, name, where, sides[1]))
    return _in_order(found, values), masks


def _in_order(constraints: list[Constraint], values: Mapping[str, np.ndarray]) -> list[Constraint]:
    """The constraints in an order in which each uses only the left sides of earlier ones; circles raise."""

    def marked(places: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
        out = dict[str, np.ndarray]()
        for name, where in places:
            out.setdefault(name, np.zeros(values[name].shape, dtype=bool))[where] = True
        return out

    def needs(one: Constraint, other: Constraint) -> bool:
        left, right = marked([(other.name, other.where)]), marked(_places(one.text, one.right, values))
        return other.name in right and bool((left[other.name] & right[other.name]).any())

    ordered, rest = list[Constraint](), list(constraints)
    while rest:
        ready = [one for one in rest if not any(needs(one, other) for other in rest)]
        if not ready:
            raise _refuse(rest[0].text, f"{[c.text for c in rest]} depend on each other in a circle")
        ordered += ready
        rest = [one for one in rest if one not in ready]
    return ordered


def apply_constraints(
    constraints: Sequence[Constraint], masks: Mapping[str, np.ndarray], named: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All parameters, with the constrained entries computed from the others."""
    if not constraints:
        return named
    out = dict(named)
    for c in constraints:
        value = torch.as_tensor(_value(c.text, c.right, out), dtype=torch.float64)
        index = tuple(torch.tensor(k) for k in c.where)
        if index:
            out[c.name] = out[c.name].index_put(index, value.expand(out[c.name][c.where].shape))
        else:
            out[c.name] = value.expand(out[c.name].shape)
    if "transition" in masks:
        tied = torch.from_numpy(masks["transition"])
        P = out["transition"]
        rest, free = 1 - torch.where(tied, P, 0.0).sum(-1, keepdim=True), torch.where(tied, 0.0, P)
        total = free.sum(-1, keepdim=True)
        spare = tied.any(-1, keepdim=True)
        P = torch.where(tied | ~spare, P, free * rest / torch.where(total > 0, total, 1.0))
        if bool((P < 0).any()) or bool(((P.sum(-1) - 1).abs() > 1e-9).any()):
            raise ArgumentError(
                "fit: under the constraints some rows of transition are not probabilities. Change the "
                "constraints or the start."
            )
        out["transition"] = P
    for name in masks.keys() & {"process_noise", "observation_noise", "initial_covariance"}:
        if bool((torch.linalg.eigvalsh(out[name].detach()) < -1e-12 * out[name].detach().abs().max()).any()):
            raise ArgumentError(
                f"fit: under the constraints {name} is not a covariance. Change the constraints or the start."
            )
    return out


def _refuse(text: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"fit: the constraint {text!r} cannot be used: {why}. Pass text such as "
        "'observation_noise[1] = 4 * observation_noise[0]'."
    )


def _place(text: str, node: ast.expr, values: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The parameter and the index that `name[0, 1]` means."""
    base = node.value if isinstance(node, ast.Subscript) else node
    if not isinstance(base, ast.Name):
        raise _refuse(text, f"{ast.unparse(node)!r} is not a parameter or a part of one")
    if base.id not in values:
        raise _refuse(text, f"there is no parameter {base.id!r}, only {sorted(values)}")
    where: tuple[int, ...] = ()
    if isinstance(node, ast.Subscript):
        try:
            index = ast.literal_eval(node.slice)
            where = tuple(index) if isinstance(index, tuple) else (index,)
            values[base.id][where]
        except (ValueError, IndexError, TypeError):
            where = ("",)  # type: ignore[assignment]
    if not all(isinstance(k, int) for k in where):
        raise _refuse(
            text, f"{base.id} has shape {tuple(values[base.id].shape)}; index it with whole numbers"
        )
    return base.id, where


def _places(text: str, node: ast.AST, values: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """All parts of parameters that an expression uses."""
    if isinstance(node, (ast.Subscript, ast.Name)):
        return [_place(text, node, values)]
    return [place for child in ast.iter_child_nodes(node) for place in _places(text, child, values)]


def _value(text: str, node: ast.expr, values: Mapping[str, torch.Tensor]) -> Any:
    """The value of an expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, (ast.Subscript, ast.Name)):
        name, where = _place(text, node, values)
        return values[name][where]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(text, node.left, values), _value(text, node.right, values))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(text, node.operand, values))
    raise _refuse(text, f"{ast.unparse(node)!r} is not arithmetic of numbers and parameters")
