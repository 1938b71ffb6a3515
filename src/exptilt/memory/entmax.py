r"""α-entmax over streamed scores: the exact threshold by Newton's method, a sweep a step.

With d_i = (α−1)β(s_i − max s) ≤ 0 and p = 1/(α−1) ≥ 1, the weights are

    y_i = (d_i − τ)_+^p      where τ solves      g(τ) = (Σ_i (d_i − τ)_+^p)^{1/p} = 1.

g is the p-norm of something piecewise linear: convex and falling. The root lies in [−1, 0), and from τ = −1,
where the largest term alone is 1 already, Newton's method climbs to it without ever passing it; for
sparsemax, where g is piecewise linear, it arrives after finitely many steps. Only d near the top counts, and
τ is of size 1 whatever β is: no cancellation at β = 10⁶.

Two more Newton steps under autograd, from the root, leave its value and carry its derivatives.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from exptilt._support.transforms import is_concrete
from exptilt.memory.patterns import Keys

_MOST_STEPS = 60
_BLIND_STEPS = 24  # Newton steps where values cannot be read (torch.func, torch.compile)


def _depths(keys: Keys, query: Tensor, top: Tensor, slope: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows to average, and d ``(..., H, Q, n)``, tile by tile.

    d is cut at −2, where weights are 0 already: a large β could make it −∞, and −∞ times 0 is NaN.
    """
    for value, score, _ in keys.tiles(query):
        yield value, (slope * (score - top[..., None])).clamp_min(-2)


def _power(x: Tensor, p: float) -> Tensor:
    """x^p of x ≥ 0, with derivative 0 at x = 0."""
    if p in (0.0, 1.0):
        return x if p else (x > 0).to(x.dtype)
    return torch.where(x > 0, x, 1.0) ** p * (x > 0)


def _newton(depths: Iterator[tuple[Tensor, Tensor]], tau: Tensor, p: float) -> Tensor:
    """τ after one step of Newton's method on g(τ) = 1."""
    total, slope = torch.zeros_like(tau), torch.zeros_like(tau)
    for _, d in depths:
        above = (d - tau[..., None]).clamp_min(0)
        raised = _power(above, p - 1)
        total, slope = total + (raised * above).sum(-1), slope + raised.sum(-1)
    g = total ** (1 / p)
    return tau + (g - 1) * g ** (p - 1) / slope


def _threshold(keys: Keys, query: Tensor, top: Tensor, slope: Tensor, p: float) -> Tensor:
    """The threshold τ ``(..., H, Q)``, to the last few bits."""
    tau = torch.full_like(top, -1.0)
    concrete = is_concrete(query, top, keys.patterns)
    slack = 4 * torch.finfo(tau.dtype).eps
    for _ in range(_MOST_STEPS if concrete else _BLIND_STEPS):
        new = _newton(_depths(keys, query, top, slope), tau, p)
        settled = concrete and not bool((new - tau > slack).any())  # NaN (scores overflow) counts as settled
        tau = torch.maximum(new, tau)  # τ never falls, except by rounding
        if settled:
            break
    return tau


def entmax_sweep(keys: Keys, query: Tensor, beta: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Σ y_i k_i ``(..., H, Q, D)`` and Ψ ``(..., H, Q)`` at the query ``(..., H, Q, D)``, β ``(..., H)``."""
    p = 1 / (alpha - 1)
    slope = ((alpha - 1) * beta)[..., None, None]
    with torch.no_grad():
        top = query.new_full(query.shape[:-1], -torch.inf)
        for _, score, _ in keys.tiles(query.detach()):
            top = torch.maximum(top, score.amax(-1))
        tau = _threshold(keys, query.detach(), top, slope.detach(), p)
    if torch.is_grad_enabled():
        for _ in range(2):
            tau = _newton(_depths(keys, query, top, slope), tau, p)
    average, mass, depth, power = torch.zeros_like(top)[..., None], *(torch.zeros_like(top) for _ in range(3))
    for value, d in _depths(keys, query, top, slope):
        above = (d - tau[..., None]).clamp_min(0)
        y = _power(above, p)
        average, mass = average + y @ value, mass + y.sum(-1)
        depth, power = depth + (y * d).sum(-1), power + (y * above).sum(-1)  # y^α = y (d − τ)
    average, depth, power = average / mass[..., None], depth / mass, power / mass
    omega = (power - 1) / (alpha * (alpha - 1))
    return average, top + (depth / (alpha - 1) - omega) / beta[..., None]
