r"""How much each training example matters for the loss on other data.

If sequence s is left out, the minimum of the mean loss moves by (1/N) A⁻¹ ∇ℓ_s to first order, and the loss
on test data changes by

    (1/N) ⟨∇L_test, (A + damping)⁻¹ ∇ℓ_s⟩

One solve for the test loss, x = (A + damping)⁻¹ ∇L_test, then ⟨x, ∇ℓ_s⟩ for all sequences is a forward
derivative along x: one pass over the training data, and no gradient of any sequence.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.solution import Solution
from exptilt.curvature.operator import Curvature


class Influence(NamedTuple):
    """Influence of training sequences on a test loss.

    Attributes:
        scores: ``(S,)``, the change of the test loss if the sequence were left out, to first order; positive
            for sequences that help.
        solution: of the damped system, with its residual.
    """

    scores: Tensor
    solution: Solution[Tensor]

    def most(self, k: int) -> Tensor:
        """The places ``(k,)`` of the sequences that help most, the best first."""
        return self.scores.topk(min(k, len(self.scores))).indices


def influence(
    curvature: Curvature,
    test: Iterable[Any],
    *,
    damping: float,
    tolerance: float = 1e-4,
    max_steps: int = 100,
) -> Influence:
    """The influence of every sequence of the curvature's data on the mean loss of test data.

    Args:
        curvature: of the training data, at weights near a minimum of their loss; "ggn" or "fisher" are safe.
        test: batches like those of the curvature.
        damping: added to the diagonal; it also stands for a penalty ½ damping |w|² in training.
        tolerance: of the solve.
        max_steps: of the solve.

    Returns:
        An `Influence`: scores by sequence, and the solve's certificate.
    """
    if not isinstance(curvature, Curvature):
        raise ArgumentError(f"influence: curvature is a {type(curvature).__name__}. Pass a Curvature.")
    there = Curvature(
        curvature.model, curvature.loss, test, "ggn", curvature.parameters.names, progress=curvature.progress
    )
    found = curvature.solve(there.gradient(), damping=damping, tolerance=tolerance, max_steps=max_steps)
    scores = curvature.slopes(found.value) / curvature.items
    return Influence(scores.to(torch.promote_types(scores.dtype, torch.float32)), found)
