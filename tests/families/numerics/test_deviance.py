"""Divergences of counts and of gamma shapes, against many digits."""

import mpmath
import numpy as np
import torch

from exptilt.families.numerics.deviance import deviance_of, gamma_kl

F64 = torch.float64


def shapes() -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of all sizes: far from each other, at the border of the series, near, very near."""
    generator = np.random.default_rng(1)
    first, second = [], []
    for low, high in ((-280, -5), (-5, 0), (0, 1), (1, 3), (3, 12)):
        a = 10 ** generator.uniform(low, high, 100)
        side = generator.choice([-1, 1], 100)
        wide = [a * (1 + side * generator.uniform(*ends, 100)) for ends in ((0.0, 0.19), (0.19, 0.3))]
        others = [10 ** generator.uniform(low, high, 100), 10 ** generator.uniform(-20, 10, 100), *wide]
        others.append(a * (1 + side * 10 ** generator.uniform(-7, -2, 100)))
        first += [a] * len(others)
        second += others
    return torch.as_tensor(np.concatenate(first)), torch.as_tensor(np.concatenate(second))


def test_of_shapes() -> None:
    """At equal means, where nothing but the difference of log Γ is left."""
    a, b = shapes()
    with mpmath.workdps(60):
        exact = []
        for x, y in zip(map(mpmath.mpf, a.tolist()), map(mpmath.mpf, b.tolist()), strict=True):
            gammas = mpmath.loggamma(y) - mpmath.loggamma(x) - (y - x) * mpmath.digamma(x)
            exact.append(float(gammas - (y * mpmath.log(y / x) - y + x)))
    found = gamma_kl(a, b, (b - a) / a, b.log() - a.log())
    assert float((found / torch.tensor(exact, dtype=F64) - 1).abs().max()) < 1e-11


def test_of_counts() -> None:
    x, m = shapes()
    with mpmath.workdps(60):
        pairs = zip(map(mpmath.mpf, x.tolist()), map(mpmath.mpf, m.tolist()), strict=True)
        true = torch.tensor([float(a * mpmath.log(a / b) - a + b) for a, b in pairs], dtype=F64)
    assert float((deviance_of(x, m) / true - 1).abs().max()) < 1e-11


def test_at_the_ends_of_the_range() -> None:
    a, b = torch.tensor([1e-300, 3.0, 1e300], dtype=F64), torch.tensor([2e-300, 3e-300, 2e300], dtype=F64)
    assert bool(gamma_kl(a, b, torch.zeros_like(a), torch.zeros_like(a)).isfinite().all())
