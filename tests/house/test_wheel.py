"""What is shipped: the wheel holds what it should, is small, and runs with base dependencies alone."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("exptilt-*.whl")
    return file


def test_wheel_holds_what_it_should(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        f"exptilt/report/{name}" for name in ("templates/page.html", "assets/page.css", "assets/page.js")
    } <= names
    for folder in ("report/assets", "report/templates", "lens/models/shakespeare"):
        data = [
            path
            for path in (ROOT / "src/exptilt" / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
        assert data
        assert {path.relative_to(ROOT / "src").as_posix() for path in data} <= names
    assert "exptilt/report/assets/study/start.js" in names
    assert "exptilt/py.typed" in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert not [name for name in names if not name.startswith(("exptilt/", "exptilt-"))]
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources <= names


def test_wheel_is_small(wheel):
    assert wheel.stat().st_size <= 4_000_000


def required(name, found):
    """The distributions that `name` needs on this machine without any extra, itself too, by name."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return found
    try:
        found[key] = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # for another system
        return found
    for line in found[key].requires or ():
        if "extra ==" not in line:
            required(re.match(r"[\w.-]+", line)[0], found)
    return found


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The Python of an environment with the wheel and what it needs, linked to from this one: no network."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    words = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    place = Path(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip())
    zipfile.ZipFile(wheel).extractall(place)
    needed = required("exptilt", {})
    needed.pop("exptilt")
    assert {"torch", "numpy", "numba", "scipy", "tqdm"} <= set(needed)
    for distribution in needed.values():
        for top in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            source = Path(distribution.locate_file(top))
            if source.exists() and not (place / top).exists():
                try:
                    (place / top).symlink_to(source, target_is_directory=source.is_dir())
                except OSError as problem:
                    pytest.skip(f"this system makes no links: {problem}")
    return python


TRY = """
import sys, torch, exptilt as xt
for name in xt.__all__:
    getattr(xt, name)
q, k, v = torch.randn(3, 1, 2, 10, 4, generator=torch.Generator().manual_seed(0))
a = xt.attend(q, k, v, causal=True)
assert torch.allclose(a.entropy, a.log_normalizer - a.score_mean, atol=1e-5)
layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
with torch.no_grad(), xt.lens.watch(encoder) as seen:
    encoder(torch.randn(1, 5, 8))
assert seen.record.by_head("entropy").shape == (1, 2)
print([name for name in ("transformers", "matplotlib", "pandas", "safetensors") if name in sys.modules])
"""


@pytest.mark.slow
def test_wheel_runs_with_base_dependencies_alone(clean, tmp_path):
    def run(*words):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [str(clean), *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = run("-c", TRY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert "site-packages" in run("-c", "import exptilt; print(exptilt.__file__)").stdout
    for name in ("transformers", "pandas", "matplotlib"):
        assert run("-c", f"import {name}").returncode == 1
    assert "exptilt report" in run("-m", "exptilt").stdout
    assert run("-m", "exptilt", "--version").returncode == 0
    (tmp_path / "series.csv").write_text("y\n" + "\n".join(map(str, range(30))) + "\n")
    for words, extra in ((["report"], "hf"), (["switch", "series.csv"], "report")):
        done = run("-m", "exptilt", *words)
        assert done.returncode == 2
        assert f"pip install 'exptilt[{extra}]'" in done.stderr.replace('"', "'")
        assert "Traceback" not in done.stderr
