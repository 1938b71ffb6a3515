r"""Hidden states as a distribution of distributions (THEORY A14).

States η_1, ..., η_N are members p_j of the family that tilts h, known by η_j or by their expected statistics
k_j = ∇G(η_j). Attention whose keys are those expected statistics scores a query q by

    ⟨q, k_j⟩ = G(q) + G*(k_j) − KL(p_j ‖ p_q),

so a softmax over j weighs the states by e^{G*(k_j)} times how near p_j is to the member with η = q. Over
natural parameters the roles swap, for a mean m:   ⟨η_j, m⟩ = G(η_j) + G*(m) − KL(p_m ‖ p_j).
"""

from typing import Literal

from torch import Tensor

from exptilt._support.checks import choice, floating
from exptilt._support.linalg import dot
from exptilt.families.measure import Measure
from exptilt.families.members.empirical import Empirical


def measure_of_members(
    h: Measure, eta: Tensor, *, over: Literal["mean", "natural"] = "mean", by_divergence: bool = False
) -> Empirical:
    """The tilts of h by these η as a measure of points, placed at mean or natural parameters.

    Args:
        h: the measure that is tilted, batch ``(...)``.
        eta: ``(..., N, D)``, the states.
        over: "mean" puts the points at ∇G(η_j), to be tilted by natural parameters: keys as expected
            statistics. "natural" puts them at η_j, to be tilted by mean parameters.
        by_divergence: give the points log-weights −G*(∇G(η_j)), or −G(η_j) over natural parameters, so that
            tilting weighs a member by e^{−KL} alone.

    Returns:
        An `Empirical` with N points; its `mean(q)` is what attention returns for the query q.

    Example:
        >>> from exptilt.families import Poisson
        >>> states = measure_of_members(Poisson(torch.ones(1)), torch.tensor([[0.0], [2.0]]).log1p())
        >>> states.points
        tensor([[1.],
                [3.]])
    """
    choice("measure_of_members", "over", over, ("mean", "natural"))
    floating("measure_of_members", "eta", eta, axes=2, shape=f"(..., N, {h.dimension})")
    law = h[..., None] if h.batch_shape else h
    mean, value = law.mean(eta), law.log_normalizer(eta)
    points = mean if over == "mean" else eta.expand_as(mean)
    if not by_divergence:
        return Empirical(points)
    return Empirical(points, value - dot(eta, mean) if over == "mean" else -value)
