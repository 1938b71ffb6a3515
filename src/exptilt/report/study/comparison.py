"""Two studies side by side: sentences on the heads that differ most surely, and a table of all statistics."""

import math
from dataclasses import dataclass

import numpy as np

from exptilt.lens import Study, compare
from exptilt.lens.studying.compare import most_different
from exptilt.report.page import Cell, Table
from exptilt.report.study.sentences import head_name, number, with_error


@dataclass(frozen=True)
class Against:
    """The part of a page that compares a study with another one."""

    name: str
    lead: str
    findings: list[tuple[str, str]]  # sentence, anchor
    table: Table


def page_part(study: Study, other: Study) -> Against:
    """Sentences and table on the differences of two studies, the first minus the second."""
    found = compare(study, other)
    same = study.shape == other.shape
    told = []
    for name, layer, head in most_different(study, other):
        d = found[name]
        assert d.by_head is not None
        assert d.head_error is not None
        values = [float(s.heads[name].value[layer, head]) for s in (study, other)]  # type: ignore[index]
        gap = with_error(float(d.by_head[layer, head]), float(d.head_error[layer, head]), d.unit)
        text = f"{head_name((layer, head)).capitalize()}: {d.title} {number(values[0])} against "
        told.append((f"{text}{number(values[1])}, a difference of {gap}.", f"L{layer}H{head}:{name}"))
    sure = {name for name, d in found.items() if d.head_error is not None and np.isfinite(d.head_error).any()}
    rows: list[list[Cell]] = []
    for name, d in found.items():
        gap = with_error(d.difference, d.error if math.isfinite(d.error) else math.nan)
        differing = d.differing()
        count = [f"{int(differing.sum())} of {differing.size}" if name in sure else "–"]
        unit = "" if not d.unit or d.title.endswith(d.unit) else f", {d.unit}"
        rows.append([f"{d.title}{unit}", *d.means, gap, *(count if sure else [])])
    note = (
        "Means over heads. A head counts as different if the difference exceeds two standard errors. "
        "Errors are taken over texts, as if the two models had read different texts; – where there are none."
    )
    header = ("statistic", study.name, other.name, "difference", *(["heads that differ"] if sure else []))
    layers, heads = other.shape
    lead = (
        "both have the same heads; the most certain differences come first."
        if same
        else (f"{other.name} has {layers} layers of {heads} heads, so only means over heads can be compared.")
    )
    return Against(other.name, lead, told, Table(f"{study.name} against {other.name}", header, rows, note))
