r"""E[x] and Var[x] of the variable itself, beside the mean of the statistic that tilting acts on.

Where t(x) is x they are the mean and the diagonal of the covariance. A family for which it is not (Beta,
Dirichlet, Wishart, ...) gives its closed forms in `_event_moments`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from exptilt._support.errors import ArgumentError


class EventMoments(ABC):
    """What follows from `mean` and `covariance` for x itself."""

    identity_coordinate: ClassVar[bool]

    @abstractmethod
    def mean(self, eta: Tensor | None = None) -> Tensor:
        """E[t] under the tilted measure."""

    @abstractmethod
    def covariance(self, eta: Tensor | None = None) -> Tensor:
        """Cov[t] under the tilted measure."""

    @property
    def event_mean(self) -> Any:
        """E[x], shaped like one draw: infinite where the integral is, NaN where there is no mean."""
        return self._event_moments()[0]

    @property
    def event_variance(self) -> Any:
        """Var[x], entry by entry, shaped like one draw: infinite or NaN as for `event_mean`."""
        return self._event_moments()[1]

    def _event_moments(self) -> tuple[Any, Any]:
        """E[x] and Var[x], each shaped like one draw."""
        if not self.identity_coordinate:
            raise ArgumentError(
                f"{type(self).__name__}: E[x] has no closed form here. Average `sample` instead."
            )
        return self.mean(), self.covariance().diagonal(dim1=-2, dim2=-1)
