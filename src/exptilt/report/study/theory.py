"""The claims of the theory that statistics name by their ids, in the words of docs/theory.md.

A page stands alone, so it carries the statements; the ids in its text are links to them.
"""

import re
from collections.abc import Iterable

CLAIMS = {
    "A15": "(from the cited random-walk theory of language) Z(q) is nearly constant over contexts. Measured, "
    "never assumed.",
    "E7": "Link conjecture: e^{<f(η_i),μ_j>} ≈ e^{<μ_i W_q, μ_j W_k>}: W_q, W_k a linear approximation of "
    "the canonical link f = ∇G*. Exact for Gaussians; for a gradient map the matrix must be symmetric "
    "(positive definite for convex G). Both are measurable in trained heads.",
    "F2": "Do the queries and keys of a head form local Gaussian approximations: is G(q) predicted by the "
    "first two moments of the keys (log N + <m,q> + ½ q'Cq), globally and within neighbourhoods?",
    "F3": "Does a head really ascend its own G: the angle between its write to the residual stream and "
    "∇_h G(h W_q), and the change in G after the write?",
    "F6": "Expansion by attention and contraction by normalisation, layer by layer.",
}


def named_in(texts: Iterable[str]) -> dict[str, str]:
    """The claims that stand in parentheses in any of the texts, by id."""
    found = {claim for text in texts for claim in re.findall(r"\(([A-F]\d+)\)", text)}
    return {claim: words for claim, words in CLAIMS.items() if claim in found}
