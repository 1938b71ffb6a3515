"""Attention with its statistics and derivatives, against PyTorch's fused attention and others.

Float32, (batch, heads, n, d) as in `SETTINGS`, plain and causal. Ratios, each from one interleaved run, best
of several rounds:

    forward             all one-sweep statistics; and with key_mass                     over SDPA's forward
    forward + backward  through the output; through output, entropy and log_normalizer  over SDPA's own
    forward mode        of the output along a tangent in query, key and value           over SDPA's forward
    double backward     forward, backward, and backward of that, in one                 over SDPA's forward

(SDPA has no statistics, no forward mode and no double backward.)

The rivals are in `rivals/attention.py`. Takes about five minutes and 7 GB, which are the rivals' n×n
matrices.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Goal
from rivals import attention as rivals

PAGE = harness.FOLDER.parent / "attention.md"
LIMITS = {  # ratios to the baseline of the case's group, plain and causal
    "attend": (1.0, 0.9),
    "attend, key_mass": (1.7, 1.7),
    "attend, backward": (0.95, 0.95),
    "attend, backward of three": (0.95, 0.95),
    "attend, forward mode": (3.4, 3.4),
    "attend, double backward": (8.5, 8.5),
}


@dataclass(frozen=True)
class Setting:
    """A shape, and how often it is measured; cases that build the n×n matrix join fewer rounds."""

    shape: tuple[int, int, int, int]  # batch, heads, n, d
    rounds: int
    slow_rounds: int


SETTINGS = (
    Setting((1, 12, 1024, 64), 9, 4),
    Setting((1, 12, 2048, 64), 6, 3),
    Setting((1, 8, 4096, 64), 5, 2),
)
QUICK = (Setting((1, 2, 256, 64), 2, 1),)


def is_slow(case: str) -> bool:
    return case.startswith(("materialised", "FlexAttention"))


def measure(settings: tuple[Setting, ...]) -> dict[str, Any]:
    """All groups at all settings, what fused rivals refused, and the goals."""
    refused = rivals.refusals()
    runs, goals = [], []
    for setting in settings:
        for causal in (False, True):
            label = f"n = {setting.shape[2]}, {'causal' if causal else 'plain'}"
            times = {}
            for group in rivals.groups(setting.shape, causal, leave_out=frozenset(refused)):
                slow = {name: setting.slow_rounds for name in group.cases if is_slow(name)}
                seen = harness.compare(
                    group.cases,
                    group.baseline,
                    rounds=setting.rounds,
                    slow=slow,
                    label=f"{label}, {group.name}",
                )
                times[group.name] = {"baseline": group.baseline, "cases": seen}
                for name in (name for name in LIMITS if name in seen):
                    goals.append(Goal(f"{name}, {label}", seen[name].ratio, LIMITS[name][causal]))
            runs.append({"shape": setting.shape, "causal": causal, "groups": times})
    return {"runs": runs, "refused": refused, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row for each case, a column for each shape, the goal, whether all shapes meet it."""
    runs = results["runs"]
    header = ["case", *[f"{run['shape'][2]}{' causal' if run['causal'] else ''}" for run in runs], "goal", ""]
    rows = []
    for name, group in runs[0]["groups"].items():
        rows.append(
            [f"{name}: {group['baseline']}, ms"]
            + [f"{base(run, name)['best'] * 1e3:.0f}" for run in runs]
            + ["", ""]
        )
        for case in group["cases"]:
            if case != group["baseline"]:
                ratios = [run["groups"][name]["cases"][case]["ratio"] for run in runs]
                limits = [LIMITS[case][run["causal"]] for run in runs] if case in LIMITS else []
                rows.append([case, *[f"{ratio:.2f}" for ratio in ratios], *verdict(ratios, limits)])
    return header, rows


def base(run: dict[str, Any], group: str) -> dict[str, Any]:
    found = run["groups"][group]
    return found["cases"][found["baseline"]]


def verdict(ratios: list[float], limits: list[float]) -> tuple[str, str]:
    """The goal in words, and in how many columns it is met; nothing where there are no limits."""
    if not limits:
        return "", ""
    met = sum(ratio <= limit for ratio, limit in zip(ratios, limits, strict=True))
    goal = ", causal ≤ ".join(f"{limit:g}" for limit in dict.fromkeys(limits))  # plain runs come first
    return f"≤ {goal}", "met" if met == len(ratios) else f"NOT met ({met} of {len(ratios)} met)"


def paint(axes: Any, results: dict[str, Any]) -> None:
    """A line of dots for each case: one dot a shape, its ratio to SDPA; goals as bars across the line."""
    from exptilt.report.figures import INK, SERIES

    cases = [
        (group, case)
        for group, g in results["runs"][0]["groups"].items()
        for case in g["cases"]
        if case != g["baseline"]
    ]
    for place, (group, case) in enumerate(cases):
        colour = SERIES[0] if case in LIMITS else SERIES[1]
        for causal, offset in ((False, -0.14), (True, 0.14)):
            ratios = [
                run["groups"][group]["cases"][case]["ratio"]
                for run in results["runs"]
                if run["causal"] == causal
            ]
            face = "white" if causal else colour
            axes.plot(
                ratios,
                [place + offset] * len(ratios),
                "o",
                color=colour,
                markerfacecolor=face,
                markersize=4.5,
            )
            if case in LIMITS:
                ends = [place + min(offset * 3, 0), place + max(offset * 3, 0)]
                axes.plot([LIMITS[case][causal]] * 2, ends, color=INK, linewidth=1.6)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(cases)), [case for _, case in cases])
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("time over SDPA (backward: over SDPA's forward + backward)")
    axes.plot([], [], "o", color=INK, markersize=4.5, label="plain")
    axes.plot([], [], "o", color=INK, markerfacecolor="white", markersize=4.5, label="causal")
    axes.plot([], [], color=INK, linewidth=1.6, label="goal")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.1), ncols=3)


def show(path: Path) -> None:
    """Print the table, what was refused, and draw the plot, from the saved results."""
    results = harness.read(path)
    print("Ratios of time. Each group is over its baseline, whose own time is given.\n")
    harness.print_table(*table(results))
    print("Refused on this machine, and therefore not timed:")
    for name, words in results["refused"].items():
        print(f"  {name}: {words}")
    print(flush=True)
    harness.plot("attention", lambda axes: paint(axes, results), width=7.2, height=5.2, folder=path.parent)


PICTURES = {"attention": "Ratios to SDPA, one dot a shape, goals as bars"}
PARTS = (harness.Part(PAGE, "times", "attention", table, PICTURES),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save(
        "attention", measure(QUICK if arguments.quick else SETTINGS), folder=harness.folder(arguments.quick)
    )
    show(path)
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
