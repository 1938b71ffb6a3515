r"""Do the keys of a head look Gaussian to its queries (THEORY F2)?

If the keys a query sees were drawn from a Gaussian of mean m and covariance C, then with η = scale·q

    G(q) = log Σh + ⟨m,η⟩ + ½ η'Cη,        ∇G = m + Cη   (the attention output in key space, the mean key).

Neither m nor C is needed as such: ⟨m,η⟩ and η'Cη are the mean and the variance of the query's scores under
the untilted measure of its keys, and Cη is the covariance of key and score. So the prediction is the second
cumulant expansion of G, and it is held against G itself:

    R² of G − log Σh over the queries of a text: 1 exact, 0 no better than a constant, below 0 worse;
    relative error ‖m + Cη − ∇G‖ / ‖∇G − m‖, root mean square over queries: 0 exact, 1 as even attention.

log Σh, the log of the number of visible keys, is left out on both sides: under a causal mask it varies most
and is known. The local fit does the same within the k visible keys nearest to the mean key ∇G(q), the place
in key space to which the query tilts its measure.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from exptilt.lens.heads.scores import Scores


class GaussianFit(NamedTuple):
    """R² and error of a prediction by two moments, each ``(head,)``; NaN if fewer than two queries count."""

    r2: Tensor
    output_error: Tensor


def gaussian_fit(
    scores: Scores, log_normalizer: Tensor, mean_key: Tensor, *, neighbours: int | None = None
) -> GaussianFit:
    """How well two moments predict G and the mean key, of all visible keys or of the nearest `neighbours`.

    Scores must have no softcap (a capped score is not linear in the query); G is ``(head, query)``, the mean
    keys ∇G are ``(head, query, D)``. Queries that see fewer than twice as many keys as neighbours (fewer than
    2, for all keys) are left out: with hardly more keys than neighbours the two fits are the same.
    """
    least = 2 if neighbours is None else 2 * neighbours
    found = []
    for rows, score, weight in scores.blocks():
        keys, sink = scores.inputs.key, scores.inputs.sink
        target = mean_key[:, rows].to(score.dtype)
        enough = (weight > -torch.inf).sum(-1) >= least
        if neighbours is None:
            G = log_normalizer[:, rows].to(score.dtype)
        else:
            score, weight, keys = _nearest(score, weight, keys, target, neighbours)
            G = torch.logsumexp(score + weight, -1)
            target = (torch.exp(score + weight - G[..., None])[..., None] * keys).sum(-2)
            sink = None
        truth, guess, centre, tilted = _moments(score, weight, keys, sink, G)
        wrong, moved = (tilted - target).square().sum(-1), (target - centre).square().sum(-1)
        use = enough & truth.isfinite()
        found.append([torch.where(use, x, 0.0) for x in (truth, guess, wrong, moved, use)])
    truth, guess, wrong, moved, used = (torch.cat(x, 1).double() for x in zip(*found, strict=True))
    count = used.sum(1)
    average = truth.sum(1, keepdim=True) / count.clamp_min(1)[:, None]
    total = torch.where(used > 0, truth - average, 0.0).square().sum(1)
    r2 = 1 - (truth - guess).square().sum(1) / total
    # Where G hardly varies beyond its own rounding, there is nothing to explain.
    largest = log_normalizer.abs().nan_to_num(posinf=0.0).amax(1).clamp_min(1.0)
    rounding = 64 * torch.finfo(log_normalizer.dtype).eps * largest.double()
    few, flat = count < 2, total <= count * rounding.square()
    error = (wrong.sum(1) / moved.sum(1)).sqrt()
    return GaussianFit(r2.masked_fill(few | flat, torch.nan), error.masked_fill(few, torch.nan))


def _moments(
    score: Tensor, weight: Tensor, keys: Tensor, sink: Tensor | None, G: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log Z per key, its prediction, m and m + Cη; keys are (head, key, D), or (head, row, key, D) by row."""
    log_total = torch.logsumexp(weight, -1)
    if sink is not None:
        log_total = torch.logaddexp(log_total, sink[:, None])
    w = torch.exp(weight - log_total[..., None])
    mean = (w * score).sum(-1)
    off = score - mean[..., None]
    variance = (w * off.square()).sum(-1)
    if sink is not None:  # a key at the origin: its score is 0
        variance = variance + torch.exp(sink[:, None] - log_total) * mean.square()
    if keys.dim() == score.dim():
        centre, shift = w @ keys, (w * off) @ keys
    else:
        centre, shift = (w[..., None] * keys).sum(-2), ((w * off)[..., None] * keys).sum(-2)
    return G - log_total, mean + variance / 2, centre, centre + shift


def _nearest(
    score: Tensor, weight: Tensor, keys: Tensor, place: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, weights and keys of the k visible keys nearest to `place` (head, row, D), for each row."""
    distance = keys.square().sum(-1)[:, None] - 2 * place @ keys.mT
    distance = torch.where(weight > -torch.inf, distance, torch.inf)
    index = distance.topk(min(k, distance.shape[-1]), dim=-1, largest=False).indices
    heads = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
    return score.gather(-1, index), weight.gather(-1, index), keys[heads, index]
