"""The site that `make docs` builds: nothing missing or from elsewhere, readable on a phone, searchable."""

import html
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from browser.chromium import open_page
from exptilt import claims
from exptilt._support.former import FORMER

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index.html", "start/attention.html", "recipes/heads.html", "benchmarks/index.html", "theory.html")
REFERENCE = "reference/exptilt/attend.html"

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_page_for_each_public_name_and_an_anchor_for_each_claim(site):
    names = json.loads((ROOT / "tests" / "data" / "public_names.json").read_text("utf-8"))
    top = set(names["exptilt"])
    for module, those in names.items():
        for name in those:
            if f"exptilt.{name}" in names or name == "__version__":
                continue
            if name in FORMER.get(module.removeprefix("exptilt."), {}):  # it goes, and warns
                continue
            page = site / "reference" / ("exptilt" if name in top else module) / f"{name}.html"
            assert page.is_file(), f"{module}.{name}"
    theory = (site / "theory.html").read_text("utf-8")
    ids = [claim.id.lower() for claim in claims.every()]
    assert len(ids) > 40
    assert [id for id in ids if f'id="{id}"' not in theory] == []
    linked = [page for page in site.rglob("reference/**/*.html") if "theory.html#" in page.read_text("utf-8")]
    assert linked
    assert not re.search("THEORY [A-H]", "".join(page.read_text("utf-8") for page in linked))


def test_no_formula_of_a_docstring_is_lost(site):
    """What stands in angle brackets is no HTML, and lines that are set in are shown as they are."""
    hooks = runpy.run_path(str(ROOT / "book" / "hooks.py"))
    lost, seen = [], 0
    for module, names in hooks["public_names"]().items():
        for name in names:
            said = hooks["found"](module, name).docstring
            page = (site / "reference" / module / f"{name}.html").read_text("utf-8")
            shown = html.unescape(re.sub(r"<[^>]*>", "", page))
            parts = re.findall(r"<[^<>\n`]{1,40}>|⟨[^⟩\n]{1,40}⟩", said.value if said else "")
            formulas = re.split(r"\n[A-Z]\w+:\n", said.value if said else "")[0].splitlines()
            parts += [line for line in formulas if re.match(" {4}[^ >.]", line)]
            seen += len(parts)
            bare = re.sub(r"[\s`*\\]+", "", shown)
            lost += [(name, part) for part in parts if re.sub(r"[\s`*\\]+", "", part) not in bare]
    assert seen > 10
    assert lost == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", [*PAGES, REFERENCE])
def test_pages_stand_alone_at_every_width(site, browser, name, width):
    page = open_page(browser, (site / name).as_uri(), width=width)
    try:
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        across = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(across) == 0
        wide = "[...document.querySelectorAll('.maths')].filter((x) => x.scrollWidth > x.clientWidth).length"
        assert page.evaluate(wide) == 0  # formulas wrap
        broken = "[...document.images].filter((image) => image.complete && !image.naturalWidth).length"
        assert page.evaluate(broken) == 0
        assert page.evaluate("[...document.images].every((image) => image.alt)")
    finally:
        page.context.close()


def test_formulas_that_stand_alone_are_set(site):
    """$$ ... $$ on a line of its own is MathML on every page; none is left as it was typed."""
    for path in (ROOT / "docs").rglob("*.md"):
        asked = re.findall(r"^\$\$.+\$\$$", path.read_text("utf-8"), flags=re.MULTILINE)
        if asked:
            page = (site / path.relative_to(ROOT / "docs").with_suffix(".html")).read_text("utf-8")
            assert page.count('<div class="maths"') == len(asked)
            assert "$$" not in page


def test_search_finds_a_name_from_the_disk(site, browser):
    page = open_page(browser, (site / "recipes" / "heads.html").as_uri())
    try:
        page.click(".md-search__input")
        ready = "!document.querySelector('.md-search-result__meta').textContent.includes('Initializing')"
        page.wait_for_function(ready)
        page.locator(".md-search__input").press_sequentially("fisher_vector_product")
        page.wait_for_selector(".md-search-result__link")
        found = page.locator(".md-search-result__link").first.get_attribute("href")
        assert "fisher_vector_product" in found
    finally:
        page.context.close()


def test_code_is_copied_without_prompts_and_output(site, browser):
    page = open_page(browser, (site / "recipes" / "heads.html").as_uri())
    try:
        block = page.locator("pre > code").first
        block.evaluate("(code) => code.setAttribute('data-md-copying', '')")
        text = block.evaluate("(code) => code.innerText")
        assert text.startswith("import torch")
        assert ">>>" not in text
        assert "[[" not in text
        compile(text, "copied", "exec")
    finally:
        page.context.close()
