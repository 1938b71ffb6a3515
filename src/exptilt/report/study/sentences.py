"""Plain sentences about a study, computed from its numbers, each no stronger than its numbers.

A difference counts as one when it is larger than two standard errors; where there is no error, only the order
is told. Nothing is called good or bad, and no cause is named: a head that puts much weight on the first key
is said to do that.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exptilt.lens import Study
from exptilt.lens.studying.results import HeadDetail, HeadMeasure, LayerMeasure
from exptilt.report.tokens import visible

Place = tuple[int, int]
# Said of the head with the highest value, where there is a plainer way to say it than by the title.
PLAIN = {
    "first_token_mass": "{head} puts {percent} of its attention on the first token, the most of all heads.",
    "effective_keys": "{head} spreads its attention widest, over {value} keys in effect.",
    "score_max": "{head} reaches the largest score, {value}.",
}


def place_of(index: int | np.intp, values: NDArray[Any]) -> Place:
    """Layer and head of a flat index."""
    layer, head = np.unravel_index(int(index), values.shape)
    return int(layer), int(head)


def number(value: float, unit: str = "") -> str:
    """A number with three significant digits, a true minus sign and its unit.

    Example:
        >>> number(-0.12345), number(1234.5, "nats"), number(0.0)
        ('−0.123', '1234 nats', '0')
    """
    if math.isnan(value):
        return "not known"
    text = f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.3g}"
    return text.replace("-", "−") + (f" {unit}" if unit else "")


def percent(value: float) -> str:
    """A share as a percentage, without more digits than it needs.

    Example:
        >>> percent(0.634), percent(0.004), percent(0.9986), percent(1.0)
        ('63 %', '0.4 %', '99.9 %', '100 %')
    """
    if value < 0.0995:
        return f"{100 * value:.2g} %" if value >= 1e-5 else "0 %" if value == 0 else "under 0.001 %"
    return f"{100 * value:.0f} %" if value <= 0.99 or value == 1 else f"{min(99.9, 100 * value):.1f} %"


def with_error(value: float, error: float, unit: str = "") -> str:
    """A value with its standard error, to as many digits as the error gives meaning to; no error shows none.

    Example:
        >>> with_error(1.97634, 0.0397, "nats"), with_error(0.5, float("nan")), with_error(1534.2, 20.1)
        ('1.976 ± 0.040 nats', '0.5', '1534 ± 20')
    """
    known = math.isfinite(value) and math.isfinite(error)
    if not known or not 1e-5 <= error < 1e5 or abs(value) >= 1e5:
        return number(value, unit)
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}".replace("-", "−") + (f" {unit}" if unit else "")


def head_name(place: Place) -> str:
    """Name of a head in a sentence."""
    return f"layer {place[0]} head {place[1]}"


def known_mean(values: NDArray[np.float64]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def summary(measure: HeadMeasure) -> tuple[Place, Place, float] | None:
    """Places of the lowest and the highest known value, and the median; None if no value is known."""
    if measure.value is None or not np.isfinite(measure.value).any():
        return None
    known = np.where(np.isfinite(measure.value), measure.value, np.nan)
    low, high = (place_of(find(known), known) for find in (np.nanargmin, np.nanargmax))
    return low, high, float(np.nanmedian(known))


def told(measure: HeadMeasure, place: Place) -> str:
    """The value of one head, with its error and unit."""
    assert measure.value is not None
    error = math.nan if measure.error is None else float(measure.error[place])
    return with_error(float(measure.value[place]), error, measure.unit)


def of_measure(study: Study, name: str) -> str:
    """Sentences on one statistic over all heads."""
    measure = study.heads[name]
    value, error, found = measure.value, measure.error, summary(measure)
    if value is None:
        return f"Not measured: {measure.reason}"
    if found is None:
        return "No head has a value."
    low, high, middle = found
    if value[high] > value[low]:
        top = float(value[high])
        first = f"{head_name(high)} has the highest: {told(measure, high)}."
        if name in PLAIN:
            first = PLAIN[name].format(head=head_name(high), percent=percent(top), value=number(top))
        rest = f"The lowest is {told(measure, low)} in {head_name(low)}; half of the heads lie above"
        parts = [first[0].upper() + first[1:], f"{rest} {number(middle, measure.unit)}."]
    else:
        parts = [f"The same in every head: {number(middle, measure.unit)}."]
    missing = int((~np.isfinite(value)).sum())
    if missing:
        parts.append(f"{missing} of {value.size} heads have no value.")
    if measure.baseline is not None:
        slack = 0.0 if error is None else 2 * np.where(np.isfinite(error), error, np.inf)
        margin = "" if error is None else " by more than two standard errors"
        gap = value - measure.baseline
        above, below, known = (int(x.sum()) for x in (gap > slack, gap < -slack, np.isfinite(gap)))
        parts.append(f"Against the baseline{margin}: {above} of {known} heads above, {below} below.")
    return " ".join(parts)


def of_head(study: Study, detail: HeadDetail) -> str:
    """Sentences on what stands out in one head."""
    place = (detail.layer, detail.head)

    def value(name: str) -> float:
        measure = study.heads.get(name)
        return math.nan if measure is None or measure.value is None else float(measure.value[place])

    parts, tops, bottoms = [], [], []
    first, spread = value("first_token_mass"), value("effective_keys")
    if spread < 1.05:
        parts.append("Looks at a single key in effect.")
    elif not math.isnan(spread):
        parts.append(f"Looks at {number(spread)} keys in effect.")
    if first >= 0.2:
        parts.append(f"Puts {percent(first)} of its attention on the first token.")
    if detail.top_tokens and math.isfinite(detail.top_tokens[0].lift):
        best = detail.top_tokens[0]
        times = f"gets {number(best.lift)} times its share under uniform attention."
        parts.append(f"The token “{visible(best.token)}” {times}")
    for measure in study.heads.values():
        found = summary(measure)
        if found is not None and found[0] != found[1]:
            tops += [measure.title] if found[1] == place else []
            bottoms += [measure.title] if found[0] == place else []
    parts += [
        f"{end} of all heads in {_listed(titles)}."
        for end, titles in (("Highest", tops), ("Lowest", bottoms))
        if titles
    ]
    return " ".join(parts)


def _listed(words: list[str]) -> str:
    shown = [f"“{word}”" for word in words[:3]] + ([f"{len(words) - 3} more"] if len(words) > 3 else [])
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


def of_layers(measure: LayerMeasure) -> str:
    """A sentence on one statistic along the depth."""
    if measure.value is None:
        return f"Not measured: {measure.reason}"
    value = np.asarray(measure.value)
    if value.ndim == 2:
        return (
            "One line for each place along the depth. "
            "Each line shows the components of that place, the largest first."
        )
    known = np.flatnonzero(np.isfinite(value))
    if not len(known):
        return "No place has a value."
    ends = known[0], known[-1], known[value[known].argmax()], known[value[known].argmin()]
    first, last, high, low = (float(value[k]) for k in ends)
    places = [measure.places[k] for k in ends]
    if high == low:
        return f"The same at every place: {number(high, measure.unit)}."
    steps = np.diff(value[known])
    way, more = "Goes", f"; highest {number(high)} at {places[2]}, lowest {number(low)} at {places[3]}"
    if (steps > 0).all() or (steps < 0).all():
        way, more = ("Rises" if steps[0] > 0 else "Falls") + " at every step", ""
    return f"{way} from {number(first)} ({places[0]}) to {number(last, measure.unit)} ({places[1]}){more}."


def of_loss(study: Study) -> str:
    """A sentence on how the loss moved over the checkpoints; "" if it was not measured."""
    if study.training is None or not np.isfinite(study.training.loss).any():
        return ""
    loss, steps = study.training.loss, study.training.steps
    best = int(np.nanargmin(loss))
    start, end = number(float(loss[0])), number(float(loss[-1]), "nats a token")
    text = f"Loss on these texts: {start} at step {int(steps[0])}, {end} at step {int(steps[-1])}"
    lowest = (
        f"; lowest {number(float(loss[best]))} at step {int(steps[best])}" if best < len(loss) - 1 else ""
    )
    return text + lowest + "."
