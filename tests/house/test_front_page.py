"""The first screen of README and site: its number is the one measured, and its installation is possible."""

import json
import re
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
    row = next(row for row in rows if row["n"] == tokens)
    assert (ours, theirs) == (round(row["exptilt"] / 1e6), round(row["math attention"] / 1e6))


@pytest.mark.parametrize("page", PAGES)
def test_the_package_is_installed_from_a_checkout_until_it_is_published(page):
    """`pip install exptilt` is true only once a release is out: then README and this test change together."""
    text = (ROOT / page).read_text("utf-8")
    assert "pip install ." in text
    assert "pip install torch==2.13.0" in text
    assert "pip install exptilt" not in text


def test_the_navigation_names_every_page_once():
    pages = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert len(pages) == len(set(pages))
