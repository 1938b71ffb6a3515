"""Triton's interpreter, mended and made quicker: it runs GPU kernels on a CPU, one program after another.

As it comes the interpreter multiplies bfloat16 numbers as if they were integers, cuts the last bits off a
float32 number that becomes bfloat16 where a GPU rounds, multiplies in float32 where a GPU would in TF32, and
takes most of its time to find the functions of the language and the types of their results. `mend` mends
these: products are those of the tensor cores (inputs cut to TF32, three of them for tf32x3, sums in float32
and in order), casts round to nearest even, what was found is kept, and tensors of like types meet in numpy
at once.

TRITON_INTERPRET=1 must be set before triton is first imported: import this file in a process of its own.
"""

from contextlib import contextmanager
from functools import cache

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from exptilt.tilting.backends.triton import launch

Handle = interpreter.TensorHandle


def _widened(x):
    """A bfloat16, which the interpreter holds as 16 bits, or a float16, as float32."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data.astype(np.float32) if x.data.dtype == np.float16 else x.data


def _narrowed(x):
    """float32 numbers as the 16 bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _cut(x):
    """What a tensor core reads of a float32 number: sign, exponent, ten bits."""
    return (np.ascontiguousarray(x).view(np.uint32) & 0xFFFFE000).view(np.float32)


def _add_product(left, right, total):
    """total += left right, one column of left after the other and each in one rounding, as a GPU does: a BLAS
    sums in another order in another tile, and scores that two sweeps must find alike would not be.
    """
    left, right, sums = left.astype(np.float64), right.astype(np.float64), np.empty(total.shape)
    for k in range(left.shape[1]):
        np.multiply(left[:, k, None], right[k], out=sums)
        np.add(sums, total, out=sums)
        total[...] = sums


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    x, y, total = _widened(a), _widened(b), np.array(d.data, order="C")
    if a.dtype.scalar != tl.float32 or input_precision.name == "IEEE":
        pairs = ((x, y),)
    else:
        high, tall = _cut(x), _cut(y)
        pairs = ((high, tall),)
        if input_precision.name == "TF32x3":  # what was cut off, too, but for the product of both
            pairs = ((_cut(x - high), tall), (high, _cut(y - tall)), *pairs)
    size = x.shape[1]
    piece = max_num_imprecise_acc or size  # a large tile is summed as smaller ones would be
    for at in range(0, size, piece):
        part = total if piece == size else np.zeros_like(total)
        for left, right in pairs:
            _add_product(*map(np.ascontiguousarray, (left[:, at : at + piece], right[at : at + piece])), part)
        total = part if piece == size else total + part
    return Handle(total, d.dtype.scalar)


def mend():
    """Mend the interpreter of this process."""
    builder, plain_cast = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.cast_impl

    def cast(self, src, dst_type):
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (tl.bfloat16, tl.float32):
            return Handle(_widened(src), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return Handle(_narrowed(src.data), tl.bfloat16)
        return plain_cast(self, src, dst_type)

    builder.create_dot, builder.cast_impl = _dot, cast
    builder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: cast(self, src, dst_type)
    known = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (
        np.dtype(np.uint64) if dtype.scalar.is_ptr() else known(dtype.scalar)
    )
    # Whole numbers are small here, and need no second sum in 64 bits to see that none overflows.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch, done = interpreter._patch_lang, set()

    def patch_once(function):
        """Patch what a file calls the language, the first time only, and for good."""
        name = function.__globals__["__name__"]
        if name not in done:
            done.add(name)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    _keep_types()
    _meet_at_once()


def _keep_types():
    """Make the types of tensors once for each shape, not once for each tensor."""

    @cache
    def sizes(shape):
        made = tl.core.tuple(list(shape))
        count = tl.core.validate_block_shape(made)
        return made, count, tl.core.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(count), str(made)

    def block_init(self, element_ty, shape):
        whole = tuple([n.value if isinstance(n, tl.constexpr) else n for n in shape])
        if not whole:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, *_, text = sizes(whole)
        self.name = f"<{text}, {element_ty}>"

    def tensor_init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, _, self.shape, self.numel, _ = sizes(tuple(type.shape) if type.is_block() else ())

    tl.core.block_type.__init__, tl.core.tensor.__init__ = block_init, tensor_init


WHOLE, REAL, TRUTH = (tl.int32, tl.int64), (tl.float32, tl.float64), (tl.int1,)
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide}
COMPARED = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
COMPARED |= {"eq": np.equal, "ne": np.not_equal}


def _meet_at_once():
    """Let operators go straight to numpy where both sides are of one kind, with the same results."""
    tensor = tl.core.tensor

    def tensor_of(data, dtype, *sides):
        block = any(x.type.is_block() for x in sides)
        return tensor(Handle(data, dtype), tl.block_type(dtype, list(data.shape)) if block else dtype)

    def number_like(x, dtype, kinds):
        """A number as one of this dtype, None where it would change the dtype."""
        x = x.value if isinstance(x, tl.constexpr) else x
        fits = abs(x) < 2**31 if type(x) is int else type(x) is float and dtype in REAL
        return np.array([x], interpreter._get_np_dtype(dtype)) if fits and dtype in kinds else None

    def operator(name, op, kinds, swapped=False, result=None):
        plain = getattr(tensor, name)

        def call(self, other, _semantic=None):
            dtype = self.dtype
            if dtype in kinds:
                if not isinstance(other, tensor):
                    right = number_like(other, dtype, kinds)
                    sides = (self,)
                else:
                    same = other.dtype == dtype or (dtype in WHOLE and other.dtype in WHOLE)
                    right, sides = (other.handle.data if same else None), (self, other)
                    dtype = dtype if other.dtype == dtype else tl.int64
                if right is not None:
                    left = self.handle.data
                    data = op(right, left) if swapped else op(left, right)
                    return tensor_of(data, result or dtype, *sides)
            return plain(self, other, _semantic=interpreter.interpreter_semantic)

        setattr(tensor, name, call)

    for name, op in ARITHMETIC.items():
        kinds = REAL if name == "truediv" else REAL + WHOLE
        operator(f"__{name}__", op, kinds)
        operator(f"__r{name}__", op, kinds, swapped=True)
    for name, op in COMPARED.items():
        operator(f"__{name}__", op, REAL + WHOLE, result=tl.int1)
    operator("__and__", np.logical_and, TRUTH)

    plain_where = tl.where

    def data_of(x, dtype):
        """A tensor's or a number's data, None if it is of another dtype."""
        if isinstance(x, tensor):
            return x.handle.data if x.dtype == dtype else None
        return number_like(x, dtype, (dtype,))

    def where(condition, x, y, _semantic=None):
        sides = [z for z in (condition, x, y) if isinstance(z, tensor)]
        if len(sides) > 1 and condition is sides[0] and condition.dtype == tl.int1:
            dtype = sides[1].dtype
            found = [data_of(z, dtype) for z in (x, y)] if dtype in (*REAL, tl.int32) else [None]
            if all(z is not None for z in found):
                return tensor_of(np.where(condition.handle.data, *found), dtype, *sides)
        return plain_where(condition, x, y, _semantic=interpreter.interpreter_semantic)

    tl.where = where


@contextmanager
def tiles(rows=None, keys=None):
    """Let every kernel have tiles of this size: the interpreter's time is that of tiles, not of numbers."""
    plain = launch.kind_of

    def kind_of(*args, **options):
        kind, *rest = plain(*args, **options)
        return (kind._replace(rows=rows or kind.rows, keys=keys or kind.keys), *rest)

    launch.kind_of = kind_of
    try:
        yield
    finally:
        launch.kind_of = plain
