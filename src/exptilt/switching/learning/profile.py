r"""Intervals by profile likelihood: the least and greatest value of a parameter near the maximum.

They are taken over all points θ that are at most q/2 below the maximum, whatever the other parameters are:

    2 (ℓ(θ̂) − ℓ(θ)) ≤ q,     q = T log(1 + t² / (T − k))

Estimate ± 1.96 standard errors is the same where ℓ is a parabola. With hidden regimes it is not: where they
happen to look clear, the curvature at the maximum gives intervals that are too short. t is the quantile of
Student's law with T − k degrees of freedom, k the number of learned parameters other than deviations: the
interval of a regression with one regime is then Student's own, and q tends to the quantile of χ² as T grows.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._support.threads import one_blas_thread
from .climb import End, Objective
from .free_parameters import PROBABILITIES, to_line

if TYPE_CHECKING:
    from .named import Arrays, Named

LEVEL, NORMAL = 0.95, 1.959964  # the level of the ends that are looked for, and its normal quantile
STEPS = 30  # climbs towards an end at most; beyond them there is none
Number = Callable[[np.ndarray], tuple[float, np.ndarray]]  # a value and its gradient


def freedom(named: "Named", observations: int) -> float:
    """Degrees of freedom of Student's law: observations less parameters other than deviations."""
    return (
        np.inf
        if named.free is None
        else max(observations - named.free.size + named.free.count("deviation"), 1)
    )


def reach_at(level: float, left: float) -> float:
    """By how many of its errors an interval of this level reaches, so many degrees of freedom left."""
    from scipy.special import stdtrit

    return float(NORMAL * stdtrit(left, (1 + level) / 2) / stdtrit(left, (1 + LEVEL) / 2))


def profile_errors(
    named: "Named", evaluate: Objective, end: End, errors: "Arrays", observations: int
) -> "Arrays":
    """Errors ``(..., 2)`` below and above each estimate with which `interval` gives the ends at `LEVEL`.

    NaN where a parameter has no standard error, inf where the data allow all values.
    """
    from scipy.special import stdtrit

    free, out = named.free, {name: np.full((*error.shape, 2), np.nan) for name, error in errors.items()}
    keep = np.flatnonzero(np.isfinite(end.inverse.diagonal()))
    if free is None or not len(keep):
        return out
    left = freedom(named, observations)
    q = observations * np.log1p(float(stdtrit(left, (1 + LEVEL) / 2)) ** 2 / left)
    root = np.linalg.cholesky(end.inverse[np.ix_(keep, keep)])

    def point(u: np.ndarray) -> np.ndarray:
        theta = end.point.copy()
        theta[keep] += root @ u
        return theta

    def room(u: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = evaluate(point(u))
        return (q / 2 - end.value - value, -slope[keep] @ root) if np.isfinite(value) else (-1e6, 0 * u)

    def number(name: str, at: tuple[int, ...], limits: tuple[float, float]) -> Number:
        """One parameter, as its logarithm or logit if it has bounds."""

        def read(u: np.ndarray) -> tuple[float, np.ndarray]:
            values, pull = named.values_at(point(u))
            place, rise = to_line(float(values[name][at]), *limits)
            bars = {key: np.zeros(value.shape) for key, value in values.items()}
            bars[name][at] = rise
            return place, pull(bars)[keep] @ root

        return read

    best = named.values_at(end.point)[0]
    for name, error in errors.items():
        limits = (0.0, 1.0) if name in PROBABILITIES else free.bounds.get(name, (-np.inf, np.inf))
        alike = name in free.shared
        for at in np.ndindex(error[:1].shape if alike else error.shape):
            if error[at] > 0:
                rise = to_line(float(best[name][at]), *limits)[1]
                out[name][at] = _reach(number(name, at, limits), room, q, len(keep)) / (NORMAL * rise)
        if alike:
            out[name][:] = out[name][:1]
    return out


def _reach(number: Number, room: Number, q: float, size: int) -> np.ndarray:
    """How far a number falls and rises where `room` is not negative, inf where there is no end."""
    from scipy.optimize import minimize

    here, slope = number(np.zeros(size))
    length, out = np.linalg.norm(slope), np.full(2, np.nan)
    for k, sign in enumerate((-1.0, 1.0)):
        scale = sign * q**0.5 / length  # the Lagrangian's Hessian is then near the identity

        def goal(u: np.ndarray, scale: float = scale) -> tuple[float, np.ndarray]:
            value, slope = number(u)
            return -scale * (value - here), -scale * slope

        inside: dict[str, Any] = {"type": "ineq", "fun": lambda u: room(u)[0], "jac": lambda u: room(u)[1]}

        def climb(
            u: np.ndarray, reach: float = np.inf, goal: Number = goal, inside: dict[str, Any] = inside
        ) -> tuple[np.ndarray, bool]:
            with one_blas_thread(), np.errstate(all="ignore"):
                found = minimize(
                    goal,
                    u,
                    jac=True,
                    method="SLSQP",
                    constraints=inside,
                    bounds=None if reach == np.inf else list(zip(u - reach, u + reach, strict=True)),
                    options={"ftol": 1e-4, "maxiter": 40},
                )
            return found.x, bool(found.success)

        u, found = climb(sign * q**0.5 / length * slope)
        with np.errstate(all="ignore"):
            if not found or not abs(room(u)[0]) < 0.01 * q:
                u = _walk(climb, goal, room, q, size)
            out[k] = abs(number(u)[0] - here) if np.isfinite(u).all() else np.inf
    return out


def _walk(
    climb: Callable[..., tuple[np.ndarray, bool]], goal: Number, room: Number, q: float, size: int
) -> np.ndarray:
    """The end that small climbs reach, each of which begins where the last one ended; inf if there is none.

    One large climb may leave the points at which there is a likelihood.
    """
    u, reach = np.zeros(size), q**0.5 / 2
    for _ in range(STEPS):
        new = climb(u, reach)[0]
        gain = goal(u)[0] - goal(new)[0]
        held = np.isfinite(gain) and room(new)[0] > -1e-3 * q
        u = new if held else u
        reach /= 1 if held and gain > 1e-4 * q else 4
        if reach < 0.01 * q**0.5:
            return u
    return np.full(size, np.inf)
