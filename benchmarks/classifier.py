"""A classifier's shape: G and its gradients for 2,048 states and 49,152 outcomes of dimension 576.

    G(h) = log Σ_j e^{<h, w_j>},   against   torch.logsumexp(h @ W.T, -1)   with its matrix of 403 MB

Float32, G and backward to the states and the outcomes, in one interleaved run; memory from a process of its
own, beyond inputs, G and gradients.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "attention.md"
SHAPE, QUICK = (2048, 49152, 576), (64, 1024, 64)  # states, outcomes, dimension
TIME, MEMORY = 1.0, 60.0  # × the plain matrix, MB of 10⁶ bytes

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain matrix": lambda states, outcomes: torch.logsumexp(states @ outcomes.T, -1),
    "log_normalizer": lambda states, outcomes: xt.log_normalizer(states[None], outcomes[None], scale=1.0)[0],
}


def case(name: str, shape: tuple[int, int, int]) -> Callable[[], tuple[Tensor, ...]]:
    """G and its gradients in the states and in the outcomes, along one cotangent."""
    generator = torch.Generator().manual_seed(0)
    count, outcomes, dimension = shape
    h, W = [torch.randn(n, dimension, generator=generator).requires_grad_() for n in (count, outcomes)]
    with torch.no_grad():
        W /= dimension**0.5
    cotangent = torch.randn(count, generator=generator)

    def run() -> tuple[Tensor, ...]:
        G = FUNCTIONS[name](h, W)
        return G.detach(), *torch.autograd.grad(G, (h, W), cotangent)

    return run


def prepare(name: str, shape: tuple[int, int, int]) -> Callable[[], object]:
    """In the new process: one call on something small, so that code is loaded, then the inputs."""
    case(name, (300, 3000, shape[2]))()
    return case(name, shape)


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    cases = {name: case(name, shape) for name in FUNCTIONS}
    times = harness.compare(cases, "plain matrix", rounds=rounds, label="times")
    names = harness.track(list(FUNCTIONS), "memory")
    seen = {name: harness.peak_extra_memory(prepare, name, shape) for name in names}
    goals = [
        Goal("time", times["log_normalizer"].ratio, TIME),
        Goal("memory", seen["log_normalizer"].beyond / 1e6, MEMORY, "MB"),
    ]
    return {"shape": shape, "times": times, "memory": seen, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: seconds, ratio, megabytes beyond inputs and gradients; then the goals."""
    rows = []
    for name, time in results["times"].items():
        beyond = results["memory"][name]["beyond"] / 1e6
        rows.append([name, f"{time['best']:.2f}", f"{time['ratio']:.2f}", f"{beyond:.0f}"])
    goals = [f"≤ {goal['limit']:g}: {'met' if goal['met'] else 'NOT met'}" for goal in results["goals"]]
    return ["G and backward", "s", "ratio", "MB beyond"], [*rows, ["goal", "", *goals]]


PARTS = (harness.Part(PAGE, "classifier", "classifier", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    results = measure(QUICK, 2) if arguments.quick else measure(SHAPE, 5)
    path = harness.save("classifier", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
