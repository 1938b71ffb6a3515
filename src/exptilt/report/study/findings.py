r"""Three to six findings about one model, by stated rules, in a stated order.

Where another study is given, first the head that differs most from it. Then the kinds of heads that everybody
looks for, in the order of `KINDS`: how many heads are of the kind, and its clearest example. Then heads and
changes that are far from the others, by how many robust standard deviations they are away from the middle,

    z = |x − median| / (1.4826 · median |x − median|),

the farthest first. They count only beyond `FAR`, if the difference from the middle is more than two standard
errors, and if it is large enough to matter (`TIMES` the median head): in a model of random weights heads are
alike, and the farthest of them is far from the rest by almost nothing.

    peak        the head with the largest score
    focus       the head that looks at the fewest keys in effect
    collapse    the largest fall of a head's entropy from one checkpoint to the next
    growth      the largest score of any head, if it grew by over 5 % to the last checkpoint

If these are fewer than `LEAST`, last what holds of all heads together: how many write next to nothing, how
many look evenly. Of one head that is far out at most two findings are told.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exptilt.lens import Study
from exptilt.lens.studying.compare import most_different
from exptilt.report.study.comparison import page_part
from exptilt.report.study.sentences import (
    Place,
    head_name,
    number,
    percent,
    place_of,
    summary,
    told,
    with_error,
)
from exptilt.report.tokens import visible

FAR = 3.5
TIMES = 1.5  # the least factor between a head that is told of and the median head
MOST, LEAST = 6, 3
ALIKE = 1e-3  # nats: heads that diverge by less look at the same tokens
GROWTH, CLIP = 0.05, 100.0  # MuonClip clips at 100
# The kinds that are told of, the most telling first, with a title.
KINDS = {
    "induction": "Induction heads",
    "first token": "Attention sinks",
    "previous token": "Previous-token heads",
    "delimiter": "Delimiter heads",
    "duplicate": "Duplicate-token heads",
    "next token": "Next-token heads",
    "local": "Local heads",
}
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """One thing that stands out.

    Attributes:
        text: a sentence with its number and error.
        z: how far out it is, in robust standard deviations; 0 if the finding is about all heads.
        place: layer and head to open, or None.
        measure: the statistic to show with it.
        title: in two or three words.
        rank: findings of a lower one come first.
    """

    text: str
    z: float
    place: Place | None
    measure: str
    title: str = ""
    rank: int = len(KINDS)

    @property
    def anchor(self) -> str:
        """Anchor of the place where the page shows this finding."""
        return "heads" if self.place is None else f"L{self.place[0]}H{self.place[1]}:{self.measure}"


def findings(study: Study, against: Study | None = None) -> list[Finding]:
    """The findings about this model, most telling first; before them how it differs from another study."""
    first = [] if against is None else [_against(study, against)]
    every = sorted((f for rule in RULES for f in rule(study)), key=lambda f: (f.rank, -f.z))
    kept: list[Finding] = []
    for finding in every:
        told_of = sum(finding.place == f.place and f.rank == finding.rank for f in kept)
        if finding.place is None or told_of < 2:
            kept.append(finding)
    kinds = [f for f in kept if f.rank < len(KINDS)]
    far = [f for f in kept if f.z > 0 and f.rank == len(KINDS)]
    some = kinds[: MOST - min(2, len(far))] + far  # the two farthest heads always have a place
    rest = [f for f in kept if f.z == 0]
    if not some and study.details:
        rest.insert(0, Finding("No head stands out from the others.", 0.0, None, "", "No outliers"))
    return [*first, *some, *rest[: max(0, LEAST - len(some))]][:MOST]


def _against(study: Study, other: Study) -> Finding:
    """The head that differs most from the other study's, by its divergence where it was measured."""
    title, apart = f"Against {other.name}", study.heads.get("divergence")
    found = None if apart is None else summary(apart)
    if apart is None or apart.value is None or found is None:
        part = page_part(study, other)
        if not part.findings:
            same = study.shape == other.shape
            text = "No head differs by more than two standard errors." if same else part.lead
            return Finding(text[0].upper() + text[1:], 0.0, None, "", title)
        name, layer, head = most_different(study, other, 1)[0]
        return Finding(part.findings[0][0], FAR, (layer, head), name, title)
    place, middle = found[1], number(found[2], apart.unit)
    if apart.value[place] < ALIKE:
        text = f"All heads look at the same tokens: the divergence is at most {told(apart, place)}."
        return Finding(text, 0.0, None, "", title)
    text = f"{_capital(place)} looks at other tokens most: its divergence from the same head of {other.name} "
    text += f"is {told(apart, place)}, the median head's {middle}."
    return Finding(text, FAR, place, "divergence", title)


def _z(values: Array, x: float) -> float:
    """Robust standard deviations of x from the median; 0 if half of the values are equal, or fewer than 3."""
    known = values[np.isfinite(values)]
    if known.size < 3 or not math.isfinite(x):
        return 0.0
    middle = float(np.median(known))
    width = 1.4826 * float(np.median(np.abs(known - middle)))
    return abs(x - middle) / width if width > 0 else 0.0


def _outlier(study: Study, name: str, lowest: bool) -> tuple[Place, float, float, float] | None:
    """Place, z and value of the extreme head, and the median over heads; None unless it is surely far out."""
    measure = study.heads.get(name)
    found = None if measure is None else summary(measure)
    if measure is None or measure.value is None or found is None:
        return None
    place, middle = found[0] if lowest else found[1], found[2]
    x = float(measure.value[place])
    # Positive quantities that span factors are compared by their logarithms.
    values = measure.value
    known = values[np.isfinite(values)]
    positive = bool((known > 0).all())
    z = _z(np.log(values), math.log(x)) if positive else _z(values, x)
    error = 0.0 if measure.error is None else float(np.nan_to_num(measure.error[place]))
    factor = max(x / middle, middle / x) if x * middle > 0 else math.inf
    sure = z > FAR and abs(x - middle) > 2 * error and factor >= TIMES
    return (place, z, x, middle) if sure else None


def _peak(study: Study) -> Iterator[Finding]:
    if (found := _outlier(study, "score_max", lowest=False)) is not None:
        place, z, largest, middle = found
        text = f"{_capital(place)} has scores up to {told(study.heads['score_max'], place)}, "
        text += f"{number(largest / middle)} times the median head's{_favourite(study, place)}"
        yield Finding(text + ".", z, place, "score_max", "Largest scores")


def _focus(study: Study) -> Iterator[Finding]:
    if "effective_keys" not in study.heads:
        return
    if (found := _outlier(study, "entropy", lowest=True)) is not None:
        place, z, *_ = found
        keys = study.heads["effective_keys"].value
        if keys is not None:
            some = float(keys[place])
            many = "a single key" if some < 1.05 else f"{number(some)} keys"
            middle = number(float(np.nanmedian(keys)))
            entropy = told(study.heads["entropy"], place)
            text = f"{_capital(place)} looks at {many} in effect (entropy {entropy}), "
            text += f"the median head at {middle}."
            if many == "a single key" or TIMES * some < float(np.nanmedian(keys)):
                yield Finding(text, z, place, "entropy", "Sharpest head")


def _kinds(study: Study) -> Iterator[Finding]:
    shown: set[Place] = set()  # each kind has an example of its own, if it can
    for rank, (name, title) in enumerate(KINDS.items()):
        kind = study.kinds.get(name)
        if kind is None or not kind.members.any():
            continue
        count, total = int(kind.members.sum()), int(np.isfinite(kind.value).sum())
        order = np.argsort(np.where(kind.members, -kind.value, np.inf), axis=None, kind="stable")[:count]
        places = [place_of(index, kind.value) for index in order]
        place = next((x for x in places if x not in shown), places[0])
        shown.add(place)
        share = float(kind.value[place])
        error = math.nan if kind.error is None else float(kind.error[place])
        most = with_error(share, error, study.heads[kind.measure].unit)
        if kind.measure.endswith(("mass", "share")):
            most = with_error(100 * share, 100 * error, "%")
            most += " of what it gives to both" if kind.measure.endswith("share") else ""
        verb, _, what = kind.about.partition(" ")
        heads = f"{count} of {total} heads {verb.removesuffix('s') if count > 1 else verb}"
        which = "such as " if place != places[0] else "most of all " if count > 1 else ""
        text = f"{heads} {what}, {which}{head_name(place)}: {most}"
        text += f"{_favourite(study, place) if name == 'delimiter' else ''}."
        yield Finding(text, max(_z(kind.value, share), 1e-3), place, kind.measure, title, rank)


def _favourite(study: Study, place: Place) -> str:
    """The token that a head favours, as the end of a sentence; empty if none stands out."""
    detail = next((d for d in study.details if (d.layer, d.head) == place), None)
    if detail is None or not detail.top_tokens or not detail.top_tokens[0].lift > 2:
        return ""
    best = detail.top_tokens[0]
    return f"; “{visible(best.token)}” gets {number(best.lift)} times its share under uniform attention"


def _collapse(study: Study) -> Iterator[Finding]:
    training = study.training
    if training is None or "entropy" not in training.heads or len(training.steps) < 2:
        return
    curve = training.heads["entropy"]
    falls = -np.diff(curve, axis=0)
    if not np.isfinite(falls).any():
        return
    step, layer, head = np.unravel_index(int(np.nanargmax(falls)), falls.shape)
    fall = float(falls[step, layer, head])
    z = _z(falls.ravel(), fall)
    if fall > 0 and z > FAR:
        before, after = (float(curve[step + k, layer, head]) for k in (0, 1))
        place = (int(layer), int(head))
        steps = f"{int(training.steps[step])} and {int(training.steps[step + 1])}"
        text = f"The entropy of {head_name(place)} fell from {number(before)} to {number(after, 'nats')} "
        text += f"between step {steps} (standard error not estimated at checkpoints)."
        yield Finding(text, z, place, "entropy", "Collapsed in training")


def _growth(study: Study) -> Iterator[Finding]:
    training = study.training
    if training is None or "score_max" not in training.heads or len(training.steps) < 3:
        return
    tops = np.array([np.nanmax(x) if np.isfinite(x).any() else np.nan for x in training.heads["score_max"]])
    if not (np.isfinite(tops).all() and (tops > 0).all()):
        return
    rise = float(tops[-1] / tops[-2] - 1)
    if rise > GROWTH:
        last = training.heads["score_max"][-1]
        place = place_of(np.nanargmax(last), last)
        steps = f"{int(training.steps[-2])} and {int(training.steps[-1])}"
        text = f"The largest score of all heads grew by {percent(rise)} between step {steps}, to "
        advice = ": clip it (xt.lens.clip_qk_)" if tops[-1] > CLIP else ""
        text += f"{number(float(tops[-1]))} in {head_name(place)}{advice}."
        yield Finding(text, 1e-3 + _z(last, float(tops[-1])), place, "score_max", "Growing scores")


def _dead(study: Study) -> Iterator[Finding]:
    kind = study.kinds.get("dead")
    if kind is None:
        return
    count, total = int(kind.members.sum()), int(np.isfinite(kind.value).sum())
    place = place_of(np.nanargmin(kind.value), kind.value)
    least = f"{head_name(place)} writes least, {percent(float(kind.value[place]))} of a token's state"
    dead = "is dead" if count == 1 else "are dead"
    text = f"No head is dead: {least}." if not count else f"{count} of {total} heads {dead}: {least}."
    # A few dead heads are news; where nearly all are, the model is not trained, and that is said last.
    z = 1.0 if 0 < count <= total / 2 else 0.0
    yield Finding(text, z, None, "", "Dead heads" if count else "All heads write")


def _even(study: Study) -> Iterator[Finding]:
    kind, keys = study.kinds.get("diffuse"), study.heads.get("effective_keys")
    if kind is None or keys is None or keys.value is None:
        return
    count, total = int(kind.members.sum()), int(np.isfinite(kind.value).sum())
    heads = f"{count} of {total} heads look" if count else "No head looks"
    text = f"{heads} almost evenly at all keys in sight"
    middle = number(float(np.nanmedian(keys.value)))
    yield Finding(f"{text}; the median head looks at {middle} keys in effect.", 0.0, None, "", "Spread")


def _capital(place: Place) -> str:
    name = head_name(place)
    return name[0].upper() + name[1:]


RULES = (_peak, _focus, _kinds, _collapse, _growth, _dead, _even)


def cautions(study: Study) -> list[str]:
    """Warnings about the input: too little text, or text that the tokenizer does not know."""
    found = []
    tokens, unknown = study.text_facts.get("tokens"), study.text_facts.get("unknown tokens")
    if isinstance(tokens, int) and tokens < FEW_TOKENS:
        found.append(
            f"Only {tokens} tokens were read. So short a text says little about the model; pass at least "
            f"{FEW_TOKENS} tokens."
        )
    if isinstance(tokens, int) and isinstance(unknown, int) and unknown > UNKNOWN * tokens:
        found.append(
            f"{percent(unknown / tokens)} of the tokens are unknown to the tokenizer: the text is not in a "
            "language or an alphabet that this model reads, or the tokenizer is another model's."
        )
    return found


FEW_TOKENS = 200
UNKNOWN = 0.05
