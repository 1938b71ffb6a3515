"""Pictures of flows, drawn by matplotlib without `pyplot`, so that no global state of it is touched.

Every function takes numbers that were computed elsewhere and returns a figure: ``figure.savefig("name.png")`` writes it.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.intervals import Interval, mean_interval
from exptilt._support.plotting import COLOURS, caption, new_figure, whole_log

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    from exptilt.dynamics.experiments.circle import MetastableCounts
    from exptilt.dynamics.experiments.divergence import DivergenceRate
    from exptilt.dynamics.experiments.equal_cosine import EqualCosine
    from exptilt.dynamics.experiments.sweep import Sweep
    from exptilt.dynamics.experiments.theorem_one import TheoremOne
    from exptilt.dynamics.trajectory import Trajectory


def _lines(axes: Any, x: Tensor, values: Tensor, colour: str, label: str) -> None:
    """One line for each item of the batch, ``values (T, ...)``; the first carries the label."""
    flat = values.reshape(len(x), -1).cpu()
    for place, column in enumerate(flat.unbind(-1)):
        axes.plot(
            x,
            column,
            color=colour,
            alpha=1.0 if flat.shape[1] == 1 else 0.6,
            label=label if place == 0 else None,
        )


def _band(axes: Any, x: Tensor, interval: Interval, colour: str, label: str) -> None:
    axes.plot(x, interval.mean, color=colour, label=label)
    axes.fill_between(x, interval.low, interval.high, color=colour, alpha=0.2, linewidth=0)


def _logarithmic(axes: Any, *values: Tensor) -> None:
    """A logarithmic axis where positive values span more than three decades."""
    every = torch.cat([value.flatten() for value in values])
    every = every[every.isfinite()]
    if len(every) and 0 < 1e3 * float(every.min()) < float(every.max()):
        axes.set_yscale("log")


def _say(axes: Any, words: str) -> None:
    """Words in place of lines."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="0.4")
    axes.set_yticks([])


def _filled(path: "Trajectory") -> Tensor:
    """Eigenvalues of the dimensions that the cloud fills, as `gaussianity` counts them; NaN for the others, which are rounding."""
    spectrum = path.spectrum[..., :8]
    filled = torch.arange(spectrum.shape[-1]) < path.gaussianity.rank.unsqueeze(-1)
    return torch.where(filled & spectrum.isfinite().cpu(), spectrum.cpu(), torch.nan)


def trajectory(path: "Trajectory") -> "Figure":
    """Six panels against time."""
    t, g = path.time, path.gaussianity
    with new_figure(10.5, 5.6) as figure:
        panels: Any = figure.subplots(2, 3, sharex=True)
        a, b, c, d, e, f = panels.flat
        _lines(a, t, path.log_normalizer, COLOURS[0], "mean G")
        _logarithmic(a, path.log_normalizer)
        caption(a, "Log-normalizer, mean over points", "")
        for name, colour in (("largest", COLOURS[1]), ("mean", COLOURS[0]), ("smallest", COLOURS[2])):
            _lines(b, t, getattr(path.norms, name), colour, name)
        b.ticklabel_format(useOffset=False)
        low, high = b.get_ylim()
        if high - low < 0.02 * high:  # constant but for rounding
            b.set_ylim(0, 1.5 * high)
        _logarithmic(b, path.norms.smallest, path.norms.largest)
        caption(b, "Lengths of the points", "")
        spectrum = _filled(path)
        if bool(spectrum.isnan().all()):
            _say(c, "one point: no spread")
        else:
            for values in spectrum.unbind(-1):
                _lines(c, t, values, COLOURS[0], "")
            for line in c.get_lines():
                line.set_label(None)
            top, least = float(spectrum.nan_to_num(0.0).max()), float(spectrum.nan_to_num(torch.inf).min())
            c.set_yscale("log")
            c.set_ylim(min(least / 2, top / 20), 2 * top)
        caption(c, "Spectrum of the covariance", "")
        if bool(g.kurtosis.isnan().all()):
            _say(d, "nothing to test: one point, or too few")
        else:
            _lines(d, t, g.kurtosis, COLOURS[0], "kurtosis over Gaussian − 1")
            _lines(d, t, g.sliced / 0.385 - 1, COLOURS[1], "sliced A² over Gaussian − 1")
            d.axhline(0, color="0.4", linewidth=0.8)
            d.set_yscale("symlog", linthresh=1)
        caption(d, "Gaussianity: 0 is Gaussian", "time")
        _lines(e, t, path.clusters.count.double(), COLOURS[0], "count")
        _lines(e, t, path.clusters.effective, COLOURS[1], "effective")
        whole_log(e)
        e.set_ylim(0.8, max(2.5, 1.3 * float(path.clusters.count.max())))
        caption(e, "Clusters", "time")
        if bool(path.growth.expansion.isnan().all()):
            _say(f, "continuous: no steps" if path.continuous else "no steps")
        else:
            _lines(f, t, path.growth.expansion, COLOURS[1], "ascent")
            _lines(f, t, path.growth.contraction, COLOURS[0], "renormaliser")
            f.axhline(1, color="0.4", linewidth=0.8)
        caption(f, "Growth of lengths in a step", "time")
        for axes in (b, d, e, f):
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
    return figure


def film(states: Tensor, titles: list[str], *, interval: int) -> "FuncAnimation":
    """A film of states ``(K, N, 2)`` or ``(K, N, 3)`` with a title each."""
    solid = states.shape[-1] == 3
    points = states.detach().cpu().double().numpy()
    with new_figure(5.0, 5.0) as figure:
        from matplotlib.animation import FuncAnimation

        axes: Any = figure.add_subplot(projection="3d" if solid else None)
        # Coloured by where they start, so that one sees who went where.
        colour = np.arctan2(points[0, :, 1], points[0, :, 0])
        dots = axes.scatter(
            *points[0].T, c=colour, cmap="hsv", s=14, alpha=0.7, vmin=-np.pi, vmax=np.pi, linewidths=0
        )
        reach = 1.05 * np.abs(points).max()
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach))
        if solid:
            axes.set_zlim(-reach, reach)
        else:
            axes.set_aspect("equal")
        title = axes.set_title(titles[0])

        def draw(frame: int) -> tuple[Any, Any]:
            if solid:
                dots._offsets3d = tuple(points[frame].T)
            else:
                dots.set_offsets(points[frame])
            title.set_text(titles[frame])
            return dots, title

        return FuncAnimation(figure, draw, frames=len(points), interval=interval, blit=False)


def theorem_one(found: "TheoremOne") -> "Figure":
    """Distance from the fixed point's covariance, and Gaussianity, against step."""
    names = list(dict.fromkeys(row.start for row in found.rows))
    kinds = list(dict.fromkeys(row.renormalizer for row in found.rows))
    marks = ("o", "s", "^", "D", "v")
    with new_figure(2.8 * len(kinds) + 0.6, 5.0) as figure:
        panels: Any = figure.subplots(2, len(kinds), sharex=True, sharey="row", squeeze=False)
        for row in found.rows:
            column, place = kinds.index(row.renormalizer), names.index(row.start)
            # A little to the side of each other, for many of them agree.
            steps = np.arange(len(row.covariance_error)) + 0.08 * (place - (len(names) - 1) / 2)
            style: Any = {
                "color": COLOURS[place % 6],
                "marker": marks[place % 5],
                "markersize": 4,
                "linewidth": 1.0,
                "label": row.start,
            }
            panels[0, column].plot(steps, np.maximum(row.covariance_error, 1e-17), **style)
            panels[1, column].plot(steps, np.maximum(row.gaussian_p, 1e-20), **style)
        for column, kind in enumerate(kinds):
            panels[0, column].set_yscale("log")
            panels[1, column].set_yscale("log")
            panels[1, column].axhline(0.05, color="0.4", linewidth=0.8)
            caption(panels[0, column], kind, "")
            panels[1, column].set_xlabel("step")
        panels[0, 0].set_ylabel("covariance: relative\ndistance from Σ⁻¹")
        panels[1, 0].set_ylabel("Gaussian? p-value\n(at least 10⁻²⁰ drawn; line: 0.05)")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def sweep(found: "Sweep") -> "Figure":
    """Effective clusters and Gaussianity against step, a column for each renormaliser, a line for each other setting."""
    if not found.settings:
        raise ArgumentError("Sweep.plot: no settings are left to draw.")
    kinds = list(dict.fromkeys(s.renormalizer for s in found.settings))
    varied = [
        name
        for name in ("start", "count", "dimension", "beta")
        if len({getattr(s, name) for s in found.settings}) > 1
    ] or ["start"]
    words = {"start": "{}", "count": "N={}", "dimension": "D={}", "beta": "β={:g}"}
    labels = list(dict.fromkeys(_words(s, varied, words) for s in found.settings))
    with new_figure(2.6 * len(kinds) + 1.6, 5.2) as figure:
        panels: Any = figure.subplots(2, len(kinds), sharex=True, sharey="row", squeeze=False)
        short: set[int] = set()
        for setting in found.settings:
            column = kinds.index(setting.renormalizer)
            label = _words(setting, varied, words)
            colour = COLOURS[labels.index(label) % 6]
            _band(panels[0, column], setting.steps, _of_logs(setting.effective, 1.0), colour, label)
            _band(panels[1, column], setting.steps, _of_logs(setting.sliced), colour, label)
            if bool(setting.sliced.isnan().any()):
                short.add(column)
        for column, kind in enumerate(kinds):
            whole_log(panels[0, column])
            panels[0, column].set_ylim(bottom=0.8)
            panels[1, column].set_yscale("log")
            panels[1, column].set_ylim(bottom=0.2)
            panels[1, column].axhline(0.385, color="0.3", linewidth=0.9, linestyle="--")
            # Most happens early: 0 and the first steps get room.
            panels[1, column].set_xscale("symlog", linthresh=10)
            panels[1, column].set_xlim(left=0)
            caption(panels[0, column], kind, "")
            panels[1, column].set_xlabel("step")
        for column in short:
            reason = "a line ends where\na cloud is one point"
            panels[1, column].text(
                0.97,
                0.16,
                reason,
                transform=panels[1, column].transAxes,
                ha="right",
                va="bottom",
                fontsize=7,
                color="0.4",
            )
        panels[0, 0].set_ylabel("effective clusters\n(geometric mean, 95%, cut at 1)")
        panels[1, 0].set_ylabel("sliced A² (dashed: Gaussian)\n(geometric mean, 95%)")
        handles, names = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names)))
    return figure


def _of_logs(values: Tensor, least: float = 0.0) -> Interval:
    """Geometric mean over seeds with Student's interval of the logarithms, cut at the least value there can be; NaN where a seed is."""
    found = mean_interval(values.double().log())
    there = ~values.isnan().any(-1)
    return Interval(*(torch.where(there, x.exp().clamp_min(least), torch.nan) for x in found))


def _words(setting: Any, varied: list[str], words: dict[str, str]) -> str:
    return ", ".join(words[name].format(getattr(setting, name)) for name in varied)


def divergence(found: "DivergenceRate") -> "Figure":
    """Lengths against step, and measured against predicted slope."""
    with new_figure(9.0, 3.3) as figure:
        left, middle, right = figure.subplots(1, 3)
        some = found.lengths[:, :: max(1, found.lengths.shape[1] // 40)]
        left.plot(some, color=COLOURS[0], linewidth=0.8, alpha=0.6)
        caption(left, "Patterns held still: ‖η‖", "step")
        middle.scatter(found.theory, found.slope, s=14, color=COLOURS[0], alpha=0.6, linewidths=0)
        ends = [float(found.theory.min()), float(found.theory.max())]
        middle.plot(ends, ends, color="0.4", linewidth=0.9, zorder=0)
        caption(middle, "Growth of ‖η‖ in a step", "theory: step·‖x‖", "measured")
        right.semilogy(found.moving, color=COLOURS[1])
        caption(right, "Patterns moving along: rms length", "step")
        right.text(
            0.05, 0.9, f"last factor {found.moving_factor:.4f}\ntheory {found.moving_theory:g}", transform=right.transAxes, va="top"
        )  # fmt: skip
    return figure


def equal_cosine(found: "EqualCosine") -> "Figure":
    """Mean cosine against time."""
    with new_figure(5.4, 3.6) as figure:
        axes = figure.subplots()
        axes.plot(found.time, found.theory, color="0.2", linewidth=3.5, alpha=0.35, label="theory")
        axes.plot(found.time, found.continuous, color=COLOURS[0], label="orthogonal points, continuous")
        axes.plot(
            found.time,
            found.stepped,
            color=COLOURS[1],
            linestyle=":",
            label=f"orthogonal points, step {found.step:g}",
        )
        for place, dimension in enumerate(found.dimensions):
            axes.plot(
                found.time,
                found.random[place],
                color=COLOURS[(2 + place) % 6],
                linestyle="--",
                label=f"random points, D={dimension}",
            )
        caption(axes, "Mean cosine", "time")
        axes.legend()
    return figure


def circle(found: "MetastableCounts") -> "Figure":
    """Growth rates beside theory, counts over seeds, and where the points of the first seed are."""
    with new_figure(10.0, 3.3) as figure:
        left, middle = figure.add_subplot(1, 3, 1), figure.add_subplot(1, 3, 2)
        left.plot(
            found.wave,
            found.rate_theory,
            color="0.3",
            linewidth=1.0,
            label=r"$k^2 I_k(\beta) / (\beta I_0(\beta))$",
        )
        left.plot(found.wave, found.rate, "o", color=COLOURS[0], markersize=5, label="measured")
        left.legend()
        caption(left, f"Growth of a ripple, β = {found.beta:g}", "wave number k")
        counts = range(1, int(found.counts.max()) + 2)
        middle.bar(list(counts), [found.tally.get(count, 0) for count in counts], color=COLOURS[0], width=0.6)
        middle.axvline(
            found.predicted,
            color=COLOURS[1],
            linewidth=1.2,
            linestyle="--",
            label=f"predicted: {found.predicted}",
        )
        middle.set_xticks(list(counts))
        middle.locator_params(axis="y", integer=True)
        middle.legend()
        caption(middle, f"Clusters at time {found.time:g}", "count", "seeds")
        right: Any = figure.add_subplot(1, 3, 3)
        angles = found.angles[0]
        right.add_patch(_ring())
        right.scatter(
            angles.cos(), angles.sin(), s=60, color=COLOURS[0], alpha=max(0.01, 5 / len(angles)), linewidths=0
        )
        right.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
        right.grid(False)
        right.set_title("The points of the first seed")
    return figure


def _ring() -> Any:
    from matplotlib.patches import Circle

    return Circle((0, 0), 1.0, fill=False, color="0.7", linewidth=0.8)
