r"""Mixtures of Gaussians.

    G(η) = log Σ_n π_n e^{⟨μ_n,η⟩ + ½η'Σ_nη},     ∇G(η) = Σ_n w_n (μ_n + Σ_nη)          (THEORY A5)

with w_n ∝ π_n e^{⟨μ_n,η⟩ + ½η'Σ_nη}. With one Σ for all, the quadratic cancels from the weights and ∇G(η) =
Ση + Σ_n w_n μ_n: attention over the means plus a linear skip.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from exptilt._support.checks import finite
from exptilt._support.errors import ArgumentError
from exptilt._support.linalg import check_covariance
from exptilt.families.checks import check_log_weight, check_tensors
from exptilt.families.measure import make
from exptilt.families.members.gaussian import Gaussian
from exptilt.families.members.mixture import AnyMixture


@dataclass(frozen=True, eq=False)
class GaussianMixture(AnyMixture):
    """A mixture of K Gaussians in D dimensions.

    Args:
        log_weight: ``(..., K)``, log π_n up to a constant; −inf leaves a component out.
        mean_vector: ``(..., K, D)``.
        covariance_matrix: ``(..., K, D, D)``, one per component, or ``(..., 1, D, D)`` or just ``(D, D)``,
            shared by all.

    Example:
        >>> h = GaussianMixture(torch.zeros(2), torch.tensor([[-1.0], [1.0]]), torch.tensor([[2.0]]))
        >>> h.mean(), h.covariance()
        (tensor([0.]), tensor([[3.]]))
    """

    log_weight: Tensor
    mean_vector: Tensor
    covariance_matrix: Tensor
    event_dims: ClassVar = {"log_weight": 1, "mean_vector": 2, "covariance_matrix": 3}

    def __post_init__(self) -> None:
        if isinstance(self.covariance_matrix, Tensor) and self.covariance_matrix.ndim == 2:
            object.__setattr__(self, "covariance_matrix", self.covariance_matrix.unsqueeze(0))
        fields = {name: (getattr(self, name), event) for name, event in self.event_dims.items()}
        check_tensors("GaussianMixture", fields)
        count, dimension = self.mean_vector.shape[-2:]
        good = self.log_weight.shape[-1] == count and self.covariance_matrix.shape[-3] in (1, count)
        if not good or self.covariance_matrix.shape[-2:] != (dimension, dimension):
            got = ", ".join(f"{name} {tuple(tensor.shape)}" for name, (tensor, _) in fields.items())
            wanted = "log_weight (..., K), mean_vector (..., K, D) and covariance_matrix (..., K, D, D)"
            raise ArgumentError(f"GaussianMixture: pass {wanted}; got {got}.")
        finite("GaussianMixture", mean_vector=self.mean_vector)
        check_covariance(self.covariance_matrix, "GaussianMixture: covariance_matrix")
        check_log_weight("GaussianMixture", self.log_weight)

    @property
    def components(self) -> Gaussian:
        """The K Gaussians, batch axes ``(..., K)``."""
        return make(Gaussian, mean_vector=self.mean_vector, covariance_matrix=self.covariance_matrix)

    @property
    def dimension(self) -> int:
        """D."""
        return self.mean_vector.shape[-1]

    def _tilt(self, eta: Tensor) -> Self:
        mean = self.components._mean(self._each(eta))
        fields = {"mean_vector": mean, "covariance_matrix": self.covariance_matrix}
        return make(type(self), log_weight=self._scores(eta), **fields)
