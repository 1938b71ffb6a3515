r"""The von Mises–Fisher distribution: the uniform measure on the sphere S^{D−1}, tilted.

    p(x|θ) = e^{⟨x,θ⟩ − A(θ)},  |x| = 1,     A(θ) = ½D log 2π + log(I_ν(κ) κ^{−ν}),   κ = |θ|,  ν = D/2 − 1

    E[x] = ρ(κ²) θ,   ρ = I_{D/2}(κ) / (κ I_ν(κ));      Cov[x] = ρ I + ρ (ρ⁺ − ρ) θθ'

with ρ⁺ the ratio one order up. Everything is a smooth function of κ²: κ = 0, the uniform law, is no special
case. Densities are with respect to surface area. This is the law of keys of equal length: layer
normalisation puts them on a sphere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from exptilt._support.linalg import dot
from exptilt._support.transforms import in_transform
from exptilt.families.family import ExponentialFamily
from exptilt.families.measure import Base, make
from exptilt.families.numerics.bessel import Bessel, bessel, log_bessel
from exptilt.families.numerics.deviance import not_negative
from exptilt.families.numerics.draws import standard_normal


@dataclass(frozen=True, eq=False)
class VonMisesFisher(ExponentialFamily):
    """Distribution of a direction in D dimensions, D >= 2.

    Args:
        vector: ``(..., D)``, the mean direction times the concentration κ; zero is the uniform law.

    Example:
        >>> float(VonMisesFisher(torch.tensor([0.0, 0.0, 2.0])).mean()[2])  # coth 2 − 1/2
        0.5373147...
    """

    vector: Tensor
    event_dims: ClassVar = {"vector": 1}
    _natural_field = "vector"
    base = Base.SPHERE
    _tilts_everywhere = True
    _least_length = 2

    @property
    def concentration(self) -> Tensor:
        """κ, ``(...)``."""
        length: Tensor = torch.linalg.vector_norm(self.vector, dim=-1, dtype=torch.float64).to(self.dtype)
        return length

    @property
    def mean_parameter(self) -> Tensor:
        """E x, ``(..., D)``, of length below 1 up to rounding."""
        return (self._bessel().ratio.unsqueeze(-1) * self.vector).to(self.dtype)

    @classmethod
    def _from_mean(cls, mean: Tensor) -> Self:
        """The member by Newton's method on log κ, then two steps on the vector that carry derivatives."""
        theta = _start(mean.detach())
        for _ in range(2):
            _, ratio, above = log_bessel(mean.shape[-1] / 2 - 1, dot(theta, theta))
            ratio, bend = ratio.unsqueeze(-1), (ratio * (above - ratio)).unsqueeze(-1)
            rest = mean - ratio * theta
            along = dot(theta, rest).unsqueeze(-1) / (ratio + bend * dot(theta, theta).unsqueeze(-1))
            theta = theta + (rest - bend * theta * along) / ratio
        return make(cls, vector=theta)

    @classmethod
    def _mean_excess(cls, mean: Tensor) -> Tensor:
        """Length of the mean minus 1."""
        excess: Tensor = torch.linalg.vector_norm(mean, dim=-1) - 1
        return excess

    def _bessel(self, *, product: bool = False) -> Bessel:
        """Bessel functions at κ², in float64 so that κ² of a float32 does not overflow."""
        theta = self.vector.double()
        return bessel(self.dimension / 2 - 1, dot(theta, theta), product=product)

    def _log_partition(self) -> Tensor:
        found = self._bessel()
        return (found.large + found.value + self.dimension / 2 * math.log(2 * math.pi)).to(self.dtype)

    def _entropy(self) -> Tensor:
        """A − κ²ρ, computed as (F − c) + (c − κ²ρ) plus a constant, because c is large."""
        found = self._bessel(product=True)
        return (found.value + found.product + self.dimension / 2 * math.log(2 * math.pi)).to(self.dtype)

    def _kl(self, other: Self) -> Tensor:
        """A(θ') − A(θ) − ρ⟨θ, δ⟩, δ = θ' − θ; the large parts give c' − c = ⟨δ, θ + θ'⟩ / (root + root')."""
        mine, others = self._bessel(), other._bessel()
        theta, delta = self.vector.double(), other.vector.double() - self.vector.double()
        both = mine.root + others.root
        large = dot(theta, delta) * (2 / both - mine.ratio) + dot(delta, delta) / both
        return not_negative(large + (others.value - mine.value)).to(self.dtype)

    def _support(self, x: Tensor) -> Tensor:
        on: Tensor = (torch.linalg.vector_norm(x, dim=-1) - 1).abs() <= torch.finfo(x.dtype).eps ** 0.5
        return on

    def _sample(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        # Draw y around the first axis, then reflect that axis onto θ: x = y − 2 ⟨r,y⟩ r.
        theta = self.vector.detach()
        kappa = self.concentration.detach()
        unit = theta / kappa.clamp_min(torch.finfo(self.dtype).tiny).unsqueeze(-1)
        side = torch.where(unit[..., :1] < 0, -1.0, 1.0)
        axis = torch.cat([unit[..., :1] + side, unit[..., 1:]], -1)  # same signs: no cancellation
        axis = axis / torch.linalg.vector_norm(axis, dim=-1, keepdim=True)
        size = (*shape, *kappa.shape)
        fall = _falls(kappa, self.dimension, size, generator).unsqueeze(-1)
        noise = standard_normal(theta, (*size, self.dimension - 1), generator)
        length = torch.linalg.vector_norm(noise, dim=-1, keepdim=True)
        if self.dimension == 2:  # a single float32 normal may be exactly 0
            noise, length = torch.where(noise < 0, -1.0, 1.0).to(noise.dtype), torch.ones_like(length)
        across = (fall * (2 - fall)).clamp_min(0).sqrt() / length
        y = torch.cat([(fall - 1) * side, across * noise], -1)
        return torch.addcmul(y, dot(y, axis).unsqueeze(-1), axis, value=-2)

    def _covariance(self, eta: Tensor) -> Tensor:
        theta = (self.vector + eta).double()
        _, ratio, above = log_bessel(self.dimension / 2 - 1, dot(theta, theta))
        eye = torch.eye(self.dimension, dtype=theta.dtype, device=self.device)
        outer = theta.unsqueeze(-1) * theta.unsqueeze(-2)
        bend = (ratio * (above - ratio))[..., None, None]
        return (ratio[..., None, None] * eye + bend * outer).to(self.dtype)

    def _mode(self) -> Tensor:
        return self.vector / self.concentration.unsqueeze(-1)


def _start(mean: Tensor) -> Tensor:
    """θ for a mean, to several digits, by Newton on log κ from Banerjee's κ ≈ r(D − r²)/(1 − r²)."""
    dimension = mean.shape[-1]
    r = torch.linalg.vector_norm(mean, dim=-1).double()
    small = r < 1e-6
    r = torch.where(small, 0.5, r)
    kappa = r * (dimension - r**2) / (1 - r**2)
    for _ in range(5):
        _, ratio, _ = log_bessel(dimension / 2 - 1, kappa**2)
        now = ratio * kappa
        slope = 1 - now**2 - (dimension - 1) * ratio
        error = (now / r).log() - torch.log1p((r - now) * (r + now) / (1 - r**2))
        change = error / (kappa * slope * (1 / now + 2 * now / (1 - now**2)))
        kappa = kappa * torch.exp(-change.nan_to_num(0.0, 0.0, 0.0).clamp(-2, 2))
    return torch.where(small, dimension, kappa / r).to(mean.dtype).unsqueeze(-1) * mean


_ROUNDS = 40  # at most 0.342 of the proposals are refused (D = 2, κ → ∞); 0.342^40 < 10^−18


def _falls(kappa: Tensor, dimension: int, size: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """1 − ⟨x, direction⟩ for draws x of this size; small at large κ.

    In three dimensions by inverting the distribution function. Otherwise by Wood's rejection method (1994),
    repeated for refused draws until none is left; under `torch.func` for all draws, a fixed number of times.
    """

    def uniform(shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape), dtype=kappa.dtype, device=kappa.device, generator=generator)

    if dimension == 3:
        k = kappa.clamp_min(torch.finfo(kappa.dtype).tiny)
        return -torch.log1p(uniform(size) * torch.expm1(-2 * k)) / k
    d = dimension - 1

    def propose(k: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Proposals, and whether each is refused."""
        z = _symmetric_beta(d, uniform(k.shape), uniform(k.shape))
        proposal = 2 * b * z / (1 - (1 - b) * z)
        ratio = (1 + b) / 2 * (1 + (1 - b) * proposal / (2 * b))
        return proposal, k * (2 * b / (1 + b) - proposal) + d * ratio.log() < uniform(k.shape).log()

    b = d / (torch.hypot(2 * kappa, torch.full_like(kappa, d)) + 2 * kappa)
    k, b = kappa.expand(size).reshape(-1), b.expand(size).reshape(-1)
    fall, refused = propose(k, b)
    if in_transform() or kappa.is_meta:
        for _ in range(_ROUNDS):
            another, still = propose(k, b)
            fall, refused = torch.where(refused, another, fall), refused & still
        return fall.reshape(size)
    waiting = refused.nonzero().squeeze(-1)
    while waiting.numel():
        fall[waiting], refused = propose(k[waiting], b[waiting])
        waiting = waiting[refused]
    return fall.reshape(size)


def _symmetric_beta(d: int, u: Tensor, v: Tensor) -> Tensor:
    """Beta(d/2, d/2) from two uniforms (Ulrich 1984): half of 1 + cos(2πv) √(1 − u^{2/(d−1)})."""
    if d == 1:
        return (1 + (2 * math.pi * v).cos()) / 2
    return (1 + (2 * math.pi * v).cos() * (-torch.expm1(u.log() * (2 / (d - 1)))).sqrt()) / 2
