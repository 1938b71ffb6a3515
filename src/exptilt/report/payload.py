"""What the page's scripts draw from: a study as compact JSON that stands inside an HTML page.

Numbers keep five significant digits (the exact ones are in `study.json`). The attention strips of all heads would be the bulk: each weight
p becomes one byte b with p ≈ (b/255)², which is right to 0.004 at worst and keeps weights down to 4·10⁻⁶ apart from zero, and a model of
many heads shows fewer tokens, so that all strips together stay below `STRIP_BYTES`.
"""

import base64
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exptilt.lens.studying.results import HeadDetail, HeadMeasure, LayerMeasure, Study
from exptilt.report import readings
from exptilt.report.tokens import visible

STRIP_BYTES = 3_000_000
TOP_TOKENS = 12


def payload(study: Study) -> dict[str, Any]:
    """Everything the scripts need, as what JSON knows.

    Args:
        study: the numbers.
    """
    size = strip_size(study)
    return {
        "shape": readings.shape(study),
        "names": list(study.layer_names),
        "measures": [_measure(study, name, measure) for name, measure in study.heads.items()],
        "curves": [_curve(name, measure) for name, measure in study.layers.items()],
        "details": {
            f"L{detail.layer}H{detail.head}": _detail(study, detail, size) for detail in study.details
        },
        "strip": [visible(token) for token in study.strip_tokens[:size]],
        "training": None if study.training is None else _training(study),
    }


def strip_size(study: Study) -> int:
    """How many tokens of the strip the page shows, so that the strips of all heads fit.

    Args:
        study: the numbers.
    """
    return min(len(study.strip_tokens), math.isqrt(STRIP_BYTES // max(1, len(study.details))))


def for_script(data: Any) -> str:
    r"""JSON that may stand inside ``<script type="application/json">``: nothing in it can end the element.

    Args:
        data: what JSON knows.

    Example:
        >>> for_script(["</script>"])
        '["\\u003c/script\\u003e"]'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def numbers(array: Any) -> Any:
    """An array as nested lists of short numbers; what is not finite becomes null.

    Args:
        array: a numpy array of any shape, or None.
    """
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        return numbers(array.tolist())
    if isinstance(array, list):
        return [numbers(item) for item in array]
    return float(f"{array:.5g}") if math.isfinite(array) else None


def _measure(study: Study, name: str, measure: HeadMeasure) -> dict[str, Any]:
    over = None if study.training is None else study.training.heads.get(name)
    return {
        "id": name,
        "title": measure.title,
        "unit": measure.unit,
        "about": measure.about,
        "assumes": measure.assumes,
        "reason": measure.reason,
        "reading": readings.of_measure(study, name),
        "value": numbers(measure.value),
        "error": numbers(measure.error),
        "baseline": numbers(measure.baseline),
        "training": numbers(over),
        "span": [end if end is not None and math.isfinite(end) else None for end in measure.span],
    }


def _curve(name: str, measure: LayerMeasure) -> dict[str, Any]:
    return {
        "id": name,
        "title": measure.title,
        "unit": measure.unit,
        "places": list(measure.places),
        "value": numbers(measure.value),
        "error": numbers(measure.error),
    }


def _detail(study: Study, detail: HeadDetail, size: int) -> dict[str, Any]:
    return {
        "histograms": {
            name: {"edges": numbers(h.edges), "counts": numbers(h.counts)}
            for name, h in detail.histograms.items()
        },
        "tokens": [
            [visible(item.token), numbers(item.mass), item.count, numbers(item.lift)]
            for item in detail.top_tokens[:TOP_TOKENS]
        ],
        "strip": pack(np.asarray(detail.strip)[:size, :size]),
        "reading": readings.of_head(study, detail),
    }


def pack(strip: NDArray[np.float64]) -> str:
    """Attention weights as bytes of their square roots, in base64.

    Args:
        strip: ``(query, key)``, weights between 0 and 1.
    """
    roots = np.sqrt(np.clip(np.nan_to_num(strip), 0.0, 1.0))
    return base64.b64encode(np.rint(255 * roots).astype(np.uint8).tobytes()).decode()


def _training(study: Study) -> dict[str, Any]:
    training = study.training
    if training is None:
        raise ValueError("this study has no training")
    return {
        "steps": [int(step) for step in training.steps],
        "loss": numbers(training.loss),
        "layers": {name: numbers(value) for name, value in training.layers.items() if name in study.layers},
    }
