"""A Gauss-Newton product of SmolLM2 beside a gradient, and beside finite differences.

SmolLM2-135M reads 512 tokens: memory and processor time of one product over those of one gradient of the
model's own loss (its SDPA attention and its logits, as training takes it). A small model: how far a
finite-difference product is off, at its best step. What long texts take: benchmarks/hessian_product.py.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import harness
from exptilt.curvature import Curvature
from exptilt.lens.models.load import load_model
from harness import Goal

PAGE = harness.FOLDER.parent / "curvature.md"
TOKENS = 512


def smollm2(way: str, n: int) -> Callable[[], object]:
    """A call with SmolLM2: the gradient of its own loss, our gradient, or a Gauss-Newton product."""
    torch.manual_seed(0)
    model = load_model("smollm2").model

    def call(n: int) -> Callable[[], object]:
        ids = torch.randint(model.config.vocab_size, (1, n))
        parameters = list(model.parameters())
        if way == "own gradient":
            return lambda: torch.autograd.grad(
                model(input_ids=ids, labels=ids, use_cache=False).loss, parameters
            )
        kind = "hessian" if way == "hessian" else "ggn"
        matrix = Curvature(model, "cross_entropy", [{"input_ids": ids, "labels": ids}], kind)
        vector = torch.randn(matrix.shape[0])
        return matrix.gradient if way == "gradient" else lambda: matrix @ vector

    call(8)()
    return call(n)


def squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """One loss for each number."""
    return (output - batch[1]).square()


def differences() -> dict[str, float]:
    """Largest relative error of a Gauss-Newton product with a finite-difference jvp, at its best step."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    exact = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().double()
    x, target = torch.randn(2, 4, 64, 64).double()
    truth = Curvature(exact, squares, [(x, target)])
    v = torch.randn(truth.shape[0]).double()
    wanted = truth @ v
    found: dict[str, float] = {}
    for dtype in (torch.float64, torch.float32):
        model = exact.to(dtype)
        matrix = Curvature(model, squares, [(x.to(dtype), target.to(dtype))])
        weights, along = matrix.parameters.weights(), matrix.parameters.split(v.to(dtype))
        outputs, best = matrix.objective.outputs((x.to(dtype), target)), float("inf")
        for step in (10.0**-k for k in range(1, 9)):
            with torch.no_grad():
                ends = [outputs({k: w + s * step * along[k] for k, w in weights.items()})[0] for s in (1, -1)]
            bent = (ends[0] - ends[1]) / (2 * step) * 2 / target.numel()
            product = matrix.parameters.flat(matrix._pull(outputs, lambda _, bent=bent: bent))
            best = min(best, float((product.double() - wanted).norm() / wanted.norm()))
        name = str(dtype).removeprefix("torch.")
        found[f"finite differences, {name}"] = best
        if dtype != torch.float64:  # that one is the reference
            found[f"exptilt, {name}"] = float(
                ((matrix @ v.to(dtype)).double() - wanted).norm() / wanted.norm()
            )
    return found


def seconds(ways: tuple[str, ...], n: int, rounds: int) -> dict[str, float]:
    """Least processor time of each call, one thread, taken in turn."""
    torch.set_num_threads(1)
    calls = {way: smollm2(way, n) for way in ways}
    best = dict.fromkeys(ways, float("inf"))
    for _ in harness.track(range(rounds), "rounds"):
        for way, call in calls.items():
            begin = time.process_time()
            call()
            best[way] = min(best[way], time.process_time() - begin)
    return best


def measure(quick: bool) -> dict[str, Any]:
    """All numbers of the page."""
    calls = ("own gradient", "gradient", "ggn", "hessian")
    n = 16 if quick else TOKENS
    large: dict[str, Any] = {"tokens": n}
    large["memory"] = {way: harness.peak_extra_memory(smollm2, way, n).peak for way in calls}
    large["seconds"] = seconds(calls, n, 1 if quick else 2)
    memory, took = large["memory"], large["seconds"]
    goals = [
        Goal("SmolLM2, memory of a GGN product over a gradient's", memory["ggn"] / memory["own gradient"], 2),
        Goal("SmolLM2, time of a GGN product over a gradient's", took["ggn"] / took["own gradient"], 4),
    ]
    return {"smollm2": large, "errors": differences(), "goals": goals}


def model_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Memory and time with SmolLM2, over those of a gradient."""
    memory, took = results["smollm2"]["memory"], results["smollm2"]["seconds"]
    names = {
        "own gradient": "gradient of the model's own loss",
        "gradient": "`gradient()`",
        "ggn": "Gauss–Newton product",
        "hessian": "Hessian product",
    }
    rows = [
        [
            said,
            f"{memory[way] / 1e6:,.0f}",
            f"{memory[way] / memory['own gradient']:.2f}",
            f"{took[way] / took['own gradient']:.2f}",
        ]
        for way, said in names.items()
        if way in memory and way in took
    ]
    return ["SmolLM2-135M", "peak MB with the result", "memory, ratio", "time, ratio"], rows


def error_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Errors of products."""
    return ["Gauss–Newton product", "relative error"], [[k, f"{v:.0e}"] for k, v in results["errors"].items()]


PARTS = (
    harness.Part(PAGE, "model", "curvature", model_table),
    harness.Part(PAGE, "errors", "curvature", error_table),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save("curvature", measure(arguments.quick), folder=harness.folder(arguments.quick))
    results = harness.read(path)
    for table in (model_table, error_table):
        harness.print_table(*table(results))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
