"""Decoding, one query against many keys as a model writes word by word: all statistics, over SDPA.

Heads of 64. The keys stand by themselves (contiguous), or are the filled part of a longer static cache,
`cache[:, :, :K]` (sliced). With grouped heads 32 query heads share 8 key heads, and SDPA is called with
`enable_gqa=True`. Each ratio is from one interleaved run in the same dtype and layout.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import exptilt as xt
import harness
from harness import Goal
from rivals import attention as rivals

PAGE = harness.FOLDER.parent / "attention.md"
KEYS, QUICK = (1024, 8192, 32768), (64,)
HEADS = ((32, 8), (8, 8))  # of queries, of keys
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = ("contiguous", "sliced")


def limit(keys: int) -> float:
    return 1.1 if keys >= 8192 else 1.8


def inputs(heads: tuple[int, int], keys: int, dtype: torch.dtype, layout: str) -> list[Tensor]:
    """A query, keys and values; a sliced cache is a quarter longer than what is filled."""
    generator = torch.Generator().manual_seed(0)
    length = keys if layout == "contiguous" else keys + keys // 4
    query = torch.randn(1, heads[0], 1, 64, generator=generator).to(dtype)
    caches = [torch.randn(1, heads[1], length, 64, generator=generator).to(dtype) for _ in range(2)]
    return [query, *[cache[:, :, :keys] for cache in caches]]


def cases(tensors: list[Tensor]) -> dict[str, Callable[[], Any]]:
    sdpa = partial(F.scaled_dot_product_attention, enable_gqa=tensors[0].shape[1] != tensors[1].shape[1])
    return {"SDPA": rivals.forward(sdpa, tensors), "attend": rivals.forward(xt.attend, tensors)}


def measure(lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    runs, goals = [], []
    for heads in HEADS:
        for name, dtype in DTYPES.items():
            for layout in LAYOUTS:
                what = f"{heads[0]}/{heads[1]} heads, {name}, {layout}"
                times = {}
                for n in lengths:
                    timed = cases(inputs(heads, n, dtype, layout))
                    times[n] = harness.compare(timed, "SDPA", rounds=rounds, label=f"{what}, {n} keys")
                    goals.append(Goal(f"{what}, {n} keys", times[n]["attend"].ratio, limit(n)))
                runs.append({"what": what, "times": times})
    return {"lengths": lengths, "runs": runs, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: for each number of keys SDPA's time and our ratio; how many goals are met."""
    lengths, rows = results["lengths"], []
    header, goals = ["query/key heads"], ["goal"]
    for n in lengths:
        header += [f"{n:,} keys: SDPA, µs", "ratio"]
        goals += ["", f"≤ {limit(n):g}"]
    for run in results["runs"]:
        cells, met = [run["what"]], 0
        for n in lengths:
            times = run["times"][str(n)]
            cells += [f"{times['SDPA']['best'] * 1e6:.0f}", f"{times['attend']['ratio']:.2f}"]
            met += times["attend"]["ratio"] <= limit(n)
        rows.append([*cells, f"{met} of {len(lengths)}"])
    return [*header, "goals met"], [*rows, [*goals, ""]]


PARTS = (harness.Part(PAGE, "decoding", "attention_decoding", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    results = measure(QUICK, 1) if arguments.quick else measure(KEYS, 15)
    path = harness.save("attention_decoding", results, folder=harness.folder(arguments.quick))
    harness.print_table(*table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
