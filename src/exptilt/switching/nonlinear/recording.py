"""Records the operations of a user's function, written in torch or in numpy, as terms.

A torch function is called with numbers, and each of its torch operations is repeated on terms. A numpy
function is called with an array of terms. Numbers that do not depend on the state stay numbers.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.transforms import observed
from .terms import NUMPYS, PLAIN, Tape, Term

Function = Callable[..., Any]
TORCHS = {theirs: ours for ours, theirs in NUMPYS.items()}
TORCHS |= {"float_power": "pow", "fabs": "abs", "positive": "clone", "conjugate": "clone"}


def called(function: Function) -> str:
    """The name of a user's function in brackets; nothing for a lambda."""
    name = getattr(function, "__name__", "<lambda>")
    return "" if name == "<lambda>" else f" ({name})"


def reason(error: Exception) -> str:
    """The text of an error in a user's function, with its type unless it is an `ArgumentError`."""
    return str(error) if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"


def arithmetic(op: str, tape: Tape, args: Sequence[Any], options: dict[str, Any], said: str) -> Any:
    """An operation, by torch's name, on arrays of terms and numbers; `said` is its name in messages."""

    def each(name: str, *arrays: Any) -> Any:
        return np.frompyfunc(lambda *v: tape.make(name, *v), len(arrays), 1)(*arrays)

    def total(v: Any, dims: Any = None) -> Any:
        axes = tuple(range(v.ndim)) if dims is None or dims == [] else tuple(np.atleast_1d(dims).tolist())
        moved = np.moveaxis(v, axes, range(len(axes))).reshape(-1, *np.delete(v.shape, axes).astype(int))
        out = moved[0] if len(moved) else 0.0
        for part in moved[1:]:
            out = each("add", out, part)
        return out

    def product(p: Any, q: Any) -> Any:
        return total(each("mul", p[..., :, :, None], q[..., None, :, :]), -2)

    a, *rest = args
    b = rest[0] if rest else None
    if options.get("rounding_mode"):
        op = said = f"{said} with rounding_mode"
    if op in PLAIN:
        if options.get("alpha", 1) != 1:
            b = each("mul", b, float(options["alpha"]))
        return each(op, a, *([b, *rest[1:]] if rest else []))
    low, high = (*rest, None, None)[:2] if rest else (options.get("min"), options.get("max"))
    table: dict[str, Callable[[], Any]] = {
        "clone": lambda: a,
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
        "logical_and": lambda: each("mul", each("ne", a, 0.0), each("ne", b, 0.0)),
        "logical_or": lambda: each("maximum", each("ne", a, 0.0), each("ne", b, 0.0)),
        "logical_not": lambda: each("eq", a, 0.0),
    }
    op = op.replace("bitwise", "logical")
    if op == "clamp":
        a = a if low is None else each("maximum", a, low)
        return a if high is None else each("minimum", a, high)
    if op not in table or (op == "linalg_vector_norm" and b not in (None, 2)):
        raise ArgumentError(
            f"it uses {said}, which is not compiled. Use arithmetic, sums, products of matrices, "
            f"{'np' if said.startswith('numpy') else 'torch'}.where and elementary functions."
        )
    return table[op]()


class Symbols(np.ndarray):
    """An array of terms and numbers, to which functions of numpy can be applied."""

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = None, **options: Any) -> Any:
        """Record a numpy operation on each entry."""
        arrays = [np.asarray(arg, dtype=object) for arg in args[: ufunc.nin]]
        tape, name = _tape(arrays), ufunc.__name__
        if (method, name) in (("reduce", "add"), ("reduce", "multiply")) or name == "matmul":
            found = getattr(ufunc, method)(*arrays, **options)  # numpy adds and multiplies terms itself
        elif method == "reduce" and name in ("maximum", "minimum"):
            found = np.frompyfunc(lambda *v: tape.make(name, *v), 2, 1).reduce(*arrays, **options)
        else:
            plain = method == "__call__"
            said = f"numpy's {name}{'' if plain else '.' + method}"
            found = arithmetic(TORCHS.get(name, name) if plain else said, tape, arrays, {}, said)
        if out is None:
            return _symbols(found)
        np.asarray(out[0])[...] = found
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        """Result of a numpy function that does no arithmetic, such as stacking or reshaping."""
        if function is np.where and len(args) == 3:
            arrays = [np.asarray(arg, dtype=object) for arg in args]
            return _symbols(arithmetic("where", _tape(arrays), arrays, {}, ""))
        if function is np.linalg.norm and len(args) == 1 and options.get("ord") in (None, 2):
            return np.sqrt((self * self).sum(options.get("axis"), keepdims=options.get("keepdims", False)))
        return _symbols(super().__array_function__(function, types, args, options))

    def __getitem__(self, place: Any) -> Any:
        """Entries as an array; a single one as an array without axes."""
        return _symbols(super().__getitem__(place))

    def __iter__(self) -> Any:
        return (self[k] for k in range(len(self)))


def _tape(arrays: Sequence[Any]) -> Tape:
    """The tape of the terms in some arrays; a new one if there are none."""
    terms = (one for array in arrays if isinstance(array, np.ndarray) for one in array.flat)
    return next((one.tape for one in terms if isinstance(one, Term)), Tape())


def _symbols(found: Any) -> Any:
    """Terms as `Symbols`; anything else unchanged."""
    if isinstance(found, Term) or (isinstance(found, np.ndarray) and found.dtype == object):
        return np.asarray(found, dtype=object).view(Symbols)
    return found


MOVES = (
    *("select", "slice", "stack", "cat", "unbind", "split", "split_with_sizes", "view", "_unsafe_view"),
    *("reshape", "unsqueeze", "squeeze", "unsqueeze_", "squeeze_", "expand", "permute", "transpose", "t"),
    *("flip", "roll", "clone", "detach", "alias", "copy_", "repeat", "diagonal", "lift_fresh"),
    *("lift_fresh_copy", "contiguous", "_to_copy"),
)
PICKS = ("index", "index_select", "gather")  # their further arguments are indices


class _InTorch:
    """A function's operations in torch, repeated on symbols.

    Each tensor has a twin that holds the index in `values` of each entry. An operation that only moves
    entries is done on twins as on tensors, so views work too.
    """

    def __init__(self, function: Function, terms: Sequence[list[Term]]) -> None:
        self.values, self.twins = list[Any](), dict[int, torch.Tensor]()
        self.kept: list[torch.Tensor] = []
        given = [torch.full((len(one),), 0.7, dtype=torch.float64) for one in terms]
        for tensor, values in zip(given, terms, strict=True):
            self._put(tensor, values)
        result = call(lambda *args: observed(function, args, self._note), given)
        self.outputs: list[Any] = self._array(result).tolist()

    def _put(self, tensor: torch.Tensor, values: Sequence[Any]) -> None:
        first = len(self.values)
        self.values += values
        self._pair(tensor, torch.arange(first, len(self.values)).reshape(tensor.shape))

    def _pair(self, tensor: torch.Tensor, twin: torch.Tensor) -> None:
        self.twins[id(tensor)] = twin
        self.kept.append(tensor)  # its id is not used again

    def _twin(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [self._twin(one) for one in arg]
        if not isinstance(arg, torch.Tensor):
            return arg
        if id(arg) not in self.twins:
            self._put(arg, arg.detach().double().reshape(-1).tolist())
        return self.twins[id(arg)]

    def _array(self, arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        out = np.empty(arg.numel(), dtype=object)
        out[:] = [self.values[k] for k in self._twin(arg).reshape(-1).tolist()]
        return out.reshape(tuple(arg.shape))

    def _note(self, call: Any, args: Any, options: dict[str, Any], out: Any) -> None:
        """Repeat one of torch's operations, whose result is `out`."""
        op = call.overloadpacket.__name__
        several = out if isinstance(out, (list, tuple)) else [out]
        if op in MOVES or op in PICKS:
            most = 1 if op in PICKS else len(args)
            twins = [self._twin(arg) if k < most else arg for k, arg in enumerate(args)]
            found = twins[0].clone() if op == "_to_copy" else call(*twins, **options)
            for tensor, twin in zip(several, found if several is out else [found], strict=True):
                self._pair(tensor, twin)
            return
        arrays = [self._array(arg) for arg in args]
        inside = op.removesuffix("_")
        changed = self._twin(args[0]) if inside != op else None
        tape = _tape(arrays)
        if isinstance(out, (bool, int, float)) and tape.terms:
            bool(tape.terms[0])  # raises: the function asks for the value of a state
        for tensor in several:
            if not isinstance(tensor, torch.Tensor):
                continue
            if not tape.terms or op.endswith("_like") or op.startswith("new_"):  # a tensor of constants
                values = tensor.detach().double().reshape(-1).tolist()
            else:
                made = arithmetic(inside, tape, arrays, options, f"torch's {inside}")
                array, shape = np.asarray(made, dtype=object), tuple(tensor.shape)
                full = array.reshape(shape) if array.size == tensor.numel() else np.broadcast_to(array, shape)
                values = full.reshape(-1).tolist()
            if changed is None:
                self._put(tensor, values)
            else:
                first = len(self.values)
                self.values += values
                changed.copy_(torch.arange(first, len(self.values)).reshape(changed.shape))


def _in_numpy(function: Function, terms: Sequence[list[Term]]) -> list[Any]:
    """Terms that a function written in numpy returns for symbols."""
    given = [_symbols(np.array(one, dtype=object)) for one in terms]
    found = np.asarray(call(function, given), dtype=object).reshape(-1).tolist()
    return [one.item() if isinstance(one, np.ndarray) else one for one in found]  # np.array([x[..., 0]])


class Style(NamedTuple):
    """A library in which functions may be written: torch or numpy."""

    make: Callable[[np.ndarray], Any]  # makes an argument from an array
    kind: Any  # the type of what it returns
    noun: str
    trace: Callable[[Function, Sequence[list[Term]]], list[Any]]  # runs the function on terms


STYLES = (
    Style(torch.from_numpy, torch.Tensor, "a tensor", lambda *given: _InTorch(*given).outputs),
    Style(np.array, np.ndarray, "an array", _in_numpy),
)


class OtherStyleError(ArgumentError):
    """Raised if a function returns a numpy array for tensors, so that it must be written in numpy."""


def call(function: Function, given: Sequence[Any]) -> Any:
    """The function's result, with warnings (such as numpy's about tensors) suppressed: it is only a trial."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*given)


def attempt(function: Function, name: str, style: Style, mean: np.ndarray, size: int, inputs: int) -> None:
    """Refuse a function that does not map one state, and several, to `size` numbers each."""
    for points in (mean, np.stack([mean, mean])):
        given = (points, np.zeros((*points.shape[:-1], inputs)))
        try:
            image = call(function, [style.make(value) for value in given[: 2 if inputs else 1]])
        except Exception as error:
            raise ArgumentError(
                f"{name} fails for states of shape {points.shape} ({reason(error)}). The last axis is the "
                "state: use x[..., k], and torch functions, or numpy's."
            ) from error
        wanted = (*points.shape[:-1], size)
        got = tuple(image.shape) if isinstance(image, style.kind) else type(image).__name__
        if got != wanted:
            refusal = OtherStyleError if isinstance(image, np.ndarray) else ArgumentError
            said = f"{name} gives {got} for states of shape {points.shape}."
            raise refusal(f"{said} Return {style.noun} of shape {wanted}.")
