"""The page of a study: every number in it, strangers' text only as text, sentences as strong as numbers."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import resource
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from exptilt._support.errors import MissingExtraError
from exptilt.claims import find
from exptilt.claims.evidence import Check, Evidence, Picture
from exptilt.lens import Study
from exptilt.lens.studying.definitions import BLOCKS, HEADS, PLACES
from exptilt.lens.studying.results import HeadMeasure, LayerMeasure
from exptilt.report import write
from exptilt.report.ledger import write_ledger
from exptilt.report.study import page, payload, sentences
from exptilt.report.tokens import visible
from report.made import HOSTILE, make_study


@pytest.fixture(scope="module")
def made():
    return make_study()


@pytest.fixture(scope="module")
def html(made):
    return page.render_study(made)


class Texts(HTMLParser):
    """Collects the text of a page, tag by tag, scripts apart."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.scripts, self.inside = [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        (self.scripts if self.inside == "script" else self.texts).append(data)


def data_of(html):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(text)


def test_strange_text_stays_text(html):
    read = Texts(html)
    assert "made <b>up</b>" in "".join(read.texts)
    assert "made <i>text</i>" in "".join(read.texts)
    assert len([tag for tag, _ in read.tags if tag == "script"]) == 2
    assert not [tag for tag, _ in read.tags if tag in {"b", "i", "link", "img", "iframe"}]
    assert "window.bad=1" in "".join(read.scripts)  # inside the JSON
    assert "<script>window.bad" not in html
    tokens = data_of(html)["strip"]
    assert visible(HOSTILE) in tokens
    assert visible(HOSTILE) == HOSTILE


def test_policy_names_the_style_and_the_script(html):
    (policy,) = [
        a["content"] for tag, a in Texts(html).tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        assert (
            f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
            in policy
        )
    assert not [
        name
        for _, attributes in Texts(html).tags
        for name in attributes
        if name.startswith("on") or name in {"style", "src"}
    ]
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_scripts_never_write_markup():
    for name in page.ASSETS:
        source = (Path(page.__file__).parents[1] / "assets" / name).read_text("utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|fetch\(|"
            r"https?://(?!www\.w3\.org)",
            source,
        )
        assert len(source.splitlines()) <= 250


def test_every_number_is_in_a_table_without_scripts(made, html):
    for measure in made.heads.values():
        if measure.value is None:
            assert measure.reason in html
            continue
        for value in measure.value.ravel():
            assert f'data-value="{float(value)!r}"' in html
    for value in made.layers["norm"].value:
        assert f'data-value="{float(value)!r}"' in html
    assert re.search(f'<td data-label="[^"]+" data-value="{float(made.training.loss[0])!r}">', html)
    assert made.notes[0] in html
    assert "not monotone" in html


def test_payload_keeps_the_numbers(made, html):
    data = data_of(html)
    assert data["shape"] == [4, 4]
    for item in data["measures"]:
        value = made.heads[item["id"]].value
        if value is None:
            assert item["value"] is None
            continue
        got = np.array(item["value"], dtype=float)
        np.testing.assert_allclose(got, value, rtol=1e-4)
        if made.heads[item["id"]].error is not None:
            np.testing.assert_allclose(
                np.array(item["error"], dtype=float), made.heads[item["id"]].error, rtol=1e-4
            )
        np.testing.assert_allclose(
            np.array(item["training"], dtype=float), made.training.heads[item["id"]], rtol=1e-4
        )
    assert data["measures"][5]["value"][0][1] is None  # NaN
    assert data["training"]["steps"] == [int(step) for step in made.training.steps]
    for detail in made.details:
        packed = np.frombuffer(
            base64.b64decode(data["details"][f"L{detail.layer}H{detail.head}"]["strip"]), np.uint8
        ).reshape(16, 16)
        np.testing.assert_allclose((packed / 255.0) ** 2, detail.strip, atol=0.004)
        assert ((packed > 0) | (detail.strip < 4e-6)).all()


def test_steps_are_exact():
    steps = (0, 1, 123456, 123457)
    assert payload.payload(make_study(steps=steps))["training"]["steps"] == list(steps)


def test_many_heads_show_fewer_tokens(monkeypatch):
    made = make_study(3, 5, size=40, steps=())
    monkeypatch.setattr(payload, "STRIP_BYTES", 15 * 20 * 20)
    data = payload.payload(made)
    assert len(data["strip"]) == 20
    assert data["training"] is None
    packed = np.frombuffer(base64.b64decode(data["details"]["L2H4"]["strip"]), np.uint8).reshape(20, 20)
    np.testing.assert_allclose((packed / 255.0) ** 2, made.details[-1].strip[:20, :20], atol=0.004)
    assert "first 20 of 40 tokens" in page.strip_note(made)
    assert page.strip_note(make_study()) == ""


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the ", "·the·"),
        ("  ", "··"),
        ("a b", "a b"),
        ("", "∅"),
        ("\r\n", "␍↵"),
        ("\x00", "␀"),
        ("\x7f", "⟨U+007F⟩"),
        ("é", "é"),
        ("a\u202eb", "a⟨U+202E⟩b"),
        ("\ud800", "⟨U+D800⟩"),
        ("\u200b", "⟨U+200B⟩"),
        ("\u2028", "⟨U+2028⟩"),
        ("x" * 50, "x" * 39 + "…"),
    ],
)
def test_tokens_are_visible(token, shown):
    assert visible(token) == shown


def measure(value, **more):
    return HeadMeasure("thing", "units", "about", "assumes", value, **more)


def with_measure(name, item):
    return dataclasses.replace(make_study(2, 2), heads={name: item})


def test_sentences_on_heads():
    value = np.array([[0.1, 0.9], [0.3, 0.2]])
    error = np.array([[0.01, 0.05], [0.01, np.nan]])
    base = np.array([[0.2, 0.85], [0.1, 0.0]])
    said = sentences.of_measure(with_measure("x", measure(value, error=error, baseline=base)), "x")
    assert said == (
        "Layer 0 head 1 has the highest: 0.900 ± 0.050 units. "
        "The lowest is 0.100 ± 0.010 units in layer 0 head 0; half of the heads lie above 0.25 units. "
        "Against the baseline by more than two standard errors: 1 of 4 heads above, 1 below."
    )
    assert sentences.of_measure(
        with_measure("first_token_mass", measure(value)), "first_token_mass"
    ).startswith(
        "Layer 0 head 1 puts 90 % of its attention on the first token, the most of all heads. "
        "The lowest is 0.1 units in layer 0 head 0"
    )
    assert (
        sentences.of_measure(with_measure("x", measure(None, reason="no rows.")), "x")
        == "Not measured: no rows."
    )
    assert (
        sentences.of_measure(with_measure("x", measure(np.full((2, 2), 3.0))), "x")
        == "The same in every head: 3 units."
    )
    assert (
        sentences.of_measure(with_measure("x", measure(np.full((2, 2), np.nan))), "x")
        == "No head has a value."
    )
    holed = np.array([[np.nan, 0.9], [0.3, np.inf]])
    assert "2 of 4 heads have no value" in sentences.of_measure(with_measure("x", measure(holed)), "x")
    assert "3 of 4 heads above, 1 below" in sentences.of_measure(
        with_measure("x", measure(value, baseline=base)), "x"
    )


def test_sentences_on_one_head(made):
    heads = {name: made.heads[name] for name in ("effective_keys", "first_token_mass", "entropy")}
    place = tuple(int(i) for i in np.unravel_index(made.heads["first_token_mass"].value.argmax(), (4, 4)))
    detail = made.details[place[0] * 4 + place[1]]
    said = sentences.of_head(dataclasses.replace(made, heads=heads), detail)
    share = made.heads["first_token_mass"].value[place]
    assert f"Puts {share:.0%}".replace("%", " %") in said
    assert "Highest of all heads in “mass on the first token”" in said
    assert (
        f"The token “<s>” gets {detail.top_tokens[0].lift:.3g} times its share under uniform attention."
        in said
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0, 2.0, 3.0], "Rises at every step from 1 (a) to 3 u (c)."),
        ([3.0, 2.0, 1.0], "Falls at every step from 3 (a) to 1 u (c)."),
        ([1.0, 5.0, 3.0], "Goes from 1 (a) to 3 u (c); highest 5 at b, lowest 1 at a."),
        ([np.nan, 5.0, 3.0], "Falls at every step from 5 (b) to 3 u (c)."),
        ([2.0, 2.0, 2.0], "The same at every place: 2 u."),
        ([np.nan] * 3, "No place has a value."),
    ],
)
def test_sentences_on_layers(value, said):
    assert sentences.of_layers(LayerMeasure("t", "u", "", "", np.array(value), ("a", "b", "c"))) == said


def test_sentences_on_training(made):
    over = np.array([1.0, 1.1, 3.0, 2.9])[:, None, None] * np.ones((1, 4, 4))
    training = dataclasses.replace(
        made.training,
        steps=np.array([0.0, 10, 20, 40]),
        loss=np.array([4.0, 2.0, 1.0, 1.5]),
        heads={"entropy": over},
        layers={},
    )
    trained = dataclasses.replace(made, training=training)
    assert (
        sentences.of_loss(trained)
        == "Loss on these texts: 4 at step 0, 1.5 nats a token at step 40; lowest 1 at step 20."
    )
    assert page.training_table(trained).rows[2] == (20, 1.0, 3.0)
    assert sentences.of_loss(make_study(steps=())) == ""


def test_three_files(made, tmp_path):
    path = write(made, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "index.html"
    assert sorted(os.listdir(path.parent)) == ["heads.csv", "index.html", "study.json"]
    again = Study.from_json((path.parent / "study.json").read_text("utf-8"))
    np.testing.assert_array_equal(again.heads["entropy"].value, made.heads["entropy"].value)
    rows = (path.parent / "heads.csv").read_text("utf-8").splitlines()
    assert len(rows) == 1 + 16
    assert rows[0].startswith("layer,head,entropy,entropy_error,")


def test_report_and_ledger_share_a_folder(made, tmp_path):
    """Whichever comes first, and whichever is written again, both pages are there."""
    found = [Evidence("A1", (Check("n", (0.5,), most=1.0),), Picture("nothing", "", "", ()), {}, (0,))]
    assert write(made, tmp_path / "one").name == write_ledger(found, tmp_path / "two").name == "index.html"
    assert write_ledger(found, tmp_path / "one").name == "claims.html"
    assert write(made, tmp_path / "two").name == "index.html"
    for folder in (tmp_path / "one", tmp_path / "two"):
        for again in (lambda: None, partial(write, made, folder), partial(write_ledger, found, folder)):
            again()
            assert "What of the theory stands" in (folder / "claims.html").read_text("utf-8")
            assert "Attention in" in (folder / "index.html").read_text("utf-8")


def test_study_without_anything_still_makes_a_page(tmp_path):
    bare = dataclasses.replace(
        make_study(steps=()),
        heads={"x": measure(None, reason="nothing was seen.")},
        layers={},
        details=[],
        strip_tokens=[],
    )
    html = write(bare, tmp_path).read_text("utf-8")
    assert "nothing was seen." in html
    assert "Not measured (the page says why): thing" in page.text(bare)


def test_a_disk_that_takes_no_more(made, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="large"):
            write(made, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("library", "named"), [("pandas", "pandas"), ("jinja2", "jinja2")])
def test_missing_extra_is_named(made, tmp_path, monkeypatch, library, named):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"{named} is not installed.*exptilt\[report\]"):
        write(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_claims_are_those_of_the_ledger():
    theory = (Path(__file__).parents[3] / "docs" / "theory.md").read_text("utf-8")
    every = " ".join(words.about for group in (HEADS, PLACES, BLOCKS) for words in group.values())
    found = page.claims_named([every])
    assert sorted(set(re.findall(r"\(([A-F]\d+)\)", every))) == list(found) == ["A15", "E7", "F2", "F3", "F6"]
    for claim, words in found.items():
        assert words == find(claim).statement
        assert f'<a id="{claim.lower()}"></a>' in theory


def test_a_page_lists_the_claims_it_names(made):
    named = dataclasses.replace(made.heads["entropy"], about="Whether it climbs (F3), and (Z9).")
    html = page.render_study(dataclasses.replace(made, heads={"entropy": named}))
    assert 'id="claim-F3"' in html
    assert 'id="claim-F6"' not in html
    assert "claim-Z9" not in html
    assert "claim-" not in page.render_study(made).split("<script")[0]


def test_a_large_page_is_small_enough():
    heads = make_study(24, 16, size=32, steps=()).heads["entropy"]
    study = make_study(24, 16, size=32)
    more = {f"more_{index}": heads for index in range(20)}  # as many statistics as a study has
    assert len(page.render_study(dataclasses.replace(study, heads={**study.heads, **more}))) < 3e6


def test_a_study_is_told_in_a_line(made):
    assert repr(made) == "<Study of made <b>up</b>: 4 layers of 4 heads, 1024 tokens; to_frame() is a table>"
