"""Keys on several processes: what 1, 2 and 3 processes here take, and what they send.

Three processes are started once by torchrun, one thread each. In every round a group of one, of two and of
three of them does the same work in turn, forward and backward in float32, so that their times can be
compared; the others wait. Ideal is the time of one process divided by the processes, or by the cores if
these are fewer.

    sharded, zigzag       3,072 queries and keys, 8 heads of 64, causal, sharded with balanced work
    sharded, contiguous   the same, each process with one stretch of the sequence
    sharded               the same, not causal
    common queries        64 queries that all have, 49,152 keys sharded
    info_nce              6,144 pairs of dimension 128, sharded
    vocabulary            1,024 tokens, 12,288 outcomes sharded, dimension 256
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "scaling.md"
COUNTS = (1, 2, 3)
HEADS, D = 8, 64
SIZES = {"tokens": 3072, "keys": 49152, "pairs": 6144, "words": 1024, "outcomes": 12288}
QUICK = {"tokens": 96, "keys": 192, "pairs": 96, "words": 16, "outcomes": 48}
Run = Callable[[], object]

# ---- measured here


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def backward(function: Callable[..., Tensor], *tensors: Tensor) -> Run:
    """One call, forward and backward."""
    leaves = [x.contiguous().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(function(*leaves), leaves)


def cases(sizes: dict[str, int], group: Any) -> dict[str, Run]:
    """The work of this process in a group, by name."""
    n = sizes["tokens"]
    qkv = [draw(HEADS, n, D, seed=i) for i in range(3)]
    cut = xt.distributed.shard

    def sharded(order: str, causal: bool) -> Run:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = {"queries": "sharded", "order": order, "causal": causal, "group": group}
            return xt.distributed.attend(q, k, v, **options).output.sum()

        return backward(call, *(cut(x, order=order, group=group) for x in qkv))

    def common(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return xt.distributed.attend(q, k, v, group=group).output.sum()

    def pairs(x: Tensor, y: Tensor) -> Tensor:
        return xt.losses.info_nce(x, y, group=group)

    target = torch.arange(sizes["words"]) % sizes["outcomes"]

    def vocabulary(h: Tensor, W: Tensor) -> Tensor:
        loss: Tensor = xt.losses.linear_cross_entropy(h, W, target, group=group)
        return loss

    keys = [cut(draw(HEADS, sizes["keys"], D, seed=i), group=group) for i in (4, 5)]
    batch = [cut(draw(sizes["pairs"], 128, seed=i), group=group) for i in (6, 7)]
    weight = cut(draw(sizes["outcomes"], 256, seed=9), group=group)
    return {
        "sharded, zigzag": sharded("zigzag", True),
        "sharded, contiguous": sharded("contiguous", True),
        "sharded": sharded("contiguous", False),
        "common queries": backward(common, draw(HEADS, 64, D, seed=3), *keys),
        "info_nce": backward(pairs, *batch),
        "vocabulary": backward(vocabulary, draw(sizes["words"], 256, seed=8), weight),
    }


class Traffic:
    """Counts the tensors that this process gives to be gathered or summed, and their bytes."""

    def __init__(self) -> None:
        from exptilt.distributed.group import Members

        self.counts: dict[str, int] = {}
        reduce, collect = Members.reduce, Members.collect

        def note(kind: str, x: Tensor) -> None:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.counts[f"{kind} bytes"] = self.counts.get(f"{kind} bytes", 0) + x.nbytes

        def reducing(this: Any, x: Tensor, *rest: Any) -> Tensor:
            note("sum", x)
            return reduce(this, x, *rest)

        def collecting(this: Any, x: Tensor, *rest: Any) -> list[Tensor]:
            note("gather", x)
            return collect(this, x, *rest)

        Members.reduce = reducing
        Members.collect = collecting

    def of(self, run: Run) -> dict[str, int]:
        """What one call sends."""
        self.counts = {}
        run()
        return dict(self.counts)


def worker(path: Path, quick: bool) -> None:
    """One of the processes; the first writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, sizes, rounds = dist.get_rank(), QUICK if quick else SIZES, 2 if quick else 7
    groups = {count: dist.new_group(list(range(count))) for count in COUNTS}
    work = {count: cases(sizes, groups[count]) for count in COUNTS if rank < count}
    names, traffic = list(work[3]), Traffic()
    seconds: dict[str, dict[int, list[float]]] = {name: {count: [] for count in COUNTS} for name in names}
    work_done: dict[str, dict[int, list[float]]] = {name: {count: [] for count in COUNTS} for name in names}
    sent: dict[str, dict[int, dict[str, int]]] = {name: {} for name in names}
    for turn in range(rounds + 1):  # the first warms up, and is counted
        for name in names:
            for count in COUNTS:
                dist.barrier()
                if rank >= count:
                    continue
                if turn == 0:
                    sent[name][count] = traffic.of(work[count][name])
                    continue
                begin, busy = time.perf_counter(), time.process_time()
                work[count][name]()
                seconds[name][count].append(time.perf_counter() - begin)
                spent = torch.tensor(time.process_time() - busy)
                dist.all_reduce(spent, group=groups[count])
                work_done[name][count].append(float(spent))
    dist.barrier()
    if rank == 0:
        path.write_text(json.dumps({"seconds": seconds, "processor": work_done, "sent": sent}))
    dist.barrier()
    os._exit(0)


def measured(quick: bool) -> dict[str, Any]:
    """Start the processes, and read what they found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
        words += [__file__, "--worker", str(path), *(["--quick"] if quick else [])]
        subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(path.read_text())
        return found


# ---- tables


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: time of 1, 2, 3 processes relative to one, the ideal's excess, bytes of 2 and 3."""
    cores, rows = results["cores"], []
    for name, by_count in results["seconds"].items():
        best = [min(by_count[str(count)]) for count in COUNTS]
        cells = [f"{best[0] * 1e3:.0f} ms"]
        for count, seconds in zip(COUNTS[1:], best[1:], strict=True):
            ideal = best[0] / min(count, cores)
            cells.append(f"{seconds / best[0]:.2f} ({100 * (seconds / ideal - 1):+.0f} %)")
        busy = [min(results["processor"][name][str(count)]) for count in COUNTS]
        cells += [f"{x / busy[0]:.2f}" for x in busy[1:]]
        for count in COUNTS[1:]:
            sent = results["sent"][name][str(count)]
            moved = sum(x for kind, x in sent.items() if kind.endswith("bytes"))
            cells.append(f"{moved / 1e6:.2f} MB in {sum(sent.values()) - moved}")
        rows.append([name, *cells])
    header = [
        f"load {results['load']:.1f}",
        "1 process",
        "2: × of it (over ideal)",
        "3: × of it (over ideal)",
    ]
    header += ["processor time, 2 ÷ 1", "3 ÷ 1", "2 send", "3 send"]
    return header, rows


PARTS = (harness.Part(PAGE, "processes", "distributed", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    load = os.getloadavg()[0]  # of others, before anything is started
    results = measured(arguments.quick) | {"load": load, "cores": os.cpu_count()}
    two = {name: min(x["2"]) / min(x["1"]) * 2 for name, x in results["seconds"].items()}
    results["goals"] = [
        Goal(f"{name}: 2 processes over half of one", ratio, 1.25) for name, ratio in two.items()
    ]
    harness.print_goals(results["goals"])
    path = harness.save("distributed", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(Path(sys.argv[sys.argv.index("--worker") + 1]), "--quick" in sys.argv)
    else:
        main()
