"""Running the kernels: which build, on how many threads, and as a differentiable operation.

Series are independent, so the threads of ``_support/kernels.py`` take them in turn. How many there are is torch's to say
(``torch.set_num_threads``).

Long runs of small models use a build for their exact sizes (see `core.count`); all else uses one build for all sizes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..._support.errors import ArgumentError
from ..._support.kernels import run_chunks
from ..kernels.adjoint import Gradients, backward
from ..kernels.buffers import Parameters, Stored
from ..kernels.filters import mix_first, mix_last
from ..kernels.particles import swarm
from ..series import parameters

METHODS = {"imm": 0, "gpb1": 1, "gpb2": 2}
LONG = (
    5000  # rows from which a build for exact sizes is worth its compilation, a few seconds once per machine
)
SMALL = (16, 16, 8)  # largest M, n, m of such a build; beyond, unrolled code grows too large


def over_series(starts: np.ndarray, work: Callable[[int, int], None]) -> None:
    """Do ``work(begin, end)`` over all series, in as many threads as torch would use and as there is work for."""
    series, rows = len(starts) - 1, int(starts[-1])
    threads = min(series, torch.get_num_threads(), max(1, rows // 500))
    run_chunks(work, series, threads=threads)


def size_arguments(rows: int, M: int, n: int, m: int) -> Any:
    """Sizes in the form that picks the build: tuples for a build of exactly these sizes, numbers for the one that takes any."""
    exact = rows >= LONG and all(size <= most for size, most in zip((M, n, m), SMALL, strict=True))
    return ((0,) * M, (0,) * n, (0,) * m) if exact else (M, n, m)


def run_filter(p: Parameters, y: np.ndarray, starts: np.ndarray, method: str, everything: bool) -> Stored:
    """Filter all series by one of `METHODS`."""
    M, (rows, m), series = len(p.initial_log_probability), y.shape, len(starts) - 1
    n = len(p.initial_mean) // M
    kept = rows if everything else series
    out = Stored(
        np.empty(series),
        np.empty(kept),
        np.empty((kept, M)),
        np.empty((kept, M * n)),
        np.empty((kept, M * n * n)),
        np.empty((kept, M * M)),
        np.full((series, 2), -1, dtype=np.int64),
    )
    sizes = size_arguments(rows, M, n, m)
    kernel = mix_last if method == "gpb2" else mix_first
    y = np.ascontiguousarray(y)

    def work(begin: int, end: int) -> None:
        kernel(p, y, starts, begin, end, int(method == "gpb1"), int(everything), out, sizes)

    work(0, 0)  # compiled or loaded before several threads ask for it
    over_series(starts, work)
    check_failures(out.failure, M, method)
    return out


def check_failures(failure: np.ndarray, M: int, what: str) -> None:
    """Turn a kernel's note of where it stopped into an error."""
    for series in np.flatnonzero(failure[:, 0] >= 0)[:1]:
        t, mode = failure[series].tolist()
        if mode == M:
            raise ArgumentError(
                f"{what}: at step {t} of series {series} the observation has zero density in every mode that can be reached. "
                "Scale the data, or widen observation_noise."
            )
        raise ArgumentError(
            f"{what}: at step {t} of series {series} the innovation covariance H P H' + R of mode {mode} is not positive definite. "
            "Some combination of the observed components has no variance at all: give observation_noise (or process_noise) a positive one."
        )


class FilterTerms(torch.autograd.Function):
    """Log-likelihood terms of a filter, with derivatives in the data and every parameter; the other outputs carry none."""

    @staticmethod
    def forward(
        ctx: Any, method: str, starts: np.ndarray, first: int, y: torch.Tensor, *flat: torch.Tensor
    ) -> Any:
        """Outputs: terms, then the other fields of `Stored` from `log_mode` to `mixing`."""
        p = parameters(list(flat), first)
        out = run_filter(p, y.detach().numpy(), starts, method, True)
        ctx.problem = (method, starts, p, y.detach().numpy(), out)
        results = tuple(torch.from_numpy(value) for value in out[1:6])
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, terms_bar: torch.Tensor, *_: Any) -> Any:
        """One pass backwards; see `adjoint`."""
        method, starts, p, y, out = ctx.problem
        g = np.ascontiguousarray(terms_bar.numpy())
        total = run_adjoint(p, y, starts, method, out, g)
        return (
            None,
            None,
            None,
            torch.from_numpy(total.y),
            *[torch.from_numpy(value) for value in total[:-1]],
        )


def run_adjoint(
    p: Parameters, y: np.ndarray, starts: np.ndarray, method: str, out: Stored, terms_bar: np.ndarray
) -> Gradients:
    """Derivatives of ``terms_bar · terms``; each thread adds into arrays of its own, which are then summed."""
    M, m = len(p.initial_log_probability), y.shape[1]
    sizes = size_arguments(len(y), M, len(p.initial_mean) // M, m)
    y_bar = np.zeros(y.shape)

    def fresh() -> Gradients:
        return Gradients._make([*[np.zeros_like(value) for value in p[:-1]], y_bar])

    parts: list[Gradients] = []

    def work(begin: int, end: int) -> None:
        mine = fresh()
        parts.append(mine)
        backward(p, y, starts, begin, end, METHODS[method], out, terms_bar, mine, sizes)

    work(0, 0)  # compiled or loaded before several threads ask for it
    over_series(starts, work)
    return Gradients._make([*[np.sum([part[k] for part in parts], axis=0) for k in range(len(p) - 1)], y_bar])


def run_particles(
    p: Parameters,
    y: np.ndarray,
    starts: np.ndarray,
    particles: int,
    everything: bool,
    generator: torch.Generator | None,
) -> tuple[Stored, np.ndarray]:
    """Filter all series with `particles` particles; returns what the other filters return, and the effective sample size at each step."""
    M, (rows, m), series = len(p.initial_log_probability), y.shape, len(starts) - 1
    n = len(p.initial_mean) // M
    kept = rows if everything else series
    out = Stored(
        np.empty(series),
        np.empty(kept),
        np.empty((kept, M)),
        np.empty((kept, M * n)),
        np.empty((kept, M * n * n)),
        np.empty((kept, M * M)),
        np.full((series, 2), -1, dtype=np.int64),
    )
    uniform = torch.rand(rows, particles + 1, dtype=torch.float64, generator=generator).numpy()
    probability = torch.from_numpy(np.exp(p.initial_log_probability))
    chosen = (
        torch.multinomial(probability, series * particles, replacement=True, generator=generator)
        .reshape(series, particles)
        .numpy()
    )
    ess = np.empty(rows)
    swarm(
        p, np.ascontiguousarray(y), starts, particles, uniform, chosen, int(everything), out, ess, (M, n, m)
    )
    check_failures(out.failure, M, "rbpf")
    return out, ess
