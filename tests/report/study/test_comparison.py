"""Two studies side by side."""

import dataclasses
import json

import numpy as np
import pytest
from pandas import read_csv

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.cli.main import main
from exptilt.lens.studying.compare import most_different
from exptilt.lens.studying.study import read
from exptilt.report.study.comparison import page_part
from exptilt.report.study.findings import findings
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
    assert data["first"] == "L2H1:entropy"  # the page opens at what differs
    assert "not known" not in text.split('id="against-table"')[1].split("</table>")[0]
    path = write(study, tmp_path / "b", against=make_study(3, 2, name="smaller"))
    assert "smaller has 3 layers of 2 heads, so only means over heads" in path.read_text("utf-8")


def test_a_column_without_errors_is_left_out(tmp_path):
    study = make_study()
    one = {k: dataclasses.replace(m, error=None) for k, m in study.heads.items()}
    part = page_part(dataclasses.replace(study, heads=one), study)
    assert "heads that differ" not in part.table.header
    some = page_part(dataclasses.replace(study, heads={**one, "entropy": study.heads["entropy"]}), study)
    assert {row[-1] for row in some.table.rows} == {"0 of 16", "–"}
    assert findings(study, study)[0].text == "No head differs by more than two standard errors."


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny, twin = save_tiny(tmp_path / "tiny"), save_tiny(tmp_path / "twin", seed=1)
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question.\n" * 8)
    (tmp_path / "b.txt").write_text("Whether it is nobler in the mind to suffer.\n" * 8)
    common = ["report", "tiny", "--text", "a.txt", "--out", "out"]
    for other, name in (("twin", "twin"), ("b.txt", "tiny on b.txt"), ("out/study.json", "tiny")):
        assert main([*common, "--against", other]) == 0
        text = (tmp_path / "out" / "index.html").read_text("utf-8")
        assert f"Attention in tiny against {name}" in text
        table, said = read_csv(tmp_path / "out" / "heads.csv"), capsys.readouterr().out
        assert f"Against {name}" in text
        assert f"Against {name}:" in said
        assert ("divergence" in table) == ("divergence from" in said) == (other == "twin")
        if other == "twin":  # two models that read the same tokens are compared head by head
            models = [xt.lens.models.load_model(folder) for folder in (tiny, twin)]
            chunks = read(models[0].model, models[0].tokenizer, (tmp_path / "a.txt").read_text(), None).chunks
            given = [{"input_ids": chunk.ids[None]} for chunk in chunks]
            exact = xt.lens.compare(models[0].model, models[1].model, given).divergence
            np.testing.assert_allclose(table["divergence"], exact.ravel(), rtol=1e-5)
            assert 'data-place="L' in text.split("Against twin")[1].split("</li>")[0] or exact.max() < 1e-3
    assert main([*common, "--against", "nothing"]) == 2
    assert "no folder or file nothing" in capsys.readouterr().err
