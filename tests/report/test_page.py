"""The shell of the pages: escaped, self-contained, written whole or not at all."""

import base64
import hashlib
import os
import re
from html.parser import HTMLParser

import pytest

from exptilt import __version__
from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.report import Figure, Formula, Page, Section, Table, figures, render, write_page
from exptilt.report.page import number

HOSTILE = "<script>alert(1)</script> & \"quotes\" 'too'"


class Reader(HTMLParser):
    """Collects tags with their attributes, and checks that every element is closed."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

    def __init__(self, html):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def having(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def picture(name="p"):
    return figures.draw(
        name, lambda axes: (axes.plot([1, 2], [3, 4], label="line"), axes.legend(), axes.set_title("a title"))
    )


def page(text="words", svg=None):
    blocks = (
        Formula(text),
        Table(text, (text, "n"), ((text, 1.5), ("b", float("nan"))), text, sortable=True),
        Figure(svg or picture(), text, text),
    )
    return Page(text, text, (Section(text, (text,), blocks),), seed=7, sources=(text,))


def test_text_is_escaped():
    html = render(page(HOSTILE))
    assert "<script>alert" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 12 + 1  # 12 places, and the title twice
    assert [a.get("aria-label") for a in Reader(html).having("div") if a.get("role") == "img"] == [HOSTILE]


def test_nothing_is_loaded_from_anywhere():
    html = render(page())
    reader = Reader(html)
    for tag, attributes in reader.tags:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag not in {"link", "iframe", "img", "object", "embed", "image"}
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert not re.search(r"@import|url\((?!#)", html)
    addresses = set(re.findall(r"https?://[^\"' <]+", html))
    assert addresses <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }  # names of XML, never fetched


def test_policy_names_exactly_the_inline_files():
    html = render(page())
    (policy,) = [
        a["content"] for a in Reader(html).having("meta") if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        assert (
            f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
            in policy
        )


def test_ids_are_unique_and_references_resolve():
    blocks = (Figure(picture("one"), "a", "b"), Figure(picture("two"), "a", "b"), Table("t", ("x",), ((1,),)))
    html = render(
        Page("t", "l", [Section(f"s{i}", (), blocks if i == 0 else ()) for i in range(4)], None, ())
    )
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) > 10
    references = re.findall(r'(?:href="#|url\(#|aria-labelledby=")([^")]+)', html)
    assert set(references) <= set(ids)
    assert "none: no random numbers" in html


def test_page_says_how_it_was_made():
    html = render(page())
    for part in (f"exptilt {__version__}", "torch 2.", "<dd>7</dd>", "<li>words</li>"):
        assert part in html


def test_tables_are_accessible_and_keep_their_numbers():
    html = render(page())
    assert re.search('<td data-label="[^"]+" data-value="1.5">1.5</td>', html)
    assert re.search('<td data-label="[^"]+" data-value="nan">n/a</td>', html)
    assert '<th scope="row">b</th>' in html
    assert html.count('<th scope="col">') == 2
    assert 'class="sortable"' in html


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.5, "−0.5"),
        (12345.678, "1.235e+04"),
        (float("inf"), "∞"),
        (float("-inf"), "−∞"),
        (10**9, "1000000000"),
        (1e-9, "1e−09"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_figures_are_plain_and_repeatable():
    svg = picture("same")
    assert svg == picture("same")
    assert svg.startswith("<svg")
    assert svg.endswith("</svg>")
    assert "<text" not in svg  # letters are paths: no font is needed
    assert not re.search(r"style=|<style|<metadata|<!--|#010203|width=\"\d+pt", svg)
    assert "currentColor" in svg
    assert all(i.startswith("same-") for i in re.findall(r'\bid="([^"]+)"', svg))


def test_drawing_leaves_matplotlib_as_it_was():
    import matplotlib

    before = dict(matplotlib.rcParams)
    picture()
    assert dict(matplotlib.rcParams) == before


def test_a_picture_has_a_plain_name():
    with pytest.raises(ArgumentError, match="name is 'Two words'"):
        picture("Two words")


def test_write_is_whole_or_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "folder"
    path = write_page(page("first"), folder)
    assert path == folder / "index.html"
    first = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(page("second"), folder)
    assert path.read_bytes() == first
    assert os.listdir(folder) == ["index.html"]


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match="is a file"):
        write_page(page(), tmp_path / "file")


@pytest.mark.parametrize(
    ("library", "use"), [("jinja2", lambda: render(page(svg="<svg></svg>"))), ("matplotlib", picture)]
)
def test_missing_extra_is_named(library, use, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"{library} is not installed.*exptilt\[report\]"):
        use()
