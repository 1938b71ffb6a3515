"""Climbing a log-likelihood to a proper maximum: L-BFGS with the gradient, then its curvature decides.

A climb has converged where the projected gradient g is zero and the Hessian H of minus the log-likelihood is
positive definite. Both are judged in units of the parameters' own standard errors, which no change of units
moves: with D = |diag H|^½

    ½ g' H⁻¹ g ≤ tolerance   (what is left to rise, in nats)     and     D⁻¹ H D⁻¹ > 0

Elsewhere the climb goes on, by a Newton step or along the direction of negative curvature, or says why not.
Projected: numbers that have run to a bound (the logit of a transition that never happens, the logarithm of a
noise that has vanished) and no longer change the log-likelihood are left out. A number that changes nothing
whatever its value is at no bound: the data do not determine it, as with transitions between two equal
regimes. The climb tries other values of it; if none leads higher, it has stalled.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.progress import track
from ..._support.threads import one_blas_thread

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
Limits = tuple[int, float, bool | None]  # most steps, tolerance, whether to show a bar
LOST = 1e-4  # least curvature of a logarithm or logit that is not at its bound: a standard error of 100
FLAT = 1e-7  # eigenvalue of the scaled Hessian that its differences cannot tell from zero
LEAST = 1e-6  # least deviation of a noise over that of the data; a likelihood that rises there has no bound
FLOOR = 0.05  # least value of this ratio in the bounded fit that is then returned
SAME = 1e-4  # nats: ends nearer than this count as one
APART = 0.02  # nats: starts further apart than this may lead to different ends
NOTHING = 1e-3  # nats: a number is not determined if no value of it changes the log-likelihood by more
# logits, relative to the start, tried for undetermined transitions: from persistent to alternating chains
ELSEWHERE = (0.0, 1.0, 2.5, 4.0, -2.0)
UNKNOWN = "the log-likelihood does not depend on {}"


class FitStatus(enum.Enum):
    """Why a fit stopped; the value is the message."""

    CONVERGED = "converged: the gradient is zero and the Hessian definite, as far as the tolerance says"
    MAX_STEPS = "stopped at max_steps; the log-likelihood was still rising"
    DECREASED = (
        "stopped: EM has lowered the log-likelihood for ten steps (the collapse makes its E-step "
        "approximate); the best step is returned"
    )
    DEGENERATE = (
        "the likelihood has no bound: a regime or its noise vanishes; the best bounded maximum is returned"
    )
    STALLED = "stopped, though this is not known to be a maximum"


@dataclass(frozen=True, eq=False)
class End:
    """The end of a climb.

    Attributes:
        value: the log-likelihood.
        point: ``(k,)`` numbers.
        status: why it stopped.
        trace: the log-likelihood at every step.
        gradient_norm: (g' H⁻¹ g)^½, the distance to the maximum in standard errors; NaN if H is not definite.
        eigenvalues: of the Hessian of minus the log-likelihood, scaled to a diagonal of ±1, rising.
        inverse: ``(k, k)``, H⁻¹, NaN for numbers without effect, and throughout if H is not definite.
        reason: explains the status, or is empty; "{}" stands for the name of number `which`.
        which: index of the number that `reason` is about, or −1.
        blamed: ``(k,)``, the point that `reason` is about, if it is not `point`.
    """

    value: float
    point: np.ndarray
    status: FitStatus
    trace: list[float]
    gradient_norm: float
    eigenvalues: np.ndarray
    inverse: np.ndarray
    reason: str = ""
    which: int = -1
    blamed: np.ndarray | None = None


def remembered(evaluate: Objective) -> Objective:
    """Caches the last evaluation: the Hessian is taken at the optimiser's last point."""
    last: list[Any] = [None, None]

    def again(theta: np.ndarray) -> tuple[float, np.ndarray]:
        if last[0] is None or not np.array_equal(last[0], theta):
            last[:] = theta.copy(), evaluate(theta)
        value, slope = last[1]
        return value, slope.copy()

    return again


def hessian(evaluate: Objective, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The Hessian ``(k, k)`` by central differences of the gradient, and which numbers change the value.

    Each step is a hundredth of the number's standard error, found from the rise of the value, so that the
    units of the numbers do not matter. NaN where there is no value on both sides.
    """
    k, here = len(theta), evaluate(theta)[0]
    H, told = np.full((k, k), np.nan), np.zeros(k, dtype=bool)
    for i in range(k):
        size = max(1.0, abs(theta[i]))
        h, grown = 1e-3 * size, False
        for _ in range(12):
            ends = theta.copy(), theta.copy()
            ends[0][i] += h
            ends[1][i] -= h
            (up, up_slope), (down, down_slope) = evaluate(ends[0]), evaluate(ends[1])
            rise = max(abs(up - here), abs(down - here))
            if not np.isfinite(rise) or rise > 1e-3 + 2 * h * abs(evaluate(theta)[1][i]):
                h *= max((5e-5 / rise) ** 0.5, 1e-3) if np.isfinite(rise) else 0.1
                continue
            H[i] = (up_slope - down_slope) / (ends[0][i] - ends[1][i])
            bend = abs(H[i, i])
            if grown or bend * h**2 > 1e-7 or h >= 1e-2 * size:
                break
            h, grown = min(1e-2 * size, 1e-2 / max(bend, 1e-300) ** 0.5), True
        told[i] = not abs(H[i, i]) * h**2 <= 1e-12 * max(1.0, abs(here))
    return (H + H.T) / 2, told


def climb(
    evaluate: Objective,
    start: np.ndarray,
    max_steps: int,
    tolerance: float,
    progress: bool | None,
    low: np.ndarray | None = None,
    bounded: np.ndarray | None = None,
    firm: bool = False,
    trace: list[float] | None = None,
) -> End:
    """Climb from `start` to a proper maximum; the end says why if it is none.

    Args:
        evaluate: minus the log-likelihood and its gradient.
        start: ``(k,)`` numbers.
        max_steps: how many at most.
        tolerance: in nats.
        progress: show a bar: True, False, or None for only on a terminal.
        low: ``(k,)``, the least value of each number, −inf where there is none.
        bounded: ``(k,)``, True for logits and logarithms, which may run to a bound.
        firm: True if a maximum may lie at `low`; False if a climb that reaches `low` shows that the
            likelihood has no bound.
        trace: log-likelihoods on the way to `start`, the last one at `start`.
    """
    low = np.full(len(start), -np.inf) if low is None else low
    bounded = np.zeros(len(start), dtype=bool) if bounded is None else bounded
    point = np.maximum(start, low)
    value, _ = evaluate(point)
    if not np.isfinite(value):
        raise ArgumentError(
            "fit: the filter cannot run at the start (an innovation covariance is singular). "
            "Start from larger noises."
        )
    trace = [-value] if trace is None else list(trace)
    if not len(start):
        return End(-value, point, FitStatus.CONVERGED, trace, 0.0, np.zeros(0), np.zeros((0, 0)))
    bar = iter(track(range(max_steps), "maximum likelihood", show=progress))
    while True:
        point, out_of_steps = _lbfgs(evaluate, point, low, max_steps, tolerance, trace, bar)
        end, better = judge(evaluate, point, tolerance, low, bounded, firm, trace)
        if better is None or out_of_steps:
            break
        point = better
        trace.append(-evaluate(point)[0])
    bar.close()  # type: ignore[attr-defined]
    if better is not None:
        end = replace(end, status=FitStatus.MAX_STEPS, reason="")
    return end


def _lbfgs(
    evaluate: Objective,
    start: np.ndarray,
    low: np.ndarray,
    max_steps: int,
    tolerance: float,
    trace: list[float],
    bar: Any,
) -> tuple[np.ndarray, bool]:
    """L-BFGS until a step rises by less than `tolerance`; returns the point, and whether steps ran out."""
    far = 1e10 * max(abs(trace[-1]), 1.0)

    def note(intermediate_result: Any) -> None:
        trace.append(-float(intermediate_result.fun))
        next(bar, None)
        if trace[-1] - trace[-2] < tolerance:  # scipy's own test is relative to the log-likelihood
            raise StopIteration

    def everywhere(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = evaluate(theta)
        return (value, slope) if np.isfinite(value) else (far, slope)

    left = max_steps - len(trace) + 1
    if left < 1:
        return start, True
    options = {"maxiter": left, "maxfun": 20 * left, "ftol": 0.0, "gtol": 1e-7, "maxcor": 20}
    bounds = list(zip(low, np.full(len(low), np.inf), strict=True)) if np.isfinite(low).any() else None
    from scipy.optimize import minimize

    with one_blas_thread():
        result = minimize(
            everywhere, start, jac=True, method="L-BFGS-B", callback=note, options=options, bounds=bounds
        )
    rise = trace[-1] - trace[-2] if len(trace) > 1 else np.inf
    return result.x, result.status == 1 and rise >= tolerance


def judge(
    evaluate: Objective,
    point: np.ndarray,
    tolerance: float,
    low: np.ndarray,
    bounded: np.ndarray,
    firm: bool,
    trace: list[float],
) -> tuple[End, np.ndarray | None]:
    """Status of `point` by its curvature, and a better point to continue from if there is one."""
    value, slope = evaluate(point)
    k = len(point)
    at_floor = point <= low + 1e-9 * np.maximum(1.0, np.abs(point))
    end = End(-value, point, FitStatus.STALLED, trace, np.nan, np.full(0, np.nan), np.full((k, k), np.nan))
    if not firm and (at_floor & (slope > 0.1)).any():
        which = int(np.argmax(np.where(at_floor, slope, -np.inf)))
        text = "{} has shrunk to its least value, and the log-likelihood still rises"
        return replace(end, status=FitStatus.DEGENERATE, reason=text, which=which), None
    H, told = hessian(evaluate, point)
    if np.isnan(H).any():
        which = int(np.argmax(np.isnan(H.diagonal())))
        return replace(end, reason="the filter cannot run beside this value of {}", which=which), None
    lost = at_floor | (bounded & ((np.abs(H.diagonal()) < LOST) | ~told))
    if (lost & ~at_floor & (np.abs(slope) > 0.1)).any():
        which = int(np.argmax((lost & ~at_floor) * np.abs(slope)))
        text = "{} runs to its bound, and the log-likelihood still rises"
        return replace(end, status=FitStatus.DEGENERATE, reason=text, which=which), None
    limit = max(tolerance, 1e-11 * max(1.0, abs(value)))
    loose = ~told & ~lost
    for i in np.flatnonzero(lost & ~at_floor):  # 1e4: past any other logit of its row
        loose[i] = np.max(_changes(evaluate, point, np.eye(k)[i], (1e4, -1e4, -point[i]))) < NOTHING
    lost = lost | loose
    which, flat = (int(np.argmax(loose)), UNKNOWN) if loose.any() else (-1, "")
    keep = np.flatnonzero(~lost)
    if (loose & bounded).any() and len(keep):
        better = _way_out(evaluate, point, keep, loose & bounded, low, limit)
        if better is not None:
            return end, better
    if not len(keep):
        status = FitStatus.STALLED if flat else FitStatus.CONVERGED
        return replace(end, status=status, reason=flat, which=which, gradient_norm=0.0), None
    H, g = H[np.ix_(keep, keep)], slope[keep]
    d = np.sqrt(np.maximum(np.abs(H.diagonal()), 1e-300))
    eigenvalues, vectors = np.linalg.eigh(H / d[:, None] / d)
    end = replace(end, eigenvalues=eigenvalues)
    if eigenvalues[0] < -FLAT:
        better = _line(evaluate, point, keep, vectors[:, 0] / d, low, limit)
        reason = "the curvature is negative in the direction of {}, but no better point was found there"
        heaviest = int(keep[np.argmax(np.abs(vectors[:, 0]))])
        return replace(end, reason=reason, which=heaviest), better
    sound = eigenvalues > FLAT
    vague = np.zeros(len(keep), dtype=bool)  # numbers that have run to a bound together
    for direction in (vectors[:, ~sound] / d[:, None]).T:
        direction = direction / np.abs(direction).max()
        if _runs_to_bound(evaluate, point, keep, np.where(np.abs(direction) > 1e-3, direction, 0.0), bounded):
            vague |= np.abs(direction) > 0.1
        elif not flat:
            which = int(keep[np.argmax(np.abs(direction))])
            flat = "the log-likelihood is flat in a direction of {} and others: they cannot be told apart"
    scaled = vectors.T @ (g / d)
    left = float((scaled[sound] ** 2 / eigenvalues[sound]).sum())  # g' H⁻¹ g
    end = replace(end, gradient_norm=left**0.5)
    if left / 2 > limit:
        step = -(vectors[:, sound] @ (scaled[sound] / eigenvalues[sound])) / d
        better = _line(evaluate, point, keep, step, low, 0.1 * limit, newton=True)
        text = f"the gradient is {left**0.5:.1e} standard errors from zero, but no step rises"
        return replace(end, reason=text), better
    if flat:
        return replace(end, reason=flat, which=which), None
    vectors = vectors[:, sound] / d[:, None]
    end.inverse[np.ix_(keep, keep)] = (vectors / eigenvalues[sound]) @ vectors.T
    end.inverse[keep[vague]] = end.inverse[:, keep[vague]] = np.nan
    return replace(end, status=FitStatus.CONVERGED, eigenvalues=eigenvalues[sound]), None


def _runs_to_bound(
    evaluate: Objective, point: np.ndarray, keep: np.ndarray, direction: np.ndarray, bounded: np.ndarray
) -> bool:
    """Whether logits or logarithms ran to a bound together: the value is flat in one direction only."""
    if not bounded[keep[direction != 0]].all():
        return False
    whole = np.zeros(len(point))
    whole[keep] = direction
    up, down, far_up, far_down = _changes(evaluate, point, whole, (30.0, -30.0, 100.0, -100.0))
    return min(up, down) < NOTHING and max(up, far_up, down, far_down) > 1e-1


def _changes(
    evaluate: Objective, point: np.ndarray, direction: np.ndarray, lengths: Sequence[float]
) -> list[float]:
    """Absolute changes of the value at the given lengths along a direction."""
    here = evaluate(point)[0]
    return [abs(evaluate(point + length * direction)[0] - here) for length in lengths]


def _way_out(
    evaluate: Objective, point: np.ndarray, keep: np.ndarray, loose: np.ndarray, low: np.ndarray, limit: float
) -> np.ndarray | None:
    """A better point at other values of undetermined numbers (`loose`); None if none is found.

    Whether two equal regimes can be moved apart with a gain depends on the transitions between them.
    """
    for setting in ELSEWHERE:
        there = np.where(loose, setting, point)
        H = hessian(evaluate, there)[0][np.ix_(keep, keep)]
        if np.isnan(H).any():
            continue
        d = np.sqrt(np.maximum(np.abs(H.diagonal()), 1e-300))
        eigenvalues, vectors = np.linalg.eigh(H / d[:, None] / d)
        if eigenvalues[0] < -FLAT:
            better = _line(evaluate, there, keep, vectors[:, 0] / d, low, limit)
            if better is not None and evaluate(better)[0] < evaluate(point)[0] - limit:
                return better
    return None


def _line(
    evaluate: Objective,
    point: np.ndarray,
    keep: np.ndarray,
    direction: np.ndarray,
    low: np.ndarray,
    least: float,
    newton: bool = False,
) -> np.ndarray | None:
    """The best point along a line that rises by more than `least`: forward by halves, or both ways."""
    here, best, found = evaluate(point)[0], -least, None
    lengths = (1.0, 0.5, 0.25, 0.1, 0.01, 1e-3) if newton else (3.0, -3.0, 1.0, -1.0, 0.3, -0.3, 0.1, -0.1)
    for length in lengths:
        there = point.copy()
        there[keep] += length * direction
        there = np.maximum(there, low)
        change = evaluate(there)[0] - here
        if change < best:
            best, found = change, there
            if newton:
                break
    return found


def climb_all(
    evaluate: Objective,
    starts: Sequence[np.ndarray],
    limits: Limits,
    low: np.ndarray | None = None,
    bounded: np.ndarray | None = None,
    firm: bool = False,
    traces: Sequence[list[float]] | None = None,
) -> list[End]:
    """The end of the climb from each start; later starts where the filter cannot run are left out.

    A bar counts the starts, or the steps of a single one.
    """
    ends, (max_steps, tolerance, progress) = list[End](), limits
    single = progress if len(starts) == 1 else False
    for k, start in enumerate(track(starts, "climbs", show=False if len(starts) == 1 else progress)):
        trace = None if traces is None else traces[k]
        try:
            ends.append(climb(evaluate, start, max_steps, tolerance, single, low, bounded, firm, trace))
        except ArgumentError:
            if not ends:
                raise
    return ends


def highest(
    evaluate: Objective,
    starts: Sequence[np.ndarray],
    limits: Limits,
    bounded: np.ndarray,
    low: np.ndarray,
    floor: np.ndarray,
    traces: Sequence[list[float]] | None = None,
) -> tuple[list[End], End, int]:
    """All ends, the best of them, and how many starts reached it.

    If a climb reaches `low` and still rises, the likelihood has no bound. The best proper maximum of the
    other climbs, or of new climbs that stay above `floor`, is then returned with the status DEGENERATE.
    """
    ends = climb_all(evaluate, starts, limits, low, bounded, False, traces)
    for k, end in enumerate(ends):
        shrinks = np.where(end.point < floor, evaluate(end.point)[1], 0.0)
        if end.status is FitStatus.STALLED and shrinks.max(initial=0.0) > 0.1:
            text, which = "{} shrinks, and the log-likelihood still rises", int(np.argmax(shrinks))
            ends[k] = replace(end, status=FitStatus.DEGENERATE, reason=text, which=which)
    end, same = best_end(ends)
    if end.status is not FitStatus.DEGENERATE:
        return ends, end, same
    sound = [other for other in ends if other.status is FitStatus.CONVERGED]
    where = "the best maximum that another start found"
    if not sound:
        sound = climb_all(evaluate, starts, limits, floor, bounded, True)
        where = f"the best point with noises of at least {FLOOR:g} of the data's deviation"
    proper, same = best_end(sound)
    reason = f"{end.reason}; what is returned is {where}"
    return ends, replace(proper, status=end.status, reason=reason, which=end.which, blamed=end.point), same


def best_end(ends: Sequence[End]) -> tuple[End, int]:
    """The highest end, a proper maximum if one is as high, and how many starts reached it."""
    top = max(ends, key=lambda end: end.value)
    alike = [end for end in ends if abs(end.value - top.value) < SAME]
    sound = [end for end in alike if end.status is FitStatus.CONVERGED]
    return (max(sound, key=lambda end: end.value) if sound else top), len(alike)


def delta_method(
    natural: Callable[[torch.Tensor], dict[str, torch.Tensor]], theta: np.ndarray, spread: np.ndarray
) -> dict[str, np.ndarray]:
    """Standard errors of named functions of theta, sqrt diag(J spread J'), NaN where `spread` is."""
    point, lost = torch.tensor(theta, requires_grad=True), np.isnan(spread.diagonal())
    out = {}
    for name, value in natural(point).items():
        flat = np.zeros((value.numel(), len(theta)))
        for row, one in zip(flat, value.reshape(-1).unbind() if value.requires_grad else (), strict=False):
            row[:] = torch.autograd.grad(one, point, retain_graph=True)[0]
        errors = np.sqrt(np.maximum(np.einsum("ki,ij,kj->k", flat, np.nan_to_num(spread), flat), 0.0))
        unknown = np.abs(flat[:, lost]).max(1, initial=0.0) > 1e-3 * np.abs(flat).max(1, initial=0.0)
        errors[unknown | ~flat.any(1)] = np.nan
        out[name] = errors.reshape(tuple(value.shape))
    return out


def starts_around(
    origin: np.ndarray, restarts: int, spread: float, generator: torch.Generator | None
) -> list[np.ndarray]:
    """`origin`, and `restarts` points drawn around it."""
    noise = [torch.randn(len(origin), dtype=torch.float64, generator=generator) for _ in range(restarts)]
    return [origin, *(origin + spread * z.numpy() * np.maximum(np.abs(origin), 1.0) for z in noise)]


def best_starts(
    evaluate: Objective,
    candidates: Sequence[np.ndarray],
    count: int,
    low: np.ndarray,
    steps: int,
    progress: bool | None,
) -> list[np.ndarray]:
    """The first candidate, and the highest points that a few steps reach from the others.

    All make half of `steps` steps, and the better third four times as many again. Points as high as an
    earlier one are the same maximum, perhaps with regimes in another order, and come last.
    """
    first, *others = candidates

    def lead(starts: Iterable[np.ndarray], count: int) -> list[tuple[float, int, np.ndarray]]:
        found = list[tuple[float, int, np.ndarray]]()
        for k, start in enumerate(starts):
            start = np.maximum(start, low)
            value = evaluate(start)[0]
            if np.isfinite(value):
                point, _ = _lbfgs(evaluate, start, low, count, 0.0, [-value], iter(()))
                found.append((evaluate(point)[0], k, point))
        return sorted(found)

    near = lead(track(others, "starts", show=progress), steps // 2)
    ends = lead((point for *_, point in near[: -(-len(near) // 3)]), 2 * steps)
    again = [k > 0 and value - ends[k - 1][0] <= APART for k, (value, *_) in enumerate(ends)]
    order = np.argsort(again, kind="stable")[: count - 1]
    return [first, *(ends[k][2] for k in order)]
