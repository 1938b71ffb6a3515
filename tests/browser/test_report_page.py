"""The page in a real browser: nothing overflows, nothing is refused, dark follows the reader, sorting works."""

import shutil

import pytest

from exptilt.report import Page, Section, Table, example, write_page

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return example.write(example.compute(), tmp_path_factory.mktemp("page")).as_uri()


def open_page(browser, address, width=1280, scheme="light"):
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    page.complaints, page.requests = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(address)
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_example_page(browser, address, width, scheme):
    page = open_page(browser, address, width, scheme)
    assert page.complaints == []
    assert page.requests == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = [figure.bounding_box() for figure in page.locator("figure svg").all()]
    assert len(boxes) == 7
    assert all(box["width"] > 250 and box["height"] > 150 for box in boxes)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    columns = {1280: 3, 390: 1}[width]
    assert len({round(box["x"]) for box in boxes[:3]}) == columns

    def lightness(expression):
        red, green, blue = page.evaluate(f"{expression}.match(/\\d+/g).slice(0, 3).map(Number)")
        return (red + green + blue) / 3

    paper = lightness("getComputedStyle(document.body).backgroundColor")
    ink = lightness("getComputedStyle(document.querySelector('figure svg [stroke=currentColor]')).stroke")
    assert (paper > 200 and ink < 60) if scheme == "light" else (paper < 60 and ink > 200)


def test_tables_sort(browser, tmp_path):
    rows = (("b", 2.0), ("n", float("nan")), ("a", -1.0), ("c", 10.0))
    path = write_page(Page("t", "l", [Section("s", (), [Table("c", ("name", "value"), rows, sortable=True)])], None, ()), tmp_path)
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
    page.evaluate("document.body.appendChild(Object.assign(document.createElement('script'), {textContent: 'window.intruder = 1'}))")
    page.evaluate("document.body.appendChild(Object.assign(document.createElement('img'), {src: 'https://example.org/x.png'}))")
    page.wait_for_timeout(100)
    assert page.evaluate("window.intruder") is None
    assert len([text for text in page.complaints if "Content Security Policy" in text]) == 2
