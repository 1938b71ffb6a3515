"""Pictures and sounds, for models that read them: each is one chunk, whose tokens are places.

    picture    special tokens first (one for the class, registers), then patches row by row
    sound      frames in time, one row

`Layout` knows where the tokens lie. To show their attention on a page they are joined to cells of a coarser
grid: attention from a cell is the mean over its tokens, attention to a cell the sum over its tokens. Files
are opened here; the model's own image processor or feature extractor makes its inputs from them.
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

READS = {"pixel_values": "pictures", "input_values": "sounds", "input_features": "sounds"}
SIDE, STRETCH = 8, 64  # cells along a side of a picture, and along a sound, at most
SPECIAL = 16  # most tokens without a place in the picture; with more, the grid is not known
PIXELS = 112  # of the longer side of a picture on a page
SUFFIXES = {
    "pictures": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    "sounds": (".wav",),
}


@dataclass(frozen=True)
class Layout:
    """Positions of tokens: `special` ones without a place, then a grid, row by row."""

    special: int
    rows: int
    columns: int
    seconds: float | None = None  # how long a sound is; None for a picture

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
        most = (SIDE, SIDE) if self.seconds is None else (1, STRETCH)
        rows, columns = (
            math.ceil(n / math.ceil(n / m)) for n, m in zip((self.rows, self.columns), most, strict=True)
        )
        return Layout(self.special, rows, columns, self.seconds)

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
        high, wide = math.ceil(self.rows / grid.rows), math.ceil(self.columns / grid.columns)
        if self.seconds is not None:
            return special + [f"{self.seconds * c * wide / self.columns:.2f} s" for c in range(grid.columns)]

        def span(name: str, index: int, step: int, count: int) -> str:
            first, last = index * step, min((index + 1) * step, count) - 1
            return f"{name} {first}" if first == last else f"{name}s {first}–{last}"

        rows = [span("row", i, high, self.rows) for i in range(grid.rows)]
        columns = [span("column", i, wide, self.columns) for i in range(grid.columns)]
        return special + [f"{row}, {column}" for row in rows for column in columns]


@dataclass(frozen=True)
class Picture:
    """The picture, or the spectrogram of the sound, that attention strips are over, as the model reads it.

    Attributes:
        pixels: ``(height, width, 3)``, 0 to 255.
        special: tokens at the start of the strip that have no place in the picture.
        rows, columns: the grid that the other tokens fill, row by row.
        kind: "picture" or "sound".
    """

    pixels: NDArray[np.float64]
    special: int
    rows: int
    columns: int
    kind: str = "picture"


def reader(model: Any) -> Any:
    """The part of a model to study: the encoder if it reads sounds and writes text, else the whole model."""
    sounds = READS.get(getattr(model, "main_input_name", "")) == "sounds"
    return model.get_encoder() if sounds and getattr(model.config, "is_encoder_decoder", False) else model


def files(kind: str, paths: Sequence[Path]) -> dict[str, Path]:
    """The files of a kind, "pictures" or "sounds", by name: those named, and those inside folders."""
    found: dict[str, Path] = {}
    for path in paths:
        inside = [path]
        if path.is_dir():
            inside = sorted(x for x in path.iterdir() if x.suffix.lower() in SUFFIXES[kind])
        if not inside:
            raise ArgumentError(f"{path} has no {kind} ({', '.join(SUFFIXES[kind])}).")
        for file in inside:
            found[str(file) if file.name in found else file.name] = file
    return found


def read(model: Any, processor: Any, items: Any, chunk: int, max_tokens: int | None) -> Reading:
    """Pictures or sounds as a `Reading`, one chunk each, however long; the model is in eval mode."""
    name, reads = type(model).__name__, model.main_input_name
    kind = READS[reads]
    if isinstance(items, str | os.PathLike | np.ndarray | Tensor) or hasattr(items, "convert"):
        items = [items]
    named = items if isinstance(items, Mapping) else {str(i + 1): item for i, item in enumerate(items)}
    taken = Cut([], False, 0, [])
    tokens: dict[torch.Size, int] = {}  # by the shape of what is read
    budget = math.inf if max_tokens is None else max_tokens
    for index, (label, item) in enumerate(named.items()):
        if isinstance(item, str):
            raise ArgumentError(
                f"study: {name} reads {kind} ({reads}), and text {label} is a str. Pass {kind}: arrays or "
                f"paths of files; on the command line, --{'images' if kind == 'pictures' else 'sounds'}."
            )
        if taken.chunks and budget < taken.chunks[-1].ids.shape[0]:
            taken.silent.append(index)
            continue
        values, seconds = _values(kind, reads, processor, item)
        if values.shape not in tokens:
            tokens[values.shape] = _count(model, {reads: values})
        layout = _layout(model, kind, values, tokens[values.shape], seconds)
        special = frozenset(range(0 if layout is None else layout.special))
        ids = torch.arange(tokens[values.shape])
        taken.chunks.append(Chunk(ids, index, special, given={reads: values}, layout=layout))
        budget -= ids.shape[0]
    if not taken.chunks:
        raise ArgumentError(f"study: there are no {kind}. Pass at least one.")
    longest = max((c for c in taken.chunks), key=lambda c: c.ids.shape[0])
    words = longest.layout.names() if longest.layout else [f"token {i}" for i in longest.ids.tolist()]
    unread = f"{len(taken.silent)} of {len(named)} {kind} were not read (max_tokens)."
    notes, first = [unread] if taken.silent else [], taken.chunks[0]
    facts: Facts = {"text": ", ".join(map(str, named))} if isinstance(items, Mapping) else {}
    facts |= {kind: len(taken.chunks), "tokens": sum(c.ids.shape[0] for c in taken.chunks)}
    picture = None
    if first.layout is not None:
        at = first.layout
        if kind == "pictures":
            notes.append(
                f"Tokens are patches, {at.rows} rows of {at.columns}, after {at.special} without a place; "
                "the token before is the patch to the left, and widths are in patches."
            )
            facts["patches"] = f"{at.rows} × {at.columns}"
        shown = _shown(kind, processor, first.inputs(model)[reads])
        if shown is not None:
            picture = Picture(shown, at.special, at.coarse.rows, at.coarse.columns, kind[:-1])
    return Reading(taken.chunks, facts, notes, lambda ids: [words[i] for i in ids], picture=picture)


def _values(kind: str, reads: str, processor: Any, item: Any) -> tuple[Tensor, float | None]:
    """Input of the model, a batch of one, and seconds of a sound (NaN if not known, None for a picture)."""
    rate = getattr(processor, "sampling_rate", 16000)
    if isinstance(item, Tensor) and item.dim() > (1 if kind == "sounds" else 2) and processor is None:
        dims = {"pixel_values": 4, "input_features": 3, "input_values": 2}[reads]
        return item if item.dim() == dims else item[None], math.nan if kind == "sounds" else None
    if isinstance(item, os.PathLike):
        item = _open_picture(Path(item)) if kind == "pictures" else _open_sound(Path(item), rate)
    if processor is None and kind == "sounds" and reads == "input_values":
        return torch.as_tensor(np.asarray(item), dtype=torch.float32)[None], len(item) / rate
    if not callable(processor):
        raise ArgumentError(
            f"study: tokenizer is {processor!r}, and a model that reads {kind} needs its "
            f"{'image processor' if kind == 'pictures' else 'feature extractor'}. Pass it, or tensors as the "
            "model takes them."
        )
    if kind == "pictures":
        return processor(images=item, return_tensors="pt")[reads], None
    sound = np.asarray(item, dtype=np.float32)
    found: Tensor = processor(sound, sampling_rate=rate, return_tensors="pt")[reads]
    # A feature extractor may pad a sound to a fixed length.
    hop = getattr(processor, "hop_length", None)
    padded = found.shape[-1] * hop if reads == "input_features" and hop else len(sound)
    return found, padded / rate


def _count(model: nn.Module, given: Mapping[str, Tensor]) -> int:
    """Number of tokens that attend to each other; raises if the model attends within windows."""
    sizes: list[tuple[int, int]] = []

    def observe(call: AttentionCall) -> None:
        sizes.append((call.query.shape[0], call.query.shape[2]))

    device = next(model.parameters()).device
    with torch.no_grad(), watch(model, observe=observe):
        model(**{name: x.to(device) for name, x in given.items()})
    if any(batch != 1 for batch, _ in sizes):
        raise ArgumentError(
            f"study: {type(model).__name__} attends within windows, and a study needs attention over "
            "the whole "
            "picture. Use xt.lens.watch, which takes any attention."
        )
    return sizes[0][1]


def _layout(model: Any, kind: str, values: Tensor, tokens: int, seconds: float | None) -> Layout | None:
    """Layout of the tokens of one input; None if they are not on a known grid."""
    if kind == "sounds":
        return Layout(0, 1, tokens, seconds)
    patch = getattr(model.config, "patch_size", None)
    sides = (patch, patch) if isinstance(patch, int) else patch
    if sides is None or values.dim() != 4:
        return None
    rows, columns = (n // int(p) for n, p in zip(values.shape[-2:], sides, strict=True))
    special = tokens - rows * columns
    return Layout(special, rows, columns) if 0 <= special <= SPECIAL else None


def _shown(kind: str, processor: Any, values: Tensor) -> NDArray[np.float64] | None:
    """The model's input as an image ``(height, width, 3)``, 0 to 255; a sound is shown as its spectrogram."""
    x = values[0].detach().float().cpu()
    if kind == "pictures":
        if x.dim() != 3 or x.shape[0] not in (1, 3):
            return None
        spread = [getattr(processor, name, None) for name in ("image_mean", "image_std")]
        if None not in spread and len(spread[0]) == x.shape[0]:  # type: ignore[arg-type]
            mean, deviation = (torch.tensor(s)[:, None, None] for s in spread)
            x = (x * deviation + mean).clamp(0, 1)
        else:
            x = (x - x.amin()) / (x.amax() - x.amin()).clamp(min=1e-12)
    else:
        if x.dim() == 1:
            size = min(400, x.shape[0])
            window = torch.hann_window(size)
            x = torch.stft(x, size, window=window, return_complex=True).abs().clamp(min=1e-5).log()
        x = ((x - x.amin()) / (x.amax() - x.amin()).clamp(min=1e-12)).flip(0)[None]
    scale = min(1.0, PIXELS / max(x.shape[-2:])) if kind == "pictures" else None
    sides = [max(1, round(n * scale)) for n in x.shape[-2:]] if scale else [48, 3 * PIXELS]
    x = F.interpolate(x[None], sides, mode="area")[0].expand(3, -1, -1)
    found: NDArray[np.float64] = (255 * x).round().double().permute(1, 2, 0).contiguous().numpy()
    return found


def _open_picture(path: Path) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as problem:
        raise MissingExtraError("Pillow", "report") from problem
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (OSError, UnidentifiedImageError) as problem:
        raise ArgumentError(f"{path} cannot be read as a picture ({problem}).") from None


def _open_sound(path: Path, rate: int) -> NDArray[np.float32]:
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    try:
        own, sound = wavfile.read(path)
    except (OSError, ValueError) as problem:
        raise ArgumentError(f"{path} cannot be read as a WAV file ({problem}).") from None
    if sound.dtype == np.uint8:
        sound = (sound.astype(np.float64) - 128) / 128
    elif sound.dtype.kind == "i":
        sound = sound / (np.iinfo(sound.dtype).max + 1.0)
    sound = sound.mean(1) if sound.ndim == 2 else sound
    common = math.gcd(own, rate)
    resampled: NDArray[np.float32] = resample_poly(sound, rate // common, own // common).astype(np.float32)
    return resampled
