r"""How hidden states are distributed along the depth of a model (THEORY F1).

From a sample of tokens, X of N rows with mean x̄ and covariance C of eigenvalues λ_1 ≥ λ_2 ≥ ...:

    spread           √tr C                                 distance from the mean, root mean square
    effective rank   e^{−Σ π_i log π_i},  π_i = λ_i / Σλ   1 if all variance is on a line, N or width if even
    anisotropy       mean cosine between two tokens        0 if directions are balanced, 1 if all agree
    excess kurtosis  of each coordinate, their median      0 for a Gaussian, positive for heavy tails

Gaussianity is tested by `exptilt.dynamics.gaussianity` on the leading principal components: sliced
Anderson–Darling, p-values corrected by Holm's rule for the number of places tested. Neighbouring tokens of a
text depend on each other and no test allows for that; tokens are therefore sampled far apart.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exptilt.dynamics.observe.gaussianity import gaussianity

COMPONENTS = 16  # leading principal components that are tested for Gaussianity
SPECTRUM = 64  # eigenvalues kept

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Cloud:
    """Numbers of one cloud of hidden states; see the module."""

    spread: float
    effective_rank: float
    anisotropy: float
    kurtosis: float
    spectrum: Array  # (SPECTRUM,), shares of variance by component, largest first; NaN beyond the width
    sliced: float  # Anderson–Darling statistic, mean over random slices through the leading components
    p: float  # joined over slices; not yet corrected for the number of clouds


def cloud(points: Tensor) -> Cloud:
    """The numbers of a sample of hidden states ``(token, width)``."""
    x = points.double()
    count = x.shape[0]
    spectrum = np.full(SPECTRUM, np.nan)
    if count < 2:
        return Cloud(*(np.nan,) * 4, spectrum, np.nan, np.nan)
    centred = x - x.mean(0)
    wide = count < x.shape[1]
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(centred @ centred.mT if wide else centred.mT @ centred)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    total = float(values.sum())
    share = values / total
    kept = min(SPECTRUM, share.shape[0])
    spectrum[:kept] = share[:kept].numpy()
    rank = float(torch.special.entr(share).sum().exp()) if total > 0 else np.nan
    sliced = p = np.nan
    # At least four points per dimension that is tested.
    leading = min(COMPONENTS, (count - 1) // 4)
    if leading and total > 0:
        main = vectors[:, :leading]
        test = gaussianity(main * values[:leading].sqrt() if wide else centred @ main)
        sliced, p = float(test.sliced), float(test.sliced_p)
    return Cloud((total / (count - 1)) ** 0.5, rank, _anisotropy(x), _kurtosis(centred), spectrum, sliced, p)


def _anisotropy(x: Tensor) -> float:
    """Mean cosine over pairs of different rows: (‖Σu‖² − N) / N(N−1) for unit vectors u."""
    unit = torch.nn.functional.normalize(x, dim=-1, eps=1e-300)
    count = x.shape[0]
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


def _kurtosis(centred: Tensor) -> float:
    """Median over coordinates of m₄/m₂² − 3; coordinates that do not vary are left out."""
    second = centred.square().mean(0)
    alive = second > 1e-24 * second.max()
    excess = centred.pow(4).mean(0)[alive] / second[alive].square() - 3
    return float(torch.quantile(excess, 0.5)) if excess.numel() else np.nan


def holm(p: Array) -> Array:
    """P-values ``(test,)`` corrected for their number by Holm's step-down rule; NaN stays and does not count.

    Example:
        >>> [float(x) for x in holm(np.array([0.01, 0.04, 0.03]))]
        [0.03, 0.06, 0.06]
    """
    found = np.full(p.shape, np.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known])]
    factors = np.arange(len(order), 0, -1)
    found[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return found
