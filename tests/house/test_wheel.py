"""What is shipped: the wheel holds the templates, styles and licence, and nothing that is not the package."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_wheel_holds_what_it_should(tmp_path):
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("exptilt-*.whl")
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
