"""The regimes of a series in words: their names, a summary for a terminal, and the sentences of the page."""

import re

import numpy as np

from exptilt.report.regimes.payload import Regimes
from exptilt.report.tokens import plain
from exptilt.switching.learning.summary import write_number

CHANGE = re.compile(r"growth|return|change|diff|delta|log.?ret|pct|percent", re.IGNORECASE)
APART, WIDER = 0.5, 1.5  # levels so many deviations apart, and deviations of such a ratio, are told apart


def words_of(found: Regimes) -> list[str]:
    """What tells each regime from the others: "low", "volatile" or "falling, volatile"; "" if nothing."""
    M = len(found.share)
    if M == 1:
        return [""]
    if found.kind == "local-level":
        return _ranked(found.center.mean(1), ("slow", "fast"))
    scale = np.sqrt((found.deviation**2).mean(0))
    level, gaps = (found.center / scale).mean(1), np.ptp(found.center / scale, 0)
    widest = int(np.argmax(gaps))
    error = np.nan_to_num(found.center_error[:, widest] / scale[widest])
    low, high = level.argmin(), level.argmax()
    words: list[list[str]] = [[] for _ in range(M)]
    if gaps[widest] > max(APART, 2 * np.hypot(error[low], error[high])):
        pair, at = ("low", "high"), found.center[:, widest]
        if CHANGE.search(found.columns[widest]) and at.min() < 0 < at.max():
            pair = ("falling", "rising")
        which = f"{plain(found.columns[widest])} " if len(found.columns) > 1 else ""
        for regime, word in enumerate(_ranked(at, pair)):
            words[regime].append(which + word)
    spread = (found.deviation / scale).mean(1)
    if spread.max() > WIDER * spread.min():
        for regime, word in enumerate(_ranked(spread, ("calm", "volatile"))):
            words[regime].append(word)
    return [", ".join(part) for part in words]


def _ranked(values: np.ndarray, pair: tuple[str, str]) -> list[str]:
    """A word for each value by its rank: the two of `pair` at the ends, "middle" or "middle 1" between."""
    rank, M = np.argsort(np.argsort(values, kind="stable"), kind="stable"), len(values)
    between = ["middle"] if M == 3 else [f"middle {k}" for k in range(1, M - 1)]
    words = [pair[0], *between, pair[1]]
    return [words[k] for k in rank]


def name_of(found: Regimes, regime: int) -> str:
    """Name of a regime: its number and, in brackets, what tells it from the others."""
    word = words_of(found)[regime]
    return f"{regime} ({word})" if word else f"{regime}"


def counted(found: Regimes, number: float) -> str:
    """A number of rows in the period of the data: "7 quarters"."""
    text = write_number(number, 2) if number < 10 else f"{number:.0f}"
    text = text.removesuffix(".0")
    return f"{text} {found.unit}{'' if text == '1' else 's'}"


def now(found: Regimes) -> str:
    """Sentences on the regime at the last row: its probability, since when, and how long such spells are."""
    last = found.spells[-1]
    p = found.filtered[-1, last.regime]
    sure = "more than 99 %" if p > 0.99 else f"{100 * p:.0f} %"
    rows, expected = last.end - last.begin, found.duration[last.regime]
    first = (
        f"At the last row, {plain(found.labels[-1])}, the series is in regime {name_of(found, last.regime)}"
    )
    row = "row " if found.index is None else ""
    since = f"since {row}{plain(found.labels[last.begin])}" if last.begin else "since the first row"
    spells = "Such a spell has no end in these data"
    if np.isfinite(expected):
        spells = f"Such spells average {counted(found, expected)}"
    return f"{first} with probability {sure}, {since}. {spells}; this one has lasted {rows}."


def doubt(found: Regimes) -> str:
    """A sentence if every criterion prefers a single regime; empty if not, or without a comparison."""
    if found.comparison is None or len(found.share) == 1 or set(found.comparison.best.values()) != {1}:
        return ""
    return "One regime is preferred by every criterion: these regimes may not be real."


def agreement(found: Regimes) -> str:
    """A sentence on how the regimes and the shaded rows agree; empty if no rows are shaded."""
    if found.shaded is None:
        return ""
    if not found.shaded.any():
        return "No row of the series lies in the shaded periods."
    inside = [float((found.shaded == (found.likely == k)).mean()) for k in range(len(found.share))]
    best = int(np.argmax(inside))
    return (
        f"{int(found.shaded.sum())} rows are shaded; regime {name_of(found, best)} is the likeliest "
        f"in {100 * float((found.likely == best)[found.shaded].mean()):.0f} % of them and in "
        f"{100 * float((found.likely == best)[~found.shaded].mean()):.0f} % of the others."
    )


def verdicts(found: Regimes) -> list[str]:
    """One sentence per column on the tests of its residuals, and what they mean for the forecast."""
    out = []
    for name, tests in zip(found.columns, found.tests, strict=False):
        bad = {test.split(",")[0] for test, (_, p) in tests.items() if p < 0.01}
        if "Ljung–Box" in bad:
            hint = {"level": "--lags 1, --model local-level, or its changes", "autoregression": "more lags"}
            out.append(
                f"The residuals of {name} are correlated: the model, and so its forecast, misses what "
                "carries over from one "
                f"{found.unit} to the next. "
                f"Try {hint.get(found.kind, 'more regimes')}."
            )
        elif bad:
            words = {
                "Ljung–Box of squares": "their size changes over time",
                "Jarque–Bera": "their tails are not normal",
            }
            what = " and ".join(words[b] for b in sorted(bad))
            out.append(
                f"The residuals of {name} are uncorrelated, but {what}: "
                "the intervals may be too wide or too narrow."
            )
        elif tests:
            out.append(f"The residuals of {name} pass all tests: there is no reason to doubt the intervals.")
    return out


def text(found: Regimes) -> str:
    """The summary as lines of text; control characters in names from the file are spelled out."""
    names = [plain(name) for name in found.columns]
    words = {"local-level": ("pace", "noise sd"), "counts": ("rate", "sd")}
    center, deviation = words.get(found.kind, ("level", "sd"))
    rows, M = len(found.y), len(found.share)
    lags = f" with {found.order} lag{'s' * (found.order > 1)}" if found.order else ""
    lines = [
        f"{plain(found.source)}: {rows} rows of {', '.join(names)}, {plain(found.labels[0])} to "
        f"{plain(found.labels[-1])}; {M} regimes, model {found.kind!r}{lags}",
        *(plain(sentence) for sentence in found.chosen),
        *(["Rows are numbered."] if found.index is None else []),
        f"log-likelihood {found.log_likelihood:.4f}   AIC {found.aic:.2f}   BIC {found.bic:.2f}   "
        f"{found.free_parameters} free parameters",
        found.status,
        "",
    ]
    header = [
        "regime",
        "share",
        f"{found.unit}s",
        *(h for n in names for h in (f"{n} {center}", "s.e.", deviation)),
    ]
    table = [header]
    for k in range(M):
        row = [name_of(found, k), f"{100 * found.share[k]:.1f} %", f"{found.duration[k]:.1f}"]
        for value, error, spread in zip(
            found.center[k], found.center_error[k], found.deviation[k], strict=True
        ):
            row += [f"{value:.4g}", "not known" if np.isnan(error) else f"{error:.2g}", f"{spread:.4g}"]
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += [
        "   ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
    lines.append("")
    for k, row in enumerate(found.transition):
        lines.append(f"from regime {k}: " + "  ".join(f"to {j}: {p:.4f}" for j, p in enumerate(row)))
    lines += ["", now(found), *([agreement(found)] if found.shaded is not None else [])]
    ahead = found.ahead or [f"+{k + 1}" for k in range(len(found.forecast))]
    lines += ["", f"forecast, {100 * found.level:g} % intervals:"]
    for k in sorted({0, len(ahead) - 1}):
        cells = zip(names, found.forecast[k], found.lower[k], found.upper[k], strict=True)
        said = "   ".join(f"{n} {x:.4g} ({low:.4g} to {high:.4g})" for n, x, low, high in cells)
        lines.append(f"  {plain(ahead[k])}   {said}")
    lines += [plain(line) for line in verdicts(found)]
    if found.comparison is not None:
        lines += ["", str(found.comparison), *filter(None, [doubt(found)])]
    return "\n".join(lines)
