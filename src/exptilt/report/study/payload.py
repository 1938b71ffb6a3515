"""A study as plain values for JSON, from which the scripts of the page draw.

Numbers keep five significant digits (the exact ones are in `study.json`). The attention strips of all heads
would be the bulk: each weight p becomes one byte b with p ≈ (b/255)², which is right to 0.004 at worst and
keeps weights down to 4·10⁻⁶ apart from zero, and a model of many heads shows fewer tokens, so that all strips
together stay below `STRIP_BYTES`.
"""

import base64
import math
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exptilt.lens import Picture, Study
from exptilt.lens.studying.results import HeadDetail, HeadMeasure, Histogram, LayerMeasure, Training
from exptilt.report.study import sentences
from exptilt.report.study.findings import findings as stands_out
from exptilt.report.tokens import visible

STRIP_BYTES = 3_000_000
TOP_TOKENS = 12


def payload(study: Study, against: Study | None = None) -> dict[str, Any]:
    """All that the scripts need, as JSON values; `against` is a study to compare this one with."""
    size = strip_size(study)
    first = next((f.anchor for f in stands_out(study, against) if f.place is not None), "")
    if against is not None and study.shape != against.shape:
        against = None  # its heads cannot be compared
    return {
        "shape": study.shape,
        "first": first,
        "names": list(study.layer_names),
        "kinds": [
            {"id": name, "about": kind.about, "members": np.argwhere(kind.members).tolist()}
            for name, kind in study.kinds.items()
        ],
        "measures": [_measure(study, name) | _other(study, name, against) for name in study.heads],
        "against": None if against is None else against.name,
        "curves": [{"id": name, **_short(measure)} for name, measure in study.layers.items()],
        "details": {_place(detail): _detail(study, detail, size) for detail in study.details},
        "strip": [visible(token) for token in study.strip_tokens[:size]],
        "picture": None if study.picture is None else _picture(study.picture),
        "training": None if study.training is None else _training(study, study.training),
    }


def _training(study: Study, training: Training) -> dict[str, Any]:
    return {
        "steps": [int(step) for step in training.steps],
        "loss": _numbers(training.loss),
        "studied": len(training.steps) - training.ends_with_studied,
        "strips": None if training.strips is None else _strips(study, training.strips),
        "layers": {name: _numbers(x) for name, x in training.layers.items() if name in study.layers},
    }


def _place(detail: HeadDetail) -> str:
    return f"L{detail.layer}H{detail.head}"


def _strips(study: Study, strips: NDArray[np.float64]) -> dict[str, Any]:
    """The strips of every checkpoint, packed by head."""
    every = [{_place(d): _packed(strip[d.layer, d.head]) for d in study.details} for strip in strips]
    return {"size": strips.shape[-1], "at": every}


def _picture(picture: Picture) -> dict[str, Any]:
    """The picture that the strips are over: its grid, and its pixels as bytes in base64."""
    height, width, _ = picture.pixels.shape
    pixels = base64.b64encode(picture.pixels.astype(np.uint8).tobytes()).decode()
    grid = {"special": picture.special, "rows": picture.rows, "columns": picture.columns}
    return {"kind": picture.kind, "height": height, "width": width, "pixels": pixels, **grid}


def strip_size(study: Study) -> int:
    """Number of tokens of the strip that the page shows, so that all strips fit; a picture is shown whole."""
    if study.picture is not None:
        return len(study.strip_tokens)
    return min(len(study.strip_tokens), math.isqrt(STRIP_BYTES // max(1, len(study.details))))


def _numbers(values: Any) -> Any:
    """An array or a number as (lists of) short numbers, text unchanged; NaN and infinities become None."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [_numbers(item) for item in values]
    if values is None or isinstance(values, str):
        return values
    return float(f"{values:.5g}") if math.isfinite(values) else None


def _short(record: HeadMeasure | LayerMeasure | Histogram) -> dict[str, Any]:
    """All fields of a record by name, with short numbers."""
    return {item.name: _numbers(getattr(record, item.name)) for item in fields(record)}


def _measure(study: Study, name: str) -> dict[str, Any]:
    training = None if study.training is None else _numbers(study.training.heads.get(name))
    reading = sentences.of_measure(study, name)
    return {"id": name, **_short(study.heads[name]), "reading": reading, "training": training}


def _other(study: Study, name: str, against: Study | None) -> dict[str, Any]:
    """The same statistic of the other study, with its errors."""
    other = None if against is None else against.heads.get(name)
    if other is None or other.value is None or study.heads[name].value is None:
        return {}
    return {"other": _numbers(other.value), "otherError": _numbers(other.error)}


def _detail(study: Study, detail: HeadDetail, size: int) -> dict[str, Any]:
    return {
        "histograms": {name: _short(found) for name, found in detail.histograms.items()},
        "tokens": [
            [visible(item.token), _numbers(item.mass), item.count, _numbers(item.lift)]
            for item in detail.top_tokens[:TOP_TOKENS]
        ],
        "place": _place(detail),
        "strip": _packed(np.asarray(detail.strip)[:size, :size]),
        "reading": sentences.of_head(study, detail),
    }


def _packed(strip: NDArray[np.float64]) -> str:
    """Attention weights as bytes of their square roots, in base64."""
    roots = np.sqrt(np.clip(np.nan_to_num(strip), 0.0, 1.0))
    return base64.b64encode(np.rint(255 * roots).astype(np.uint8).tobytes()).decode()
