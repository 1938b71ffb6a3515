"""Every claim of the papers as a thing to run: what was claimed, what was run, the numbers, the verdict."""

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
from exptilt.claims.evidence import Check, Evidence, Line, Picture, Verdict
from exptilt.claims.ledger import Claim, every, find, run

__all__ = ["Check", "Claim", "Evidence", "Line", "Picture", "Verdict", "every", "find", "run"]
