"""A study as a folder to read: `index.html`, which stands alone, `heads.csv` and `study.json`.

The page is laid out here and in `templates/study.html`: what was measured and on what, what was found, the heads, the layers, the training.
Everything is there as text and tables before any script runs; the scripts in `assets/study/` then draw the pictures from the JSON that
`payload` makes, and let the reader choose. So the page reads with a screen reader, without scripts and on paper.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from exptilt._support.errors import MissingExtraError
from exptilt._support.files import write_together
from exptilt.lens.studying.results import Array, HeadMeasure, LayerMeasure, Study
from exptilt.report import readings
from exptilt.report.page import Page, Table, number, render
from exptilt.report.payload import for_script, payload, strip_size

# In the order they run: each uses only what stands before it.
SCRIPTS = ("basics.js", "charts.js", "heatmap.js", "attention.js", "head.js", "curves.js", "start.js")
ASSETS = ("study/study.css", *(f"study/{name}" for name in SCRIPTS))
CAUTION = (
    "These are descriptions of one model on one text. Theory reads attention as ascent on a log-normalizer, or descent of an energy; in "
    "trained transformers such energies are not monotone along the depth, and nothing here says that a head does what it does for a reason."
)


def write(study: Study, folder: str | os.PathLike[str]) -> Path:
    """Write `index.html`, `heads.csv` and `study.json` into `folder`: all three, or none if anything fails.

    Args:
        study: what was measured.
        folder: where; made if it is not there.

    Returns:
        The path of `index.html`.
    """
    try:
        table = study.to_frame().to_csv(index=False)
    except ImportError as problem:
        raise MissingExtraError("pandas", "report") from problem
    return write_together(
        folder, {"heads.csv": table, "study.json": study.to_json(), "index.html": render_study(study)}
    )[-1]


def render_study(study: Study) -> str:
    """The page as one HTML string that stands alone.

    Args:
        study: what was measured.
    """
    try:
        import markupsafe
    except ImportError as problem:
        raise MissingExtraError("jinja2", "report") from problem
    page = Page(f"Attention in {study.name}", lead(study), (), study.seed, sources(study))
    context: dict[str, Any] = {
        "study": study,
        "fact": fact,
        "chips": chips(study),
        "caution": CAUTION,
        "findings": findings(study),
        "heads_table": heads_table(study),
        "meanings": meanings(study),
        "layers": [(name, measure, readings.of_layers(measure)) for name, measure in study.layers.items()],
        "layer_tables": layer_tables(study),
        "loss": readings.of_loss(study),
        "followed": [
            (study.heads[name], said) for name in study.heads if (said := readings.of_training(study, name))
        ],
        "training_table": training_table(study),
        "strip_note": strip_note(study),
        "data": markupsafe.Markup(for_script(payload(study))),
    }
    return render(page, template="study.html", assets=ASSETS, context=context)


def lead(study: Study) -> str:
    """One or two sentences on what the page is about.

    Args:
        study: what was measured.
    """
    layers, heads = readings.shape(study)
    over = (
        ""
        if study.training is None
        else f", and over {len(study.training.steps)} checkpoints of its training"
    )
    return f"{layers * heads} attention heads, each measured as what it is: a probability on the keys, tilted by the query{over}."


def fact(value: str | int | float) -> str:
    r"""A fact for people: whole numbers with their thousands apart.

    Args:
        value: words or a number.

    Example:
        >>> fact(134515008).replace("\N{NARROW NO-BREAK SPACE}", " "), fact("GPT2LMHeadModel")
        ('134 515 008', 'GPT2LMHeadModel')
    """
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return value if isinstance(value, str) else number(value)


def chips(study: Study) -> list[str]:
    """The model and the text in a few words each.

    Args:
        study: what was measured.
    """
    layers, heads = readings.shape(study)
    found = [str(study.facts["architecture"])] if "architecture" in study.facts else []
    found.append(f"{layers} layers × {heads} heads")
    if "parameters" in study.facts:
        found.append(f"{fact(study.facts['parameters'])} parameters")
    if "tokens" in study.text_facts:
        found.append(f"{fact(study.text_facts['tokens'])} tokens read")
    if study.training is not None:
        found.append(f"{len(study.training.steps)} checkpoints")
    return found


def sources(study: Study) -> list[str]:
    """Where the numbers came from, in words.

    Args:
        study: what was measured.
    """
    return [
        f"Model: {study.name}",
        *(f"{key}: {value}" for key, value in study.text_facts.items() if isinstance(value, str)),
    ]


def findings(study: Study) -> list[tuple[str, str, str]]:
    """Statistic, sentence, and where the page shows it (an anchor), for every statistic that was measured.

    Args:
        study: what was measured.
    """
    found = []
    for name, measure in study.heads.items():
        ends = None if measure.value is None else readings.extremes(measure.value)
        if ends is not None:
            (_, (layer, head)) = ends
            found.append((measure.title, readings.of_measure(study, name), f"L{layer}H{head}:{name}"))
    return found


def named(measure: HeadMeasure | LayerMeasure) -> str:
    """A statistic's title with its unit, as a column header.

    Args:
        measure: the statistic.
    """
    return (
        f"{measure.title}, {measure.unit}"
        if measure.unit and not measure.title.endswith(measure.unit)
        else measure.title
    )


def heads_table(study: Study) -> Table:
    """Every head with every statistic: what the heatmap shows, for those who do not see it.

    Args:
        study: what was measured.
    """
    layers, heads = readings.shape(study)
    shown = [measure for measure in study.heads.values() if measure.value is not None]
    rows: list[tuple[str | float, ...]] = [
        (
            f"L{layer}H{head}",
            *(float(measure.value[layer, head]) for measure in shown if measure.value is not None),
        )
        for layer in range(layers)
        for head in range(heads)
    ]
    note = "L0H0 is layer 0, head 0. Standard errors and baselines are in heads.csv beside this page."
    return Table(
        "Every head, every statistic",
        ("head", *(named(measure) for measure in shown)),
        rows,
        note,
        sortable=True,
    )


def meanings(study: Study) -> Table:
    """What each statistic is, what it takes for granted, and why it is missing where it is.

    Args:
        study: what was measured.
    """
    every: list[HeadMeasure | LayerMeasure] = [*study.heads.values(), *study.layers.values()]
    rows = [
        (
            named(measure),
            measure.about,
            " ".join(
                part
                for part in (measure.assumes, measure.reason and f"Not measured: {measure.reason}")
                if part
            ),
        )
        for measure in every
    ]
    return Table("Every statistic of this page", ("statistic", "what it tells", "what it assumes"), rows)


def layer_tables(study: Study) -> list[Table]:
    """The layer statistics, one table for all that have the same places.

    Args:
        study: what was measured.
    """
    groups: dict[tuple[str, ...], list[LayerMeasure]] = {}
    for measure in study.layers.values():
        if measure.value is not None and np.ndim(measure.value) == 1:
            groups.setdefault(tuple(measure.places), []).append(measure)
    tables = []
    for places, measures in groups.items():
        header: list[str] = ["place"]
        columns: list[Array] = []
        for measure in measures:
            header.append(named(measure))
            columns.append(np.asarray(measure.value))
            if measure.error is not None:
                header.append("± s.e.")
                columns.append(np.asarray(measure.error))
        rows: list[tuple[str | float, ...]] = [
            (place, *(float(column[index]) for column in columns)) for index, place in enumerate(places)
        ]
        tables.append(Table(f"Along the depth: {places[0]} to {places[-1]}", header, rows))
    return tables


def training_table(study: Study) -> Table | None:
    """Loss and the mean over heads of every statistic at every checkpoint; None without checkpoints.

    Args:
        study: what was measured.
    """
    training = study.training
    if training is None:
        return None
    names = [name for name in study.heads if name in training.heads]
    rows = []
    for index, step in enumerate(training.steps):
        known = [training.heads[name][index] for name in names]
        means = [
            float(np.mean(value[np.isfinite(value)])) if np.isfinite(value).any() else float("nan")
            for value in known
        ]
        rows.append((int(step), float(training.loss[index]), *means))
    return Table(
        "Over training: loss, and the mean over heads",
        ("step", "loss, nats a token", *(named(study.heads[name]) for name in names)),
        rows,
    )


def strip_note(study: Study) -> str:
    """What the strips leave out, if anything.

    Args:
        study: what was measured.
    """
    shown, there = strip_size(study), len(study.strip_tokens)
    return f"The first {shown} of {there} tokens, to keep this page small." if shown < there else ""


def text(study: Study) -> str:
    """The findings as a table for a terminal.

    Args:
        study: what was measured.
    """
    lines = [("statistic", "lowest", "median", "highest")]
    missing = []
    for measure in study.heads.values():
        ends = None if measure.value is None else readings.extremes(measure.value)
        if measure.value is None or ends is None:
            missing.append(measure.title)
            continue
        low, high = (
            f"{readings.number(float(measure.value[place]))} (L{place[0]}H{place[1]})" for place in ends
        )
        middle = float(np.nanmedian(np.where(np.isfinite(measure.value), measure.value, np.nan)))
        lines.append((named(measure), low, readings.number(middle), high))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    layers, heads = readings.shape(study)
    told = [f"{study.name}: {layers} layers of {heads} heads", ""]
    told += ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
             for line in lines]  # fmt: skip
    if missing:
        told += ["", f"Not measured (the page says why): {', '.join(missing)}"]
    loss = readings.of_loss(study)
    return "\n".join([*told, "", loss] if loss else told)
