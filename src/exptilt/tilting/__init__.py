"""The primitive: the log-normalizer G of the keys' measure, its gradient, its Hessian, streamed over the keys."""

from exptilt.tilting.merge import Tilted, merge
from exptilt.tilting.tilt import fisher_vector_product, log_normalizer

__all__ = ["Tilted", "fisher_vector_product", "log_normalizer", "merge"]
