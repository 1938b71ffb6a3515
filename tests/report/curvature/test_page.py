"""The page of curvature: its numbers are those of the spectra, and strangers' text stays text."""

import re

import pytest
import torch
from torch import nn

from exptilt import report
from exptilt._support.errors import ArgumentError
from exptilt.curvature import Curvature, influence
from exptilt.report.curvature.page import summary

HOSTILE = "<script>alert(1)</script> & \u202ereversed"


def measured():
    """Spectra of a small classifier at two moments of training, and the influence of its six points."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 2).double()
    data = [(x, (x[:, 0] > 0).long())]
    spectra = {}
    for step in (10, 0):
        hessian = Curvature(model, "cross_entropy", data, "hessian")
        spectra[step] = {k: part.spectral_density(steps=30, probes=3) for k, part in hessian.layers().items()}
        hessian.move(hessian.gradient())
    ggn = Curvature(model, "cross_entropy", data)
    return spectra, influence(ggn, data, damping=0.1), hessian


@pytest.fixture(scope="module")
def found():
    return measured()


def test_the_numbers_of_a_spectrum_are_those_of_the_dense_matrix(found):
    torch.manual_seed(0)
    whole = nn.Linear(3, 2).double()
    data = [(torch.randn(9, 3).double(), torch.arange(9) % 2)]
    hessian = Curvature(whole, lambda output, batch: output.tanh()[:, 0], data, "hessian")
    values = torch.linalg.eigvalsh(hessian.dense())
    seen = summary(hessian.spectral_density(steps=8, probes=400))
    assert seen.largest == pytest.approx(float(values.max()), rel=1e-8)
    assert seen.smallest == pytest.approx(float(values.min()), rel=1e-8)
    assert abs(seen.trace - float(values.sum())) < 4 * seen.error
    negative = float((-values).clamp_min(0).sum() / values.abs().sum())
    assert 0 < negative < 1
    assert seen.negative == pytest.approx(negative, abs=0.05)


def test_the_page_shows_steps_layers_and_texts(found, tmp_path):
    spectra, scores, _ = found
    texts = [f"text number {i} {HOSTILE}" for i in range(6)]
    path = report.write_curvature(spectra, tmp_path, influence=scores, texts=texts, title=HOSTILE)
    html = path.read_text("utf-8")
    assert "<script>alert" not in html
    assert "\u202e" not in html
    assert html.count("<svg") == 3
    assert re.findall(r'<th scope="col">(step \d+)</th>', html) == ["step 0", "step 10"]
    largest = summary(spectra[10]["2"]).largest
    assert f'data-value="{largest!r}"' in html
    best = int(scores.most(1))
    first = html[html.index("Texts that help most") :]
    assert re.search(r"text number (\d)", first)[1] == str(best)
    assert "converged" in html


def test_what_is_refused(found, tmp_path):
    spectra, scores, _ = found
    with pytest.raises(ArgumentError, match="spectra is empty"):
        report.write_curvature({}, tmp_path)
    with pytest.raises(ArgumentError, match="other layers at other steps"):
        report.write_curvature({**spectra, 20: {"0": spectra[0]["0"]}}, tmp_path)
    with pytest.raises(ArgumentError, match="texts has 1 texts, influence has 6"):
        report.write_curvature(spectra, tmp_path, influence=scores, texts=["one"])
    assert not (tmp_path / "index.html").exists()
