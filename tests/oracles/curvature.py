"""Dense curvature matrices in float64, by Jacobians of attention that is written out, a row at a time.

Not by `torch.func.hessian`: with torch 2.13 it is wrong for models with LayerNorm. `jacrev` runs the backward
pass under vmap, whose rule for layer_norm takes the saved mean and standard deviation for constants, so the
derivative of the weight's gradient in the input lacks two terms (12 to 40 % of a small GPT-2's Hessian).
`test_operator_layer_norm.py` shows it. A row at a time, without vmap, agrees with central differences.
"""

import torch
from torch.autograd.functional import hessian as second
from torch.autograd.functional import jacobian
from torch.func import functional_call
from torch.nn.functional import cross_entropy


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def unflat(model, vector):
    named = dict(model.named_parameters())
    parts = vector.split([p.numel() for p in named.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}


def logits_and_labels(model, batch, shifted):
    """A function from flat weights to the logits of the tokens that count, and their labels."""
    labels = batch["labels"][:, 1:] if shifted else batch["labels"]
    given = {name: x for name, x in batch.items() if name != "labels"}

    def logits(w):
        found = functional_call(model, unflat(model, w), (), given | {"use_cache": False}).logits
        return (found[:, :-1] if shifted else found)[labels != -100]

    return logits, labels


def matrices(model, data, shifted=True, hessian=True):
    """The Gauss-Newton matrix, the Hessian, the empirical Fisher matrix and the gradient."""
    before, model.config._attn_implementation = model.config._attn_implementation, "eager"
    w = flat(model)
    ggn, bend, empirical, slope, count = 0.0, 0.0, 0.0, 0.0, 0
    for batch in data:
        logits, labels = logits_and_labels(model, batch, shifted)
        kept = labels[labels != -100]
        owner = torch.arange(len(labels))[:, None].expand(labels.shape)[labels != -100]

        def losses(w, logits=logits, kept=kept):
            return cross_entropy(logits(w), kept, reduction="none")

        J, p = jacobian(logits, w), logits(w).softmax(-1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        ggn = ggn + torch.einsum("tvp,tvu,tuq->pq", J, middle, J)
        if hessian:
            bend = bend + second(lambda w, losses=losses: losses(w).sum(), w)
        each = jacobian(losses, w)
        by_text = torch.zeros(len(labels), w.numel(), dtype=w.dtype).index_add(0, owner, each)
        empirical = empirical + by_text.T @ by_text
        slope, count = slope + each.sum(0), count + len(kept)
    model.config._attn_implementation = before
    return {
        "ggn": ggn / count,
        "hessian": bend / count,
        "empirical": empirical / count,
        "gradient": slope / count,
    }
