r"""G, the mean and every score of one tilt of many points, each point read once.

    s_n = <x_n, η> + log w_n,     G = log Σ_n e^{s_n},     mean = Σ_n e^{s_n − G} x_n

`exptilt.tilting` is made for many queries, whose scores are products of matrices. One query makes a product of a matrix with a vector, and
then what counts is that a block of points is still in the cache when its weights are known: half the time at 64 dimensions. Points
are cut into parts whose sums are merged in order, so that the number of threads makes no difference to the last bit.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.elementary import FAST, exp_of_negative
from exptilt._support.kernels import kernel, run_chunks
from exptilt._support.transforms import has_tangent, is_concrete

Array = np.ndarray[Any, Any]
_MANY = 1 << 16  # numbers in the points from which the kernel is used
_PARTS = 64  # of the points, for threads to take
_ROWS = 128  # points whose weights are made together: 64 KiB of float64 at 64 dimensions


@kernel("the kernel of one tilt", fastmath=FAST)
def _sweep(
    points: Array, log_weight: Array, eta: Array, score: Array, peak: Array, mass: Array, total: Array
) -> None:
    """Of some points (N, D): their scores (N,), the largest (1,), and Σ e^{s − largest} (1,) and with x (D,), those two in float64."""
    count, size = points.shape
    weight, part = np.empty(_ROWS, points.dtype), np.empty(size, points.dtype)
    top = points.dtype.type(-np.inf)
    for start in range(0, count, _ROWS):
        rows = min(_ROWS, count - start)
        block, s, w = points[start : start + rows], score[start : start + rows], weight[:rows]
        high = top
        for i in range(rows):
            x = block[i]
            product = x[0] * eta[0]
            for k in range(1, size):
                product += x[k] * eta[k]
            s[i] = product + log_weight[start + i]
            high = max(high, s[i])
        if high == -np.inf:
            continue
        if high > top:
            shrink = exp_of_negative(top - high)
            mass[0] *= shrink
            for k in range(size):
                total[k] *= shrink
            top = high
        for i in range(rows):
            w[i] = exp_of_negative(s[i] - top)
        mass[0] += w.sum()
        part[:] = 0
        whole = rows - rows % 4
        for i in range(0, whole, 4):
            a, b, c, d = block[i], block[i + 1], block[i + 2], block[i + 3]
            for k in range(size):
                part[k] += (w[i] * a[k] + w[i + 1] * b[k]) + (w[i + 2] * c[k] + w[i + 3] * d[k])
        for i in range(whole, rows):
            for k in range(size):
                part[k] += w[i] * block[i, k]
        for k in range(size):
            total[k] += part[k]
    peak[0] = top


def suits(points: Tensor, log_weight: Tensor, eta: Tensor) -> bool:
    """Whether `tilt_once` can be used: one η, many points in one piece of main memory, and nobody wants derivatives."""
    tensors = points, log_weight, eta
    if (
        eta.numel() != points.shape[-1]
        or points[..., 0].numel() != points.shape[-2]
        or points.numel() < _MANY
    ):
        return False
    if any(
        t.device.type != "cpu" or t.dtype not in (torch.float32, torch.float64) or not t.is_contiguous()
        for t in tensors
    ):
        return False
    if not is_concrete(*tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    return not any(has_tangent(t) for t in tensors)


def tilt_once(points: Tensor, log_weight: Tensor, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(G, mean, scores): ``()``, ``(D,)``, ``(N,)`` of ``points (N, D)``, ``log_weight (N,)`` and ``eta (D,)``."""
    x, w, e = points.detach().numpy(), log_weight.detach().numpy(), eta.detach().numpy()
    count, size = x.shape
    score, length = np.empty(count, x.dtype), -(-count // _PARTS)
    peak, mass, total = np.full(_PARTS, -np.inf, x.dtype), np.zeros(_PARTS), np.zeros((_PARTS, size))

    def work(first: int, last: int) -> None:
        for i in range(first, last):
            piece, one = slice(i * length, (i + 1) * length), slice(i, i + 1)
            _sweep(x[piece], w[piece], e, score[piece], peak[one], mass[one], total[i])

    _sweep(
        x[:0], w[:0], e, score[:0], peak[:1], mass[:1], total[0]
    )  # compiled or loaded before several threads ask for it
    run_chunks(work, _PARTS)
    share = np.exp(peak.astype(np.float64) - peak.max())
    whole = share @ mass
    value, mean = peak.max() + np.log(whole), share @ total / whole
    return (
        torch.tensor(value, dtype=points.dtype),
        torch.from_numpy(mean).to(points.dtype),
        torch.from_numpy(score),
    )
