r"""Theorem 1 (THEORY B4), and how far it reaches.

Let h = N(μ, Σ), held still. Then g(η) = μ + Ση, and the update η ← η + g(η) = (1 + Σ)η + μ is affine. So

- a Gaussian law stays Gaussian, and a renormaliser that sets mean and covariance to Σ⁻¹μ and Σ⁻¹ makes
  N(Σ⁻¹μ, Σ⁻¹) of *any* Gaussian start, in one step: that law is the fixed point;
- even each point is fixed: 1 + Σ is symmetric and positive, so its inverse is the least-moving map that
  brings the covariance back. The same holds for any other target of the renormaliser: Σ⁻¹ is not special;
- any other law keeps its shape for ever, because skewness, kurtosis and all that no affine map changes stay
  as they were: no start that is not Gaussian ever gets there;
- a renormaliser that knows less than the full covariance does not lead there. Under batch norm the cloud
  turns to Σ's first eigenvector, as in the power method, and flattens; layer norm puts it on a sphere.

`theorem_one` runs all of this on samples and puts numbers to it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.plotting import COLOURS, new_figure
from exptilt.claims.experiments.arguments import check_several, check_whole
from exptilt.claims.experiments.starts import check_start, start
from exptilt.dynamics.flow import Flow
from exptilt.dynamics.observe.gaussianity import Gaussianity, gaussianity
from exptilt.dynamics.renormalizers import Whiten
from exptilt.families import Gaussian

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TheoremOneRow:
    """One start under one renormaliser.

    Attributes:
        start: name of the start.
        renormalizer: name of the renormaliser.
        mean_error: by step from 0, distance of the mean from Σ⁻¹μ, relative to the root mean square length of
            N(Σ⁻¹μ, Σ⁻¹), which is √(‖Σ⁻¹μ‖² + tr Σ⁻¹).
        covariance_error: by step, Frobenius distance of the covariance from Σ⁻¹, relative to the norm of Σ⁻¹.
        gaussian_p: by step, the least of the three p-values of Gaussianity, times three.
        drift: by step from 1, root mean square distance the points moved, relative to their root mean
            square length.
    """

    start: str
    renormalizer: str
    mean_error: tuple[float, ...]
    covariance_error: tuple[float, ...]
    gaussian_p: tuple[float, ...]
    drift: tuple[float, ...]


@dataclass(frozen=True)
class TheoremOne:
    """The results of every start under every renormaliser.

    Attributes:
        mean: ``(D,)``, Σ⁻¹μ.
        covariance: ``(D, D)``, Σ⁻¹.
        rows: one for each start and renormaliser.
    """

    mean: Tensor
    covariance: Tensor
    rows: tuple[TheoremOneRow, ...]

    def row(self, start: str, renormalizer: str = "whiten") -> TheoremOneRow:
        """The row of a start and a renormaliser.

        Args:
            start: its name.
            renormalizer: its name.
        """
        for row in self.rows:
            if (row.start, row.renormalizer) == (start, renormalizer):
                return row
        raise ArgumentError(
            f"there is no row {start!r}, {renormalizer!r}. Pass a start and a renormalizer of `rows`."
        )

    def plot(self) -> "Figure":
        """Distance from the fixed point's covariance, and Gaussianity, against step."""
        names = list(dict.fromkeys(row.start for row in self.rows))
        kinds = list(dict.fromkeys(row.renormalizer for row in self.rows))
        with new_figure(2.8 * len(kinds) + 0.6, 5.0) as figure:
            panels: Any = figure.subplots(2, len(kinds), sharex=True, sharey="row", squeeze=False)
            for row in self.rows:
                upper, lower = panels[:, kinds.index(row.renormalizer)]
                place = names.index(row.start)
                # Shifted sideways, because many lines coincide.
                steps = np.arange(len(row.covariance_error)) + 0.08 * (place - (len(names) - 1) / 2)
                style: Any = {"color": COLOURS[place % 6], "marker": "os^Dv"[place % 5], "label": row.start}
                style |= {"markersize": 4, "linewidth": 1.0}
                upper.plot(steps, np.maximum(row.covariance_error, 1e-17), **style)
                lower.plot(steps, np.maximum(row.gaussian_p, 1e-20), **style)
            for (upper, lower), kind in zip(panels.T, kinds, strict=True):
                upper.set(yscale="log", title=kind)
                lower.set(yscale="log", xlabel="step")
                lower.axhline(0.05, color="0.4", linewidth=0.8)
            panels[0, 0].set_ylabel("covariance: relative\ndistance from Σ⁻¹")
            panels[1, 0].set_ylabel("Gaussian? p-value\n(at least 10⁻²⁰ drawn; line: 0.05)")
            handles, labels = panels[0, 0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return figure


def theorem_one(
    mean: Tensor | None = None,
    covariance: Tensor | None = None,
    *,
    count: int = 2000,
    steps: int = 6,
    starts: tuple[str, ...] = ("fixed point", "gaussian", "laplace", "bimodal"),
    renormalizers: tuple[str, ...] = ("whiten", "batch", "layer"),
    seed: int = 0,
) -> TheoremOne:
    """Test Theorem 1 on samples.

    Args:
        mean: ``(D,)`` float64, μ; default (0.5, −0.5, 0.5, −0.5).
        covariance: ``(D, D)`` float64, Σ; default one with eigenvalues 0.5, 1, 1.5, 2 in general position.
        count: how many points.
        steps: how many.
        starts: "fixed point" draws from N(Σ⁻¹μ, Σ⁻¹), the others are those of `equilibrium_sweep`.
        renormalizers: "whiten" sets the mean and covariance of the theorem, the others are as in `Flow`.
        seed: of the draws.

    Example:
        >>> found = theorem_one()
        >>> found.row("gaussian").covariance_error[1] < 1e-12  # one step
        True
        >>> found.row("laplace").gaussian_p[-1] < 1e-6  # never
        True
    """
    check_several("theorem_one", starts=starts, renormalizers=renormalizers)
    check_whole("theorem_one", 1, count=count)
    check_whole("theorem_one", 0, steps=steps)
    for law in starts:
        if law != "fixed point":
            check_start(law)
    generator = torch.Generator().manual_seed(seed)
    if covariance is None:
        dimension = 4 if mean is None else mean.shape[-1]
        basis = torch.linalg.qr(torch.randn(dimension, dimension, dtype=torch.float64, generator=generator)).Q
        covariance = basis @ torch.diag(0.5 * torch.arange(1, dimension + 1, dtype=torch.float64)) @ basis.mT
        covariance = (covariance + covariance.mT) / 2
    if mean is None:
        mean = torch.tensor([0.5, -0.5] * covariance.shape[-1], dtype=torch.float64)[: covariance.shape[-1]]
    measure, inverse = Gaussian(mean, covariance), torch.linalg.inv(covariance)
    inverse = (inverse + inverse.mT) / 2
    goal = Gaussian(inverse @ mean, inverse)
    target = Whiten(goal.mean_vector, inverse)
    rows = []
    for name in starts:
        if name == "fixed point":  # a sample has its own mean and covariance: give it those of the law
            first = target(goal.sample((count,), generator=generator))
        else:
            first = 2 * start(name, (count, len(mean)), generator) + 1
        for kind in renormalizers:
            flow = Flow(target if kind == "whiten" else kind, patterns=measure)
            rows.append(_row(name, kind, flow, first, goal, steps))
    return TheoremOne(goal.mean_vector, inverse, tuple(rows))


def _row(name: str, kind: str, flow: Flow, points: Tensor, goal: Gaussian, steps: int) -> TheoremOneRow:
    mean, wanted = goal.mean_vector, goal.covariance_matrix
    length = (mean.square().sum() + wanted.trace()).sqrt()
    rows, drifts = [], []
    for step in range(steps + 1):
        if step:
            points, before = flow(points), points
            drifts.append(float((points - before).norm() / before.norm()))
        apart = torch.cov(points.mT, correction=0) - wanted
        errors = float((points.mean(0) - mean).norm() / length), float(apart.norm() / wanted.norm())
        rows.append((*errors, least_p(gaussianity(points))))
    means, covariances, chances = zip(*rows, strict=True)
    return TheoremOneRow(name, kind, means, covariances, chances, tuple(drifts))


def least_p(g: Gaussianity) -> float:
    """Bonferroni's p-value of the three tests together."""
    return min(1.0, 3 * float(torch.stack([g.skewness_p, g.kurtosis_p, g.sliced_p]).min()))
