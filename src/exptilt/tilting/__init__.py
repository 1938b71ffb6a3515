"""The primitive: the log-normalizer G of the keys' measure, its gradient and Hessian, streamed over keys."""

from exptilt.tilting.attend import attend, fisher_vector_product, log_normalizer
from exptilt.tilting.packed import attend_packed
from exptilt.tilting.tilted import Tilted, merge

__all__ = ["Tilted", "attend", "attend_packed", "fisher_vector_product", "log_normalizer", "merge"]
