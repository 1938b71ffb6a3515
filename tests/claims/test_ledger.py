"""The ledger: every claim of the theory is there, says what it must, and is judged by the rules alone."""

import ast
import builtins
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from claims.verdicts import SETTINGS, VERDICTS
from exptilt import claims
from exptilt._support.errors import MissingExtraError
from exptilt.claims import Verdict, ledger
from exptilt.claims.evidence import Check, Evidence, Picture, joined
from exptilt.claims.models import questions, subjects
from exptilt.cli.main import main

EVERY = claims.every()
THEORY = (Path(__file__).parents[2] / "docs" / "theory.md").read_text("utf-8")
NOTHING = Picture("t", "x", "y", ())


def judged(*checks):
    return Evidence("A1", checks, NOTHING, {}, (0,)).verdict


def check(value, role="claim", most=1.0):
    return Check("n", (value,), most=most, role=role)


def test_all_claims_of_the_theory_are_there():
    assert [claim.id for claim in EVERY] == re.findall(
        r"^<a id=.*\*\*([A-G]\d+[ab]?)\*\*", THEORY, flags=re.MULTILINE
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
def test_the_lines_to_run_import_what_they_use(claim):
    """What they print is tested as the docstring's example, which need not import `torch` and `xt`."""
    nodes = list(ast.walk(ast.parse(claim.snippet)))
    known = {alias.asname or alias.name for node in nodes for alias in getattr(node, "names", ())}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known |= {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    assert {node.id for node in names} <= known


@pytest.mark.slow
@pytest.mark.parametrize("claim", EVERY, ids=lambda claim: claim.id)
def test_the_lines_to_run_do(claim, capsys):
    """As shown on the page, with nothing but what they import; what they print is what the docstring says."""
    exec(compile(claim.snippet, claim.id, "exec"), {})
    example = claim.experiment.__doc__.partition("Example:\n")[2].splitlines()
    said = [line.strip() for line in example if line.strip() and not line.strip().startswith((">>>", "..."))]
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == said


def test_the_page_of_the_docs_says_the_same():
    text = (Path(__file__).parents[2] / "docs" / "claims.md").read_text("utf-8")
    rows = re.findall(r"^\| <a id=.*?\[([A-G]\d+[ab]?)\].*?\| (.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    assert rows == [(claim.id, claim.title, VERDICTS[claim.id]) for claim in EVERY]
    assert all(f"[evidence](claims.md#{claim.id.lower()})" in THEORY for claim in EVERY)


def test_theory_prints_the_formulas_of_the_ledger():
    """One source: what the page of the theory typesets is what the claims say."""
    assert all(f"$${claim.formula}$$" in THEORY for claim in (*EVERY, *claims.every(others=True)))


def test_no_interval_of_a_number_that_cannot_be_negative_reaches_below_0():
    assert Check("n", (0.0, 0.0, 0.1)).interval[0] == 0
    assert Check("n", (0.0, 0.0, 0.1), signed=True).interval[0] < 0
    assert Check("n", (-0.1, 0.0, 0.1)).interval[0] < 0


def test_verdicts_are_sentences():
    found = claims.find("B5a").run({"points": 20, "steps": 20, "beta": 0.05}, seeds=1)
    assert found.verdict is Verdict.REFUTED  # points stay apart, and are no nearer to a Gaussian
    assert found.reason.startswith(
        "“sphere: share of starts that end Gaussian” is 0, and should be at least 1. "
    )


def test_holds_exactly_is_for_identities():
    """No claim that is only measured, and none with a bound that is not rounding."""
    for id, verdict in VERDICTS.items():
        if verdict == "holds exactly":
            assert all(
                c.exact for c in claims.find(id).run(SETTINGS.get(id), seeds=1).checks if c.role == "claim"
            )


@pytest.mark.parametrize(
    ("id", "settings", "seed"),
    [
        ("C3", {"beta": 1.0, "steps": 200}, 0),
        ("C3", {"beta": 4.0, "steps": 200}, 0),
        ("C3", {"steps": 10}, 0),
        ("C3", {"dimensions": 2, "steps": 200}, 0),
        ("E4", {}, 113),
        ("E9", {"particles": 200}, 5),
        ("E1", {"modes": 3, "steps": 4}, 0),
    ],
)
def test_settings_and_seeds_that_an_arbitrary_bound_refuted(id, settings, seed):
    assert claims.find(id).run(settings, seed=seed, seeds=1).verdict.holds


def test_what_the_corrected_claims_find():
    """Numbers that were computed independently."""
    from exptilt.claims.experiments.repelling import cumulant_growth

    for k, beta, growth in ((3, 1.0, 2.5), (4, 1.0, 3.0), (3, 0.1, 1.0273), (4, 2.0, 11.667)):
        assert cumulant_growth(k, beta, 1) == pytest.approx(growth, rel=1e-3)
    mixed = {c.name: c for c in claims.find("E5").run(seeds=1).checks}
    assert not mixed["as printed: IMM filter with a uniform message"].passed
    assert mixed["random heads of 2 tokens: share with a forward transition"].mean == pytest.approx(
        0.5, abs=0.08
    )
    assert mixed["random heads of 6 tokens: share with a forward transition"].mean < 0.02
    chains = {c.name: c for c in claims.find("E8").run(seeds=1).checks}
    assert chains[
        "bits, as printed: growth in three steps with the exact link and skip"
    ].mean == pytest.approx(8)
    assert chains["bits, linear link, no skip: growth in three steps"].mean < 1.1
    assert chains["counts, linear link, no skip: growth in three steps"].mean > 2


@pytest.mark.parametrize("claim", claims.every(others=True), ids=lambda claim: claim.id)
def test_results_of_others(claim, capsys):
    assert claim.run(seeds=1).verdict.holds
    exec(compile(claim.snippet, claim.id, "exec"), {})
    assert re.search(r"arXiv|ICML", claim.source)


def test_a_number_that_random_weights_pass_too_does_not_count():
    trained, random = made_profile("m", "trained", 0, 0), made_profile("m", "random", 0, 0)
    names = subjects.HEADS
    same = {name: [[0.9, 0.9]] for name in names}
    found = list(questions.judged("F2", replace(trained, heads=same), replace(random, heads=same)))
    assert {c.role for c in found if c.name.startswith("all keys: R²")} == {"note"}
    other = {name: [[-0.9, -0.9]] for name in names}
    found = list(questions.judged("F2", replace(trained, heads=same), replace(random, heads=other)))
    assert found[0].role == "measured"
    assert found[0].passed


def test_bounds_of_trained_models_are_those_of_the_predictions():
    said = questions.predictions()
    assert sorted(said["bounds"]) == sorted(questions.ASKED)
    assert said["seen"] == ["shakespeare"]
    for id in questions.ASKED:
        header, rows = questions.columns(id)
        assert header[3:] == ["shakespeare", "minilm", "smollm2", "rxnmapper", "antiberty"]
        assert len(rows) == len(said["bounds"][id])


def test_the_worst_seed_is_told_only_where_it_differs():
    assert "worst seed" not in Check("n", (8.0, 8.0 + 1e-12), most=2.0).sentence
    assert "9 for the worst seed" in Check("n", (8.0, 9.0), most=2.0).sentence


def test_the_rules():
    good, bad, exact = check(0.5), check(2.0), check(1e-12, most=1e-6)
    assert judged(exact) is Verdict.EXACT
    assert judged(good, bad) is Verdict.REFUTED
    assert judged(good, check(2.0, "printed")) is Verdict.CORRECTED
    assert judged(bad, check(0.5, "printed")) is Verdict.REFUTED
    assert judged(good, check(2.0, "reach")) is Verdict.SCOPED
    assert judged(check(0.5, "measured"), check(2.0, "measured")) is Verdict.PARTLY
    assert judged(check(2.0, "measured"), check(2.0, "measured")) is Verdict.REFUTED
    assert judged(check(0.5, "measured")) is Verdict.MEASURED
    assert judged(exact, check(2.0, "guard")) is Verdict.REFUTED
    assert judged(exact, check(0.5, "guard")) is Verdict.EXACT
    assert judged(exact, good) is Verdict.MEASURED  # a bound of 1 is not rounding
    assert judged(good, check(math.nan)) is Verdict.OPEN
    assert judged(exact, check(math.nan, "note")) is Verdict.EXACT
    assert judged(check(1.0, "note")) is Verdict.OPEN
    assert not Check("n", (0.5, 2.0), most=1.0).passed  # one seed of two
    assert not Check("n", (0.5,), least=1.0).passed


def test_seeds_are_joined_and_json_keeps_everything():
    found = claims.find("A10").run(seeds=2)
    assert [len(c.values) for c in found.checks] == [2] * 5
    low, high = found.checks[3].interval
    assert low < found.checks[3].mean < high
    again = json.loads(found.to_json())
    assert again["verdict"] == found.verdict.value
    assert [c["values"] for c in again["checks"]] == [list(c.values) for c in found.checks]
    odd = Evidence("A1", (Check("n", (math.nan, math.inf)),), NOTHING, {}, (0,))
    assert json.loads(odd.to_json())["checks"][0]["values"] == [None, "inf"]
    assert "holds with a correction" in found._repr_html_()


def test_same_seeds_same_numbers():
    one, two = (claims.find("E8").run(seeds=1) for _ in range(2))
    assert one == two
    assert one.checks != claims.find("E8").run(seed=5, seeds=1).checks


def test_small_experiments_run_on_one_thread_and_leave_the_number_as_it_was():
    """A second thread made the whole ledger six times slower on a busy machine."""
    before, seen = torch.get_num_threads(), []

    def experiment(seed, **_):
        seen.append(torch.get_num_threads())
        yield from (check(0.0), NOTHING)

    one = replace(claims.find("A1"), experiment=experiment)
    torch.set_num_threads(2)
    try:
        for settings in ({}, {"model": "another"}):
            one.once(settings, 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


def test_what_is_not_installed_leaves_a_claim_open(monkeypatch, capsys):
    from exptilt.claims import equilibrium

    def missing(**_):
        raise MissingExtraError("torchdiffeq", "ode")

    monkeypatch.setattr(equilibrium, "equal_cosine", missing)
    found = claims.find("B6").run(seeds=1)
    assert found.verdict is Verdict.OPEN
    assert "pip install 'exptilt[ode]'" in found.reason
    assert not ledger.fails(found)
    assert main(["claims", "B6"]) == 0
    assert "pip install 'exptilt[ode]'" in capsys.readouterr().out


def test_command(capsys):
    assert main(["claims", "a10"]) == 0
    assert "holds with a correction: The printed formula fails" in capsys.readouterr().out
    assert main(["claims", "A1", "A10", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["id"], line["verdict"]) for line in lines] == [
        ("A1", "holds exactly"),
        ("A10", "holds with a correction"),
    ]
    assert main(["claims", "A10", "--set", "dimensions=3", "--seeds", "2"]) == 0
    assert "dimensions=3. Seeds: 0, 1." in capsys.readouterr().out
    for words, said in [
        (["A99"], "did you mean A"),
        (["A1", "--set", "dimensions"], "is not NAME=VALUE"),
        (["A1", "--set", "dimensions=0"], "from 1 to 64"),
        (["A1", "--model", "minilm"], "none of these claims is about a trained model"),
    ]:
        assert main(["claims", *words]) == 2
        assert said in capsys.readouterr().err


def made_profile(model, weights, tokens, seed):
    """A profile of random numbers, others for each model and for the control."""
    rng = np.random.default_rng([len(model), len(weights), seed])
    heads = {
        name: rng.random((2, 3)).tolist()
        for name in (*subjects.HEADS, "symmetry", "symmetry_z", "definiteness")
    }
    heads |= {
        name: rng.random((2, 3)).tolist() for name in ("definiteness_z", "alignment", "alignment_z", "mixed")
    }
    layers = {name: rng.random(3).tolist() for name in (*subjects.LAYERS, "tied_z")}
    values = {"vocabulary_sd": 0.3} | {f"forward_{n}": 0.2 for n in subjects.WINDOWS}
    return subjects.Profile(model, weights, heads, layers, values)


def test_another_model_is_looked_for_first_and_told_beside_the_first(capsys, monkeypatch, tmp_path):
    """A model that cannot be loaded is told before all else is run; only what a model changes is printed."""
    read, words = [], ["claims", "E7", "F1", "--set", "tokens=128"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(subjects, "profile", lambda *given: read.append(given[0]) or made_profile(*given))
    steps = {0: (1.0, np.zeros(4)), 9: (2.0, np.ones(4))}  # the other model has no checkpoints
    monkeypatch.setattr(subjects, "over_training", lambda model, seed: steps if model != "other" else {})
    assert main(["claims", "E7", "--model", "other", "--set", "wings=2"]) == 2
    assert read == []  # a wrong setting is told before a model is looked for
    assert main([*words, "--model", "other", "--out", str(tmp_path)]) == 0
    assert read[:2] == ["other", "other"]
    said = capsys.readouterr().out
    assert "2 claims, those about trained models on shakespeare and other." in said
    assert "R² of a linear link from mean keys to queries: " in said
    assert "Gaussians: asymmetry" not in said
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "<code>exptilt claims E7 --model other</code>" in page
    assert "<code>exptilt claims E7</code>" in page
    assert ">2 claims of" in page
    assert "chosen after this model was measured" in page
    assert "before this model was measured" in page


def test_a_model_that_is_not_there_is_not_to_be_downloaded_by_an_option_that_is_not_there(capsys):
    assert main(["claims", "F2", "--model", "nobody/nothing"]) == 2
    said = capsys.readouterr().err
    assert "nobody/nothing" in said
    assert "--download" not in said


def test_a_claim_that_does_not_hold_is_exit_code_1(capsys, monkeypatch):
    from exptilt.claims import duality

    right = duality.kl
    monkeypatch.setattr(duality, "kl", lambda p, q: right(q, p))
    assert main(["claims", "A10", "A11"]) == 1
    assert "!A10  refuted" in capsys.readouterr().out


def test_an_interrupted_run_prints_what_was_done(capsys, monkeypatch):
    from exptilt.claims import duality

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(duality, "maximum_entropy", stop)
    assert main(["claims", "A10", "A11"]) == 130
    assert "A10  holds with a correction" in capsys.readouterr().out


def test_checks_join_only_what_is_the_same():
    one = Evidence("A1", (check(1.0),), NOTHING, {}, (0,))
    with pytest.raises(ValueError, match="zip"):
        joined([one, Evidence("A1", (), NOTHING, {}, (1,))])
