"""Files: the same retrieval after a reload, and nothing half-written or half-read."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from exptilt._support.errors import ArgumentError, MissingExtraError
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


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    memory = Hopfield(torch.randn(50, 8), 1.5, similarity="euclidean", separation=Entmax(1.5))
    memory.save(path)
    whole = path.read_bytes()
    for cut in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArgumentError, match="load"):
            Hopfield.load(path)
    path.write_bytes(whole.replace(b"Hopfield/2", b"Hopfield/1", 1))
    with pytest.raises(ArgumentError, match="not one that"):
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


@pytest.mark.parametrize("moment", [pytest.param("os.fsync", marks=pytest.mark.slow), "os.replace"])
def test_what_a_killed_save_leaves_goes_a_day_later(tmp_path, moment):
    path = tmp_path / "m"
    Hopfield(torch.eye(3), 1.0).save(path)
    code = f"""
import os, signal, torch
from exptilt.memory import Hopfield
{moment} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
Hopfield(torch.ones(20000, 16), 1.0).save({str(path)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    left = [p for p in tmp_path.rglob("*") if p != path and p.is_file()]
    assert len(left) == 1  # one draft, whole
    assert left[0].stat().st_size > 20000 * 16 * 4
    assert Hopfield.load(path).count == 3
    Hopfield(torch.eye(4), 1.0).save(path)
    assert left[0].is_file()  # it might be another's
    os.utime(left[0].parent, (time.time() - 1e5,) * 2)
    Hopfield(torch.eye(4), 1.0).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert Hopfield.load(path).count == 4


def test_files_need_safetensors_alone(tmp_path, monkeypatch):
    memory = Hopfield(torch.randn(5, 3), 2.0, values=torch.arange(5)[:, None])
    with monkeypatch.context() as patch:
        for name in ("safetensors", "safetensors.torch", "transformers"):
            patch.setitem(sys.modules, name, None)
        for call in (memory.save, Hopfield.load):
            with pytest.raises(MissingExtraError, match=r"exptilt\[memory\]"):
                call(tmp_path / "m")
    memory.save(tmp_path / "m")
    found = load_file(tmp_path / "m")
    assert torch.equal(found["patterns"], memory.patterns)
    assert torch.equal(found["values"], memory.values)
    again = Hopfield.load(tmp_path / "m")
    assert torch.equal(again.values, memory.values)
    assert again.values.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_values_of_every_kind_come_back(tmp_path, dtype, kind):
    values = (torch.randn(7, 3) * 3).to(kind)
    memory = Hopfield(torch.randn(7, 5).to(dtype), 0.3, similarity="euclidean", values=values)
    memory.save(tmp_path / "m")
    for mapped in (False, True):
        again = Hopfield.load(tmp_path / "m", mapped=mapped)
        assert torch.equal(again.values, values)
        assert torch.equal(again.patterns, memory.patterns)
        assert torch.equal(again.beta, memory.beta)


def test_files_of_the_safetensors_library_are_read(tmp_path):
    """As earlier versions wrote them: by `save_file`, with the same header."""
    memory = Hopfield(torch.randn(6, 4), 1.7, separation=Entmax(1.3))
    memory.save(tmp_path / "m")
    from safetensors import safe_open

    with safe_open(tmp_path / "m", "pt") as opened:
        about = opened.metadata() | {"checksum": "not read any more"}
    save_file({"patterns": memory.patterns, "beta": memory.beta}, tmp_path / "old", metadata=about)
    again = Hopfield.load(tmp_path / "old")
    assert torch.equal(again.patterns, memory.patterns)
    assert again.rule == Entmax(1.3)
