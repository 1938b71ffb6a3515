"""Users' functions of a state, compiled: traced once in torch, written down as arithmetic, with Jacobian.

A function from ``(..., n)`` to ``(..., k)`` is called with one state, and every operation torch is asked for
is repeated on symbols, which leaves a list of terms such as sin(v3) or v1 · v2. Their derivatives follow by
the chain rule, term by term, and both are handed to LLVM. Numbers that do not depend on the state are kept
apart from the terms, so that a model with other parameters uses the same code. What was compiled is held
against the function itself at two points: a function that does more than torch sees is refused.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from ..._support.errors import ArgumentError
from ..._support.kernels import compile_module
from ..._support.transforms import observed

Function = Callable[..., torch.Tensor]
PLAIN: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "maximum": max,
    "minimum": min,
    "abs": abs,
    "sign": lambda a: math.copysign(1.0, a) if a else 0.0,
    "where": lambda c, a, b: a if c else b,
    **{
        name: getattr(math, name)
        for name in (
            *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "expm1", "log"),
            *("log1p", "sqrt", "atan2", "hypot", "pow"),
        )
    },
}
COMPARED = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
DOUBLE, BIT = ir.DoubleType(), ir.IntType(1)


class Term:
    """A number that depends on the state: an operation and what it is applied to, terms or numbers."""

    __slots__ = ("args", "number", "op", "tape")

    def __init__(self, tape: "Tape", op: str, args: tuple[Any, ...]) -> None:
        self.tape, self.op, self.args, self.number = tape, op, args, len(tape.terms)
        tape.terms.append(self)


class Tape:
    """The terms of one function, each once, in an order in which they can be worked out."""

    def __init__(self) -> None:
        self.terms: list[Term] = []
        self.known: dict[Any, Term] = {}

    def make(self, op: str, *args: Any) -> Any:
        """The term, or the number where nothing depends on the state."""
        if not any(isinstance(arg, Term) for arg in args):
            return PLAIN[op](*args) if op in PLAIN else args[0]
        a, b = (*args, None)[:2]
        if op == "mul" and (_is(a, 0) or _is(b, 0)):
            return 0.0
        if (op == "mul" and _is(a, 1)) or (op == "add" and _is(a, 0)):
            return b
        if (op in ("mul", "div") and _is(b, 1)) or (op in ("add", "sub") and _is(b, 0)):
            return a
        if op == "div" and _is(a, 0):
            return 0.0
        if op == "pow" and _is(b, 2):
            return self.make("mul", a, a)
        if op == "where" and not isinstance(a, Term):
            return args[1] if a else args[2]
        if op == "where" and not any(isinstance(arg, Term) for arg in args[1:]) and args[1] == args[2]:
            return args[1]
        key = (op, *(arg.number if isinstance(arg, Term) else ("number", arg) for arg in args))
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

        a, b, *_ = (*term.args, None)
        da, db = (d[arg.number] if isinstance(arg, Term) else 0.0 for arg in (a, b))
        if op in ("add", "sub"):
            return make(op, da, db)
        if op == "mul":
            return make("add", times(da, b), times(a, db))
        if op == "div":
            return make("div", make("sub", da, times(term, db)), b)
        if op in ("maximum", "minimum"):
            return make("where", make("ge" if op == "maximum" else "le", a, b), da, db)
        if op == "where":
            c = term.args[2]
            dc = d[c.number] if isinstance(c, Term) else 0.0
            return make("where", a, db, dc)
        if op == "atan2":
            top = make("sub", times(b, da), times(a, db))
            return make("div", top, make("add", times(a, a), times(b, b)))
        if op == "hypot":
            return make("div", make("add", times(a, da), times(b, db)), term)
        if op == "pow":
            first = times(times(b, make("pow", a, make("sub", b, 1.0))), da)
            return make("add", first, times(times(term, make("log", a)), db))
        if op in ("gt", "ge", "lt", "le", "eq", "ne", "sign"):
            return 0.0
        if _is(da, 0):
            return 0.0
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

    def write(self, builder: Any, given: dict[str, Any], outputs: Sequence[Any], first: int) -> list[float]:
        """Code that writes the outputs; returns the numbers it reads, in constants from `first` on.

        `given` are the pointers x, u, c and out.
        """
        wanted, waiting = set(), [out for out in outputs if isinstance(out, Term)]
        while waiting:
            term = waiting.pop()
            if term.number not in wanted:
                wanted.add(term.number)
                waiting += [arg for arg in term.args if isinstance(arg, Term)]
        done, numbers = dict[int, Any](), list[float]()

        def at(name: str, place: int) -> Any:
            return builder.gep(given[name], [ir.Constant(ir.IntType(64), place)])

        def value(arg: Any, bit: bool = False) -> Any:
            if not isinstance(arg, Term):
                numbers.append(float(arg))
                return builder.load(at("c", first + len(numbers) - 1))
            found = done[arg.number]
            return builder.uitofp(found, DOUBLE) if found.type == BIT and not bit else found

        for number in sorted(wanted):
            term = self.terms[number]
            if term.op in ("x", "u"):
                done[number] = builder.load(at(term.op, term.args[0]))
            elif term.op == "where":
                condition = value(term.args[0], True)
                if condition.type != BIT:
                    condition = builder.fcmp_unordered("!=", condition, ir.Constant(DOUBLE, 0.0))
                done[number] = builder.select(condition, *(value(arg) for arg in term.args[1:]))
            else:
                done[number] = _written(builder, term.op, [value(arg) for arg in term.args])
        for k, out in enumerate(outputs):
            builder.store(value(out), at("out", k))
        return numbers


def _written(builder: Any, op: str, args: list[Any]) -> Any:
    """The instruction of a term."""
    if op in ("add", "sub", "mul", "div"):
        return getattr(builder, f"f{op}")(*args)
    if op in COMPARED:
        return (builder.fcmp_unordered if op == "ne" else builder.fcmp_ordered)(COMPARED[op], *args)
    if op in ("maximum", "minimum"):
        return builder.select(builder.fcmp_ordered(">" if op == "maximum" else "<", *args), *args)
    if op == "sign":
        zero, one = ir.Constant(DOUBLE, 0.0), ir.Constant(DOUBLE, 1.0)
        below = builder.select(builder.fcmp_ordered("<", args[0], zero), builder.fneg(one), zero)
        return builder.select(builder.fcmp_ordered(">", args[0], zero), one, below)
    name = {"abs": "fabs"}.get(op, op)
    functions = builder.module.globals
    if name not in functions:
        ir.Function(builder.module, ir.FunctionType(DOUBLE, [DOUBLE] * len(args)), name)
    return builder.call(functions[name], args)


def _is(value: Any, number: float) -> bool:
    return not isinstance(value, Term) and value == number


LIKE = (
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
)
MOVES = (
    *("select", "slice", "stack", "cat", "unbind", "split", "split_with_sizes", "view", "_unsafe_view"),
    *("reshape", "unsqueeze", "squeeze", "unsqueeze_", "squeeze_", "expand", "permute", "transpose", "t"),
    *("flip", "roll", "clone", "detach", "alias", "copy_", "repeat", "diagonal", "lift_fresh"),
    *("lift_fresh_copy", "contiguous"),
)
PICKS = ("index", "index_select", "gather")  # whose further arguments are places


class _Trace:
    """A function's operations, repeated on symbols.

    Each tensor has a twin of whole numbers that say which of `values` its entries are: an operation that only
    moves entries is done to the twins as it is to the tensors, views and all.
    """

    def __init__(self, function: Function, n: int, r: int) -> None:
        self.tape, self.values, self.twins = Tape(), list[Any](), dict[int, torch.Tensor]()
        self.kept: list[torch.Tensor] = []
        x, u = torch.full((n,), 0.7, dtype=torch.float64), torch.full((r,), 0.6, dtype=torch.float64)
        for tensor, name in ((x, "x"), (u, "u")):
            self._put(tensor, [Term(self.tape, name, (i,)) for i in range(len(tensor))])
        with torch.no_grad():
            result = observed(function, (x, u) if r else (x,), self._note)
        self.outputs = self._read(result)

    def _put(self, tensor: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
        first = len(self.values)
        self.values += values
        twin = torch.arange(first, len(self.values)).reshape(tensor.shape)
        self.twins[id(tensor)] = twin
        self.kept.append(tensor)  # its id is not used again
        return twin

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.twins:
            self._put(tensor, tensor.detach().double().reshape(-1).tolist())
        return self.twins[id(tensor)]

    def _read(self, given: Any) -> list[Any]:
        return [self.values[k] for k in self._twin(given).reshape(-1).tolist()]

    def _note(self, call: Any, args: Any, options: dict[str, Any], out: Any) -> None:
        op = call.overloadpacket.__name__
        if op in ("_local_scalar_dense", "is_nonzero", "item"):
            raise ArgumentError("it asks for the value of a state, as Python's if does. Use torch.where.")
        if op in MOVES or op in PICKS:
            most = 1 if op in PICKS else len(args)
            twins = [self._twins(arg) if k < most else arg for k, arg in enumerate(args)]
            found = call(*twins, **options)
        elif op in LIKE or not any(isinstance(arg, torch.Tensor) for arg in _flat(args)):
            self._put(out, out.detach().double().reshape(-1).tolist())
            return
        elif op == "_to_copy":
            found = self._twin(args[0]).clone()
        else:
            inside = op[:-1] if op.endswith("_") else op
            array = _arithmetic(inside, self.tape, [self._array(arg) for arg in args], options)
            flat = np.broadcast_to(np.asarray(array, dtype=object), tuple(out.shape)).reshape(-1).tolist()
            if op.endswith("_"):
                first = len(self.values)
                self.values += flat
                self._twin(args[0]).copy_(torch.arange(first, len(self.values)).reshape(out.shape))
            else:
                self._put(out, flat)
            return
        for tensor, twin in (
            zip(out, found, strict=True) if isinstance(out, (list, tuple)) else [(out, found)]
        ):
            self.twins[id(tensor)] = twin
            self.kept.append(tensor)

    def _twins(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor):
            return [self._twin(one) for one in arg]
        return self._twin(arg) if isinstance(arg, torch.Tensor) else arg

    def _array(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            out = np.empty(arg.numel(), dtype=object)
            out[:] = self._read(arg)
            return out.reshape(tuple(arg.shape))
        return arg


def _flat(args: Any) -> list[Any]:
    return [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else [arg])]


def _arithmetic(op: str, tape: Tape, args: list[Any], options: dict[str, Any]) -> Any:
    """One of torch's operations on arrays of symbols."""

    def each(name: str, *arrays: Any) -> Any:
        return np.frompyfunc(lambda *v: tape.make(name, *v), len(arrays), 1)(*arrays)

    def total(v: Any, dims: Any = None) -> Any:
        axes = tuple(range(v.ndim)) if dims is None or dims == [] else tuple(np.atleast_1d(dims).tolist())
        moved = np.moveaxis(v, axes, range(len(axes))).reshape(-1, *np.delete(v.shape, axes).astype(int))
        return sum_of(list(moved)) if len(moved) else 0.0

    def sum_of(parts: list[Any]) -> Any:
        out = parts[0]
        for part in parts[1:]:
            out = each("add", out, part)
        return out

    def product(p: Any, q: Any) -> Any:
        return total(each("mul", p[..., :, :, None], q[..., None, :, :]), -2)

    a, *rest = args
    b = rest[0] if rest else None
    if op in PLAIN:
        if options.get("alpha", 1) != 1:
            b = each("mul", b, float(options["alpha"]))
        return each(op, a, *([b, *rest[1:]] if rest else []))
    low, high = (*rest, None, None)[:2] if rest else (options.get("min"), options.get("max"))
    table: dict[str, Callable[[], Any]] = {
        "neg": lambda: each("mul", -1.0, a),
        "reciprocal": lambda: each("div", 1.0, a),
        "rsqrt": lambda: each("div", 1.0, each("sqrt", a)),
        "square": lambda: each("mul", a, a),
        "rsub": lambda: each("sub", b, a),
        "sigmoid": lambda: each("div", 1.0, each("add", 1.0, each("exp", each("mul", -1.0, a)))),
        "relu": lambda: each("maximum", a, 0.0),
        "clamp_min": lambda: each("maximum", a, b),
        "clamp_max": lambda: each("minimum", a, b),
        "sgn": lambda: each("sign", a),
        "fill": lambda: b,
        "zero": lambda: 0.0,
        "sum": lambda: total(a, b),
        "mean": lambda: each("div", s := total(a, b), a.size / np.asarray(s, dtype=object).size),
        "dot": lambda: total(each("mul", a, b)),
        "mv": lambda: total(each("mul", a, b), -1),
        "mm": lambda: product(a, b),
        "bmm": lambda: product(a, b),
        "addmm": lambda: each("add", a, product(b, rest[1])),
        "linalg_vector_norm": lambda: each("sqrt", total(each("mul", a, a), (*rest, None, None)[1])),
    }
    if op == "clamp":
        a = a if low is None else each("maximum", a, low)
        return a if high is None else each("minimum", a, high)
    if op not in table or (op == "linalg_vector_norm" and b not in (None, 2)):
        raise ArgumentError(
            f"it uses torch's {op}, which is not compiled. Use arithmetic, sums, products of matrices, "
            "torch.where and elementary functions."
        )
    return table[op]()


class Compiled:
    """Functions of a state and their Jacobians as one compiled function (which, x, u, constants, out).

    Function k is number 2k, its Jacobian number 2k + 1.
    """

    def __init__(self, functions: Sequence[Function], names: Sequence[str], n: int, r: int) -> None:
        module, pointer = ir.Module(), DOUBLE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64), *[pointer] * 4])
        made = ir.Function(module, kind, "compiled")
        given = dict(zip(("x", "u", "c", "out"), made.args[1:], strict=True))
        begin, end = made.append_basic_block(), made.append_basic_block()
        ir.IRBuilder(end).ret_void()
        choice = ir.IRBuilder(begin).switch(made.args[0], end)
        numbers: list[float] = []
        for k, (function, name) in enumerate(zip(functions, names, strict=True)):
            try:
                trace = _Trace(function, n, r)
            except ArgumentError as error:
                raise ArgumentError(f"{name} cannot be compiled: {error}") from None
            for which, outputs in enumerate((trace.outputs, trace.tape.slopes(trace.outputs, n))):
                block = made.append_basic_block()
                choice.add_case(2 * k + which, block)
                builder = ir.IRBuilder(block)
                numbers += trace.tape.write(builder, given, outputs, len(numbers))
                builder.branch(end)
        self.constants = np.array([*numbers, 0.0], dtype=np.float64)
        self.address, self.n, self.r = compile_module(str(module)), n, r
        self._check(functions, names)

    def _check(self, functions: Sequence[Function], names: Sequence[str]) -> None:
        rng = np.random.default_rng(0)
        for k, (function, name) in enumerate(zip(functions, names, strict=True)):
            for _ in range(2):
                x, u = rng.uniform(0.5, 1.5, self.n), rng.uniform(0.5, 1.5, self.r)
                given = [torch.from_numpy(x), torch.from_numpy(u)][: 2 if self.r else 1]
                with torch.no_grad():
                    want = function(*given).double().numpy()
                got = np.empty(len(want))
                call(self.address, 2 * k, x, u, self.constants, got)
                if not np.allclose(got, want, rtol=1e-6, atol=1e-9, equal_nan=True):
                    raise ArgumentError(
                        f"{name} cannot be compiled: it gives {want}, its compiled form {got}. Write it with "
                        "torch functions of its arguments alone."
                    )


def call(address: int, which: int, *arrays: np.ndarray) -> None:
    """Call a compiled function from Python."""
    double = ctypes.POINTER(ctypes.c_double)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, double, double, double, double)
    kind(address)(which, *(array.ctypes.data_as(double) for array in arrays))
