r"""What one head did on one text: plain statistics of its tilted measures, averaged over the queries.

    entropy H, e^H, H / log(outcomes)           G, its spread and the coefficient of variation of Z = e^G (THEORY A15)
    Var_p(s), Fisher information along the query          the largest score          attention on the first key          concentration

Z grows with the number of keys a query sees, so its constancy is asked of Z per key: of G − log n, n the visible keys (with key weights
h: of G − log Σh). For small variation the standard deviation of log Z *is* the coefficient of variation of Z, and unlike it stays
meaningful when one query in a thousand has a Z that dwarfs the rest. Both are given.
"""

import torch
from torch import Tensor

from exptilt.lens.heads.key_mass import Mass
from exptilt.tilting import Tilted


def head_statistics(tilted: Tilted, mass: Mass, *, sink: bool, item: int = 0) -> dict[str, Tensor]:
    """Means over the queries of one sequence, by name; NaN where no query can tell.

    Args:
        tilted: statistics of the call.
        mass: of the same call and item.
        sink: whether each query has one more outcome than it has keys.
        item: which item of the batch.

    Returns:
        Tensors ``(head,)`` in float64.
    """
    H, G, variance, top = (
        x[item].detach().double()
        for x in (tilted.entropy, tilted.log_normalizer, tilted.score_variance, tilted.score_max)
    )
    live = mass.visible > 0
    outcomes = mass.visible.double() + sink
    choice = live & (outcomes > 1)
    per_key = G - mass.log_measure.double()
    first = mass.sees_first & choice
    return {
        "entropy": _mean(H, live),
        "relative_entropy": _mean(H / outcomes.clamp_min(2).log(), choice),
        "effective_keys": _mean(H.exp(), live),
        "log_normalizer": _mean(G, live),
        "log_normalizer_variation": _spread(per_key, live),
        "normalizer_cv": _variation(per_key, live),
        "score_variance": _mean(variance, live),
        "score_max": top.masked_fill(~live, -torch.inf).amax(-1).masked_fill(~live.any(-1), torch.nan),
        "first_key_mass": _mean(mass.first.double(), first),
        "key_mass_concentration": mass.concentration(),
    }


def _mean(x: Tensor, use: Tensor) -> Tensor:
    """Mean of ``(head, query)`` over the queries in use."""
    return torch.where(use, x, 0.0).sum(-1) / use.sum(-1)


def _spread(x: Tensor, use: Tensor) -> Tensor:
    """Standard deviation over the queries in use; NaN for fewer than two."""
    off = torch.where(use, x - _mean(x, use)[:, None], 0.0)
    count = use.sum(-1)
    return (off.square().sum(-1) / (count - 1)).sqrt().masked_fill(count < 2, torch.nan)


def _variation(log_x: Tensor, use: Tensor) -> Tensor:
    """Standard deviation of x over its mean, from log x: shifted by its maximum, so nothing overflows."""
    shifted = torch.where(use, log_x, -torch.inf)
    x = torch.exp(shifted - shifted.amax(-1, keepdim=True))
    return _spread(x, use) / _mean(x, use)
