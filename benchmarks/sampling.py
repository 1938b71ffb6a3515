"""Gibbs and SMC against particles, blackjax and numpyro on one small target, in effective draws a second.

The target is a mixture of three Gaussians in the plane, p(x) ∝ N(x; 0, 1) Σ_k p_k e^{<J_k, x>}: here a
class and a point that tilt each other, there a density. All start from N(0, 1) and temper adaptively to
half the effective size. What a run is worth is measured, not claimed: its effective draws are the variance
of x over the mean square of the error of its mean of x, over many runs in turn; mean and evidence are
known in closed form.

particles needs an older NumPy, so the rivals work in a process of their own, in the interpreter `--rivals
PYTHON` of an environment with `pip install particles blackjax numpyro` (`make rivals`); where there is none,
that is printed and saved.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from exptilt import families
from exptilt.sampling import Joint, gibbs, smc
from harness import Goal

PAGE = harness.FOLDER.parent / "filters_and_attention.md"
WORKER = Path(__file__).parent / "rivals" / "smc_worker.py"
DEFAULT = Path(__file__).resolve().parents[1] / ".venv-smc" / "bin" / "python"
J = torch.tensor([[2.0, 0.0], [-2.0, 1.0], [0.0, -2.0]], dtype=torch.float64)
LOG_P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
Found = tuple[list[float], float | None]


def exact() -> tuple[torch.Tensor, float, float]:
    """Mean, sum of variances and log Z: class k is a Gaussian about J_k of weight p_k e^{‖J_k‖²/2}."""
    log_weight = LOG_P + J.square().sum(1) / 2
    w = torch.softmax(log_weight, 0)
    mean = w @ J
    return mean, 2 + float(w @ (J - mean).square().sum(1)), float(torch.logsumexp(log_weight, 0))


def ours(count: int) -> dict[str, Callable[[], Found]]:
    """A run of SMC with `count` particles; Gibbs with a tenth as many chains of 10 draws, as NUTS."""
    zero = torch.zeros(2, dtype=torch.float64)
    sites = {
        "class": families.Categorical(LOG_P),
        "x": families.Gaussian(zero, torch.eye(2, dtype=torch.float64)),
    }
    joint = Joint(sites, {("class", "x"): J})

    def tempered() -> Found:
        found = smc(joint, particles=count, runs=1, sweeps=1)
        return found.state["x"].mean((0, 1)).tolist(), float(found.log_evidence)

    def chains() -> Found:
        return gibbs(joint, 10, chains=count // 10, discard=10)["x"].mean((0, 1)).tolist(), None

    return {"exptilt: SMC": tempered, "exptilt: Gibbs": chains}


class Rivals:
    """particles, blackjax and numpyro in their process."""

    def __init__(self, python: Path, count: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "target.npz"
        np.savez(path, J=J.numpy(), log_p=LOG_P.numpy())
        command = [str(python), str(WORKER), str(path), str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.names: list[str] = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the rivals has ended; its words are above.")
        return json.loads(line)

    def run(self, name: str) -> dict[str, Any]:
        """One run: seconds, mean and log_evidence."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.folder.cleanup()


def timed(call: Callable[[], Found]) -> dict[str, Any]:
    begin = time.perf_counter()
    mean, evidence = call()
    return {"seconds": time.perf_counter() - begin, "mean": mean, "log_evidence": evidence}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of a run, its effective draws, and these by second; the error of the evidence."""
    mean, variance, log_z = exact()
    square = float(np.mean([np.sum((np.array(run["mean"]) - mean.numpy()) ** 2) for run in runs]))
    seconds = float(np.median([run["seconds"] for run in runs]))
    off = [run["log_evidence"] - log_z for run in runs if run["log_evidence"] is not None]
    return {
        "milliseconds": 1e3 * seconds,
        "effective draws": variance / square,
        "effective draws a second": variance / square / seconds,
        "error of log evidence": float(np.sqrt(np.mean(np.square(off)))) if off else None,
    }


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """For the page."""
    header = ["sampler", "ms a run", "effective draws", "effective draws a second", "error of log Z"]
    rows = []
    for name, found in results["samplers"].items():
        error = found["error of log evidence"]
        numbers = [f"{found[key]:.3g}" for key in ("milliseconds", "effective draws")]
        rows.append(
            [
                name,
                *numbers,
                f"{found['effective draws a second']:,.0f}",
                "" if error is None else f"{error:.3f}",
            ]
        )
    return header, rows


PARTS = (harness.Part(PAGE, "samplers", "sampling", table),)


def main(argv: list[str] | None = None) -> Path:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--rivals", type=Path, default=DEFAULT, metavar="PYTHON")
    chosen, rest = own.parse_known_args(argv)
    arguments = harness.start(__doc__, rest)
    count, rounds = (1000, 5) if arguments.quick else (10_000, 60)
    cases, said = ours(count), "left out: no interpreter with particles, blackjax and numpyro; make rivals"
    rivals = Rivals(chosen.rivals, count) if chosen.rivals.exists() else None
    if rivals is not None:
        said = ", ".join(rivals.names)
    print(f"rivals: {said}")
    runs: dict[str, list[dict[str, Any]]] = {}
    for call in cases.values():
        call()
    for _ in range(rounds):
        for name, call in cases.items():
            runs.setdefault(name, []).append(timed(call))
        for name in [] if rivals is None else rivals.names:
            runs.setdefault(name, []).append(rivals.run(name))
    if rivals is not None:
        rivals.close()
    found = {name: summary(all_of_them) for name, all_of_them in runs.items()}
    speed = {name: row["effective draws a second"] for name, row in found.items()}
    pairs = {
        "particles: SMC": "exptilt: SMC",
        "blackjax: SMC": "exptilt: SMC",
        "blackjax: NUTS": "exptilt: Gibbs",
        "numpyro: NUTS": "exptilt: Gibbs",
    }
    goals = [
        Goal(f"{mine} over {name}, time of an effective draw", speed[name] / speed[mine], 1.0)
        for name, mine in pairs.items()
        if name in speed
    ]
    harness.print_table(*table({"samplers": found}))
    harness.print_goals(goals)
    results = {"rivals": said, "count": count, "samplers": found, "goals": goals}
    path = harness.save("sampling", results, folder=harness.folder(arguments.quick))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
