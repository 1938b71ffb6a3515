"""H1 to H4: results of others about attention as a flow of points."""

import math
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from exptilt.claims.evidence import ROUNDING, Findings, axes, curve, dots, least, most, normals, note
from exptilt.claims.experiments.circle import metastable_counts
from exptilt.claims.ledger import Between, claim
from exptilt.tilting import attend


@claim(
    "H1",
    "On the circle at β = 5 points form three clusters",
    r"k^*=\text{argmax}_k\, k^2I_k(\beta),\qquad k^*(5)=3",
    "Bruno, Pasqualotto, Agazzi, arXiv 2410.23228",
    seeds=1,
)
def circle(seed: int, *, beta: Annotated[float, Between(0.5, 20)] = 5.0) -> Findings:
    """A nearly uniform law on the circle breaks into as many clusters as the wave number that grows fastest,
    k² I_k(β): three at β = 5, which stay for a long time.

    Experiment:
        Points evenly spaced but for noise of 0.01: clusters at time 40 in six runs, and the growth of single
        ripples against the formula.

    Example:
        >>> from exptilt.claims.experiments.circle import growth_rates
        >>> print(int(growth_rates(5.0, 8).argmax()) + 1)
        3
    """
    found = metastable_counts(beta=beta, count=300, seeds=6, seed=seed)
    agree = (found.counts == found.predicted).double().mean()
    off = (found.rate / found.rate_theory - 1).abs()
    yield most("growth of ripples over the formula, less 1", off, 1e-2, "measured")
    yield least("share of runs with as many clusters as predicted", agree, 0.5, "measured")
    yield note("clusters predicted", found.predicted)
    yield curve("formula", found.wave, found.rate_theory)
    yield dots("measured", found.wave, found.rate)
    yield axes("Growth of a ripple on the circle", "wave number", "rate")


@claim(
    "H2",
    "At β = γ log n attention turns from even to the token itself at γ = 1/(1−ρ)",
    r"\beta=\gamma\log n,\quad \langle x_i,x_j\rangle=\rho:\qquad \gamma^*=\frac1{1-\rho}",
    "arXiv 2510.05554",
    seeds=1,
)
def critical(seed: int, *, cosine: Annotated[float, Between(0.0, 0.9)] = 0.5) -> Findings:
    """For n points with one common cosine ρ and scores β = γ log n, a point gives itself the weight
    1/(1 + (n−1) n^{−γ(1−ρ)}), which tends to 0 below γ = 1/(1−ρ) and to 1 above.

    Experiment:
        Points with that cosine in n dimensions: the weight on the point itself by `attend`, and the γ at
        which it is a half, for growing n.

    Example:
        >>> n, rho, gamma = 64, 0.5, 3.0
        >>> x = torch.linalg.cholesky(torch.full((n, n), rho) + (1 - rho) * torch.eye(n))
        >>> weight = xt.attend(
        ...     x[None], x[None], torch.eye(n)[None], scale=gamma * torch.log(torch.tensor(64.0)).item()
        ... )
        >>> print(bool(weight.output[0].diagonal().min() > 0.8))
        True
    """
    sizes, gammas = (16, 64, 256), torch.linspace(0.5, 2, 31, dtype=torch.float64) / (1 - cosine)
    wrong, halves = 0.0, []
    for n in sizes:
        eye = torch.eye(n, dtype=torch.float64)
        x = torch.linalg.cholesky(cosine + (1 - cosine) * eye)
        weights = [
            float(attend(x[None, :1], x[None], eye[None], scale=float(g) * math.log(n)).output[0, 0, 0])
            for g in gammas
        ]
        theory = 1 / (1 + (n - 1) * n ** (-gammas * (1 - cosine)))
        wrong = max(wrong, float((torch.tensor(weights, dtype=torch.float64) - theory).abs().max()))
        halves.append(float(np.interp(0.5, weights, gammas)) * (1 - cosine))
        yield curve(f"{n} points", gammas, weights)
    yield most("weight on the point itself against the formula", wrong, 1e-9)
    yield most("γ of half the weight, times 1 − ρ, less 1, at 256 points", abs(halves[-1] - 1), 0.01, "guard")
    yield note("the same at 16 points", abs(halves[0] - 1))
    yield axes("Weight of a point on itself", "γ", "weight")


def _angles(angle: Tensor, beta: float) -> Tensor:
    """Velocities of angles ``(..., n)`` under attention on the circle without its normalizer."""
    apart = angle.unsqueeze(-2) - angle.unsqueeze(-1)
    return ((beta * apart.cos()).exp() * apart.sin()).mean(-1)


@claim(
    "H3",
    "The circle synchronises for β ≥ −0.16, and need not for β < −2/3",
    r"\dot\theta_i=\tfrac1n\sum_je^{\beta\cos(\theta_j-\theta_i)}\sin(\theta_j-\theta_i)",
    "arXiv 2507.22857",
    seeds=1,
)
def synchrony(seed: int, *, runs: Annotated[int, Between(4, 1000)] = 40) -> Findings:
    """Attention on the circle, without its normalizer, brings almost all starts to one point for β ≥ −0.16.
    For β < −2/3 it may not: three equal clusters a third of the circle apart are stable, because the slope
    e^{−β/2}(−½ − ¾β) of their interaction turns positive there.

    Experiment:
        Random starts of 12 points at β = −0.16 and 1: the share that ends in one point. Three clusters,
        disturbed a little: whether they come back at β = −0.6 and at −0.75; the slope by differentiation.

    Example:
        >>> slope = lambda beta: -0.5 - 0.75 * beta
        >>> print(slope(-0.6) < 0 < slope(-0.75))
        True
    """
    generator = torch.Generator().manual_seed(seed)
    start = 2 * math.pi * torch.rand(runs, 12, dtype=torch.float64, generator=generator)
    for beta in (-0.16, 1.0):
        angle = start
        for _ in range(4000):
            angle = angle + 0.1 * _angles(angle, beta)
        together = (torch.polar(torch.ones_like(angle), angle).mean(-1).abs() > 0.999).double().mean()
        yield least(f"β = {beta}: share of starts that end in one point", together, 1.0, "measured")
    third = torch.arange(12, dtype=torch.float64) % 3 * 2 * math.pi / 3
    kick = 0.01 * torch.randn(12, dtype=torch.float64, generator=generator)
    for beta, stays in ((-0.6, False), (-0.75, True)):
        angle, apart = third + kick, []
        for _ in range(3000):
            angle = angle + 0.1 * _angles(angle, beta)
            apart.append(float(torch.polar(torch.ones_like(angle), 3 * angle).mean().abs()))
        moment = float(torch.polar(torch.ones_like(angle), angle).mean().abs())
        name = f"β = {beta}: three clusters end in one point"
        yield most(name, moment, 0.1, "measured") if stays else least(name, moment, 0.9, "measured")
        yield curve(f"β = {beta}", range(0, 3000, 100), apart[::100])
    at = torch.tensor(2 * math.pi / 3, dtype=torch.float64)
    slope = torch.func.grad(lambda x: (-2 / 3 * x.cos()).exp() * x.sin())(at)
    yield most("slope of the interaction at a third of the circle, β = −2/3", slope.abs(), ROUNDING)
    yield axes(
        "Three clusters, disturbed: 1 while they are thirds of the circle, or one point",
        "step",
        "order of 3θ",
    )


@claim(
    "H4",
    "Where the norm stands sets the speed: Post-, Pre- and Peri-LN",
    r"\dot\theta=\frac1sP_\theta A:\qquad s=1\ (\text{Post}),\quad "
    r"s=r,\ \dot r=\langle\theta,A\rangle\ (\text{Pre}),"
    r"\quad s=r\|A\|,\ \dot r=\langle\theta,A\rangle/\|A\|\ (\text{Peri})",
    "arXiv 2510.22026, 2512.01868",
    seeds=1,
)
def speeds(seed: int, *, points: Annotated[int, Between(4, 500)] = 24) -> Findings:
    """Directions of tokens move alike under all three placements of the norm, but for a factor of speed: 1
    for Post-LN, one over the length r for Pre-LN, and one over r‖A‖ for Peri-LN. So Post-LN collapses
    exponentially, and the others, whose lengths grow, only like a power of time.

    Experiment:
        One small layer of each kind from the same states: velocity of the directions against the formula.
        Long runs from points in a half space: the distance from collapse, fitted by an exponential and by a
        power of time.

    Example:
        >>> x, move = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
        >>> unit = lambda y: y / y.norm(dim=-1, keepdim=True)
        >>> speed = (unit(x + 1e-6 * move) - unit(x)) / 1e-6
        >>> across = move - (move * unit(x)).sum(-1, keepdim=True) * unit(x)
        >>> print(torch.allclose(speed, across / x.norm(dim=-1, keepdim=True), atol=1e-4))
        True
    """
    x, lengths = normals(seed, (points, 4), (points, 1))
    unit = torch.nn.functional.normalize
    x = unit(x + torch.tensor([1.5, 0.0, 0.0, 0.0], dtype=x.dtype), dim=-1)
    r, small = 1 + lengths.abs(), 1e-6

    def attention(theta: Tensor) -> Tensor:
        return torch.softmax(theta @ theta.mT, -1) @ theta

    def across(theta: Tensor, move: Tensor) -> Tensor:
        return move - (move * theta).sum(-1, keepdim=True) * theta

    A = attention(x)
    size = A.norm(dim=-1, keepdim=True)
    moves = {"Post-LN": (x, A, 1.0), "Pre-LN": (r * x, A, r), "Peri-LN": (r * x, A / size, r * size)}
    for name, (state, write, slow) in moves.items():
        speed = (unit(state + small * write, dim=-1) - unit(state, dim=-1)) / small
        yield most(
            f"{name}: velocity of directions against the formula", (speed - across(x, A) / slow).abs(), 1e-5
        )
    for name in moves:
        state, gaps, times = x.clone(), [], []
        for step in range(1, 4001):
            theta = unit(state, dim=-1)
            A = attention(theta)
            write = unit(A, dim=-1) if name == "Peri-LN" else A
            state = unit(theta + 0.02 * A, dim=-1) if name == "Post-LN" else state + 0.02 * write
            if step % 200 == 0 and step <= (1000 if name == "Post-LN" else 4000):
                gaps.append(float(1 - (theta @ theta.mT).mean()))
                times.append(0.02 * step)
        t, y = np.array(times), np.log(np.maximum(gaps, 1e-15))
        left = [float(np.polyfit(u, y, 1, full=True)[1][0]) for u in (t, np.log(t))]
        better = left[0] / left[1] if name == "Post-LN" else left[1] / left[0]
        kind = (
            "an exponential over those by a power"
            if name == "Post-LN"
            else "a power of time over those by an exponential"
        )
        yield most(f"{name}: squares left by {kind}", better, 1.0, "measured")
        yield curve(name, t, np.exp(y))
    yield axes("Distance from collapse, 1 − mean cosine", "time", "distance", log_y=True)
