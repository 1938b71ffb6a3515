"""Keys on several processes: what 1, 2 and 3 processes here take, what they send, and a projection.

Three processes are started once by torchrun, one thread each. In every round a group of one, of two and of
three of them does the same work in turn, forward and backward in float32, so that their times can be
compared; the others wait. Ideal is the time of one process divided by the processes, or by the cores if
these are fewer.

    ring, zigzag       3,072 queries and keys, 8 heads of 64, causal, sharded with balanced work
    ring, contiguous   the same, each process with one stretch of the sequence
    ring               the same, not causal
    common queries     64 queries that all have, 49,152 keys sharded
    info_nce           6,144 pairs of dimension 128, sharded
    vocabulary         1,024 tokens, 12,288 outcomes sharded, dimension 256

The projection for GPUs is arithmetic: `Machine` and `projected` say with which numbers.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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

    def ring(order: str, causal: bool) -> Run:
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
        "ring, zigzag": ring("zigzag", True),
        "ring, contiguous": ring("contiguous", True),
        "ring": ring("contiguous", False),
        "common queries": backward(common, draw(HEADS, 64, D, seed=3), *keys),
        "info_nce": backward(pairs, *batch),
        "vocabulary": backward(vocabulary, draw(sizes["words"], 256, seed=8), weight),
    }


class Traffic:
    """Counts the messages that this process sends around the ring, the sums it joins, and their bytes."""

    def __init__(self) -> None:
        from exptilt.distributed.group import Members
        from exptilt.distributed.travel import Sending

        self.counts: dict[str, int] = {}
        send, reduce, collect = Sending.__init__, Members.reduce, Members.collect

        def note(kind: str, x: Tensor) -> None:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.counts[f"{kind} bytes"] = self.counts.get(f"{kind} bytes", 0) + x.nbytes

        def sending(this: Any, members: Any, message: Tensor, *rest: Any) -> None:
            note("ring", message)
            send(this, members, message, *rest)

        def reducing(this: Any, x: Tensor, *rest: Any) -> Tensor:
            note("sum", x)
            return reduce(this, x, *rest)

        def collecting(this: Any, x: Tensor, *rest: Any) -> list[Tensor]:
            note("agree", x)
            return collect(this, x, *rest)

        Sending.__init__ = sending
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


# ---- projected


@dataclass(frozen=True)
class Machine:
    """What the arithmetic takes of a GPU and its links.

    Attributes:
        flops: a second that attention attains on one GPU, forward; backward is 2.5 times the work.
        near: bytes a second to a neighbour in the same box, each way.
        far: the same to another box.
        memory: bytes a second of the GPU's own memory.
        latency: seconds of a message.
        box: GPUs in a box.
    """

    flops: float
    near: float
    far: float
    memory: float
    latency: float = 20e-6
    box: int = 8


# Attained: a causal sequence of 8,192 with 32 heads of 128 is 5.5e11 operations; ring-flash-attention's table
# has 373.4 of them a second on an A100, 591.5 on an H800 (forward). Links: NVLink at 200 and 160 GB/s each
# way, 200 Gb/s of network for each GPU. Memory: the makers' figures.
A100 = Machine(373.4 * 5.5e11, 200e9, 25e9, 2.0e12)
H800 = Machine(591.5 * 5.5e11, 160e9, 25e9, 3.35e12)


def projected(
    on: Machine,
    count: int,
    tokens: int,
    *,
    heads: int = 32,
    key_heads: int = 8,
    width: int = 128,
    bytes_each: int = 4,
    order: str = "zigzag",
    derivative: bool = True,
) -> float:
    """The share of the time that so many GPUs, with so many tokens each, spend on the work itself."""
    link = on.near if count <= on.box else on.far
    block = 2 * tokens**2 * heads * 2 * width / on.flops  # all pairs of one process with another
    keys = tokens * key_heads * 2 * width
    send = keys * bytes_each / link + on.latency
    merge = 3 * tokens * heads * width * 4 / on.memory  # two results read, one written, in float32
    half = block / 2
    steps = [half] * count if order == "zigzag" else [half] + [block] * (count - 1)
    agree = 2 * (on.latency * math.log2(max(count, 2)) + 24 * count / link)
    spent = agree + sum(max(step + merge, send * (i + 1 < count)) for i, step in enumerate(steps))
    useful = count * half
    if derivative:
        back = keys * 4 / link + on.latency
        add = 3 * (tokens * heads * width + keys) * 4 / on.memory
        spent += agree / 2 + back  # the last gradients go home alone
        spent += sum(max(2.5 * step + add, (send + back) * (i + 1 < count)) for i, step in enumerate(steps))
        useful *= 3.5
    return useful / spent


PUBLISHED = [  # ring-flash-attention's README, batch API: 8,192 tokens for each of 8 GPUs, keys in bfloat16
    ("A100", "zigzag", False, 0.817),
    ("A100", "zigzag", True, 0.898),
    ("A100", "contiguous", False, 0.514),
    ("A100", "contiguous", True, 0.525),
    ("H800", "zigzag", False, 0.852),
    ("H800", "zigzag", True, 0.902),
    ("H800", "contiguous", False, 0.521),
    ("H800", "contiguous", True, 0.539),
]


def projections() -> dict[str, Any]:
    machines = {"A100": A100, "H800": H800}
    checked = [
        {
            "GPU": name,
            "order": order,
            "derivative": derivative,
            "published": share,
            "model": projected(machines[name], 8, 8192, bytes_each=2, order=order, derivative=derivative),
        }
        for name, order, derivative, share in PUBLISHED
    ]
    counts = (8, 64, 256, 1024)
    weak = {str(n): [projected(A100, count, n) for count in counts] for n in (2048, 8192, 32768)}
    strong = [projected(A100, count, 2**20 // count) for count in counts]
    return {"checked": checked, "counts": counts, "weak": weak, "strong": strong}


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


def checked_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            x["GPU"],
            x["order"],
            "both" if x["derivative"] else "forward",
            *(f"{x[k]:.0%}" for k in ("published", "model")),
        ]
        for x in results["projection"]["checked"]
    ]
    return ["8 GPUs", "order", "passes", "published", "model"], rows


def projection_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    found = results["projection"]
    rows = [[f"{int(n):,} tokens each", *(f"{x:.0%}" for x in shares)] for n, shares in found["weak"].items()]
    rows.append(["1,048,576 tokens in all", *(f"{x:.0%}" for x in found["strong"])])
    return ["GPUs", *(f"{count:,}" for count in found["counts"])], rows


PARTS = (
    harness.Part(PAGE, "processes", "distributed", table),
    harness.Part(PAGE, "published", "distributed", checked_table),
    harness.Part(PAGE, "projection", "distributed", projection_table),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    load = os.getloadavg()[0]  # of others, before anything is started
    results = measured(arguments.quick) | {"load": load, "projection": projections(), "cores": os.cpu_count()}
    two = {name: min(x["2"]) / min(x["1"]) * 2 for name, x in results["seconds"].items()}
    results["goals"] = [
        Goal(f"{name}: 2 processes over half of one", ratio, 1.25) for name, ratio in two.items()
    ]
    harness.print_goals(results["goals"])
    path = harness.save("distributed", results, folder=harness.folder(arguments.quick))
    for make in (table, checked_table, projection_table):
        harness.print_table(*make(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(Path(sys.argv[sys.argv.index("--worker") + 1]), "--quick" in sys.argv)
    else:
        main()
