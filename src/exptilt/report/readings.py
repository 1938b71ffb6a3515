"""What the numbers say, in plain sentences: computed from the study, each no stronger than its numbers.

A difference counts as one when it is larger than two standard errors; where there is no error, only the order is told. Nothing is called
good or bad, and no cause is named: a head that puts much weight on the first key is said to do that.
"""

import math

import numpy as np

from exptilt.lens.studying.results import Array, HeadDetail, HeadMeasure, LayerMeasure, Study
from exptilt.report.tokens import visible

# Said of the head with the highest value, where there is a plainer way to say it than by the title.
PLAIN = {
    "first_key_mass": "{head} puts {percent} of its attention on the first key, the most of all heads.",
    "effective_keys": "{head} spreads its attention widest, over {value} keys in effect.",
    "score_max": "{head} reaches the largest score, {value}.",
}


def shape(study: Study) -> tuple[int, int]:
    """Layers and heads, as the measures have them.

    Args:
        study: the numbers.
    """
    for measure in study.heads.values():
        if measure.value is not None:
            return measure.value.shape[0], measure.value.shape[1]
    return 0, 0


def number(value: float, unit: str = "") -> str:
    """Three significant digits, a true minus sign, the unit.

    Args:
        value: any real number.
        unit: what it is counted in.

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

    Args:
        value: between 0 and 1.

    Example:
        >>> percent(0.634), percent(0.004), percent(0.9986), percent(1.0)
        ('63 %', '0.4 %', '99.9 %', '100 %')
    """
    if value < 0.0995:
        return f"{100 * value:.2g} %" if value >= 1e-5 else "0 %" if value == 0 else "under 0.001 %"
    return f"{100 * value:.0f} %" if value <= 0.99 or value == 1 else f"{min(99.9, 100 * value):.1f} %"


def head_name(layer: int, head: int) -> str:
    """How a head is called in a sentence.

    Args:
        layer: from 0.
        head: from 0.
    """
    return f"layer {layer} head {head}"


def extremes(value: Array) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where the lowest and the highest known value stand, or None if there is none.

    Args:
        value: ``(layer, head)``.
    """
    if not np.isfinite(value).any():
        return None
    finite = np.where(np.isfinite(value), value, np.nan)
    low, high = (np.unravel_index(int(find(finite)), value.shape) for find in (np.nanargmin, np.nanargmax))
    return (int(low[0]), int(low[1])), (int(high[0]), int(high[1]))


def of_measure(study: Study, name: str) -> str:
    """One statistic over all heads.

    Args:
        study: the numbers.
        name: of a head measure.
    """
    measure = study.heads[name]
    if measure.value is None:
        return f"Not measured: {measure.reason}"
    ends = extremes(measure.value)
    if ends is None:
        return "No head has a value."
    low, high = ends
    middle = float(np.nanmedian(np.where(np.isfinite(measure.value), measure.value, np.nan)))
    if measure.value[high] > measure.value[low]:
        top = float(measure.value[high])
        first = f"{head_name(*high)} has the highest: {_with_error(measure, high)}."
        if name in PLAIN:
            first = PLAIN[name].format(head=head_name(*high), percent=percent(top), value=number(top))
        rest = f"The lowest is {_with_error(measure, low)} in {head_name(*low)}; half of the heads lie above {number(middle, measure.unit)}."
        parts = [first[0].upper() + first[1:], rest]
    else:
        parts = [f"The same in every head: {number(middle, measure.unit)}."]
    missing = int((~np.isfinite(measure.value)).sum())
    if missing:
        parts.append(f"{missing} of {measure.value.size} heads have no value.")
    against = _against_baseline(measure)
    if against:
        parts.append(against)
    return " ".join(parts)


def _with_error(measure: HeadMeasure, place: tuple[int, int]) -> str:
    if measure.value is None:
        return "not known"
    error = math.nan if measure.error is None else float(measure.error[place])
    return with_error(float(measure.value[place]), error, measure.unit)


def with_error(value: float, error: float, unit: str = "") -> str:
    """A value with its standard error, to as many digits as the error gives meaning to.

    Args:
        value: any real number.
        error: its standard error; NaN or 0 shows none.
        unit: what it is counted in.

    Example:
        >>> with_error(1.97634, 0.0397, "nats"), with_error(0.5, float("nan")), with_error(1534.2, 20.1)
        ('1.976 ± 0.040 nats', '0.5', '1534 ± 20')
    """
    if (
        not (math.isfinite(value) and math.isfinite(error) and error > 0)
        or max(abs(value), error) >= 1e5
        or error < 1e-5
    ):
        return number(value, unit)
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}".replace("-", "−") + (f" {unit}" if unit else "")


def _against_baseline(measure: HeadMeasure) -> str:
    """How many heads differ from the baseline by more than two standard errors; "" without one."""
    if measure.value is None or measure.baseline is None:
        return ""
    error = (
        np.zeros_like(measure.value)
        if measure.error is None
        else np.where(np.isfinite(measure.error), measure.error, np.inf)
    )
    gap = measure.value - measure.baseline
    above, below, known = (
        int((gap > 2 * error).sum()),
        int((gap < -2 * error).sum()),
        int(np.isfinite(gap).sum()),
    )
    margin = "" if measure.error is None else " by more than two standard errors"
    return f"Against the baseline{margin}: {above} of {known} heads above, {below} below."


def of_head(study: Study, detail: HeadDetail) -> str:
    """What stands out in one head.

    Args:
        study: the numbers.
        detail: the head.
    """
    place, parts = (detail.layer, detail.head), []
    tops: list[str] = []
    bottoms: list[str] = []
    for measure in study.heads.values():
        ends = None if measure.value is None else extremes(measure.value)
        if ends is None or ends[0] == ends[1]:
            continue
        if ends[1] == place:
            tops.append(measure.title)
        elif ends[0] == place:
            bottoms.append(measure.title)
    first, spread = _value(study, "first_key_mass", place), _value(study, "effective_keys", place)
    if not math.isnan(spread):
        parts.append(
            "Looks at a single key in effect."
            if spread < 1.05
            else f"Looks at {number(spread)} keys in effect."
        )
    if first >= 0.2:
        parts.append(f"Puts {percent(first)} of its attention on the first key.")
    if detail.top_tokens and math.isfinite(detail.top_tokens[0].lift):
        best = detail.top_tokens[0]
        parts.append(
            f"The token “{visible(best.token)}” draws {number(best.lift)} times what even attention would give it."
        )
    if tops:
        parts.append(f"Highest of all heads in {_listed(tops)}.")
    if bottoms:
        parts.append(f"Lowest of all heads in {_listed(bottoms)}.")
    return " ".join(parts)


def _value(study: Study, name: str, place: tuple[int, int]) -> float:
    measure = study.heads.get(name)
    return math.nan if measure is None or measure.value is None else float(measure.value[place])


def _listed(words: list[str]) -> str:
    shown = [f"“{word}”" for word in words[:3]] + ([f"{len(words) - 3} more"] if len(words) > 3 else [])
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


def of_layers(measure: LayerMeasure) -> str:
    """One statistic along the depth.

    Args:
        measure: the statistic.
    """
    if measure.value is None:
        return f"Not measured: {measure.reason}"
    value = np.asarray(measure.value)
    if value.ndim == 2:
        return "One line a place, from the first to the last along the depth; each falls from its largest component to its smallest."
    known = np.flatnonzero(np.isfinite(value))
    if not len(known):
        return "No place has a value."
    first, last = int(known[0]), int(known[-1])
    low, high = int(known[value[known].argmin()]), int(known[value[known].argmax()])
    if value[high] == value[low]:
        return f"The same at every place: {number(float(value[high]), measure.unit)}."
    steps = np.diff(value[known])
    way = (
        "Rises at every step" if (steps > 0).all() else "Falls at every step" if (steps < 0).all() else "Goes"
    )
    start, end = number(float(value[first])), number(float(value[last]), measure.unit)
    text = f"{way} from {start} ({measure.places[first]}) to {end} ({measure.places[last]})"
    if way == "Goes":
        text += f"; highest {number(float(value[high]))} at {measure.places[high]}, lowest {number(float(value[low]))} at {measure.places[low]}"
    return text + "."


def of_training(study: Study, name: str) -> str:
    """How the mean of one statistic over heads moved over the checkpoints; "" if it was not followed.

    Args:
        study: the numbers.
        name: of a head measure.
    """
    if study.training is None or name not in study.training.heads or name not in study.heads:
        return ""
    measure, steps = study.heads[name], study.training.steps
    mean = np.array(
        [
            float(np.mean(row[np.isfinite(row)])) if np.isfinite(row).any() else math.nan
            for row in study.training.heads[name]
        ]
    )
    if len(mean) < 2 or not np.isfinite(mean).any():
        return ""
    changes = np.abs(np.diff(mean))
    start, end = number(float(mean[0])), number(float(mean[-1]), measure.unit)
    text = f"Mean over heads: {start} at step {int(steps[0])}, {end} at step {int(steps[-1])}"
    if np.isfinite(changes).any() and np.nanmax(changes) > 0:
        most = int(np.nanargmax(changes))
        text += f"; it moves most between steps {int(steps[most])} and {int(steps[most + 1])}"
    return text + "."


def of_loss(study: Study) -> str:
    """How the loss fell; "" where it was not measured.

    Args:
        study: the numbers.
    """
    if study.training is None or not np.isfinite(study.training.loss).any():
        return ""
    loss, steps = study.training.loss, study.training.steps
    best = int(np.nanargmin(loss))
    start, end = number(float(loss[0])), number(float(loss[-1]), "nats a token")
    text = f"Loss on these texts: {start} at step {int(steps[0])}, {end} at step {int(steps[-1])}"
    return text + (
        f"; lowest {number(float(loss[best]))} at step {int(steps[best])}." if best < len(loss) - 1 else "."
    )
