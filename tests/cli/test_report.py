"""`exptilt report`: what it writes and says, what it refuses and writes nothing, how it stops and goes on."""

import os
import subprocess
import sys

import numpy as np
import pytest

from exptilt.cli import main, report
from exptilt.lens import Study
from report.tiny import save_tiny

TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for step in (5, 50):
        save_tiny(folder / f"checkpoint-{step}", seed=step)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_model_with_checkpoints(tiny, text, tmp_path, capsys):
    out = tmp_path / "a b" / "out"
    words = [
        "report",
        str(tiny / "checkpoint-50"),
        "--text",
        str(text),
        "--checkpoints",
        str(tiny),
        "--out",
        str(out),
    ]
    assert main.main(words) == 0
    said = capsys.readouterr().out
    assert "checkpoint-50: 2 layers of 2 heads" in said
    assert "entropy, nats" in said
    assert f"Wrote {out / 'index.html'}" in said
    assert sorted(os.listdir(out)) == [".measured", "heads.csv", "index.html", "study.json"]
    study = Study.from_json((out / "study.json").read_text("utf-8"))
    assert study.training.steps.tolist() == [5, 50]
    assert study.training.strips.shape == (2, 2, 2, 32, 32)
    last = [detail.strip for detail in study.details]  # the model studied is the last checkpoint
    np.testing.assert_allclose(study.training.strips[-1].reshape(4, 32, 32), last, atol=2e-4)
    assert study.text_facts["text"] == "text.txt"
    assert "context" in " ".join(study.notes)  # the text is longer than 32 letters: cut, and said so
    assert len((out / "heads.csv").read_text().splitlines()) == 1 + 4
    first = (out / "study.json").read_bytes()
    kept = {path.name: path.stat().st_mtime_ns for path in (out / ".measured").iterdir()}
    assert main.main(words) == 0
    assert (out / "study.json").read_bytes() == first
    assert {path.name: path.stat().st_mtime_ns for path in (out / ".measured").iterdir()} == kept


def test_checkpoints_alone_are_called_by_their_own_name(tiny, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert main.main(["report", "--checkpoints", str(tiny), "--text", str(text), "--out", str(out)]) == 0
    assert "checkpoint-50: 2 layers of 2 heads" in capsys.readouterr().out
    assert Study.from_json((out / "study.json").read_text("utf-8")).name == f"{tiny.name}/checkpoint-50"
    assert "shakespeare" not in (out / "index.html").read_text("utf-8")


def test_a_model_of_pictures(tmp_path, capsys):
    import torch
    from PIL import Image
    from transformers import CLIPConfig, CLIPModel, ViTImageProcessor

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 8}
    config = CLIPConfig(text_config=text, vision_config={**small, "image_size": 24, "patch_size": 4})
    CLIPModel(config).save_pretrained(tmp_path / "pair")
    ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "pair")
    (tmp_path / "seen").mkdir()
    for shade in (10, 200):
        Image.new("RGB", (30, 20), (shade, 90, 90)).save(tmp_path / "seen" / f"{shade}.png")
    words = [
        "report",
        str(tmp_path / "pair"),
        "--images",
        str(tmp_path / "seen"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main.main(words) == 0
    assert "pair: 2 layers of 2 heads" in capsys.readouterr().out
    study = Study.from_json((tmp_path / "out" / "study.json").read_text("utf-8"))
    assert study.text_facts["text"] == "10.png, 200.png"
    assert study.text_facts["patches"] == "6 × 6"
    (tmp_path / "some.txt").write_text("words")
    assert main.main([*words, "--text", str(tmp_path / "some.txt")]) == 2
    assert "got texts and pictures" in capsys.readouterr().err


def refuse(words, out, capsys, match):
    before = out.exists()
    capsys.readouterr()  # what making the model said
    assert main.main(["report", *map(str, words), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert match in said.err
    lines = [line for line in said.err.splitlines() if not line.startswith("Loading the model")]
    assert len(lines) == 1
    assert lines[0].startswith("exptilt report: ")
    assert said.out == ""
    assert out.exists() == before
    if before and out.is_dir():
        assert os.listdir(out) == []


def mute(folder):
    return save_tiny(folder, tokenizer=False)


def truncated(folder):
    save_tiny(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def pickled(folder):
    save_tiny(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def without_attention(folder):
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(
        MambaConfig(vocab_size=100, hidden_size=16, state_size=4, num_hidden_layers=1)
    ).save_pretrained(folder)
    from report.tiny import default_tokenizer

    default_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda folder: folder, "there is no folder"),
        (mute, "has no tokenizer"),
        (truncated, "its weights cannot be read"),
        (pickled, "is a pickle"),
        (lambda folder: save_tiny(folder, vocabulary=10), "tokenizer does not match"),
        (without_attention, "no attention"),
    ],
)
def test_bad_models(tmp_path, capsys, make, match):
    refuse([make(tmp_path / "model"), "--text", __file__], tmp_path / "out", capsys, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "not a text in UTF-8"),
        (None, "there is no folder or file"),
    ],
)
def test_bad_texts(tiny, tmp_path, capsys, content, match):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    (tmp_path / "out").mkdir()
    refuse([tiny / "checkpoint-5", "--text", path], tmp_path / "out", capsys, match)


def test_bad_checkpoints(tiny, text, tmp_path, capsys):
    refuse(
        [tiny / "checkpoint-5", "--text", text, "--checkpoints", tmp_path / "none"],
        tmp_path / "out",
        capsys,
        "there is no folder",
    )
    truncated(tmp_path / "checkpoint-7")
    words = [str(tiny / "checkpoint-5"), "--text", str(text), "--checkpoints", str(tmp_path / "checkpoint-7")]
    assert main.main(["report", *words, "--out", str(tmp_path / "out")]) == 2
    assert "checkpoint-7: its weights cannot be read" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == [".measured"]  # the model itself was measured; no report


def test_out_that_cannot_be_written(tiny, text, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    refuse([tiny / "checkpoint-5", "--text", text], tmp_path / "file", capsys, "is a file")
    refuse(
        [tiny / "checkpoint-5", "--text", text],
        tmp_path / "file" / "below",
        capsys,
        "nothing can be written into",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_out_that_is_forbidden(tiny, text, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    refuse(
        [tiny / "checkpoint-5", "--text", text], tmp_path / "locked", capsys, "nothing can be written into"
    )


def test_full_disk(tiny, text, tmp_path, monkeypatch, capsys):
    import errno
    from pathlib import Path

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    out = tmp_path / "out"
    assert main.main(["report", str(tiny / "checkpoint-5"), "--text", str(text), "--out", str(out)]) == 2
    assert capsys.readouterr().err == "exptilt report: [Errno 28] No space left on device\n"
    assert os.listdir(out) == [".measured"]


STOPPED_AT_THE_THIRD = """
import os, signal, sys
from exptilt.cli import main
from exptilt.lens.studying import store

write, written = store._write, []

def write_and_stop(path, unit):
    write(path, unit)
    written.append(path)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGINT)

# A background job of a shell ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
store._write = write_and_stop
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_control_c_leaves_no_page_and_a_rerun_goes_on(tiny, tmp_path):
    """The process gets a real SIGINT once three units are kept; one sent from outside might come too late."""
    out = tmp_path / "out"
    words = ["report", str(tiny / "checkpoint-5"), "--out", str(out), "--max-tokens", "160"]
    program = [sys.executable, "-c", STOPPED_AT_THE_THIRD]
    stopped = subprocess.run([*program, *words], capture_output=True, text=True, check=False)
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stdout == ""
    assert "run the same command again to continue" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert os.listdir(out) == [".measured"]
    kept = {path.name: path.stat().st_mtime_ns for path in (out / ".measured").iterdir()}
    assert len(kept) == 3
    assert all(name.endswith(".npz") for name in kept)
    assert main.main(words) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (out / ".measured").iterdir()}
    assert len(after) > len(kept)
    assert {name: after[name] for name in kept} == kept
    assert (out / "index.html").is_file()


def test_help_ends_with_commands():
    parser = main.build_parser()
    (choices,) = [
        action.choices
        for action in parser._actions
        if hasattr(action, "choices") and isinstance(action.choices, dict)
    ]
    assert choices["report"].format_help().endswith(report.EXAMPLES)
