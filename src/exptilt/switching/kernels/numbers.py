"""Numbers as the kernels have them: one at a time, or the same number of four laws at once.

A work buffer `w` is either ``(size,)`` or ``(size, 4)``. In the second, each number is a vector of four
lanes, and a kernel written with the functions below works on four laws where it would have worked on one; the
type of the buffer decides when it is compiled. Four consecutive numbers are read and written as one vector
(`get4`, `put4`) in either case: 4 or 16 places of memory.
"""

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, overload, register_model

LANES = 4
FAST = {"contract"}  # multiply-adds may be fused; sums keep their order, for vectors are asked for by name
inlined = njit(forceinline=True, fastmath=FAST, error_model="numpy")
compiled: Any = intrinsic  # numba's own type counts the typing context among the arguments of a call


class Vector(types.Type):
    """So many float64 numbers that are worked on at once."""

    def __init__(self, length: int) -> None:
        self.length = length
        super().__init__(name=f"Vector({length})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        vector = ir.VectorType(ir.DoubleType(), kind.length)
        super().__init__(manager, kind, vector)  # type: ignore[no-untyped-call]


def _number(w: Any) -> Any:
    return types.float64 if w.ndim == 1 else Vector(LANES)


def _four(w: Any) -> Any:
    return Vector(4) if w.ndim == 1 else Vector(4 * LANES)


def _place(context: Any, builder: Any, kind: Any, w: Any, at: Any, value: Any) -> Any:
    """The address of number `at`, as that of what `value` is."""
    data = context.make_array(kind)(context, builder, w).data
    step = 1 if kind.ndim == 1 else LANES
    place = builder.gep(data, [builder.mul(at, ir.Constant(at.type, step))])
    return builder.bitcast(place, context.get_value_type(value).as_pointer())


def _reader(name: str, kind_of: Any) -> Any:
    def make(typing_context, w, at):  # type: ignore[no-untyped-def]
        found = kind_of(w)

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.load(_place(context, builder, w, arguments[0], arguments[1], found), align=8)

        return found(w, types.int64), generate

    make.__name__ = name
    return compiled(make)


def _writer(name: str, kind_of: Any) -> Any:
    def make(typing_context, w, at, value):  # type: ignore[no-untyped-def]
        found = kind_of(w)

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            given = _repeated(builder, arguments[2], context.get_value_type(found))
            builder.store(given, _place(context, builder, w, arguments[0], arguments[1], found), align=8)
            return context.get_dummy_value()

        return types.void(w, types.int64, value), generate

    make.__name__ = name
    return compiled(make)


def _repeated(builder: Any, value: Any, kind: Any) -> Any:
    """A number, or vector, as often as fits into a vector of this kind."""
    if value.type == kind:
        return value
    one = value
    if not isinstance(value.type, ir.VectorType):
        empty = ir.Constant(ir.VectorType(value.type, 1), ir.Undefined)
        one = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    order = [k % one.type.count for k in range(kind.count)]
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), order))


get, get4 = _reader("get", _number), _reader("get4", _four)
put, put4 = _writer("put", _number), _writer("put4", _four)


def _nought(name: str, kind_of: Any) -> Any:
    def make(typing_context, w):  # type: ignore[no-untyped-def]
        found = kind_of(w)

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return ir.Constant(context.get_value_type(found), None)

        return found(w), generate

    make.__name__ = name
    return compiled(make)


zero, zero4 = _nought("zero", _number), _nought("zero4", _four)


def _arithmetic(operation: Any, name: str) -> None:
    @compiled
    def compute(typing_context, a, b):  # type: ignore[no-untyped-def]
        kind = max((a, b), key=lambda x: getattr(x, "length", 0))

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            x, y = (_repeated(builder, value, context.get_value_type(kind)) for value in arguments)
            return getattr(builder, name)(x, y, flags=tuple(FAST))

        return kind(a, b), generate

    @overload(operation)
    def _(a, b):  # type: ignore[no-untyped-def]
        if all(isinstance(x, Vector) or x == types.float64 for x in (a, b)) and a != b:
            return lambda a, b: compute(a, b)
        if isinstance(a, Vector) and a == b:
            return lambda a, b: compute(a, b)
        return None


for _operation, _name in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _arithmetic(_operation, _name)


@compiled
def between(typing_context, x, least, other):  # type: ignore[no-untyped-def]
    """x where least < x < ∞, else `other`, number by number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        value, low, rest = arguments
        kind = value.type
        most = _repeated(builder, ir.Constant(ir.DoubleType(), float("inf")), kind)
        inside = builder.and_(builder.fcmp_ordered(">", value, low), builder.fcmp_ordered("<", value, most))
        return builder.select(inside, value, _repeated(builder, rest, kind))

    return x(x, x, types.float64), generate


@compiled
def logarithm(typing_context, x):  # type: ignore[no-untyped-def]
    """log x, number by number."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        value = arguments[0]
        call = builder.module.declare_intrinsic("llvm.log", [ir.DoubleType()])
        if not isinstance(value.type, ir.VectorType):
            return builder.call(call, [value])
        for k in range(value.type.count):
            place = ir.Constant(ir.IntType(32), k)
            found = builder.call(call, [builder.extract_element(value, place)])
            value = builder.insert_element(value, found, place)
        return value

    return x(x), generate


@compiled
def moderate(typing_context, x):  # type: ignore[no-untyped-def]
    """Whether all numbers of x lie between 1e-150 and 1e150."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        value = arguments[0]
        low, high = (_repeated(builder, ir.Constant(ir.DoubleType(), b), value.type) for b in (1e-150, 1e150))
        inside = builder.and_(builder.fcmp_ordered(">", value, low), builder.fcmp_ordered("<", value, high))
        if not isinstance(value.type, ir.VectorType):
            return inside
        bits = builder.bitcast(inside, ir.IntType(value.type.count))
        return builder.icmp_unsigned("==", bits, ir.Constant(bits.type, 2**value.type.count - 1))

    return types.boolean(x), generate


@compiled
def get_lane(typing_context, w, at, lane):  # type: ignore[no-untyped-def]
    """Number `at` of one lane, as float64; a buffer without lanes has one."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _place(context, builder, w, arguments[0], arguments[1], types.float64)
        return builder.load(place if w.ndim == 1 else builder.gep(place, [arguments[2]]), align=8)

    return types.float64(w, types.int64, types.int64), generate


@compiled
def put_lane(typing_context, w, at, lane, value):  # type: ignore[no-untyped-def]
    """Write number `at` of one lane."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place = _place(context, builder, w, arguments[0], arguments[1], types.float64)
        builder.store(arguments[3], place if w.ndim == 1 else builder.gep(place, [arguments[2]]), align=8)
        return context.get_dummy_value()

    return types.void(w, types.int64, types.int64, types.float64), generate


def width(w: Any) -> int:
    """How many lanes a buffer has: 1 or 4."""
    return 1 if w.ndim == 1 else LANES


@overload(width)
def _width(w):  # type: ignore[no-untyped-def]
    found = 1 if w.ndim == 1 else LANES
    return lambda w: found


@compiled
def rolled(typing_context, size):  # type: ignore[no-untyped-def]
    """Keep the loops of the function this is called in as they are, unless `size` is a tuple.

    Loops whose ends are not known would be unrolled eight times, with code for what is left over: ten times
    the code, and slower for the few turns that they take.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if not isinstance(size, types.BaseTuple):
            builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return types.void(size), generate


def groups_of(M: int, size: Any) -> int:
    """How many groups of lanes M modes take in a buffer that `work_room` makes for `size`."""
    return -(-M // LANES) if isinstance(size, tuple) else M


@overload(groups_of)
def _groups_of(M, size):  # type: ignore[no-untyped-def]
    if isinstance(size, types.BaseTuple):
        return lambda M, size: (M + LANES - 1) // LANES
    return lambda M, size: M


def work_room(length: int, size: Any) -> Any:
    """A buffer of `length` zeros: with lanes if `size` is a tuple, a size that is known to the compiler."""
    raise TypeError("work_room is compiled: call it inside a numba function")


@overload(work_room)
def _work_room(length, size):  # type: ignore[no-untyped-def]
    if not isinstance(size, types.BaseTuple):
        return lambda length, size: np.zeros(length)

    def aligned(length, size):  # type: ignore[no-untyped-def]
        whole = np.zeros(LANES * length + 8)  # a vector that lies across two lines of the cache is read twice
        first = (-(whole.ctypes.data // 8)) % 8
        return whole[first : first + LANES * length].reshape(length, LANES)

    return aligned
