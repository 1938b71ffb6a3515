"""A Gauss-Newton product beside a gradient, beside math attention, finite differences and curvlinops.

SmolLM2-135M reads 512 tokens: memory and processor time of one product over those of one gradient of the
model's own loss (its SDPA attention and its logits, as training takes it). A transformer of two layers reads
up to 8,192 tokens: memory of a Gauss-Newton product and of a Hessian product, by exptilt and by torch's math
attention; each call in a process of its own, float32. A small model: how far a finite-difference product is
off, at its best step. curvlinops (where it is installed) takes the same products on math attention.

The C library would keep freed memory of tensors below 32 MB, so that the resident set is up to twice what is
alive. `Curvature` has it returned while a product runs; the others run with MALLOC_MMAP_THRESHOLD_=262144 in
the environment, which does the same, so that all are compared by what is alive.
"""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from exptilt.curvature import Curvature
from exptilt.lens.models.load import load_model
from harness import Goal

PAGE = harness.FOLDER.parent / "curvature.md"
SETTING = "MALLOC_MMAP_THRESHOLD_"
LENGTHS, QUICK = (2048, 8192), (256,)
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


def layers(way: str, kind: str, n: int) -> Callable[[], object]:
    """A call that makes one product with the matrix of a transformer of two layers."""

    def call(n: int) -> Callable[[], object]:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(64, 1, 128, dropout=0.0, activation="gelu", batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        x, target = torch.randn(2, 1, n, 64)
        torch.backends.mha.set_fastpath_enabled(way == "exptilt")  # it has no forward derivative
        if way == "curvlinops":
            return rival(model, kind, x, target)
        matrix = Curvature(model, squares, [(x, target)], kind)
        vector = torch.randn(matrix.shape[0])
        if way == "exptilt":
            return lambda: matrix @ vector
        matrix._attention = lambda: sdpa_kernel(SDPBackend.MATH)  # type: ignore[method-assign]
        return lambda: matrix @ vector

    call(64)()
    return call(n)


def rival(model: torch.nn.Module, kind: str, x: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """The same product by curvlinops, with math attention."""
    import curvlinops  # type: ignore[import-not-found,import-untyped,unused-ignore]

    made = curvlinops.GGNLinearOperator if kind == "ggn" else curvlinops.HessianLinearOperator
    given = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        matrix = made(model, torch.nn.MSELoss(), given, [(x, target)], check_deterministic=False)
    vector = torch.randn(matrix.shape[1])

    def run() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return matrix @ vector

    return run


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
    rows = []
    ways = ("exptilt", "math attention", *(["curvlinops"] if find_spec("curvlinops") else []))
    for n in QUICK if quick else LENGTHS:
        for kind in ("ggn", "hessian"):
            row: dict[str, Any] = {"kind": kind, "n": n}
            for way in ways:
                os.environ.pop(SETTING, None)
                if way != "exptilt":
                    os.environ[SETTING] = "262144"
                row[way] = harness.peak_extra_memory(layers, way, kind, n).beyond
            rows.append(row)
            print(row, flush=True)
    os.environ.pop(SETTING, None)
    calls = ("own gradient", "gradient", "ggn", "hessian")
    n = 16 if quick else TOKENS
    large: dict[str, Any] = {"tokens": n}
    large["memory"] = {way: harness.peak_extra_memory(smollm2, way, n).peak for way in calls}
    large["seconds"] = seconds(calls, n, 1 if quick else 2)
    last = rows[-2]
    memory, took = large["memory"], large["seconds"]
    goals = [
        Goal("SmolLM2, memory of a GGN product over a gradient's", memory["ggn"] / memory["own gradient"], 2),
        Goal("SmolLM2, time of a GGN product over a gradient's", took["ggn"] / took["own gradient"], 4),
        Goal(f"memory at n = {last['n']} over math's", last["exptilt"] / last["math attention"], 1 / 20),
    ]
    return {"rows": rows, "smollm2": large, "errors": differences(), "goals": goals}


def memory_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Megabytes beyond inputs and results, by kind and length."""
    ways = [way for way in ("exptilt", "math attention", "curvlinops") if way in results["rows"][0]]
    rows = [
        [
            row["kind"],
            f"{row['n']:,}",
            *(f"{row[way] / 1e6:,.0f}" for way in ways),
            f"{row['math attention'] / max(row['exptilt'], 1):.0f} ×",
        ]
        for row in results["rows"]
    ]
    return ["product", "tokens", *(f"{way}, MB" for way in ways), "math / exptilt"], rows


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
    harness.Part(PAGE, "memory", "curvature", memory_table),
    harness.Part(PAGE, "model", "curvature", model_table),
    harness.Part(PAGE, "errors", "curvature", error_table),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save("curvature", measure(arguments.quick), folder=harness.folder(arguments.quick))
    results = harness.read(path)
    for table in (memory_table, model_table, error_table):
        harness.print_table(*table(results))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
