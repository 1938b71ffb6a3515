"""Every claim of the papers as an experiment: the statement, the procedure, the numbers and the verdict.

`run` runs claims of the ledger, and `find` returns one of them. The experiments behind some of the claims are
functions in `exptilt.claims.experiments`, which take other sizes and seeds.
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
    models,
    others,
)
from exptilt.claims.evidence import Verdict
from exptilt.claims.ledger import Claim, every, find, run

__all__ = ["Claim", "Verdict", "every", "find", "run"]

__getattr__ = former_names(__name__)
