"""Over several processes, a reading is that of the whole batch: two real ones under torchrun, against one
alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ExptiltWarning

HERE = Path(__file__).resolve()


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x, both=True):
        x = 4 * self.first(x, x, x, need_weights=False)[0] + x
        return self.second(x, x, x, need_weights=False)[0] if both else x


def batches():
    torch.manual_seed(1)
    return [2 * torch.randn(3, 6, 8), 3 * torch.randn(2, 9, 8)]


def worker(folder):
    """One of two processes: its own batch, the reading of both, and what clipping does."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Attention()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    monitor = xt.lens.TrainingMonitor(
        wrapped, every=1, log="csv", folder=folder, max_logit=1e-3, min_entropy=None
    )
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with torch.no_grad():
            with monitor.step():
                wrapped(batches()[rank], both=True)
            whole = monitor.readings
            record = monitor.record
            with monitor.step():  # a layer that only one process runs
                model(batches()[rank], both=rank == 1)
    changed = xt.lens.clip_qk_(wrapped, record, 1.0)
    found = {
        "readings": [vars(r) for r in whole],
        "one-sided": [vars(r) for r in monitor.readings],
        "warnings": len([w for w in seen if issubclass(w.category, ExptiltWarning)]),
        "changed": [vars(c) for c in changed],
        "weights": model.first.in_proj_weight.flatten().tolist(),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # all is written; at the end of Python, threads of torch's process group now and then abort


@pytest.mark.slow
def test_two_processes_read_as_one(tmp_path):
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(HERE),
        str(tmp_path),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    model = Attention()
    got = []
    monitor = xt.lens.TrainingMonitor(
        model, every=1, log=lambda step, readings: got.append(readings), max_logit=None, min_entropy=None
    )
    with torch.no_grad():
        with monitor.step():
            for one in batches():
                model(one)
        record = monitor.record
        with monitor.step():
            model(batches()[0], both=False)
            model(batches()[1])
    assert len(got[0]) == 4
    for rank in ranks:
        for name, alone in (("readings", got[0]), ("one-sided", got[1])):
            assert len(rank[name]) == len(alone)
            for theirs, ours in zip(rank[name], alone, strict=True):
                assert (theirs["layer"], theirs["name"], theirs["head"]) == (ours.layer, ours.name, ours.head)
                assert theirs["queries"] == ours.queries
                for key in ("score_max", "entropy", "log_normalizer"):
                    assert abs(theirs[key] - getattr(ours, key)) < 1e-5
    assert {reading.queries for reading in got[0]} == {3 * 6 + 2 * 9}
    assert {reading.queries for reading in got[1] if reading.layer == 1} == {2 * 9}

    # The first process alone writes and warns; both clip alike, as one would with the whole batch.
    assert len((tmp_path / "attention.csv").read_text().splitlines()) == 1 + 4 + 4
    assert [rank["warnings"] for rank in ranks] == [4, 0]
    changed = xt.lens.clip_qk_(model, record, 1.0)
    assert len(changed) > 0
    for rank in ranks:
        assert [(c["layer"], c["head"]) for c in rank["changed"]] == [(c.layer, c.head) for c in changed]
        torch.testing.assert_close(
            torch.tensor(rank["weights"]), model.first.in_proj_weight.detach().flatten()
        )
    assert ranks[0]["weights"] == ranks[1]["weights"]


if __name__ == "__main__":
    worker(sys.argv[1])
