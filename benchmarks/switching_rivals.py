"""filterpy, Stone Soup and dynamax on one scenario each: how far off, and microseconds of processor a step.

    RIVALS=PYTHON python benchmarks/switching_rivals.py

PYTHON is an interpreter that has all three (`pip install filterpy stonesoup dynamax`); exptilt need not be
there. One thread each, and PATIENCE seconds (900) for an answer. Scenarios: a target that glides and
manoeuvres, seen in the plane (filterpy's IMM; dynamax's particle filter); one of nearly constant velocity,
seen by bearing and range (Stone Soup's unscented filter). The writing of the table in docs/tracking.md is
part of the run.

dynamax draws its first particles in a Python loop, which compilation unrolls: 0.3 s a particle before any
step, so that 1,000 particles do not answer in 400 s. It gets 50, and compilation is not counted.

No package that installs from PyPI has recurrent switching (dynamax has none, `ssm` does not build), so that
`RecurrentSwitching` is held against particles: how far its log-likelihood and its means are off.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from exptilt.switching import SwitchingLinearGaussian, SwitchingNonlinear
from exptilt.switching.nonlinear import RecurrentSwitching
from harness import print_table, save

WORKER = Path(__file__).with_name("rivals") / "tracking_worker.py"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "tracking.md"
MARK = "<!-- rivals: written by benchmarks/switching_rivals.py -->\n"
T, PACE, PARTICLES, MANY = 400, 0.05, 50, 100_000


def gliding() -> tuple[dict[str, Any], np.ndarray]:
    """Two modes of constant velocity, calm and with strong accelerations; positions are seen."""
    block = np.array([[1.0, 1.0], [0.0, 1.0]])
    F = np.kron(np.eye(2), block)
    spread = np.kron(np.eye(2), np.array([[1 / 3, 1 / 2], [1 / 2, 1.0]]))
    given: dict[str, Any] = {
        "F": np.stack([F, F]),
        "Q": np.stack([1e-4 * spread, 0.3 * spread]),
        "H": np.eye(4)[[0, 2]],
        "R": np.eye(2),
        "x": np.array([0.0, 1.0, 0.0, 0.5]),
        "P": np.eye(4),
        "start": np.array([0.5, 0.5]),
        "transition": np.array([[0.97, 0.03], [0.1, 0.9]]),
        "particles": PARTICLES,
    }
    draw = linear(given).sample(T, generator=torch.Generator().manual_seed(0))
    return given | {"y": np.asarray(draw.y)}, np.asarray(draw.states)


def linear(d: dict[str, Any]) -> SwitchingLinearGaussian:
    """The model here."""
    return SwitchingLinearGaussian(
        transition=d["transition"],
        dynamics=d["F"],
        process_noise=d["Q"],
        observation=d["H"],
        observation_noise=d["R"],
        initial_mean=d["x"],
        initial_covariance=d["P"],
        initial_probability=d["start"],
    )


def bearings() -> tuple[dict[str, Any], np.ndarray, SwitchingNonlinear]:
    """A nearly constant velocity, seen by bearing and range."""
    F = np.kron(np.eye(2), [[1.0, 1.0], [0.0, 1.0]])
    Q = PACE * np.kron(np.eye(2), [[1 / 3, 1 / 2], [1 / 2, 1.0]])
    matrix = torch.from_numpy(F)
    model = SwitchingNonlinear(
        transition=[[1.0]],
        dynamics=[lambda x: x @ matrix.T],
        process_noise=Q,
        observation=lambda x: torch.stack(
            [torch.atan2(x[..., 2], x[..., 0]), torch.hypot(x[..., 0], x[..., 2])], -1
        ),
        observation_noise=np.diag([1e-3, 1.0]),
        initial_mean=[50.0, 1.0, 50.0, -0.5],
        initial_covariance=np.eye(4),
        initial_probability=[1.0],
        observation_angles=(0,),
    )
    rng, x, rows, seen = np.random.default_rng(1), np.array([50.0, 1.0, 50.0, -0.5]), [], []
    for _ in range(T):
        x = F @ x + rng.multivariate_normal(np.zeros(4), Q)
        rows.append(x)
        seen.append(
            np.array([np.arctan2(x[2], x[0]), np.hypot(x[0], x[2])]) + rng.normal(size=2) * [1e-3**0.5, 1]
        )
    y = np.array(seen)
    y[:, 0] = np.angle(np.exp(1j * y[:, 0]))
    given = {"pace": PACE, "R": np.diag([1e-3, 1.0]), "x": model.initial_mean[0], "P": np.eye(4), "y": y}
    return given, np.array(rows), model


def recurrent() -> dict[str, float]:
    """A drift that turns at two walls: the filter here against `MANY` particles, five times over."""
    modes = SwitchingLinearGaussian(
        transition=np.full((2, 2), 0.5),
        dynamics=np.eye(1),
        dynamics_offset=[[0.5], [-0.5]],
        process_noise=[[0.05]],
        observation=np.eye(1),
        observation_noise=[[0.1]],
        initial_mean=[0.0],
        initial_covariance=[[1.0]],
        initial_probability=[0.5, 0.5],
    )
    model = RecurrentSwitching(model=modes, recurrence=[[-3.0], [3.0]])
    y = np.asarray(model.sample(T, generator=torch.Generator().manual_seed(0)).y)[:, 0]
    post = model.filter(y[:, None])
    totals, means = [], []
    for seed in range(5):
        rng, total, rows = np.random.default_rng(seed), 0.0, []
        x = rng.normal(size=MANY)
        for seen in y:
            up = rng.random(MANY) < 1 / (1 + np.exp(6 * x))
            x = x + np.where(up, 0.5, -0.5) + np.sqrt(0.05) * rng.normal(size=MANY)
            weight = np.exp(-((seen - x) ** 2) / 0.2) / np.sqrt(0.2 * np.pi)
            total += float(np.log(weight.mean()))
            x = x[rng.choice(MANY, MANY, p=weight / weight.sum())]
            rows.append(x.mean())
        totals.append(total)
        means.append(rows)
    gap = (np.asarray(post.mean)[:, 0] - np.mean(means, 0)) / np.sqrt(np.asarray(post.covariance)[:, 0, 0])
    _, seconds = timed(lambda: model.filter(y[:, None]))
    return {
        "log-likelihood, here less particles": float(post.log_likelihood) - float(np.mean(totals)),
        "its standard error": float(np.std(totals, ddof=1) / np.sqrt(5)),
        "without the recurrence": float(modes.filter(y[:, None]).log_likelihood) - float(np.mean(totals)),
        "means off, in standard deviations": float(np.sqrt((gap**2).mean())),
        "microseconds a step": 1e6 * seconds,
    }


def ask(python: str, rival: str, given: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Means and seconds a step of a rival."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    one |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("in.npz", "out.npz")]
        np.savez(files[0], **given)
        words, patience = [python, str(WORKER), rival, *files], float(os.environ.get("PATIENCE", "900"))
        subprocess.run(words, check=True, env=os.environ | one, timeout=patience)
        with np.load(files[1]) as found:
            return found["mean"], float(found["seconds"])


def timed(run: Callable[[], Any]) -> tuple[np.ndarray, float]:
    """Means and the least seconds of processor time a step here."""
    times = []
    for _ in range(15):
        begin = time.process_time()
        mean = np.asarray(run().mean)
        times.append(time.process_time() - begin)
    return mean, min(times) / T


def main() -> None:
    arguments = harness.start(__doc__)
    python = os.environ["RIVALS"]
    torch.set_num_threads(1)
    plane, states = gliding()
    polar, track, curved = bearings()
    own = linear(plane)
    generator = torch.Generator().manual_seed(0)
    cases: list[tuple[str, str, np.ndarray, Callable[[], Any]]] = [
        ("IMM, two modes, 4 states", "filterpy", states, lambda: own.filter(plane["y"], method="imm")),
        (
            "unscented, bearing and range",
            "stonesoup",
            track,
            lambda: curved.filter(polar["y"], linearize="unscented"),
        ),
        ("two modes, GPB2 here", "dynamax", states, lambda: own.filter(plane["y"])),
        (
            f"two modes, {PARTICLES:,} particles in both",
            "dynamax",
            states,
            lambda: own.filter(plane["y"], method="rbpf", particles=PARTICLES, generator=generator),
        ),
    ]
    rows = []
    for scenario, rival, truth, run in cases:
        try:
            theirs, theirs_time = ask(python, rival, polar if rival == "stonesoup" else plane)
        except subprocess.TimeoutExpired:
            print(f"{rival} has not answered in time and is left out: {scenario}")
            continue
        ours, ours_time = timed(run)
        off = [float(np.sqrt(((m - truth)[:, [0, 2]] ** 2).sum(1).mean())) for m in (theirs, ours)]
        rows.append((scenario, rival, *off, 1e6 * theirs_time, 1e6 * ours_time, theirs_time / ours_time))
    header = ("scenario", "package", "off, theirs", "off, here", "µs a step, theirs", "here", "times faster")
    shown = [
        (*row[:2], *(f"{x:.4f}" for x in row[2:4]), *(f"{x:,.3g}" for x in row[4:6]), f"{row[6]:,.0f}")
        for row in rows
    ]
    print_table(header, shown)
    if not arguments.quick:
        lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *shown)]
        before, mark, rest = PAGE.read_text("utf-8").partition(MARK)
        after = rest.partition("<!-- end -->")[2]
        PAGE.write_text(before + mark + "\n" + "\n".join(lines) + "\n\n<!-- end -->" + after, "utf-8")
    by_particles = recurrent()
    print_table(("recurrent switching", "value"), [(k, f"{x:.4g}") for k, x in by_particles.items()])
    save(
        "switching_rivals", {"rows": rows, "recurrent": by_particles}, folder=harness.folder(arguments.quick)
    )


if __name__ == "__main__":
    main()
