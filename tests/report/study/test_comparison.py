"""Two studies side by side."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.cli.main import main
from exptilt.lens.studying.compare import most_different
from exptilt.report.study.page import write
from report.made import make_study
from report.tiny import save_tiny


def shifted(study, name, place, by):
    value = study.heads[name].value.copy()
    value[place] += by
    heads = {**study.heads, name: dataclasses.replace(study.heads[name], value=value)}
    return dataclasses.replace(study, heads=heads, name="the other")


def test_differences_and_their_errors():
    study = make_study()
    other = shifted(study, "entropy", (2, 1), -0.5)
    found = xt.lens.compare(study, other)
    d = found["entropy"]
    assert d.by_head[2, 1] == pytest.approx(0.5)
    error = study.heads["entropy"].error
    np.testing.assert_allclose(d.head_error, np.sqrt(2) * error)
    assert d.difference == pytest.approx(0.5 / 16)
    assert d.error == pytest.approx(np.sqrt(2) * error.mean())
    assert np.argwhere(d.differing()).tolist() == [[2, 1]]
    assert most_different(study, other) == [("entropy", 2, 1)]
    assert found["effective_keys"].differing().sum() == 0
    assert set(found) == {name for name, m in study.heads.items() if m.value is not None}


def test_models_of_other_shapes_are_compared_by_their_means():
    d = xt.lens.compare(make_study(4, 4), make_study(3, 2))["entropy"]
    assert d.by_head is None
    assert d.differing().size == 0
    assert d.difference == pytest.approx(d.means[0] - d.means[1])
    with pytest.raises(ArgumentError, match="got Study and str"):
        xt.lens.compare(make_study(), "study.json")


def test_the_page_says_so(tmp_path):
    study = make_study()
    path = write(study, tmp_path, against=shifted(study, "entropy", (2, 1), -0.5))
    text = path.read_text("utf-8")
    assert "Layer 2 head 1: entropy" in text
    assert 'href="#L2H1:entropy"' in text
    assert (tmp_path / "against.json").is_file()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["against"] == "the other"
    assert "Only" not in text or "only means over heads" not in text
    path = write(study, tmp_path / "b", against=make_study(3, 2, name="smaller"))
    assert "smaller has 3 layers of 2 heads, so only means over heads" in path.read_text("utf-8")


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = save_tiny(tmp_path / "tiny")
    shutil.copytree(tiny, tmp_path / "twin")
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question.\n" * 8)
    (tmp_path / "b.txt").write_text("Whether it is nobler in the mind to suffer.\n" * 8)
    common = ["report", "tiny", "--text", "a.txt", "--out", "out"]
    for other, name in (("twin", "twin"), ("b.txt", "tiny on b.txt"), ("out/study.json", "tiny")):
        assert main([*common, "--against", other]) == 0
        text = (tmp_path / "out" / "index.html").read_text("utf-8")
        assert f"Attention in tiny against {name}" in text
    assert main([*common, "--against", "nothing"]) == 2
    assert "no folder or file nothing" in capsys.readouterr().err
