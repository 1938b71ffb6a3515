"""Memory where something is shared: a bias that broadcasts over batch or heads, and `vmap` with shared keys.

What is shared should be read where it stands. Each call is measured in a process of its own, beyond inputs
and outputs, next to the same call on shared parts that were first copied to full size. The limit is the size
of one such copy divided by `SHARE`: a call that makes the copy cannot meet it.

    bias     4 × 8 heads, n = 1024: one bias for all, one for each head, one for each member of the batch
    keys     16 × 8 heads of 256 queries, 8,192 keys for each head, the same for all 16
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "attention.md"
SHARE = 4
BIASES = {"all": (1, 1), "head": (1, None), "member": (None, 1)}  # leading axes of a bias; None: not shared
SIZES = {"bias": (4, 8, 1024, 1024), "keys": (16, 8, 256, 8192)}
QUICK = {"bias": (2, 2, 64, 64), "keys": (2, 2, 32, 128)}
Size = tuple[int, int, int, int]  # batch, heads, queries, keys


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bias_call(size: Size, shared: str, derivative: str, full: bool) -> Callable[[], object]:
    """Attention with a bias; `derivative` is none, inputs (query, key, value) or bias (these and itself)."""
    batch, heads, queries, keys = size
    lead = [n if own is None else own for n, own in zip((batch, heads), BIASES[shared], strict=True)]
    q, k, v = (draw(batch, heads, n, 64, seed=s) for s, n in enumerate((queries, keys, keys)))
    bias = draw(*lead, queries, keys, seed=3)
    wanted = [] if derivative == "none" else [q, k, v] if derivative == "inputs" else [q, k, v, bias]
    for x in wanted:
        x.requires_grad_()

    def run() -> object:
        used = bias.expand(size).contiguous() if full else bias
        output = xt.attend(q, k, v, bias=used).output
        return output.detach(), torch.autograd.grad(output.sum(), wanted) if wanted else ()

    return run


def keys_call(size: Size, derivative: str, full: bool) -> Callable[[], object]:
    """`vmap` over queries, keys shared, or copied for each; `derivative` is none or inputs (the query)."""
    batch, heads, queries, keys = size
    q, k = draw(batch, heads, queries, 64, seed=0), draw(heads, keys, 64, seed=1)

    def one(query: Tensor, key: Tensor) -> Tensor:
        return xt.attend(query, key, key).output

    def run() -> object:
        function = one if derivative == "none" else grad(lambda query, key: one(query, key).sum())
        used = k.expand(batch, *k.shape).contiguous() if full else k
        return vmap(function, in_dims=(0, 0 if full else None))(q, used)

    return run


CASES: dict[str, tuple[str, Callable[[Size, bool], Callable[[], object]]]] = {
    "bias, one for all": ("bias", lambda size, full: bias_call(size, "all", "none", full)),
    "bias, one a head": ("bias", lambda size, full: bias_call(size, "head", "none", full)),
    "bias, one a member": ("bias", lambda size, full: bias_call(size, "member", "none", full)),
    "bias, one for all, backward": ("bias", lambda size, full: bias_call(size, "all", "inputs", full)),
    "bias, one for all, backward to it": ("bias", lambda size, full: bias_call(size, "all", "bias", full)),
    "bias, one a head, backward to it": ("bias", lambda size, full: bias_call(size, "head", "bias", full)),
    "vmap, shared keys": ("keys", lambda size, full: keys_call(size, "none", full)),
    "vmap, shared keys, backward": ("keys", lambda size, full: keys_call(size, "inputs", full)),
}


def copy_bytes(kind: str, size: Size) -> int:
    """Bytes of what is shared, copied to full size: the bias, or the keys."""
    batch, heads, queries, keys = size
    return batch * heads * keys * (queries if kind == "bias" else 64) * torch.float32.itemsize


def prepare(name: str, size: Size, full: bool) -> Callable[[], object]:
    """In the new process: one call on something small, so that code is loaded, then the inputs."""
    _, make = CASES[name]
    make((2, 2, 300, 300), full)()
    return make(size, full)


def measure(sizes: dict[str, Size], names: list[str]) -> dict[str, Any]:
    memory, goals = {}, []
    for name in harness.track(names, "memory"):
        kind = CASES[name][0]
        size = sizes[kind]
        shared, copied = [harness.peak_extra_memory(prepare, name, size, full) for full in (False, True)]
        copy = copy_bytes(kind, size)
        memory[name] = {"shared": shared, "copied": copied, "copy": copy}
        goals.append(Goal(name, shared.beyond / 1e6, copy / SHARE / 1e6, "MB"))
    return {"sizes": sizes, "memory": memory, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: megabytes beyond inputs and outputs, of the call as it is and on copies; the goal."""
    rows = []
    for goal in results["goals"]:
        seen = results["memory"][goal["what"]]
        cells = [seen["shared"]["beyond"], seen["copied"]["beyond"], seen["copy"]]
        words = [f"≤ {goal['limit']:.0f}", "met" if goal["met"] else "NOT met"]
        rows.append([goal["what"], *[f"{cell / 1e6:.0f}" for cell in cells], *words])
    return ["MB beyond", "shared", "copied", "one copy alone", "goal", ""], rows


PARTS = (harness.Part(PAGE, "shared", "attention_shared", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    names = ["bias, one for all, backward to it"] if arguments.quick else list(CASES)
    results = measure(QUICK if arguments.quick else SIZES, names)
    path = harness.save("attention_shared", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
