"""The page of curvature in a real browser: it fits, nothing is refused, tables sort."""

from pathlib import Path

import pytest
import torch

from browser.chromium import open_page
from exptilt._support.solution import Solution, Status
from exptilt.curvature.estimates import SpectralDensity
from exptilt.curvature.influence import Influence
from exptilt.report import write_curvature

pytestmark = pytest.mark.browser
LAYERS = [f"transformer.h.{i}" for i in range(7)]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Seven layers at four steps, with numbers over six orders of magnitude, and long texts."""
    g = torch.Generator().manual_seed(0)

    def spectrum(size):
        nodes = (torch.randn(2, 6, generator=g) * 5).exp().double() * torch.tensor([-1, 1, 1, 1, 1, 1])
        weights = torch.rand(2, 6, generator=g).double().softmax(-1)
        return SpectralDensity(nodes, weights, (nodes, weights), size)

    spectra = {step: {name: spectrum(132_480) for name in LAYERS} for step in (0, 256, 1024, 4096)}
    texts = [f"To be, or not to be {i}, that is the question: " * 6 + "x" * 200 for i in range(12)]
    solution = Solution.of(torch.zeros(3), Status.CONVERGED, torch.tensor(1e-4), 9)
    found = Influence(torch.linspace(-1, 1, 12), solution)
    folder = tmp_path_factory.mktemp("curvature")
    return write_curvature(spectra, folder, influence=found, texts=texts, sources=["made up"]).as_uri()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1440, "light"),
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
    boxes = [figure.bounding_box() for figure in page.locator("figure svg").all()]
    assert len(boxes) == 3
    assert all(box["width"] > 250 and box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run().then((result) => result.violations.map((v) => [v.id, v.nodes[0].html]))")
    assert found == []
    page.context.close()


def test_a_table_sorts_by_a_step(browser, address):
    page = open_page(browser, address)
    table = page.locator("table.sortable").first
    table.get_by_role("button", name="step 4096").click()
    values = [float(cell.get_attribute("data-value")) for cell in table.locator("td:nth-child(5)").all()]
    assert len(values) == len(LAYERS)
    assert values in (sorted(values), sorted(values, reverse=True))
    page.context.close()
