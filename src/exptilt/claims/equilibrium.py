"""B4 to B6: the Gaussian equilibrium, with patterns held still or moving, and fixed points."""

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from exptilt.claims.evidence import Findings, axes, curve, dots, least, most, normals, note, same
from exptilt.claims.experiments.equal_cosine import equal_cosine
from exptilt.claims.experiments.repelling import collapse_times, cumulant_growth, growth_theory
from exptilt.claims.experiments.sweep import equilibrium_sweep
from exptilt.claims.experiments.theorem_one import theorem_one
from exptilt.claims.ledger import FAMILY, POSTER, TEMPLATE, Between, claim
from exptilt.dynamics import fixed_point, monotone_operator

RENORMALIZERS = ("sphere", "layer", "batch", "whiten")


@claim(
    "B4",
    "A Gaussian law is an equilibrium under full renormalisation",
    r"\mathcal N(\Sigma^{-1}\mu,\Sigma^{-1})\ \text{is fixed by}\ "
    r"\mathrm{RN}\circ(\eta\mapsto\eta+\mu+\Sigma\eta),"
    r"\ \ \mathrm{RN}\text{ setting mean and full covariance}",
    f"{POSTER}, Theorem 1 (informal)",
    printed=r"p_{eq}=\mathcal N(\Sigma^{-1}\mu,\Sigma^{-1})\ \text{is an equilibrium of RN, such as layer or"
    r" batch normalization, with attention}",
)
def theorem(
    seed: int,
    *,
    points: Annotated[int, Between(100, 100_000)] = 2000,
    steps: Annotated[int, Between(1, 100)] = 6,
) -> Findings:
    """With h = N(μ,Σ) held still, N(Σ⁻¹μ, Σ⁻¹) is a fixed point of the ascent followed by a renormaliser that
    sets mean and full covariance; every Gaussian start reaches it in one step, because the update is
    affine. For the same reason no other start ever becomes Gaussian; the theorem says nothing about these.
    Batch and layer norm, which the poster names as examples, do not lead to the fixed point.

    Experiment:
        Samples under three renormalisers from four starts: distance of mean and covariance from those of
        the theorem, how far points move at the fixed point, and tests of Gaussianity.

    Example:
        >>> from exptilt.claims.experiments.theorem_one import theorem_one
        >>> found = theorem_one()
        >>> print(
        ...     found.row("gaussian").covariance_error[1] < 1e-12, found.row("laplace").gaussian_p[-1] < 1e-6
        ... )
        True True
    """
    found = theorem_one(count=points, steps=steps, seed=seed)
    still, one = found.row("fixed point"), found.row("gaussian")
    yield most("at the fixed point: mean", still.mean_error, 1e-9)
    yield most("at the fixed point: covariance", still.covariance_error, 1e-9)
    yield most("at the fixed point: how far points move", still.drift, 1e-9)
    yield most("Gaussian start, one step: covariance", one.covariance_error[1], 1e-9)
    for law in ("laplace", "bimodal"):  # the theorem says nothing about such starts
        yield note(f"{law} start, after the last step: p-value of Gaussianity", found.row(law).gaussian_p[-1])
    yield most("batch norm: covariance", found.row("gaussian", "batch").covariance_error[-1], 0.1, "reach")
    yield most("layer norm: covariance", found.row("gaussian", "layer").covariance_error[-1], 0.1, "reach")
    for row in (one, found.row("gaussian", "batch"), found.row("gaussian", "layer")):
        error = [max(x, 1e-16) for x in row.covariance_error]
        yield curve(f"{row.start}, {row.renormalizer}", range(steps + 1), error)
    yield axes("Covariance of the points against Σ⁻¹", "step", "relative distance", log_y=True)


@claim(
    "B5a",
    "Moving points: is their equilibrium Gaussian?",
    r"\eta_i\leftarrow"
    r"\mathrm{RN}\Big(\eta_i+\sum_j\mathrm{softmax}_j(\beta\langle\eta_j,\eta_i\rangle)\,\eta_j\Big)"
    r"\ \longrightarrow\ \text{few clusters; whitening: } D+1",
    f"{FAMILY}, section 3.1 (“the fixed point should be a gaussian distribution”), for an empirical measure",
    question=True,
)
def moving(
    seed: int,
    *,
    points: Annotated[int, Between(20, 5000)] = 200,
    dimensions: Annotated[int, Between(2, 32)] = 4,
    beta: Annotated[float, Between(0.01, 20)] = 1.0,
    steps: Annotated[int, Between(20, 5000)] = 300,
) -> Findings:
    """Self-attention and a norm, without weights, over the moving points: does any cloud become Gaussian?
    None does. At β = 1 points collapse into a few clusters, one on the sphere, two under batch norm, D + 1
    at the corners of a simplex under whitening; at a small β they stay apart, and stay as far from a
    Gaussian as they were.

    Experiment:
        Heavy-tailed and light-tailed starts under four renormalisers. An end is called Gaussian if at least
        half of the effective clusters are left and the excess kurtosis has at least halved. Clusters are
        counted.

    Example:
        >>> from exptilt.claims.experiments.sweep import equilibrium_sweep
        >>> found = equilibrium_sweep(
        ...     counts=(60,),
        ...     dimensions=(2,),
        ...     starts=("laplace",),
        ...     renormalizers=("whiten",),
        ...     seeds=3,
        ...     steps=150,
        ... )
        >>> print(found[0].final)  # three runs, three clusters each
        {3: 3}
    """
    sweep = equilibrium_sweep(
        counts=(points,),
        dimensions=(dimensions,),
        betas=(beta,),
        starts=("laplace", "uniform"),
        renormalizers=RENORMALIZERS,
        seeds=1,
        steps=steps,
        measure_every=max(1, steps // 20),
        seed=seed,
    )
    ends = {kind: [s.path for s in sweep if s.renormalizer == kind] for kind in RENORMALIZERS}
    for kind, runs in ends.items():
        apart = torch.stack([x[-1] / x[0] for x in (run.clusters.effective for run in runs)])[:, 0]
        nearer = torch.stack([x[-1] / x[0] for x in (run.gaussianity.kurtosis for run in runs)])[:, 0].abs()
        gaussian = (apart >= 0.5) & (nearer.nan_to_num(9) <= 0.5)
        yield least(f"{kind}: share of starts that end Gaussian", gaussian.double().mean(), 1.0, "measured")
        yield note(f"{kind}: part of the clusters left", apart.max())
        yield note(f"{kind}: clusters at the end", max(int(run.clusters.count[-1]) for run in runs))
        yield curve(kind, runs[0].steps, runs[0].clusters.effective[:, 0])
    corners = max(abs(int(run.clusters.count[-1]) - dimensions - 1) for run in ends["whiten"])
    tails = ends["whiten"][0].gaussianity.kurtosis  # of the Laplace start
    yield note("whiten: largest difference from D + 1", corners)
    yield note("whiten, Laplace start: kurtosis at the start", tails[0], signed=True)
    yield note("whiten, Laplace start: kurtosis nearest to a Gaussian's", tails.abs().nan_to_num(1e9).min())
    yield axes("Effective clusters, from a Laplace start", "step", "clusters", log_y=True)


@claim(
    "B5b",
    "A continuous law that moves: the Gaussian is fixed, and repels",
    r"\kappa_k\leftarrow\Big(1+\frac{k\beta^{k-1}}{1+\beta}\Big)\kappa_k+O(\kappa^2),\qquad "
    r"t_{\text{collapse}}\approx\frac{\log N}{2\log(1+3\beta^2/(1+\beta))}",
    f"{FAMILY}, last question of section 3.1 (“if we replaced an empirical distribution of points with an "
    "non-discrete distribution, would we eventually converge to Gaussian fixed point distribution?”)",
)
def repelling(
    seed: int,
    *,
    beta: Annotated[float, Between(0.05, 0.8)] = 0.5,
    runs: Annotated[int, Between(4, 1000)] = 40,
) -> Findings:
    """The draft asks whether a continuous law, in place of points, converges to a Gaussian. Under whitening
    the Gaussian is a fixed point, but every cumulant beyond the second grows at each step, by
    1 + kβᵏ⁻¹/(1+β) for the order k: no law converges to it unless it is Gaussian already. This is also
    Theorem 1 with h moving along. N points, which begin at cumulants of about 1/√N, stay near a Gaussian for
    a time that grows as log N.

    Experiment:
        One step by quadrature in 1 to 3 dimensions, orders 3 to 6, β from 0.05 to 2, from laws next to a
        Gaussian: the growth of the cumulant against the formula. Points on a line from Gaussian starts: the
        step at which skewness or excess kurtosis passes one half, for 64, 256 and 1024 points, and its slope
        in log N over the one predicted.

    Example:
        >>> from exptilt.claims.experiments.repelling import cumulant_growth
        >>> print(round(cumulant_growth(3, 1.0, 2), 3))  # 1 + 3/2
        2.5
    """
    orders, betas, counts = (3, 4, 5, 6), (0.05, 0.1, 0.5, 1.0, 2.0), (64, 256, 1024)
    wrong, slowest = 0.0, math.inf
    for d in (1, 2, 3):
        for b in betas:
            for k in orders:
                found, wanted = cumulant_growth(k, b, d, seed=seed), growth_theory(k, b)
                wrong, slowest = max(wrong, abs(found / wanted - 1)), min(slowest, found)
    times = np.nanmean(collapse_times(counts, beta, runs=runs, seed=seed), 1)
    slope = float(np.polyfit(np.log(counts), times, 1)[0]) * 2 * math.log(growth_theory(3, beta))
    yield most("growth of cumulants over the formula, less 1", wrong, 2e-3, "measured")
    yield least("smallest growth of a cumulant in a step, less 1", slowest - 1, 0.0, "measured")
    off_by = "slope of the time to collapse in log N, over the one predicted, less 1"
    yield most(off_by, abs(slope - 1), 0.5, "measured")
    line = np.linspace(0.05, 2, 60)
    yield from (curve(f"order {k}", line, [growth_theory(k, b) for b in line]) for k in orders)
    for k in orders:
        yield dots("" if k > 3 else "by quadrature", betas, [cumulant_growth(k, b, 1) for b in betas])
    yield axes("Growth of a cumulant in one step: above 1, away from the Gaussian", "β", "factor", log_y=True)


@claim(
    "B6",
    "Equilibria, the ODE limit, and when a fixed point is unique",
    r"x=f(x):\ \ dx=(1-J)^{-1}\,\partial f;\qquad \dot\eta=D\mathrm{RN}\,\nabla G(\eta);\qquad "
    r"\tfrac12(J+J')<1\Rightarrow\text{unique}",
    f"{TEMPLATE}, section 2.2; {FAMILY}, on the DEQ interpretation",
)
def equilibrium(seed: int, *, patterns: Annotated[int, Between(3, 100)] = 6) -> Findings:
    """A fixed point of the layer has an implicit derivative, which needs none of the steps that led to it; as
    the step goes to 0 the flow becomes an ordinary differential equation on the constraint of the norm; and
    if (J + J')/2 < 1 everywhere, the fixed point is unique.

    Experiment:
        Fixed points of attention over patterns: implicit derivatives against differences. Points with equal
        cosines on the sphere, whose equation is known: the continuous flow, and that its error in steps
        falls with their size. At a small β the condition holds and all starts end in one place; at a large β
        the condition fails, and starts end in several places.

    Example:
        >>> x = torch.randn(6, 3, dtype=torch.float64)
        >>> f = lambda s: xt.Empirical(x).mean(0.1 * s)
        >>> found = xt.dynamics.fixed_point(f, torch.randn(4, 3, dtype=torch.float64))
        >>> print(xt.dynamics.monotone_operator(f, found.value).holds, float(found.value.std(0).max()) < 1e-9)
        True True
    """
    x, starts, direction = normals(seed, (patterns, 3), (64, 3), (patterns, 3))

    def layer(keys: Tensor, beta: float) -> Callable[[Tensor], Tensor]:
        return lambda state: torch.softmax(beta * state @ keys.mT, -1) @ keys

    def solved(keys: Tensor) -> Tensor:
        return fixed_point(layer(keys, 0.4), starts[:1]).value

    implicit = torch.func.jvp(solved, (x,), (direction,))[1]
    h = 1e-5
    differences = (solved(x + h * direction) - solved(x - h * direction)) / (2 * h)
    wide = float(torch.cdist(x, x).max()) ** 2  # β Cov[x] is at most β times a quarter of this
    soft, sharp = layer(x, 2 / wide), layer(x, 200 / wide)
    ends = fixed_point(soft, starts).value
    many = fixed_point(sharp, starts, solver="picard", throw=False).value
    near = torch.cat([starts, ends])
    coarse, fine = (equal_cosine(count=6, time=2.0, samples=11, substeps=n) for n in (4, 8))
    yield same("implicit derivative against differences", implicit, differences, 1e-6)
    yield most("continuous flow against its equation", fine.continuous_error, 1e-6)
    yield most("error with half the step over that before", fine.stepped_error / coarse.stepped_error, 0.6)
    yield least("small β: margin of the condition", monotone_operator(soft, near).margin, 0.0)
    yield most("small β: how far apart the ends are", (ends - ends.mean(0)).norm(dim=-1), 1e-6)
    yield most("large β: margin of the condition", monotone_operator(sharp, starts).margin.min(), 0.0)
    yield least("large β: how far apart the ends are", (many - many.mean(0)).norm(dim=-1).max(), 0.1)
    yield curve("equation", fine.time, fine.theory)
    yield dots("continuous flow", fine.time, fine.continuous)
    yield dots("flow in steps", coarse.time, coarse.stepped)
    yield axes("Mean cosine of points with equal cosines", "time", "cosine")
