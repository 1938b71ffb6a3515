r"""Sequential Monte Carlo from independent sites to their joint law (THEORY E9).

    π_β(x) = Π_s h_s(x_s) e^{βU(x)} / Z(β),     0 = β_0 < β_1 < … < β_T = 1,     Z(0) = 1

N particles are drawn from the product of the h_s. A step of β multiplies a particle's weight by
e^{ΔβU(x)}; each step is the largest that leaves an effective size of a given fraction of N. Then the
particles are resampled systematically, and moved by sweeps of exact conditionals, which keep π_β. The product
of the mean weights estimates Z(1).

Several runs go side by side, with the same β, each with particles of its own. The mean of their estimates Ẑ_r
is the result, unbiased for given β; their spread gives the standard error.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.checks import generator as check_generator
from exptilt._support.checks import number, whole
from exptilt._support.errors import ConvergenceError
from exptilt.sampling.joint import Joint, State
from exptilt.sampling.resampling import effective_size, systematic

_HALVINGS = 50  # halvings of the interval that holds the next β


@dataclass(frozen=True)
class Population:
    """Particles of a joint law and its evidence.

    Attributes:
        state: by site, ``(runs, particles, *event)``, of equal weight.
        log_evidence: ``()``, log of the mean over runs of Ẑ.
        standard_error: ``()``, of log_evidence, from the spread of the runs; NaN for one run.
        log_evidence_of_runs: ``(runs,)``, log Ẑ of each run.
        strength: ``(steps + 1,)``, the sequence of β.
        effective: ``(steps, runs)``, the effective size before each resampling.
    """

    state: State
    log_evidence: Tensor
    standard_error: Tensor
    log_evidence_of_runs: Tensor
    strength: Tensor
    effective: Tensor


def smc(
    joint: Joint,
    *,
    particles: int = 1024,
    runs: int = 8,
    target: float = 0.5,
    sweeps: int = 1,
    max_steps: int = 1000,
    generator: torch.Generator | None = None,
) -> Population:
    """Particles of a joint exponential family, and an estimate of its normalizer with its standard error.

    The evidence is Z = ∫ Π_s h_s(x_s) e^{U(x)} dx, each h_s normalised. For a single site with bias b it is
    e^{G(b)}.

    Args:
        joint: the law.
        particles: N, the number of particles of each run.
        runs: number of runs side by side; the standard error needs at least two.
        target: the effective size after a step of β, as a fraction of N, in (0, 1).
        sweeps: Gibbs sweeps after each resampling.
        max_steps: largest number of steps of β.
        generator: the source of randomness; torch's own if not given.

    Example:
        >>> from exptilt.families import Gaussian
        >>> h = Gaussian(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
        >>> found = smc(Joint({"x": h}, bias={"x": torch.tensor([2.0], dtype=torch.float64)}))
        >>> bool((found.log_evidence - 2.0).abs() < 5 * found.standard_error)  # G(b) = b²/2
        True
    """
    particles, runs = whole("smc", "particles", particles, least=2), whole("smc", "runs", runs)
    sweeps, max_steps = whole("smc", "sweeps", sweeps), whole("smc", "max_steps", max_steps)
    target = number("smc", "target", target, above=0, below=1)
    check_generator("smc", generator)
    state = joint._independent((runs, particles), generator)
    t = joint._statistics(state)
    beta, strength, effective = 0.0, [0.0], []
    evidence: Tensor | None = None
    for step in range(1, max_steps + 1):
        U = joint._log_tilt(t)
        if not bool(U.isfinite().all(-1).all()):
            raise ConvergenceError(
                f"smc: at step {step} (β = {beta:.3g}) weights are not finite: all particles are dead. "
                "Is the joint law normalizable? Pass weaker couplings."
            )
        rise = _rise(U, 1.0 - beta, target * particles)
        if beta + rise == beta:
            raise ConvergenceError(
                f"smc: at step {step} no step from β = {beta:.3g} leaves {target:g} of the particles. "
                "Pass more particles or a smaller target."
            )
        weight = rise * U
        gain = torch.logsumexp(weight, -1) - math.log(particles)
        evidence = gain if evidence is None else evidence + gain
        effective.append(effective_size(weight))
        beta = 1.0 if rise == 1.0 - beta else beta + rise
        strength.append(beta)
        chosen = systematic(weight, generator=generator)
        state, t = ({name: _taken(x, chosen) for name, x in part.items()} for part in (state, t))
        for _ in range(sweeps):
            joint._advance(state, t, beta, generator)
        if beta == 1.0:
            total = torch.logsumexp(evidence, 0) - math.log(runs)
            error = (evidence - total).exp().std() / runs**0.5 if runs > 1 else total.new_full((), torch.nan)
            path = torch.tensor(strength, dtype=evidence.dtype)
            return Population(state, total, error, evidence, path, torch.stack(effective))
    raise ConvergenceError(
        f"smc: β is {beta:.3g} after {max_steps} steps. "
        "Pass more particles, a smaller target or a larger max_steps."
    )


def _rise(U: Tensor, most: float, wanted: float) -> float:
    """The largest Δβ up to `most` that leaves every run the `wanted` effective size, by bisection."""
    if bool((effective_size(most * U) >= wanted).all()):
        return most
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if bool((effective_size(middle * U) >= wanted).all()) else (low, middle)
        if high - low < 1e-3 * high:
            break
    return low


def _taken(x: Tensor, chosen: Tensor) -> Tensor:
    index = chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 2)).expand(*chosen.shape, *x.shape[2:])
    return torch.take_along_dim(x, index, 1)
