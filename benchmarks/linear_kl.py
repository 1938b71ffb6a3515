"""Distillation: KL of two linear heads, 2,048 tokens, 49,152 outcomes of dimension 576, with gradients.

    KL(p‖q),  p ∝ e^{<t, u_j>} the teacher, q ∝ e^{<h, w_j>} the student, against the two matrices of 403 MB

Float32, loss and backward to the student's states and weight, in one interleaved run; memory from a process
of its own, beyond inputs, loss and gradients.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "two_measures.md"
SHAPE, QUICK = (2048, 49152, 576), (64, 1024, 64)  # tokens, outcomes, dimension
TIME, MEMORY = 1.2, 100.0  # × the two matrices, MB of 10⁶ bytes


def matrices(h: Tensor, W: Tensor, t: Tensor, U: Tensor) -> Tensor:
    student, teacher = (h @ W.T).log_softmax(-1), (t @ U.T).log_softmax(-1)
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"two matrices": matrices, "linear_kl": xt.losses.linear_kl}


def case(name: str, shape: tuple[int, int, int]) -> Callable[[], tuple[Tensor, ...]]:
    """The loss and its gradients in the student's states and weight."""
    generator = torch.Generator().manual_seed(0)
    count, outcomes, dimension = shape
    h, W, t, U = (torch.randn(n, dimension, generator=generator) for n in (count, outcomes) * 2)
    W, U = W / dimension**0.5, U / dimension**0.5
    h.requires_grad_(), W.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        loss = FUNCTIONS[name](h, W, t, U)
        return loss.detach(), *torch.autograd.grad(loss, (h, W))

    return run


def prepare(name: str, shape: tuple[int, int, int]) -> Callable[[], object]:
    """In the new process: one call on something small, so that code is loaded, then the inputs."""
    case(name, (300, 3000, shape[2]))()
    return case(name, shape)


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    cases = {name: case(name, shape) for name in FUNCTIONS}
    times = harness.compare(cases, "two matrices", rounds=rounds, label="times")
    names = harness.track(list(FUNCTIONS), "memory")
    seen = {name: harness.peak_extra_memory(prepare, name, shape) for name in names}
    goals = [
        Goal("time", times["linear_kl"].ratio, TIME),
        Goal("memory", seen["linear_kl"].beyond / 1e6, MEMORY, "MB"),
    ]
    return {"shape": shape, "times": times, "memory": seen, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: seconds, ratio, megabytes beyond inputs and gradients; then the goals."""
    rows = []
    for name, time in results["times"].items():
        beyond = results["memory"][name]["beyond"] / 1e6
        rows.append([name, f"{time['best']:.2f}", f"{time['ratio']:.2f}", f"{beyond:.0f}"])
    goals = [f"≤ {goal['limit']:g}: {'met' if goal['met'] else 'NOT met'}" for goal in results["goals"]]
    return ["loss and backward", "s", "ratio", "MB beyond"], [*rows, ["goal", "", *goals]]


PARTS = (harness.Part(PAGE, "linear_kl", "linear_kl", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    results = measure(QUICK, 2) if arguments.quick else measure(SHAPE, 3)
    path = harness.save("linear_kl", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
