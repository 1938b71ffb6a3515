r"""The third cumulant of attention's scores: the third derivative of the log-normalizer.

With scores s = β e, the law p ∝ e^{βe} has the cumulants G'(β) = E[e], G'' = Var(e), G''' = κ₃(e), so

    dH/dβ = −β Var(e),      d²H/dβ² = −(Var(e) + β κ₃(e)):

the skewness says whether a head that is sharpened loses entropy faster or slower. The scores of a few queries
exist at a time; derivatives of every order compute them again.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import full_precision, is_concrete
from exptilt.tilting.arguments import explain_keywords, prepare
from exptilt.tilting.derivatives.rows import Results, Rows
from exptilt.tilting.divergences import CELLS, Side, log_probabilities
from exptilt.tilting.problem import wide_dtype


@explain_keywords
def score_skewness(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    standardized: bool = True,
) -> Tensor:
    r"""Skewness of the scores under the attention of each query, κ₃ / Var^{3/2}, or κ₃ itself.

        κ₃ = E_p[(s − E_p[s])³]

    Negative where a few keys score far below the rest that gets the weight. Differentiable in all tensors,
    backwards, forwards and twice, in the memory of a few queries.

    Args:
        query: ``(..., Hq, Q, D)``; half precision is summed in float32.
        key: ``(..., Hkv, K, D)``; Hkv divides Hq.
        scale: as in `attend`, like all that follow.
        log_weight: ``(..., Hkv, K)``.
        bias: broadcasts to ``(..., Hq, Q, K)``.
        mask: broadcasts to ``(..., Hq, Q, K)``.
        causal: see `attend`.
        window: see `attend`.
        softcap: see `attend`.
        sink: ``(..., Hq)``; it counts as an outcome, as in score_variance.
        standardized: divide by Var^{3/2}; False returns the third cumulant κ₃.

    Returns:
        ``(..., Hq, Q)``; 0 for a query whose scores do not vary, or that sees nothing.

    Example:
        >>> q, k = torch.zeros(1, 1, 1), torch.zeros(1, 4, 1)
        >>> few = torch.tensor([0.9, 0.05, 0.03, 0.02]).log()
        >>> xt.score_skewness(q, k, log_weight=few)  # most of the weight on the highest score
        tensor([[-2.7383]])
    """
    name = "score_skewness"
    options = scale, log_weight, bias, mask, causal, window, softcap, sink
    call = prepare(name, query, key, None, *options)
    t = call.inputs._replace(query=call.inputs.query.to(wide_dtype(call.inputs.query.dtype)))
    side, (Q, K) = Side(t, call.settings.rule), (t.query.shape[-2], t.key.shape[-2])

    def some(rows: Sequence[Tensor], shared: Sequence[Tensor]) -> Results:
        place, ours = rows[0], rows[1:]
        s = side.scores(ours, shared, place, side.keys(place, K))
        more = side.sink(shared, s)
        s = s if more is None else torch.cat([s, more], -1)
        p = log_probabilities(s)[0].exp()
        top = s.detach().amax(-1, keepdim=True) if s.shape[-1] else 0.0
        above = torch.where(p == 0, 0.0, s - top)  # such an outcome adds nothing, however far its score
        centred = torch.where(p == 0, 0.0, above - (p * above).sum(-1, keepdim=True))
        third = (p * centred.pow(3)).sum(-1)
        if standardized:
            variance = (p * centred.square()).sum(-1)
            flat = variance == 0
            third = torch.where(flat, 0.0, third / torch.where(flat, 1.0, variance).pow(1.5))
        return (third.movedim(-1, 0),), ()

    size = max(1, CELLS // max(1, math.prod(t.query.shape[:-2]) * K))
    place = torch.arange(Q, device=t.query.device)
    tensors = [place, *side.rows, *side.shared]
    with full_precision(t.query.device):
        plan = Rows(some, 1 + len(side.rows), size)
        compiling = torch.compiler.is_compiling()
        found = some(tensors[: plan.rows], tensors[plan.rows :])[0][0] if compiling else plan(*tensors)[0]
    result = found.movedim(0, -1)
    if is_concrete(result) and bool(result.isnan().any()):
        checks.finite(name, query=query, key=key)
        raise ArgumentError(
            f"{name}: a result is NaN, though queries and keys are finite. Look for NaN or +inf in bias, "
            "log_weight or sink, or scores that overflow."
        )
    return result
