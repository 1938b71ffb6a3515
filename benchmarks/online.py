"""Filters fed one observation at a time, and modes that are functions: microseconds a step, in turn.

M = 3 modes, n = 4 states, m = 2 observed components. One target in a Python loop, 20,000 targets at once, and
the turn model of `switching.py`, filtered, smoothed and fed one by one.
"""

from typing import Any

import numpy as np

import harness
from harness import Goal, compare, print_goals, print_table, save
from switching import make, steps_online, turning


def main() -> None:
    arguments = harness.start(__doc__)
    rng = np.random.default_rng(0)
    T, targets, rounds = 2000, 20_000, 2 if arguments.quick else 5
    model, curved = make(3, 4, 2), turning()
    y, crowd = rng.normal(size=(T, 2)), rng.normal(size=(rounds, targets, 2))
    walk = np.cumsum(0.3 * rng.normal(size=T))
    polar = np.stack([111 + walk, 0.46 + 0.01 * rng.normal(size=T)], 1)
    cases: dict[str, Any] = {}
    steps, most = dict[str, int](), dict[str, float]()

    def add(name: str, count: int, goal: float | None, call: Any) -> None:
        cases[name], steps[name] = call, count
        if goal is not None:
            most[name] = goal

    for method in ("imm", "gpb2"):
        add(f"{method}, one by one", T, 10.0, lambda k=method: steps_online(model.online(method=k), y))
        many = model.online(method=method, batch=targets)
        goal = 1.0 if method == "imm" else None
        add(f"{method}, {targets} at once", targets * rounds, goal, lambda s=many: steps_online(s, crowd))
    for linearize in ("extended", "unscented"):
        word = f"turn model, {linearize}"
        add(f"{word}, filter", T, 50.0, lambda k=linearize: curved.filter(polar, linearize=k))
        add(f"{word}, smoother", T, 100.0, lambda k=linearize: curved.smooth(polar, linearize=k))
        add(
            f"{word}, one by one",
            T,
            50.0,
            lambda k=linearize: steps_online(curved.online(linearize=k), polar),
        )
    times = compare(cases, "imm, one by one", rounds=3 if arguments.quick else 7, label="online")
    micro = {name: 1e6 * t.best / steps[name] for name, t in times.items()}
    print_table(("case", "µs a step"), [(name, f"{value:.3g}") for name, value in micro.items()])
    goals = [Goal(name, micro[name], limit, "µs a step") for name, limit in most.items()]
    print_goals(goals)
    if not arguments.quick:
        save("online", {"times": times, "microseconds": micro, "goals": goals}, folder=harness.folder(False))


if __name__ == "__main__":
    main()
