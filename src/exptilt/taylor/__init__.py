"""Second derivatives in one sweep: the forward Laplacian of a network, and third cumulants of scores."""

from exptilt.taylor.laplacian import laplacian
from exptilt.taylor.skewness import score_skewness

__all__ = ["laplacian", "score_skewness"]
