r"""Theorem 1 (THEORY B4), and how far it reaches.

Let h = N(μ, Σ), held still. Then g(η) = μ + Ση, and the update η ← η + g(η) = (1 + Σ)η + μ is affine. So

- a Gaussian law stays Gaussian, and a renormaliser that sets mean and covariance to Σ⁻¹μ and Σ⁻¹ makes
  N(Σ⁻¹μ, Σ⁻¹) of *any* Gaussian start, in one step: that law is the fixed point;
- even each point is fixed: 1 + Σ is symmetric and positive, so its inverse is the least-moving map that
  brings the covariance back. The same holds for any other target of the renormaliser: Σ⁻¹ is not special;
- any other law keeps its shape for ever, because skewness, kurtosis and all that no affine map changes stay
  as they were: no start that is not Gaussian ever gets there;
- a renormaliser that does not set the full covariance does not lead there. Under batch norm the cloud
  turns to Σ's first eigenvector, as in the power method, and flattens; layer norm puts it on a sphere.

`theorem_one` runs all of this on samples and puts numbers to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exptilt.claims.experiments.starts import start
from exptilt.dynamics.flow import Flow
from exptilt.dynamics.observe.gaussianity import Gaussianity, gaussianity
from exptilt.dynamics.renormalizers import Whiten
from exptilt.families import Gaussian


class TheoremOneRow(NamedTuple):
    """One start under one renormaliser, step by step: from 0, and the drift from 1."""

    start: str
    renormalizer: str
    mean_error: tuple[
        float, ...
    ]  # from Σ⁻¹μ, over the root mean square length √(‖Σ⁻¹μ‖² + tr Σ⁻¹) of the law
    covariance_error: tuple[float, ...]  # Frobenius distance from Σ⁻¹, over the norm of Σ⁻¹
    gaussian_p: tuple[float, ...]  # the least of the three p-values of Gaussianity, times three
    drift: tuple[float, ...]  # root mean square distance the points moved, over their root mean square length


class TheoremOne(NamedTuple):
    """Σ⁻¹μ, Σ⁻¹, and the results of every start under every renormaliser."""

    mean: Tensor
    covariance: Tensor
    rows: tuple[TheoremOneRow, ...]

    def row(self, start: str, renormalizer: str = "whiten") -> TheoremOneRow:
        """The row of a start and a renormaliser, by their names."""
        return next(row for row in self.rows if (row.start, row.renormalizer) == (start, renormalizer))


def theorem_one(*, count: int = 2000, steps: int = 6, seed: int = 0) -> TheoremOne:
    """Test Theorem 1 on samples, with μ = (0.5, −0.5, 0.5, −0.5) and a Σ of eigenvalues 0.5, 1, 1.5, 2.

    The starts are "fixed point", a sample of N(Σ⁻¹μ, Σ⁻¹), and "gaussian", "laplace" and "bimodal" as in
    `equilibrium_sweep`; the renormalisers "whiten", which sets the mean and covariance of the theorem,
    "batch" and "layer".

    Example:
        >>> found = theorem_one()
        >>> found.row("gaussian").covariance_error[1] < 1e-12  # one step
        True
        >>> found.row("laplace").gaussian_p[-1] < 1e-6  # never
        True
    """
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator)).Q
    covariance = basis @ torch.diag(0.5 * torch.arange(1, 5, dtype=torch.float64)) @ basis.mT
    covariance = (covariance + covariance.mT) / 2
    mean = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64)
    measure, inverse = Gaussian(mean, covariance), torch.linalg.inv(covariance)
    inverse = (inverse + inverse.mT) / 2
    goal = Gaussian(inverse @ mean, inverse)
    target = Whiten(goal.mean_vector, inverse)
    rows = []
    for name in ("fixed point", "gaussian", "laplace", "bimodal"):
        if name == "fixed point":  # set the mean and covariance of the sample to those of the law
            first = target(goal.sample((count,), generator=generator))
        else:
            first = 2 * start(name, (count, len(mean)), generator) + 1
        for kind in ("whiten", "batch", "layer"):
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
