r"""Do the keys of a head look Gaussian to its queries (THEORY F2)?

If the keys a query sees were drawn from a Gaussian of mean m and covariance C, then with η = scale·q

    G(q) = log Σh + ⟨m,η⟩ + ½ η'Cη,        ∇G = m + Cη   (the attention output in key space, the mean key).

Neither m nor C is needed as such: ⟨m,η⟩ and η'Cη are the mean and the variance of the query's scores under
the untilted measure of its keys, and Cη is the covariance of key and score. So the prediction is the second
cumulant expansion of G, and it is held against G itself:

    R² of G − log Σh over the queries of a text: 1 exact, 0 no better than a constant, below 0 worse;
    relative error ‖m + Cη − ∇G‖ / ‖∇G − m‖, root mean square over queries: 0 exact, 1 as even attention.

log Σh, the log of the number of visible keys, is left out on both sides: under a causal mask it varies most
and is known. All three are results of `attend` and its Fisher product at the query 0, which tilts nothing.

The local fit does the same within the k visible keys nearest to the mean key ∇G(q), the place in key space to
which the query tilts its measure. It is asked of at most 2 · `ASKED` queries of a text, evenly spread.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt.lens.heads.scores import Scores
from exptilt.tilting import attend, fisher_vector_product

ASKED = 128  # the local fit is asked of at least so many queries of a text, if there are as many


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
    every = 1 if neighbours is None else max(1, log_normalizer.shape[1] // ASKED)
    G, target = log_normalizer[:, ::every], mean_key[:, ::every]
    if neighbours is None:
        truth, guess, centre, tilted, visible = _all_keys(scores, G)
    else:
        truth, guess, centre, tilted, target, visible = _nearest_keys(scores, target, neighbours, every)
    use = (visible >= (2 if neighbours is None else 2 * neighbours)) & truth.isfinite()
    wrong, moved = (tilted - target).square().sum(-1), (target - centre).square().sum(-1)
    truth, guess, wrong, moved, used = (
        torch.where(use, x, 0.0).double() for x in (truth, guess, wrong, moved, use)
    )
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


def _all_keys(scores: Scores, G: Tensor) -> tuple[Tensor, ...]:
    """Log Z per key, its prediction, m, m + Cη and the number of visible keys, for all queries."""
    t, rule = scores.inputs, scores.rule
    tensors = {"bias": t.bias, "mask": t.mask, "log_weight": t.log_weight}
    options: dict[str, Any] = {name: x[None] for name, x in tensors.items() if x is not None}
    options |= {"scale": rule.scale, "causal": rule.causal, "window": rule.window, "sink": t.sink}
    query, key = t.query[None], t.key[None]
    plain = attend(torch.zeros_like(query), key, key, **options)
    product = fisher_vector_product(torch.zeros_like(query), key, query, **options)[0]
    m, variance = plain.output[0], (t.query * product).sum(-1)
    guess = rule.scale * (t.query * m).sum(-1) + variance / 2
    visible = rule.count(t.query.shape[1], t.key.shape[1], G.device, t.mask)
    return G - plain.log_normalizer[0], guess, m, m + product / rule.scale, visible


def _nearest_keys(scores: Scores, place: Tensor, k: int, every: int) -> tuple[Tensor, ...]:
    """As `_all_keys`, and the mean key before the last, among the k visible keys nearest to each `place`.

    The queries are every so many, and `place` is ``(head, query, D)``.
    """
    keys, found, start = scores.inputs.key, [], 0
    heads = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
    for _, score, weight in scores.blocks(every=every):
        here = place[:, start : start + score.shape[1]].to(score.dtype)
        start += score.shape[1]
        distance = keys.square().sum(-1)[:, None] - 2 * here @ keys.mT
        distance = torch.where(weight > -torch.inf, distance, torch.inf)
        index = distance.topk(min(k, distance.shape[-1]), dim=-1, largest=False).indices
        s, w, near = score.gather(-1, index), weight.gather(-1, index), keys[heads, index]
        log_total, G = torch.logsumexp(w, -1), torch.logsumexp(s + w, -1)
        p, even = torch.exp(s + w - G[..., None]), torch.exp(w - log_total[..., None])
        mean = (even * s).sum(-1)
        off = even * (s - mean[..., None])
        m, shift, target = ((x[..., None, :] @ near)[..., 0, :] for x in (even, off, p))
        guess = mean + (off * s).sum(-1) / 2
        found.append([G - log_total, guess, m, m + shift, target, (weight > -torch.inf).sum(-1)])
    return tuple(torch.cat(x, 1) for x in zip(*found, strict=True))
