"""Losses as their papers print them, with the whole matrix, in plain torch."""

import math

import torch
import torch.nn.functional as F


def linear_cross_entropy(h, W, t, bias=None, softcap=None, scale=1.0, z_loss=0.0, smoothing=0.0, ignore=-100):
    """One loss for each row, 0 where ignored."""
    s = scale * (h @ W.T)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    losses = F.cross_entropy(s, t, reduction="none", label_smoothing=smoothing, ignore_index=ignore)
    return losses + z_loss * s.logsumexp(-1).square() * (t != ignore)


def scores(q, k, temperature, similarity="cosine"):
    if similarity == "cosine":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return q @ k.transpose(-1, -2) / temperature


def info_nce(q, k, temperature, negatives=None, in_batch=True, symmetric=False, similarity="cosine"):
    s = scores(q, k, temperature, similarity)
    candidates = s if in_batch else s.diagonal()[:, None]
    if negatives is not None:
        if negatives.ndim == 2:
            more = scores(q, negatives, temperature, similarity)
        else:
            more = scores(q[:, None], negatives, temperature, similarity)[:, 0]
        candidates = torch.cat([candidates, more], 1)
    right = torch.arange(len(q)) if in_batch else torch.zeros(len(q), dtype=torch.long)
    losses = F.cross_entropy(candidates, right, reduction="none")
    if symmetric:
        losses = (losses + F.cross_entropy(s.T, torch.arange(len(q)), reduction="none")) / 2
    return losses


def supervised(z, label, temperature, similarity="cosine"):
    """L_out of Khosla et al., one for each row; NaN without positives."""
    s = scores(z, z, temperature, similarity)
    own = torch.eye(len(z), dtype=torch.bool)
    log_p = s - s.masked_fill(own, -torch.inf).logsumexp(-1, keepdim=True)
    mates = (label[:, None] == label) & ~own
    return -torch.where(mates, log_p, 0.0).sum(-1) / mates.sum(-1)


def nt_xent(views, temperature, similarity="cosine"):
    z, (V, B) = views.flatten(0, 1), views.shape[:2]
    return supervised(z, torch.arange(B).repeat(V), temperature, similarity).reshape(V, B)


def sigmoid(x, y, temperature, bias, similarity="cosine"):
    s = scores(x, y, temperature, similarity) + bias
    sign = 2 * torch.eye(len(x), dtype=s.dtype) - 1
    return -F.logsigmoid(sign * s).sum(-1)


def sampled_softmax(h, W, t, sampled, log_noise=None, bias=None):
    s = h @ W.T + (0.0 if bias is None else bias)
    if log_noise is not None:
        s = s - log_noise - math.log(sampled.shape[-1])
    sampled = sampled.expand(len(h), -1)
    right = s.gather(1, t[:, None])
    wrong = s.gather(1, sampled).masked_fill(sampled == t[:, None], -torch.inf)
    return torch.cat([right, wrong], 1).logsumexp(1) - right[:, 0]


def nce(h, W, t, sampled, log_noise=None, bias=None):
    s = h @ W.T + (0.0 if bias is None else bias)
    if log_noise is not None:
        s = s - log_noise - math.log(sampled.shape[-1])
    wrong = s.gather(1, sampled.expand(len(h), -1))
    return -F.logsigmoid(s.gather(1, t[:, None]))[:, 0] - F.logsigmoid(-wrong).sum(1)
