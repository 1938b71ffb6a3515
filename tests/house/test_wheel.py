"""What is shipped: the wheel holds what it should, is small, and runs with base dependencies alone.

The quick test makes a wheel without the compiled core; the slow ones compile it, into the folder that
pyproject.toml names, so that a second run compiles nothing.
"""

import os
import platform
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder, *words):
    """The wheel that pip makes of this checkout, with the tools that are installed."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*command, *words, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("exptilt-*.whl")
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_what_it_should(tmp_path):
    names = set(zipfile.ZipFile(build(tmp_path, "-C", "wheel.cmake=false")).namelist())
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
    assert not [name for name in names if "_native" in name]


@pytest.mark.slow
def test_wheel_has_the_compiled_core_and_is_small(wheel):
    assert wheel.stat().st_size <= 6_000_000
    assert re.fullmatch(r"exptilt-[\d.]+-py3-none-(?!any)\w+\.whl", wheel.name)  # any Python, one platform
    names = zipfile.ZipFile(wheel).namelist()
    found = {match[1] for name in names if (match := re.match(r"exptilt/_native/libexptilt-(\w+)\.", name))}
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    assert found == ({"v2", "v3", "v4"} if x86 else {"arm"})
    assert not [name for name in names if not name.startswith(("exptilt/", "exptilt-"))]


def required(lines, found):
    """The distributions that are asked for without any extra, and those that they need here, by name."""
    for line in lines:
        name = re.match(r"[\w.-]+", line)[0]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if "extra ==" in line or key in found:
            continue
        try:
            found[key] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another system
            continue
        required(found[key].requires or (), found)
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
    (about,) = place.glob("exptilt-*.dist-info/METADATA")
    asked = re.findall(r"^Requires-Dist: (.*)$", about.read_text("utf-8"), flags=re.MULTILINE)
    own = [re.match(r"[\w.-]+", line)[0] for line in asked if "extra ==" not in line]
    assert sorted(own) == ["numpy", "scipy", "torch", "tqdm"]
    needed = required(asked, {})
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
a = xt.attend(q, k, v, causal=True, backend="cpu")
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
    # A report needs its libraries; a switching model is fitted without a page, and the status says so.
    for words, extra, status in ((["report"], "hf,report", 2), (["switch", "series.csv"], "report", 1)):
        done = run("-m", "exptilt", *words)
        assert done.returncode == status
        assert f"pip install 'exptilt[{extra}]'" in done.stderr.replace('"', "'")
        assert "Traceback" not in done.stderr
