"""The most likely sequence of modes: by Viterbi's recursion, or by weighing every path.

Viterbi's keeps for each mode j only the best way into it:

    score_j = max_i  score_i + log π_ij + log p_j(y_t | the Kalman filter along the path kept for i)

It is GPB2 with the collapse replaced by a choice. With no continuous state to remember (a hidden Markov
model) that is Viterbi's algorithm and exact.
"""

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..checks import plain, safe_log
from ..kernels.buffers import Run, Sizes, begin_series, layout, load, look, recall, work_buffer
from ..kernels.filters import carry_some, read_as
from ..kernels.kalman import Buffer, copy, kernel
from ..parameters import ModelParameters
from ..series import SeriesLike, Values, arrange
from .diffuse import initial_laws, least_rank, move, see
from .exact import Matrices, smooth_exact
from .problem import Problem, prepare
from .run import check_failures, new_run, stopped


def most_likely_path(
    model: ModelParameters, y: SeriesLike, *, method: str = "viterbi", inputs: SeriesLike | None = None
) -> Values:
    """The most likely modes; arguments as for `SwitchingLinearGaussian.most_likely_path`."""
    if method not in ("viterbi", "exact"):
        raise ArgumentError(f'most_likely_path: method is {method!r}. Pass "viterbi" or "exact".')
    with torch.no_grad():
        problem = prepare(model, y, inputs, "most_likely_path")
        data = problem.data
        if method == "exact":
            pieces = [smooth_exact(problem, k, "most_likely_path").path for k in range(data.series)]
            path = torch.cat(pieces).numpy()
        else:
            run = new_run(problem.parameters, data.rows, data.starts)
            path = np.empty(len(data.rows), np.int64)
            come_from = np.empty((len(path), problem.sizes[0]), np.int64)
            if problem.diffuse.any():
                for series in range(data.series):
                    _first_choices(problem, series, run, come_from)
            viterbi(run, path, come_from, problem.sizes)
            check_failures(run, "most_likely_path")
    return arrange(path, data, None)


def _first_choices(problem: Problem, series: int, run: Run, come_from: np.ndarray) -> None:
    """Viterbi's steps while something is diffuse, in the limit; the kernel goes on from rows of `run`."""
    own, start = Matrices(problem, series), int(problem.data.starts[series])
    laws, score = initial_laws(own.mean, own.cov, problem.diffuse), own.log_probability
    M, mapped = len(laws), len(problem.flat[-1]) > 0
    for t, row in enumerate(problem.data.tensor[problem.data.cuts[series]]):
        transition, W, c, Q, H, d, R = own.at(t)
        seen = ~torch.isnan(row)
        begun = t == 0 and problem.first == 1
        scores = torch.diag(score) if begun else score[:, None] + safe_log(transition)
        if begun:
            scores = torch.where(torch.eye(M, dtype=torch.bool), scores, -torch.inf)
        found = []
        for i in range(M):
            for j in range(M):
                law = laws[i]
                if not begun:
                    law = move(law, own.maps[i, j], 0.0, own.spread[i, j]) if mapped else law
                    law = move(law, W[j], c[j], Q[j])
                one = see(law, row[seen], H[j][seen], d[j][seen], R[j][seen][:, seen])
                if one is None:
                    raise stopped(f"most_likely_path: at step {t} of series {series}", j, M)
                found.append(one)
        density = torch.stack([one[1] for one in found]).reshape(M, M)
        scores = least_rank(scores + density, np.array([one[2] for one in found]).reshape(M, M))
        best = scores.argmax(0).tolist()
        laws, score = [found[best[j] * M + j][0] for j in range(M)], scores.max(0).values
        come_from[start + t] = best
        run.lead[series] = t + 1
        run.out.log_mode[start + t] = plain(score)
        run.out.mode_mean[start + t] = np.concatenate([plain(law.mean) for law in laws])
        run.out.mode_covariance[start + t] = np.concatenate([plain(law.P).reshape(-1) for law in laws])
        if not any(law.A.shape[1] for law in laws):
            return


@kernel
def viterbi(run: Run, path: Buffer, come_from: Buffer, sizes: Sizes) -> None:
    """Write the best path of every series to `path` (rows,).

    `come_from` (rows, M) is the mode before on the best way into each; that of steps done before is given.
    """
    p, y, starts, out, lead = run
    at = layout(sizes[0], sizes[1], sizes[2], sizes[0])
    M, law = at.M, at.law
    state = at.end
    score = state + M * law
    new = score + M
    new_score = new + M * law
    after = new_score + M
    maps = after + law
    w, index = work_buffer(p, at, maps), np.empty(at.m, np.int64)
    for series in range(len(starts) - 1):
        done = lead[series]
        if done > 0:
            recall(out, starts[series] + done - 1, w, at, state, score)
        else:
            begin_series(p, series, w, at, state, score)
        for t in range(done, starts[series + 1] - starts[series]):
            row = starts[series] + t
            load(p, series, t, t == done, w, at, maps)
            seen = look(y, row, w, at, index)
            begun = t == 0 and p.first == 1
            for j in range(M):
                come_from[row, j] = -1
                for i in range(M):
                    if begun and i != j:
                        continue
                    source, value = state + i * law, w[score + i]
                    if not begun:
                        source = at.read
                        read_as(p, w, at, maps, i, j, state, source)
                        value += w[at.log_transition + i * M + j]
                    density = carry_some(w, at, seen, begun, j, source, after)
                    if np.isnan(density):
                        out.failure[series, 0], out.failure[series, 1] = t, j
                        return
                    value += density
                    if come_from[row, j] < 0 or value > w[new_score + j]:
                        w[new_score + j] = value
                        come_from[row, j] = i
                        copy(law, w, after, w, new + j * law)
            copy(M * law, w, new, w, state)
            copy(M, w, new_score, w, score)
        best = 0
        for j in range(M):
            if w[score + j] > w[score + best]:
                best = j
        for back in range(starts[series + 1] - starts[series]):
            row = starts[series + 1] - 1 - back
            path[row] = best
            best = come_from[row, best]
