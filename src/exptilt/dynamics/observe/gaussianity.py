r"""How Gaussian a cloud of points is.

With z_n the points whitened by their own mean and covariance (divided by N), on the R dimensions they
really fill:

    Mardia's skewness   b₁ = ‖(1/N) Σ z⊗z⊗z‖²          (N/6)·k·b₁ ~ χ² with R(R+1)(R+2)/6 degrees of freedom
    Mardia's kurtosis   b₂ = (1/N) Σ ‖z‖⁴              (b₂ − R(R+2)(N−1)/(N+1)) / √(8R(R+2)/N) ~ N(0,1)
    sliced              Anderson and Darling's A² of ⟨z,u⟩, mean over K directions u drawn once and for all

under the hypothesis of a Gaussian; k = (R+1)(N+1)(N+3) / (N((N+1)(R+1) − 6)) is Mardia's correction for
small N. A² of one direction gets its p-value from D'Agostino and Stephens' approximation for unknown mean
and variance; the p-values of all directions are joined by Cauchy's rule (Liu and Xie 2020), which allows
for dependence. None of these depends on where a cloud lies or how it is stretched, so states can be
compared before and after any affine map.

R counts the eigenvalues of the covariance above 10⁻⁹ of the largest: after a layer norm one dimension is
gone. A cloud narrower than 10⁻¹⁰ of its coordinates is one point and rounding, R = 0. Where nothing is left
to test (R = 0, or N ≤ R + 1: any simplex whitens to the regular one) the numbers are NaN.

The sum over triples costs N·R³ or, in blocks, N²·R, whichever is less.
"""

import math
from dataclasses import dataclass

import torch
from scipy import special
from torch import Tensor

from exptilt.dynamics.observe.points import check_points, cloud_scale

_DIRECTIONS = 32
_SEED = 20240229  # seed of the directions: arbitrary, but fixed
_FLAT = 1e-9
_NARROW = 1e-10  # a cloud narrower than this, relative to its coordinates, is one point and rounding
_BLOCK = 1 << 20  # entries of a temporary: 8 MiB


@dataclass(frozen=True)
class Gaussianity:
    """Tests of Gaussianity, one number for each cloud.

    Attributes:
        skewness: ``(...)``, Mardia's b₁; 0 for a symmetric cloud.
        skewness_p: ``(...)``, its p-value.
        kurtosis: ``(...)``, Mardia's b₂ over its Gaussian value R(R+2), minus 1: positive for heavy tails.
        kurtosis_p: ``(...)``, its two-sided p-value.
        sliced: ``(...)``, Anderson–Darling A², mean over the directions; about 0.4 for a Gaussian.
        sliced_p: ``(...)``, p-value joined over the directions.
        rank: ``(...)``, R, how many dimensions the cloud fills.
    """

    skewness: Tensor
    skewness_p: Tensor
    kurtosis: Tensor
    kurtosis_p: Tensor
    sliced: Tensor
    sliced_p: Tensor
    rank: Tensor


def gaussianity(points: Tensor) -> Gaussianity:
    """Statistics and p-values of three tests of Gaussianity, for each cloud.

    Args:
        points: ``(..., N, D)``.

    Example:
        >>> x = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0))
        >>> g = gaussianity(torch.stack([x, x.sinh()]))
        >>> g.kurtosis_p < 0.01
        tensor([False,  True])
    """
    check_points("gaussianity", points)
    batch = points.shape[:-2]
    clouds = points.detach().cpu().double().reshape(-1, *points.shape[-2:])
    clouds = clouds / cloud_scale(clouds)
    rows = torch.tensor([_one(cloud) for cloud in clouds], dtype=torch.float64)
    return Gaussianity(*(column.reshape(batch) for column in rows.unbind(-1)))


def _one(cloud: Tensor) -> tuple[float, ...]:
    """The numbers of `Gaussianity` for one cloud ``(N, D)``."""
    count = cloud.shape[0]
    centred = cloud - cloud.mean(0)
    wide = cloud.shape[1] > count  # then the Gram matrix is the smaller one, with the same eigenvalues
    values, vectors = torch.linalg.eigh((centred @ centred.mT if wide else centred.mT @ centred) / count)
    place = (_NARROW * cloud.abs().max()) ** 2
    alive = values > (_FLAT * values[-1]).clamp_min(place)
    rank = int(alive.sum())
    if rank == 0 or count <= rank + 1:
        return (math.nan,) * 6 + (float(rank),)
    z = vectors[:, alive] * math.sqrt(count) if wide else centred @ (vectors[:, alive] / values[alive].sqrt())
    skewness, kurtosis = _cubes(z), float(z.square().sum(-1).square().mean())
    usual = rank * (rank + 2)
    corrected = (rank + 1) * (count + 1) * (count + 3) / (count * ((count + 1) * (rank + 1) - 6))
    statistic = count / 6 * (corrected if count > 5 else 1.0) * skewness
    skewness_p = float(special.chdtrc(rank * (rank + 1) * (rank + 2) / 6, statistic))
    score = (kurtosis - usual * (count - 1) / (count + 1)) / math.sqrt(8 * usual / count)
    kurtosis_p = float(2 * special.ndtr(-abs(score)))
    return (skewness, skewness_p, kurtosis / usual - 1, kurtosis_p, *_sliced(z), float(rank))


def _cubes(z: Tensor) -> float:
    """‖(1/N) Σ z⊗z⊗z‖² = (1/N²) Σ_ij ⟨z_i,z_j⟩³, in blocks."""
    count, rank = z.shape
    if rank * rank <= count:
        total = z.new_zeros(rank, rank * rank)
        for block in torch.split(z, max(1, _BLOCK // (rank * rank))):
            total += block.mT @ (block.unsqueeze(-1) * block.unsqueeze(-2)).flatten(1)
        return float(total.square().sum()) / count**2
    blocks = torch.split(z, max(1, _BLOCK // count))
    return math.fsum(float((block @ z.mT).pow(3).sum()) for block in blocks) / count**2


def _sliced(z: Tensor) -> tuple[float, float]:
    count, rank = z.shape
    generator = torch.Generator().manual_seed(_SEED)
    directions = torch.randn(rank, _DIRECTIONS if rank > 1 else 1, dtype=torch.float64, generator=generator)
    # The tables are for the variance divided by N − 1.
    sorted_ = (z @ (directions / directions.norm(dim=0))).sort(0).values * math.sqrt((count - 1) / count)
    weight = (2 * torch.arange(1, count + 1, dtype=torch.float64) - 1).unsqueeze(-1)
    logs = torch.special.log_ndtr(sorted_) + torch.special.log_ndtr(-sorted_.flip(0))
    statistic = -count - (weight * logs).mean(0)
    p = _anderson_darling_p(statistic * (1 + 0.75 / count + 2.25 / count**2))
    return float(statistic.mean()), _cauchy(p)


def _anderson_darling_p(a: Tensor) -> Tensor:
    """The p-value of A² with estimated mean and variance.

    Table 4.9 of D'Agostino and Stephens, Goodness-of-Fit Techniques (1986).
    """

    def fitted(c: float, b: float, q: float) -> Tensor:
        return (c + b * a + q * a**2).exp()

    above = torch.where(a < 0.6, fitted(0.9177, -4.279, -1.38), fitted(1.2937, -5.709, 0.0186))
    below = 1 - torch.where(a < 0.2, fitted(-13.436, 101.14, -223.73), fitted(-8.318, 42.796, -59.938))
    # Above 10 the fitted parabola turns up again; the true value is below 10⁻²⁰ there.
    return torch.where(a < 0.34, below, torch.where(a > 10, torch.zeros_like(a), above))


def _cauchy(p: Tensor) -> float:
    """Cauchy's joint p-value: the mean of cot(πp) is nearly Cauchy whatever the dependence."""
    if bool((p <= 1e-300).any()):
        return 0.0
    mean = float((1 / torch.tan(math.pi * p.clamp_max(1 - 1e-15))).mean())
    return 0.5 - math.atan(mean) / math.pi if mean < 1e15 else 1 / (math.pi * mean)
