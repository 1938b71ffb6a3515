r"""Losses over a sample of the outcomes: sampled softmax, and noise-contrastive estimation.

With S outcomes drawn from a noise distribution Q, each expected S·Q(j) times:

    sampled softmax:  log(e^{s'_t} + Σ_j e^{s'_j}) − s'_t,            s' = s − log(S Q)
    NCE:              −log σ(s'_t) − Σ_j log σ(−s'_j)

Without log Q the scores stay as they are: NCE is then word2vec's negative sampling.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.losses.embeddings import REDUCTIONS, linear_head, reduced, without_autocast
from exptilt.tilting import log_normalizer
from exptilt.tilting.problem import wide_dtype


@without_autocast
def sampled_softmax(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    sampled: Tensor,
    *,
    log_noise: Tensor | None = None,
    bias: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Cross-entropy among the target and a sample of outcomes, corrected for how they were drawn.

    A sampled outcome that is a token's own target does not count for that token.

    Args:
        hidden: ``(N, D)``.
        weight: ``(V, D)``, one row for each outcome, of the same dtype.
        target: ``(N,)``, whole numbers from 0 to V − 1.
        sampled: ``(S,)``, outcomes for all tokens, or ``(N, S)``, for each.
        log_noise: ``(V,)``, log Q of each outcome; None leaves the scores uncorrected.
        bias: ``(V,)``.
        reduction: ``mean``, ``sum`` or ``none``.

    Returns:
        One number, or ``(N,)`` with ``reduction="none"``.

    Example:
        >>> h, W = torch.zeros(2, 4), torch.randn(10, 4)
        >>> xt.losses.sampled_softmax(h, W, torch.tensor([0, 1]), torch.tensor([2, 3, 4]))  # log 4
        tensor(1.3863)
    """
    caller = "sampled_softmax"
    h, W, own = _prepared(caller, hidden, weight, target, sampled, log_noise, bias, reduction)
    correction = _correction(W, bias, log_noise, sampled.shape[-1])
    right = (h * W[target]).sum(-1) + correction[target]
    hits = sampled == target[:, None]  # (N, S), for samples (S,) or (N, S)
    if own:
        scores = torch.einsum("nd,nsd->ns", h, W[sampled]) + correction[sampled]
        G = torch.where(hits, -torch.inf, scores).logsumexp(-1)
    else:
        looked_at = is_concrete(hits)  # if not, the mask may be needed
        seen = None if looked_at and not bool(hits.any()) else ~hits[None]
        log_weight = correction[sampled][None]
        G = log_normalizer(h[None], W[sampled][None], scale=1.0, log_weight=log_weight, mask=seen)[0]
    # A token whose every sample is its own target has no alternatives: its loss is 0.
    some = -torch.inf < G
    return reduced(caller, torch.where(some, -logsigmoid(right - torch.where(some, G, 0.0)), 0.0), reduction)


@without_autocast
def nce(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    sampled: Tensor,
    *,
    log_noise: Tensor | None = None,
    bias: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Noise-contrastive estimation: a binary loss of the target against S noise outcomes, for each token.

    With ``log_noise=None`` this is word2vec's negative sampling: `hidden` are the vectors of centre words,
    `weight` the table of context vectors, `target` the context words, `sampled` the negatives.

    Args:
        hidden: ``(N, D)``.
        weight: ``(V, D)``, one row for each outcome, of the same dtype.
        target: ``(N,)``, whole numbers from 0 to V − 1.
        sampled: ``(S,)``, noise for all tokens, or ``(N, S)``, for each. Noise that happens to be the target
            counts as noise, as the method has it.
        log_noise: ``(V,)``, log Q of each outcome; None leaves the scores uncorrected.
        bias: ``(V,)``.
        reduction: ``mean`` over tokens, ``sum`` or ``none``.

    Returns:
        One number, or ``(N,)`` with ``reduction="none"``.

    Example:
        >>> h, W = torch.zeros(2, 4), torch.randn(10, 4)
        >>> xt.losses.nce(h, W, torch.tensor([0, 1]), torch.tensor([2, 3, 4]))  # 4 log 2
        tensor(2.7726)
    """
    caller = "nce"
    h, W, own = _prepared(caller, hidden, weight, target, sampled, log_noise, bias, reduction)
    correction = _correction(W, bias, log_noise, sampled.shape[-1])
    right = (h * W[target]).sum(-1) + correction[target]
    scores = torch.einsum("nd,nsd->ns", h, W[sampled]) if own else h @ W[sampled].T
    losses = -logsigmoid(right) - logsigmoid(-(scores + correction[sampled])).sum(-1)
    return reduced(caller, losses, reduction)


def _prepared(
    caller: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    sampled: Tensor,
    log_noise: Tensor | None,
    bias: Tensor | None,
    reduction: str,
) -> tuple[Tensor, Tensor, bool]:
    """Hidden states and weight, widened, and whether each token has a sample of its own."""
    checks.choice(caller, "reduction", reduction, REDUCTIONS)
    linear_head(caller, hidden, weight, "tokens", log_noise=log_noise, bias=bias)
    N, V = hidden.shape[0], weight.shape[0]
    for name, x, shapes in (("target", target, [(N,)]), ("sampled", sampled, [(), (N,)])):
        lead = tuple(x.shape[:-1]) if isinstance(x, Tensor) and name == "sampled" else None
        right = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool and x.ndim > 0
        if not right or (tuple(x.shape) if lead is None else lead) not in shapes or x.shape[-1] == 0:
            got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            wanted = "(tokens,)" if name == "target" else "(samples,) or (tokens, samples)"
            raise ArgumentError(f"{caller}: {name} is {got}. Pass whole numbers {wanted}; tokens is {N}.")
        checks.entries(caller, name, x, (x >= 0) & (x < V), f"from 0 to {V - 1}")
    wide = wide_dtype(hidden.dtype)
    return hidden.to(wide), weight.to(wide), sampled.ndim == 2


def _correction(W: Tensor, bias: Tensor | None, log_noise: Tensor | None, samples: int) -> Tensor:
    """The terms b − log(S Q) ``(V,)`` that are added to ⟨h, w⟩ of each outcome."""
    total = torch.zeros_like(W[:, 0]) if bias is None else bias.to(W.dtype)
    if log_noise is not None:
        total = total - log_noise.to(W.dtype) - math.log(samples)
    return total
