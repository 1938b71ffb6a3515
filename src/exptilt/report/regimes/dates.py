"""Labels of the rows that come next: dates, quarters, months, years and counters are continued."""

import re
from collections.abc import Sequence
from datetime import date, timedelta
from itertools import pairwise
from statistics import median

PERIOD = re.compile(r"(\d{4})([-: ]?[QqMm])(\d{1,2})")
ISO = re.compile(r"(\d{4})([-/.])(\d{1,2})(?:\2(\d{1,2}))?")


def next_labels(labels: Sequence[str], count: int) -> tuple[str, ...]:
    """The next `count` labels; "+1", "+2", … if the last labels follow no known pattern."""
    found = _periods(labels, count) or _dates(labels, count) or _numbers(labels, count)
    return tuple(found or (f"+{k + 1}" for k in range(count)))


def _periods(labels: Sequence[str], count: int) -> list[str]:
    """The next labels after quarters or months such as 2001Q3 or 2001-M04; empty if the last is none."""
    last = PERIOD.fullmatch(labels[-1])
    if last is None:
        return []
    size, width = (4, 1) if last[2][-1] in "Qq" else (12, len(last[3]))
    at = int(last[1]) * size + int(last[3]) - 1
    steps = [at + k + 1 for k in range(count)]
    return [f"{k // size}{last[2]}{k % size + 1:0{width}d}" for k in steps]


def _dates(labels: Sequence[str], count: int) -> list[str]:
    """The next labels after dates such as 2001-02-03 or 2001/02; empty if the last labels are none.

    Steps are days, weeks, months, quarters or years, as between the last labels.
    """
    matches = [ISO.fullmatch(label) for label in labels[-60:]]
    if None in matches or len(matches) < 2:
        return []
    known = [m for m in matches if m is not None]
    try:
        days = [date(int(m[1]), int(m[3]), int(m[4] or 1)) for m in known]
    except ValueError:
        return []
    gap, last, sign = median((b - a).days for a, b in pairwise(days)), days[-1], known[-1][2]
    months = round(gap / 30.44) if gap >= 28 else 0
    at_end = all((day + timedelta(1)).day == 1 for day in days)
    weekdays = gap == 1 and all(day.weekday() < 5 for day in days) and len(days) > 7
    out = []
    for k in range(1, count + 1):
        if months:
            total = last.year * 12 + last.month - 1 + k * months
            first = date(total // 12, total % 12 + 1, 1)
            end = (first + timedelta(31)).replace(day=1) - timedelta(1)
            day = end if at_end else first.replace(day=min(days[-1].day, end.day))
        elif weekdays:
            day = last + timedelta(1)
            while day.weekday() > 4:
                day += timedelta(1)
            last = day
        else:
            day = last + timedelta(round(gap * k))
        whole = f"{day.year}{sign}{day.month:02d}{sign}{day.day:02d}"
        out.append(whole if known[-1][4] else whole[:-3])
    return out


def _numbers(labels: Sequence[str], count: int) -> list[str]:
    """The next labels after counters or years; empty if the last two labels are not rising whole numbers."""
    try:
        a, b = (int(label) for label in labels[-2:])
    except ValueError:
        return []
    return [str(b + (k + 1) * (b - a)) for k in range(count)] if b > a else []
