"""Pictures of how much memories hold, in the style of ``_support/plotting.py``: numbers computed elsewhere in, a figure out."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exptilt._support.plotting import COLOURS, caption, new_figure, whole_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from exptilt.memory.experiments.capacity import Capacity
    from exptilt.memory.experiments.cliff import Cliff

_RULES = {  # the rule's name, the load theory speaks of, and what it says
    "hebbian": ("Hebbian", 0.138, "theory, N → ∞: forgotten beyond 0.138"),
    "pseudo_inverse": ("pseudo-inverse", 1.0, "theory: no weights left from 1 on, every state stays"),
}


def _bars(axes: Any, x: Tensor, mean: Tensor, interval: Tensor, label: str) -> None:
    """A line through the means, with their intervals ``(..., 2)``; where there is none, without."""
    reach = torch.where(interval.isnan(), mean[:, None], interval)
    spread = torch.stack([mean - reach[:, 0], reach[:, 1] - mean]).clamp_min(0)
    axes.errorbar(
        x,
        mean,
        yerr=spread,
        color=COLOURS[0],
        marker="o",
        markersize=4,
        capsize=3,
        linewidth=1.2,
        label=label,
    )


def capacity(found: "Capacity") -> "Figure":
    """How many patterns were recalled against dimension, beside what the theorem promises."""
    d = torch.tensor(found.dimensions, dtype=torch.float64)
    order = d.argsort()
    d, mean, interval = d[order], found.mean[order], found.interval[order]
    bounds = [found.bounds[i] for i in order.tolist()]
    with new_figure(5.6, 3.8) as figure:
        axes: Any = figure.subplots()
        for seed in found.count[order].unbind(-1):
            axes.plot(d, seed, ".", color=COLOURS[0], alpha=0.3, markersize=5, zorder=1)
        _bars(axes, d, mean, interval, f"recalled: mean of {found.count.shape[1]} draws, 95 % interval")
        middle = mean.log().mean() - found.rate * d.mean()
        axes.plot(
            d,
            (middle + found.rate * d).exp(),
            color="0.4",
            linewidth=1.0,
            linestyle="--",
            label=f"$e^{{{found.rate:.2f}\\,d}}$",
        )
        promised = torch.tensor([bound.count for bound in bounds])
        axes.plot(
            d,
            promised,
            color=COLOURS[1],
            linewidth=1.2,
            label=r"theory's $\sqrt{p}\,c^{(d-1)/4}$ (filled: it holds)",
        )
        for x, y, bound in zip(d.tolist(), promised.tolist(), bounds, strict=True):
            axes.plot(
                x,
                y,
                "s",
                color=COLOURS[1],
                markersize=5,
                markerfacecolor=COLOURS[1] if bound.holds else "white",
            )
        stopped = found.limited[order].any(-1)
        if bool(stopped.any()):
            axes.plot(
                d[stopped],
                mean[stopped] * 1.3,
                "^",
                color=COLOURS[0],
                markersize=6,
                label="the search ended here: more",
            )
        whole_log(axes)
        axes.set_xticks(d.tolist() if len(d) <= 12 else d[:: len(d) // 8].tolist())
        caption(axes, "Random patterns that are all recalled", "dimension d", "patterns")
        axes.legend(loc="upper left")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.35)  # room for the legend
    return figure


def cliff(found: "Cliff") -> "Figure":
    """The share of patterns recalled, and the mean overlap, against the load."""
    loads = torch.tensor(found.loads, dtype=torch.float64)
    order = loads.argsort()
    loads = loads[order]
    name, at, words = _RULES[found.rule]
    with new_figure(5.6, 3.4) as figure:
        axes: Any = figure.subplots()
        for seed in found.fraction[order].unbind(-1):
            axes.plot(loads, seed, ".", color=COLOURS[0], alpha=0.3, markersize=5, zorder=1)
        many = f"mean of {found.fraction.shape[1]} networks, 95 % interval"
        _bars(
            axes,
            loads,
            found.mean[order],
            found.interval[order].clamp(0, 1),
            f"recalled (overlap > {found.threshold:g}): {many}",
        )
        axes.plot(
            loads,
            found.overlap.mean(-1)[order],
            color=COLOURS[2],
            linewidth=1.2,
            linestyle=":",
            marker="^",
            label="mean overlap",
        )
        axes.axvline(at, color=COLOURS[1], linewidth=1.2, linestyle="--", label=words)
        axes.set_ylim(-0.03, 1.03)
        caption(axes, f"Recall of random patterns, {name}, {found.units} units", "load P/N", "share")
        axes.legend(loc="lower left", frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
    return figure
