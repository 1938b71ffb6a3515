"""Losses without the matrix of logits, against the matrix and against the libraries people use.

InfoNCE of 16,384 pairs against the full matrix of similarities, and how time and memory grow to 262,144
pairs; NT-Xent of 1,024 embeddings (512 items, two views) against pytorch-metric-learning; the head of a
language model (2,048 tokens, 49,152 outcomes, dimension 576) against `F.cross_entropy` of its logits and
torch's chunked path; then 8,192 tokens and 262,144 outcomes. Float32, loss and gradients, in interleaved
runs; memory from processes of their own, beyond inputs, loss and gradients.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "losses.md"
TEMPERATURE = 0.07
Run = Callable[[], tuple[Tensor, ...]]


def _with_gradients(loss: Callable[..., Tensor], *tensors: Tensor) -> Run:
    tensors = tuple(x.requires_grad_() for x in tensors)

    def run() -> tuple[Tensor, ...]:
        value = loss(*tensors)
        return value.detach(), *torch.autograd.grad(value, tensors)

    return run


def _unit(count: int, dimension: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed)), dim=-1)


def full_matrix(query: Tensor, key: Tensor) -> Tensor:
    return F.cross_entropy(query @ key.T / TEMPERATURE, torch.arange(len(query)))


def info_nce(query: Tensor, key: Tensor) -> Tensor:
    return xt.losses.info_nce(query, key, temperature=TEMPERATURE, similarity="dot")


PAIRS = {"full matrix": full_matrix, "info_nce": info_nce}


def pairs_case(name: str, count: int, dimension: int) -> Run:
    return _with_gradients(PAIRS[name], _unit(count, dimension, 0), _unit(count, dimension, 1))


def metric_learning(z: Tensor) -> Tensor:
    from pytorch_metric_learning.losses import NTXentLoss

    loss: Tensor = NTXentLoss(temperature=TEMPERATURE)(z, torch.arange(len(z) // 2).repeat(2))
    return loss


def nt_xent(z: Tensor) -> Tensor:
    return xt.losses.nt_xent(z.unflatten(0, (2, -1)), temperature=TEMPERATURE)


VIEWS = {"pytorch-metric-learning": metric_learning, "nt_xent": nt_xent}


def views_case(name: str, count: int, dimension: int) -> Run:
    return _with_gradients(VIEWS[name], _unit(count, dimension, 2))


def plain_head(h: Tensor, W: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(h @ W.T, t)


def chunked_head(h: Tensor, W: Tensor, t: Tensor) -> Tensor:
    return F.linear_cross_entropy(h, W, t, options=torch.nn.LinearCrossEntropyOptions())


HEADS = {
    "plain logits": plain_head,
    "linear_cross_entropy": xt.losses.linear_cross_entropy,
    "torch, chunked": chunked_head,
}


def head_case(name: str, tokens: int, outcomes: int, dimension: int) -> Run:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, dimension, generator=generator)
    W = torch.randn(outcomes, dimension, generator=generator).div_(dimension**0.5)
    t = torch.randint(outcomes, (tokens,), generator=generator)
    return _with_gradients(lambda h, W: HEADS[name](h, W, t), h, W)


CASES = {"pairs": pairs_case, "views": views_case, "head": head_case}
SMALL = {"pairs": (300, 128), "views": (64, 128), "head": (300, 3000, 576)}


def prepare(kind: str, name: str, *shape: int) -> Run:
    """In the new process: one call on something small, so that code is loaded, then the inputs."""
    CASES[kind](name, *SMALL[kind])()
    return CASES[kind](name, *shape)


def timed(path: str, kind: str, name: str, *shape: int) -> Callable[[], object]:
    """As `prepare`; the seconds of the call are written to a file."""
    run = prepare(kind, name, *shape)

    def noted() -> object:
        begin = time.perf_counter()
        found = run()
        Path(path).write_text(str(time.perf_counter() - begin), "utf-8")
        return found

    return noted


def once(kind: str, name: str, *shape: int) -> dict[str, float]:
    """Seconds and bytes of a single call, for what is too large to repeat."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds"
        beyond = harness.peak_extra_memory(timed, str(path), kind, name, *shape).beyond
        return {"seconds": float(path.read_text("utf-8")), "beyond": beyond}


def measure(quick: bool) -> dict[str, Any]:
    pairs, views, head = (
        ((512, 128), (64, 128), (64, 1024, 64)) if quick else ((16384, 128), (1024, 128), (2048, 49152, 576))
    )
    growth = [(1024, 128)] if quick else [(65536, 128), (262144, 128)]
    large = (128, 2048, 64) if quick else (8192, 262144, 576)
    rounds, names = (2, 2) if quick else (5, 3)
    results: dict[str, Any] = {"shapes": {"pairs": pairs, "views": views, "head": head, "large": large}}
    for kind, table, shape, slow in (
        ("pairs", PAIRS, pairs, {}),
        ("views", VIEWS, views, {"pytorch-metric-learning": names}),
        ("head", HEADS, head, {}),
    ):
        base = "nt_xent" if kind == "views" else next(iter(table))
        cases = {name: CASES[kind](name, *shape) for name in table}
        values = {name: float(case()[0]) for name, case in cases.items()}
        times = harness.compare(cases, base, rounds=rounds, slow=slow, label=kind)
        seen = {
            n: harness.peak_extra_memory(prepare, kind, n, *shape) for n in harness.track(list(table), kind)
        }
        results[kind] = {"times": times, "memory": seen, "values": values}
    results["growth"] = {count: once("pairs", "info_nce", count, d) for count, d in growth}
    results["large"] = once("head", "linear_cross_entropy", *large)
    results["goals"] = _goals(results, growth)
    return results


def _goals(results: dict[str, Any], growth: list[tuple[int, int]]) -> list[Goal]:
    def parts(kind: str, name: str, rival: str) -> tuple[float, float]:
        times, memory = results[kind]["times"], results[kind]["memory"]
        return times[name].best / times[rival].best, memory[name].beyond / max(1, memory[rival].beyond)

    time_pairs, memory_pairs = parts("pairs", "info_nce", "full matrix")
    time_views, memory_views = parts("views", "nt_xent", "pytorch-metric-learning")
    time_head, _ = parts("head", "linear_cross_entropy", "plain logits")
    time_chunked, _ = parts("head", "linear_cross_entropy", "torch, chunked")
    beyond = results["head"]["memory"]["linear_cross_entropy"].beyond / 1e6
    return [
        Goal("InfoNCE, time of the full matrix", time_pairs, 0.4),
        Goal("InfoNCE, memory of the full matrix", memory_pairs, 1 / 50),
        Goal(
            f"InfoNCE, {growth[-1][0]:,} pairs", results["growth"][growth[-1][0]]["beyond"] / 1e6, 500.0, "MB"
        ),
        Goal("NT-Xent, time of pytorch-metric-learning", time_views, 1 / 100),
        Goal("NT-Xent, memory of pytorch-metric-learning", memory_views, 1 / 100),
        Goal("head, time of plain logits", time_head, 1.0),
        Goal("head, time of torch's chunked path", time_chunked, 0.5),
        Goal("head, memory beyond gradients", beyond, 60.0, "MB"),
        Goal("large head, memory beyond gradients", results["large"]["beyond"] / 1e6, 100.0, "MB"),
    ]


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: seconds, ratio, megabytes beyond inputs and gradients."""
    titles = {"pairs": "{:,} pairs", "views": "{:,} embeddings", "head": "{:,} tokens, {:,} outcomes"}
    rows = []
    for kind, title in titles.items():
        words = title.format(*results["shapes"][kind])
        for name, t in results[kind]["times"].items():
            beyond = results[kind]["memory"][name]["beyond"] / 1e6
            rows.append([f"{words}: {name}", f"{t['best']:.3g}", f"{t['ratio']:.3g}", f"{beyond:,.0f}"])
    for count, one in results["growth"].items():
        rows.append(
            [f"{int(count):,} pairs: info_nce", f"{one['seconds']:.3g}", "", f"{one['beyond'] / 1e6:,.0f}"]
        )
    words, one = titles["head"].format(*results["shapes"]["large"]), results["large"]
    rows.append(
        [f"{words}: linear_cross_entropy", f"{one['seconds']:.3g}", "", f"{one['beyond'] / 1e6:,.0f}"]
    )
    return ["loss and gradients", "s", "ratio", "MB beyond"], rows


def goals(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what was aimed at, and what was measured."""
    rows = [
        [g["what"], f"≤ {g['limit']:.3g} {g['unit']}", f"{g['value']:.3g}", "met" if g["met"] else "not met"]
        for g in results["goals"]
    ]
    return ["goal", "limit", "measured", ""], rows


PARTS = (harness.Part(PAGE, "losses", "losses", table), harness.Part(PAGE, "losses goals", "losses", goals))


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save("losses", measure(arguments.quick), folder=harness.folder(arguments.quick))
    results = harness.read(path)
    harness.print_table(*table(results))
    harness.print_table(*goals(results))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
