"""The ledger: every claim of the theory is there, says what it must, and is judged by the rules alone."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from claims.verdicts import VERDICTS
from exptilt import claims
from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.claims import Verdict, ledger
from exptilt.claims.evidence import Check, Evidence, Picture, joined
from exptilt.cli.main import main
from exptilt.lens.studying.definitions import BLOCKS
from report.made import make_study

EVERY = claims.every()
THEORY = (Path(__file__).parents[2] / "docs" / "theory.md").read_text("utf-8")
NOTHING = Picture("t", "x", "y", ())


def judged(*checks):
    return Evidence("A1", checks, NOTHING, {}, (0,)).verdict


def check(value, role="claim", most=1.0):
    return Check("n", (value,), most=most, role=role)


def test_all_claims_of_the_theory_are_there():
    assert [claim.id for claim in EVERY] == re.findall(
        r"^<a id=.*\*\*([A-F]\d+)\*\*", THEORY, flags=re.MULTILINE
    )


@pytest.mark.parametrize("claim", EVERY, ids=lambda claim: claim.id)
def test_every_claim_says_what_it_must(claim):
    assert claim.statement.endswith(".")
    assert claim.procedure.endswith(".")
    assert claim.formula
    assert re.search(r"poster|draft|appendix", claim.source)
    assert claim.snippet.count("\n") > 2
    assert "print(" in claim.snippet


@pytest.mark.parametrize("claim", EVERY, ids=lambda claim: claim.id)
def test_the_lines_to_run_do(claim, capsys):
    """As shown on the page, with nothing but what they import; what they print is what the docstring says."""
    exec(compile(claim.snippet, claim.id, "exec"), {})
    example = claim.experiment.__doc__.partition("Example:\n")[2].splitlines()
    said = [line.strip() for line in example if line.strip() and not line.strip().startswith((">>>", "..."))]
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == said


def test_the_page_of_the_docs_says_the_same():
    text = (Path(__file__).parents[2] / "docs" / "claims.md").read_text("utf-8")
    rows = re.findall(r"^\| <a id=.*?\[([A-F]\d+)\].*?\| (.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    assert rows == [(claim.id, claim.title, VERDICTS[claim.id]) for claim in EVERY]
    assert all(f"[evidence](claims.md#{claim.id.lower()})" in THEORY for claim in EVERY)


def test_the_rules():
    good, bad = check(0.5), check(2.0)
    assert judged(good) is Verdict.EXACT
    assert judged(good, bad) is Verdict.REFUTED
    assert judged(good, check(2.0, "printed")) is Verdict.CORRECTED
    assert judged(bad, check(0.5, "printed")) is Verdict.REFUTED
    assert judged(good, check(2.0, "reach")) is Verdict.SCOPED
    assert judged(check(0.5, "measured"), check(2.0, "measured")) is Verdict.PARTLY
    assert judged(check(2.0, "measured"), check(2.0, "measured")) is Verdict.REFUTED
    assert judged(check(0.5, "measured")) is Verdict.SCOPED
    assert judged(good, check(math.nan)) is Verdict.OPEN
    assert judged(good, check(math.nan, "note")) is Verdict.EXACT
    assert judged(check(1.0, "note")) is Verdict.OPEN
    assert not Check("n", (0.5, 2.0), most=1.0).passed  # one seed of two
    assert not Check("n", (0.5,), least=1.0).passed


def test_seeds_are_joined_and_json_keeps_everything():
    found = claims.find("A10").run(seeds=2)
    assert [len(c.values) for c in found.checks] == [2] * 5
    low, high = found.checks[3].interval
    assert low < found.checks[3].mean < high
    again = Evidence.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert again.verdict is found.verdict
    odd = Evidence("A1", (Check("n", (math.nan, math.inf)),), NOTHING, {}, (0,))
    assert json.loads(odd.to_json())["checks"][0]["values"] == [None, "inf"]
    assert math.isinf(Evidence.from_json(odd.to_json()).checks[0].values[1])
    assert "holds with a correction" in found._repr_html_()


def test_same_seeds_same_numbers():
    one, two = (claims.find("E8").run(seeds=1) for _ in range(2))
    assert one == two
    assert one.checks != claims.find("E8").run(seed=5, seeds=1).checks


def test_bad_input():
    with pytest.raises(ArgumentError, match=r"no claim 'A16' \(did you mean A"):
        claims.find("A16")
    claim = claims.find("A1")
    with pytest.raises(ArgumentError, match=r"no setting 'dimension' \(did you mean dimensions\?\)"):
        claim.run({"dimension": 3})
    with pytest.raises(ArgumentError, match="from 1 to 64"):
        claim.run({"dimensions": 65})
    with pytest.raises(ArgumentError, match="Pass a whole number"):
        claim.run({"dimensions": "2.5"})
    with pytest.raises(ArgumentError, match="no setting 'wings'"):
        list(claims.run(["A1", "A2"], settings={"wings": 3}))


def test_what_is_not_installed_leaves_a_claim_open(monkeypatch, capsys, tmp_path):
    from exptilt.claims import equilibrium

    def missing(**_):
        raise MissingExtraError("torchdiffeq", "ode")

    monkeypatch.setattr(equilibrium, "equal_cosine", missing)
    found = claims.find("B6").run(seeds=1)
    assert found.verdict is Verdict.OPEN
    assert "pip install 'exptilt[ode]'" in found.reason
    assert not ledger.fails(found)
    assert main(["claims", "B6", "--store", str(tmp_path)]) == 0
    assert "pip install 'exptilt[ode]'" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_command(capsys, tmp_path, monkeypatch):
    store = ["--store", str(tmp_path / "kept")]
    assert main(["claims", "a10", *store]) == 0
    assert "holds with a correction: the printed formula fails" in capsys.readouterr().out
    assert main(["claims", "A1", "A10", "--json", *store]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["id"], line["kept"]) for line in lines] == [("A1", False), ("A10", True)]
    assert main(["claims", "A10", "--set", "dimensions=3", "--seeds", "2", *store]) == 0
    assert "dimensions=3. Seeds: 0, 1." in capsys.readouterr().out
    for words, said in [
        (["A99"], "did you mean A"),
        (["A1", "--set", "dimensions"], "is not NAME=VALUE"),
        (["A1", "--set", "dimensions=0"], "from 1 to 64"),
        (["A1", "--model", "tiny"], "none of these claims is about a trained model"),
    ]:
        assert main(["claims", *words, *store]) == 2
        assert said in capsys.readouterr().err


def test_another_model_is_looked_for_first_and_told_beside_the_first(capsys, monkeypatch, tmp_path):
    """A model that cannot be loaded is told before all else is run; only what a model changes is printed."""
    from exptilt.claims import observed

    read, words = [], ["claims", "E7", "F6", "--store", str(tmp_path / "kept"), "--set", "tokens=128"]
    monkeypatch.setattr(observed, "studied", lambda *given: read.append(given[0]) or made(*given))

    def made(model, tokens, seed):
        found = make_study(seed=seed + (model == "other"))
        heads = dict.fromkeys(("link_symmetry", "link_definiteness", "link_r2"), found.heads["entropy"])
        layers = {name: next(iter(found.layers.values())) for name in BLOCKS}
        return replace(found, heads=heads, layers=layers, seed=seed)

    assert main(["claims", "E7", "--model", "other", "--set", "wings=2"]) == 2
    assert read == []  # a wrong setting is told before a model is looked for
    assert main([*words, "--model", "other", "--out", str(tmp_path)]) == 0
    assert read[:2] == ["other", "other"]
    said = capsys.readouterr().out
    assert "2 claims, those about trained models on shakespeare and other." in said
    assert "train small models" not in said
    assert "heads: symmetric part of W_q W_k': " in said
    assert "Gaussians: asymmetry" not in said
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "<code>exptilt claims E7 --model other</code>" in page
    assert "<code>exptilt claims E7</code>" in page
    assert ">2 claims of" in page


def test_a_claim_that_does_not_hold_is_exit_code_1(capsys, monkeypatch, tmp_path):
    from exptilt.claims import duality

    right = duality.kl
    monkeypatch.setattr(duality, "kl", lambda p, q: right(q, p))
    assert main(["claims", "A10", "A11", "--store", str(tmp_path)]) == 1
    assert "!A10  refuted" in capsys.readouterr().out


def test_interruption_keeps_what_was_done(capsys, monkeypatch, tmp_path):
    from exptilt.claims import duality

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(duality, "maximum_entropy", stop)
    words = ["claims", "A10", "A11", "--store", str(tmp_path)]
    assert main(words) == 130
    said = capsys.readouterr()
    assert "A10  holds with a correction" in said.out
    assert "What was done is kept" in said.err
    monkeypatch.undo()
    assert main(words) == 0
    assert "kept" in capsys.readouterr().out


def test_checks_join_only_what_is_the_same():
    one = Evidence("A1", (check(1.0),), NOTHING, {}, (0,))
    with pytest.raises(ValueError, match="zip"):
        joined([one, Evidence("A1", (), NOTHING, {}, (1,))])
