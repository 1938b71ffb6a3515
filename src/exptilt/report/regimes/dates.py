"""Labels of rows as times: their order, the period between them, and the labels that come next.

A column of labels is a notation of dates (2001-02-03, 3.2.2001, Feb 2001, …), of periods (2001Q3, 2001-M04)
or of whole numbers (years, counters). 02/03/2001 is read month first or day first, whichever keeps the rows
in order.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Any

PERIOD = re.compile(r"(\d{4})([-: ]?)([QqMmWw])(\d{1,2})|([QqMm])(\d{1,2})([-/ ]?)(\d{4})")
DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y"),
    *("%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%Y%m%d", "%d-%b-%Y", "%d-%b-%y", "%d %b %Y", "%d %B %Y"),
    *("%b %d, %Y", "%B %d, %Y", "%b %d %Y"),
)
MONTHS = ("%Y-%m", "%Y/%m", "%m/%Y", "%b %Y", "%B %Y", "%Y %b", "%b-%Y", "%b-%y", "%Y-%b")
CLOCKS = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%H:%M:%S%z", "%H:%M:%S.%f%z")
PERIODS = {1: "month", 3: "quarter", 6: "half-year", 12: "year"}
SECONDS = {1: "second", 60: "minute", 3600: "hour", 86400: "day", 7 * 86400: "week"}
NAMED = ("year", "quarter", "month", "week", "day", "hour", "minute", "second")
Read = Callable[[str], Any]


@dataclass(frozen=True)
class Times:
    """The times of a series' rows.

    Attributes:
        keys: what the rows are ordered by: dates, or whole numbers.
        unit: the period from one row to the next, "quarter" for example; "row" if it is not regular.
        read: from a label to its key; ValueError if it is no such label.
        ahead: from a number to as many labels of the rows that come next.
    """

    keys: Sequence[Any]
    unit: str
    read: Read
    ahead: Callable[[int], list[str]]

    @property
    def rising(self) -> bool:
        """Whether no row comes before an earlier one."""
        return all(a <= b for a, b in pairwise(self.keys))


def read_times(labels: Sequence[str], name: str = "") -> Times | None:
    """The times that the labels tell, `name` being that of their column; None if they are not all times."""
    return _counters(labels, name) or _periods(labels) or _dates(labels)


def next_labels(labels: Sequence[str], count: int) -> tuple[str, ...]:
    """The next `count` labels; "+1", "+2", … if the labels follow no known pattern."""
    times = read_times(labels)
    if times is None or len(labels) < 2 or not times.keys[-1] > times.keys[-2]:
        return tuple(f"+{k + 1}" for k in range(count))
    return tuple(times.ahead(count))


def span(text: str) -> tuple[datetime, datetime]:
    """The first moments of a year, quarter, month or day and of the next; ValueError if it is none."""
    text = text.strip()
    if re.fullmatch(r"\d{4}", text):
        return datetime(int(text), 1, 1), datetime(int(text) + 1, 1, 1)
    if match := PERIOD.fullmatch(text):
        first = _of_period(text)
        size = {"Q": 3, "M": 1, "W": 0}[(match[3] or match[5]).upper()]
        return first, _later(first, size) if size else first + timedelta(7)
    for formats, months in ((MONTHS, 1), (DAYS, 0)):
        for form in formats:
            try:
                first = datetime.strptime(text, form)
            except ValueError:
                continue
            return first, _later(first, 1) if months else first + timedelta(1)
    raise ValueError(text)


def _counters(labels: Sequence[str], name: str) -> Times | None:
    """Whole numbers that only rise or fall, or years of a named column in any order."""
    if not all(re.fullmatch(r"[-+]?\d+", label) for label in labels):
        return None
    keys = [int(label) for label in labels]
    steps = {b - a for a, b in pairwise(keys)}
    years = all(1500 <= key <= 2200 for key in keys)
    if not (all(step > 0 for step in steps) or all(step < 0 for step in steps) or (years and name)):
        return None
    if all(len(label) == 8 for label in labels) and (dates := _dates(labels)):
        return dates
    word = next((unit for unit in NAMED if unit == name.strip().lower().rstrip("s")), "row")
    unit = ("year" if years else word) if steps in ({1}, {-1}) else "row"
    step = keys[-1] - keys[-2] if len(keys) > 1 else 1
    return Times(keys, unit, int, lambda count: [str(keys[-1] + (k + 1) * step) for k in range(count)])


def _of_period(label: str) -> datetime:
    """The first day of a quarter, month or week such as 2001Q3, 2001-M04 or Q3 2001."""
    match = PERIOD.fullmatch(label)
    if match is None:
        raise ValueError(label)
    year, letter, number = match[1] or match[8], (match[3] or match[5]).upper(), int(match[4] or match[6])
    if letter == "W":
        return datetime.fromisocalendar(int(year), number, 1)
    return datetime(int(year), 3 * number - 2 if letter == "Q" else number, 1)


def _periods(labels: Sequence[str]) -> Times | None:
    match = PERIOD.fullmatch(labels[0])
    try:
        keys = [_of_period(label) for label in labels]
    except ValueError:
        return None
    assert match is not None
    letter, width = match[3] or match[5], max(len(re.split("[A-Za-z]", label)[-1]) for label in labels)

    def write(key: datetime) -> str:
        year, number = key.year, key.month
        if letter in "Ww":
            year, number, _ = key.isocalendar()
        elif letter in "Qq":
            number = (key.month + 2) // 3
        return (
            f"{letter}{number}{match[7]}{year}" if match[5] else f"{year}{match[2]}{letter}{number:0{width}d}"
        )

    return _regular(keys, write, _of_period)


def _dates(labels: Sequence[str]) -> Times | None:
    """Dates in the first notation that all labels have, one that keeps them in order before others."""
    found = list[Times]()
    days = [*DAYS, *MONTHS]
    if ":" in labels[0]:
        days = [f"{day}{gap}{clock}" for day in DAYS[:8] for gap in (" ", "T") for clock in CLOCKS]
    for form in days:
        try:
            for label in (labels[0], labels[-1], labels[len(labels) // 2]):
                datetime.strptime(label, form)
            keys = [datetime.strptime(label, form) for label in labels]
        except ValueError:
            continue
        plain = not any(re.search(r"(^|\D)0\d(\D|$)", label) for label in labels) and form in DAYS

        def write(key: datetime, form: str = form, plain: bool = plain) -> str:
            text = key.strftime(form)
            return re.sub(r"(^|\D)0(?=\d(\D|$))", r"\1", text) if plain else text

        def read(label: str, form: str = form) -> datetime:
            return datetime.strptime(label, form)

        found.append(_regular(keys, write, read))
        steps = [a < b for a, b in pairwise(keys)]
        if all(steps) or not any(steps):
            return found[-1]
    return found[0] if found else None


def _regular(keys: Sequence[datetime], write: Callable[[datetime], str], read: Read) -> Times:
    """Times of dates, with the unit that at least nine of ten gaps between them have."""
    gaps = [abs((b - a).total_seconds()) for a, b in pairwise(keys)] or [86400.0]
    usual = median(gaps)
    months = round(usual / 86400 / 30.44) if usual >= 27 * 86400 else 0
    if months:
        steps = [abs((b.year - a.year) * 12 + b.month - a.month) for a, b in pairwise(keys)]
        unit = PERIODS.get(months, "row") if 10 * steps.count(months) >= 9 * len(steps) else "row"
    else:
        unit = SECONDS.get(round(usual), "row") if 10 * gaps.count(usual) >= 9 * len(gaps) else "row"
    weekdays = usual == 86400 and len(keys) > 7 and all(key.weekday() < 5 for key in keys)
    if weekdays:
        unit = "trading day"
    at_end = all((key + timedelta(1)).day == 1 for key in keys[-60:])
    last = keys[-1]

    def ahead(count: int) -> list[str]:
        out, day = list[datetime](), last
        for k in range(1, count + 1):
            if months:
                day = _later(last, k * months, at_end)
            else:
                day = day + timedelta(seconds=usual)
                while weekdays and day.weekday() > 4:
                    day += timedelta(1)
            out.append(day)
        return [write(day) for day in out]

    return Times(keys, unit, read, ahead)


def _later(day: datetime, months: int, at_end: bool = False) -> datetime:
    """The same day so many months later, or the last of that month."""
    total = day.year * 12 + day.month - 1 + months
    first = day.replace(year=total // 12, month=total % 12 + 1, day=1)
    end = (first + timedelta(31)).replace(day=1) - timedelta(1)
    return end if at_end else first.replace(day=min(day.day, end.day))
