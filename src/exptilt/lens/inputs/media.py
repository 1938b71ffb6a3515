"""Pictures, for models that read them: each is one chunk, whose tokens are places.

Special tokens come first (one for the class, registers), then patches row by row. `Layout` knows where the
tokens lie. To show their attention on a page they are joined to cells of a coarser grid: attention from a
cell is the mean over its tokens, attention to a cell the sum over its tokens. Files are opened here; the
model's own image processor makes its inputs from them.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.lens.inputs.texts import Chunk, Cut, Facts, Reading
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.watch import watch

READS = "pixel_values"  # main input of models that read pictures
SIDE = 8  # cells along a side of a picture, at most
SPECIAL = 16  # most tokens without a place in the picture; with more, the grid is not known
PIXELS = 112  # of the longer side of a picture on a page
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Layout:
    """Positions of tokens: `special` ones without a place, then a grid, row by row."""

    special: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Number of tokens, special ones included."""
        return self.special + self.rows * self.columns

    def places(self) -> Tensor:
        """``(token, 2)``: row and column of each token, NaN for one without a place."""
        rows, columns = torch.meshgrid(torch.arange(self.rows), torch.arange(self.columns), indexing="ij")
        grid = torch.stack([rows.flatten(), columns.flatten()], -1).double()
        return torch.cat([torch.full((self.special, 2), torch.nan, dtype=torch.float64), grid])

    @property
    def coarse(self) -> "Layout":
        """The grid of cells that a page shows."""
        return Layout(self.special, *(math.ceil(n / math.ceil(n / SIDE)) for n in (self.rows, self.columns)))

    def cells(self) -> Tensor:
        """``(token,)``: the cell of the coarse grid that each token is in; special tokens have their own."""
        coarse, places = self.coarse, self.places()[self.special :]
        step = torch.tensor([math.ceil(self.rows / coarse.rows), math.ceil(self.columns / coarse.columns)])
        row, column = (places // step).long().unbind(-1)
        return torch.cat([torch.arange(self.special), self.special + row * coarse.columns + column])

    def names(self, *, coarse: bool = False) -> list[str]:
        """Name of each token, or of each cell of the coarse grid."""
        special = ["[class]", *(f"[extra {i}]" for i in range(1, self.special))][: self.special]
        grid = self.coarse if coarse else self

        def spans(name: str, cells: int, count: int) -> list[str]:
            step = math.ceil(count / cells)
            ends = [(i * step, min((i + 1) * step, count) - 1) for i in range(cells)]
            return [f"{name} {a}" if a == b else f"{name}s {a}–{b}" for a, b in ends]

        rows, columns = spans("row", grid.rows, self.rows), spans("column", grid.columns, self.columns)
        return special + [f"{row}, {column}" for row in rows for column in columns]


@dataclass(frozen=True)
class Picture:
    """The picture that attention strips are over, as the model reads it.

    Attributes:
        pixels: ``(height, width, 3)``, 0 to 255.
        special: tokens at the start of the strip that have no place in the picture.
        rows, columns: the grid that the other tokens fill, row by row.
        kind: "picture"; studies of earlier releases may have "sound", the spectrogram of one.
    """

    pixels: NDArray[np.float64]
    special: int
    rows: int
    columns: int
    kind: str = "picture"


def files(paths: Sequence[Path]) -> dict[str, Path]:
    """Files of pictures by name: those named, and those inside folders."""
    found: dict[str, Path] = {}
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(x for x in path.iterdir() if x.suffix.lower() in SUFFIXES)
        if not inside:
            raise ArgumentError(f"{path} has no pictures ({', '.join(SUFFIXES)}).")
        for file in inside:
            found[str(file) if file.name in found else file.name] = file
    return found


def read(model: Any, processor: Any, items: Any, chunk: int, max_tokens: int | None) -> Reading:
    """Pictures as a `Reading`, one chunk each, however many patches; the model is in eval mode."""
    name = type(model).__name__
    if isinstance(items, str | os.PathLike | np.ndarray | Tensor) or hasattr(items, "convert"):
        items = [items]
    named = items if isinstance(items, Mapping) else {str(i + 1): item for i, item in enumerate(items)}
    taken = Cut([], False, 0, [])
    tokens: dict[torch.Size, int] = {}  # by the shape of what is read
    budget = math.inf if max_tokens is None else max_tokens
    for index, (label, item) in enumerate(named.items()):
        if isinstance(item, str):
            raise ArgumentError(
                f"study: {name} reads pictures, and text {label} is a str. Pass pictures: arrays or paths of "
                "files; on the command line, --images."
            )
        if taken.chunks and budget < taken.chunks[-1].ids.shape[0]:
            taken.silent.append(index)
            continue
        values = _values(processor, item)
        if values.shape not in tokens:
            tokens[values.shape] = _count(model, values)
        layout = _layout(model, values, tokens[values.shape])
        special = frozenset(range(0 if layout is None else layout.special))
        ids = torch.arange(tokens[values.shape])
        taken.chunks.append(Chunk(ids, index, special, given={READS: values}, layout=layout))
        budget -= ids.shape[0]
    if not taken.chunks:
        raise ArgumentError("study: there are no pictures. Pass at least one.")
    longest = max(taken.chunks, key=lambda c: c.ids.shape[0])
    words = longest.layout.names() if longest.layout else [f"token {i}" for i in longest.ids.tolist()]
    unread = f"{len(taken.silent)} of {len(named)} pictures were not read (max_tokens)."
    notes, at = [unread] if taken.silent else [], taken.chunks[0].layout
    facts: Facts = {"text": ", ".join(map(str, named))} if isinstance(items, Mapping) else {}
    facts |= {"pictures": len(taken.chunks), "tokens": sum(c.ids.shape[0] for c in taken.chunks)}
    picture = None
    if at is not None:
        notes.append(
            f"Tokens are patches, {at.rows} rows of {at.columns}, after {at.special} without a place; "
            "the token before is the patch to the left, and widths are in patches."
        )
        facts["patches"] = f"{at.rows} × {at.columns}"
        shown = _shown(processor, taken.chunks[0].inputs(model)[READS])
        if shown is not None:
            picture = Picture(shown, at.special, at.coarse.rows, at.coarse.columns)
    return Reading(taken.chunks, facts, notes, lambda ids: [words[i] for i in ids], picture=picture)


def _values(processor: Any, item: Any) -> Tensor:
    """Input of the model, a batch of one picture."""
    if isinstance(item, Tensor) and item.dim() > 2 and processor is None:
        return item if item.dim() == 4 else item[None]
    if not callable(processor):
        raise ArgumentError(
            f"study: tokenizer is {processor!r}, and a model that reads pictures needs its image processor. "
            "Pass it, or tensors as the model takes them."
        )
    item = _open(Path(item)) if isinstance(item, os.PathLike) else item
    found: Tensor = processor(images=item, return_tensors="pt")[READS]
    return found


def _count(model: nn.Module, values: Tensor) -> int:
    """Number of tokens that attend to each other; raises if the model attends within windows."""
    calls: list[AttentionCall] = []
    with torch.no_grad(), watch(model, observe=calls.append):
        model(**{READS: values.to(next(model.parameters()).device)})
    if any(call.query.shape[0] != 1 for call in calls):
        raise ArgumentError(
            f"study: {type(model).__name__} attends within windows, and a study needs attention over the "
            "whole picture. Use xt.lens.watch, which takes any attention."
        )
    return calls[0].query.shape[2]


def _layout(model: Any, values: Tensor, tokens: int) -> Layout | None:
    """Layout of the tokens of one picture; None if they are not on a known grid."""
    patch = getattr(model.config, "patch_size", None)
    sides = (patch, patch) if isinstance(patch, int) else patch
    if sides is None or values.dim() != 4:
        return None
    rows, columns = (n // int(p) for n, p in zip(values.shape[-2:], sides, strict=True))
    special = tokens - rows * columns
    return Layout(special, rows, columns) if 0 <= special <= SPECIAL else None


def _shown(processor: Any, values: Tensor) -> NDArray[np.float64] | None:
    """The model's input as an image ``(height, width, 3)``, 0 to 255; None unless 1 or 3 colours."""
    x = values[0].detach().float().cpu()
    if x.dim() != 3 or x.shape[0] not in (1, 3):
        return None
    spread = [getattr(processor, name, None) for name in ("image_mean", "image_std")]
    if None not in spread and len(spread[0]) == x.shape[0]:  # type: ignore[arg-type]
        mean, deviation = (torch.tensor(s)[:, None, None] for s in spread)
        x = (x * deviation + mean).clamp(0, 1)
    else:
        x = (x - x.amin()) / (x.amax() - x.amin()).clamp(min=1e-12)
    scale = min(1.0, PIXELS / max(x.shape[-2:]))
    sides = [max(1, round(n * scale)) for n in x.shape[-2:]]
    x = F.interpolate(x[None], sides, mode="area")[0].expand(3, -1, -1)
    found: NDArray[np.float64] = (255 * x).round().double().permute(1, 2, 0).contiguous().numpy()
    return found


def _open(path: Path) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as problem:
        raise MissingExtraError("Pillow", "report") from problem
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (OSError, UnidentifiedImageError) as problem:
        raise ArgumentError(f"{path} cannot be read as a picture ({problem}).") from None
