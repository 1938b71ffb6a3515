"""Memory of attention and its derivatives beyond inputs and outputs, at n = 8192 with 8 heads of 64.

One matrix of scores would be 8 · 8192² · 4 bytes = 2.1 GB. Each call runs in a process of its own. Outputs
are what a caller gets: the output and its statistics; the gradients; the tangent; the gradients of gradients.
Cotangents and tangents that are passed in are inputs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import exptilt as xt
import harness
from harness import Goal
from rivals import attention as rivals

PAGE = harness.FOLDER.parent / "attention.md"
SHAPE, QUICK = (1, 8, 8192, 64), (1, 2, 1024, 64)
LIMIT = 150.0  # MB, of 10⁶ bytes

CASES: dict[str, Callable[..., Callable[[], object]]] = {
    "attend": lambda x: rivals.forward(xt.attend, x),
    "attend, key_mass": lambda x: rivals.forward(lambda q, k, v: xt.attend(q, k, v, key_mass=True), x),
    "attend, backward": lambda x: rivals.backward(rivals.attend_output, x, False),
    "attend, backward of three": lambda x: rivals.backward(rivals.attend_three, x, False),
    "attend, forward mode": lambda x: rivals.forward_mode(rivals.attend_output, x, False),
    "attend, double backward": lambda x: rivals.double_backward(rivals.attend_output, x, False),
    "SDPA": lambda x: rivals.forward(rivals.sdpa, x, False),
    "SDPA, backward": lambda x: rivals.backward(rivals.sdpa, x, False),
}


def prepare(name: str, shape: tuple[int, int, int, int]) -> Callable[[], object]:
    """In the new process: the inputs, and one small call, so that code is loaded."""
    CASES[name](rivals.inputs((1, 2, 300, shape[3])))()
    return CASES[name](rivals.inputs(shape))


def measure(shape: tuple[int, int, int, int], names: list[str]) -> dict[str, Any]:
    seen = {name: harness.peak_extra_memory(prepare, name, shape) for name in harness.track(names, "memory")}
    batch, heads, n, _ = shape
    goals = [
        Goal(name, memory.beyond / 1e6, LIMIT, "MB")
        for name, memory in seen.items()
        if name.startswith("attend")
    ]
    return {
        "shape": shape,
        "matrix": batch * heads * n * n * torch.float32.itemsize,
        "memory": seen,
        "goals": goals,
    }


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: megabytes at the peak, of these returned, beyond inputs and outputs, and the goal."""
    met = {goal["what"]: goal["met"] for goal in results["goals"]}
    rows = []
    for name, m in results["memory"].items():
        words = [f"≤ {LIMIT:g}", "met" if met[name] else "NOT met"] if name in met else ["", ""]
        rows.append([name, *[f"{m[part] / 1e6:.0f}" for part in ("peak", "returned", "beyond")], *words])
    rows.append(["one n×n matrix, for comparison", "", "", f"{results['matrix'] / 1e6:.0f}", "", ""])
    return ["MB", "peak", "returned", "beyond", "goal", ""], rows


PARTS = (harness.Part(PAGE, "memory", "attention_memory", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    shape, names = (QUICK, ["attend", "attend, double backward"]) if arguments.quick else (SHAPE, list(CASES))
    path = harness.save("attention_memory", measure(shape, names), folder=harness.folder(arguments.quick))
    print(f"\n(batch, heads, n, d) = {shape}, float32. Peak of one call above its inputs, in MB.\n")
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
