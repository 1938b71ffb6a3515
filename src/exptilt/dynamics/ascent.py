r"""One step of ascent on the log-normalizer (THEORY B1), the convention of the whole folder:

    η ← η + step · g(η),      g(η) = Σ_n softmax_n(β⟨x_n,η⟩) x_n = (1/β) ∇_η log Σ_n e^{β⟨x_n,η⟩}

β multiplies the scores and does not multiply the step. The log-normalizer that goes with it is

    G(βη) = log Σ_n e^{β⟨x_n,η⟩}        (any measure h: log ∫ h(x) e^{β⟨x,η⟩}, and g(η) = ∇G at βη).

The measure is that of the moving points themselves (self-attention), of patterns held still
(cross-attention, a Hopfield memory), or any `Measure`. Points are streamed by `exptilt.tilting`: nothing of
size N×N is made. A point whose mask hides every pattern stays where it is.
"""

from typing import Any, NamedTuple

from torch import Tensor

from exptilt._support.transforms import full_precision
from exptilt.families import Empirical
from exptilt.families.measure import Measure
from exptilt.tilting.arguments import prepare
from exptilt.tilting.attend import run


class Slope(NamedTuple):
    """The log-normalizer of the measure and its gradient, at every point.

    Attributes:
        log_normalizer: ``(..., N)``, G(βη); −inf where a point sees nothing.
        gradient: ``(..., N, D)``, g(η).
    """

    log_normalizer: Tensor
    gradient: Tensor


def slope(
    points: Tensor, patterns: Tensor | Measure | None, *, beta: float, causal: bool, mask: Tensor | None
) -> Slope:
    """G and its gradient at points ``(..., N, D)``; the other arguments are those of `Flow`."""
    log_weight = None
    if isinstance(patterns, Empirical):
        key, log_weight = patterns.points, patterns.log_weight.unsqueeze(-2)
    elif isinstance(patterns, Measure):
        if patterns.batch_shape:  # the points' axis goes after the batch axes
            patterns = patterns.map(
                lambda leaf, event: leaf.unsqueeze(leaf.ndim - event) if leaf.ndim > event else leaf
            )
        with full_precision(points.device):
            return Slope(patterns.log_normalizer(beta * points), patterns.mean(beta * points))
    else:
        key = points if patterns is None else patterns
    key = key.unsqueeze(-3)
    seen = None if mask is None else mask.unsqueeze(-3)
    options: Any = {"scale": beta, "log_weight": log_weight, "mask": seen, "causal": causal}
    call = prepare("Flow", points.unsqueeze(-3), key, key, check=False, **options)
    with full_precision(points.device):
        tilted = run(call)
    return Slope(tilted.log_normalizer.squeeze(-2), tilted.output.squeeze(-3))
