"""Spectra of curvature by layer over training, and the most influential examples, as one page.

Nothing is computed here but what a spectrum says of itself: its outermost nodes, its trace with the error of
the probes, and how much of it is negative. Texts are strangers': what does not print is spelled
out, and the page escapes the rest.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exptilt._support.errors import ArgumentError
from exptilt.curvature.estimates import SpectralDensity
from exptilt.curvature.influence import Influence
from exptilt.report import figures
from exptilt.report.page import Cell, Figure, Page, Section, Table, number, write_page
from exptilt.report.tokens import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Spectra = Mapping[float, Mapping[str, SpectralDensity]]
EXAMPLES = 5  # most helpful and most harmful texts on the page
LETTERS = 240  # shown of a text


@dataclass(frozen=True)
class Summary:
    """Summary of one spectrum: its ends, its trace with its standard error, the negative part of Σ |λ|."""

    largest: float
    smallest: float
    trace: float
    error: float
    negative: float


Summaries = Mapping[str, Summary]


def summary(spectrum: SpectralDensity) -> Summary:
    """The numbers of the page for the spectrum of one layer."""
    mean, nodes = spectrum.mean(lambda x: x), spectrum.nodes
    below, size = spectrum.mean(lambda x: (-x).clamp_min(0)), spectrum.mean(lambda x: x.abs())
    return Summary(
        float(nodes.max()),
        float(nodes.min()),
        float(mean.value) * spectrum.size,
        float(mean.standard_error) * spectrum.size,
        float(below.value) / max(float(size.value), 1e-300),
    )


def write_curvature(
    spectra: Spectra,
    folder: str | os.PathLike[str],
    *,
    influence: Influence | None = None,
    texts: Sequence[str] = (),
    title: str = "Curvature of a model",
    seed: int | None = 0,
    sources: Sequence[str] = (),
) -> Path:
    """Write a page about the curvature of a model: `index.html`, whole or not at all.

    Args:
        spectra: for each training step, the spectrum of each layer by its name:
            ``{step: {name: part.spectral_density() for name, part in curvature.layers().items()}}``.
        folder: where to write; made if it is not there.
        influence: of training texts on a test loss, from `xt.curvature.influence`; None for none.
        texts: the training texts, in the order of ``influence.scores``.
        title: of the page.
        seed: that the probes were drawn with.
        sources: where model and data came from, in words.

    Returns:
        The path of the page.
    """
    if not spectra or not all(spectra.values()):
        raise ArgumentError("write_curvature: spectra is empty. Pass {step: {layer: spectral_density(...)}}.")
    names = list(next(iter(spectra.values())))
    if any(list(each) != names for each in spectra.values()):
        raise ArgumentError("write_curvature: spectra has other layers at other steps. Pass the same ones.")
    if influence is not None and len(texts) != len(influence.scores):
        raise ArgumentError(
            f"write_curvature: texts has {len(texts)} texts, influence has {len(influence.scores)} scores. "
            "Pass one text for each."
        )
    found = {step: {name: summary(s) for name, s in each.items()} for step, each in sorted(spectra.items())}
    sections = [_over_training(found, names), _by_layer(spectra, found, names)]
    sections += [] if influence is None else [_examples(influence, texts)]
    last = found[max(found)]
    sharp = max(last, key=lambda name: last[name].largest)
    lead = (
        f"{len(names)} layers at {len(found)} moments of training. At the last, {plain(sharp)} is the "
        f"sharpest: its largest eigenvalue is {number(last[sharp].largest)}."
    )
    return write_page(Page(plain(title), lead, sections, seed, [plain(x) for x in sources]), folder)


def _over_training(found: Mapping[float, Summaries], names: Sequence[str]) -> Section:
    """The largest eigenvalue and the trace of every layer, by training step."""

    def lines(part: str) -> str:
        def paint(axes: "Axes") -> None:
            places = range(len(found))
            drawn = [getattr(x, part) for each in found.values() for x in each.values()]
            for at, name in enumerate(names):
                heights = [getattr(each[name], part) for each in found.values()]
                style = "-" if at < 3 else "--" if at < 6 else ":"
                axes.plot(places, heights, f"o{style}", color=figures.SERIES[at % 3], label=plain(name))
            axes.set_yscale("symlog", linthresh=_threshold(drawn), linscale=0.5)
            axes.set_xticks(list(places), [f"{step:g}" for step in found])
            axes.set(xlabel="training step")
            _plain_numbers(axes.yaxis)
            axes.legend(fontsize=6, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

        return figures.draw(f"training-{part}", paint, height=3.4)

    header = ("layer", *(f"step {step:g}" for step in found))
    rows: list[Sequence[Cell]] = [
        [plain(name), *(each[name].largest for each in found.values())] for name in names
    ]
    said = "of every layer at every training step, a line a layer"
    return Section(
        "Over training",
        (
            "The largest eigenvalue says how far a step may go before the loss turns up again; the trace is "
            "the sum of all eigenvalues.",
        ),
        (
            Figure(
                lines("largest"),
                f"The largest eigenvalue {said}.",
                "Largest eigenvalue, the largest node of Lanczos' method: at most the true one.",
            ),
            Figure(lines("trace"), f"The trace {said}.", "Trace. Its error is in the table below."),
            Table("Largest eigenvalue by layer and training step", header, rows, sortable=True),
        ),
    )


def _by_layer(spectra: Spectra, found: Mapping[float, Summaries], names: Sequence[str]) -> Section:
    """The nodes of every layer's spectrum at the first and the last step, and a table of the last."""
    steps = [min(spectra), max(spectra)][: len(spectra)]

    def paint(axes: "Axes") -> None:
        for shift, step in enumerate(steps):
            for at, name in enumerate(names):
                s = spectra[step][name]
                weights = s.weights.flatten().tolist()
                axes.scatter(
                    s.nodes.flatten().tolist(),
                    [at + 0.15 - 0.3 * shift] * len(weights),
                    s=[8 + 120 * w for w in weights],
                    color=figures.SERIES[shift],
                    alpha=0.7,
                    linewidths=0,
                    label=f"step {step:g}" if at == 0 else None,
                )
        ends = [end for step in steps for x in found[step].values() for end in (x.largest, x.smallest)]
        axes.set_xscale("symlog", linthresh=_threshold(ends), linscale=0.5)
        axes.set_yticks(range(len(names)), [plain(name)[-18:] for name in names], fontsize=7)
        axes.set(xlabel="eigenvalue")
        _plain_numbers(axes.xaxis)
        axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

    last = found[max(found)]
    rows = [
        (plain(name), spectra[max(found)][name].size, x.largest, x.smallest, x.trace, x.error, x.negative)
        for name, x in last.items()
    ]
    header = ("layer", "numbers", "largest", "smallest", "trace", "± of the trace", "negative part")
    return Section(
        "By layer",
        (
            "The diagonal block of each layer. A dot is a node of the quadrature, its area the part of the "
            "eigenvalues that it stands for: most of them are near 0, a few stand far out.",
        ),
        (
            Figure(
                figures.draw("spectra", paint, height=1.2 + 0.42 * len(names)),
                "Nodes of the spectrum of each layer on a line, at the first and the last training step.",
                "Spectra by layer, on a scale that is logarithmic away from 0.",
            ),
            Table(
                f"Spectra at step {max(found):g}",
                header,
                rows,
                "The ± is the standard error over probes plus the change with half the steps of Lanczos' "
                "method. The negative part is that of the sum of all |eigenvalues|.",
                sortable=True,
            ),
        ),
    )


def _examples(influence: Influence, texts: Sequence[str]) -> Section:
    """The training texts that help the test loss most, and those that hurt it most."""
    order = influence.scores.argsort(descending=True).tolist()
    scores = influence.scores.tolist()
    helps = [place for place in order if scores[place] > 0][:EXAMPLES]
    hurts = [place for place in reversed(order) if scores[place] < 0][:EXAMPLES]

    def table(caption: str, places: Sequence[int]) -> Table:
        rows = [(f"text {place}", scores[place], _cut(texts[place])) for place in places]
        return Table(caption, ("text", "loss without it", "its beginning"), rows)

    status, residual = influence.solution.status, float(influence.solution.residual)
    return Section(
        "Which examples matter",
        (
            f"How much the loss on other texts would rise, to first order, if one of {len(texts)} training "
            f"texts were left out. The linear system behind it: {status.name.lower().replace('_', ' ')}, "
            f"relative residual {number(residual)}.",
        ),
        [
            table(caption, places)
            for caption, places in (("Texts that help most", helps), ("Texts that hurt most", hurts))
            if places
        ],
    )


def _cut(text: str) -> str:
    shown = plain(text)
    return shown if len(shown) <= LETTERS else shown[: LETTERS - 1] + "…"


def _threshold(drawn: Sequence[float]) -> float:
    """Where a logarithmic axis turns linear around 0: a power of ten, a hundredth of the largest number."""
    largest = max(map(abs, drawn))
    return float(10.0 ** math.floor(math.log10(largest) - 2)) if largest > 0 else 1.0


def _plain_numbers(axis: object) -> None:
    """Labels such as 0.01 on a logarithmic axis; matplotlib's own would be formulas."""
    from matplotlib.axis import Axis
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if isinstance(axis, Axis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
        axis.set_minor_formatter(NullFormatter())
