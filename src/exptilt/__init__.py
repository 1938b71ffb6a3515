"""exptilt: softmax attention is an exponential family, and everything follows from its log-normalizer."""

from exptilt.attention.attend import attend
from exptilt.tilting import Tilted, fisher_vector_product, log_normalizer, merge

__version__ = "0.1.0"
__all__ = ["Tilted", "attend", "fisher_vector_product", "log_normalizer", "merge"]
