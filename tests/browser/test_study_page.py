"""The page of a study in a real browser, by mouse, by keyboard, on a phone, on paper, without scripts."""

import dataclasses

import numpy as np
import pytest

from browser.chromium import COLOUR, contrast, luminance, open_page
from exptilt.lens import Picture
from exptilt.lens.studying.results import HeadMeasure
from exptilt.report import write
from report.made import HOSTILE, make_study

pytestmark = pytest.mark.browser
START = "#L0H0:entropy"  # without it a page opens at its first finding


@pytest.fixture(scope="module")
def made():
    return make_study()


@pytest.fixture(scope="module")
def address(made, tmp_path_factory):
    return write(made, tmp_path_factory.mktemp("page")).as_uri()


@pytest.fixture
def page(browser, address):
    page = open_page(browser, address + START)
    yield page
    assert page.complaints == []
    assert page.requests == [address]
    assert page.evaluate("window.bad") is None
    page.context.close()


def cell(page, layer, head):
    return page.locator(f'td[data-layer="{layer}"][data-head="{head}"]')


def colours(page):
    return page.locator("td[data-layer]").evaluate_all(
        "cells => cells.map((cell) => getComputedStyle(cell).backgroundColor)"
    )


def test_everything_is_drawn(page, made):
    assert page.locator("td[data-layer]").count() == 16
    assert len(set(colours(page))) > 8
    assert (
        page.locator("[data-curve] svg path.line").count() == 1 + 5 + 1
    )  # one line, a spectrum of five places, one line
    assert page.locator("[data-curve] svg path.band").count() == 1
    assert page.locator("#training-charts svg").count() == 3  # loss, entropy, norm
    assert page.locator("#head .small svg rect.bar").count() == 2 * 20
    assert (
        page.evaluate(
            "document.querySelector('canvas.matrix').getContext('2d').getImageData(0, 0, 1, 1).data[3]"
        )
        > 200
    )
    assert page.locator("#head .tokens tbody tr").count() == 12
    assert "queries and keys are of different sizes" in page.locator("#head .statistics").all_inner_texts()[0]
    assert page.locator(".unscripted").first.is_hidden()


def test_values_are_the_study_s(page, made):
    value = made.heads["entropy"].value[2, 1]
    assert cell(page, 2, 1).locator("span").inner_text() == f"{value:.2g}"
    cell(page, 2, 1).hover()
    assert f"Layer 2, head 1: entropy {value:.3f}" in page.locator("#heat-readout").inner_text()
    np.testing.assert_array_less(
        0, [float(text) for text in page.locator("td[data-layer] span").all_inner_texts()]
    )


def test_darkest_is_highest(page, made):
    order = np.argsort(made.training.heads["entropy"][-1].ravel())
    shades = [page.evaluate(COLOUR, colour) for colour in colours(page)]
    brightness = np.array([sum(shade) for shade in shades])[order]
    assert (np.diff(brightness) <= 3).all()


def test_chooser_changes_the_heatmap(page, made):
    before = colours(page)
    page.select_option("#measure", "ascent")
    assert colours(page) != before
    assert "ascent cosine" in page.locator("#legend").inner_text()
    assert "Against the baseline" in page.locator("#heat-reading").inner_text()
    assert "What ascent cosine tells." in page.locator("#heat-about").text_content()
    page.select_option("#measure", "symmetry")
    assert cell(page, 0, 1).get_attribute("aria-label") == "layer 0, head 1: no value"
    assert page.locator("#measure option[value=definite]").is_disabled()
    assert page.url.endswith("#L0H0:symmetry")


def test_a_head_opens_by_click(page):
    cell(page, 3, 2).click()
    assert page.locator("#head h3").inner_text() == "Layer 3, head 2"
    assert cell(page, 3, 2).get_attribute("aria-selected") == "true"
    assert page.url.endswith("#L3H2:entropy")
    page.get_by_role("button", name="Next head").click()
    assert page.locator("#head h3").inner_text() == "Layer 3, head 3"


def test_a_head_opens_by_keyboard(page):
    page.locator("#measure").focus()
    for _ in range(4):  # past the kinds and the slider, into the grid
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.layer") is not None:
            break
    assert page.evaluate("document.activeElement.dataset.layer") == "0"
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp", "End"):
        page.keyboard.press(key)
    assert page.evaluate("[document.activeElement.dataset.layer, document.activeElement.dataset.head]") == [
        "0",
        "3",
    ]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#head h3").inner_text() == "Layer 1, head 3"
    assert page.evaluate("document.activeElement.tagName") == "H3"


@pytest.mark.parametrize("width", [1280, 390])
def test_addresses_open_heads(browser, address, width):
    from playwright.sync_api import expect

    page = open_page(browser, address + "#L2H3:first_token_mass", width=width)
    assert page.locator("#head h3").inner_text() == "Layer 2, head 3"
    assert page.locator("#measure").input_value() == "first_token_mass"
    page.locator(".cards p a").first.click()  # the address changes a moment after the click
    page.wait_for_function("location.hash.startsWith('#' + DATA.first)")
    expect(page.locator("#head h3")).to_be_in_viewport(timeout=30_000)  # on a phone the page scrolls to it
    page.evaluate("location.hash = '#L99H99'")
    assert page.complaints == []
    page.context.close()


@pytest.mark.parametrize("mark", ["#%", "#L1H1:%", "#L1H1:100%25", "#%E0%A4%A", "#L1H1:no_such_statistic"])
def test_strange_addresses_do_no_harm(browser, address, mark):
    page = open_page(browser, address + mark)
    assert page.locator("td[data-layer]").count() == 16
    first = page.evaluate("DATA.first.split(':')[0].replace('L', 'Layer ').replace('H', ', head ')")
    assert page.locator("#head h3").inner_text() == ("Layer 1, head 1" if "L1H1" in mark else first)
    assert page.complaints == []
    page.context.close()


def test_attention_follows_the_chosen_token(page, made):
    strip = made.details[0].strip
    page.locator(".token").nth(5).click()
    assert page.locator(".token").nth(5).get_attribute("aria-pressed") == "true"
    best = int(strip[5].argmax())
    assert f"(token {best})" in page.locator(".attention .readout").inner_text()
    labels = page.locator(".token").evaluate_all(
        "words => words.map((word) => word.getAttribute('aria-label'))"
    )
    shares = np.array([float(label.split(" gets ")[1].removesuffix(" %")) / 100 for label in labels])
    np.testing.assert_allclose(shares, strip[5], atol=0.01)
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.query").get_attribute("data-index") == "6"


def test_slider_turns_heatmap_and_curves(page, made):
    page.locator("#heat-step").focus()
    page.keyboard.press("Home")
    assert page.locator("#heat-step-shown").inner_text() == "step 0"
    assert page.locator("#heat-reading").inner_text().startswith("At step 0: from ")
    assert page.locator("#marks").inner_text() == ""
    assert page.locator("#train-step").input_value() == "0"
    shown = [float(text) for text in page.locator("td[data-layer] span").all_inner_texts()]
    np.testing.assert_allclose(shown, made.training.heads["entropy"][0].ravel(), rtol=0.05)
    first = page.locator("#training-charts line.cursor").first.get_attribute("x1")
    page.locator("#train-step").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#training-charts line.cursor").first.get_attribute("x1") != first
    assert page.locator("#heat-step-shown").inner_text() == "step 1"
    page.get_by_role("button", name="Play").click()
    page.locator("#heat-step-shown", has_text="step 10").wait_for(timeout=10_000)
    page.get_by_role("button", name="Stop").click()


def test_one_stop_for_each_checkpoint(browser, made, tmp_path):
    """A model that is its own last checkpoint has one stop on the slider, not two."""
    study = dataclasses.replace(made, training=dataclasses.replace(made.training, ends_with_studied=True))
    page = open_page(browser, write(study, tmp_path).as_uri())
    opened = page.evaluate("DATA.first.split(':')[0].replace('L', 'Layer ').replace('H', ', head ')")
    assert page.locator("#head h3").inner_text() == opened  # the page opens at its first finding
    assert page.locator("#heat-step").get_attribute("max") == str(len(made.training.steps) - 1)
    assert page.locator("#heat-step-shown").inner_text() == "step 3000, the model studied"
    page.context.close()


def test_attention_beyond_the_strip_is_told(browser, made, tmp_path):
    """A model that sees ahead may look at tokens after those shown: the most of these is not the most."""
    details = [dataclasses.replace(d, strip=0.1 * np.asarray(d.strip)) for d in made.details]
    page = open_page(browser, write(dataclasses.replace(made, details=details), tmp_path).as_uri() + START)
    said = page.locator(".attention .readout").inner_text()
    assert "of those shown, most goes to" in said
    assert "Beyond the tokens shown goes 9" in said
    page.context.close()


def test_the_last_checkpoint_is_not_the_model_studied(browser, made, tmp_path):
    early = dataclasses.replace(
        made,
        heads={
            k: dataclasses.replace(m, value=None if m.value is None else 0.5 * m.value)
            for k, m in made.heads.items()
        },
    )
    kept = {name: values for name, values in made.training.heads.items() if name != "symmetry"}
    early = dataclasses.replace(early, training=dataclasses.replace(made.training, heads=kept))
    page = open_page(browser, write(early, tmp_path).as_uri() + START)

    def shown():
        return [float(text) for text in page.locator("td[data-layer] span").all_inner_texts()]

    assert page.locator("#heat-step-shown").inner_text() == "the model studied"
    assert page.locator("#heat-step").get_attribute("aria-valuetext") == "the model studied"
    np.testing.assert_allclose(shown(), early.heads["entropy"].value.ravel(), rtol=0.05)
    assert page.locator("#training-charts line.cursor").first.get_attribute("visibility") == "hidden"
    assert "±" in page.locator("#heat-readout").inner_text()

    page.locator("#heat-step").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#heat-step-shown").inner_text() == "step 3000"
    np.testing.assert_allclose(shown(), made.training.heads["entropy"][-1].ravel(), rtol=0.05)
    assert page.locator("#training-charts line.cursor").first.get_attribute("visibility") == "visible"
    assert "±" not in page.locator("#heat-readout").inner_text()
    assert page.locator("#heat-reading").inner_text().startswith("At step 3000: from ")
    assert "statistics of step 3000; pictures" in page.locator("#head").inner_text()
    row = page.locator(".statistics tr", has_text="entropy").first.inner_text()
    assert float(row.split()[1]) == pytest.approx(made.training.heads["entropy"][-1][0, 0], rel=0.01)

    page.select_option("#measure", "symmetry")
    assert (
        page.locator("#heat-reading")
        .inner_text()
        .startswith("Not followed over the checkpoints; shown is the model studied, not step 3000.")
    )
    page.get_by_role("button", name="Play").click()
    assert page.locator("#heat-step-shown").inner_text() == "step 0"
    assert page.complaints == []
    page.context.close()


def test_strange_tokens_show_as_text(page):
    assert HOSTILE in page.locator(".strip").inner_text()
    assert HOSTILE in page.locator(".tokens").inner_text()
    text = page.locator(".strip").inner_text()
    for sign in ("↵", "⇥", "⟨U+202E⟩", "∅", "&lt;b&gt;"):
        assert sign in text
    assert page.title() == "Attention in made <b>up</b>"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(browser, address, scheme):
    page = open_page(browser, address, scheme=scheme)
    for name in ("entropy", "score_variance", "ascent"):
        page.select_option("#measure", name)
        pairs = page.locator("td[data-layer]").evaluate_all(
            "all => all.map((c) => getComputedStyle(c)).map((style) => [style.color, style.backgroundColor])"
        )
        for pair in pairs:
            assert contrast(*(page.evaluate(COLOUR, colour) for colour in pair)) >= 4.4
    pairs = page.locator(".token").evaluate_all(
        "words => words.map((c) => { const s = getComputedStyle(c); return [s.color, s.backgroundColor]; })"
    )
    for ink, paper in pairs:
        if paper != "rgba(0, 0, 0, 0)":
            assert contrast(page.evaluate(COLOUR, ink), page.evaluate(COLOUR, paper)) >= 4.4
    body = page.evaluate(
        "(() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; })()"
    )
    ink, paper = (page.evaluate(COLOUR, colour) for colour in body)
    assert contrast(ink, paper) >= 7
    assert (sum(paper) > 600) == (scheme == "light")
    note = page.locator(".note:visible").first.evaluate("(n) => getComputedStyle(n).color")
    assert contrast(page.evaluate(COLOUR, note), paper) >= 4.5
    page.context.close()


@pytest.mark.parametrize(("layers", "heads"), [(4, 4), pytest.param(18, 20, marks=pytest.mark.slow)])
def test_no_sideways_scroll(browser, tmp_path, layers, heads):
    path = write(make_study(layers, heads, size=24), tmp_path)
    for width in (360, 390, 768, 1000):
        page = open_page(browser, path.as_uri(), width)
        page.locator("details").evaluate_all("(all) => { for (const details of all) details.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = "all => all.filter((part) => part.scrollWidth > part.clientWidth).length"
        assert page.locator("#head .scroll, #meanings-table + .scroll").evaluate_all(cut) == 0
        assert page.complaints == []
        page.context.close()


def test_on_paper(browser, address):
    page = open_page(browser, address, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("nav").is_hidden()
    assert page.locator("#heads-table").is_visible()
    page.set_viewport_size({"width": 794, "height": 1123})  # A4
    assert page.evaluate("document.documentElement.scrollWidth") <= 794
    assert (
        sum(page.evaluate(COLOUR, page.evaluate("getComputedStyle(document.body).backgroundColor")))
        == 3 * 255
    )
    assert len(page.pdf()) > 20_000
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 1  # all heads at a glance
    page.context.close()


def test_without_scripts(browser, address, made):
    page = open_page(browser, address, script=False)
    assert page.locator(".unscripted").first.is_visible()
    assert page.locator("#heatmap").is_hidden()
    page.locator("summary:visible").first.click()
    assert page.locator("details table").first.is_visible()
    assert page.locator("details table tbody tr").count() >= 16
    assert page.get_by_text(made.layers["gaussian"].reason).count()
    page.context.close()


def test_one_outlier_does_not_wash_out_the_rest(browser, made, tmp_path):
    value = np.linspace(0.1, 0.9, 16).reshape(4, 4)
    value[3, 3] = -170.0
    study = dataclasses.replace(make_study(steps=()), heads={"r2": HeadMeasure("R²", "", "about", "", value)})
    page = open_page(browser, write(study, tmp_path).as_uri())
    assert len(set(colours(page))) >= 14
    assert "≤" in page.locator("#legend .ends").inner_text()
    assert page.complaints == []
    page.context.close()


def test_a_study_with_no_head_measure(browser, made, tmp_path):
    study = dataclasses.replace(
        made, heads={"x": HeadMeasure("x", "", "a", "", None, reason="none seen.")}, training=None, details=[]
    )
    page = open_page(browser, write(study, tmp_path).as_uri())
    assert page.complaints == []
    assert page.get_by_text("none seen.").count()
    page.context.close()


def test_kinds_step_aside_and_thumbnails_open_heads(browser, made, tmp_path):
    value = np.full((4, 4), 0.1)
    value[2, 1] = 0.9
    previous = dataclasses.replace(made.heads["entropy"], title="previous", value=value, error=0.01 * value)
    study = dataclasses.replace(made, heads={**made.heads, "previous_mass": previous})
    page = open_page(browser, write(study, tmp_path).as_uri())
    assert page.locator("#kind option").all_inner_texts()[:2] == ["all heads", "previous token (1)"]
    page.select_option("#kind", "previous token")
    aside = page.locator("td[data-layer]").evaluate_all(
        "all => all.map((c) => c.classList.contains('aside'))"
    )
    assert [index for index, away in enumerate(aside) if not away] == [9]
    page.get_by_role("button", name="Open layer 2, head 1: previous token").click()
    assert page.locator("#head h3").inner_text() == "Layer 2, head 1"
    assert page.locator("#head .chips").inner_text() == "previous token"
    painted = page.locator(".thumbnails canvas").first.evaluate(
        "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x > 0)"
    )
    assert painted
    assert page.complaints == []
    page.context.close()


def test_heads_that_differ_by_nothing_look_alike(browser, made, tmp_path):
    rng = np.random.default_rng(0)
    value = 4.0 + 0.01 * rng.standard_normal((4, 4))
    flat = dataclasses.replace(made.heads["entropy"], value=value, error=np.full((4, 4), 0.01))
    study = dataclasses.replace(made, heads={"entropy": flat}, training=None)
    page = open_page(browser, write(study, tmp_path).as_uri())
    colours = page.locator("td[data-layer]").evaluate_all(
        "all => all.map((c) => getComputedStyle(c).backgroundColor)"
    )
    shades = [luminance(page.evaluate(COLOUR, colour)) for colour in colours]
    assert max(shades) - min(shades) < 0.12  # black to white is 1
    assert "heads differ by little" in page.locator("#legend").inner_text()
    page.context.close()


def test_two_studies_side_by_side(browser, made, tmp_path):
    entropy = made.heads["entropy"]
    other = dataclasses.replace(
        made,
        name="the other",
        heads={**made.heads, "entropy": dataclasses.replace(entropy, value=2 * entropy.value)},
    )
    page = open_page(browser, write(made, tmp_path, against=other).as_uri() + START)

    def shown():
        texts = page.locator("td[data-layer] span").all_inner_texts()
        return [float(text.replace("−", "-")) for text in texts]

    page.select_option("#side", "other")
    np.testing.assert_allclose(shown(), 2 * entropy.value.ravel(), rtol=0.05)
    page.select_option("#side", "difference")
    np.testing.assert_allclose(shown(), -entropy.value.ravel(), rtol=0.05)
    assert "difference from the other" in page.locator("#legend").inner_text()
    assert "±" in page.locator("#heat-readout").inner_text()
    assert page.locator("#against-table").is_visible()
    assert page.complaints == []
    page.context.close()


def test_theory_is_behind_a_fold(browser, made, tmp_path):
    link = dataclasses.replace(made.heads["entropy"], title="link: symmetry")
    study = dataclasses.replace(made, heads={**made.heads, "link_symmetry": link})
    page = open_page(browser, write(study, tmp_path).as_uri())
    assert "link: symmetry" in page.locator("#measure optgroup[label=Theory]").inner_text()
    row = page.locator("#head details tr", has_text="link: symmetry")
    assert row.is_hidden()
    page.locator("#head details summary").click()
    page.get_by_role("button", name="Next head").click()
    assert row.is_visible()  # the fold stays as it was left
    page.context.close()


def test_attention_is_drawn_on_a_picture(browser, made, tmp_path):
    pixels = np.zeros((8, 12, 3))
    pixels[..., 0] = 255
    study = dataclasses.replace(made, picture=Picture(pixels, 1, 3, 5))
    page = open_page(browser, write(study, tmp_path).as_uri() + START)
    assert "Attention over a picture" in page.locator("#head").inner_text()
    assert page.locator(".patches .token").count() == 15
    red = "(c) => [...c.getContext('2d').getImageData(5, 5, 1, 1).data]"
    assert page.locator("canvas.pixels").evaluate(red) == [255, 0, 0, 255]
    page.locator(".patches .token").nth(6).click()
    page.keyboard.press("ArrowDown")
    assert page.locator(".token.query").get_attribute("data-index") == "12"
    share = made.details[0].strip[12]
    shades = page.locator(".patch").evaluate_all("all => all.map((word) => word.style.background)")
    alpha = [float(shade.split(",")[3].strip(" )")) if shade.startswith("rgba") else 0.0 for shade in shades]
    assert int(np.argmax(alpha)) == int(share[1:].argmax())
    assert page.complaints == []
    page.context.close()


def test_the_slider_moves_the_open_head(browser, made, tmp_path):
    strips = np.zeros((9, 4, 4, 8, 8))
    strips[..., np.arange(8), np.arange(8)] = 1.0
    strips[1, ..., :] = 0.0
    strips[1, ..., 0] = 1.0
    study = dataclasses.replace(made, training=dataclasses.replace(made.training, strips=strips))
    page = open_page(browser, write(study, tmp_path).as_uri())
    assert page.locator(".token").count() == 16
    page.locator("#heat-step").focus()
    page.keyboard.press("Home")
    assert page.locator(".token").count() == 8
    page.locator(".token").nth(3).click()
    assert "most goes to" in page.locator(".attention .readout").inner_text()
    assert "(token 3): 100 %" in page.locator(".attention .readout").inner_text()
    page.locator("#heat-step").focus()
    page.keyboard.press("ArrowRight")
    assert "(token 0): 100 %" in page.locator(".attention .readout").inner_text()
    assert "statistics and attention of step 1;" in page.locator("#head").inner_text()
    assert page.complaints == []
    page.context.close()


def test_claims_are_links_to_their_statements(browser, made, tmp_path):
    named = dataclasses.replace(made.heads["entropy"], about="Whether it climbs (F3).")
    study = dataclasses.replace(made, heads={"entropy": named})
    page = open_page(browser, write(study, tmp_path).as_uri())
    assert page.locator("#claim-F3").is_hidden()
    page.locator(".overview summary").click()
    page.locator("#heat-about a", has_text="(F3)").click()
    page.locator("#claim-F3").wait_for(state="visible")
    assert page.locator("#meanings-table + .scroll a").first.get_attribute("href") == "#claim-F3"
    assert page.complaints == []
    page.context.close()


def test_p_values_are_on_a_logarithmic_axis(browser, made, tmp_path):
    places = made.layers["norm"].places
    p = dataclasses.replace(made.layers["norm"], value=np.array([0.5, 1e-3, 1e-8, 0.0, 1.0]), error=None)
    study = dataclasses.replace(made, layers={"gaussian_p": dataclasses.replace(p, places=places)})
    page = open_page(browser, write(study, tmp_path).as_uri())
    heights = page.locator("[data-curve] circle").evaluate_all(
        "all => all.map((c) => Number(c.getAttribute('cy')))"
    )
    ends = heights[4], heights[3]
    shares = (np.array(heights) - ends[1]) / (ends[0] - ends[1])
    np.testing.assert_allclose(shares, 1 + np.log10([0.5, 1e-3, 1e-8, 1e-16, 1.0]) / 16, atol=0.01)
    page.context.close()
