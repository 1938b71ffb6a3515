"""Two and three real processes, started by torchrun, against one process that has everything."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exptilt as xt

HERE = Path(__file__).resolve().parent


def torchrun(count, script, *words, extra=()):
    """Start a script on so many processes."""
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
        *extra,
    ]
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # docs/scaling.md says why
    return subprocess.run(
        [*start, str(HERE / script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_one_process(count):
    done = torchrun(count, "ranks.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("all cases hold") == count


@pytest.mark.slow
def test_mistakes_of_one_process_are_told_to_all(tmp_path):
    done = torchrun(2, "faults.py", "mistakes", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for queries in ("replicated", "sharded"):
        for found in (zero, one):
            assert (
                "the dtype is torch.float32 on rank 0 and torch.float64 on rank 1"
                in found[f"dtype, {queries}"]
            )
            assert "the shape of key but for its keys" in found[f"heads, {queries}"]
            assert "scale, causal, window, softcap" in found[f"option, {queries}"]
            assert (
                "need gradients" in found[f"gradient, {queries}"]
                or "derivatives" in found[f"gradient, {queries}"]
            )
            assert "NaN" in found[f"NaN, {queries}"]
        assert one[f"positions, {queries}"].startswith(
            "ArgumentError: attend: key has 5 positions, value has 4"
        )
        assert "rank 1 was refused" in zero[f"positions, {queries}"]
        assert "key has 5 positions, value has 4" in zero[f"positions, {queries}"]
    assert "the gradients that are asked for" in zero["another result"]
    assert zero["another result"] == one["another result"]
    assert "rank 0 of 2 did not get an answer" in zero["never called"]


@pytest.mark.slow
def test_options_of_losses_that_differ_are_told_to_all(tmp_path):
    done = torchrun(2, "faults.py", "losses", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero == one
    head = {
        "label_smoothing": "label_smoothing is 0 on rank 0 and 0.1 on rank 1",
        "reduction": "reduction is 'mean' on rank 0 and 'none' on rank 1",
        "z_loss": "z_loss is 0 on rank 0 and 0.01 on rank 1",
        "ignore_index": "ignore_index is -100 on rank 0 and -1 on rank 1",
        "scale": "scale is 1 on rank 0 and 0.5 on rank 1",
        "softcap": "softcap is None on rank 0 and 30 on rank 1",
        "statistics": "statistics is False on rank 0 and True on rank 1",
        "rank": "rank is False on rank 0 and True on rank 1",
        "bias": "bias, but for its rows, is None on rank 0 and '() torch.float32 on cpu' on rank 1",
        "target": "the checksum of target is '",
        "shape": "the shape of hidden is (4, 6) on rank 0 and (2, 2, 6) on rank 1",
        "dtype": "'(6,) torch.float32 on cpu' on rank 0 and '(6,) torch.float64 on cpu' on rank 1",
        "hidden": "whether hidden needs a gradient is False on rank 0 and True on rank 1",
        "weight": "whether weight needs a gradient is False on rank 0 and True on rank 1",
    }
    pairs = {
        "reduction": "reduction is 'mean' on rank 0 and 'sum' on rank 1",
        "similarity": "similarity is 'cosine' on rank 0 and 'dot' on rank 1",
        "temperature": "temperature is 0.1 on rank 0 and 0.2 on rank 1",
    }
    more = {
        "info_nce, two tensors": "temperature is 0.5 on rank 0 and 0.25 on rank 1",
        "info_nce, one learns": "temperature is 0.5 on rank 0 and '0.5, with a gradient' on rank 1",
        "info_nce, symmetric": "symmetric is False on rank 0 and True on rank 1",
        "info_nce, negatives": "whether there are negatives is False on rank 0 and True on rank 1",
        "sigmoid, bias": "bias is -10 on rank 0 and -9 on rank 1",
    }
    wanted = {f"linear_cross_entropy, {name}": text for name, text in head.items()}
    wanted |= {f"{loss}, {name}": text for loss in ("clip", "sigmoid") for name, text in pairs.items()}
    wanted |= {f"info_nce, {name}": text for name, text in pairs.items()} | more
    assert set(zero) == set(wanted)
    for name, text in wanted.items():
        assert zero[name].startswith("GroupError"), name
        assert text in zero[name], (name, zero[name])


@pytest.mark.slow
def test_a_killed_process_is_told_to_the_others(tmp_path):
    torchrun(3, "faults.py", "killed", tmp_path)
    assert not (tmp_path / "2.json").exists()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (
            f"GroupError: attend: rank {rank} of 3 did not get an answer from the others" in found["killed"]
        )
        assert found["seconds"] < 60  # the group's timeout is 20 s


@pytest.mark.slow
def test_the_script_of_the_page(tmp_path):
    page = (HERE.parents[1] / "docs" / "scaling.md").read_text("utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.search(r"```python\n(import.*?)```", page, flags=re.DOTALL)[1], "utf-8")
    done = torchrun(2, script)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("\n") == 2


def test_no_group():
    q = torch.zeros(1, 2, 4)
    with pytest.raises(xt.distributed.GroupError, match="init_process_group"):
        xt.distributed.attend(q, q, q)
