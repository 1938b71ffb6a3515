r"""Compiled passes over a series whose beliefs are closed-form families with discounted dynamics.

A belief is its natural parameter θ ``(K,)``. Its coordinates are independent groups, of which group g has
the numbers θ[g], θ[g + D], θ[g + 2D], …:

    Gamma            A = log Γ(a) − a log b                          θ = (−b, a − 1)
    Beta, Dirichlet  A = Σ log Γ(α_k) − log Γ(Σ α_k)                 θ = α − 1
    NormalGamma      A = log Γ(a) − a log b − ½ log κ                θ = (κm, −b − ½κm², −½κ, a − ½)

An observation adds e(y) to θ and weighs a mode by A(θ + e) − A(θ) + log c(y). Components are merged by
averaging ∇A(θ) and inverting it. `smooth_family` needs nothing of a family: given the modes, the evidence
of later observations goes back discounted as that of earlier ones goes forward (`model`).
"""

import math
from typing import Any

import numpy as np
from numba import njit

from exptilt._support.kernels import kernel
from exptilt.families.numerics.kernels import _digamma, _trigamma, invert_dirichlet

GAMMA, DIRICHLET, NORMAL_GAMMA = range(3)
GPB2, IMM, GPB1 = range(3)
Buffer = Any  # a float64 array; numba says more of it


@njit(error_model="numpy")
def _log_partition(kind: int, D: int, theta: Buffer) -> float:
    total = 0.0
    for g in range(D):
        if kind == GAMMA:
            a = theta[D + g] + 1.0
            total += math.lgamma(a) - a * np.log(-theta[g])
        elif kind == DIRICHLET:
            whole = 0.0
            for k in range(g, theta.size, D):
                whole += theta[k] + 1.0
                total += math.lgamma(theta[k] + 1.0)
            total -= math.lgamma(whole)
        else:
            a, count = theta[3 * D + g] + 0.5, -2.0 * theta[2 * D + g]
            rate = -theta[D + g] - theta[g] * theta[g] / (2.0 * count)
            total += math.lgamma(a) - a * np.log(rate) - 0.5 * np.log(count)
    return total


@njit(error_model="numpy")
def _add_mean(kind: int, D: int, theta: Buffer, weight: float, mean: Buffer) -> None:
    for g in range(D):
        if kind == GAMMA:
            a, b = theta[D + g] + 1.0, -theta[g]
            mean[g] += weight * a / b
            mean[D + g] += weight * (_digamma(a) - np.log(b))
        elif kind == DIRICHLET:
            whole = 0.0
            for k in range(g, theta.size, D):
                whole += theta[k] + 1.0
            whole = _digamma(whole)
            for k in range(g, theta.size, D):
                mean[k] += weight * (_digamma(theta[k] + 1.0) - whole)
        else:
            a, count = theta[3 * D + g] + 0.5, -2.0 * theta[2 * D + g]
            m = theta[g] / count
            rate = -theta[D + g] - theta[g] * m / 2.0
            precision = a / rate
            mean[g] += weight * m * precision
            mean[D + g] += weight * precision
            mean[2 * D + g] += weight * (1.0 / count + m * m * precision)
            mean[3 * D + g] += weight * (_digamma(a) - np.log(rate))


@njit(error_model="numpy")
def _invert_gap(s: float) -> float:
    """The a with log a − ψ(a) = s."""
    a: float = (3.0 - s + np.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    for _ in range(6):
        step = (np.log(a) - _digamma(a) - s) / (1.0 / a - _trigamma(a))
        a = max(a - step, a / 8.0)
        if abs(step) < 1e-9 * a:  # Newton's next step would be below rounding
            break
    return a


@njit(error_model="numpy")
def _from_mean(kind: int, D: int, mean: Buffer, theta: Buffer) -> None:
    if kind == DIRICHLET:
        size = mean.size // D
        row, alpha = np.empty((1, size)), np.empty((1, size))
        for g in range(D):
            for k in range(size):
                row[0, k] = mean[g + k * D]
            invert_dirichlet(row, alpha)
            for k in range(size):
                theta[g + k * D] = alpha[0, k] - 1.0
        return
    for g in range(D):
        if kind == GAMMA:
            a = _invert_gap(np.log(mean[g]) - mean[D + g])
            theta[g], theta[D + g] = -a / mean[g], a - 1.0
        else:
            precision = mean[D + g]
            a, m = _invert_gap(np.log(precision) - mean[3 * D + g]), mean[g] / precision
            count = 1.0 / (mean[2 * D + g] - mean[g] * m)
            theta[g], theta[2 * D + g], theta[3 * D + g] = count * m, -0.5 * count, a - 0.5
            theta[D + g] = -a / precision - 0.5 * count * m * m


@njit(error_model="numpy")
def _merge(kind: int, D: int, parts: Buffer, weight: Buffer, work: Buffer, target: Buffer) -> None:
    """The member with the expected statistics of the mixture."""
    for i in range(weight.size):
        if weight[i] == 1.0:
            target[:] = parts[i]
            return
    work[:] = 0.0
    for i in range(weight.size):
        if weight[i] > 0.0:
            _add_mean(kind, D, parts[i], weight[i], work)
    _from_mean(kind, D, work, target)


@njit(error_model="numpy")
def _normalise(score: Buffer, weight: Buffer) -> float:
    """log Σ e^score, with the shares in `weight`; equal shares where all scores are −∞."""
    top: float = score.max()
    if not top > -np.inf:
        weight[:] = 1.0 / score.size
        return top
    total = 0.0
    for i in range(score.size):
        weight[i] = np.exp(score[i] - top)
        total += weight[i]
    weight /= total
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
    theta, parts, level = np.empty((M, K)), np.empty((M, K)), np.empty(M)
    score, weight, work, one = np.empty(M), np.empty(M), np.empty(K), np.empty(K)
    for series in range(len(starts) - 1):
        theta[:], level[:] = prior, log_initial
        for row in range(starts[series], starts[series + 1]):
            new, joint = belief[row], mixing[row]
            if method == GPB1:
                _normalise(level, weight)
                _merge(kind, D, theta, weight, work, one)
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
                            before = _log_partition(kind, D, part)
                            for k in range(K):
                                part[k] += evidence[row, k]
                            score[i] += _log_partition(kind, D, part) - before + log_base[row]
                log_level[row, j] = _normalise(score, weight)
                for i in range(M):
                    joint[i, j] = weight[i]
                target = new[j]
                if method == GPB2:
                    _merge(kind, D, parts, weight, work, target)
                    continue
                if method == IMM:
                    _merge(kind, D, theta, weight, work, one)
                for k in range(K):
                    target[k] = rest[j, k] + discount[j] * (one[k] - rest[j, k])
                if seen[row]:
                    gain = -_log_partition(kind, D, target)
                    for k in range(K):
                        target[k] += evidence[row, k]
                    log_level[row, j] += gain + _log_partition(kind, D, target) + log_base[row]
            terms[row] = _normalise(log_level[row], weight)
            sound = np.isfinite(new).all()
            if not np.isfinite(terms[row]) or not sound:
                failure[series, 0], failure[series, 1] = row, not sound
                break
            level[:] = log_level[row] - terms[row]
            log_level[row] = level
            theta[:] = new


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
