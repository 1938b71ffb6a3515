"""B1 to B3 and B7: attention with a skip connection climbs G and spreads points; norms contract again."""

from typing import Annotated, Any

import torch

from exptilt.claims.evidence import (
    ROUNDING,
    Findings,
    axes,
    covariance_of,
    curve,
    dots,
    least,
    most,
    normals,
    note,
    off,
    same,
)
from exptilt.claims.experiments.divergence import divergence_rate
from exptilt.claims.exponential_family import Dimensions, Points
from exptilt.claims.ledger import FAMILY, POSTER, TEMPLATE, Between, claim
from exptilt.dynamics import Flow, Whiten
from exptilt.tilting import log_normalizer


@claim(
    "B1",
    "The residual step climbs G",
    r"\eta_j\leftarrow\eta_j+\nabla G(\eta_j)\quad\text{at all } j \text{ at once}",
    f"{FAMILY}, below equation 7; {POSTER}, Gaussian equilibrium",
)
def step(seed: int, *, points: Points = 40, dimensions: Dimensions = 4) -> Findings:
    """Attention added to its input, the residual step η ← η + ∇G(η), is a step of length one of gradient
    ascent on G, taken at all queries at once. As G is convex, with patterns held still the step raises G by
    at least ‖∇G‖².

    Experiment:
        One step of the flow against the gradient of G by automatic differentiation; all points at once
        against each alone; the rise of G, its first order, and the same with patterns that move.

    Example:
        >>> x, eta = torch.randn(40, 4), torch.randn(10, 4)
        >>> moved = xt.dynamics.Flow(None, patterns=x)(eta)
        >>> print(torch.allclose(moved - eta, xt.Empirical(x).mean(eta), atol=1e-5))
        True
    """
    x, eta = normals(seed, (points, dimensions), (12, dimensions))
    flow = Flow(None, patterns=x)
    moved = flow(eta)
    start = eta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(log_normalizer(start[None], x[None], scale=1.0).sum(), start)
    alone = torch.cat([flow(one[None]) for one in eta])
    before, after = (log_normalizer(y[None], x[None], scale=1.0)[0] for y in (eta, moved))
    path = flow.run(eta, 12, measure_every=1, progress=False)
    free = Flow(None).run(eta, 12, measure_every=1, progress=False)
    yield same("step less ∇G", moved - eta, slope)
    yield same("all at once against one at a time", moved, alone)
    yield least("rise of G, less ‖∇G‖²", after - before - slope.square().sum(-1), -ROUNDING)
    yield least("least rise of the mean of G in 12 steps", path.log_normalizer.diff(), 0.0)
    yield curve("patterns held still", path.steps, path.log_normalizer)
    yield curve("patterns moving along", free.steps, free.log_normalizer)
    yield axes("G climbs, patterns held still or moving along", "step", "mean G", log_y=True)


@claim(
    "B2",
    "Without a norm, points diverge along extreme points",
    r"\|\eta_t\|/t\to\|x_n\|\ \text{ along an extreme point } x_n,\quad "
    r"\text{patterns moving along: } \|\eta_{t+1}\|/\|\eta_t\|\to 2",
    f"{FAMILY}, below equation 7 (“would ultimately cause divergence to infinity”)",
)
def divergence(
    seed: int,
    *,
    points: Points = 100,
    patterns: Annotated[int, Between(3, 400)] = 20,
    dimensions: Annotated[int, Between(1, 32)] = 3,
    steps: Annotated[int, Between(60, 5000)] = 400,
) -> Findings:
    """Without renormalisation the ascent diverges. With patterns held still each point ends up growing by
    ‖x_n‖ a step along one pattern, an extreme point of their hull; patterns that move along double at each
    step.

    Experiment:
        Points diverge for several hundred steps: growth of their length in the last quarter against the
        length of the pattern they follow, and how far that pattern is from the hull of the others.

    Example:
        >>> from exptilt.claims.experiments.divergence import divergence_rate
        >>> found = divergence_rate()
        >>> print(bool((found.error < 1e-3).all()), bool((found.extreme > 0).all()))
        True True
    """
    found = divergence_rate(count=points, patterns=patterns, dimension=dimensions, steps=steps, seed=seed)
    some = found.lengths[:, :4]
    yield most("growth of ‖η‖ against ‖x_n‖", found.error, 1e-2)
    yield least("distance of x_n from the hull of the others", found.extreme, 1e-9)
    yield least("final length over the first", found.lengths[-1] / found.lengths[0], 10.0)
    yield most("factor a step, patterns moving, less 2", abs(found.moving_factor - 2), 1e-3)
    yield from (curve("", range(len(some)), some[:, i]) for i in range(some.shape[1]))
    yield axes("Lengths of four points, patterns held still", "step", "‖η‖")


@claim(
    "B3",
    "Norms contract what attention expands",
    r"\mathrm{RN}\in\{\text{layer},\ \text{batch},\ \text{whiten},\ \text{sphere}\}:\quad "
    r"\frac{\|\eta+\nabla G\|}{\|\eta\|}>1,\quad \frac{\|\mathrm{RN}(\cdot)\|}{\|\cdot\|}<1",
    f"{FAMILY}, section 3.1 (“contraction step”); {POSTER}, abstract; {TEMPLATE}, section 2.2",
)
def contraction(
    seed: int, *, points: Points = 200, dimensions: Annotated[int, Between(2, 32)] = 4
) -> Findings:
    """Layer norm (each point), batch norm (each coordinate), whitening (mean and covariance) and projection
    to the sphere each keep their constraint exactly, and at every step contract the cloud that the ascent
    has expanded.

    Experiment:
        From Gaussian points, 20 steps under each: the constraint, and the factors by which the ascent and the
        renormaliser after it multiply the size of the cloud.

    Example:
        >>> path = xt.dynamics.Flow("layer").run(torch.randn(200, 4), 5, progress=False)
        >>> print(bool((path.growth.expansion[1:] > 1).all()), bool((path.growth.contraction[1:] < 1).all()))
        True True
    """
    x, mean, root = normals(
        seed, (points + 3 * dimensions, dimensions), (dimensions,), (dimensions, dimensions)
    )
    target = covariance_of(root)
    kinds: dict[str, Any] = {name: name for name in ("layer", "batch", "sphere")}
    kinds["whiten"] = Whiten(mean, target)
    for name, kind in kinds.items():
        y = Flow(kind)(x)
        path = Flow(kind).run(y, 20, measure_every=1, progress=False)
        if name == "whiten":
            broken = max(off(y.mean(0), mean), off(torch.cov(y.mT, correction=0), target))
        elif name == "sphere":
            broken = off(y.norm(dim=-1), torch.ones(len(y), dtype=y.dtype))
        else:
            axis = 0 if name == "batch" else 1
            broken = max(float(y.mean(axis).abs().max()), float((y.var(axis, correction=0) - 1).abs().max()))
        steps, grown = path.steps[1:], path.growth
        yield most(f"{name}: constraint", broken, 1e-9)
        yield least(f"{name}: expansion by the ascent", grown.expansion[1:], 1.0)
        yield most(f"{name}: contraction by the norm", grown.contraction[1:], 1.0)
        yield curve(f"{name}: ascent", steps, grown.expansion[1:])
        yield dots(f"{name}: norm", steps, grown.contraction[1:])
    yield axes("Factors of size in each step", "step", "factor", log_y=True)


@claim(
    "B7",
    "With the measure held still, the step spreads points apart",
    r"D(\eta+\nabla G(\eta))=1+\mathrm{Cov}\succeq1\ \Rightarrow\ \|f(a)-f(b)\|\ge\|a-b\|",
    f"{FAMILY}, section 3.1 (“the attention layer spreads apart the points”)",
)
def spreads(seed: int, *, points: Points = 40, dimensions: Dimensions = 4) -> Findings:
    """With h held still, the step η + ∇G(η) has the Jacobian 1 + Cov, which is at least 1: no two points come
    nearer to each other. It is the norm afterwards that brings points together.

    Experiment:
        Least eigenvalue of the Jacobian by automatic differentiation; all pairs of 60 points before and after
        a step; the same with a projection to the sphere after the step.

    Example:
        >>> x, eta = torch.randn(40, 4), torch.randn(30, 4)
        >>> moved = xt.dynamics.Flow(None, patterns=x)(eta)
        >>> print(bool((torch.pdist(moved) > torch.pdist(eta)).all()))
        True
    """
    x, eta = normals(seed, (points, dimensions), (60, dimensions))
    flow = Flow(None, patterns=x)
    slopes = torch.func.vmap(torch.func.jacrev(lambda y: y + torch.softmax(x @ y, 0) @ x))(eta)
    before, after = torch.pdist(eta), torch.pdist(flow(eta))
    held = torch.pdist(Flow("sphere", patterns=x)(torch.nn.functional.normalize(eta, dim=-1)))
    on_sphere = torch.pdist(torch.nn.functional.normalize(eta, dim=-1))
    yield least("least eigenvalue of the Jacobian, less 1", torch.linalg.eigvalsh(slopes) - 1, -ROUNDING)
    yield least("distance of two points after the step, less before", after - before, -ROUNDING)
    yield note(
        "the same with a projection to the sphere, least of all pairs", (held - on_sphere).min(), signed=True
    )
    yield dots("step alone", before, after)
    yield dots("on the sphere", on_sphere, held)
    yield curve("equal", [0.0, float(before.max())], [0.0, float(before.max())])
    yield axes("Distances of pairs before and after a step", "before", "after")
