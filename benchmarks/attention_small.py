"""Small calls: attention over a few positions, where what a call costs by itself is more than the arithmetic.

8 heads of 64, float32, plain, with all statistics, over SDPA; forward where no derivative is wanted, and
forward + backward.
"""

from pathlib import Path
from typing import Any

import exptilt as xt
import harness
from harness import Goal
from rivals import attention as rivals

PAGE = harness.FOLDER.parent / "attention.md"
LENGTHS, QUICK = (16, 64, 256), (16, 64)
LIMIT, AT = 4.0, 64  # of the forward pass, at this length


def measure(lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    runs, goals = [], []
    for n in lengths:
        x = rivals.inputs((1, 8, n, 64))
        forward = {"SDPA": rivals.forward(rivals.sdpa, x, False), "attend": rivals.forward(xt.attend, x)}
        backward = {
            "SDPA, backward": rivals.backward(rivals.sdpa, x, False),
            "attend, backward": rivals.backward(rivals.attend_output, x, False),
        }
        times = harness.compare(forward, "SDPA", rounds=rounds, label=f"n = {n}")
        times |= harness.compare(backward, "SDPA, backward", rounds=rounds, label=f"n = {n}, backward")
        runs.append({"n": n, "times": times})
        if n == AT:
            goals.append(Goal(f"attend, n = {n}", times["attend"].ratio, LIMIT))
    return {"runs": runs, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: microseconds of both, forward and with backward, and our ratio."""
    met = {goal["what"]: "met" if goal["met"] else "NOT met" for goal in results["goals"]}
    rows = []
    for run in results["runs"]:
        cells = []
        for kind in ("", ", backward"):
            theirs, ours = run["times"][f"SDPA{kind}"], run["times"][f"attend{kind}"]
            cells += [f"{theirs['best'] * 1e6:.0f}", f"{ours['best'] * 1e6:.0f}", f"{ours['ratio']:.2f}"]
        verdict = met.get(f"attend, n = {run['n']}", "")
        rows.append([f"n = {run['n']}", *cells[:3], f"≤ {LIMIT:g}: {verdict}" if verdict else "", *cells[3:]])
    header = ["µs", "SDPA", "attend", "ratio", "goal", "SDPA, backward", "attend, backward", "ratio"]
    return header, rows


PARTS = (harness.Part(PAGE, "small calls", "attention_small", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    results = measure(QUICK, 1) if arguments.quick else measure(LENGTHS, 15)
    path = harness.save("attention_small", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
