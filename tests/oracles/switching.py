# ruff: noqa: B023  functions of a step are called within it
"""Slow, obvious versions: every mode path as one dense joint Gaussian, a textbook Kalman filter and smoother,
the filters that collapse (GPB1, GPB2, IMM, Viterbi), Hamilton's filter.
"""

import itertools

import numpy as np
from scipy.special import logsumexp
from scipy.stats import multivariate_normal


def at(value, rank, t):
    """The matrices of step t."""
    value = np.asarray(value, dtype=float)
    return value[t] if value.ndim == rank + 1 else value


def step_parameters(model, t, inputs=None):
    """transition, W, c, Q, H, d, R of all modes at step t, offsets with inputs."""
    M, n, m = model.modes, model.states, model.outputs
    c = np.zeros((M, n)) if model.dynamics_offset is None else at(model.dynamics_offset, 2, t).copy()
    d = np.zeros((M, m)) if model.observation_offset is None else at(model.observation_offset, 2, t).copy()
    if model.dynamics_input is not None:
        c = c + at(model.dynamics_input, 3, t) @ inputs[t]
    if model.observation_input is not None:
        d = d + at(model.observation_input, 3, t) @ inputs[t]
    return (
        at(model.transition, 2, t),
        at(model.dynamics, 3, t),
        c,
        at(model.process_noise, 3, t),
        at(model.observation, 3, t),
        d,
        at(model.observation_noise, 3, t),
    )


def dense_path(model, y, path, inputs=None):
    """Log P(path, y) and the law of x_1 … x_T given path and y, from one joint Gaussian of all states and
    observations.

    `path` holds s_0 … s_T if the model starts "before", else s_1 … s_T.
    """
    T, n, m = len(y), model.states, model.outputs
    before = model.start == "before"
    modes = path if before else (None, *path)
    start = path[0]
    log_probability = np.log(np.asarray(model.initial_probability)[start])
    # every x_t as a linear function of independent noises: mean, and a matrix of loadings
    mean = np.asarray(model.initial_mean)[start].copy()
    dims = n + T * 2 * n + T * m
    cov = np.zeros((dims, dims))
    cov[:n, :n] = np.asarray(model.initial_covariance)[start]
    load = np.zeros((n, dims))
    load[:, :n] = np.eye(n)
    xs, Ls, ys, Gs = [], [], [], []
    position = n
    for t in range(T):
        transition, W, c, Q, H, d, R = step_parameters(model, t, inputs)
        k = modes[t + 1]
        if t or before:
            log_probability += np.log(transition[modes[t], k])
            if model.maps is not None:
                tie = np.asarray(model.maps)[modes[t], k]
                mean, load = tie @ mean, tie @ load
                if model.map_covariance is not None:
                    cov[position : position + n, position : position + n] = np.asarray(model.map_covariance)[
                        modes[t], k
                    ]
                    load[:, position : position + n] += np.eye(n)
                position += n
            mean, load = W[k] @ mean + c[k], W[k] @ load
            cov[position : position + n, position : position + n] = Q[k]
            load[:, position : position + n] += np.eye(n)
            position += n
        xs.append(mean)
        Ls.append(load.copy())
        G = H[k] @ load
        cov[position : position + m, position : position + m] = R[k]
        G[:, position : position + m] += np.eye(m)
        position += m
        ys.append(H[k] @ mean + d[k])
        Gs.append(G)
    X, L, Y, G = np.concatenate(xs), np.concatenate(Ls), np.concatenate(ys), np.concatenate(Gs)
    seen = ~np.isnan(y.reshape(-1))
    cov_y = G @ cov @ G.T
    cross = L @ cov @ G.T
    S = cov_y[np.ix_(seen, seen)]
    e = (y.reshape(-1) - Y)[seen]
    if seen.any():
        log_probability += multivariate_normal.logpdf(e, np.zeros(len(e)), S, allow_singular=False)
        gain = np.linalg.solve(S, cross[:, seen].T).T
        X = X + gain @ e
        cov_x = L @ cov @ L.T - gain @ cross[:, seen].T
    else:
        cov_x = L @ cov @ L.T
    return log_probability, X.reshape(T, n), cov_x.reshape(T, n, T, n)


def enumerate_paths(model, y, inputs=None):
    """All paths: a list of (path, log P(path, y), means, covariances)."""
    length = len(y) + (1 if model.start == "before" else 0)
    with np.errstate(divide="ignore"):
        return [
            (path, *dense_path(model, y, path, inputs))
            for path in itertools.product(range(model.modes), repeat=length)
        ]


def exact_posterior(model, y, inputs=None):
    """Log p(y); smoothed P(s_t), pairs, and moments of x_t by mode, from the list of all paths."""
    everything = enumerate_paths(model, y, inputs)
    T, M, n = len(y), model.modes, model.states
    log_weight = np.array([item[1] for item in everything])
    total = logsumexp(log_weight)
    weight = np.exp(log_weight - total)
    probability, pairs = np.zeros((T, M)), np.zeros((T, M, M))
    mean, second = np.zeros((T, M, n)), np.zeros((T, M, n, n))
    for w, (path, _, x, P) in zip(weight, everything, strict=True):
        now = path[1:] if model.start == "before" else path
        for t in range(T):
            probability[t, now[t]] += w
            mean[t, now[t]] += w * x[t]
            second[t, now[t]] += w * (P[t, :, t, :] + np.outer(x[t], x[t]))
            if model.start == "before":
                pairs[t, path[t], path[t + 1]] += w
            elif t:
                pairs[t, path[t - 1], path[t]] += w
            else:
                pairs[t, path[0], path[0]] += w
    mean /= probability[..., None]
    cov = second / probability[..., None, None] - mean[..., :, None] * mean[..., None, :]
    best = everything[int(np.argmax(log_weight))][0]
    return total, probability, pairs, mean, cov, best[1:] if model.start == "before" else best


def kalman(model, y, mode=0):
    """Textbook Kalman filter and Rauch smoother of one mode: log-likelihood and all moments."""
    _, W, c, Q, H, d, R = (value[mode] for value in step_parameters(model, 0))
    mean, cov = np.asarray(model.initial_mean)[mode], np.asarray(model.initial_covariance)[mode]
    total, filtered, ahead = 0.0, [], []
    for t in range(len(y)):
        if t or model.start == "before":
            mean, cov = W @ mean + c, W @ cov @ W.T + Q
        ahead.append((mean, cov))
        seen = ~np.isnan(y[t])
        if seen.any():
            Hs, S = H[seen], H[seen] @ cov @ H[seen].T + R[np.ix_(seen, seen)]
            e = y[t, seen] - d[seen] - Hs @ mean
            K = cov @ Hs.T @ np.linalg.inv(S)
            total += multivariate_normal.logpdf(e, np.zeros(len(e)), S)
            mean, cov = mean + K @ e, cov - K @ S @ K.T
        filtered.append((mean, cov))
    smoothed = [filtered[-1]]
    for t in range(len(y) - 2, -1, -1):
        m, P = filtered[t]
        J = P @ W.T @ np.linalg.inv(ahead[t + 1][1])
        smoothed.append(
            (m + J @ (smoothed[-1][0] - ahead[t + 1][0]), P + J @ (smoothed[-1][1] - ahead[t + 1][1]) @ J.T)
        )
    return total, filtered, smoothed[::-1]


def collapsed(weight, laws):
    """Mean and covariance of a mixture of laws (mean, covariance)."""
    mean = sum(w * m for w, (m, _) in zip(weight, laws, strict=True))
    spread = sum(w * (P + np.outer(m - mean, m - mean)) for w, (m, P) in zip(weight, laws, strict=True))
    return mean, spread


def collapsing_filter(model, y, method):
    """Terms, log mode probabilities, means, covariances and mixing weights of a filter of that name."""
    M, out = model.modes, []
    laws = list(zip(np.asarray(model.initial_mean), np.asarray(model.initial_covariance), strict=True))
    with np.errstate(divide="ignore"):
        log_mode = np.log(np.asarray(model.initial_probability))
    for t, row in enumerate(y):
        transition, W, c, Q, H, d, R = step_parameters(model, t)
        begun, seen = t == 0 and model.start == "first", ~np.isnan(row)

        def read(i, j):
            mean, cov = laws[i]
            if model.maps is None:
                return mean, cov
            A = model.maps[i, j]
            extra = 0.0 if model.map_covariance is None else model.map_covariance[i, j]
            return A @ mean, A @ cov @ A.T + extra

        def stepped(law, j):
            mean, cov = law
            if not begun:
                mean, cov = W[j] @ mean + c[j], W[j] @ cov @ W[j].T + Q[j]
            if not seen.any():
                return (mean, cov), 0.0
            Hs, S = H[j][seen], H[j][seen] @ cov @ H[j][seen].T + R[j][np.ix_(seen, seen)]
            e = row[seen] - d[j][seen] - Hs @ mean
            K = cov @ Hs.T @ np.linalg.inv(S)
            density = multivariate_normal.logpdf(e, np.zeros(len(e)), S)
            return (mean + K @ e, cov - K @ S @ K.T), float(density)

        def shares(score):
            total = logsumexp(score, axis=0)
            reached = np.isfinite(total)
            share = np.exp(score - np.where(reached, total, 0.0))
            return np.where(reached, share, np.exp(log_mode)[:, None]), total

        with np.errstate(divide="ignore"):
            score = log_mode[:, None] + np.log(transition)
        if begun or method in ("imm", "gpb1"):
            weight, prior = shares(score)
            if method == "gpb1":
                weight = np.exp(log_mode)[:, None].repeat(M, 1)
            if begun:
                weight, prior = np.eye(M), log_mode
            mixed = [
                laws[j] if begun else collapsed(weight[:, j], [read(i, j) for i in range(M)])
                for j in range(M)
            ]
            found = [stepped(mixed[j], j) for j in range(M)]
            laws, log_weight = [law for law, _ in found], prior + [density for _, density in found]
        else:
            pairs = [[stepped(read(i, j), j) for j in range(M)] for i in range(M)]
            score = score + [[density for _, density in line] for line in pairs]
            weight, log_weight = shares(score)
            if method == "viterbi":
                weight, log_weight = np.eye(M)[score.argmax(0)].T, score.max(0)
            laws = [collapsed(weight[:, j], [pairs[i][j][0] for i in range(M)]) for j in range(M)]
        term = logsumexp(log_weight)
        log_mode = log_weight - term
        out.append((term, log_mode, *map(np.stack, zip(*laws, strict=True)), weight))
    return [np.stack(values) for values in zip(*out, strict=True)]


def hamilton(transition, initial, density):
    """Hamilton's filter and Kim's smoother for a hidden Markov chain with densities (T, M); `initial` is the
    law of the first mode before it is seen.
    """
    predicted, filtered, total = np.asarray(initial), [], 0.0
    for row in density:
        joint = predicted * row
        total += np.log(joint.sum())
        filtered.append(joint / joint.sum())
        predicted = filtered[-1] @ transition
    smoothed = [filtered[-1]]
    for p in filtered[-2::-1]:
        smoothed.append(p * (transition @ (smoothed[-1] / (p @ transition))))
    return total, np.array(filtered), np.array(smoothed[::-1])
