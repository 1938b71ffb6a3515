r"""GPB_k for any k: GPB2 over windows of the last k − 1 modes (THEORY E1).

GPB_k keeps a law for each way that the last k − 1 modes can have gone, M^{k−1} of them, and so collapses only
components that agree on all of these. That is GPB2 of a model whose "modes" are the windows

    w = (s_{t−k+2}, …, s_t),    P(w' | w) = π(s_t, s_{t+1}) if w' is w moved on by one mode, else 0,

each with the matrices of its newest mode. Filter, gradient, smoother and diffuse starts are those of GPB2;
the laws of windows with the same newest mode are merged at the end, which changes no moment. Before the first
step there is no past: windows that end in s_0 share its probability equally and have its law, so merging them
loses nothing, and the likelihood is exact while k > t.

A window's number in base M spells its modes, the newest in the last place.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..arrays import METHODS, Parameters
from .moments import mixture
from .problem import Problem

MOST = 1024  # largest number of windows; their transition matrix then has a million entries


def collapse_order(method: str) -> int:
    """The k of "gpb3", "gpb4" and so on; 2 for any other name."""
    k = method.removeprefix("gpb")
    return int(k) if method.startswith("gpb") and k.isascii() and k.isdecimal() and int(k) > 2 else 2


def check_method(method: str, what: str, *others: str, argument: str = "method") -> None:
    """Raise unless `method` is "imm", "gpb1", "gpb2", "gpb3" … or one of `others`."""
    if method not in (*METHODS, *others) and collapse_order(method) < 3:
        names = ", ".join(f'"{name}"' for name in (*METHODS, "gpb3", "gpb4"))
        more = "".join(f', "{name}"' for name in others)
        raise ArgumentError(f"{what}: {argument} is {method!r}. Pass one of {names} … (any k){more}.")


def over_windows(problem: Problem, method: str, what: str) -> tuple[Problem, str, tuple[str, int] | None]:
    """The problem and method to run, and for windows the name of the method and the number of true modes."""
    k = collapse_order(method)
    if k == 2:
        return problem, method, None
    return windowed(problem, k, what), "gpb2", (method, problem.sizes[0])


def newest(modes: int, k: int, what: str) -> np.ndarray:
    """The newest mode of each window of k − 1 modes, ``(M^{k−1},)``; refused if there are too many."""
    if modes ** (k - 1) > MOST:
        raise ArgumentError(
            f'{what}: "gpb{k}" keeps M^{k - 1} laws, which with {modes} modes are {modes ** (k - 1)}, more '
            f"than {MOST}. Pass a smaller k."
        )
    return np.arange(modes ** (k - 1)) % modes


def follows(now: np.ndarray) -> np.ndarray:
    """[w, w'] is 1 where the window w' is w moved on by one mode, else 0."""
    count, M = len(now), int(now.max()) + 1
    number = np.arange(count)
    return np.asarray(number[:, None] * M % count == number // M * M, np.float64)


def windowed(problem: Problem, k: int, what: str) -> Problem:
    """The same problem with windows of k − 1 modes for modes."""
    M, n, m = problem.sizes
    now = newest(M, k, what)
    mask: Any = follows(now)
    values: list[Any] = list(problem.given)[:12]
    if isinstance(values[0], torch.Tensor):
        mask = torch.from_numpy(mask)

    def of_newest(value: Any) -> Any:
        parts = value.reshape(*value.shape[:-1], M, -1)[..., now, :]
        return parts.reshape(*value.shape[:-1], -1)

    transition = values[0].reshape(*values[0].shape[:-1], M, M)[..., now, :][..., now]
    flat = [(transition * mask).reshape(*values[0].shape[:-1], -1), *map(of_newest, values[1:10])]
    flat[-1] = flat[-1] - np.log(len(now) / M)
    for maps in values[10:]:
        full = maps.reshape(M, M, -1)[now][:, now] if len(maps) else maps
        flat.append(full.reshape(-1))
    given: Any = tuple(flat)
    if isinstance(problem.given, Parameters):
        given = Parameters._make([*map(np.ascontiguousarray, flat), problem.first])
    return replace(problem, sizes=(len(now), n, m), given=given)


def merged(M: int, log_window: Any, mean: Any, cov: Any) -> list[Any]:
    """Log mode probabilities, moments by mode and mixing probabilities, flat as `Stored` has them.

    Args:
        M: how many modes there are.
        log_window: log probabilities of windows, ``(rows, M^{k−1})``.
        mean, cov: moments in each window, ``(rows, M^{k−1}·n)`` and ``(rows, M^{k−1}·n·n)``.
    """
    rows, n = len(log_window), mean.shape[-1] // log_window.shape[-1]
    log_mode, weight, mixing = merged_modes(M, log_window)
    means, covs = mean.reshape(rows, -1, M, n).swapaxes(1, 2), cov.reshape(rows, -1, M, n, n).swapaxes(1, 2)
    moments = mixture(weight.swapaxes(1, 2), means, covs)
    return [log_mode, *(value.reshape(rows, -1) for value in (*moments, mixing))]


def merged_modes(M: int, log_window: Any) -> tuple[Any, Any, Any]:
    """From log probabilities of windows ``(rows, M^{k−1})``: those of modes, shares of windows, mixing.

    Shares are ``(rows, M^{k−2}, M)``, of the windows that end alike; mixing is [i, j] = P(i before | j now).
    """
    rows = len(log_window)
    log_mode, weight = _shares(log_window.reshape(rows, -1, M))
    pairs, _ = _shares(log_window.reshape(rows, -1, M * M))
    return log_mode, weight, _shares(pairs.reshape(rows, M, M))[1]


def merged_smoothing(problem: Problem, probability: Any, mean: Any, cov: Any) -> list[np.ndarray]:
    """Mode probabilities, moments by mode and pairs given the whole series, from those of windows."""
    M, rows = problem.sizes[0], len(probability)
    with np.errstate(divide="ignore"):
        _, mean, cov, _ = merged(M, np.log(probability), mean, cov)
    pairs = probability.reshape(rows, -1, M, M).sum(1)
    if problem.first:  # there is no mode before the first one
        begin = problem.data.starts[:-1]
        pairs[begin] = pairs[begin].sum(1)[:, None] * np.eye(M)
    return [pairs.sum(1), mean, cov, pairs.reshape(rows, -1)]


def _shares(score: Any) -> tuple[Any, Any]:
    """Log-sums over axis 1, and the share of each entry in them; equal shares where all are −inf."""
    xp: Any = torch if isinstance(score, torch.Tensor) else np
    top = xp.amax(score, 1)[:, None]
    top = xp.where(xp.isinf(top), 0.0, top)
    part = xp.exp(score - top)
    total = part.sum(1)
    none = total == 0
    share = xp.where(none[:, None], 1.0 / score.shape[1], part / xp.where(none, 1.0, total)[:, None])
    logs = xp.log(xp.where(none, 1.0, total)) + top[:, 0]
    return xp.where(none, -xp.inf, logs), share
