"""The model that comes with the package: all there, small enough, as good as its card says, and made by a
script that runs.
"""

import json
import re
import runpy
import zlib
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(str(files("exptilt.lens.models") / "shakespeare"))
SCRIPT = ROOT / "examples" / "train_shakespeare.py"
STEPS = [0, 256, 1024, 4096]
TABLE = re.compile(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def card():
    return {
        int(row[0]): tuple(map(float, row[1:]))
        for row in TABLE.findall((FOLDER / "README.md").read_text("utf-8"))
    }


def test_four_checkpoints_that_compress():
    assert sorted(int(path.name.split("-")[1]) for path in FOLDER.glob("checkpoint-*")) == STEPS
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 5e6
    assert 20_000 < len((FOLDER / "text.txt").read_text("utf-8")) < 30_000
    for step in STEPS:
        with safe_open(FOLDER / f"checkpoint-{step}" / "model.safetensors", "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        assert {x.dtype for x in tensors.values()} == {torch.float16}
        grid = [len(x.unique()) < 1000 for x in tensors.values() if x.dim() > 1]
        assert all(grid) if step < STEPS[-1] else not any(grid)
        packed = sum(len(zlib.compress(x.numpy().tobytes())) for x in tensors.values())
        assert packed < (0.7e6 if step < STEPS[-1] else 1.1e6)


def test_the_card_has_the_losses():
    losses = card()
    assert list(losses) == STEPS
    held_out = [row[1] for row in losses.values()]
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[0] == pytest.approx(4.19, abs=0.1)  # log 66
    assert held_out[-1] < 1.75
    assert all(abs(row[2] - row[1]) < 0.01 for row in losses.values())


@pytest.mark.parametrize("step", [0, 256, 4096])
def test_a_checkpoint_loads_and_has_its_loss(step):
    folder = FOLDER / f"checkpoint-{step}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == torch.float32
    assert (model.config.n_layer, model.config.n_head, model.config.n_embd) == (4, 4, 128)
    text = (FOLDER / "text.txt").read_text("utf-8")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    windows = tokens[: len(tokens) // 256 * 256].reshape(-1, 256)[::6]
    with torch.no_grad():
        loss = model(windows, labels=windows).loss.item()
    # A twentieth of the held-out text, from one scene: near the loss over all of it.
    assert loss == pytest.approx(card()[step][2], abs=0.15)


def test_one_token_a_character():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "checkpoint-4096")
    text = (FOLDER / "text.txt").read_text("utf-8")
    tokens = tokenizer(text, verbose=False, return_offsets_mapping=True)
    assert tokens["offset_mapping"] == [(place, place + 1) for place in range(len(text))]
    assert tokenizer.decode(tokens["input_ids"]) == text
    assert tokenizer("é%")["input_ids"] == [tokenizer.unk_token_id] * 2


def test_the_script_runs_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(SCRIPT))
    quick = ["--quick", "--text", str(FOLDER / "text.txt"), "--out"]
    script["main"]([*quick, str(tmp_path / "whole")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in (0, 2, 8)]

    # Stopped after the state of step 2 was kept, and started again.
    class StopError(Exception):
        pass

    draw = script["draw"]

    def stop(data, count, seed, step):
        if step == 6:
            raise StopError
        return draw(data, count, seed, step)

    monkeypatch.setitem(script["main"].__globals__, "draw", stop)
    with pytest.raises(StopError):
        script["main"]([*quick, str(tmp_path / "part")])
    monkeypatch.setitem(script["main"].__globals__, "draw", draw)
    capsys.readouterr()
    script["main"]([*quick, str(tmp_path / "part")])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 8"]
    for name in ("checkpoint-8/model.safetensors", "checkpoint-0/model.safetensors", "text.txt"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert TABLE.findall((tmp_path / "part" / "README.md").read_text()) == TABLE.findall(
        (tmp_path / "whole" / "README.md").read_text()
    )
    assert json.loads((tmp_path / "part" / "checkpoint-8" / "config.json").read_text())["dtype"] == "float32"
    with pytest.raises(SystemExit, match="is of another run"):
        script["main"]([*quick, str(tmp_path / "part"), "--seed", "1"])
