r"""Compiled passes over a series whose beliefs are closed-form families with discounted dynamics.

A belief is its natural parameter θ ``(K,)``. Its coordinates are independent groups, of which group g has
the numbers θ[g], θ[g + D], θ[g + 2D], …:

    Gamma            A = log Γ(a) − a log b                          θ = (−b, a − 1)
    Beta, Dirichlet  A = Σ log Γ(α_k) − log Γ(Σ α_k)                 θ = α − 1
    NormalGamma      A = log Γ(a) − a log b − ½ log κ                θ = (κm, −b − ½κm², −½κ, a − ½)
    NormalInverseWishart, of which D is the dimension: see `wishart`

An observation adds e(y) to θ and weighs a mode by A(θ + e) − A(θ) + log c(y). Components are merged by
averaging ∇A(θ) and inverting it. `smooth_family` needs nothing of a family: given the modes, the evidence
of later observations goes back discounted as that of earlier ones goes forward (`model`).
"""

import math
from typing import Any

import numpy as np
from numba import njit

from exptilt._support.elementary import STRICT
from exptilt._support.kernels import helper, kernel
from exptilt.families.numerics.kernels import BERNOULLI, SLOPE, invert_dirichlet

from .wishart import wishart_from_mean, wishart_gain, wishart_mean

GAMMA, DIRICHLET, NORMAL_GAMMA, NORMAL_WISHART = range(4)
GPB2, IMM, GPB1 = range(3)
Buffer = Any  # a float64 array; numba says more of it


@helper()
def _log_rise(a: float, e: float) -> float:
    """log Γ(a + e) − log Γ(a), of small counts e without a difference."""
    if e > 8.0 or e != np.floor(e) or e < 0.0:
        return math.lgamma(a + e) - math.lgamma(a)
    product = 1.0
    for i in range(int(e)):
        product *= a + i
    log: float = np.log(product)
    return log


@helper()
def _gain(kind: int, D: int, theta: Buffer, e: Buffer, work: Buffer) -> float:
    """A(θ + e) − A(θ)."""
    if kind == NORMAL_WISHART:
        return wishart_gain(D, theta, e, work)
    total = 0.0
    for g in range(D):
        if kind == GAMMA:
            a, b = theta[D + g] + 1.0, -theta[g]
            rise = e[D + g] * np.log(b - e[g]) + a * np.log1p(-e[g] / b)
            total += _log_rise(a, e[D + g]) - rise
        elif kind == DIRICHLET:
            whole, more = 0.0, 0.0
            for k in range(g, theta.size, D):
                whole += theta[k] + 1.0
                more += e[k]
                if e[k] != 0.0:
                    total += _log_rise(theta[k] + 1.0, e[k])
            total -= _log_rise(whole, more)
        else:
            a, count, m = theta[3 * D + g] + 0.5, -2.0 * theta[2 * D + g], theta[g] + e[g]
            rate, wide = -theta[D + g] - theta[g] * theta[g] / (2.0 * count), count - 2.0 * e[2 * D + g]
            new = -theta[D + g] - e[D + g] - m * m / (2.0 * wide)
            rise = e[3 * D + g] * np.log(new) + a * np.log(new / rate) + 0.5 * np.log(wide / count)
            total += _log_rise(a, e[3 * D + g]) - rise
    return total


@njit(inline="always", fastmath=STRICT, error_model="numpy")
def _shifted(a: float) -> tuple[float, float, float, float]:
    """x = a, or a + 8 below 8, with log x − ψ(x), and ψ(x) − ψ(a), ψ'(a).

    The product P = a (a + 1) ⋯ (a + 7) leads from the asymptotic series at a + 8 to a by one division; it
    is t (t + 6) (t + 10) (t + 12) with t = a (a + 7):

        ψ(a + 8) − ψ(a) = t' P'/P,     ψ'(a) − ψ'(a + 8) = t'² ((P'/P)² − P''/P) − 2 P'/P
    """
    x = a + 8.0 if a < 8.0 else a
    u = 1.0 / x
    q = u * u
    gap, bend = SLOPE[9], BERNOULLI[9]
    for k in range(8, -1, -1):
        gap, bend = gap * q + SLOPE[k], bend * q + BERNOULLI[k]
    gap, slope = 0.5 * u + q * gap, u * (1.0 + 0.5 * u + q * bend)
    if a >= 8.0:
        return x, gap, 0.0, slope
    t, along = a * (a + 7.0), 2.0 * a + 7.0
    P, first, second = t, 1.0, 0.0
    for c in (6.0, 10.0, 12.0):
        second = second * (t + c) + 2.0 * first
        first = first * (t + c) + P
        P *= t + c
    inverse = 1.0 / P
    rise = first * inverse
    return x, gap, along * rise, slope + along * along * (rise * rise - second * inverse) - 2.0 * rise


@helper(fastmath=STRICT)
def _digamma(a: float) -> tuple[float, float]:
    """ψ(a) and ψ'(a)."""
    x, gap, rise, slope = _shifted(a)
    return np.log(x) - gap - rise, slope


@helper()
def _mean(kind: int, D: int, theta: Buffer, mean: Buffer, work: Buffer) -> None:
    """The expected statistics ∇A(θ)."""
    if kind == NORMAL_WISHART:
        wishart_mean(D, theta, mean, work)
        return
    for g in range(D):
        if kind == GAMMA:
            a, b = theta[D + g] + 1.0, -theta[g]
            mean[g] = a / b
            mean[D + g] = _digamma(a)[0] - np.log(b)
        elif kind == DIRICHLET:
            whole = 0.0
            for k in range(g, theta.size, D):
                whole += theta[k] + 1.0
            shift = _digamma(whole)[0]
            for k in range(g, theta.size, D):
                mean[k] = _digamma(theta[k] + 1.0)[0] - shift
        else:
            a, count = theta[3 * D + g] + 0.5, -2.0 * theta[2 * D + g]
            m = theta[g] / count
            rate = -theta[D + g] - theta[g] * m / 2.0
            mean[g] = m * a / rate
            mean[D + g] = a / rate
            mean[2 * D + g] = 1.0 / count + m * m * a / rate
            mean[3 * D + g] = _digamma(a)[0] - np.log(rate)


@helper(fastmath=STRICT)
def _invert_gap(s: float) -> float:
    """The a with log a − ψ(a) = s, by Newton's method in 1/a, in which the left side is almost linear."""
    a: float = (3.0 - s + np.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    for _ in range(6):
        x, gap, rise, slope = _shifted(a)
        if a < 8.0:
            gap += rise + np.log(a / x)
        change = (gap - s) / (1.0 - a * slope)  # of 1/a, relative
        a /= max(1.0 + change, 0.125)
        if abs(change) < 1e-7:  # the next one would be below rounding
            break
    return a


@helper(fastmath=STRICT)
def _invert_dirichlet(g: int, D: int, mean: Buffer, share: Buffer, theta: Buffer, work: Buffer) -> bool:
    """The α = θ + 1 with ψ(α_k) − ψ(Σα) = mean_k, by Newton's method in 1/α; whether it got there.

    It begins with these shares of the sum that large α would have, ½(K − 1) / Σ_k p_k (log p_k − mean_k).
    """
    excess, size = 0.0, -1
    for k in range(g, mean.size, D):
        excess += share[k] * (np.log(share[k]) - mean[k])
        size += 1
    for k in range(g, mean.size, D):
        theta[k] = 0.5 * size / excess * share[k]
    settled = False
    for _ in range(12):
        total = 0.0
        for k in range(g, mean.size, D):
            total += theta[k]
        shift, slope = _digamma(total)
        shared, spare = 0.0, 1.0 / slope
        for k in range(g, mean.size, D):
            psi, slope = _digamma(theta[k])
            work[1, k] = 1.0 / slope
            work[0, k] = (psi - shift - mean[k]) * work[1, k]
            shared += work[0, k]
            spare -= work[1, k]
        shared, settled = shared / spare, True
        for k in range(g, mean.size, D):
            alpha, change = theta[k], work[0, k] + work[1, k] * shared
            theta[k] = alpha * alpha / max(alpha + change, 0.125 * alpha)
            settled = settled and abs(change) < 1e-7 * alpha  # the next one would be below rounding
        if settled:
            break
    for k in range(g, mean.size, D):
        theta[k] -= 1.0
    return settled


@helper()
def _merge(
    kind: int, D: int, parts: Buffer, means: Buffer, weight: Buffer, work: Buffer, target: Buffer
) -> None:
    """The member with the expected statistics of the mixture of `parts`, whose own are `means`."""
    for i in range(weight.size):
        if weight[i] == 1.0:
            target[:] = parts[i]
            return
    mean, share = work[2], work[3]
    mean[:], share[:] = 0.0, 0.0
    for i in range(weight.size):
        if weight[i] > 0.0:
            for k in range(mean.size):
                mean[k] += weight[i] * means[i, k]
    if kind == NORMAL_WISHART:
        wishart_from_mean(D, mean, target, work)
        return
    for g in range(D):
        if kind == GAMMA:
            a = _invert_gap(np.log(mean[g]) - mean[D + g])
            target[g], target[D + g] = -a / mean[g], a - 1.0
        elif kind == DIRICHLET:
            for i in range(weight.size):
                total = 0.0
                for k in range(g, mean.size, D):
                    total += parts[i, k] + 1.0
                for k in range(g, mean.size, D):
                    share[k] += weight[i] * (parts[i, k] + 1.0) / total
            if not _invert_dirichlet(g, D, mean, share, target, work):
                alpha = np.empty((1, mean.size // D))
                invert_dirichlet(np.ascontiguousarray(mean[g::D]).reshape(1, -1), alpha)
                target[g::D] = alpha[0] - 1.0
        else:
            precision = mean[D + g]
            a, m = _invert_gap(np.log(precision) - mean[3 * D + g]), mean[g] / precision
            count = 1.0 / (mean[2 * D + g] - mean[g] * m)
            target[g], target[2 * D + g], target[3 * D + g] = count * m, -0.5 * count, a - 0.5
            target[D + g] = -a / precision - 0.5 * count * m * m


@helper()
def _normalise(score: Buffer, weight: Buffer) -> float:
    """log Σ e^score, with the shares in `weight`; equal shares where all scores are −∞."""
    top, total = -np.inf, 0.0
    for i in range(score.size):
        top = max(top, score[i])
    if not top > -np.inf:
        weight[:] = 1.0 / score.size
        return top
    for i in range(score.size):
        weight[i] = np.exp(score[i] - top)
        total += weight[i]
    for i in range(score.size):
        weight[i] /= total
    return top + math.log(total)


@kernel("the kernel of switching families")
def filter_family(
    kind: int,
    D: int,
    method: int,
    evidence: Buffer,
    log_base: Buffer,
    seen: Buffer,
    starts: Buffer,
    prior: Buffer,
    discount: Buffer,
    rest: Buffer,
    log_transition: Buffer,
    log_initial: Buffer,
    terms: Buffer,
    log_level: Buffer,
    belief: Buffer,
    mixing: Buffer,
    failure: Buffer,
) -> None:
    """Filter the series that lie end to end between `starts`.

    Writes, a row an observation: log p(y_t | before) (rows,), log P(mode) (rows, M), θ (rows, M, K) and
    P(mode before = i | mode = j, y up to here) (rows, M, M). Where a series cannot go on, its row and
    whether it is the belief that is not finite (1) or no mode that can give y (0) are left in `failure`.
    """
    M, K = rest.shape
    theta, parts, means, level = np.empty((M, K)), np.empty((M, K)), np.empty((M, K)), np.empty(M)
    score, weight, work, one = np.empty(M), np.empty(M), np.empty((4, K)), np.empty(K)
    for series in range(len(starts) - 1):
        theta[:], level[:] = prior, log_initial
        for row in range(starts[series], starts[series + 1]):
            new, joint = belief[row], mixing[row]
            if method != GPB2:
                for i in range(M):
                    _mean(kind, D, theta[i], means[i], work)
            if method == GPB1:
                _normalise(level, weight)
                _merge(kind, D, theta, means, weight, work, one)
            for j in range(M):
                for i in range(M):
                    score[i] = level[i] + log_transition[i, j]
                if method == GPB2:
                    for i in range(M):
                        part = parts[i]
                        part[:] = rest[j]
                        if not score[i] > -np.inf:
                            continue
                        for k in range(K):
                            part[k] = rest[j, k] + discount[j] * (theta[i, k] - rest[j, k])
                        if seen[row]:
                            score[i] += _gain(kind, D, part, evidence[row], work) + log_base[row]
                            for k in range(K):
                                part[k] += evidence[row, k]
                log_level[row, j] = _normalise(score, weight)
                for i in range(M):
                    joint[i, j] = weight[i]
                target = new[j]
                if method == GPB2:
                    for i in range(M):
                        if weight[i] > 0.0:
                            _mean(kind, D, parts[i], means[i], work)
                    _merge(kind, D, parts, means, weight, work, target)
                    continue
                if method == IMM:
                    _merge(kind, D, theta, means, weight, work, one)
                for k in range(K):
                    target[k] = rest[j, k] + discount[j] * (one[k] - rest[j, k])
                if seen[row]:
                    log_level[row, j] += _gain(kind, D, target, evidence[row], work) + log_base[row]
                    for k in range(K):
                        target[k] += evidence[row, k]
            terms[row] = _normalise(log_level[row], weight)
            sound = True
            for j in range(M):
                level[j] = log_level[row, j] = log_level[row, j] - terms[row]
                for k in range(K):
                    theta[j, k] = new[j, k]
                    sound = sound and np.isfinite(new[j, k])
            if not np.isfinite(terms[row]) or not sound:
                failure[series, 0], failure[series, 1] = row, not sound
                break


@kernel("the kernel of switching families")
def smooth_family(
    evidence: Buffer,
    discount: Buffer,
    starts: Buffer,
    level: Buffer,
    mixing: Buffer,
    probability: Buffer,
    pairs: Buffer,
    later: Buffer,
) -> None:
    """Run backwards: mode probabilities and pairs given all of y, and what later observations add to θ."""
    M, K = len(discount), evidence.shape[1]
    for series in range(len(starts) - 1):
        first, last = starts[series], starts[series + 1] - 1
        probability[last], later[last] = level[last], 0.0
        for back in range(last - first + 1):
            row = last - back
            for i in range(M):
                for j in range(M):
                    pairs[row, i, j] = probability[row, j] * mixing[row, i, j]
            if row == first:
                break
            for i in range(M):
                total = pairs[row, i].sum()
                probability[row - 1, i] = total
                for k in range(K):
                    mean = 0.0
                    for j in range(M):
                        share = pairs[row, i, j] / total if total > 0.0 else 0.0
                        mean += share * discount[j] * (evidence[row, k] + later[row, j, k])
                    later[row - 1, i, k] = mean
