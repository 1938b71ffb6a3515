"""Memories whose energy is a log-normalizer: modern and classical Hopfield networks, Boltzmann machines."""

from exptilt.memory.association import associate
from exptilt.memory.boltzmann import RestrictedBoltzmann
from exptilt.memory.capacity import storage_capacity
from exptilt.memory.classical import ClassicalHopfield
from exptilt.memory.cliff import classical_cliff
from exptilt.memory.equivalence import (
    boltzmann_check,
    hopfield_to_boltzmann,
    linear_attention,
    linear_attention_check,
)
from exptilt.memory.hopfield import Hopfield
from exptilt.memory.layers import HopfieldLayer, HopfieldPooling
from exptilt.memory.learning import learn
from exptilt.memory.separation import Entmax, Polynomial
from exptilt.memory.theory import guaranteed_radius, retrieval_error_bound, separation_needed, storage_bound

__all__ = [
    "ClassicalHopfield",
    "Entmax",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "Polynomial",
    "RestrictedBoltzmann",
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
