"""Numbers as the kernels have them: one at a time, or the same number of four laws at once.

A work buffer `w` is either ``(size,)`` or ``(size, 4)``. In the second, each number is a vector of four
lanes, and a kernel written with the functions below works on four laws where it would have worked on one; the
type of the buffer decides when it is compiled. Four consecutive numbers are read and written as one vector
(`get4`, `put4`) in either case: 4 or 16 places of memory.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, overload, register_model

LANES = 4
FAST = {"contract"}  # multiply-adds may be fused; sums keep their order, for vectors are asked for by name
# Optimised before it is called from, which `helper` leaves out: filters are a tenth faster for it.
inlined = njit(forceinline=True, fastmath=FAST, error_model="numpy")


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


def written(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic, from what writes its code, given the arguments' types and values.

    `result` says its type, by the types of the arguments; places and lanes are whole numbers.
    """

    def wrap(write: Any) -> Any:
        def make(typing_context, *kinds):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                value = write(context, builder, kinds, *arguments)
                return context.get_dummy_value() if value is None else value

            exact = [types.int64 if isinstance(kind, types.Integer) else kind for kind in kinds]
            return result(*kinds)(*exact), generate

        given = list(inspect.signature(write).parameters.values())
        make.__name__ = write.__name__
        make.__signature__ = inspect.Signature([given[0], *given[3:]])  # type: ignore[attr-defined]
        return intrinsic(make)

    return wrap


def _reader(kind_of: Any) -> Any:
    @written(lambda w, at: kind_of(w))
    def read(context: Any, builder: Any, kinds: Any, w: Any, at: Any) -> Any:
        return builder.load(_place(context, builder, kinds[0], w, at, kind_of(kinds[0])), align=8)

    return read


def _writer(kind_of: Any) -> Any:
    @written(lambda w, at, value: types.void)
    def write(context: Any, builder: Any, kinds: Any, w: Any, at: Any, value: Any) -> None:
        kind = kind_of(kinds[0])
        given = _repeated(builder, value, context.get_value_type(kind))
        builder.store(given, _place(context, builder, kinds[0], w, at, kind), align=8)

    return write


def _nought(kind_of: Any) -> Any:
    @written(kind_of)
    def nought(context: Any, builder: Any, kinds: Any, w: Any) -> Any:
        return ir.Constant(context.get_value_type(kind_of(kinds[0])), None)

    return nought


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


get, get4 = _reader(_number), _reader(_four)
put, put4 = _writer(_number), _writer(_four)
zero, zero4 = _nought(_number), _nought(_four)


def _arithmetic(operation: Any, name: str) -> None:
    @written(lambda a, b: max((a, b), key=lambda x: getattr(x, "length", 0)))
    def compute(context: Any, builder: Any, kinds: Any, x: Any, y: Any) -> Any:
        kind = max((x, y), key=lambda value: getattr(value.type, "count", 0)).type
        return getattr(builder, name)(*(_repeated(builder, v, kind) for v in (x, y)), flags=tuple(FAST))

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


def _inside(builder: Any, value: Any, low: Any, high: float) -> Any:
    """Whether low < value < high, number by number."""
    most = _repeated(builder, ir.Constant(ir.DoubleType(), high), value.type)
    return builder.and_(builder.fcmp_ordered(">", value, low), builder.fcmp_ordered("<", value, most))


@written(lambda x, least, other: x)
def between(context: Any, builder: Any, kinds: Any, x: Any, least: Any, other: Any) -> Any:
    """x where least < x < ∞, else `other`, number by number."""
    return builder.select(_inside(builder, x, least, float("inf")), x, _repeated(builder, other, x.type))


@written(lambda x: x)
def logarithm(context: Any, builder: Any, kinds: Any, x: Any) -> Any:
    """log x, number by number."""
    call = builder.module.declare_intrinsic("llvm.log", [ir.DoubleType()])
    if not isinstance(x.type, ir.VectorType):
        return builder.call(call, [x])
    for k in range(x.type.count):
        place = ir.Constant(ir.IntType(32), k)
        found = builder.call(call, [builder.extract_element(x, place)])
        x = builder.insert_element(x, found, place)
    return x


@written(lambda x: types.boolean)
def moderate(context: Any, builder: Any, kinds: Any, x: Any) -> Any:
    """Whether all numbers of x lie between 1e-150 and 1e150."""
    low = _repeated(builder, ir.Constant(ir.DoubleType(), 1e-150), x.type)
    inside = _inside(builder, x, low, 1e150)
    if not isinstance(x.type, ir.VectorType):
        return inside
    bits = builder.bitcast(inside, ir.IntType(x.type.count))
    return builder.icmp_unsigned("==", bits, ir.Constant(bits.type, 2**x.type.count - 1))


def _lane(context: Any, builder: Any, kind: Any, w: Any, at: Any, lane: Any) -> Any:
    """The address of number `at` of one lane; a buffer without lanes has one."""
    place = _place(context, builder, kind, w, at, types.float64)
    return place if kind.ndim == 1 else builder.gep(place, [lane])


@written(lambda w, at, lane: types.float64)
def get_lane(context: Any, builder: Any, kinds: Any, w: Any, at: Any, lane: Any) -> Any:
    """Number `at` of one lane, as float64."""
    return builder.load(_lane(context, builder, kinds[0], w, at, lane), align=8)


@written(lambda w, at, lane, value: types.void)
def put_lane(context: Any, builder: Any, kinds: Any, w: Any, at: Any, lane: Any, value: Any) -> None:
    """Write number `at` of one lane."""
    builder.store(value, _lane(context, builder, kinds[0], w, at, lane), align=8)


def width(w: Any) -> int:
    """How many lanes a buffer has: 1 or 4."""
    return 1 if w.ndim == 1 else LANES


@overload(width)
def _width(w):  # type: ignore[no-untyped-def]
    found = 1 if w.ndim == 1 else LANES
    return lambda w: found


@written(lambda size: types.void)
def rolled(context: Any, builder: Any, kinds: Any, size: Any) -> None:
    """Keep the loops of the function this is called in as they are, unless `size` is a tuple.

    Loops whose ends are not known would be unrolled eight times, with code for what is left over: ten times
    the code, and slower for the few turns that they take.
    """
    if not isinstance(kinds[0], types.BaseTuple):
        builder.function.attributes.add("optsize")


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
