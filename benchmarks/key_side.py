"""The keys' side: what a call that ranks keys costs over one that does not.

4 heads of 1,024 tokens, dimension 64, float32: `leave_one_out` over a call with key mass, and
`attend(top=8)` over a plain call, plain and causal, in one interleaved run each.
"""

from pathlib import Path
from typing import Any

import torch

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "two_measures.md"
LENGTH, QUICK, LIMIT = 1024, 128, 2.0  # leave_one_out over key mass


def measure(n: int, rounds: int) -> dict[str, Any]:
    x, runs, goals = torch.randn(3, 4, n, 64, generator=torch.Generator().manual_seed(0)), [], []
    for causal in (False, True):
        word = "causal" if causal else "plain"
        cases = {
            "key mass": lambda c=causal: xt.attend(*x, causal=c, key_mass=True),
            "leave_one_out": lambda c=causal: xt.leave_one_out(*x, causal=c),
            "attend": lambda c=causal: xt.attend(*x, causal=c),
            "top=8": lambda c=causal: xt.attend(*x, causal=c, top=8),
        }
        times = harness.compare(cases, "attend", rounds=rounds, label=word)
        over = times["leave_one_out"].best / times["key mass"].best
        runs.append({"case": word, "times": times, "over": over})
        goals.append(Goal(f"leave_one_out, {word}", over, LIMIT))
    return {"n": n, "runs": runs, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: milliseconds, and the ratios."""
    rows = []
    for run, goal in zip(results["runs"], results["goals"], strict=True):
        t, verdict = run["times"], "met" if goal["met"] else "NOT met"
        cells = [f"{t[name]['best'] * 1e3:.1f}" for name in ("attend", "key mass", "leave_one_out", "top=8")]
        over = f"{run['over']:.2f} (≤ {goal['limit']:g}: {verdict})"
        rows.append([run["case"], *cells, over, f"{t['top=8']['ratio']:.2f}"])
    header = ["ms", "attend", "with key mass", "leave_one_out", "attend(top=8)"]
    return [*header, "leave_one_out over key mass", "top=8 over attend"], rows


PARTS = (harness.Part(PAGE, "key side", "key_side", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    results = measure(QUICK, 2) if arguments.quick else measure(LENGTH, 9)
    path = harness.save("key_side", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
