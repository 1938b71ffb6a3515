"""Terms: numbers that depend on a state, as lists of operations, and their derivatives.

A function of a state that is called with terms in place of numbers leaves a list of them, such as sin(v3) or
v1 · v2: its tape. Derivatives follow by the chain rule, term by term, and are terms of the same tape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..._support.errors import ArgumentError

# Numpy's names of operations, by torch's names (which are used here), where they differ.
NUMPYS = {"sub": "subtract", "mul": "multiply", "div": "divide", "pow": "power", "neg": "negative"}
NUMPYS |= {"abs": "absolute", "asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2"}
NUMPYS |= {"gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "eq": "equal"}
NUMPYS |= {"ne": "not_equal", "clamp": "clip", "logical_not": "invert"}
ELEMENTARY = (
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "expm1", "log", "log1p"),
    *("sqrt", "abs", "sign"),
)
PAIRED = ("add", "sub", "mul", "div", "pow", "atan2", "hypot", "maximum", "minimum")
COMPARED = ("gt", "ge", "lt", "le", "eq", "ne")
PLAIN = {name: getattr(np, NUMPYS.get(name, name)) for name in (*ELEMENTARY, *PAIRED, *COMPARED, "where")}


class Term:
    """A number that depends on the state: an operation and its arguments, terms or numbers."""

    __slots__ = ("args", "number", "op", "tape")

    def __init__(self, tape: "Tape", op: str, args: tuple[Any, ...]) -> None:
        self.tape, self.op, self.args, self.number = tape, op, args, len(tape.terms)
        tape.terms.append(self)

    def __neg__(self) -> Any:
        return self.tape.make("mul", -1.0, self)

    def __abs__(self) -> Any:
        return self.tape.make("abs", self)

    def __bool__(self) -> bool:
        raise ArgumentError(
            "it asks for the value of a state, as Python's if does. Use torch.where or np.where."
        )

    def __float__(self) -> float:
        raise ArgumentError(
            "it makes a plain number of a state, as math.sin(x) and np.zeros(2)[0] = x do. Use numpy's "
            "functions, np.stack and np.zeros_like."
        )


def _method(op: str, turned: bool = False) -> Callable[..., Any]:
    """A method of `Term` by which numpy applies an operation to the entries of an array."""

    def apply(self: Term, *other: Any) -> Any:
        if other and not isinstance(other[0], (Term, int, float, np.number)):
            return NotImplemented
        return self.tape.make(op, *((*other, self) if turned else (self, *other)))

    return apply


for _name, _op in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}.items():
    setattr(Term, f"__{_name}__", _method(_op))
    setattr(Term, f"__r{_name}__", _method(_op, True))
for _op in (*ELEMENTARY, "atan2", "hypot"):
    setattr(Term, NUMPYS.get(_op, _op), _method(_op))


class Tape:
    """The terms of one function, each once, in an order in which they can be computed."""

    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.known: dict[Any, Term] = {}

    def make(self, op: str, *args: Any) -> Any:
        """The term, or the number where nothing depends on the state."""
        if not any(isinstance(arg, Term) for arg in args):
            with np.errstate(all="ignore"):
                return float(PLAIN[op](*(float(arg) for arg in args)))
        a, b = (*args, None)[:2]
        if op == "mul" and (_is(a, 0) or _is(b, 0)):
            return 0.0
        if (op == "mul" and _is(a, 1)) or (op == "add" and _is(a, 0)):
            return b
        if (op in ("mul", "div", "pow") and _is(b, 1)) or (op in ("add", "sub") and _is(b, 0)):
            return a
        if op == "div" and _is(a, 0):
            return 0.0
        if op == "pow" and _is(b, 2):
            return self.make("mul", a, a)
        if op == "where" and not isinstance(a, Term):
            return args[1] if a else args[2]
        if op == "where" and not any(isinstance(arg, Term) for arg in args[1:]) and args[1] == args[2]:
            return args[1]
        key = (op, *(arg.number if isinstance(arg, Term) else ("number", float(arg)) for arg in args))
        if key not in self.known:
            self.known[key] = Term(self, op, args)
        return self.known[key]

    def slopes(self, outputs: Sequence[Any], n: int) -> list[Any]:
        """The Jacobian of the outputs in the n components of the state, row by row."""
        columns, count = [], len(self.terms)
        for i in range(n):
            d: list[Any] = []
            for term in self.terms[:count]:
                d.append(self._slope(term, i, d))
            columns.append([d[out.number] if isinstance(out, Term) else 0.0 for out in outputs])
        return [columns[i][k] for k in range(len(outputs)) for i in range(n)]

    def _slope(self, term: Term, i: int, d: list[Any]) -> Any:
        """The derivative of a term in component i, given those of the terms before it."""
        if term.op in ("x", "u"):
            return 1.0 if (term.op, term.args[0]) == ("x", i) else 0.0
        make, op = self.make, term.op

        def times(p: Any, q: Any) -> Any:
            return make("mul", p, q)

        a, b, c = (*term.args, None, None)[:3]
        da, db, dc = (d[arg.number] if isinstance(arg, Term) else 0.0 for arg in (a, b, c))
        if op in COMPARED or op == "sign" or (_is(da, 0) and _is(db, 0) and _is(dc, 0)):
            return 0.0
        if op in ("add", "sub"):
            return make(op, da, db)
        if op == "mul":
            return make("add", times(da, b), times(a, db))
        if op == "div":
            return make("div", make("sub", da, times(term, db)), b)
        if op in ("maximum", "minimum"):
            return make("where", make("ge" if op == "maximum" else "le", a, b), da, db)
        if op == "where":
            return make("where", a, db, dc)
        if op == "atan2":
            top = make("sub", times(b, da), times(a, db))
            return make("div", top, make("add", times(a, a), times(b, b)))
        if op == "hypot":
            return make("div", make("add", times(a, da), times(b, db)), term)
        if op == "pow":
            first = 0.0 if _is(da, 0) else times(times(b, make("pow", a, make("sub", b, 1.0))), da)
            return first if _is(db, 0) else make("add", first, times(times(term, make("log", a)), db))
        one = 1.0
        square = times(a, a)
        inner: dict[str, Callable[[], Any]] = {
            "sin": lambda: make("cos", a),
            "cos": lambda: times(-one, make("sin", a)),
            "tan": lambda: make("add", one, times(term, term)),
            "asin": lambda: make("div", one, make("sqrt", make("sub", one, square))),
            "acos": lambda: make("div", -one, make("sqrt", make("sub", one, square))),
            "atan": lambda: make("div", one, make("add", one, square)),
            "sinh": lambda: make("cosh", a),
            "cosh": lambda: make("sinh", a),
            "tanh": lambda: make("sub", one, times(term, term)),
            "exp": lambda: term,
            "expm1": lambda: make("add", term, one),
            "log": lambda: make("div", one, a),
            "log1p": lambda: make("div", one, make("add", one, a)),
            "sqrt": lambda: make("div", 0.5, term),
            "abs": lambda: make("sign", a),
        }
        return times(inner[op](), da)


def _is(value: Any, number: float) -> bool:
    return not isinstance(value, Term) and value is not None and value == number
