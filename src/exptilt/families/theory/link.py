r"""The canonical link f = ∇G*, from means to natural parameters, and its linear fit (THEORY E7).

Were the hidden states of a transformer means μ of an exponential family, exact scores would be <f(μ_i),
μ_j>; a head has ⟨W_q μ_i, W_k μ_j⟩, a bilinear form. So W_q' W_k would stand for f, as a linear
approximation

    f(μ) ≈ M μ + c,      e^{⟨f(μ_i), μ_j⟩} ≈ e^{⟨M μ_i + c, μ_j⟩}

f is the gradient of a convex function: its derivative, the inverse of the covariance, is symmetric and
positive definite, so M should be as well. For Gaussians of one covariance Σ the link is linear, M = Σ⁻¹;
for other families `fit_linear_link` says how far the link is from linear.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.checks import alike, finite, floating
from exptilt._support.errors import ArgumentError
from exptilt.families.family import ExponentialFamily


@dataclass(frozen=True)
class LinearLink:
    """A linear map in place of the canonical link, and its errors.

    Attributes:
        matrix: ``(D, D)``, M.
        offset: ``(D,)``, c.
        r_squared: the fraction of the natural parameters' variance that Mμ + c explains.
        asymmetry: ‖M − M'‖ / ‖M + M'‖, 0 for the derivative of a gradient map.
        least_eigenvalue: of the symmetric part of M; positive for a convex G.
        weight_error: the mean over i of the total variation ½ Σ_j |A_ij − Â_ij| between exact and linear
            attention weights A_ij = softmax_j ⟨f(μ_i), μ_j⟩ of the samples.
        worst_weight_error: the largest such distance.
    """

    matrix: Tensor
    offset: Tensor
    r_squared: float
    asymmetry: float
    least_eigenvalue: float
    weight_error: float
    worst_weight_error: float

    def __call__(self, mean: Tensor) -> Tensor:
        """M μ + c, ``(..., D)``.

        Args:
            mean: ``(..., D)``.
        """
        return mean @ self.matrix.mT + self.offset


def fit_linear_link(samples: ExponentialFamily | tuple[Tensor, Tensor]) -> LinearLink:
    """The linear map that comes nearest to the canonical link, by least squares.

    Args:
        samples: a batch of N members ``(N,)``, which give the mean of t(x) and the entries of θ for t; or
            means and natural parameters, ``(N, D)`` each. The error of attention weights needs memory for
            N² numbers.

    Example:
        >>> from exptilt.families import Gaussian
        >>> means, covariance = torch.randn(50, 2), torch.tensor([[2.0, 0.0], [0.0, 4.0]])
        >>> fit_linear_link(Gaussian(means, covariance)).matrix.round(decimals=3).abs()
        tensor([[0.5000, 0.0000],
                [0.0000, 0.2500]])
    """
    if isinstance(samples, ExponentialFamily):
        mean = samples.mean()
        natural = samples.natural_parameter[..., : mean.shape[-1]]
        mean, natural = torch.broadcast_tensors(mean, natural)
    elif isinstance(samples, tuple) and len(samples) == 2:
        mean, natural = samples
    else:
        raise ArgumentError(
            f"fit_linear_link: samples is a {type(samples).__name__}. "
            "Pass a batch of members of a family, or (means, natural parameters)."
        )
    both = {"samples[0]": mean, "samples[1]": natural}
    for name, x in both.items():
        floating("fit_linear_link", name, x, axes=2, shape="(N, D)")
    alike("fit_linear_link", **both)
    finite("fit_linear_link", **both)
    if mean.shape != natural.shape or mean.ndim != 2 or len(mean) < 2:
        got = f"means {tuple(mean.shape)}, natural parameters {tuple(natural.shape)}"
        raise ArgumentError(f"fit_linear_link: samples are {got}. Pass at least two, (N, D) each.")
    x, y = (part.detach().double() - part.detach().double().mean(0) for part in (mean, natural))
    total = float(y.square().sum())
    if total == 0:
        raise ArgumentError(
            "fit_linear_link: all samples have one natural parameter. Pass different members."
        )
    M = torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.mT.to(mean.device)
    c = natural.double().mean(0) - M @ mean.double().mean(0)
    m = mean.double()
    weights = [torch.softmax(score @ m.mT, -1) for score in (natural.double(), m @ M.mT + c)]
    apart = (weights[0] - weights[1]).abs().sum(-1) / 2
    even = M + M.mT
    return LinearLink(
        M.to(mean.dtype),
        c.to(mean.dtype),
        1 - float((y - x @ M.mT).square().sum()) / total,
        float(torch.linalg.norm(M - M.mT) / torch.linalg.norm(even)),
        float(torch.linalg.eigvalsh(even / 2)[0]),
        float(apart.mean()),
        float(apart.max()),
    )
