"""Switching filters against filterpy's IMM, in one interleaved run: M = 3 modes, n = 4 states, m = 2 observed
components, float64.

One series of 20,000 steps, a batch of 256 series of 200 steps, gradients, EM on the GNP case, the first call
in a new process, memory, and how time grows with T, M and n. filterpy takes some 0.7 ms a step, so it is
timed on fewer steps; all ratios are per step.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from exptilt.switching import SwitchingLinearGaussian, SwitchingNonlinear, markov_autoregression
from harness import Goal, compare, peak_extra_memory, plot, print_goals, print_table, save

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "reference_lam_gnp.json"
MARKOV = DATA.with_name("markov_series.json")


def make(M: int, n: int, m: int, seed: int = 0) -> SwitchingLinearGaussian:
    """A stable model with modes that differ in their noise."""
    rng = np.random.default_rng(seed)
    W = 0.9 * np.eye(n) + 0.3 / n * rng.normal(size=(M, n, n))
    transition = np.full((M, M), 0.1 / max(M - 1, 1))
    np.fill_diagonal(transition, 0.9 if M > 1 else 1.0)
    return SwitchingLinearGaussian(
        transition=transition,
        dynamics=W,
        process_noise=np.geomspace(0.1, 1.0, M)[:, None, None] * np.eye(n),
        observation=rng.normal(size=(m, n)),
        observation_noise=np.eye(m),
        initial_mean=np.zeros(n),
        initial_covariance=np.eye(n),
        initial_probability=np.full(M, 1 / M),
    )


def filterpy_imm(model: SwitchingLinearGaussian) -> Any:
    """The same model as filterpy's IMM estimator. Its matrix is P(next | now) by rows, as ours."""
    from filterpy.kalman import IMMEstimator, KalmanFilter

    filters = []
    for k in range(model.modes):
        one = KalmanFilter(model.states, model.outputs)
        one.F, one.Q, one.H, one.R = (
            model.dynamics[k],
            model.process_noise[k],
            model.observation[k],
            model.observation_noise[k],
        )
        one.x, one.P = model.initial_mean[k][:, None].copy(), model.initial_covariance[k].copy()
        filters.append(one)
    return IMMEstimator(filters, model.initial_probability.copy(), model.transition.copy())


def run_filterpy(model: SwitchingLinearGaussian, y: np.ndarray) -> np.ndarray:
    """Predict and update over a series; returns the means."""
    imm = filterpy_imm(model)
    out = np.empty((len(y), model.states))
    for t, row in enumerate(y):
        imm.predict()
        imm.update(row[:, None])
        out[t] = imm.x[:, 0]
    return out


def first_call() -> float:
    """Seconds of the first filter call in a new process, imports done, the kernel cache present."""
    code = (
        "import sys, time; sys.path.insert(0, 'benchmarks'); import numpy as np, torch; "
        "from switching import make; "
        "model = make(3, 4, 2); y = np.random.default_rng(0).normal(size=(20000, 2)); "
        "start = time.perf_counter(); model.filter(y, method='imm'); print(time.perf_counter() - start)"
    )
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root / "benchmarks")}
    words = [sys.executable, "-c", code]
    return min(
        float(
            subprocess.run(
                words, cwd=root, env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(3)
    )


def gradient(model: SwitchingLinearGaussian, y: torch.Tensor, method: str) -> Any:
    """A function that makes one forward and backward pass."""
    leaves = {
        name: torch.tensor(getattr(model, name)).requires_grad_()
        for name in ("dynamics", "process_noise", "observation", "observation_noise")
    }

    def step() -> Any:
        total = model.replace(**leaves).filter(y, method=method).log_likelihood.sum()
        return torch.autograd.grad(total, list(leaves.values()))

    return step


def gnp_em() -> tuple[float, int, str]:
    """Seconds, steps and reason of EM on Lam's model of GNP, with an observation noise, which EM needs."""
    reference = json.loads(DATA.read_text())
    y = 100 * np.diff(np.log(np.array(reference["level"][:152])))
    model = SwitchingLinearGaussian(
        transition=[[0.7, 0.3], [0.2, 0.8]],
        dynamics=[[1.0, -0.2], [1.0, 0.0]],
        process_noise=[[1.0, 0.0], [0.0, 0.0]],
        observation=[[1.0, -1.0]],
        observation_noise=[[0.2]],
        initial_mean=[0.0, 0.0],
        initial_covariance=5 * np.eye(2),
        initial_probability=[0.2, 0.8],
        observation_offset=[[-0.5], [1.0]],
    )
    options: dict[str, Any] = {
        "fixed": {
            "observation": True,
            "dynamics": [[False, False], [True, True]],
            "process_noise": [[False, True], [True, True]],
        },
        "shared": ("dynamics", "process_noise", "observation_noise"),
        "standard_errors": False,
    }
    model.fit(y, max_steps=2, **options)
    start = time.perf_counter()
    fit = model.fit(y, **options)
    return time.perf_counter() - start, fit.steps, fit.status.value


def markov_autoregressions() -> tuple[float, float]:
    """Seconds of one fit of Hamilton's model of GNP, here (one start) and by statsmodels."""
    import warnings

    from statsmodels.tsa.api import MarkovAutoregression

    y = np.array(json.loads(MARKOV.read_text())["rgnp"])
    markov_autoregression(y, order=4, switching="intercept", starts=1)
    seconds = []
    for fit in (
        lambda: markov_autoregression(y, order=4, switching="intercept", starts=1),
        lambda: MarkovAutoregression(y, k_regimes=2, order=4, switching_ar=False).fit(disp=False),
    ):
        best = np.inf
        for _ in range(3):
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit()
            best = min(best, time.perf_counter() - start)
        seconds.append(float(best))
    return seconds[0], seconds[1]


def turning(M: int = 3) -> SwitchingNonlinear:
    """Coordinated turns of four states at three rates, seen by range and bearing."""

    def move(rate: float) -> Any:
        s, c = np.sin(rate), np.cos(rate)
        a, b = (s / rate, (1 - c) / rate) if rate else (1.0, 0.0)

        def step(x: torch.Tensor) -> torch.Tensor:
            px, vx, py, vy = x.unbind(-1)
            moved = [px + a * vx - b * vy, c * vx - s * vy, py + b * vx + a * vy, s * vx + c * vy]
            return torch.stack(moved, -1)

        return step

    def look(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.hypot(x[..., 0], x[..., 2]), torch.atan2(x[..., 2], x[..., 0])], -1)

    return SwitchingNonlinear(
        transition=np.full((M, M), 0.05) + 0.85 * np.eye(M),
        dynamics=[move(0.0), move(0.1), move(-0.1)],
        process_noise=0.01 * np.eye(4),
        observation=look,
        observation_noise=np.diag([1.0, 1e-4]),
        initial_mean=[100.0, 1.0, 50.0, 0.0],
        initial_covariance=np.eye(4),
        initial_probability=np.full(M, 1 / M),
        observation_angles=(1,),
    )


def steps_online(state: Any, y: np.ndarray) -> Any:
    """Feed a state row by row."""
    for row in y:
        state = state.step(row)
    return state


def prepare_memory(store: str, T: int) -> Any:
    """For `peak_extra_memory`."""
    model = make(3, 4, 2)
    y = np.random.default_rng(0).normal(size=(T, 2))
    model.filter(y[:6000], method="imm", store=store)
    return lambda: model.filter(y, method="imm", store=store)


def scaling(quick: bool) -> dict[str, list[tuple[int, float, float]]]:
    """Microseconds a step of IMM and GPB2 as T, M and n grow, the others as in the main case."""
    rng = np.random.default_rng(0)
    cases: dict[str, list[tuple[int, float, float]]] = {"T": [], "M": [], "n": []}
    grid = {
        "T": [1000, 10_000, 100_000] if quick else [1000, 10_000, 100_000, 1_000_000],
        "M": [1, 2, 4, 8, 16],
        "n": [1, 2, 4, 8, 16, 32],
    }
    for axis, values in grid.items():
        for value in values:
            M, n, T = (
                (value if axis == "M" else 3),
                (value if axis == "n" else 4),
                (value if axis == "T" else 2000),
            )
            model, y = make(M, n, 2), rng.normal(size=(T, 2))
            seconds = []
            for method in ("imm", "gpb2"):
                model.filter(y, method=method, store="last")
                best = np.inf
                for _ in range(2 if T >= 100_000 else 3):
                    start = time.perf_counter()
                    model.filter(y, method=method, store="last")
                    best = min(best, time.perf_counter() - start)
                seconds.append(1e6 * best / T)
            cases[axis].append((value, *seconds))
    return cases


def main() -> None:
    arguments = harness.start(__doc__)
    rng = np.random.default_rng(0)
    M, n, m, T, short = 3, 4, 2, 20_000, 200 if arguments.quick else 400
    model, y = make(M, n, m), rng.normal(size=(T, m))
    batch = rng.normal(size=(256, 200, m))
    many, curved = model.online(batch=T), turning()
    walk = np.cumsum(0.3 * rng.normal(size=2000))
    polar = np.stack([111 + walk, 0.46 + 0.01 * rng.normal(size=2000)], 1)
    # the same numbers first: filterpy's IMM and ours agree
    difference = float(
        np.abs(model.filter(y[:short], method="imm").mean - run_filterpy(model, y[:short])).max()
    )
    cases = {
        "filterpy IMM": lambda: run_filterpy(model, y[:short]),
        "IMM": lambda: model.filter(y, method="imm"),
        "GPB2": lambda: model.filter(y, method="gpb2"),
        "GPB1": lambda: model.filter(y, method="gpb1"),
        "IMM, batch": lambda: model.filter(batch, method="imm"),
        "GPB2, batch": lambda: model.filter(batch, method="gpb2"),
        "GPB2 with gradient, batch": gradient(model, torch.from_numpy(batch), "gpb2"),
        "smoother (GPB2)": lambda: model.smooth(y),
        "online IMM, one by one": lambda: steps_online(model.online(), y[:2000]),
        "online GPB2, one by one": lambda: steps_online(model.online(method="gpb2"), y[:2000]),
        "online IMM, 20,000 at once": lambda: steps_online(many, np.broadcast_to(y, (5, T, m))),
        "turn model, extended IMM": lambda: curved.filter(polar),
        "turn model, unscented IMM": lambda: curved.filter(polar, linearize="unscented"),
    }
    counts = {
        "filterpy IMM": short,
        "one by one": 2000,
        "at once": 5 * T,
        "turn model": 2000,
        "batch": 256 * 200,
    }
    steps = {name: next((k for word, k in counts.items() if word in name), T) for name in cases}
    times = compare(cases, "filterpy IMM", rounds=3 if arguments.quick else 7, label="switching")
    micro = {name: 1e6 * t.best / steps[name] for name, t in times.items()}
    faster = {name: micro["filterpy IMM"] / value for name, value in micro.items()}
    print_table(
        ("case", "µs a step", "× faster than filterpy"),
        [(k, f"{micro[k]:.3g}", f"{faster[k]:.0f}") for k in cases],
    )
    print(f"largest difference between filterpy's IMM means and ours: {difference:.2g}\n")
    em, em_steps, reason = gnp_em()
    first, autoregression = first_call(), markov_autoregressions()
    memory = {
        store: peak_extra_memory(prepare_memory, store, 200_000 if arguments.quick else 1_000_000)
        for store in ("all", "last")
    }
    goals = [
        Goal("IMM, one series", micro["IMM"], 0.7, "µs a step"),
        Goal("IMM, one series, share of filterpy's time", 1 / faster["IMM"], 1 / 700),
        Goal("GPB2, one series", micro["GPB2"], 1.5, "µs a step"),
        Goal("IMM, batch, share of filterpy's time", 1 / faster["IMM, batch"], 1 / 1000),
        Goal("GPB2, batch, share of filterpy's time", 1 / faster["GPB2, batch"], 1 / 1000),
        Goal("gradient, batch", micro["GPB2 with gradient, batch"], 30.0, "µs a step"),
        Goal("first call, cache present", first, 0.3, "s"),
        Goal("online IMM, one by one", micro["online IMM, one by one"], 10.0, "µs a step"),
        Goal("online GPB2, one by one", micro["online GPB2, one by one"], 10.0, "µs a step"),
        Goal("online IMM, 20,000 at once", micro["online IMM, 20,000 at once"], 1.0, "µs an update"),
        Goal("turn model, extended IMM", micro["turn model, extended IMM"], 50.0, "µs a step"),
        Goal("turn model, unscented IMM", micro["turn model, unscented IMM"], 50.0, "µs a step"),
        Goal(
            "Markov autoregression, share of statsmodels' time", autoregression[0] / autoregression[1], 1 / 20
        ),
        Goal(f"EM on GNP, {em_steps} steps", em, 1.0, "s"),
        Goal('memory beyond the results, store="last"', memory["last"].peak / 1e6, 64, "MB"),
    ]
    print_goals(goals)
    grown = scaling(arguments.quick)
    for axis, rows in grown.items():
        print_table(
            (axis, "IMM µs a step", "GPB2 µs a step"), [(k, f"{a:.3g}", f"{b:.3g}") for k, a, b in rows]
        )
    results = {
        "times": times,
        "microseconds": micro,
        "faster": faster,
        "difference": difference,
        "goals": goals,
        "scaling": grown,
        "em": [em, em_steps, reason],
        "first_call": first,
        "markov_autoregression": autoregression,
        "memory": memory,
    }
    if arguments.quick:
        return

    def paint(axes: Any) -> None:
        for axis, rows in grown.items():
            for column, name in ((1, "IMM"), (2, "GPB2")):
                axes.loglog(
                    [row[0] for row in rows],
                    [row[column] for row in rows],
                    "o-" if column == 1 else "s--",
                    label=f"{name}, {axis}",
                    markersize=3,
                )
        axes.set_xlabel("T, M or n (the others: T = 2000, M = 3, n = 4)")
        axes.set_ylabel("µs a step")
        axes.legend(fontsize=7)

    plot("switching", paint, folder=harness.folder(False))
    save("switching", results, folder=harness.folder(False))


if __name__ == "__main__":
    main()
