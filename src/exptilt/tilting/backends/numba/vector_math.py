r"""Vector code: how the kernels' innermost loops are written.

`Lanes` is a vector of numbers in code that is being generated: ``a * b + c`` emits the instructions.
`row_loop` makes a loop over rows of numbers from a Python function of such vectors, as an intrinsic that
numba kernels call. The width is the machine's (``machine.py``), so a loop does the same arithmetic in the
same order wherever vectors are equally wide, and uses the whole of them (LLVM would use half of a 512-bit
register in loops that it vectorises by itself).

Every instruction carries its own flags. numba's fast-math pass marks those that have none, and would then
delete (x + big) − big.

exp(d) for d <= 0, by range reduction and a polynomial:

    d = n log 2 + r,  |r| <= (log 2)/2,      e^d = 2^n · (1 + r + r² P(r)),

where log 2 is split into a part with few bits (n times it is exact) and the rest (Cody and Waite), and 2^n is
made by writing n into the exponent bits. Below the smallest normal number the result is 0, not a denormal (n
= −127 leaves exponent bits of 0): a score that far under the maximum weighs nothing, and a masked score of
−inf weighs exactly nothing.

tanh(x), for the softcap c·tanh(z/c):

    |x| < 0.625:  x + x³ P(x²) (float32), the rational form of Cephes (float64): keeps the relative precision
    of small x
    otherwise:    (1 − e)/(1 + e), e = e^{−2|x|}, with the sign of x

and its slope is 1 − tanh² for small x, 4e/(1 + e)² otherwise: no difference of numbers that are nearly equal.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from exptilt.tilting.backends.numba.machine import machine

I1, I16, I32, I64 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FUSE = ("contract",)  # a product and a sum may become one instruction, and nothing else is rearranged
_UNROLL = 2  # vectors of a loop's step: two chains of sums hide each other's latency

# (e^r − 1 − r)/r² on |r| <= (log 2)/2 with the least largest error (float32, Cephes);
# its Taylor series to r^13 (float64: the rest is below 1e-17)
_E32 = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_E64 = tuple(1.0 / math.factorial(k) for k in range(13, 1, -1))
_TANH32 = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TANH64_P = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
_TANH64_Q = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)


class Lanes:
    """A vector value in a function under construction."""

    def __init__(self, builder: Any, value: Any):
        self.builder, self.value = builder, value

    def _of(self, value: Any) -> "Lanes":
        return Lanes(self.builder, value)

    def _like(self, x: "Lanes | float") -> Any:
        """x as a vector like this one."""
        if isinstance(x, Lanes):
            return x.value
        vector = self.value.type
        number = float(np.float32(x)) if isinstance(vector.element, ir.FloatType) else float(x)
        return ir.Constant(vector, [number] * vector.count)

    def __add__(self, x: "Lanes | float") -> "Lanes":
        return self._of(self.builder.fadd(self.value, self._like(x), flags=_FUSE))

    def __sub__(self, x: "Lanes | float") -> "Lanes":
        return self._of(self.builder.fsub(self.value, self._like(x), flags=_FUSE))

    def __mul__(self, x: "Lanes | float") -> "Lanes":
        return self._of(self.builder.fmul(self.value, self._like(x), flags=_FUSE))

    def __truediv__(self, x: "Lanes | float") -> "Lanes":
        return self._of(self.builder.fdiv(self.value, self._like(x), flags=_FUSE))

    def __neg__(self) -> "Lanes":
        return self._of(self.builder.fneg(self.value))

    def __lt__(self, x: "Lanes | float") -> Any:
        return self.builder.fcmp_ordered("<", self.value, self._like(x))

    def __gt__(self, x: "Lanes | float") -> Any:
        return self.builder.fcmp_ordered(">", self.value, self._like(x))

    def differs(self, x: "Lanes | float") -> Any:
        """Where a number is not x; true of NaN."""
        return self.builder.fcmp_unordered("!=", self.value, self._like(x))

    def where(self, condition: Any, other: "Lanes | float") -> "Lanes":
        """This where the condition holds, the other elsewhere."""
        return self._of(self.builder.select(condition, self.value, self._like(other)))

    def at_least(self, low: "Lanes | float") -> "Lanes":
        """The larger of the two; NaN stays NaN."""
        return self._of(self.builder.select(self < low, self._like(low), self.value))

    def larger(self, x: "Lanes | float") -> "Lanes":
        """The larger of the two; NaN counts as smaller."""
        return self.where(self > x, x)

    @property
    def single(self) -> bool:
        """Whether the numbers are float32."""
        return isinstance(self.value.type.element, ir.FloatType)

    def polynomial(self, coefficients: Sequence[float]) -> "Lanes":
        """Horner's rule, highest power first."""
        total: Lanes = self._of(self._like(coefficients[0]))
        for c in coefficients[1:]:
            total = total * self + c
        return total


def no_lower(d: Lanes) -> Lanes:
    """d, or the number from which on downwards e^d is 0; NaN stays NaN."""
    return d.at_least(-(127 if d.single else 1023) * math.log(2.0))


def exp(d: Lanes) -> Lanes:
    """e^d for d <= 0, NaN for NaN; to about 1 unit in the last place in float32, 2 in float64."""
    return exp_of_limited(no_lower(d))


def exp_of_limited(y: Lanes) -> Lanes:
    """`exp` of what `no_lower` returns."""
    single, builder, vector = y.single, y.builder, y.value.type
    bits = ir.VectorType(I32 if single else I64, vector.count)
    mantissa, offset = (23, 127) if single else (52, 1023)
    high, low = (0.693359375, -2.12194440e-4) if single else (6.93145751953125e-1, 1.42860682030941723212e-6)
    shift = 1.5 * 2.0**mantissa  # adding it rounds to an integer, which then stands in the low bits
    t = y * (1.0 / math.log(2.0)) + shift
    n = t - shift
    r = n * -high + y
    r = n * -low + r
    p = r.polynomial((*(_E32 if single else _E64), 1.0, 1.0))

    def whole(x: int) -> Any:
        return ir.Constant(bits, [x] * vector.count)

    power = builder.shl(builder.add(builder.bitcast(t.value, bits), whole(offset)), whole(mantissa))
    return p * Lanes(builder, builder.bitcast(power, vector))


def tanh(x: Lanes) -> tuple[Lanes, Lanes]:
    """tanh x and its slope, with the relative precision of small numbers."""
    minus = -x
    size = x.where(x > 0.0, minus)
    z = x * x
    small = (
        z.polynomial(_TANH32) * z * x + x
        if x.single
        else x * z * (z.polynomial(_TANH64_P) / z.polynomial(_TANH64_Q)) + x
    )
    e = exp(size * -2.0)
    large = (-e + 1.0) / (e + 1.0)
    slope = (-(small * small) + 1.0).where(size < 0.625, e * 4.0 / ((e + 1.0) * (e + 1.0)))
    return small.where(size < 0.625, large.where(x > 0.0, -large)), slope


def element_of(number: Any) -> Any:
    """LLVM's type of a numba float."""
    return ir.FloatType() if number == types.float32 else ir.DoubleType()


def lanes_of(number: Any) -> int:
    """How many of them a vector holds."""
    return machine().lanes(4 if number == types.float32 else 8)


def constant(n: int) -> Any:
    """An integer."""
    return ir.Constant(I64, n)


def splat(builder: Any, vector: Any, x: Any) -> Any:
    """A vector with x in every lane."""
    none = ir.Constant(vector, None)
    first = builder.insert_element(none, x, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        first, none, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    )


def pointer(builder: Any, kind: Any, address: Any, index: Any = None) -> Any:
    """An address plus index as a pointer."""
    base = builder.inttoptr(address, kind.as_pointer())
    return base if index is None else builder.gep(base, [index])


def load(builder: Any, vector: Any, address: Any, index: Any = None) -> Any:
    """The vector that begins at number `index` from the address."""
    place = builder.bitcast(pointer(builder, vector.element, address, index), vector.as_pointer())
    return builder.load(place, align=4 if isinstance(vector.element, ir.FloatType) else 8)


def store(builder: Any, value: Any, address: Any, index: Any = None) -> None:
    """Write a vector there."""
    vector = value.type
    place = builder.bitcast(pointer(builder, vector.element, address, index), vector.as_pointer())
    builder.store(value, place, align=4 if isinstance(vector.element, ir.FloatType) else 8)


def _halved(builder: Any, x: Any, join: Callable[[Lanes, Lanes], Lanes]) -> Any:
    """All lanes joined into one number, halves first."""
    n = x.type.count
    while n > 1:
        n //= 2
        parts = [
            builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, n), list(range(k * n, k * n + n))))
            for k in range(2)
        ]
        x = join(Lanes(builder, parts[0]), Lanes(builder, parts[1])).value
    return builder.extract_element(x, ir.Constant(I32, 0))


_JOIN: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "sum": lambda a, b: a + b,
    "max": lambda a, b: a.larger(b),
}
_START = {"sum": 0.0, "max": -math.inf}


def row_loop(
    reads: int, writes: Sequence[int] = (), sums: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic ``loop(zero, places, count, numbers)`` of a function of vectors.

    The function gets one vector from each of the first `reads` places (addresses of rows of numbers) and each
    of the numbers in all lanes, and returns what to write, to the places with the indices `writes`, and then
    what to join to each of the `sums` ("sum" or "max"). The loop goes over `count` whole vectors; the
    intrinsic returns the tuple of sums. `zero` says which kind of number.
    """

    def make(body: Callable[..., Any]) -> Any:
        @intrinsic
        def loop(typing_context, zero, places, count, numbers):
            how_many = len(numbers)

            def generate(context, builder, signature, arguments):
                number = signature.args[0]
                vector = ir.VectorType(element_of(number), lanes_of(number))
                addresses = cgutils.unpack_tuple(builder, arguments[1])
                given = [
                    Lanes(builder, splat(builder, vector, x))
                    for x in cgutils.unpack_tuple(builder, arguments[3])[:how_many]
                ]
                start = [ir.Constant(vector, [_START[kind]] * vector.count) for kind in sums]
                totals = [[cgutils.alloca_once_value(builder, x) for x in start] for _ in range(_UNROLL)]

                def step(first: Any, vectors: int) -> None:
                    for k in range(vectors):
                        index = builder.mul(
                            builder.add(first, ir.Constant(I64, k)), ir.Constant(I64, vector.count)
                        )
                        there = [
                            Lanes(builder, load(builder, vector, addresses[i], index)) for i in range(reads)
                        ]
                        made = body(*there, *given)
                        made = made if isinstance(made, tuple) else (made,)
                        for place, value in zip(writes, made, strict=False):
                            store(builder, value.value, addresses[place], index)
                        for kind, total, value in zip(sums, totals[k], made[len(writes) :], strict=True):
                            builder.store(
                                _JOIN[kind](value, Lanes(builder, builder.load(total))).value, total
                            )

                whole = builder.udiv(arguments[2], ir.Constant(I64, _UNROLL))
                with cgutils.for_range(builder, whole) as turn:
                    step(builder.mul(turn.index, ir.Constant(I64, _UNROLL)), _UNROLL)
                done = builder.mul(whole, ir.Constant(I64, _UNROLL))
                with cgutils.for_range(builder, builder.sub(arguments[2], done)) as turn:
                    step(builder.add(done, turn.index), 1)
                found = []
                for i, kind in enumerate(sums):
                    x = Lanes(builder, builder.load(totals[0][i]))
                    for k in range(1, _UNROLL):
                        x = _JOIN[kind](x, Lanes(builder, builder.load(totals[k][i])))
                    found.append(_halved(builder, x.value, _JOIN[kind]))
                return (
                    context.make_tuple(builder, signature.return_type, found)
                    if sums
                    else context.get_dummy_value()
                )

            result = types.UniTuple(zero, len(sums)) if sums else types.void
            return result(zero, places, types.int64, numbers), generate

        return loop

    return make
