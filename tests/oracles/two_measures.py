"""Divergences of attention and of linear heads by their definitions, with whole matrices."""

import torch

from exptilt.tilting.arguments import prepare


def kl(log_p, log_q):
    """Σ p (log p − log q), 0 where p is 0."""
    seen = log_p > -torch.inf
    gap = torch.where(seen, log_p, 0.0) - torch.where(seen, log_q, 0.0)
    return (log_p.exp() * gap).sum(-1)


def between(log_p, log_q, direction="forward", mixing=0.5):
    """The loss of a student q and a teacher p."""
    if direction != "js":
        return kl(log_p, log_q) if direction == "forward" else kl(log_q, log_p)
    log_m = (mixing * log_p.exp() + (1 - mixing) * log_q.exp()).log()
    return mixing * kl(log_p, log_m) + (1 - mixing) * kl(log_q, log_m)


def linear_kl(h, W, th, tW, *, b=None, tb=None, softcap=None, teacher_softcap=None, T=1.0, **how):
    """The divergence of each row, from both matrices of logits."""

    def log_probability(x, weight, bias, cap):
        s = x @ weight.T
        s = s if cap is None else cap * torch.tanh(s / cap)
        return ((s if bias is None else s + bias) / T).log_softmax(-1)

    return between(log_probability(th, tW, tb, teacher_softcap), log_probability(h, W, b, softcap), **how)


def scores(query, key, **options):
    """The matrix of scores (..., Hq, Q, K), with a column for the sink if there is one."""
    call = prepare("oracle", query, key, None, **options)
    t, rule = call.inputs, call.settings.rule
    k = t.key.repeat_interleave(t.query.shape[-3] // t.key.shape[-3], -3)
    s = rule.block(t, rule.scale * (t.query @ k.mT), 0, k.shape[-2]).scores
    return s if t.sink is None else torch.cat([s, t.sink[..., None, None].expand(*s.shape[:-1], 1)], -1)


def weights(query, key, **options):
    """The matrix of attention, without the sink's column."""
    p = scores(query, key, **options).softmax(-1).nan_to_num(0.0)
    return p[..., : key.shape[-2]]
