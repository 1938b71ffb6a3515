"""Memories whose energy is a log-normalizer: modern and classical Hopfield networks, Boltzmann machines."""

import sys

from exptilt._support.former import former_names
from exptilt.memory.binary.boltzmann import RestrictedBoltzmann, hopfield_to_boltzmann
from exptilt.memory.binary.classical import ClassicalHopfield
from exptilt.memory.binary.contrastive_divergence import train_boltzmann
from exptilt.memory.hopfield import Hopfield
from exptilt.memory.layers import HopfieldLayer, HopfieldPooling, hopfield_attention
from exptilt.memory.separation import Entmax, Polynomial
from exptilt.memory.theory import retrieval_error_bound, storage_bound

__all__ = [
    "ClassicalHopfield",
    "Entmax",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "Polynomial",
    "RestrictedBoltzmann",
    "hopfield_attention",
    "hopfield_to_boltzmann",
    "retrieval_error_bound",
    "storage_bound",
    "train_boltzmann",
]

# Old module paths, for objects pickled before these modules moved into a subfolder.
for _name in ("boltzmann", "classical"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[f"{__name__}.binary.{_name}"]
sys.modules[f"{__name__}.learning"] = sys.modules[f"{__name__}.binary.contrastive_divergence"]

__getattr__ = former_names(__name__)
