"""Losses without the matrix of logits: G of the alternatives minus the score of the right one."""

from exptilt.losses.cross_entropy import CrossEntropy, fisher_vector_product, linear_cross_entropy
from exptilt.losses.diagnose import Diagnosis, diagnose
from exptilt.losses.distillation import linear_kl
from exptilt.losses.info_nce import clip, info_nce
from exptilt.losses.nt_xent import nt_xent, supervised_contrastive
from exptilt.losses.sampled import nce, sampled_softmax
from exptilt.losses.sigmoid import sigmoid

__all__ = [
    "CrossEntropy",
    "Diagnosis",
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
