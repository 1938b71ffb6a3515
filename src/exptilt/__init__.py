"""exptilt: softmax attention is an exponential family, and everything follows from its log-normalizer."""

__version__ = "0.1.0"
