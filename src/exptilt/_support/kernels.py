"""Compiled kernels: how they are compiled, kept, announced, and run on threads.

**Kept.** `kernel` and `region` compile with numba and keep the result on disk: beside the source, else in the
user's cache, else in a temporary folder, which is said (``NUMBA_CACHE_DIR`` comes first where it is set). An
entry is good as long as the source of the kernel's module and of every module of this package that it
imports, directly or not, is what it was; the processor and the `variant` that a kernel is compiled for are
part of its key.

**Announced.** A line on standard error says that something is compiled, when it is, and not when it is only
loaded.

**Run.** A `region` is a C function of one pointer. `run_region` calls it on as many threads as torch is set
to use: those of torch's own OpenMP team, where torch runs on GNU OpenMP, because after each of its operations
they keep spinning for some milliseconds, and any other thread would have to share a core with them. The
threads share out the work through a counter in memory; Python is not called. Elsewhere, and in a forked
child, where OpenMP's team is gone and a new one would hang, a thread pool calls the same function.
`run_chunks` does the same for work that is a Python function.
"""

import atexit
import ctypes
import hashlib
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding
import torch
from numba import njit
from numba.core import sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from exptilt._support.process import FIRST_PROCESS

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = __name__.split(".")[0]
_ROOT = Path(__file__).parents[1]
# Statements that import, by their text: parsing whole files would take a tenth of a second at each start.
_IMPORT = re.compile(r"^\s*(?:from\s+(\S+)\s+import\s+(\([^)]*\)|[^\n#]*)|import\s+([^\n#]*))", re.MULTILINE)
_NAME = re.compile(r"[\w.]+")


# ---- where compiled code is kept


@cache
def _source(module: str) -> tuple[str, tuple[str, ...]] | None:
    """The source of a module of this package and what it imports from it; None for a name that is not a
    module.

    The file is found by its name: asking Python where a module is would import the folders above it.
    """
    first, *rest = module.split(".")
    if first != _PACKAGE:
        return None
    place = _ROOT.joinpath(*rest)
    file, package = place.with_suffix(".py"), module.rpartition(".")[0]
    if not file.is_file():
        file, package = place / "__init__.py", module
    if not file.is_file():
        return None
    source = file.read_text(encoding="utf-8")
    names: list[str] = []
    for base, inner, whole in _IMPORT.findall(source):
        base = resolve_name(base, package) if base else ""
        names += [base, *(f"{base}.{name}" for name in _NAME.findall(inner)), *_NAME.findall(whole)]
    return source, tuple(names)


@cache
def source_stamp(module: str) -> str:
    """A digest of the source of a module and of all modules of this package that it imports."""
    seen: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        found = None if name in seen else _source(name)
        if found is not None:
            seen[name] = found[0]
            waiting.extend(found[1])
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(f"{name}\0{seen[name]}\0".encode())
    return digest.hexdigest()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _home_cache() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _PACKAGE / "kernels"
    except RuntimeError:  # no home
        return None


@cache
def _folder(beside: Path) -> Path:
    """Where kernels of a source folder are kept."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    for folder in (Path(asked) / _PACKAGE if asked else None, beside / "__pycache__", _home_cache()):
        if folder is not None and _writable(folder):
            return folder
    return _temporary()


@cache
def _temporary() -> Path:
    folder, process = Path(tempfile.mkdtemp(prefix=f"{_PACKAGE}-kernels-")), os.getpid()
    _say(
        f"compiled kernels go to {folder} until this process ends, because neither the package's folder nor "
        "a home can be written; set NUMBA_CACHE_DIR to keep them elsewhere"
    )

    def remove() -> None:
        if os.getpid() == process:  # and not a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


class _Locator(_CacheLocator):
    def __init__(self, function: Any, file: str):
        self._py_file, self._function = file, function

    def get_cache_path(self) -> str:
        return str(_folder(Path(self._py_file).parent))

    def get_source_stamp(self) -> str:
        return source_stamp(self._function.__module__)

    def get_disambiguator(self) -> str:
        """What else names the files, where modules of one name share a folder."""
        return f"{self._function.__module__}{getattr(self._function, 'variant', '')}"

    @classmethod
    def from_function(cls, function: Any, file: str) -> "_Locator":
        return cls(function, file)


class _Stored(CompileResultCacheImpl):
    _locator_classes = [_Locator]  # noqa: RUF012  numba's name and kind


class _Cache(FunctionCache):
    """numba's cache, kept where and as long as this module says; a miss is announced.

    The source is read at once, while it is what has just been imported; a folder is looked for when there is
    something to load.
    """

    _impl_class = _Stored

    def __init__(self, function: Any, title: str):
        source_stamp(function.__module__)
        self._function, self._title, self._found = function, title, False

    def load_overload(self, signature: Any, context: Any) -> Any:
        base: Any = super()  # numba says nothing of its types
        if not self._found:
            base.__init__(self._function)
            self._found = True
        try:
            found = base.load_overload(signature, context)
        except (AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            base.flush()  # what was kept names a class that the package no longer has, or was cut off
            found = None
        wanted = tuple(sigutils.normalize_signature(signature)[0])
        if found is not None and tuple(found.signature.args) != wanted:
            found = None  # two processes that save for the first time at once may give their files one name
        if found is None:
            _announce(self._title)
        return found


@cache
def _announce(title: str) -> None:
    """Once for a title: kernels that call each other may share one."""
    _say(f"compiling {title} (once; the result is kept on disk) ...")


_say_lock = threading.Lock()


def _say(text: str) -> None:
    with _say_lock:
        print(f"{_PACKAGE}: {text}", file=sys.stderr, flush=True)  # noqa: T201


def kernel(title: str, **flags: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function as a kernel that Python calls, at its first call for each kind of arguments.

    The title is for the announcement: "the kernel of small inverses". The flags are those of `numba.njit`;
    the interpreter lock is released and division by zero gives what IEEE 754 says.
    """

    def make(function: Callable[..., Any]) -> Any:
        options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
        made: Any = njit(function, **{**options, **flags})
        made._cache = _Cache(made.py_func, title)
        return made

    return make


class _Part(JITCodeLibrary):
    """Code that is linked into what calls it, is optimised there, and is no machine code by itself."""

    def finalize(self) -> None:
        me: Any = self  # numba says nothing of its types
        for library in dict.fromkeys(me._linking_libraries):
            if hasattr(me, "_reload_init"):  # from numba 0.63 on
                me._reload_init.update(library._reload_init)
            me._final_module.link_in(library._get_module_for_linking(), preserve=True)
        me._finalized = True


class _PartCompiler(Compiler):
    def compile_extra(self, function: Any) -> Any:
        state: Any = self.state
        base: Any = super()
        library: Any = _Part
        # numba knows a function by a builtin; if Python calls it, this one raises with its own words
        entry = f"{{0.{function.__name__}_is_for_kernels_alone}}".format
        state.library = library(state.targetctx.codegen(), function.__qualname__)
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        made = base.compile_extra(function)
        state.targetctx.insert_user_function(entry, made.fndesc, [made.library])
        return made._replace(entry_point=entry)


def helper(**flags: Any) -> Callable[[_Function], _Function]:
    """Compile a function that kernels call and Python does not; the flags are those of `numba.njit`.

    By itself numba would optimise it at every level of nesting, and give it machine code of its own and a way
    in from Python, which nobody uses: that took more than half of the time to compile.
    """
    make: Callable[[_Function], _Function] = njit(
        **{"error_model": "numpy", "pipeline_class": _PartCompiler, **flags}
    )
    return make


def region(title: str, signature: Any, variant: str = "") -> Callable[[Callable[..., Any]], int]:
    """Compile a function of one pointer now, and return its address, for `run_region`; see `kernel`."""

    def make(function: Callable[..., Any]) -> int:
        function.variant = variant  # type: ignore[attr-defined]
        options = {"nopython": True, "error_model": "numpy"}
        made: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
        made._cache = _Cache(function, title)
        made.compile()
        return int(made.address)

    return make


@cache
def compile_module(text: str) -> int:
    """Compile LLVM's text of a function named "compiled" and return its address; kept in memory alone."""
    module = llvmlite.binding.parse_assembly(text)
    module.verify()
    machine = llvmlite.binding.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvmlite.binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address("compiled"))


_engines: list[Any] = []  # code must not be forgotten while its address is in use


# ---- threads

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _team() -> Any:
    """GNU OpenMP's entry into a parallel region, of the library that torch has loaded, or None."""
    folder = Path(torch.__file__).parent
    for path in (*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")):
        try:
            function = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def team() -> Any:
    """The entry into torch's OpenMP team, or None; None in a forked child, where it would hang."""
    return _team() if os.getpid() == FIRST_PROCESS else None


def _pool(helpers: int) -> ThreadPoolExecutor:
    """A pool that belongs to this process alone."""
    key = os.getpid(), helpers
    return _pools.get(key) or _pools.setdefault(key, ThreadPoolExecutor(helpers, thread_name_prefix=_PACKAGE))


@cache
def _callable(address: int) -> Any:
    return _Region(address)


def run_region(address: int, argument: int, threads: int) -> None:
    """Call the C function at `address` with the pointer `argument` on so many threads, and wait for all."""
    if threads <= 1:
        _callable(address)(argument)
    else:
        _together(_callable(address), address, argument, threads)


def _together(function: Any, address: Any, argument: int | None, threads: int) -> None:
    """Call a C function, which is at `address`, on so many threads, and wait for all."""
    if (enter := team()) is not None:
        enter(address, argument, threads, 0)
        return
    futures = [_pool(threads - 1).submit(function, argument) for _ in range(threads - 1)]
    function(argument)
    for future in futures:
        future.result()


def run_chunks(work: Callable[[int, int], None], total: int, *, threads: int | None = None) -> None:
    """Call ``work(start, stop)`` over 0..total in chunks, on several threads; by default as many as torch's.

    The work must release the interpreter lock to gain anything.
    """
    threads = min(torch.get_num_threads() if threads is None else threads, total)
    if threads <= 1:
        if total > 0:
            work(0, total)
        return
    lock = threading.Lock()
    done = 0
    errors: list[BaseException] = []

    def take() -> tuple[int, int]:
        """The next chunk: a share of what is left, so that chunks are few and the last ones small."""
        nonlocal done
        with lock:
            start = done
            done = min(total, start + max(1, (total - start) // (2 * threads)))
            return start, done

    def labour(_: Any) -> None:
        try:
            start, stop = take()
            while start < stop:
                work(start, stop)
                start, stop = take()
        except BaseException as error:  # an exception cannot pass through the library: it is raised below
            errors.append(error)

    callback = _Region(labour)
    _together(callback, ctypes.cast(callback, ctypes.c_void_p), None, threads)
    if errors:
        raise errors[0]
