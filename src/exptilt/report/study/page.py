"""A study as a folder to read: `index.html`, which stands alone, `heads.csv` and `study.json`.

The page is laid out here and in `templates/study.html`: what was measured and on what, what was found, the
heads, the layers, the training. Everything is there as text and tables before any script runs; the scripts in
`assets/study/` then draw the pictures from the JSON that `payload` makes, and let the reader choose. So the
page reads with a screen reader, without scripts and on paper.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from exptilt._support.errors import MissingExtraError
from exptilt._support.files import write_together
from exptilt.claims import every as every_claim
from exptilt.lens import Study
from exptilt.lens.studying.notebook import some_heads
from exptilt.lens.studying.results import HeadMeasure, LayerMeasure
from exptilt.report.page import LEDGER, REPORT, Cell, Page, Table, number, render
from exptilt.report.study import comparison, sentences
from exptilt.report.study.findings import cautions
from exptilt.report.study.findings import findings as stands_out
from exptilt.report.study.payload import payload, strip_size
from exptilt.report.tokens import plain

# In the order they run: each uses only what stands before it.
SCRIPTS = ("basics", "charts", "heatmap", "attention", "head", "thumbnails", "curves", "start")
ASSETS = ("study/study.css", *(f"study/{name}.js" for name in SCRIPTS))
CAUTION = (
    "These are descriptions of one model on one text, not causes. In theory attention climbs a "
    "log-normalizer, or lowers an energy; in trained transformers these energies are not monotone "
    "from layer to layer."
)


def write(
    study: Study, folder: str | os.PathLike[str], *, against: Study | None = None, beside: str | None = None
) -> Path:
    """Write `index.html`, `heads.csv` and `study.json` into `folder`: all of them, or none if anything fails.

    If `folder` holds a ledger, its page is kept as `claims.html`.

    Args:
        study: the study to show.
        folder: where to write; made if it is not there.
        against: another study to compare it with, which is written as `against.json`.
        beside: a folder within `folder` that holds another study's page, to link to.

    Returns:
        The path of `index.html`.
    """
    try:
        table = study.to_frame().to_csv(index=False)
    except ImportError as problem:
        raise MissingExtraError("pandas", "report") from problem
    texts = {"heads.csv": table, "study.json": study.to_json()}
    texts |= {} if against is None else {"against.json": against.to_json()}
    pages, place = {REPORT: render_study(study, against, beside)}, Path(folder)
    ledger = place / REPORT
    if (place / "claims.json").is_file() and not (place / "study.json").is_file() and ledger.is_file():
        pages = {LEDGER: ledger.read_text("utf-8"), **pages}
    return write_together(folder, texts | pages)[-1]


def render_study(study: Study, against: Study | None = None, beside: str | None = None) -> str:
    """The page as one HTML string that stands alone."""
    context: dict[str, Any] = {
        "study": study,
        "fact": fact,
        "chips": chips(study),
        "extremes": extremes_table(study),
        "learned": stands_out(study, against),
        "beside": beside,
        "cautions": cautions(study),
        "kinds": kinds_table(study),
        "heads_table": heads_table(study),
        "meanings": meanings(study),
        "claims": claims_named(m.about for m in every(study)),
        "layers": [(name, measure, sentences.of_layers(measure)) for name, measure in study.layers.items()],
        "layer_tables": layer_tables(study),
        "loss": sentences.of_loss(study),
        "training_table": training_table(study),
        "strip_note": strip_note(study),
        "against": None if against is None else comparison.page_part(study, against),
        "data": payload(study, against),
    }
    sources = [f"{key}: {value}" for key, value in study.text_facts.items() if isinstance(value, str)]
    title = f"Attention in {study.name}" + ("" if against is None else f" against {against.name}")
    page = Page(title, lead(study), (), study.seed, [f"Model: {study.name}", *sources])
    return render(page, template="study.html", assets=ASSETS, context=context)


def lead(study: Study) -> str:
    """One sentence on what the page is about."""
    layers, heads = study.shape
    steps = 0 if study.training is None else len(study.training.steps)
    over = f", and how that changed over {steps} checkpoints of its training" if steps else ""
    return f"What the {layers * heads} attention heads of this model look at{over}."


def fact(value: str | int | float) -> str:
    r"""A fact for people: whole numbers with their thousands apart.

    Example:
        >>> fact(134515008).replace("\N{NARROW NO-BREAK SPACE}", " "), fact("GPT2LMHeadModel")
        ('134 515 008', 'GPT2LMHeadModel')
    """
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return value if isinstance(value, str) else number(value)


def chips(study: Study) -> list[str]:
    """The model and the text in a few words each."""
    layers, heads = study.shape
    found = [str(study.facts["architecture"])] if "architecture" in study.facts else []
    found.append(f"{layers} layers × {heads} heads")
    if "parameters" in study.facts:
        found.append(f"{fact(study.facts['parameters'])} parameters")
    if "tokens" in study.text_facts:
        found.append(f"{fact(study.text_facts['tokens'])} tokens read")
    if study.training is not None:
        found.append(f"{len(study.training.steps)} checkpoints")
    return found


def extremes_table(study: Study) -> Table:
    """Table of the lowest, the median and the highest head of every statistic that was measured."""
    rows: list[list[Cell]] = []
    for measure in study.heads.values():
        found = sentences.summary(measure)
        if found is not None and measure.value is not None:
            low, high, middle = found
            places = [f"L{layer}H{head}" for layer, head in (low, high)]
            numbers = (float(measure.value[low]), middle, float(measure.value[high]))
            rows.append([named(measure), places[0], *numbers, places[1]])
    header = ("statistic", "lowest in", "lowest", "median head", "highest", "highest in")
    return Table("Lowest, median and highest head", header, rows, CAUTION, sortable=True)


def named(measure: HeadMeasure | LayerMeasure) -> str:
    """A statistic's title with its unit, as a column header."""
    unit = "" if measure.title.endswith(measure.unit) else f", {measure.unit}"
    return measure.title + unit


def kinds_table(study: Study) -> Table:
    """Table of the kinds of heads: rule, number of heads, and which."""
    rows: list[list[Cell]] = []
    for name, kind in study.kinds.items():
        title, count = study.heads[kind.measure].title, int(kind.members.sum())
        rule = f"{title} {'at least' if kind.above else 'at most'} {sentences.number(kind.threshold)}"
        about = f"{kind.about[0].upper()}{kind.about[1:]}."
        rows.append([name, about, rule, count, some_heads(kind.members) or "none"])
    note = "A head is of a kind if it is beyond the threshold by two standard errors; it may be of several."
    return Table("Kinds of heads", ("kind", "what such a head does", "rule", "heads", "which"), rows, note)


def heads_table(study: Study) -> Table:
    """Table of every head with every statistic, for readers who do not see the heatmap."""
    shown = [(named(measure), measure.value) for measure in study.heads.values() if measure.value is not None]
    kinds = study.kinds.items()
    rows: list[list[Cell]] = []
    for place in np.ndindex(*study.shape):
        of = [", ".join(name for name, kind in kinds if kind.members[place])] if kinds else []
        rows.append([f"L{place[0]}H{place[1]}", *(float(value[place]) for _, value in shown), *of])
    note = "L0H0 is layer 0, head 0. Standard errors and baselines are in heads.csv beside this page."
    header = ("head", *(name for name, _ in shown), *(["kinds"] if kinds else []))
    return Table("Every head, every statistic", header, rows, note, sortable=True)


def every(study: Study) -> list[HeadMeasure | LayerMeasure]:
    """All statistics of a study."""
    return [*study.heads.values(), *study.layers.values()]


def claims_named(texts: Iterable[str]) -> dict[str, str]:
    """Statements of the claims whose ids stand in parentheses in any of the texts, by id.

    A page stands alone, so it carries the statements; the ids in its text are links to them.
    """
    said = " ".join(texts)
    return {claim.id: claim.statement for claim in every_claim() if f"({claim.id})" in said}


def meanings(study: Study) -> Table:
    """Table of every statistic: its meaning, what it assumes, and why it was not measured if it was not."""
    rows = []
    for measure in every(study):
        missing = f"Not measured: {measure.reason}" if measure.reason else ""
        rows.append((named(measure), measure.about, " ".join(filter(None, (measure.assumes, missing)))))
    return Table("Every statistic of this page", ("statistic", "what it tells", "what it assumes"), rows)


def layer_tables(study: Study) -> list[Table]:
    """Tables of the layer statistics, one for all that have the same places."""
    groups: dict[tuple[str, ...], list[tuple[str, list[Cell]]]] = {}
    for measure in study.layers.values():
        if measure.value is not None and np.ndim(measure.value) == 1:
            places = tuple(measure.places)
            columns = groups.setdefault(places, [("place", list(places))])
            columns.append((named(measure), [float(x) for x in measure.value]))
            if measure.error is not None:
                columns.append(("± s.e.", [float(x) for x in measure.error]))
    tables = []
    for places, columns in groups.items():
        header, values = zip(*columns, strict=True)
        title = f"Along the depth: {places[0]} to {places[-1]}"
        tables.append(Table(title, header, list(zip(*values, strict=True))))
    return tables


def training_table(study: Study) -> Table | None:
    """Loss and the mean over heads of every statistic at every checkpoint; None without checkpoints."""
    training = study.training
    if training is None:
        return None
    names = [name for name in study.heads if name in training.heads]
    rows = [
        (int(step), float(loss), *(sentences.known_mean(training.heads[name][index]) for name in names))
        for index, (step, loss) in enumerate(zip(training.steps, training.loss, strict=True))
    ]
    header = ("step", "loss, nats a token", *(named(study.heads[name]) for name in names))
    return Table("Over training: loss, and the mean over heads", header, rows)


def strip_note(study: Study) -> str:
    """Note on how many tokens the strips show; empty if they show all."""
    shown, there = strip_size(study), len(study.strip_tokens)
    return f"The first {shown} of {there} tokens, to keep this page small." if shown < there else ""


def text(study: Study, against: Study | None = None) -> str:
    """The findings, differences from another study if there is one, and a table, as text for a terminal."""
    lines, missing = [("statistic", "lowest", "median", "highest")], []
    for measure in study.heads.values():
        found = sentences.summary(measure)
        if measure.value is None or found is None:
            missing.append(measure.title)
            continue
        low, high = (f"{sentences.number(float(measure.value[k]))} (L{k[0]}H{k[1]})" for k in found[:2])
        lines.append((named(measure), low, sentences.number(found[2]), high))
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    layers, heads = study.shape
    told = [f"{plain(study.name)}: {layers} layers of {heads} heads", ""]
    told += [*(f"Careful: {caution}" for caution in cautions(study)), *([""] if cautions(study) else [])]
    told += [*(f"* {finding.text}" for finding in stands_out(study, against)), ""]
    if against is not None:
        part = comparison.page_part(study, against)
        told += [f"Against {plain(part.name)}: {part.lead}", *(f"* {said}" for said, _ in part.findings), ""]
    for name, *cells in lines:
        right = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        told.append("  ".join([name.ljust(first), *right]))
    if missing:
        told += ["", f"Not measured (the page says why): {', '.join(missing)}"]
    if loss := sentences.of_loss(study):
        told += ["", loss]
    return "\n".join(told)
