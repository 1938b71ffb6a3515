"""What the assembler makes of the GPU kernels, for several generations of GPUs, without a GPU.

Every kernel is compiled ahead of time for compute capabilities 8.0 (A100), 9.0 (H100) and 10.0 (B200), in
bfloat16 and float32 (float16 for 8.0), for heads of 64 without options and with all of them, and of 128. The
table has
registers of a thread, bytes spilled (0 is the rule), shared memory of a program, matrix instructions on
tensor cores, and how many programs fit on a multiprocessor at once.
"""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import harness
from exptilt.tilting.backends.triton import derivatives, launch
from exptilt.tilting.backends.triton.forward import forward_kernel
from exptilt.tilting.backends.triton.frame import frame_of, kind_of, operand, tangents_of
from exptilt.tilting.problem import Dots, Inputs, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

PAGE = harness.FOLDER.parent / "gpu.md"
CAPABILITIES = {80: "A100", 90: "H100", 100: "B200"}
NUMBERS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SWEEPS = (
    "forward",
    "tangent",
    "gradient by rows",
    "gradient by keys",
    "key mass",
    "second by rows",
    "second by keys",
)
TYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES |= {torch.uint8: "u8", torch.int64: "i64"}
# Registers and shared memory of a multiprocessor, and threads at most.
REGISTERS, SHARED, THREADS = 65536, {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}, 2048
MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")


def problem(number: torch.dtype, D: int, full: bool) -> tuple[Inputs, ScoreRule, Dots]:
    """A problem of which only shapes and strides count."""

    def one(*shape: int, dtype: torch.dtype = number) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    wide = wide_dtype(number)
    planes = (
        one(1, 1, 1024, 1024, dtype=wide),
        one(2, 2, 1024, dtype=wide),
        None,
        torch.ones(1, 1, 1024, 1024).bool(),
    )
    t = Inputs(one(2, 4, 1024, D), one(2, 2, 1024, D), one(2, 2, 1024, D), *(planes if full else ()))
    rule = ScoreRule(0.1, causal=full, window=500 if full else None, softcap=2.0 if full else None)
    return t, rule, Dots(t.query, t.key, t.value, t.bias, t.log_weight)


def arguments(
    sweep: str, t: Inputs, rule: ScoreRule, dots: Dots
) -> tuple[Any, tuple[Any, ...], dict[str, Any], int]:
    """The kernel of a sweep, what it is called with, and its warps."""
    name = sweep.split()[0].replace("key", "gradient")
    kind, warps = kind_of(name, t, rule)
    wide = torch.empty(1, dtype=wide_dtype(t.query.dtype))
    f, moved, bar = frame_of(t, rule), tangents_of(dots, t.query.shape[:-3]), operand(t.query.to(wide.dtype))
    numbers, none = (rule.scale, rule.softcap or 0.0), tangents_of(None, t.query.shape[:-3])
    best = torch.empty(1, dtype=torch.int64)
    if sweep == "forward":
        return forward_kernel, (f, wide, wide, best, *numbers), {"KIND": kind}, warps
    if sweep == "tangent":
        return derivatives.tangent_kernel, (f, moved, wide, wide, wide, *numbers), {"KIND": kind}, warps
    second = {"SECOND": name == "second", "KIND": kind}
    dot = moved if name == "second" else none
    if sweep.endswith("rows"):
        return derivatives.rows_kernel, (f, dot, bar, wide, wide, wide, *numbers), second, warps
    mass = sweep == "key mass"
    results = (None, None, wide) if mass else (wide, wide, wide)
    return (
        derivatives.keys_kernel,
        (f, dot, bar, wide, 8192, *results, *numbers),
        {"MASS": mass} | second,
        warps,
    )


def _kinds(x: Any, path: tuple[int, ...], fixed: dict[Any, Any], known: dict[Any, Any]) -> Any:
    """The signature of an argument, as Triton's own launcher would have it: what is None or 1 is compiled in
    (`fixed`, by its path), and it is `known` what 16 divides.
    """
    if isinstance(x, tuple):
        made = [_kinds(y, (*path, i), fixed, known) for i, y in enumerate(x)]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    if x is None or (isinstance(x, int) and x == 1):
        fixed[path] = x
        return "constexpr"
    if isinstance(x, torch.Tensor) or x % 16 == 0:
        known[path] = [["tt.divisibility", 16]]
    return f"*{TYPES[x.dtype]}" if isinstance(x, torch.Tensor) else "i32"


def compiled(capability: int, sweep: str, number: torch.dtype, D: int, full: bool) -> dict[str, Any]:
    """What the assembler says of one kernel."""
    kernel, given, constants, warps = arguments(sweep, *problem(number, D, full))
    fixed: dict[Any, Any] = dict(constants)
    known: dict[Any, Any] = {}
    signature = dict.fromkeys((p.name for p in kernel.params), "constexpr")
    for at, (p, x) in enumerate(zip(kernel.params, given, strict=False)):
        signature[p.name] = p.annotation_type or _kinds(x, (at,), fixed, known)
    options = {"num_warps": warps, "num_stages": launch.STAGES}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        source = ASTSource(kernel, signature, fixed, known)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    text, ptx, threads = log.getvalue(), made.asm["ptx"], 32 * warps
    registers = max(map(int, re.findall(r"Used (\d+) registers", text)))
    shared = made.metadata.shared
    fit = min(REGISTERS // (registers * threads), SHARED[capability] // max(1, shared), THREADS // threads)
    return {
        "registers": registers,
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", text))),
        "shared": shared,
        "matrix": len(MATRIX.findall(ptx)),
        "tf32": len(re.findall(r"mma[\w.:]*tf32", ptx)),
        "programs": fit,
        "warps": warps,
        "tile": [constants["KIND"].rows, constants["KIND"].keys],
    }


def measure(quick: bool) -> dict[str, Any]:
    heads = [(64, False), (64, True), (128, False)]  # columns, and whether with all options
    cases = [
        (capability, sweep, name, D, full)
        for capability in (CAPABILITIES if not quick else (80,))
        for sweep in SWEEPS
        for name in NUMBERS
        for D, full in (heads if not quick else heads[:1])
        if name != "float16" or (capability, D, full) == (80, 64, False)
    ]
    kernels = [
        {"capability": c, "sweep": s, "dtype": n, "D": D, "options": "all" if full else "none"}
        | compiled(c, s, NUMBERS[n], D, full)
        for c, s, n, D, full in harness.track(cases, "kernels")
    ]
    return {"kernels": kernels}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; bytes of spills and programs as the least fortunate of both sets of options."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in results["kernels"]:
        groups.setdefault((one["sweep"], one["dtype"], one["D"], one["capability"]), []).append(one)
    rows = []
    for (sweep, dtype, D, capability), both in groups.items():
        shown = [str(max(x[name] for x in both)) for name in ("registers", "spilled")]
        shared, programs = max(x["shared"] for x in both) / 1024, min(x["programs"] for x in both)
        matrix, tile = min(x["matrix"] for x in both), "×".join(map(str, both[0]["tile"]))
        rows.append(
            [
                sweep,
                dtype,
                str(D),
                f"sm{capability}",
                tile,
                *shown,
                f"{shared:.0f}",
                str(matrix),
                str(programs),
            ]
        )
    header = [
        "sweep",
        "dtype",
        "D",
        "GPU",
        "tile",
        "registers",
        "spilled",
        "shared KB",
        "tensor-core",
        "programs",
    ]
    return header, rows


PARTS = (harness.Part(PAGE, "gpu audit", "gpu_audit", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save("gpu_audit", measure(arguments.quick), folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
