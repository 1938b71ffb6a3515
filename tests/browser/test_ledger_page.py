"""The page of the ledger in a real browser: it fits, nothing is refused, verdicts filter, the plane plays."""

from pathlib import Path

import pytest

from browser.chromium import open_page
from exptilt import claims
from exptilt.report.ledger import write_ledger

pytestmark = pytest.mark.browser
IDS = ("A1", "A8", "A10", "B1", "C4", "E5", "E8")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed")
    return write_ledger(list(claims.run(IDS, seeds=2)), tmp_path_factory.mktemp("ledger")).as_uri()


@pytest.fixture
def page(browser, address):
    page = open_page(browser, address)
    yield page
    assert page.complaints == []
    assert page.requests == [address]
    page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
        pytest.param(390, "light", marks=pytest.mark.slow),
    ],
)
def test_it_fits_and_is_accessible(browser, address, width, scheme):
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    page = open_page(browser, address, width, scheme)
    assert page.complaints == []
    assert page.requests == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".claim").count() == len(IDS)
    corrected = [id for id in IDS if claims.find(id).printed]  # as printed and corrected, side by side
    assert page.locator(".maths:has(math)").count() == len(IDS) + len(corrected) > len(IDS)
    assert page.get_by_text("\\").count() == 0  # no LaTeX is left over
    boxes = [figure.bounding_box() for figure in page.locator(".claim figure svg").all()]
    assert len(boxes) == len(IDS)
    assert all(box["width"] > 250 and box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run().then((result) => result.violations.map((v) => [v.id, v.nodes[0].html]))")
    assert found == []
    page.context.close()


def test_verdicts_filter(page):
    shown = page.locator(".claim:visible h3")
    assert shown.count() == len(IDS)
    page.get_by_role("checkbox", name="holds exactly").uncheck()
    assert [text.split(" ")[0] for text in shown.all_inner_texts()] == ["A8", "A10", "E5", "E8"]
    assert page.locator("#shown").inner_text() == f"4 of {len(IDS)} claims are shown."
    assert page.locator("h2", has_text="Memory").is_hidden()
    page.locator(".board a", has_text="C4").click()  # a link to what is hidden shows it
    assert page.locator("#C4").is_visible()


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "left"), [("sphere", 1), ("batch", 2), ("whiten", 3)])
def test_points_gather_as_the_theory_says(page, norm, left):
    page.select_option("#norm", norm)
    page.fill("#count", "20")
    page.fill("#size", "0.5")
    page.evaluate("for (let i = 0; i < 400; i++) document.getElementById('once').click()")
    assert page.locator("#said").inner_text().startswith(f"Step 400: {left} of 20 points")


def test_the_plane_plays_and_pauses(page):
    page.select_option("#norm", "none")
    said = page.locator("#said")
    assert said.inner_text().startswith("Step 0")
    page.click("#play")
    page.wait_for_function("!document.getElementById('said').textContent.startsWith('Step 0')")
    page.click("#play")
    assert page.locator("#play").inner_text() == "Play"
    page.fill("#beta", "3")
    assert page.locator("#beta-value").inner_text() == "3"
    page.click("#anew")
    assert said.inner_text().startswith("Step 0")


def test_without_scripts_it_reads_the_same(browser, address):
    page = open_page(browser, address, script=False)
    assert page.locator(".claim").count() == len(IDS)
    assert page.locator("#plane").is_hidden()
    assert page.get_by_text("The landscape can be played here if scripts are switched on.").is_visible()
    page.context.close()
