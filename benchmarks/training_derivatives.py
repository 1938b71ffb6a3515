"""Memory of one training step through derivatives: four losses, exptilt beside math attention.

The losses are those of the examples: MeanFlow (a forward derivative in the loss), an energy-based transformer
(two steps of descent), forces as gradients of an energy, and two steps of learning at test time. Each model
has one layer with one or two heads and reads n tokens; a step is the loss and its gradient by the weights.
Fused attention of torch raises in all four; its "math" attention makes n×n matrices. Each call runs in a
process of its own, in float32.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import exptilt as xt
import harness
from harness import Goal

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import energy_transformer
import forces
import learn_at_test_time
import mean_flow

PAGE = harness.FOLDER.parent / "training_through_derivatives.md"
LENGTHS, QUICK = (4096,), (64,)
WAYS = ("exptilt", "math attention")
NAMES = {
    "mean flow": "MeanFlow",
    "energy": "energy-based transformer",
    "forces": "forces of an energy",
    "test time": "learning at test time",
}


def step(name: str, way: str, n: int) -> Callable[[], object]:
    """A call that makes one loss and its gradient by the weights, at `n` tokens."""
    torch.manual_seed(0)
    backend = None if way == "exptilt" else "reference"

    def whole(model: torch.nn.Module) -> AbstractContextManager[Any]:
        own = name in ("energy", "forces")  # these call xt.attend themselves
        return nullcontext() if own or way != "exptilt" else xt.differentiable(model)

    model: torch.nn.Module
    if name == "mean flow":
        model = mean_flow.Velocity(n, layers=1, heads=1)
        x, digit = torch.randn(1, n, 4), torch.zeros(1, dtype=torch.long)
        value = lambda: mean_flow.loss(model, x, digit)  # noqa: E731
    elif name == "energy":
        model = energy_transformer.Energy(layers=1, heads=1)
        known, true = torch.randn(2, 1, n // 2, 4)
        value = lambda: energy_transformer.loss(model, known, true, backend=backend)  # noqa: E731
    elif name == "forces":
        model = forces.Potential(heads=2)
        x, force = torch.randn(2, 1, n, 3)
        value = lambda: forces.loss(model, x, torch.zeros(1), force, backend=backend)  # noqa: E731
    else:
        model = learn_at_test_time.Forecast(heads=1)
        weights = {key: p.detach().requires_grad_() for key, p in model.named_parameters()}
        rates = {key: torch.tensor(-4.0).requires_grad_() for key in weights}
        series = learn_at_test_time.waves(1, 2 * n)
        value = lambda: learn_at_test_time.loss(model, weights, rates, series).mean()  # noqa: E731

    def run() -> object:
        torch.manual_seed(1)
        leaves = list(weights.values() if name == "test time" else model.parameters())
        with whole(model), sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.grad(value(), leaves, allow_unused=True)

    return run


def prepare(name: str, way: str, n: int) -> Callable[[], object]:
    """In the new process: one small call, so that code is loaded, then the call to measure."""
    step(name, way, 64)()
    return step(name, way, n)


def apart(name: str, n: int) -> float:
    """The largest difference of the two ways' gradients, over the largest entry."""
    pairs: Any = zip(*(step(name, way, n)() for way in WAYS), strict=True)
    there = [(x, y) for x, y in pairs if y is not None]
    scale = max(y.abs().max().item() for _, y in there)
    return max((x - y).abs().max().item() for x, y in there) / scale


def measure(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Bytes beyond inputs and results for each loss, way and length."""
    cases = [(name, n) for name in NAMES for n in lengths]
    rows = []
    for name, n in harness.track(cases, "losses"):
        found = {way: harness.peak_extra_memory(prepare, name, way, n).beyond for way in WAYS}
        rows.append({"name": name, "n": n} | found)
    goals = [
        Goal(
            f"memory of {NAMES[row['name']]} at n = {row['n']} over math's", row[WAYS[0]] / row[WAYS[1]], 0.1
        )
        for row in rows
        if row["n"] == lengths[-1]
    ]
    return {"rows": rows, "apart": {name: apart(name, 128) for name in NAMES}, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: megabytes beyond inputs and results."""
    rows = [
        [
            NAMES[row["name"]],
            f"{row['n']:,}",
            *(f"{row[way] / 1e6:,.0f}" for way in WAYS),
            f"{row[WAYS[1]] / max(row[WAYS[0]], 1):.0f} ×",
        ]
        for row in results["rows"]
    ]
    return ["loss", "tokens", *(f"{way}, MB" for way in WAYS), "ratio"], rows


PARTS = (harness.Part(PAGE, "training memory", "training_derivatives", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    found = measure(QUICK if arguments.quick else LENGTHS)
    path = harness.save("training_derivatives", found, folder=harness.folder(arguments.quick))
    results = harness.read(path)
    print("\nGradients of the two ways differ, of the largest entry, by", results["apart"], "\n")
    harness.print_table(*table(results))
    harness.print_goals(found["goals"])
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
