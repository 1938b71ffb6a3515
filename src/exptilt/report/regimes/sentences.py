"""The regimes of a series in words: a summary for a terminal, and the sentences of the page."""

import numpy as np

from exptilt.report.regimes.payload import Regimes
from exptilt.report.tokens import plain
from exptilt.switching.learning.summary import write_number


def name_of(found: Regimes, regime: int) -> str:
    """Name of a regime: its number and, if there are several, a word such as "low" or "fast"."""
    M = len(found.share)
    low, high = ("slow", "fast") if found.kind == "local-level" else ("low", "high")
    middle = "" if M == 3 else f" {regime}"
    word = low if regime == 0 else high if regime == M - 1 else f"middle{middle}"
    return f"{regime}" if M == 1 else f"{regime} ({word})"


def now(found: Regimes) -> str:
    """Sentences on the regime at the last row: its probability, since when, and how long it should last."""
    last = found.spells[-1]
    p = found.filtered[-1, last.regime]
    sure = "more than 99 %" if p > 0.99 else f"{100 * p:.0f} %"
    rows = last.end - last.begin
    since = f"since {plain(found.labels[last.begin])} ({rows} row{'s' if rows > 1 else ''})"
    expected = found.duration[last.regime]
    lasts = (
        f" Such a stretch is expected to last {write_number(float(expected), 3)} rows."
        if np.isfinite(expected)
        else ""
    )
    where = (
        f"At the last row, {plain(found.labels[-1])}, the series is in regime {name_of(found, last.regime)}"
    )
    return f"{where} with probability {sure}, {since}.{lasts}"


def verdicts(found: Regimes) -> list[str]:
    """One sentence per column on the tests of its residuals."""
    out = []
    for name, tests in zip(found.columns, found.tests, strict=False):
        bad = {test.split(",")[0] for test, (_, p) in tests.items() if p < 0.01}
        if "Ljung–Box" in bad:
            hint = "--model local-level, or model its changes" if found.kind == "level" else "more regimes"
            out.append(
                f"The residuals of {name} are correlated: regimes alone do not describe it. Try {hint}."
            )
        elif bad:
            what = " and ".join(
                {
                    "Ljung–Box of squares": "their size changes in time",
                    "Jarque–Bera": "their tails are not normal",
                }[b]
                for b in sorted(bad)
            )
            out.append(f"The residuals of {name} are uncorrelated, but {what}: intervals may be off.")
        elif tests:
            out.append(f"The residuals of {name} look as they should.")
    return out


def text(found: Regimes) -> str:
    """The summary as lines of text; control characters in names from the file are spelled out."""
    names = [plain(name) for name in found.columns]
    words = {"level": ("level", "sd"), "local-level": ("pace", "noise sd"), "counts": ("rate", "sd")}
    center, deviation = words[found.kind]
    rows, M = len(found.y), len(found.share)
    lines = [
        f"{plain(found.source)}: {rows} rows of {', '.join(names)}; {M} regimes, model {found.kind!r}",
        *(plain(sentence) for sentence in found.chosen),
        "rows are numbered" if found.index is None else f"rows are named by column {plain(found.index)!r}",
        f"log-likelihood {found.log_likelihood:.4f}   AIC {found.aic:.2f}   BIC {found.bic:.2f}   "
        f"{found.free_parameters} free parameters",
        found.status,
        "",
        "regime   share   lasts" + "".join(f"   {name} {center} (s.e.)   {deviation}" for name in names),
    ]
    for k in range(M):
        numbers = zip(found.center[k], found.center_error[k], found.deviation[k], strict=True)
        cells = "".join(
            f"   {value:.4g} ({'not known' if np.isnan(error) else f'{error:.2g}'})   {spread:.4g}"
            for value, error, spread in numbers
        )
        lines.append(f"{k:>6}   {100 * found.share[k]:4.1f}%   {found.duration[k]:5.1f}{cells}")
    lines.append("")
    for k, row in enumerate(found.transition):
        lines.append(f"from regime {k}: " + "  ".join(f"to {j}: {p:.4f}" for j, p in enumerate(row)))
    lines += ["", now(found)]
    if found.comparison is not None:
        lines += ["", str(found.comparison)]
    said = [plain(line) for line in verdicts(found)]
    return "\n".join([*lines, *(["", *said] if said else [])])
