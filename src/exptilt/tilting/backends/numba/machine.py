"""What the processor has: how wide its vectors are, how many registers it has for them, how much a core's
cache holds.

Kernels are compiled for a width, and tiles are cut to a cache. Both are found once. For tests, and for
processors that report something else than they have, the environment variables ``EXPTILT_VECTOR_BITS`` (128,
256 or 512) and ``EXPTILT_CACHE_KIB`` say otherwise. Any width is correct on any processor: LLVM splits
vectors that are wider than its registers.
"""

import os
from functools import cache
from typing import NamedTuple

from exptilt._support.errors import ArgumentError

_WIDTHS = (128, 256, 512)


class Machine(NamedTuple):
    """The processor as the kernels see it.

    Attributes:
        vector_bits: width of a vector register.
        registers: how many of them there are.
        cache_bytes: size of a core's second-level cache.
    """

    vector_bits: int
    registers: int
    cache_bytes: int

    def lanes(self, number_bytes: int) -> int:
        """Numbers of that size in one vector."""
        return self.vector_bits // 8 // number_bytes

    @property
    def block_rows(self) -> int:
        """Rows of a product that are summed at once, two vectors each; three registers stay free."""
        return 12 if self.registers >= 32 else 6

    @property
    def prefetch(self) -> int:
        """Lines of a packed tile that are asked for ahead of their use; 0 for none.

        Measured: with 512-bit vectors 8 lines gain 4 % (Intel), with 256-bit vectors they cost 1 % (AMD,
            family 25).
        """
        return 8 if self.vector_bits == 512 else 0


def _asked(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) == 0:
        raise ArgumentError(f"{name} is {text!r}. Set it to a positive whole number, or unset it.")
    return int(text)


def _features() -> tuple[str, set[str]]:
    """The processor's family and its features, as numba compiles for them (``NUMBA_CPU_NAME`` counts)."""
    from numba.core.registry import cpu_target

    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.split("-")[0], {part[1:] for part in features.split(",") if part.startswith("+")}


def _cache_bytes() -> int:
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (ValueError, OSError, AttributeError):
        size = 0
    return size if size > 0 else 512 * 1024


@cache
def machine() -> Machine:
    """This machine."""
    family, features = _features()
    wide = "avx512f" in features
    bits = _asked("EXPTILT_VECTOR_BITS") or (512 if wide else 256 if "avx" in features else 128)
    if bits not in _WIDTHS:
        raise ArgumentError(
            f"EXPTILT_VECTOR_BITS is {bits}. Set it to one of {', '.join(map(str, _WIDTHS))}."
        )
    registers = 32 if wide or family in ("aarch64", "arm64") else 16
    cache_kib = _asked("EXPTILT_CACHE_KIB")
    return Machine(bits, registers, _cache_bytes() if cache_kib is None else cache_kib * 1024)
