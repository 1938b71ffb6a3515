"""Steps of a flow of moving points against the obvious loop with the N×N matrix: time, and memory beyond
the points.

One step is x ← layer_norm(x + softmax(x xᵀ/8) x) on N points in 64 dimensions, float32; both sides take the
same step and are checked against each other. What `Flow.run` measures of a state (Gaussianity, clusters,
spectrum) is timed on its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import harness
from exptilt.dynamics import Flow
from exptilt.dynamics.observe.snapshot import measure
from harness import Goal

PAGE = harness.FOLDER.parent / "dynamics.md"
SIZES, QUICK = (1024, 2048, 4096, 8192, 20_000), (256, 512)
DIMENSION = 64
FLAT = 40.0  # MB beyond inputs and outputs; one matrix of scores at N = 20,000 is 1600


def points_of(count: int) -> torch.Tensor:
    return torch.nn.functional.layer_norm(
        torch.randn(count, DIMENSION, generator=torch.Generator().manual_seed(0)), (DIMENSION,)
    )


def naive(x: torch.Tensor) -> torch.Tensor:
    """The obvious step."""
    return torch.nn.functional.layer_norm(x + torch.softmax(x @ x.mT / 8, -1) @ x, (DIMENSION,), eps=0.0)


def cases_for(count: int) -> dict[str, Callable[[], object]]:
    x, flow = points_of(count), Flow("layer", beta=1 / 8)
    if count <= 4096:
        torch.testing.assert_close(flow(x), naive(x), rtol=1e-4, atol=1e-4)
    G = flow.slope(x).log_normalizer
    return {
        "Flow": lambda: flow(x),
        "naive": lambda: naive(x),
        "measuring": lambda: measure(x, G, None, tolerance=0.05),
    }


def prepare(name: str, count: int) -> Callable[[], object]:
    """In the new process: the inputs, and one call on something small, which loads code."""
    cases_for(300)[name]()
    x, flow = points_of(count), Flow("layer", beta=1 / 8)
    return (lambda: flow(x)) if name == "Flow" else (lambda: naive(x))


def measure_all(sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    times, memory = {}, {}
    for count in sizes:
        large = count > 10_000
        slow = (
            {"naive": min(3, rounds), "measuring": min(3, rounds)} if large else {"measuring": min(3, rounds)}
        )
        print(f"\nN = {count}", flush=True)
        quick = (
            3 * rounds if count <= 2048 else rounds
        )  # small sizes differ little, and more from one moment to the next
        times[count] = harness.compare(
            cases_for(count), "Flow", rounds=quick, slow=slow, label=f"N = {count}"
        )
        harness.print_times(times[count])
        memory[count] = {name: harness.peak_extra_memory(prepare, name, count) for name in ("Flow", "naive")}
    goals = [
        Goal(f"time of Flow over naive, N = {count}", 1 / times[count]["naive"].ratio, 1.0) for count in sizes
    ]
    goals += [
        Goal(f"memory of Flow, N = {count}", memory[count]["Flow"].beyond / 1e6, FLAT, "MB")
        for count in sizes
    ]
    harness.print_goals(goals)
    return {"dimension": DIMENSION, "times": times, "memory": memory, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = [
        "N",
        "steps a second",
        "naive",
        "times faster",
        "measuring / step",
        "MB beyond the points",
        "naive MB",
    ]
    rows = []
    for count, times in results["times"].items():
        ours, rival, extra = times["Flow"], times["naive"], times["measuring"]
        memory = results["memory"][count]
        rates = [f"{1 / x['best']:.3g}" for x in (ours, rival)]
        ratios = [f"{x['ratio']:.2f}" for x in (rival, extra)]
        beyond = [f"{memory[x]['beyond'] / 1e6:.0f}" for x in ("Flow", "naive")]
        rows.append([f"{int(count):,}", *rates, *ratios, *beyond])
    return header, rows


PARTS = (harness.Part(PAGE, "flow", "flow", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    sizes, rounds = (QUICK, 2) if arguments.quick else (SIZES, 7)
    path = harness.save("flow", measure_all(sizes, rounds), folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
