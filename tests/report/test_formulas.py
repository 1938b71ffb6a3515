"""Formulas as MathML: nothing is lost where a long one is cut, and a cut stands where a line may end."""

import html
import re

import pytest

pytest.importorskip("latex2mathml")

from latex2mathml.converter import convert

from exptilt import claims
from exptilt.report.formulas import parts, set_formula

FORMULAS = [text for claim in claims.every() for text in (claim.formula, claim.printed) if text]


def shown(markup):
    """What a reader sees of a formula, without spaces."""
    return re.sub(r"\s", "", html.unescape(re.sub(r"<[^>]*>", "", markup)))


def pieces(latex):
    return [shown(piece) for piece in re.findall("<math.*?</math>", set_formula(latex))]


def test_nothing_is_lost_and_no_command_is_left():
    assert len(FORMULAS) > 40
    for latex in FORMULAS:
        assert shown(set_formula(latex)) == shown("".join(convert(part) for part in parts(latex)))
        assert "\\" not in shown(set_formula(latex))


def test_every_piece_fits_on_a_phone():
    assert max(len(piece) for latex in FORMULAS for piece in pieces(latex)) <= 36


def test_short_formulas_stay_whole_and_long_ones_are_cut_before_relations_sums_and_words():
    assert pieces(r"G(\eta)=\log\sum_n e^{\langle x_n,\eta\rangle}") == ["G(η)=log∑ne⟨xn,η⟩"]
    long = r"f(a)=g(a,b)+h(a,b)-k(a,b,c)+l(a+b)\ \text{ where } c=-1"
    assert pieces(long) == ["f(a)", "=g(a,b)", "+h(a,b)", "−k(a,b,c)", "+l(a+b)", "where" + "c", "=−1"]
    assert set_formula(long).count('form="infix"') == 3  # a minus in front of a line is no sign of a number


def test_a_long_bracket_is_cut_inside():
    inside = r"F\Big(\alpha_1+\alpha_2+\alpha_3+\alpha_4+\alpha_5+\alpha_6+\alpha_7+\alpha_8+\alpha_9+1\Big)"
    assert pieces(inside)[:3] == ["F(α1", "+α2", "+α3"]


def test_a_long_text_is_cut_into_words():
    said = pieces(r"p_{eq}\ \text{is what the draft calls an equilibrium of attention}")
    assert said == ["peq", "is", "what", "the", "draft", "calls", "an", "equilibrium", "of", "attention"]
