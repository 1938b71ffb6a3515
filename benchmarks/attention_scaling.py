"""How attention's cost grows with the length n: as n², at a flat ratio to SDPA's, up to n = 16384.

One head of 64, float32, plain. Each length is one interleaved run. The exponent is the slope of log time over
log n by least squares, for the lengths from the middle one up (2048 to 16384); the ratio counts as flat if
its last value there is at most 1.25 times its first.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import exptilt as xt
import harness
from harness import Goal
from rivals import attention as rivals

PAGE = harness.FOLDER.parent / "attention.md"
LENGTHS, QUICK = (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)
FLAT = 1.25  # shared machines drift by more than 10 %


def rounds(n: int) -> int:
    """Fewer where one call takes seconds, and where lengths so short are only meant to show that it runs."""
    return 2 if n < 512 else 9 if n <= 2048 else 5 if n <= 4096 else 3


def measure(lengths: tuple[int, ...]) -> dict[str, Any]:
    runs = []
    for n in lengths:
        x = rivals.inputs((1, 1, n, 64))
        cases = {
            "SDPA": rivals.forward(rivals.sdpa, x, False),
            "attend": rivals.forward(xt.attend, x),
            "attend, backward": rivals.backward(rivals.attend_output, x, False),
            "attend, forward mode": rivals.forward_mode(rivals.attend_output, x, False),
            "attend, double backward": rivals.double_backward(rivals.attend_output, x, False),
        }
        runs.append({"n": n, "cases": harness.compare(cases, "SDPA", rounds=rounds(n), label=f"n = {n}")})
    upper = runs[len(runs) // 2 - 1 :]
    exponents = {
        name: slope([(run["n"], run["cases"][name].best) for run in upper]) for name in runs[0]["cases"]
    }
    growth = {
        name: upper[-1]["cases"][name].ratio / upper[0]["cases"][name].ratio
        for name in exponents
        if name != "SDPA"
    }
    goals = [
        Goal(f"{name}: ratio at n = {upper[-1]['n']} over that at {upper[0]['n']}", value, FLAT)
        for name, value in growth.items()
    ]
    return {"runs": runs, "exponents": exponents, "goals": goals}


def slope(points: list[tuple[int, float]]) -> float:
    """Of log time over log n."""
    x, y = [math.log(n) for n, _ in points], [math.log(seconds) for _, seconds in points]
    return statistics.linear_regression(x, y).slope


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: SDPA's milliseconds and our ratios by n, and the exponent of n."""
    runs = results["runs"]
    rows = []
    for name, exponent in results["exponents"].items():
        cases = [run["cases"][name] for run in runs]
        cells = (
            [f"{c['best'] * 1e3:.1f}" for c in cases]
            if name == "SDPA"
            else [f"{c['ratio']:.2f}" for c in cases]
        )
        rows.append(["SDPA, ms" if name == "SDPA" else name, *cells, f"{exponent:.2f}"])
    return ["case", *[str(run["n"]) for run in runs], "exponent"], rows


def lines(axes: Any, results: dict[str, Any], key: str) -> None:
    """One line a case over n; SDPA in ink."""
    from exptilt.report.figures import INK, SERIES

    n = [run["n"] for run in results["runs"]]
    looks = [(INK, "--"), (SERIES[0], "-"), (SERIES[1], "-"), (SERIES[2], "-"), (SERIES[0], "-.")]
    for name, (colour, style) in zip(results["exponents"], looks, strict=True):
        axes.plot(
            n,
            [run["cases"][name][key] for run in results["runs"]],
            style,
            marker="o",
            markersize=3.5,
            color=colour,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(n, [str(value) for value in n])
    axes.set_xlabel("n, length of query and key")
    axes.set_yscale("log")


def paint_seconds(axes: Any, results: dict[str, Any]) -> None:
    from exptilt.report.figures import INK

    lines(axes, results, "best")
    first, last = results["runs"][0], results["runs"][-1]
    end = last["cases"]["SDPA"]["best"] * 0.5
    axes.plot(
        [first["n"], last["n"]],
        [end * (first["n"] / last["n"]) ** 2, end],
        ":",
        color=INK,
        linewidth=1.0,
        label="slope of n²",
    )
    axes.set_ylabel("seconds")
    axes.legend()


def paint_ratio(axes: Any, results: dict[str, Any]) -> None:
    lines(axes, results, "ratio")
    ticks = [1, 2, 5, 10, 20]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0.8, 60)
    axes.set_ylabel("time over SDPA's forward")
    axes.legend(ncols=2, loc="upper center")


PICTURES = {
    "attention_scaling": "Seconds over n, with the slope of n² beside them",
    "attention_scaling_ratio": "Ratios to SDPA's forward over n",
}
PARTS = (harness.Part(PAGE, "scaling", "attention_scaling", table, PICTURES),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    folder = harness.folder(arguments.quick)
    path = harness.save("attention_scaling", measure(QUICK if arguments.quick else LENGTHS), folder=folder)
    results = harness.read(path)
    print("\nRatios of time to SDPA's forward, by n.\n")
    harness.print_table(*table(results))
    harness.print_goals(Goal(g["what"], g["value"], g["limit"], g["unit"]) for g in results["goals"])
    harness.plot("attention_scaling", lambda axes: paint_seconds(axes, results), folder=folder)
    harness.plot("attention_scaling_ratio", lambda axes: paint_ratio(axes, results), folder=folder)
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
