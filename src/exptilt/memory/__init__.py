"""Memories whose energy is a log-normalizer: modern and classical Hopfield networks, Boltzmann machines."""

import sys

from exptilt.memory.binary.boltzmann import RestrictedBoltzmann
from exptilt.memory.binary.classical import ClassicalHopfield
from exptilt.memory.binary.contrastive_divergence import learn
from exptilt.memory.experiments.capacity import storage_capacity
from exptilt.memory.experiments.cliff import classical_cliff
from exptilt.memory.experiments.equivalence import (
    boltzmann_check,
    hopfield_to_boltzmann,
    linear_attention,
    linear_attention_check,
)
from exptilt.memory.hopfield import Hopfield
from exptilt.memory.layers import HopfieldLayer, HopfieldPooling, associate
from exptilt.memory.nearest import Nearest, SearchIndex
from exptilt.memory.separation import Entmax, Polynomial
from exptilt.memory.theory import guaranteed_radius, retrieval_error_bound, separation_needed, storage_bound

__all__ = [
    "ClassicalHopfield",
    "Entmax",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "Nearest",
    "Polynomial",
    "RestrictedBoltzmann",
    "SearchIndex",
    "associate",
    "boltzmann_check",
    "classical_cliff",
    "guaranteed_radius",
    "hopfield_to_boltzmann",
    "learn",
    "linear_attention",
    "linear_attention_check",
    "retrieval_error_bound",
    "separation_needed",
    "storage_bound",
    "storage_capacity",
]

# Objects that were pickled when these modules lay directly in this folder name them so.
_MOVED = {
    "binary": ("boltzmann", "classical"),
    "experiments": ("capacity", "cliff", "equivalence"),
    "landscape": ("basins", "metastable", "recall"),
}
for _folder, _names in _MOVED.items():
    for _name in _names:
        sys.modules[f"{__name__}.{_name}"] = sys.modules[f"{__name__}.{_folder}.{_name}"]
sys.modules[f"{__name__}.learning"] = sys.modules[f"{__name__}.binary.contrastive_divergence"]
