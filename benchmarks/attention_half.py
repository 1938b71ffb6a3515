"""Reading a prompt in half precision: the forward pass in bfloat16, all statistics, over SDPA in bfloat16.

Shapes as in `attention.py`. A processor without arithmetic in bfloat16 widens it to float32 on the way; the
table has both rivals in float32 as well, over the same baseline, so that the cost of widening is seen.
"""

from pathlib import Path
from typing import Any

import torch

import attention
import exptilt as xt
import harness
from harness import Goal
from rivals import attention as rivals

PAGE = harness.FOLDER.parent / "attention.md"
BASE = "SDPA"
LIMITS = attention.LIMITS["attend"]  # plain, causal


def measure(settings: tuple[attention.Setting, ...]) -> dict[str, Any]:
    runs, goals = [], []
    for setting in settings:
        wide = rivals.inputs(setting.shape)
        half = [x.to(torch.bfloat16) for x in wide]
        for causal in (False, True):
            label = f"n = {setting.shape[2]}, {'causal' if causal else 'plain'}"

            def attend(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = causal
            ) -> xt.AttentionResult:
                return xt.attend(q, k, v, causal=causal)

            cases = {
                BASE: rivals.forward(rivals.sdpa, half, causal),
                "attend": rivals.forward(attend, half),
                "SDPA, float32": rivals.forward(rivals.sdpa, wide, causal),
                "attend, float32": rivals.forward(attend, wide),
            }
            times = harness.compare(cases, BASE, rounds=setting.rounds, label=label)
            goals.append(Goal(f"attend, {label}", times["attend"].ratio, LIMITS[causal]))
            runs.append({"shape": setting.shape, "causal": causal, "cases": times})
    return {"runs": runs, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row for each case, a column for each shape, then the goal and whether it is met."""
    runs = results["runs"]
    header = ["case", *[f"{run['shape'][2]}{' causal' if run['causal'] else ''}" for run in runs], "goal", ""]
    rows = [[f"{BASE}, ms", *[f"{run['cases'][BASE]['best'] * 1e3:.0f}" for run in runs], "", ""]]
    for case in runs[0]["cases"]:
        if case != BASE:
            ratios = [run["cases"][case]["ratio"] for run in runs]
            limits = [LIMITS[run["causal"]] for run in runs] if case == "attend" else []
            rows.append([case, *[f"{ratio:.2f}" for ratio in ratios], *attention.verdict(ratios, limits)])
    return header, rows


PARTS = (harness.Part(PAGE, "half precision", "attention_half", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    results = measure(attention.QUICK if arguments.quick else attention.SETTINGS)
    path = harness.save("attention_half", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
