"""The package keeps the rules of the house."""

import functools
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest

import exptilt
from house import checks

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "exptilt"
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))
}
FOLDERS = sorted(f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py"))
PUBLIC_FOLDERS = sorted(
    path.parent.name for path in PACKAGE.glob("[a-z]*/__init__.py") if path.parent.name != "cli"
)


@functools.cache
def complaints(check):
    return [line for path, source in SOURCES.items() for line in check(source, path)]


def test_there_is_something_to_check():
    assert "__init__.py" in SOURCES
    assert "report" in PUBLIC_FOLDERS
    assert "_support/" in FOLDERS
    assert sum(map(len, checks.import_graph(SOURCES).values())) > 300


@pytest.mark.parametrize(
    "check",
    [
        checks.upward_imports,
        checks.eager_optional_imports,
        checks.private_torch_names,
        checks.without_device,
        checks.too_long,
    ],
)
def test_sources(check):
    assert complaints(check) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_sources_by_folder(folder):
    assert [line for line in complaints(checks.moved_files) if line.startswith(folder)] == []


def test_no_line_of_python_is_too_wide():
    paths = [path.relative_to(ROOT).as_posix() for path in tracked_files() if path.suffix == ".py"]
    assert len(paths) > 500
    paths.remove("tests/house/test_checks.py")  # bad examples stand there
    assert [line for path in paths for line in checks.too_wide((ROOT / path).read_text("utf-8"), path)] == []


CSRC = ROOT / "csrc"
NATIVE = {
    path.relative_to(CSRC).as_posix(): path.read_text("utf-8") for path in sorted(CSRC.rglob("*.[ch]pp"))
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_file_of_cpp_is_short_narrow_and_says_what_it_does(name):
    source = NATIVE[name]
    assert checks.too_long(source, name, checks.NATIVE_LINES_AT_MOST) == []
    assert checks.too_wide(source, name, checks.NATIVE_COLUMNS_AT_MOST) == []
    assert checks.missing_heads(source, name) == []


def test_cpp_needs_nothing_but_the_standard_library():
    assert len(NATIVE) > 10
    for name, source in NATIVE.items():
        ours = re.findall(r'^#include "(.*)"$', source, flags=re.MULTILINE)
        theirs = re.findall(r"^#include <(.*)>$", source, flags=re.MULTILINE)
        assert set(ours) <= NATIVE.keys(), name
        assert [header for header in theirs if not re.fullmatch(r"[a-z_]+|cpuid\.h", header)] == [], name


@pytest.mark.parametrize("folder", FOLDERS)  # between folders the layers leave no room for circles
def test_nothing_imports_in_circles(folder):
    graph = checks.import_graph({path: text for path, text in SOURCES.items() if path.startswith(folder)})
    assert checks.cycles(graph) == []
    assert checks.cycles(checks.folder_graph(graph)) == []


def test_no_folder_is_crowded():
    assert checks.crowded(SOURCES) == []
    assert checks.crowded(NATIVE) == []


def test_tests_are_named_after_what_they_test():
    folder = ROOT / "tests"
    tests = [path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py")]
    places = [
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if "__" not in path.as_posix()
    ]
    assert len(tests) > 100
    assert checks.misnamed_tests(tests, places) == []
    texts = {path: (folder / path).read_text("utf-8") for path in tests}
    most = checks.TEST_LINES_AT_MOST
    assert [line for path, text in texts.items() for line in checks.too_long(text, path, most)] == []


def test_few_public_names():
    names = [name for name in exptilt.__all__ if name != "__version__"]
    assert len(names) == len(set(names)) <= checks.NAMES_AT_MOST
    assert set(exptilt.__all__) <= set(dir(exptilt))
    assert not [name for name in names if name.startswith("_")]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        exptilt.no_such_name  # noqa: B018


@pytest.mark.parametrize("folder", ["", *PUBLIC_FOLDERS])
def test_public_names_are_documented(folder):
    module = import_module(f"exptilt.{folder}".rstrip("."))
    assert module.__doc__
    assert isinstance(module.__all__, list)
    problems = []
    for name in module.__all__:
        problems += checks.undocumented(f"{module.__name__}.{name}", getattr(module, name))
    assert problems == []


UNTYPED = re.compile(  # results whose kind depends on the call
    r"\w+\.to_frame"  # a DataFrame of pandas, which is optional
    r"|(Filtered|Smoothed|OnlineState)\.\w+|Switching\w+\.most_likely_path"  # as the data came
    r"|Fit\.(regime_probability|residuals)"
    r"|Measure\.sample"  # a tensor, or one for each site
    r"|linear_cross_entropy|linear_kl"  # a loss, or a loss with statistics
)


@pytest.mark.parametrize("folder", PUBLIC_FOLDERS)
def test_public_results_are_typed(folder):
    module = import_module(f"exptilt.{folder}")
    found = [line for name in module.__all__ for line in checks.untyped_results(name, getattr(module, name))]
    assert [name for name in found if not UNTYPED.fullmatch(name)] == []


def test_types_are_checked_strictly_but_for_kernels():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    assert settings["files"] == ["src"]
    assert settings["strict"] is True
    loose = {
        module
        for override in settings["overrides"]
        for module in override["module"]
        if any(name.startswith(("disallow", "check")) and value is False for name, value in override.items())
    }
    assert [module for module in loose if not module.startswith("exptilt.tilting.backends.triton.")] == []
    assert "mypy" in re.search(r"^lint:.*\n((\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.M)[1]


SNAPSHOT = """
import atexit, json, logging, os, random, signal, sys, threading, warnings
import numpy, scipy, scipy.linalg, scipy.special, torch, tqdm, threadpoolctl
import torch.func, torch.nn.attention

def snapshot():
    return {
        "environment": dict(os.environ),
        "hooks": [repr(h) for h in (sys.excepthook, sys.displayhook, sys.unraisablehook)],
        "thread hooks": [repr(h) for h in (threading.excepthook, sys.gettrace())],
        "import hooks": [repr(h) for h in sys.meta_path + sys.path_hooks],
        "path": list(sys.path),
        "warning filters": [repr(f) for f in warnings.filters],
        "signals": [repr(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "logging": [logging.root.level, len(logging.root.handlers)],
        "exit callbacks": atexit._ncallbacks(),
        "threads": [t.name for t in threading.enumerate()],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
                  torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),
                  torch.get_float32_matmul_precision(), str(torch.get_default_device())],
        "blas": sorted((i["filepath"], i["num_threads"]) for i in threadpoolctl.threadpool_info()),
        "numpy": [numpy.geterr(), numpy.get_printoptions()],
        "random": hash(random.getstate()),
        "recursion": sys.getrecursionlimit(),
        "folder": os.getcwd(),
    }

before = snapshot()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import exptilt
    for name in exptilt.__all__:
        getattr(exptilt, name)
    STATEMENT
after_filters = snapshot()
changed = [key for key in before if before[key] != after_filters[key]]
optional = [name for name in OPTIONAL if name in sys.modules]
print(json.dumps({"changed": changed, "warnings": [str(w.message) for w in seen], "optional": optional}))
"""


def import_report(statement=""):
    """What changes in a fresh process when the package is imported and every public name is loaded."""
    import json

    code = SNAPSHOT.replace("STATEMENT", statement or "pass").replace(
        "OPTIONAL", repr(sorted(checks.OPTIONAL_LIBRARIES))
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    *noise, last = done.stdout.splitlines()
    return json.loads(last) | {"printed": noise + done.stderr.splitlines()}


def test_import_has_no_side_effects():
    assert import_report() == {"changed": [], "warnings": [], "optional": [], "printed": []}


def test_side_effects_would_be_seen():
    # torch is asked for a number of threads it does not have already, whatever the machine
    bad = (
        "import json as pandas; sys.modules['pandas'] = pandas; os.environ['EXPTILT'] = '1'; print('hello');"
        "warnings.warn('careful'); torch.set_num_threads(torch.get_num_threads() + 1); sys.excepthook = print"
    )
    report = import_report(bad)
    assert {"environment", "hooks", "torch"} <= set(report["changed"])
    assert report["warnings"] == ["careful"]
    assert report["optional"] == ["pandas"]
    assert report["printed"] == ["hello"]


def test_bare_import_is_light():
    code = "import sys, exptilt; print([m for m in ('torch', 'numpy', 'scipy') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.slow
def test_filters_load_neither_attention_nor_families():
    """They take longer to load than the rest of `switching`, and a first filter is waited for."""
    code = "import sys, exptilt.switching as s; s.SwitchingLinearGaussian, s.markov_autoregression;"
    code += "print([m for m in ('scipy', 'exptilt.families', 'exptilt.tilting') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def tracked_files():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files are tracked is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_machine_paths():
    found = []
    for path in tracked_files():
        try:
            source = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        found += checks.machine_paths(source, path.relative_to(ROOT).as_posix())
    assert found == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_what_a_page_says_of_the_files_is_true(page):
    text = (ROOT / page).read_text("utf-8")
    assert checks.ORDER in text
    mapped, quoted = checks.mapped_paths(text), checks.quoted_paths(text)
    assert len(mapped) > 15
    assert [path for path in mapped if not (ROOT / path).exists()] == []
    assert [path for path in quoted if not any((top / path).exists() for top in (PACKAGE, ROOT))] == []


def test_first_calls_load_nothing_that_they_do_not_need():
    """SciPy takes longer to import than this package; benchmarks/cold_start.py measures what is left."""
    import cold_start

    code = "".join(cold_start.CASES[name] for name in ("attend", "gradient", "filter"))
    assert cold_start.run(code, 1)["loaded"] == []


def test_makefile_targets():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    wanted = {"help", "setup", "native", "test", "test-slow", "test-all", "report", "bench", "lint", "clean"}
    assert checks.missing_targets(makefile, wanted) == []
    for name in ("setup", "test", "test-slow", "fuzz", "report", "bench", "docs"):  # an edit in csrc is seen
        assert re.search(rf"^{name}:.*\bnative\b.*##", makefile, flags=re.MULTILINE), name
    assert re.search(r"^\.DEFAULT_GOAL := help$", makefile, flags=re.MULTILINE)
    printed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {"make report", "make test", "make setup"} <= set(re.findall(r"make [a-z]+", printed))


def test_versions_agree():
    assert metadata.version("exptilt") == exptilt.__version__
    assert checks.changelog_version((ROOT / "CHANGELOG.md").read_text("utf-8")) == exptilt.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["tool"]["scikit-build"]["metadata"]["version"]["input"] == "src/exptilt/__init__.py"
    assert "version" in project["project"]["dynamic"]


def test_constraints_pin_everything_exactly():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = (
        project["project"]["dependencies"]
        + [text for extra in project["project"]["optional-dependencies"].values() for text in extra]
        + project["build-system"]["requires"]
    )
    assert {re.split(r"[^\w.-]", text)[0].lower() for text in asked} <= pinned
    assert "torch==2.13.0" in lines
    assert "torch==2.13.0" in (ROOT / "Makefile").read_text("utf-8")


def test_ci_runs_lint_then_all_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text("utf-8").splitlines()
    assert "set -euo pipefail" in lines
    assert lines.index("make lint") < lines.index("make test") < lines.index("make test-slow")
