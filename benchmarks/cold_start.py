"""Cold start: what a new process waits for before it has its first result, beyond `import torch`.

A process of its own for each measurement, with a home and caches that are empty. It imports torch and numpy,
starts the clock, imports what it needs of exptilt, and calls it once:

    attend      attention with all statistics, 4 heads of 32, 256 positions
    gradient    the same, and its gradient
    filter      two modes of a level, 200 steps
    fit         Hamilton's autoregression of order 1 with two regimes, 120 steps, one start

A first process of each, not measured, leaves bytecode behind, as pip does when it installs a package.
Processor seconds stand beside the seconds of the clock, which other programs on the machine lengthen.

Beside them stand the seconds that the same calls took when kernels were compiled at first use, by numba, with
an empty cache, on a quiet machine of the same kind. Goals are on the best of a few processes: the first of
them reads files that the others find in memory.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from exptilt._support.progress import track
from harness import Goal

PAGE = harness.FOLDER.parent / "kernels.md"
LIMIT = 0.3  # seconds
BEFORE = {"attend": 16.5, "gradient": 37.0, "filter": 27.0, "fit": 60.0}

ATTENTION = """
query, key, value = torch.randn(3, 1, 4, 256, 32)
query.requires_grad_({gradient})
found = xt.attend(query, key, value, causal=True)
"""
SERIES = """
y = np.random.default_rng(0).normal(size={steps}).cumsum()
"""
CASES = {
    "attend": ATTENTION.format(gradient=False),
    "gradient": ATTENTION.format(gradient=True) + "found.output.sum().backward()\n",
    "filter": SERIES.format(steps=200)
    + """
model = xt.switching.SwitchingLinearGaussian(
    transition=[[0.95, 0.05], [0.1, 0.9]], dynamics=[[1.0]], process_noise=[[[0.01]], [[1.0]]],
    observation=[[1.0]], observation_noise=[[0.1]], initial_mean=[0.0], initial_covariance=[[1.0]],
    initial_probability=[0.5, 0.5],
)
model.filter(y, method="gpb2")
""",
    "fit": SERIES.format(steps=120)
    + """
xt.switching.markov_autoregression(np.diff(y), order=1, switching="intercept", starts=1)
""",
}
CHILD = """
import json, sys, time
begin = time.perf_counter()
import numpy as np, torch
torch.set_num_threads({threads})
start, processor = time.perf_counter(), time.process_time()
import exptilt as xt
{code}
end, processor = time.perf_counter(), time.process_time() - processor
heavy = [name for name in ("scipy", "pandas", "matplotlib") if name in sys.modules]
print(json.dumps({{"torch": start - begin, "seconds": end - start, "processor": processor, "loaded": heavy}}))
"""


def run(code: str, threads: int, bytecode: str = "") -> dict[str, Any]:
    """What a new process with empty caches says of itself; `bytecode` is the folder of bytecode."""
    source = str(Path(__file__).resolve().parents[1] / "src")
    with tempfile.TemporaryDirectory() as home:
        places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TORCHINDUCTOR_CACHE_DIR"), home)
        done = subprocess.run(
            [sys.executable, "-c", CHILD.format(code=code, threads=threads)],
            env=os.environ
            | places
            | {"PYTHONPATH": source, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""},
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the process ended with exit code {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rounds: int, threads: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as bytecode:
        for turn in track(range(1 + rounds), "new processes"):
            for name, code in CASES.items():
                one = run(code, threads, bytecode)
                found[name] += [one] * (turn > 0)
    cases = {
        name: {
            "best": min(one["seconds"] for one in each),
            "all": [one["seconds"] for one in each],
            "processor": min(one["processor"] for one in each),
            "torch": min(one["torch"] for one in each),
            "loaded": each[0]["loaded"],
            "before": BEFORE[name],
        }
        for name, each in found.items()
    }
    goals = [Goal(f"first {name}", case["best"], LIMIT, "s") for name, case in cases.items()]
    return {"cases": cases, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: seconds of each first call, the goal, what it was, and `import torch` itself."""
    met = {goal["what"]: "met" if goal["met"] else "NOT met" for goal in results["goals"]}
    rows = [
        [
            f"first {name}",
            f"{case['best']:.2f}",
            f"{case['processor']:.2f}",
            f"≤ {LIMIT:g}: {met[f'first {name}']}",
            f"{case['before']:g}",
            f"{case['torch']:.2f}",
            ", ".join(case["loaded"]) or "–",
        ]
        for name, case in results["cases"].items()
    ]
    return ["", "seconds", "processor seconds", "goal", "with numba", "import torch alone", "loaded"], rows


PARTS = (harness.Part(PAGE, "cold start", "cold_start", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    results = measure(1 if arguments.quick else 7, arguments.threads)
    path = harness.save("cold_start", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    harness.print_goals(results["goals"])
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
