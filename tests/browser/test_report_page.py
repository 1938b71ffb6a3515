"""The shell of every page in a real browser: it fits, nothing is refused, it turns dark, tables sort."""

import pytest

from browser.chromium import open_page
from exptilt.report import Figure, Page, Section, Table, figures, write_page
from exptilt.report.regimes import write_regimes
from report.made import HOSTILE, make_regimes

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    pictures = [
        Figure(figures.draw(f"f{i}", lambda axes: axes.plot([1, 2, 4])), "A line that rises.", "It rises.")
        for i in range(3)
    ]
    wide = Table("wide", ("name", *"abcdefghijkl"), (("row", *(1234.5678 * k for k in range(12))),))
    return write_page(
        Page("t", "lead", [Section("s", ("text " * 30,), (*pictures, wide))], 0, ()),
        tmp_path_factory.mktemp("page"),
    ).as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_shell(browser, address, width, scheme):
    page = open_page(browser, address, width, scheme)
    assert page.complaints == []
    assert page.requests == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [figure.bounding_box() for figure in page.locator("figure svg").all()]
    assert len(boxes) == 3
    assert all(box["width"] > 250 and box["height"] > 150 for box in boxes)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert len({round(box["x"]) for box in boxes}) == {1280: 3, 390: 1}[width]

    def lightness(expression):
        red, green, blue = page.evaluate(f"{expression}.match(/\\d+/g).slice(0, 3).map(Number)")
        return (red + green + blue) / 3

    paper = lightness("getComputedStyle(document.body).backgroundColor")
    ink = lightness("getComputedStyle(document.querySelector('figure svg [stroke=currentColor]')).stroke")
    assert (paper > 200 and ink < 60) if scheme == "light" else (paper < 60 and ink > 200)


@pytest.mark.parametrize("width", [1280, 390])
def test_regimes(browser, tmp_path, width):
    path, _ = write_regimes(make_regimes(columns=("price", HOSTILE)), tmp_path)
    page = open_page(browser, path.as_uri(), width)
    assert page.complaints == []
    assert page.requests == [path.as_uri()]
    assert page.evaluate("window.bad") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = [box for box in page.locator("figure .picture").all() if box.is_visible()]
    assert len(shown) == 1  # the drawing for this width
    assert shown[0].bounding_box()["width"] > 0.85 * min(width, 1088)
    assert page.get_by_text(HOSTILE).first.is_visible()


def test_tables_sort(browser, tmp_path):
    rows = (("b", 2.0), ("n", float("nan")), ("a", -1.0), ("c", 10.0))
    path = write_page(
        Page("t", "l", [Section("s", (), [Table("c", ("name", "value"), rows, sortable=True)])], None, ()),
        tmp_path,
    )
    page = open_page(browser, path.as_uri())
    names = page.locator("tbody th")
    assert names.all_inner_texts() == ["b", "n", "a", "c"]
    page.get_by_role("button", name="value").click()
    assert names.all_inner_texts() == ["a", "b", "c", "n"]
    assert page.locator("thead th").last.get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="value").click()
    assert names.all_inner_texts() == ["c", "b", "a", "n"]
    assert page.complaints == []


def test_policy_holds(browser, address):
    page = open_page(browser, address)
    add = "([tag, facts]) => document.body.appendChild(Object.assign(document.createElement(tag), facts))"
    page.evaluate(add, ["script", {"textContent": "window.intruder = 1"}])
    page.evaluate(add, ["img", {"src": "https://example.org/x.png"}])
    page.wait_for_timeout(100)
    assert page.evaluate("window.intruder") is None
    assert len([text for text in page.complaints if "Content Security Policy" in text]) == 2
