r"""The classical cliff: recall of random patterns by a Hebbian network as the load P/N grows.

Started at a stored pattern, the network settles close to it while the load is low; beyond α_c ≈ 0.138 (Amit,
Gutfreund, Sompolinsky 1985, N → ∞) it drifts away for good. The rule: a pattern x is *recalled* if its
overlap m = ⟨σ, x⟩/N with the state σ reached at the end exceeds a threshold. At α_c theory has m ≈ 0.967
just before the jump to about 0.35, so anything between tells the two apart; the default is 0.9. In a finite
network the jump is smeared out: some patterns are recalled above α_c, some lost below it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exptilt._support.checks import choice, number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.intervals import mean_interval
from exptilt._support.plotting import COLOURS, caption, measured, new_figure
from exptilt._support.progress import track
from exptilt.memory.binary.classical import ClassicalHopfield

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_RULES = {  # name of the rule, the load of theory, and its label in the plot
    "hebbian": ("Hebbian", 0.138, "theory, N → ∞: forgotten beyond 0.138"),
    "pseudo_inverse": ("pseudo-inverse", 1.0, "theory: no weights left from 1 on, every state stays"),
}


@dataclass(frozen=True)
class Cliff:
    """Recall by load and seed.

    Args:
        loads: P/N.
        fraction: ``(loads, seeds)``, the share of patterns recalled.
        overlap: ``(loads, seeds)``, the mean overlap.
        units: N.
        threshold: of the overlap, above which a pattern counts as recalled.
        rule: the learning rule of the networks.
    """

    loads: tuple[float, ...]
    fraction: Tensor
    overlap: Tensor
    units: int
    threshold: float
    rule: str

    @property
    def mean(self) -> Tensor:
        """``(loads,)``: the share recalled, mean over seeds."""
        return self.fraction.mean(-1)

    @property
    def interval(self) -> Tensor:
        """``(loads, 2)``: 95 % interval of `mean`, over seeds of one network each; NaN for one seed."""
        return torch.stack(mean_interval(self.fraction)[1:], -1)

    def plot(self) -> "Figure":
        """Share recalled and overlap against the load, with the load at which an infinite network forgets."""
        loads = torch.tensor(self.loads, dtype=torch.float64)
        order = loads.argsort()
        loads, fraction = loads[order], self.fraction[order]
        name, at, words = _RULES[self.rule]
        with new_figure(5.6, 3.4) as figure:
            axes: Any = figure.subplots()
            many = f"mean of {fraction.shape[1]} networks, 95 % interval"
            label = f"recalled (overlap > {self.threshold:g}): {many}"
            measured(axes, loads, fraction, self.mean[order], self.interval[order].clamp(0, 1), label)
            overlap = self.overlap.mean(-1)[order]
            axes.plot(
                loads, overlap, color=COLOURS[2], ls=":", marker="^", label="mean overlap", linewidth=1.2
            )
            axes.axvline(at, color=COLOURS[1], ls="--", label=words, linewidth=1.2)
            axes.set_ylim(-0.03, 1.03)
            caption(axes, f"Recall of random patterns, {name}, {self.units} units", "load P/N", "share")
            axes.legend(loc="lower left", frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
        return figure


def classical_cliff(
    loads: Sequence[float] = (0.10, 0.13, 0.14, 0.15, 0.16, 0.18),
    *,
    units: int = 1000,
    seeds: int = 3,
    threshold: float = 0.9,
    rule: str = "hebbian",
    update: str = "asynchronous",
    seed: int = 0,
) -> Cliff:
    """Measure the share of random ±1 patterns that a network recalls when started at them.

    Args:
        loads: P/N, how many patterns for each unit.
        units: N.
        seeds: networks for each load.
        threshold: of the overlap, above which a pattern counts as recalled.
        rule: ``hebbian`` or ``pseudo_inverse``.
        update: ``asynchronous`` or ``synchronous``.
        seed: of the first network.
    """
    whole("classical_cliff", "units", units)
    whole("classical_cliff", "seeds", seeds)
    choice("classical_cliff", "rule", rule, ("hebbian", "pseudo_inverse"))
    if not len(loads):
        raise ArgumentError("classical_cliff: loads is empty. Pass at least one number > 0.")
    for load in loads:
        number("classical_cliff", "a load", load, above=0)
    fraction = torch.zeros(len(loads), seeds, dtype=torch.float64)
    overlap = torch.zeros_like(fraction)
    for i, j in track([(i, j) for i in range(len(loads)) for j in range(seeds)], "cliff"):
        generator = torch.Generator().manual_seed(seed + 1000 * i + j)
        shape = (max(1, round(loads[i] * units)), units)
        x = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
        network = getattr(ClassicalHopfield, rule)(x)
        end = network.retrieve(x, update=update, throw=False, generator=generator).value
        m = (end * x).mean(-1)
        fraction[i, j], overlap[i, j] = (m > threshold).double().mean(), m.mean()
    return Cliff(tuple(loads), fraction, overlap, units, threshold, rule)
