"""The compiled core on other processors, and under sanitizers.

``driver.cpp`` runs kernels on small random problems, without Python or torch, and compares them with plain
loops. The quick test links it with the libraries of this checkout. The slow ones compile csrc anew:

- for ARM, run by qemu;
- with vectors of 512 bits on registers of 256, each then two registers: the code of AVX-512, whose own
  instructions qemu does not know;
- with the sanitizers for addresses and undefined behaviour, for the driver, the option fuzz and the filters.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exptilt._support import native

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
X86 = platform.machine().lower() in {"x86_64", "amd64"}
NARROW = (
    ["-march=x86-64-v3", "-DEXPTILT_BITS=256", "-DEXPTILT_ROWS=6"]
    if X86
    else ["-DEXPTILT_BITS=128", "-DEXPTILT_ROWS=12"]
)
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
FILTERS = (
    *("inference/plain/test_exact.py", "inference/test_passes.py", "inference/test_online.py"),
    *("test_nonlinear.py", "nonlinear/test_recurrent.py", "test_families.py"),
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the driver is built as on Linux")


def tool(name):
    """The path of a program; skips the test where it is not installed."""
    found = shutil.which(name, path=TOOLS)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*words, folder=ROOT, **environment):
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{said[:3000]} ... {said[-3000:]}"
    return done.stdout


def compiler():
    return shlex.split(os.environ["CXX"]) if "CXX" in os.environ else [tool("c++")]


def compiled(csrc, folder, target, *options):
    """The library of a target, made by CMake in that folder."""
    build = folder / f"build-{target}"
    options = (f"-DEXPTILT_TARGETS={target}", f"-DEXPTILT_OUTPUT={folder}", "-DEXPTILT_STRICT=ON", *options)
    run(
        tool("cmake"),
        "-S",
        csrc,
        "-B",
        build,
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        *options,
    )
    run(tool("ninja"), "-C", build)
    shutil.rmtree(build)
    return folder / f"libexptilt-{target}.so"


def linked(folder, library, *words):
    """The driver with that library, made by the compiler that `words` begin with."""
    program = folder / f"driver-{library.stem}"
    sources = (HERE / "driver.cpp", HERE / "driver_switching.cpp")
    run(
        *words,
        "-std=c++17",
        "-DEXPTILT_BITS=128",
        f"-I{ROOT / 'csrc'}",
        *sources,
        library,
        f"-Wl,-rpath,{library.parent}",
        "-pthread",
        "-o",
        program,
    )
    return program


def assert_right(*words):
    assert run(*words).endswith("all right\n")


def built():
    """Libraries of this checkout by target, those of this processor's family."""
    return {target: file for target, file in native._found().items() if target != "plain"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def driver(folder):
    """The driver, linked with the library that is loaded here."""
    if not native.available():
        pytest.skip(native.obstacle())
    return linked(folder, built()[native.target()], *compiler())


def test_the_library_in_use(driver):
    assert_right(driver)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "processor"), [("v2", "Nehalem"), ("v3", "Haswell")])
def test_the_oldest_processor_of_a_target(folder, target, processor):
    """No instruction that the processor lacks, in a library that says it runs there."""
    if target not in built():
        pytest.skip(f"{target} was not built")
    emulator = tool("qemu-x86_64")
    assert_right(emulator, "-cpu", processor, linked(folder, built()[target], *compiler()))


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "runs"), [("core2duo", ""), ("Nehalem", "v2"), ("Haswell", "v2 v3")])
def test_a_library_says_where_it_runs(folder, processor, runs):
    """It can be loaded and asked wherever x86-64 runs."""
    emulator, program = tool("qemu-x86_64"), folder / "runs"
    libraries = {target: file for target, file in built().items() if target in ("v2", "v3", "v4")}
    if not libraries:
        pytest.skip("nothing was built for x86-64")
    run(*compiler(), "-std=c++17", HERE / "runs.cpp", "-ldl", "-o", program)
    expected = [str(int(target in runs.split())) for target in libraries]
    assert run(emulator, "-cpu", processor, program, *libraries.values()).split() == expected


@pytest.mark.slow
def test_arm(folder):
    """The whole core, as it is compiled for ARM."""
    cross, emulator = tool("aarch64-linux-gnu-g++"), tool("qemu-aarch64")
    system = (
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={cross}",
    )
    library = compiled(ROOT / "csrc", folder, "arm", *system)
    assert_right(emulator, "-L", "/usr/aarch64-linux-gnu", linked(folder, library, cross))


class Package:
    """A copy of the package with a library of its own, for Python in another process."""

    def __init__(self, folder, name, flags, *options):
        self.source = folder / name / "src"
        ignored = shutil.ignore_patterns("_native", "__pycache__")
        shutil.copytree(ROOT / "src", self.source, ignore=ignored)
        shutil.copytree(ROOT / "csrc", folder / name / "csrc")
        home = self.source / "exptilt" / "_native"
        home.mkdir()
        made = compiled(folder / name / "csrc", home, name, f"-Dflags_{name}={';'.join(flags)}", *options)
        # both names: the loader knows this one, and the driver is linked to that which it was built with
        self.library = Path(shutil.copy2(made, home / f"libexptilt-{'v3' if X86 else 'arm'}.so"))

    def python(self, *words, **environment):
        """Run Python with this package."""
        path = os.pathsep.join([str(self.source), str(ROOT / "tests")])
        environment = {"PYTHONPATH": path, "EXPTILT_TARGET": self.library.stem.split("-")[1], **environment}
        where = "import exptilt; from exptilt._support import native; native.load(); print(exptilt.__file__)"
        assert run(sys.executable, "-c", where, **environment).startswith(str(self.source))
        return run(sys.executable, *words, **environment)


@pytest.fixture(scope="module")
def wide(folder):
    flags = [
        *NARROW,
        "-UEXPTILT_BITS",
        "-DEXPTILT_BITS=512",
        "-UEXPTILT_ROWS",
        "-DEXPTILT_ROWS=12",
        "-Wno-psabi",
    ]
    return Package(folder, "wide", flags)


@pytest.mark.slow
def test_wide_vectors_on_narrow_registers(folder, wide):
    assert_right(linked(folder, wide.library, *compiler()))
    wide.python("-m", "oracles.tilting_fuzz", N="100")


@pytest.fixture(scope="module")
def checked(folder):
    return Package(
        folder, "checked", [*NARROW, *SANITIZERS, "-O1"], f"-DCMAKE_SHARED_LINKER_FLAGS={SANITIZERS[0]}"
    )


def sanitizing():
    """The environment in which Python loads a library with sanitizers."""
    files = [
        run(*compiler(), f"-print-file-name={name}").strip() for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(file).is_file() for file in files):
        pytest.skip("the compiler has no libasan.so that can be loaded first")
    return {"LD_PRELOAD": " ".join(files), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}


@pytest.mark.zoo
def test_sanitized_driver(folder, checked):
    assert_right(linked(folder, checked.library, *compiler(), *SANITIZERS))


@pytest.mark.zoo
def test_sanitized_fuzz(checked):
    checked.python("-m", "oracles.tilting_fuzz", **sanitizing(), N="500", START="5000000")


@pytest.mark.zoo
def test_sanitized_filters(checked):
    files = [ROOT / "tests" / "switching" / name for name in FILTERS]
    # -s: what a sanitizer says before it ends the process is shown
    words = ("-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not slow", *files)
    checked.python(*words, **sanitizing())
