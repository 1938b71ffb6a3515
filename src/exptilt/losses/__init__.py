"""Losses without the matrix of logits: G of the alternatives minus the score of the right one."""

from exptilt._support.former import former_names
from exptilt.losses.cross_entropy import fisher_vector_product, linear_cross_entropy
from exptilt.losses.diagnose import diagnose
from exptilt.losses.distillation import linear_kl
from exptilt.losses.info_nce import clip, info_nce
from exptilt.losses.nt_xent import nt_xent, supervised_contrastive
from exptilt.losses.sampled import nce, sampled_softmax
from exptilt.losses.sigmoid import sigmoid

__all__ = [
    "clip",
    "diagnose",
    "fisher_vector_product",
    "info_nce",
    "linear_cross_entropy",
    "linear_kl",
    "nce",
    "nt_xent",
    "sampled_softmax",
    "sigmoid",
    "supervised_contrastive",
]

__getattr__ = former_names(__name__)
