"""Memory of products with a Hessian and a Gauss-Newton matrix: exptilt beside torch's own attention.

A transformer of two layers (width 64, one head) reads n tokens, and the loss is a mean of squares by the
weights. `xt.curvature.Curvature` makes both products. Fused attention of torch raises here; its "math"
attention makes n×n matrices: the Hessian product is `jvp(grad(loss))`, the Gauss-Newton product that of
`Curvature` with math attention. curvlinops (where it is installed) takes the same products on math attention.
Each call runs in a process of its own, in float32. The Hessian product at the longest is the number that
README opens with.

The C library would keep freed memory of tensors below 32 MB, so that the resident set is up to twice what is
alive. `Curvature` has it returned while a product runs; the others run with MALLOC_MMAP_THRESHOLD_=262144 in
the environment, which does the same, so that all are compared by what is alive.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from exptilt.curvature import Curvature
from harness import Goal

PAGE = harness.FOLDER.parent / "curvature.md"
SETTING = "MALLOC_MMAP_THRESHOLD_"
LENGTHS, QUICK = (2048, 4096, 8192), (256,)


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
        if way == "math attention" and kind == "hessian":
            return by_hand(model, x, target)
        matrix = Curvature(model, squares, [(x, target)], kind)
        vector = torch.randn(matrix.shape[0])
        if way == "exptilt":
            return lambda: matrix @ vector
        matrix._attention = lambda: sdpa_kernel(SDPBackend.MATH)  # type: ignore[method-assign]
        return lambda: matrix @ vector

    call(64)()
    return call(n)


def by_hand(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """A Hessian product as one writes it with torch alone: a forward derivative of the gradient."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in weights.items()}

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return squares(functional_call(model, w, (x,)), (x, target)).mean()

    def run() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return jvp(grad(loss), (weights,), (along,))[1]

    return run


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


def measure(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Bytes beyond inputs and results for each kind, length and way."""
    rows = []
    ways = ("exptilt", "math attention", *(["curvlinops"] if find_spec("curvlinops") else []))
    for n in lengths:
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
    goals = [
        Goal(
            f"memory of a {row['kind']} product at n = {row['n']} over math's",
            row["exptilt"] / row["math attention"],
            1 / 20,
        )
        for row in rows[-2:]
    ]
    return {"rows": rows, "goals": goals}


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


PARTS = (harness.Part(PAGE, "memory", "hessian_product", memory_table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    found = measure(QUICK if arguments.quick else LENGTHS)
    path = harness.save("hessian_product", found, folder=harness.folder(arguments.quick))
    harness.print_table(*memory_table(harness.read(path)))
    harness.print_goals(found["goals"])
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
