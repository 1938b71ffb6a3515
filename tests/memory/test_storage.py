"""Files: the same retrieval after a reload, and nothing half-written or half-read."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from exptilt._support.errors import ArgumentError
from exptilt.memory import Entmax, Hopfield, Polynomial


@pytest.mark.parametrize("separation", ["softmax", "sparsemax", Entmax(1.3), "max", Polynomial(4)], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_same_retrieval_after_reload(tmp_path, separation, mapped):
    torch.manual_seed(0)
    similarity = "cosine" if separation == "max" else "dot"
    x, s = torch.randn(1001, 17), torch.randn(33, 17)
    memory = Hopfield(x, 0.37, similarity=similarity, separation=separation)
    memory.save(tmp_path / "memory.safetensors")
    again = Hopfield.load(tmp_path / "memory.safetensors", mapped=mapped)
    assert again.rule == memory.rule
    assert again.similarity is memory.similarity
    assert torch.equal(again.patterns, x)
    assert torch.equal(again.beta, memory.beta)
    assert torch.equal(again.energy(s), memory.energy(s))
    assert torch.equal(
        again.retrieve(s, throw=False, max_steps=20).value,
        memory.retrieve(s, throw=False, max_steps=20).value,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_heads_and_dtypes(tmp_path, dtype):
    x = torch.randn(2, 5, 3).to(dtype)
    Hopfield(x, torch.tensor([1.0, 2.0]), similarity="euclidean").save(str(tmp_path / "m"))
    again = Hopfield.load(str(tmp_path / "m"))
    assert torch.equal(again.patterns, x)
    assert again.beta.tolist() == [1.0, 2.0]


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    memory = Hopfield(torch.randn(50, 8), 1.5, similarity="euclidean", separation=Entmax(1.5))
    memory.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for cut in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArgumentError, match="load"):
            Hopfield.load(path)
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in [*rng.integers(begin, len(whole), 20), begin, len(whole) - 1]:  # one bit of the tensors
        bad = bytearray(whole)
        bad[place] ^= 1
        path.write_bytes(bytes(bad))
        with pytest.raises(ArgumentError, match="checksum"):
            Hopfield.load(path)
    for place in range(begin):  # and of the header: an error, or nothing changed that matters
        bad = bytearray(whole)
        bad[place] ^= 2 if place % 2 else 1
        path.write_bytes(bytes(bad))
        try:
            again = Hopfield.load(path)
        except ArgumentError:
            continue
        assert torch.equal(again.patterns, memory.patterns)
        assert torch.equal(again.beta, memory.beta)
        assert again.rule == memory.rule
        assert again.similarity is memory.similarity
    for old, new in (
        (b"1.5", b"1.7"),
        (b"euclidean", b"cosine   "),
        (b"euclidean", b"dot      "),
        (b"Hopfield/2", b"Hopfield/1"),
    ):
        assert whole[:begin].count(old) == 1
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(ArgumentError, match="load"):
            Hopfield.load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(ArgumentError):
        Hopfield.load(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="no file"):
        Hopfield.load(tmp_path / "absent")
    torch.save({"patterns": torch.eye(2)}, tmp_path / "pickled")
    with pytest.raises(ArgumentError, match="not a whole safetensors"):
        Hopfield.load(tmp_path / "pickled")
    save_file({"patterns": torch.eye(2), "beta": torch.tensor(1.0)}, tmp_path / "other")
    with pytest.raises(ArgumentError, match="not one that"):
        Hopfield.load(tmp_path / "other")
    with pytest.raises(ArgumentError, match="no folder"):
        Hopfield(torch.eye(2)).save(tmp_path / "nowhere" / "m")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m"
    Hopfield(torch.eye(3), 1.0).save(path)
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                Hopfield(torch.ones(9, 3), 1.0).save(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    Hopfield(torch.ones(9, 3), 1.0).save(path)
    assert Hopfield.load(path).count == 9
