"""Log-gamma and digamma in one pass: against 40 digits, and against torch where the two meet."""

import mpmath
import numpy as np
import torch

from exptilt import families as f
from exptilt.families import log_gamma as kernel

F64 = torch.float64


def places() -> np.ndarray:
    g = np.random.default_rng(0)
    near = [z + g.normal(size=60) * 1e-3 for z in (1.0, 2.0, 1.4616321449683622, 8.0)]
    return np.concatenate([10 ** g.uniform(-300, 300, 150), 10 ** g.uniform(-5, 5, 200), g.uniform(0.5, 20, 200), *near])


def test_against_many_digits() -> None:
    x = places()
    wide = torch.as_tensor(np.resize(x, kernel._MANY + 77))
    assert kernel.suits(wide)
    first, second = (found.numpy()[: len(x)] for found in kernel.log_gamma_and_digamma(wide))
    with mpmath.workdps(40):
        log_gamma = [mpmath.loggamma(mpmath.mpf(float(a))) for a in x]
        digamma = [mpmath.digamma(mpmath.mpf(float(a))) for a in x]
        errors = [float(abs(got - true) / (1 + abs(true))) for got, true in zip(first, log_gamma, strict=True)]
        slopes = [float(abs(got - true) / (1 + abs(true))) for got, true in zip(second, digamma, strict=True)]
    assert max(errors) < 1e-14
    assert max(slopes) < 4e-15
    assert torch.equal(kernel.log_gamma(wide), kernel.log_gamma_and_digamma(wide)[0])


def test_shapes_and_dtypes() -> None:
    x = torch.rand(130, 131, dtype=torch.float32).mT + 0.5
    first, second = kernel.log_gamma_and_digamma(x)
    assert first.dtype == second.dtype == torch.float32
    torch.testing.assert_close(first, torch.lgamma(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, torch.digamma(x), rtol=1e-5, atol=1e-6)


def test_divergences_do_not_depend_on_the_way() -> None:
    """The same numbers with and without derivatives asked for, and the derivatives of a difference."""
    g = torch.Generator().manual_seed(0)

    def some(*size: int) -> torch.Tensor:
        return 10 ** (4 * torch.rand(kernel._MANY, *size, dtype=F64, generator=g) - 2)

    pairs = [(f.Gamma(some(1), some(1)), f.Gamma(some(1), some(1))), (f.Beta(some(1), some(1)), f.Beta(some(1), some(1)))]
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
            (2e-6 * slope * leaf.detach()).sum(-1) for slope, leaf in zip(torch.autograd.grad(by_torch.sum(), leaves), leaves, strict=True)
        )
        more, less = (f.kl(p.map(lambda leaf, _, s=s: leaf * s), q).value for s in (1 + 1e-6, 1 - 1e-6))
        assert float(((more - less - change).abs() / (1e-9 * scale + change.abs() * 1e-3)).max()) < 1
