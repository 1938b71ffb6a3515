"""Pictures of how much memories hold: numbers computed elsewhere in, a figure out."""

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
_LINE: dict[str, Any] = {"linewidth": 1.2}


def _measured(axes: Any, x: Tensor, by_seed: Tensor, mean: Tensor, interval: Tensor, label: str) -> None:
    """A dot for each seed, a line through the means, and their intervals ``(..., 2)`` where there are any."""
    for seed in by_seed.unbind(-1):
        axes.plot(x, seed, ".", color=COLOURS[0], alpha=0.3, markersize=5, zorder=1)
    reach = torch.where(interval.isnan(), mean[:, None], interval)
    spread = torch.stack([mean - reach[:, 0], reach[:, 1] - mean]).clamp_min(0)
    style = {"color": COLOURS[0], "marker": "o", "markersize": 4, "capsize": 3, **_LINE}
    axes.errorbar(x, mean, yerr=spread, label=label, **style)


def capacity(found: "Capacity") -> "Figure":
    """How many patterns were recalled against dimension, beside what the theorem promises."""
    d = torch.tensor(found.dimensions, dtype=torch.float64)
    order = d.argsort()
    d, mean, count = d[order], found.mean[order], found.count[order]
    bounds = [found.bounds[i] for i in order.tolist()]
    stopped = found.limited[order].any(-1)
    with new_figure(5.6, 3.8) as figure:
        axes: Any = figure.subplots()
        label = f"recalled: mean of {count.shape[1]} draws, 95 % interval"
        _measured(axes, d, count, mean, found.interval[order], label)
        fitted = (mean.log().mean() + found.rate * (d - d.mean())).exp()
        axes.plot(d, fitted, color="0.4", lw=1.0, ls="--", label=f"$e^{{{found.rate:.2f}\\,d}}$")
        promised = [bound.count for bound in bounds]
        label = r"theory's $\sqrt{p}\,c^{(d-1)/4}$ (filled: it holds)"
        axes.plot(d, promised, color=COLOURS[1], label=label, **_LINE)
        for x, bound in zip(d.tolist(), bounds, strict=True):
            face = COLOURS[1] if bound.holds else "white"
            axes.plot(x, bound.count, "s", color=COLOURS[1], markersize=5, markerfacecolor=face)
        if bool(stopped.any()):
            label = "the search ended here: more"
            axes.plot(d[stopped], mean[stopped] * 1.3, "^", color=COLOURS[0], markersize=6, label=label)
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
    loads, fraction = loads[order], found.fraction[order]
    name, at, words = _RULES[found.rule]
    with new_figure(5.6, 3.4) as figure:
        axes: Any = figure.subplots()
        many = f"mean of {fraction.shape[1]} networks, 95 % interval"
        label = f"recalled (overlap > {found.threshold:g}): {many}"
        _measured(axes, loads, fraction, found.mean[order], found.interval[order].clamp(0, 1), label)
        overlap = found.overlap.mean(-1)[order]
        axes.plot(loads, overlap, color=COLOURS[2], ls=":", marker="^", label="mean overlap", **_LINE)
        axes.axvline(at, color=COLOURS[1], ls="--", label=words, **_LINE)
        axes.set_ylim(-0.03, 1.03)
        caption(axes, f"Recall of random patterns, {name}, {found.units} units", "load P/N", "share")
        axes.legend(loc="lower left", frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
    return figure
