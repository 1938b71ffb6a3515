"""LaTeX formulas as MathML, which browsers set by themselves, in pieces that wrap where a page is narrow.

latex2mathml converts them because it is small, has no dependencies and runs without a network. Browsers do
not break a ``<math>`` element, so a long formula becomes several, cut before relations, sums, differences.
"""

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_SPACE = re.compile(r"\\q?quad(?![a-zA-Z])\s*")
_BEFORE = frozenset("=<>≤≥∝≈∼≽⪰←→⟶⇒⟹⟺⇔∣+−")  # a line may begin with one of these
_OPEN, _CLOSE = frozenset("([{⟨"), frozenset(")]}⟩")
_LONG = 24  # characters; fewer fit on a phone


def parts(latex: str) -> list[str]:
    r"""The pieces of a formula between ``\quad`` and ``\qquad`` that stand in no braces."""
    found, start = [], 0
    for space in _SPACE.finditer(latex):
        before = latex[: space.start()].replace(r"\{", "").replace(r"\}", "")
        if before.count("{") == before.count("}"):
            found.append(latex[start : space.start()])
            start = space.end()
    return [piece for piece in (*found, latex[start:]) if piece.strip()]


def set_formula(latex: str) -> str:
    """A formula as HTML: a ``<span>`` for each part, which holds one or more ``<math>`` elements."""
    from latex2mathml.converter import convert

    rows = [ElementTree.fromstring(convert(piece, display="block"))[0] for piece in parts(latex)]
    return "".join(f"<span>{'<wbr>'.join(map(_math, _pieces(row)))}</span>" for row in rows)


def _pieces(row: Element) -> list[list[Element]]:
    """Cut the children of a long row into pieces, first outside of brackets, then inside if need be."""
    depth, depths = 0, []
    children = [word for child in row for word in _words(child)]
    for child in children:
        first = "".join(next(child.iter(), child).itertext())[:1]
        depth -= first in _CLOSE
        depths.append(depth)
        depth += first in _OPEN
    pieces = [list(zip(children, depths, strict=True))]
    for level in range(3):
        cuts = [_cut(piece, level) if _length(piece) > _LONG else [piece] for piece in pieces]
        pieces = [piece for several in cuts for piece in several]
    return [[child for child, _ in piece] for piece in pieces]


def _words(child: Element) -> list[Element]:
    """A long text as its words, anything else as it is."""
    if not child.tag.endswith("mtext") or len(child.text or "") <= _LONG // 2:
        return [child]
    found = []
    for word in re.findall(r"\S+\s*", child.text or ""):
        found.append(Element(child.tag))
        found[-1].text = word
    return found


def _cut(piece: list[tuple[Element, int]], level: int) -> list[list[tuple[Element, int]]]:
    """Cut a piece before relations and words, and after commas, that stand in at most `level` brackets."""
    found = [piece[:1]]
    for child, depth in piece[1:]:
        text, before = (child.text or "").strip(), "".join(found[-1][-1][0].itertext()).strip()
        begins = text in _BEFORE or (child.tag.endswith("mtext") and text)
        if depth <= level and (before in (",", ";") or (begins and before not in _BEFORE | _OPEN)):
            found.append([])
        found[-1].append((child, depth))
    return found


def _length(piece: list[tuple[Element, int]]) -> int:
    return sum(len("".join(child.itertext()).strip()) for child, _ in piece)


def _math(children: list[Element]) -> str:
    """One ``<math>`` element of these children; a leading plus or minus is spaced as a binary one."""
    math = Element("math", {"displaystyle": "true"})
    row = ElementTree.SubElement(math, "mrow")
    row.extend(children)
    if children[0].text in ("+", "−"):
        children[0].set("form", "infix")
    for element in math.iter():
        element.tag = element.tag.rpartition("}")[2]
    return ElementTree.tostring(math, encoding="unicode")
