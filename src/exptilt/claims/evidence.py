r"""The numbers of a claim, and the verdict that follows from them.

A claim returns checks: numbers, each with the bound it must keep and the part it plays.

    claim       must pass for the statement to hold as this library states it
    guard       must pass for the experiment to mean something, such as that a number varies at all
    printed     tests the formula as a draft prints it, if that differs from ours
    reach       tests a broader version of the statement; if it fails, the claim is limited
    measured    answers an empirical question, which cannot be derived
    note        a number without a bound

A check passes if it passes for every seed. It is exact if its bound is rounding: 1e-6 at most. The first of
these rules that applies is the verdict:

    open                         a number that is needed is missing
    refuted                      a check of the claim or a guard fails, or of several measured none passes
    holds with a correction      the claim passes and the printed formula does not
    measured: partly             some measured checks pass and others do not
    holds within a stated scope  a broader version fails
    measured: holds              a check that passes is measured, or is not exact: true of these settings
    holds exactly                every check of the claim is an identity or an inequality, to rounding
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, get_args

import torch

from exptilt._support.intervals import mean_interval
from exptilt._support.plotting import html_table
from exptilt.lens.studying.results import plain

Role = Literal["claim", "guard", "printed", "reach", "measured", "note"]
Setting = int | float | str
ROUNDING = 1e-10  # of float64 sums of some dozens of terms
EXACT = 1e-6  # a larger bound is not rounding


class Verdict(Enum):
    """Verdict on a claim, from its numbers; the value is its text."""

    EXACT = "holds exactly"
    CORRECTED = "holds with a correction"
    SCOPED = "holds within a stated scope"
    MEASURED = "measured: holds"
    PARTLY = "measured: partly"
    REFUTED = "refuted"
    OPEN = "open"

    @property
    def holds(self) -> bool:
        """Whether the claim holds, possibly corrected or limited."""
        return self in (Verdict.EXACT, Verdict.CORRECTED, Verdict.SCOPED, Verdict.MEASURED)


class Check(NamedTuple):
    """A number, over seeds, and the bound that it must keep."""

    name: str
    values: tuple[float, ...]  # one a seed
    most: float = math.inf
    least: float = -math.inf
    role: Role = "claim"
    signed: bool = False  # whether the number can be negative; if not, its interval is cut at 0

    @property
    def exact(self) -> bool:
        """Whether the bound is rounding."""
        return all(abs(x) <= EXACT for x in (self.most, self.least) if not math.isinf(x))

    @property
    def passed(self) -> bool:
        """Whether every seed keeps the bound."""
        return all(self.least <= value <= self.most for value in self.values)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return sum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the mean over seeds; NaN for a single value."""
        _, *ends = mean_interval(torch.tensor(self.values, dtype=torch.float64))
        low, high = (float(end) for end in ends)
        return (low if self.signed or min(self.values) < 0 or low != low else max(low, 0.0)), high

    @property
    def bound(self) -> str:
        """The bound in words."""
        most, least = f"at most {self.most:.3g}", f"at least {self.least:.3g}"
        if math.isinf(self.most):
            return "" if math.isinf(self.least) else least
        return most if math.isinf(self.least) else f"{least}, {most}"

    @property
    def sentence(self) -> str:
        """The number and its bound in a sentence, the worst seed where there are several."""
        far = max(self.values, key=lambda x: max(x - self.most, self.least - x))
        differs = f"{far:.3g}" != f"{self.mean:.3g}"
        worst = f", {far:.3g} for the worst seed" if len(self.values) > 1 and differs else ""
        return f"“{self.name}” is {self.mean:.3g}{worst}, and should be {self.bound}"


def most(name: str, value: object, bound: float, role: Role = "claim", *, signed: bool = False) -> Check:
    """A check that passes up to a bound; a tensor counts by its largest entry, NaN being the largest."""
    return Check(name, (_number(value, largest=True),), most=bound, role=role, signed=signed)


def least(name: str, value: object, bound: float, role: Role = "claim", *, signed: bool = False) -> Check:
    """A check that passes from a bound up; a tensor counts by its smallest entry, NaN being the smallest."""
    return Check(name, (_number(value, largest=False),), least=bound, role=role, signed=signed)


def note(name: str, value: object, *, signed: bool = False) -> Check:
    """A number without a bound."""
    return Check(name, (_number(value, largest=True),), role="note", signed=signed)


def _number(value: Any, *, largest: bool) -> float:
    tensor = torch.as_tensor(value, dtype=torch.float64).detach()
    return float(tensor.amax() if largest else tensor.amin())


def same(
    name: str, found: torch.Tensor, wanted: torch.Tensor, bound: float = ROUNDING, role: Role = "claim"
) -> Check:
    """A check that two tensors are the same up to a bound on how far they are `off`."""
    return most(name, off(found, wanted), bound, role)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference between two tensors, relative to the larger of 1 and the largest wanted."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / max(1.0, float(wanted.abs().max())))


class Line(NamedTuple):
    """One line, cloud or row of bars of a picture; `x` may be names."""

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    kind: Literal["line", "points", "bars"] = "line"


def curve(label: str, x: Any, y: Any) -> Line:
    """A line through numbers, given as tensors, arrays or sequences."""
    places = x.tolist() if hasattr(x, "tolist") else list(x)
    return Line(label, places, [float(value) for value in y])


def dots(label: str, x: Any, y: Any) -> Line:
    """Points at numbers; arguments as for `curve`."""
    return curve(label, x, y)._replace(kind="points")


def bars(label: str, x: Any, y: Any) -> Line:
    """Bars of numbers; arguments as for `curve`."""
    return curve(label, x, y)._replace(kind="bars")


class Picture(NamedTuple):
    """A picture of the evidence, as numbers; the page that shows it draws it."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


def axes(title: str, x: str, y: str, *, log_x: bool = False, log_y: bool = False) -> Picture:
    """A picture without lines, which are added later."""
    return Picture(title, x, y, (), log_x, log_y)


Findings = Iterator[Check | Line | Picture]
"""The values that an experiment yields with one seed: checks, the lines of its picture, and the picture
without them.
"""


@dataclass(frozen=True)
class Evidence:
    """The numbers of a claim over seeds, and the picture of the first seed."""

    id: str
    checks: Sequence[Check]
    picture: Picture
    settings: Mapping[str, Setting]
    seeds: Sequence[int]
    missing: str = ""  # a library that is needed but not installed, with the command to install it
    seconds: float = field(default=0.0, compare=False)

    @property
    def verdict(self) -> Verdict:
        """The verdict, by the rules of this module."""
        return self._judged[0]

    @property
    def reason(self) -> str:
        """Which rule gave the verdict, and by which numbers."""
        return self._judged[1]

    @property
    def _judged(self) -> tuple[Verdict, str]:
        needed = [check for check in self.checks if check.role != "note"]
        if self.missing:
            return Verdict.OPEN, self.missing
        missing = [check.name for check in needed if any(map(math.isnan, check.values))]
        if missing or not needed:
            return Verdict.OPEN, f"There is no number for: {', '.join(missing) or 'anything'}."
        failed = {role: [c for c in needed if c.role == role and not c.passed] for role in get_args(Role)}
        measured = [check for check in needed if check.role == "measured"]
        if failed["claim"] or failed["guard"]:
            return Verdict.REFUTED, _said(failed["claim"] + failed["guard"])
        if measured and len(failed["measured"]) == len(measured):
            return Verdict.REFUTED, _said(measured)
        if failed["printed"]:
            return Verdict.CORRECTED, "The printed formula fails. " + _said(failed["printed"])
        if failed["measured"]:
            return Verdict.PARTLY, _said(failed["measured"])
        if failed["reach"]:
            return Verdict.SCOPED, "A broader version fails. " + _said(failed["reach"])
        if measured or not all(check.exact for check in needed if check.role == "claim"):
            return Verdict.MEASURED, "Every number keeps its bound with these settings, which is no proof."
        return Verdict.EXACT, "Every number is 0 to rounding, or keeps an inequality to rounding."

    def to_json(self) -> str:
        """The evidence as JSON text; NaN is null, ∞ is "inf"."""
        found = plain(self) | {"verdict": self.verdict.value, "reason": self.reason}
        for check, words in zip(self.checks, found["checks"], strict=True):
            words |= {"passed": check.passed, "exact": check.exact, "interval": plain(check.interval)}
        return json.dumps(found, ensure_ascii=False, allow_nan=False)

    def _repr_html_(self) -> str:
        rows = [
            (c.name, c.mean, c.bound, c.role, "" if c.role == "note" else "yes" if c.passed else "no")
            for c in self.checks
        ]
        said = f"{self.id}: {self.verdict.value} ({self.reason})"
        return html_table(("number", "mean", "bound", "part", "passes"), rows, said)


def _said(checks: Sequence[Check]) -> str:
    return ". ".join(check.sentence for check in checks) + "."


def joined(runs: Sequence[Evidence]) -> Evidence:
    """The evidence of several seeds as one, each check with a value a seed."""
    if any(run.missing for run in runs):
        return next(run for run in runs if run.missing)
    checks = tuple(
        same[0]._replace(values=tuple(value for check in same for value in check.values))
        for same in zip(*(run.checks for run in runs), strict=True)
    )
    return dataclasses.replace(
        runs[0],
        checks=checks,
        seeds=tuple(seed for run in runs for seed in run.seeds),
        seconds=sum(run.seconds for run in runs),
    )


def normals(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Standard normal draws in float64, one tensor a shape, all from one seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def covariance_of(root: torch.Tensor) -> torch.Tensor:
    """A covariance well away from singular, from a square matrix of draws ``(..., D, D)``."""
    return root @ root.mT / root.shape[-1] + 0.3 * torch.eye(root.shape[-1], dtype=root.dtype)
