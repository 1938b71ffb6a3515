"""Tiles chosen by timing them.

With ``EXPTILT_GPU_TUNE=1`` the first call of each kind of problem runs its kernel with several tiles. The
fastest is kept in one file, by GPU, release of Triton and kind of problem, and taken from there ever after,
with or without the variable. Remove the file to forget it.
"""

import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from exptilt._support.files import write_text
from exptilt.tilting.backends.triton.config import Tile, columns_of, generation_of, is_busy, tile_of
from exptilt.tilting.problem import Inputs
from exptilt.tilting.score_rule import ScoreRule

_SHAPES = (
    (128, 64, 64, 8),
    (64, 64, 64, 4),
    (64, 32, 64, 4),
    (32, 32, 64, 4),
    (32, 16, 32, 4),
    (16, 16, 32, 4),
)
timer: Callable[[Callable[[], Any]], float] = triton.testing.do_bench  # milliseconds of a call


def path() -> Path:
    """The file that keeps the fastest tiles."""
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "exptilt" / "gpu_tiles.json"


@cache
def _known(file: Path) -> dict[str, Tile]:
    try:
        return {name: Tile(*numbers) for name, numbers in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}


@cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kind_of_problem(sweep: str, t: Inputs, rule: ScoreRule) -> str:
    """Name of the kind of problem; problems of one kind share a tile."""
    few = "few queries" if t.query.shape[-2] <= 16 else "many queries"
    options = "options" if is_busy(t, rule) else "plain"
    columns = f"{max(columns_of(t))} columns"
    number = str(t.query.dtype).removeprefix("torch.")
    return ", ".join(
        [_gpu(t.query.device), f"triton {triton.__version__}", sweep, number, columns, few, options]
    )


def tile_for(sweep: str, t: Inputs, rule: ScoreRule, run: Callable[[Tile], Any]) -> Tile | None:
    """The fastest known tile for such problems, timed now if asked for; None for the table's tile."""
    file = path()
    name = kind_of_problem(sweep, t, rule)
    found = _known(file).get(name)
    if found is not None or os.environ.get("EXPTILT_GPU_TUNE") != "1":
        return found
    first = tile_of(sweep, t, is_busy(t, rule), generation_of(t.query.device))
    times: dict[Tile, float] = {}
    for tile in (first, *(Tile(*numbers) for numbers in _SHAPES)):
        try:
            times[tile] = timer(partial(run, tile))
        except OutOfResources:  # the table's own tile fits everywhere
            continue
    best = min(times, key=times.__getitem__)
    _known.cache_clear()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(_known(file) | {name: best}, indent=1))
    _known.cache_clear()
    return best
