"""One small example of attention, with every statistic: keys in the plane, one query direction, growing inverse temperature.

    G(βu) = log Σ_j e^{β<k_j,u>},   p_j = e^{β<k_j,u> − G},   effective number of keys = e^{H(p)}

At β = 0 every key counts the same and e^H = N. As β grows the measure tilts towards the direction u, passes from cluster to cluster, and
ends on the one key that lies farthest along u. All numbers come from one call of `attend` with the queries β₁u, β₂u, … (and one more for
the mass of each key), with keys as values, in float64.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from exptilt.attention import attend
from exptilt.report import figures
from exptilt.report.page import Figure, Formula, Page, Section, Table, number, write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Cluster centres, spreads and sizes: a big cluster in the middle, a smaller one farther along u, three keys farthest out. So the measure
# changes its mind twice as β grows.
CLUSTERS = (((0.0, 0.0), 0.45, 40), ((-1.8, 1.2), 0.30, 15), ((2.0, 0.6), 0.20, 12), ((2.0, 2.5), 0.12, 3))
ANGLE = math.radians(20.0)
SHOWN = (0.2, 1.2, 8.0)


@dataclass(frozen=True)
class Example:
    """The numbers of the page.

    Attributes:
        seed: of the keys.
        keys: ``(key, 2)``.
        direction: ``(2,)``, the unit vector u.
        beta: ``(query,)``, inverse temperatures, growing.
        output: ``(query, 2)``, the mean key ∇G(βu).
        log_normalizer, entropy, score_mean, score_variance, score_max: ``(query,)``.
        shown: ``(3,)``, indices into `beta` of the inverse temperatures that are drawn.
        key_mass: ``(3, key)``, the mass of each key at those.
    """

    seed: int
    keys: NDArray[np.float64]
    direction: NDArray[np.float64]
    beta: NDArray[np.float64]
    output: NDArray[np.float64]
    log_normalizer: NDArray[np.float64]
    entropy: NDArray[np.float64]
    score_mean: NDArray[np.float64]
    score_variance: NDArray[np.float64]
    score_max: NDArray[np.float64]
    shown: NDArray[np.int64]
    key_mass: NDArray[np.float64]

    @property
    def effective_keys(self) -> NDArray[np.float64]:
        """e^H: how many equal keys would be as uncertain."""
        return np.exp(self.entropy)


def compute(*, seed: int = 0, points: int = 121) -> Example:
    """Draw the keys and call `attend`.

    Args:
        seed: of the keys.
        points: how many inverse temperatures, spaced evenly in log β from 0.02 to 40.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.cat(
        [
            torch.tensor(centre, dtype=torch.float64) + spread * torch.randn(size, 2, generator=generator, dtype=torch.float64)
            for centre, spread, size in CLUSTERS
        ]
    )
    direction = torch.tensor([math.cos(ANGLE), math.sin(ANGLE)], dtype=torch.float64)
    beta = torch.cat([torch.logspace(math.log10(0.02), math.log10(40.0), points, dtype=torch.float64), torch.tensor(SHOWN).double()])
    beta = beta.unique(sorted=True)
    shown = torch.searchsorted(beta, torch.tensor(SHOWN).double())

    query = (beta[:, None] * direction)[None]  # (head = 1, query, dim)
    swept = attend(query, keys[None], keys[None], scale=1.0)
    # key_mass sums over queries; a batch of single queries keeps them apart
    drawn = attend(query[0, shown][:, None, None], keys.expand(3, 1, -1, -1), keys.expand(3, 1, -1, -1), scale=1.0, key_mass=True)
    if drawn.key_mass is None:
        raise RuntimeError("attend(key_mass=True) returned no key_mass")
    return Example(
        seed=seed,
        keys=keys.numpy(),
        direction=direction.numpy(),
        beta=beta.numpy(),
        output=swept.output[0].numpy(),
        log_normalizer=swept.log_normalizer[0].numpy(),
        entropy=swept.entropy[0].numpy(),
        score_mean=swept.score_mean[0].numpy(),
        score_variance=swept.score_variance[0].numpy(),
        score_max=swept.score_max[0].numpy(),
        shown=shown.numpy(),
        key_mass=drawn.key_mass[:, 0].numpy(),
    )


def residuals(example: Example) -> list[tuple[str, float]]:
    """What should be zero and how far from zero it is: each statistic checked against others that came by another way.

    Args:
        example: the numbers.
    """
    mass, at = example.key_mass, example.shown
    log_mass = np.log(np.where(mass > 0, mass, 1.0))
    log_beta = np.log(example.beta)
    # The slope of G over log β is the mean score, the slope of that is variance + mean; central differences on the even grid are good to
    # about (step)², so the comparison is of the integral: trapezoids of the mean score against the rise of G.
    rise = np.diff(example.log_normalizer)
    area = np.diff(log_beta) * (example.score_mean[1:] + example.score_mean[:-1]) / 2
    correction = np.diff(log_beta) ** 2 / 12 * np.diff(example.score_variance + example.score_mean)
    return [
        ("Σ mass − 1", float(np.abs(mass.sum(1) - 1).max())),
        ("output − Σ mass · key", float(np.abs(example.output[at] - mass @ example.keys).max())),
        ("H + Σ mass · log mass", float(np.abs(example.entropy[at] + (mass * log_mass).sum(1)).max())),
        ("score mean − <q, output>", float(np.abs(example.score_mean - example.beta * (example.output @ example.direction)).max())),
        ("score variance − Σ mass · (score − mean)²", float(np.abs(example.score_variance[at] - _variance(example)).max())),
        ("score maximum − max <q, key>", float(np.abs(example.score_max - example.beta * (example.keys @ example.direction).max()).max())),
        ("rise of G − ∫ score mean d log β", float(np.abs(rise - area + correction).max())),
    ]


def _variance(example: Example) -> NDArray[np.float64]:
    score = example.beta[example.shown, None] * (example.keys @ example.direction)
    mean = (example.key_mass * score).sum(1, keepdims=True)
    return (example.key_mass * (score - mean) ** 2).sum(1)


def draw_keys(example: Example, which: int) -> str:
    """The keys in the plane, each as large as its mass, with the mean key.

    Args:
        example: the numbers.
        which: 0, 1 or 2, the inverse temperature to show.
    """
    keys, mass, at = example.keys, example.key_mass[which], example.shown[which]

    def paint(axes: "Axes") -> None:
        axes.scatter(keys[:, 0], keys[:, 1], s=5, color=figures.INK, alpha=0.45, linewidths=0)
        axes.scatter(keys[:, 0], keys[:, 1], s=900 * mass, color=figures.SERIES[0], alpha=0.5, linewidths=0)
        x, y = -2.9, -1.6
        tip = (x + 1.2 * example.direction[0], y + 1.2 * example.direction[1])
        axes.annotate("", tip, (x, y), arrowprops={"arrowstyle": "->", "color": figures.INK, "lw": 1.3})
        axes.text(x, y + 0.4, "query")
        axes.plot(*example.output[at], marker="+", markersize=13, markeredgewidth=2.2, color=figures.SERIES[1])
        axes.set_aspect("equal")
        axes.set_xlim(-3.2, 3.4)
        axes.set_ylim(-2.0, 3.2)
        axes.set_title(f"β = {example.beta[at]:g}")

    return figures.draw(f"keys-{which}", paint, width=4.0, height=3.3)


def draw_curves(example: Example, name: str, title: str, curves: dict[str, NDArray[np.float64]], *, ticks: Sequence[float] = ()) -> str:
    """Curves over β, with marks where the keys are drawn.

    Args:
        example: the numbers.
        name: of the figure.
        title: above it.
        curves: ``(query,)`` each, by its name in the legend.
        ticks: of a logarithmic vertical axis; none for a linear one.
    """

    def paint(axes: "Axes") -> None:
        for (text, values), colour in zip(curves.items(), figures.SERIES, strict=False):
            axes.plot(example.beta, values, color=colour, label=text)
            axes.plot(example.beta[example.shown], values[example.shown], "o", color=colour, markersize=4.5)
        axes.set_xscale("log")
        axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        if ticks:
            axes.set_yscale("log")
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_yticks([], minor=True)
        axes.set_xlabel("inverse temperature β")
        axes.set_title(title)
        if len(curves) > 1:
            axes.legend()

    return figures.draw(name, paint)


def table(example: Example) -> Table:
    """The statistics at the inverse temperatures that are drawn.

    Args:
        example: the numbers.
    """
    columns = {
        "log-normalizer G": example.log_normalizer,
        "entropy H, nats": example.entropy,
        "effective keys e^H": example.effective_keys,
        "score mean": example.score_mean,
        "score variance": example.score_variance,
        "score maximum": example.score_max,
    }
    rows: list[tuple[str | float, ...]] = [(name, *(float(value) for value in values[example.shown])) for name, values in columns.items()]
    rows.append(("largest key mass", *(float(value) for value in example.key_mass.max(1))))
    header = ("statistic", *(f"β\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{beta:g}" for beta in example.beta[example.shown]))
    return Table("Attention statistics at three inverse temperatures", header, rows, "The score of a key is β<key, u>.")


def layout(example: Example) -> Page:
    """The page.

    Args:
        example: the numbers.
    """
    count, at, along = len(example.keys), example.shown, example.keys @ example.direction
    effective = [f"{value:.1f}" for value in example.effective_keys[at]]
    pictures = [
        Figure(
            draw_keys(example, which),
            f"{count} keys in four clusters; discs show attention at β = {example.beta[at[which]]:g}. Effective number of keys: {keys}.",
            f"{keys} effective keys of {count}. Disc area: mass of the key. Cross: the output.",
        )
        for which, keys in enumerate(effective)
    ]
    peak = example.beta[int(example.score_variance.argmax())]
    curves = [
        Figure(
            draw_curves(
                example,
                "normalizer",
                "log-normalizer G and maximum score",
                {"G": example.log_normalizer, "maximum": example.score_max},
                ticks=(0.1, 1, 10, 100),
            ),
            f"G starts at log {count} and grows into the maximum score as β grows.",
            f"G starts at log {count} = {math.log(count):.3f} and ends as the maximum score: a soft maximum.",
        ),
        Figure(
            draw_curves(example, "effective", "effective number of keys e^H", {"e^H": example.effective_keys}, ticks=(1, 3, 10, 30, 70)),
            f"The effective number of keys falls from {count} towards 1 as β grows.",
            f"From all {count} keys towards a single one. Where the curve rests, one cluster holds the mass.",
        ),
        Figure(
            draw_curves(
                example,
                "mean",
                "score mean and maximum, per unit of β",
                {"mean / β": example.score_mean / example.beta, "maximum / β": example.score_max / example.beta},
            ),
            f"The mean score over β rises from {along.mean():.2f} to the maximum {along.max():.2f}.",
            "How far along u the output lies; it never falls, since its slope is a variance.",
        ),
        Figure(
            draw_curves(example, "variance", "score variance = Fisher information", {"variance": example.score_variance}),
            f"The score variance is near zero at first and largest at β = {peak:.2g}.",
            "qᵀ∇²G(q)q, the Fisher information along the query: large where clusters, and in the end single keys, compete.",
        ),
    ]
    sections = [
        Section(
            "The measure tilts",
            (
                f"{count} keys lie in the plane in four clusters. The query points along u; its length β, the inverse temperature, grows. "
                "Attention weighs key k by e^(β<k,u>) and returns the mean key.",
            ),
            (Formula("G(q) = log Σⱼ exp <kⱼ, q>\noutput = ∇G(q),   covariance = ∇²G(q)"), *pictures),
        ),
        Section("Its statistics", ("All of these come out of the same sweep over the keys as the output.",), (*curves, table(example))),
        Section(
            "Do the numbers agree?",
            ("Each statistic against others that were computed another way. The last line compares with an integral by trapezoids with end "
             "correction, so its error is that of the grid.",),
            (Table("What should be zero", ("identity", "largest deviation"), residuals(example)),),
        ),
    ]  # fmt: skip
    return Page(
        title="Attention tilts the measure of the keys",
        lead="One query, growing: the log-normalizer of attention and everything that follows from it.",
        sections=sections,
        seed=example.seed,
        sources=(f"{count} synthetic keys: Gaussian clusters drawn from the seed below. No data was read.",),
    )


def write(example: Example, folder: str | os.PathLike[str]) -> Path:
    """Write the page.

    Args:
        example: the numbers.
        folder: where `index.html` goes.
    """
    return write_page(layout(example), folder)


def text(example: Example) -> str:
    """The table of the page for a terminal.

    Args:
        example: the numbers.
    """
    shown = table(example)
    cells = [list(shown.header), *([cell if isinstance(cell, str) else number(cell) for cell in row] for row in shown.rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(shown.header))]
    lines = [
        line[0].ljust(widths[0]) + "".join("  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in cells
    ]
    return "\n".join([shown.caption, *lines])
