"""Formulas of LaTeX as MathML, which browsers set by themselves; parts that wrap where the page is narrow.

latex2mathml converts them because it is small, has no dependencies and runs without a network.
"""

import re

_SPACE = re.compile(r"\\q?quad(?![a-zA-Z])\s*")


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
    """A formula as ``<math>`` elements, one for each of its parts."""
    from latex2mathml.converter import convert

    return "".join(convert(piece, display="block") for piece in parts(latex))
