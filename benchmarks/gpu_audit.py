"""What the assemblers make of the GPU kernels, for several generations of GPUs, without a GPU.

Every kernel with a loop is compiled ahead of time, as the library launches it, for compute capabilities 8.0
(A100), 9.0 (H100) and 10.0 (B200) and for AMD's gfx942 (MI300): bfloat16, float16 and float32, heads of 64
and 128 without options and with all of them, and of 16, 32 and 256 for forward, tangent and gradient. The
table has registers of a thread, bytes spilled (0 is the rule), shared memory of a program, how many programs
fit on a multiprocessor at once, and of one step of the inner loop (a tile of keys, or of queries): matrix
instructions on tensor cores, how many times over they do what the tile needs, all instructions, and bytes
loaded.

From the same counts follows the roofline: the rate that a generation's arithmetic, exponentials, instruction
slots and memory allow at most (`estimate`).
"""

import contextlib
import io
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import harness
from exptilt.tilting.backends.triton import config, launch
from exptilt.tilting.problem import MASS, Inputs, InputTangents, Needs, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

PAGE = harness.FOLDER.parent / "gpu.md"
GPUS = {"sm80": "A100", "sm90": "H100", "sm100": "B200", "gfx942": "MI300"}
NUMBERS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SWEEPS = ("forward", "tangent", "gradient", "key mass", "second")
HEADS = ((64, False), (64, True), (128, False), (128, True))  # columns, and whether with all options
OTHERS = ((16, False), (32, False), (256, False))  # of the first three sweeps
TYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES |= {torch.uint8: "u8", torch.int64: "i64", torch.int32: "i32"}
DISASSEMBLER = Path(nvidia.__path__[0]) / "bin" / "nvdisasm"
# Of a multiprocessor: registers, bytes of shared memory, threads at most.
REGISTERS, SHARED, THREADS = 65536, {"sm80": 164 << 10, "sm90": 228 << 10, "sm100": 228 << 10}, 2048
LOGS: dict[str, str] = {}  # what the assembler said of a kernel, which it says but once
MATRIX = re.compile(r"HMMA|HGMMA|UTC\w*MMA|v_mfma")
BYTES = {".128": 16, ".64": 8, ".U16": 2, ".U8": 1, ".S16": 2}


def problem(number: torch.dtype, D: int, full: bool) -> tuple[Inputs, ScoreRule]:
    """A problem of which only shapes and strides count."""
    wide = wide_dtype(number)
    query, key = torch.empty(2, 4, 1024, D, dtype=number), torch.empty(2, 2, 1024, D, dtype=number)
    planes: tuple[Any, ...] = ()
    if full:
        mask = torch.empty(1, 1, 1024, 1024, dtype=torch.bool)
        planes = torch.empty(1, 1, 1024, 1024, dtype=wide), torch.empty(2, 2, 1024, dtype=wide), None, mask
    rule = ScoreRule(0.1, causal=full, window=500 if full else None, softcap=2.0 if full else None)
    return Inputs(query, key, key.clone(), *planes), rule


def launched(sweep: str, generation: str, t: Inputs, rule: ScoreRule) -> dict[str, Any]:
    """Kernels by name as a sweep launches them: (kernel, arguments, keywords); none is run."""
    calls: dict[str, Any] = {}

    def record(self: Any, *given: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        if self.__name__.startswith("met"):  # one product of a few rows, without a loop over keys
            return
        part = next((x for x in ("rows", "keys", "bias") if self.__name__.startswith(x)), None)
        calls[sweep if part is None or sweep == "key mass" else f"{sweep} by {part}"] = self, given, keywords

    plain, JITFunction.run = JITFunction.run, record
    own, config.generation_of = config.generation_of, lambda device: generation
    wide = wide_dtype(t.query.dtype)
    rows = torch.empty(9, *t.query.shape[:-1], dtype=wide)
    dots, output = InputTangents(t.query, t.key, t.value, t.bias, t.log_weight), t.query.to(wide)
    try:
        if sweep == "forward":
            launch.forward(t, rule)
        elif sweep == "tangent":
            launch.tangent(t, dots, rows[:3], rule)
        elif sweep == "gradient":
            launch.gradient(t, output, output, rows[:6], rule, Needs())
        elif sweep == "key mass":
            launch.gradient(t, output, output, rows[:3], rule, MASS)
        else:
            launch.gradient(t, output, output, rows, rule, Needs(), dots, output)
    finally:
        JITFunction.run, config.generation_of = plain, own
    return calls


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


class Loop(NamedTuple):
    """One step of the loop that has the exponentials: instructions by opcode, those of loops inside it
    once for each of their rounds.
    """

    opcodes: Counter[str]

    def count(self, pattern: str | re.Pattern[str]) -> int:
        """Instructions whose opcode matches."""
        return sum(n for name, n in self.opcodes.items() if re.match(pattern, name))

    def loaded(self) -> int:
        """Bytes that a thread loads from memory."""
        widths = {name: next((n for end, n in BYTES.items() if end in name), 4) for name in self.opcodes}
        return sum(n * widths[name] for name, n in self.opcodes.items() if re.match(r"LDG(STS)?\.", name))

    def multiplied(self) -> int:
        """Operations of a warp's matrix instructions; 0 where the opcode does not tell."""
        shapes = {
            name: re.match(r"HMMA\.(16)(8)(\d+)\.|HGMMA\.(64)x(\d+)x(\d+)\.", name) for name in self.opcodes
        }
        sizes = {name: [int(x) for x in found.groups() if x] for name, found in shapes.items() if found}
        warps = {name: 4 if name.startswith("HGMMA") else 1 for name in sizes}  # that share an instruction
        return sum(self.opcodes[name] * 2 * math.prod(size) // warps[name] for name, size in sizes.items())


def inner_loop(cubin: bytes, rounds: int) -> Loop:
    """The step loop of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(DISASSEMBLER), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels, code, jumps = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            code.append(found[1])
            if found[1].startswith("BRA") and (target := re.search(r"\.L_x_\d+", found[2])):
                jumps.append((target[0], len(code)))
    loops = [(labels[name], end) for name, end in jumps if labels.get(name, end) < end - 1]
    steps = [(a, b) for a, b in loops if any(x.startswith("MUFU.EX2") for x in code[a:b])]
    # Of loops with exponentials the innermost ones, and of these the one that does most of the work.
    steps = [x for x in steps if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in steps)]

    def weight(loop: tuple[int, int]) -> int:
        return sum(bool(MATRIX.match(x)) or x == "FFMA" for x in code[slice(*loop)])

    a, b = max(steps, key=weight)
    inside = [(x, y) for x, y in loops if a <= x and y <= b and (x, y) != (a, b)]
    opcodes: Counter[str] = Counter()
    for at in range(a, b):
        opcodes[code[at]] += rounds if any(x <= at < y for x, y in inside) else 1
    return Loop(opcodes)


def flops(ttir: str, rounds: int) -> dict[str, int]:
    """Operations of the products in one step, by what they are multiplied in; from Triton's own text."""
    loops: list[list[Any]] = []  # indentation, whether it has the exponentials, products
    steps, found = [], {"half": 0, "tf32": 0, "float32": 0}
    for line in ttir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line or "scf.while" in line:
            loops.append([indent, False, []])
        elif loops and line.lstrip().startswith("}") and indent == loops[-1][0]:
            _, exponentials, products = loops.pop()
            if exponentials:
                steps.append(products)
            elif loops:
                loops[-1][2] += rounds * products
        elif loops and re.search(r"math\.exp2? .*tensor<\d+x\d+x", line):
            loops[-1][1] = True
        elif loops and "tt.dot" in line:
            loops[-1][2].append(line)
    for line in max(steps, key=len):
        (m, k, number), (_, n, _) = re.findall(r"tensor<(\d+)x(\d+)x(\w+)>", line)[:2]
        precision = re.search(r"inputPrecision = (\w+)", line)
        kind = "half" if number != "f32" else "tf32" if precision else "float32"
        times = 3 if kind == "tf32" and precision and precision[1] == "tf32x3" else 1
        found[kind] += 2 * times * int(m) * int(k) * int(n)
    return found


def compiled(generation: str, call: tuple[Any, tuple[Any, ...], dict[str, Any]], D: int) -> dict[str, Any]:
    """What the assembler says of one kernel."""
    kernel, given, keywords = call
    names = [p.name for p in kernel.params]
    values = dict(zip(names, given, strict=False)) | {n: x for n, x in keywords.items() if n in names}
    fixed: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    signature: dict[str, Any] = {}
    amd = generation.startswith("gfx")
    for at, p in enumerate(kernel.params):
        if p.is_constexpr:
            fixed[p.name], signature[p.name] = values[p.name], "constexpr"
        else:
            signature[p.name] = p.annotation_type or _kinds(values[p.name], (at,), fixed, known)
    kind, warps = values["KIND"], keywords["num_warps"]
    if amd and kind.precision == "tf32x3":  # which Triton does not have for AMD
        fixed["KIND"] = kind._replace(precision="ieee")
    target = GPUTarget("hip", generation, 64) if amd else GPUTarget("cuda", int(generation[2:]), 32)
    options = {name: x for name, x in keywords.items() if name.startswith("num_")}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        made = triton.compile(ASTSource(kernel, signature, fixed, known), target=target, options=options)
    rounds = math.ceil(D / getattr(kind, "step", kind.d))
    text = LOGS.setdefault(made.hash, log.getvalue())
    layouts, threads = made.asm["ttgir"], target.warp_size * warps
    products = re.findall(r"= tt\.dot .*|ttng\.warp_group_dot .*|ttng\.tc_gen5_mma .*", layouts)
    found = {
        "tile": [kind.rows, kind.keys],
        "warps": warps,
        "shared": made.metadata.shared,
        "flops": flops(made.asm["ttir"], rounds),
        "products": len(products),
        "products on tensor cores": sum("#blocked" not in x for x in products),
    }
    if amd:
        assembly = made.asm["amdgcn"]

        def said(name: str) -> int:
            return max(map(int, re.findall(rf"\.{name}: +(\d+)", assembly)))

        registers = said("vgpr_count")
        lanes = 512 // (
            8 * math.ceil(registers / 8)
        )  # waves that fit on one of four SIMDs, by their registers
        fit = min(4 * min(8, lanes) // warps, (64 << 10) // max(1, made.metadata.shared))
        matrix = {"matrix": len(MATRIX.findall(assembly))}
        return (
            found
            | matrix
            | {"registers": registers, "spilled": 4 * said("vgpr_spill_count"), "programs": fit}
        )
    registers = max(map(int, re.findall(r"Used (\d+) registers", text)))
    loop = inner_loop(made.asm["cubin"], rounds)
    by_registers = REGISTERS // (8 * math.ceil(registers / 8) * threads)
    return found | {
        "registers": registers,
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", text))),
        "programs": min(
            by_registers, SHARED[generation] // (made.metadata.shared + 1024), THREADS // threads
        ),
        "matrix": loop.count(MATRIX),
        "matrix kind": " ".join(sorted({x.split(".")[0] for x in loop.opcodes if MATRIX.match(x)})),
        "repeated": warps * loop.multiplied() / max(1, found["flops"]["half"] + found["flops"]["tf32"]),
        "tf32": loop.count(r"\w+MMA.*TF32"),
        "exponentials": loop.count(r"MUFU\.EX2"),
        "instructions": sum(loop.opcodes.values()),
        "loaded": threads * loop.loaded(),
    }


def audit(
    generation: str, sweep: str, number: str, D: int, full: bool, only: str | None = None
) -> list[dict[str, Any]]:
    """All kernels of a sweep, or the one of that name."""
    about = {"GPU": generation, "dtype": number, "D": D, "options": "all" if full else "none"}
    calls = launched(sweep, generation, *problem(NUMBERS[number], D, full))
    return [
        about | {"sweep": name} | compiled(generation, call, D)
        for name, call in calls.items()
        if only in (None, name)
    ]


def measure(quick: bool) -> dict[str, Any]:
    cases = [
        (generation, sweep, number, D, full)
        for generation in (GPUS if not quick else ("sm80",))
        for sweep in (SWEEPS if not quick else SWEEPS[:1])
        for number in NUMBERS
        for D, full in (HEADS[:1] if quick else HEADS + (OTHERS if sweep in SWEEPS[:3] else ()))
        if number != "float16" or (D, full) == HEADS[0]
    ]
    kernels = [one for case in harness.track(cases, "sweeps") for one in audit(*case)]
    return {"kernels": kernels}


class Peak(NamedTuple):
    """What a GPU does at most: 10¹² operations a second on tensor cores (half precision, TF32), 10⁹ bytes a
    second from memory, multiprocessors, 10⁹ clocks a second.
    """

    half: float
    tf32: float
    memory: float
    processors: int
    clock: float


# Data sheets of the SXM boards, without sparsity; sources in docs/gpu.md.
PEAKS = {
    "sm80": Peak(312, 156, 2039, 108, 1.41),
    "sm90": Peak(989, 494.7, 3350, 132, 1.83),
    "sm100": Peak(2250, 1130, 7700, 148, 1.86),
}
EXPONENTIALS, ISSUES = 16, 4  # of a multiprocessor in a clock
SHAPES = ((16, 1024, 64), (1, 16384, 64), (4, 4096, 128))  # batch, length, D; 2,048/D heads, causal


def estimate(kernel: dict[str, Any], batch: int, length: int) -> dict[str, float]:
    """Seconds that each resource needs for all steps of a kernel; the longest is the least time."""
    peak, D = PEAKS[kernel["GPU"]], kernel["D"]
    heads = 2048 // D
    steps = batch * heads * length**2 / 2 / math.prod(kernel["tile"])
    clocks, flops = peak.processors * peak.clock * 1e9, kernel["flops"]
    warps, size = kernel["warps"], NUMBERS[kernel["dtype"]].itemsize
    return {
        "tensor cores": steps * (flops["half"] / peak.half + flops["tf32"] / peak.tf32) / 1e12,
        "exponentials": steps * kernel["exponentials"] * 32 * warps / (EXPONENTIALS * clocks),
        "instructions": steps * kernel["instructions"] * warps / (ISSUES * clocks),
        "memory": batch * heads * length * D * 4 * size / (peak.memory * 1e9),
    }


def roofline(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """At most so many 10¹² operations a second, counted as FlashAttention does, and what sets the limit."""
    by = {(x["GPU"], x["sweep"], x["dtype"], x["D"], x["options"]): x for x in results["kernels"]}
    passes = {"forward": ("forward",), "backward": ("gradient by rows", "gradient by keys")}
    rows = []
    for name, sweeps in passes.items():
        for dtype in ("bfloat16", "float32"):
            for batch, length, D in SHAPES:
                cells = []
                for generation in PEAKS:
                    parts = [
                        estimate(by[generation, sweep, dtype, D, "none"], batch, length)
                        for sweep in sweeps
                        if (generation, sweep, dtype, D, "none") in by
                    ]
                    if len(parts) < len(sweeps):
                        cells.append("–")
                        continue
                    seconds = sum(max(part.values()) for part in parts)
                    limits = Counter({x: sum(part[x] for part in parts) for x in parts[0]})
                    counted = (2.5 if name == "backward" else 1) * 4 * batch * 2048 * length**2 / 2
                    cells.append(f"{counted / seconds / 1e12:.0f} ({limits.most_common(1)[0][0]})")
                rows.append([name, dtype, f"{batch}×{2048 // D}×{length:,}×{D}", *cells])
    return ["pass", "dtype", "batch×heads×length×D", *(GPUS[x] for x in PEAKS)], rows


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: numbers of all generations beside each other, the worse of no options and all."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in results["kernels"]:
        groups.setdefault((one["sweep"], one["dtype"], one["D"]), []).append(one)
    shown = {  # heading: what is shown of a kernel, and which of several
        "registers": (lambda x: x["registers"], max),
        "spilled": (lambda x: x["spilled"], max),
        "shared KB": (lambda x: round(x["shared"] / 1024), max),
        "programs": (lambda x: x["programs"], min),
        "tensor-core": (lambda x: x["matrix"], min),
        "repeated": (lambda x: f"{x['repeated']:.1f}" if x.get("repeated") else "–", max),
        "instructions": (lambda x: x.get("instructions", "–"), max),
        "KB loaded": (lambda x: round(x["loaded"] / 1024) if "loaded" in x else "–", max),
    }
    rows = []
    for (sweep, dtype, D), group in groups.items():
        generations = [x for x in GPUS if any(one["GPU"] == x for one in group)]

        def cell(of: Any, choose: Any, group: Any = group, generations: Any = generations) -> str:
            found = [str(choose(of(one) for one in group if one["GPU"] == x)) for x in generations]
            return found[0] if len(set(found)) == 1 else " · ".join(found)

        tile = cell(lambda x: "×".join(map(str, x["tile"])), max)
        rows.append([sweep, dtype, str(D), tile, *(cell(*how) for how in shown.values())])
    return ["sweep", "dtype", "D", "tile", *shown], rows


PARTS = (
    harness.Part(PAGE, "gpu audit", "gpu_audit", table),
    harness.Part(PAGE, "gpu roofline", "gpu_audit", roofline),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save("gpu_audit", measure(arguments.quick), folder=harness.folder(arguments.quick))
    results = harness.read(path)
    harness.print_table(*table(results))
    spilling = [x for x in results["kernels"] if x["spilled"]]
    print(f"{len(results['kernels'])} kernels, {len(spilling)} of them spill")
    if not arguments.quick:
        harness.print_table(*roofline(results))
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
