"""Evidence in, one page out: what stands, what is corrected, what failed, and each claim by itself."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt._support.files import write_together
from exptilt._support.plotting import COLOURS
from exptilt.claims import find
from exptilt.claims.evidence import Check, Evidence, Picture, Verdict
from exptilt.claims.ledger import GROUPS, MODEL
from exptilt.claims.models.questions import ASKED, columns, predictions
from exptilt.report import figures
from exptilt.report.formulas import set_formula
from exptilt.report.page import LEDGER, REPORT, Page, Table, number, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ASSETS = ("study/study.css", "ledger/ledger.css", "ledger/landscape.js", "ledger/filter.js")
RULES = {
    Verdict.EXACT: "every check of the claim is an identity or an inequality, and holds to rounding",
    Verdict.CORRECTED: "the claim passes, the formula as printed does not",
    Verdict.SCOPED: "the claim passes, a broader version of it does not",
    Verdict.MEASURED: "every number stays within its bound with these settings; this is not a proof",
    Verdict.PARTLY: "some of the measured numbers pass, others do not",
    Verdict.REFUTED: "a check of the claim or a guard fails, or no measured number passes",
    Verdict.OPEN: "a number that is needed is missing",
}
HEADER = ("number", "mean", "95% interval", "part", "bound", "passes")
OBSERVED = (*ASKED, "F4", "F5")


def write_ledger(found: Sequence[Evidence], folder: str | os.PathLike[str]) -> Path:
    """Write `index.html` and `claims.json` into `folder`, both or none.

    If `folder` holds the report of a model, the page is `claims.html`.

    Args:
        found: the evidence, one for each claim; a claim run on several models comes several times.
        folder: where to write; made if it is not there.

    Returns:
        The path of the page.
    """
    if not found:
        raise ArgumentError("write_ledger: there is no evidence. Pass what xt.claims.run gives.")
    texts = {"claims.json": "[\n" + ",\n".join(each.to_json() for each in found) + "\n]\n"}
    name = LEDGER if (Path(folder) / "study.json").is_file() else REPORT
    return write_together(folder, texts | {name: text(found)})[-1]


def text(found: Sequence[Evidence]) -> str:
    """The page as HTML."""
    counts = {verdict: sum(each.verdict is verdict for each in found) for verdict in Verdict}
    entries = [_entry(each, place) for place, each in enumerate(found)]
    groups = {name: [e for e in entries if e["claim"].id[0] == letter] for letter, name in GROUPS.items()}
    count = len({each.id for each in found})
    page = Page(
        "What of the theory stands",
        f"{count} claims of “A Probabilistic Interpretation of Transformers”, each an experiment. "
        "A verdict follows from the numbers by the rules below; none is written by hand.",
        (),
        min(min(each.seeds) for each in found),
        ["The five drafts; docs/theory.md has every claim in one notation.", "claims.json beside this page."],
    )
    context = {
        "counts": {verdict: count for verdict, count in counts.items() if count},
        "rules": RULES,
        "groups": {name: some for name, some in groups.items() if some},
        "board": _board(entries),
    }
    return render(page, template="ledger.html", assets=ASSETS, context=context)


def _board(entries: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Lists of claims at the top of the page, by title: standing, corrected, failed, measured."""
    theory = [entry for entry in entries if entry["claim"].id not in OBSERVED]
    kinds = {
        "What stands": (Verdict.EXACT, Verdict.SCOPED, Verdict.MEASURED),
        "What is corrected": (Verdict.CORRECTED,),
        "What failed or is open": (Verdict.REFUTED, Verdict.PARTLY, Verdict.OPEN),
    }
    board = {
        title: [e for e in theory if e["evidence"].verdict in verdicts] for title, verdicts in kinds.items()
    }
    board["What data say about real transformers"] = [e for e in entries if e["claim"].id in OBSERVED]
    board["What stands"] = board.pop("What stands")  # the longest list comes last
    return board


def _entry(each: Evidence, place: int) -> dict[str, Any]:
    """Values for the template that shows one claim."""
    claim, drawn = find(each.id), partial(paint, each.picture)
    model = str(each.settings.get("model", ""))
    printed = (claim.printed, "printed", ("printed", "reach"))
    both = (printed, (claim.formula, "corrected", ("claim",))) if claim.printed else ()
    return {
        "anchor": each.id if model in ("", MODEL) else f"{each.id}-{place}",
        "claim": claim,
        "evidence": each,
        "model": model,
        "slug": each.verdict.name.lower(),
        "formula": formula(claim.formula),
        "sides": [(title, formula(latex), _worst(each, roles)) for latex, title, roles in both],
        "bounds": _bounds(each),
        "models": _models(each),
        "settings": ", ".join(f"{name} = {value}" for name, value in each.settings.items()),
        "checks": Table(f"Numbers of {each.id}", HEADER, [_row(check) for check in each.checks]),
        "figure": figures.draw(f"claim-{place}", drawn) if each.picture.lines else "",
        "command": f"exptilt claims {each.id}" + ("" if model in ("", MODEL) else f" --model {model}"),
    }


def _bounds(each: Evidence) -> str:
    """When the bounds of what is measured were chosen, in a sentence; empty if nothing is."""
    if each.id not in ASKED:
        loose = any(c.role == "measured" or (c.role == "claim" and not c.exact) for c in each.checks)
        return "Bounds that are not rounding were chosen after a look at first results." if loose else ""
    said = predictions()
    if each.settings.get("model", MODEL) in said["seen"]:
        return (
            "The bounds were chosen after this model was measured: they describe it, and only other models "
            "test them."
        )
    return (
        f"The bounds were written down on {said['date']}, before this model was measured (predictions.json)."
    )


def _models(each: Evidence) -> Table | None:
    """The table of all models that were measured, for a claim about trained models on the first of them."""
    if each.id not in ASKED or each.settings.get("model", MODEL) != MODEL:
        return None
    header, rows = columns(each.id)
    date = predictions()["date"]
    note = f"Bounds and expectations are of {date}, before all but the first model were measured."
    return Table(f"{each.id} in several models", header, [tuple(row) for row in rows], note)


def _worst(each: Evidence, roles: Sequence[str]) -> str:
    """The first failed check of these roles, else the one of the largest mean, in words; empty if none."""
    shown = [c for c in each.checks if c.role in roles]
    if not shown:
        return ""
    worst = next((c for c in shown if not c.passed), max(shown, key=lambda c: abs(c.mean)))
    return f"{worst.name}: {number(worst.mean)} ({worst.bound})"


def _row(c: Check) -> tuple[str, ...]:
    low, high = c.interval
    interval = "" if low != low else f"{number(low)} to {number(high)}"
    passes = "" if c.role == "note" else "yes" if c.passed else "no"
    return c.name, number(c.mean), interval, c.role, c.bound, passes


def formula(latex: str) -> str:
    """A formula as ``<math>`` elements."""
    try:
        return set_formula(latex)
    except ImportError as problem:
        raise MissingExtraError("latex2mathml", "report") from problem


def paint(picture: Picture, axes: "Axes") -> None:
    """Draw the numbers of a picture."""
    for place, line in enumerate(picture.lines):
        style: dict[str, Any] = {"label": line.label} if line.label else {}
        colour = COLOURS[place % 6]
        if line.kind == "bars":
            axes.bar(line.x, line.y, color=colour, alpha=0.6, width=0.6, **style)
        elif line.kind == "points":
            axes.plot(line.x, line.y, "osD^vP"[place % 6], color=colour, markersize=4, **style)
        else:
            axes.plot(line.x, line.y, color=colour, **style)
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    for wanted, axis in ((picture.log_x, axes.xaxis), (picture.log_y, axes.yaxis)):
        if wanted:  # plain labels: matplotlib's would be formulas, which `figures.draw` does not set
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            plain, (low, high) = FuncFormatter(lambda value, _: f"{value:g}"), axis.get_view_interval()
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(plain if high < 3 * low else NullFormatter())
    if not picture.log_x and all(isinstance(x, int) for line in picture.lines for x in line.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=picture.x, ylabel=picture.y)
    if any(line.label for line in picture.lines):
        axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
