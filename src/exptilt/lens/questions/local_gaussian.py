r"""Do the keys of a head look Gaussian to its queries (THEORY F2)?

If the keys a query sees were drawn from a Gaussian of mean m and covariance C, then with η = scale·q

    G(q) = log Σh + <m,η> + ½ η'Cη,        ∇G = m + Cη   (the attention output in key space, the mean key).

Neither m nor C is needed as such: <m,η> and η'Cη are the mean and the variance of the query's scores under the untilted measure of its
keys, and Cη is the covariance of key and score. So the prediction is the second cumulant expansion of G, and it is held against G itself:

    R² of G − log Σh over the queries of a text: 1 if moments tell all, 0 if no better than a constant, below 0 if worse;
    relative error ‖m + Cη − ∇G‖ / ‖∇G − m‖, root mean square over queries: 0 exact, 1 no better than even attention.

log Σh, the log of the number of visible keys, is left out on both sides: under a causal mask it varies most and is known.

Locally: the same within the k visible keys nearest to the mean key ∇G(q), the place in key space to which the query tilts its measure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt.lens.heads.scores import Scores


@dataclass(frozen=True)
class GaussianFit:
    """How well two moments predict, per head; NaN where fewer than two queries can tell.

    Attributes:
        r2: ``(head,)``.
        output_error: ``(head,)``.
        queries: how many queries entered.
    """

    r2: Tensor
    output_error: Tensor
    queries: int


def gaussian_fit(
    scores: Scores, log_normalizer: Tensor, mean_key: Tensor, *, neighbours: int | None = None
) -> GaussianFit:
    """Predict G and the mean key from two moments, of all visible keys or of the nearest ones.

    Args:
        scores: of one sequence, without softcap (a capped score is not linear in the query).
        log_normalizer: ``(head, query)``, G.
        mean_key: ``(head, query, D)``, ∇G: keys averaged under attention.
        neighbours: k; None for all visible keys. Queries that see fewer than 2k keys (2, where k is None) are left out: with hardly more
            keys than neighbours the two questions are one.
    """
    least = 2 if neighbours is None else 2 * neighbours
    truths, guesses, wrong, moved, kept = [], [], [], [], []
    for rows, score, weight in scores.blocks():
        keys, sink = scores.key, scores.sink
        place = mean_key[:, rows].to(score.dtype)
        enough = ((weight > -torch.inf).sum(-1) >= least).expand(score.shape[:2])
        if neighbours is None:
            G = log_normalizer[:, rows].to(score.dtype)
            target = place
        else:
            score, weight, near = _nearest(score, weight, keys, place, neighbours)
            G = torch.logsumexp(score + weight, -1)
            target = (torch.exp(score + weight - G[..., None])[..., None] * near).sum(-2)
            keys, sink = near, None
        truth, guess, centre, tilted = _moments(score, weight, keys, sink, G)
        truths.append(truth)
        guesses.append(guess)
        wrong.append((tilted - target).square().sum(-1))
        moved.append((target - centre).square().sum(-1))
        kept.append(enough)
    keep = torch.cat(kept, 1)
    use = keep & torch.cat(truths, 1).isfinite()
    truth, guess = (torch.where(use, torch.cat(x, 1), 0.0).double() for x in (truths, guesses))
    count = use.sum(1)
    average = truth.sum(1, keepdim=True) / count.clamp_min(1)[:, None]
    total = torch.where(use, truth - average, 0.0).square().sum(1)
    r2 = 1 - (truth - guess).square().sum(1) / total
    error, distance = (torch.where(use, torch.cat(x, 1), 0.0).double().sum(1) for x in (wrong, moved))
    # Where G hardly varies beyond its own rounding, there is nothing to explain.
    rounding = (
        64
        * torch.finfo(log_normalizer.dtype).eps
        * log_normalizer.abs().nan_to_num(posinf=0.0).amax(1).clamp_min(1.0)
    )
    few = count < 2
    flat = total <= count * rounding.double().square()
    return GaussianFit(
        r2.masked_fill(few | flat, torch.nan),
        (error / distance).sqrt().masked_fill(few, torch.nan),
        int(count.max()),
    )


def _moments(
    score: Tensor, weight: Tensor, keys: Tensor, sink: Tensor | None, G: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log Z per key, its guess, m and m + Cη; keys are (head, key, D), or (head, row, key, D) if each row has its own."""
    log_total = torch.logsumexp(weight, -1)
    if sink is not None:
        log_total = torch.logaddexp(log_total, sink[:, None])
    w = torch.exp(weight - log_total[..., None]).expand_as(score)
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
    return score.gather(-1, index), weight.expand_as(score).gather(-1, index), keys[heads, index]
