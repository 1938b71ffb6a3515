"""The compiled core: finding its library, checking it, and calling its kernels.

``csrc/`` is compiled into one shared library for each instruction set, beside this package in ``_native/``.
`load` takes the best one that the processor runs: x86-64 v4 (AVX-512), v3 (AVX2) or v2, or the one of ARM.
``EXPTILT_TARGET=v2`` asks for one by name.

A library is refused, with the reason in one sentence, if it cannot be read, if it belongs to another version
of this package, or, in a checkout, if it was built from other sources than those in ``csrc/``. Attention then
runs in plain torch and says so once; a function that needs the core raises `CoreMissingError` with the same
sentence.

A kernel is a C function of one pointer to a frame, a struct of named fields. The library itself says which
fields a frame has, so `frame` makes the same struct here and the two cannot differ.
"""

import ctypes
import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from exptilt._support.errors import BackendError

ABI = 1  # as in csrc/library.cpp
TARGETS = ("v4", "v3", "v2", "arm", "plain")  # the best first
_PACKAGE = Path(__file__).parents[1]
_SOURCES = _PACKAGE.parents[1] / "csrc"
_KINDS = {"whole": ctypes.c_int64, "real": ctypes.c_double, "place": ctypes.c_int64}
OUT_OF_MEMORY = -1  # as in csrc/frame.hpp


class CoreMissingError(BackendError):
    """The compiled core is missing, or does not belong to this version of the package."""


def folders() -> list[Path]:
    """Folders that may hold the libraries: beside the package, or where an editable install put them."""
    places: Any = sys.modules[__name__.partition(".")[0]].__path__
    return [Path(place) / "_native" for place in (_PACKAGE, *places)]


def _found() -> dict[str, Path]:
    """The library files, by target."""
    files: dict[str, Path] = {}
    for folder in folders():
        for suffix in (".so", ".dylib", ".dll"):
            for target in TARGETS:
                file = folder / f"libexptilt-{target}{suffix}"
                if file.is_file():
                    files.setdefault(target, file)
    return files


@cache
def source_digest() -> str | None:
    """The digest that csrc/CMakeLists.txt gives these sources; None outside of a checkout."""
    if not (_SOURCES / "CMakeLists.txt").is_file():
        return None
    names = sorted(file.relative_to(_SOURCES).as_posix() for file in _SOURCES.rglob("*.[ch]pp"))
    lines = [f"{name} {hashlib.sha256((_SOURCES / name).read_bytes()).hexdigest()}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _open(file: Path) -> Any:
    """The library in a file, checked, or None if this processor cannot run it."""
    again = "Run `make native` in a checkout, or install exptilt again."
    try:
        library = ctypes.CDLL(str(file))
        abi, source, runs = library.exptilt_abi, library.exptilt_source, library.exptilt_runs_here
    except (OSError, AttributeError) as problem:
        raise CoreMissingError(f"the compiled core {file} cannot be loaded ({problem}). {again}") from None
    source.restype = ctypes.c_char_p
    if not runs():
        return None
    if abi() != ABI:
        raise CoreMissingError(
            f"the compiled core {file} is of version {abi()}, and this package needs {ABI}. {again}"
        )
    here = source_digest()
    if here is not None and source().decode() != here:
        raise CoreMissingError(
            f"the compiled core {file} was built from other sources than those in {_SOURCES}. {again}"
        )
    return library


@cache
def _loaded() -> tuple[Any, str]:
    """The library and its target; or None and the sentence that says why there is none."""
    files, asked = _found(), os.environ.get("EXPTILT_TARGET")
    if not files:
        return None, (
            "the compiled core is missing: it was not built. Run `make native` in a checkout (it needs a "
            "C++ compiler), or install a wheel of exptilt."
        )
    if asked is not None and asked not in files:
        raise CoreMissingError(
            f"EXPTILT_TARGET is {asked!r}. Set it to one of {', '.join(files)}, or unset it."
        )
    wanted = [asked] if asked else [target for target in TARGETS if target in files]
    try:
        for target in wanted:
            library = _open(files[target])
            if library is not None:
                return library, target
    except CoreMissingError as problem:
        return None, str(problem)
    return None, (
        f"this processor runs none of {', '.join(wanted)}, the instruction sets that the compiled core was "
        "built for; the least of x86 is v2 (SSE4.2, 2009)."
    )


def available() -> bool:
    """Whether the compiled core can be used."""
    return _loaded()[0] is not None


def obstacle() -> str:
    """Why the compiled core cannot be used; an empty text if it can."""
    library, said = _loaded()
    return "" if library is not None else said


def target() -> str:
    """The instruction set of the library in use, such as ``v3``; an empty text without one."""
    library, said = _loaded()
    return said if library is not None else ""


def load() -> Any:
    """The library in use; raises `CoreMissingError` if there is none."""
    library, said = _loaded()
    if library is None:
        raise CoreMissingError(f"{said[0].upper()}{said[1:]}")
    return library


@cache
def function(name: str) -> Any:
    """A function of the library that takes a pointer to a frame, and returns a whole number."""
    made = getattr(load(), f"exptilt_{name}")
    made.argtypes, made.restype = [ctypes.c_void_p], ctypes.c_int64
    return made


@cache
def address(name: str) -> int:
    """Address of a function of the library, for `threads.run_region`."""
    return int(ctypes.cast(getattr(load(), f"exptilt_{name}"), ctypes.c_void_p).value or 0)


@cache
def frame(name: str) -> type[ctypes.Structure]:
    """The ctypes struct of that name, with the fields that the library lists; see csrc/frame.hpp."""
    text = getattr(load(), f"exptilt_fields_{name}")
    text.restype = ctypes.c_char_p
    pairs = [line.split() for line in text().decode().splitlines()]
    fields = [(field, _KINDS[kind]) for kind, field in pairs]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def call(name: str, filled: ctypes.Structure) -> int:
    """Run a kernel on this thread and return its result; raises MemoryError if memory runs out."""
    found: int = function(name)(ctypes.addressof(filled))
    if found == OUT_OF_MEMORY:
        raise no_memory(name)
    return found


def no_memory(name: str) -> MemoryError:
    """The MemoryError for a kernel that ran out of memory."""
    return MemoryError(f"exptilt: no memory is left for {name}")
