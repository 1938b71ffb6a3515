"""Every claim of the papers as a thing to run: what was claimed, what was run, the numbers, the verdict.

`run` and `find` run claims of the ledger. Experiments behind some of the claims, such as `theorem_one`, are
functions that take other sizes and seeds.
"""

from exptilt._support.former import former_names

# Each file registers its claims with the ledger.
from exptilt.claims import (  # noqa: F401
    ascent,
    contrastive,
    duality,
    equilibrium,
    exponential_family,
    filters,
    memory,
    mixing,
    observed,
    trained,
)
from exptilt.claims.evidence import Check, Evidence, Verdict
from exptilt.claims.experiments.capacity import storage_capacity
from exptilt.claims.experiments.circle import metastable_counts
from exptilt.claims.experiments.cliff import classical_cliff
from exptilt.claims.experiments.divergence import divergence_rate
from exptilt.claims.experiments.equal_cosine import equal_cosine
from exptilt.claims.experiments.equivalence import boltzmann_check, linear_attention_check
from exptilt.claims.experiments.sweep import equilibrium_sweep
from exptilt.claims.experiments.theorem_one import theorem_one
from exptilt.claims.ledger import Claim, every, find, run

__all__ = [
    "Check",
    "Claim",
    "Evidence",
    "Verdict",
    "boltzmann_check",
    "classical_cliff",
    "divergence_rate",
    "equal_cosine",
    "equilibrium_sweep",
    "every",
    "find",
    "linear_attention_check",
    "metastable_counts",
    "run",
    "storage_capacity",
    "theorem_one",
]

__getattr__ = former_names(__name__)
