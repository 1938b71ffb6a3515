"""What is left of log-gamma and digamma, against many digits."""

import mpmath
import numpy as np
import pytest
import torch

from exptilt import families as f
from exptilt.families.numerics.gamma_functions import remainder, remainder_slope

F64 = torch.float64


def places() -> np.ndarray:
    g = np.random.default_rng(0)
    near = [z + g.normal(size=60) * 1e-3 for z in (1.0, 2.0, 1.4616321449683622, 8.0)]
    return np.concatenate(
        [10 ** g.uniform(-300, 20, 100), 10 ** g.uniform(-5, 5, 200), g.uniform(0.5, 20, 200), *near]
    )


def true(a: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    x = mpmath.mpf(a)
    large = (x - 0.5) * mpmath.log(x) - x + mpmath.log(2 * mpmath.pi) / 2
    return mpmath.loggamma(x) - large, mpmath.log(x) - 1 / (2 * x) - mpmath.digamma(x)


def test_against_many_digits() -> None:
    """What is left of log Γ and ψ; from 8 on to the last digits, however small."""
    x = places()
    with mpmath.workdps(60):
        exact = [true(float(a)) for a in x]
        found = remainder(torch.as_tensor(x)), remainder_slope(torch.as_tensor(x))
        for which, tolerance in ((0, 1e-14), (1, 4e-15)):
            errors = np.array(
                [
                    float(abs(g - t[which]) / (1 + abs(t[which])))
                    for g, t in zip(found[which].tolist(), exact, strict=False)
                ]
            )
            assert errors.max() < tolerance
            relative = [
                float(abs(g / t[which] - 1))
                for g, t, a in zip(found[which].tolist(), exact, x, strict=False)
                if a > 8
            ]
            assert max(relative) < 4e-15
    huge = torch.tensor(1e150, dtype=F64)
    found = float(remainder(huge)), float(remainder_slope(huge))
    assert found == pytest.approx((1 / 12e150, 1 / 12e300), rel=1e-15)


def test_divergences_do_not_depend_on_the_way() -> None:
    """The same numbers with and without derivatives asked for, and the derivatives of a difference."""
    g = torch.Generator().manual_seed(0)

    def some(*size: int) -> torch.Tensor:
        return 10 ** (4 * torch.rand(16384, *size, dtype=F64, generator=g) - 2)

    pairs = [
        (f.Gamma(some(1), some(1)), f.Gamma(some(1), some(1))),
        (f.Beta(some(1), some(1)), f.Beta(some(1), some(1))),
    ]
    pairs.append((f.Dirichlet(some(3)), f.Dirichlet(some(3))))
    for p, q in pairs:
        moving = p.map(lambda leaf, _: leaf.clone().requires_grad_())
        by_torch = f.kl(moving, q).value
        assert by_torch.requires_grad
        terms = (p.mean_parameter * (q.natural_parameter - p.natural_parameter)).abs().sum(-1)
        scale = 1 + p._log_partition().abs() + q._log_partition().abs() + terms
        assert float(((by_torch.detach() - f.kl(p, q).value).abs() / scale).max()) < 4e-14
        twin = torch.distributions.kl_divergence(p.to_torch(), q.to_torch())
        assert float(((twin - f.kl(p, q).value).abs() / scale).max()) < 1e-12
        leaves = [leaf for leaf, _ in moving._leaves()]
        change = sum(
            (2e-6 * slope * leaf.detach()).sum(-1)
            for slope, leaf in zip(torch.autograd.grad(by_torch.sum(), leaves), leaves, strict=True)
        )
        more, less = (f.kl(p.map(lambda leaf, _, s=s: leaf * s), q).value for s in (1 + 1e-6, 1 - 1e-6))
        assert float(((more - less - change).abs() / (1e-9 * scale + change.abs() * 1e-3)).max()) < 1
