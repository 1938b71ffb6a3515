"""Filters of counts and other families beside `SwitchingLinearGaussian`'s, in one interleaved run.

M = 2 modes, GPB2 and IMM, one series of 5,000 steps in float64: microseconds of one thread's processor time a
step, the least of many. One number is observed, by Dirichlet laws three.
The goal: every family takes at most 5 times what the Gaussian filter takes.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from exptilt import families as f
from exptilt.switching import DiscountedDynamics, SwitchingFamily, SwitchingLinearGaussian
from harness import Goal

PAGE = harness.FOLDER.parent / "filters_and_attention.md"
TRANSITION = torch.tensor([[0.95, 0.05], [0.1, 0.9]], dtype=torch.float64)


def models() -> dict[str, tuple[SwitchingFamily, str]]:
    """A model of two modes for each family, and what it observes."""

    def one(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def unknown_covariance(mean: float, count: float, degrees: float, scale: float) -> Any:
        return f.NormalInverseWishart(one(mean), one(count)[0], one(degrees)[0], one(scale)[None])

    pairs = {
        "Gamma–Poisson": (f.Gamma(one(2), one(1)), f.Gamma(one(20), one(1)), f.Poisson, "counts"),
        "Gamma–Exponential": (f.Gamma(one(2), one(1)), f.Gamma(one(20), one(1)), f.Exponential, "times"),
        "Beta–Bernoulli": (f.Beta(one(2), one(5)), f.Beta(one(5), one(1)), f.BernoulliProduct, "flags"),
        "normal–gamma": (
            f.NormalGamma(one(0), one(1), one(2), one(2)),
            f.NormalGamma(one(4), one(2), one(3), one(1)),
            f.DiagonalGaussian,
            "numbers",
        ),
        "normal–inverse-Wishart": (
            unknown_covariance(0, 1, 4, 4),
            unknown_covariance(4, 2, 6, 2),
            f.Gaussian,
            "numbers",
        ),
        "Beta–negative binomial": (
            f.Beta(one(2), one(5)),
            f.Beta(one(5), one(1)),
            f.NegativeBinomial(one(3), one(0)),
            "counts",
        ),
        "Dirichlet–categorical": (
            f.Dirichlet(one(2, 1, 1)),
            f.Dirichlet(one(1, 1, 5)),
            f.Categorical,
            "kinds",
        ),
        "Wishart–Gaussian": (
            f.Wishart(one(4)[0], one(0.25)[None]),
            f.Wishart(one(6)[0], one(2)[None]),
            f.Gaussian,
            "numbers",
        ),
        "Gaussian, discounted": (
            f.Gaussian(one(0), one(1)[None]),
            f.Gaussian(one(4), one(1)[None]),
            f.Gaussian(one(0), one(1)[None]),
            "numbers",
        ),
    }
    return {
        name: (
            SwitchingFamily(TRANSITION, first, law, [*map(DiscountedDynamics, (0.9, 0.5), (first, second))]),
            kind,
        )
        for name, (first, second, law, kind) in pairs.items()
    }


def cases(method: str, steps: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Steps and a call for each family, the Gaussian first."""
    rng = np.random.default_rng(0)
    high = np.cumsum(rng.random(steps) < 0.05) % 2 == 1
    data = {
        "counts": rng.poisson(np.where(high, 20.0, 2.0)),
        "times": rng.exponential(np.where(high, 0.05, 0.5)),
        "flags": rng.random(steps) < np.where(high, 0.8, 0.3),
        "numbers": rng.normal(np.where(high, 4.0, 0.0)),
    }
    series = {kind: torch.from_numpy(y.astype(float))[:, None] for kind, y in data.items()}
    series["kinds"] = torch.from_numpy(np.eye(3)[rng.integers(0, 2 + high)])
    linear = SwitchingLinearGaussian(
        transition=TRANSITION.numpy(),
        dynamics=np.eye(1),
        process_noise=np.array([[[0.1]], [[1.0]]]),
        observation=np.eye(1),
        observation_noise=np.eye(1),
        initial_mean=np.zeros(1),
        initial_covariance=np.eye(1),
        initial_probability=np.full(2, 0.5),
    )
    y = series["numbers"].numpy()
    found: dict[str, tuple[int, Callable[[], object]]] = {
        "Gaussian": (steps, lambda: linear.filter(y, method=method))
    }
    for name, (model, kind) in models().items():
        part = series[kind]
        found[name] = steps, lambda model=model, part=part: model.filter(part, method=method)
    return found


def measured(found: dict[str, tuple[int, Callable[[], object]]], rounds: int) -> dict[str, dict[str, float]]:
    """Least processor time of a step in seconds, and its ratio to the first case, interleaved."""
    best = dict.fromkeys(found, np.inf)
    for turn in range(rounds + 1):  # the first loads code
        for name, (steps, call) in found.items():
            begin = time.thread_time()
            call()
            if turn:
                best[name] = min(best[name], (time.thread_time() - begin) / steps)
    first = next(iter(best.values()))
    return {name: {"best": value, "ratio": value / first} for name, value in best.items()}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Microseconds a step and their ratios, for the page."""
    rows = []
    for method, row in results["filters"].items():
        for name, found in row.items():
            micro = 1e6 * found["best"] / results.get("steps", 1)  # older results are of whole series
            rows.append([method, name, f"{micro:.2f}", f"{found['ratio']:.2f}"])
    return ["filter", "family", "µs a step", "over the Gaussian"], rows


PARTS = (harness.Part(PAGE, "speed of families", "switching_families", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    steps, rounds = (300, 2) if arguments.quick else (5000, 15)
    torch.set_num_threads(1)
    found = {method: measured(cases(method, steps), rounds) for method in ("gpb2", "imm")}
    goals = [
        Goal(f"{method}: {name} over the Gaussian filter", row[name]["ratio"], 5.0)
        for method, row in found.items()
        for name in list(row)[1:]
    ]
    harness.print_goals(goals)
    results = {"filters": found, "goals": goals}
    path = harness.save("switching_families", results, folder=harness.folder(arguments.quick))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
