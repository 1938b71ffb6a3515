"""D1: contrastive losses are minus log-likelihoods of the same family."""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from exptilt.claims.evidence import Findings, axes, curve, most, normals, same
from exptilt.claims.ledger import FAMILY, TEMPLATE, Between, claim
from exptilt.dynamics import Sphere
from exptilt.losses import clip, info_nce, linear_cross_entropy, nce, nt_xent, sampled_softmax
from exptilt.tilting import attend


@claim(
    "D1",
    "InfoNCE is the likelihood of the positive",
    r"\ell_i=G(q_i)-\langle q_i,k_i\rangle,\qquad \nabla_{q_i}\ell_i=\nabla G(q_i)-k_i",
    f"{FAMILY}, equations 4 and 5 and on cosine similarity; {TEMPLATE}, section 1",
)
def likelihood(
    seed: int,
    *,
    batch: Annotated[int, Between(2, 512)] = 24,
    dimensions: Annotated[int, Between(2, 128)] = 8,
    temperature: Annotated[float, Between(0.01, 10)] = 0.3,
) -> Findings:
    """InfoNCE, NT-Xent and CLIP are minus the log-likelihood of the positive under the family of A1,
    averaged; the gradient is attention minus the positive. Cosine similarity is projection to the sphere.
    The softmax of Word2Vec is the same with words for keys; sampled softmax and noise-contrastive estimation
    reach the same law with other estimates of Z.

    Experiment:
        Losses against cross-entropies of the whole matrix of similarities; the gradient against attention;
        cosine against rows projected first; sampled softmax over all outcomes; and NCE, whose expected
        gradient at the true law must be 0, and whose loss must be least at the true log Z.

    Example:
        >>> q, k = torch.randn(24, 8), torch.randn(24, 8)
        >>> whole = torch.nn.functional.cross_entropy(q @ k.mT, torch.arange(24))
        >>> ours = xt.losses.info_nce(q, k, temperature=1.0, similarity="dot")
        >>> print(torch.allclose(ours, whole, atol=1e-4))
        True
    """
    q, k, W = normals(seed, (batch, dimensions), (batch, dimensions), (40, dimensions))
    right, tau = torch.arange(batch), temperature
    u, v = normalize(q, dim=-1), normalize(k, dim=-1)
    scores = u @ v.mT / tau
    query = u.clone().requires_grad_()
    each = info_nce(query, v, temperature=tau, similarity="unit", reduction="none")
    free = u.clone().requires_grad_()
    loss = info_nce(free, v, temperature=tau, similarity="dot", reduction="sum")
    (slope,) = torch.autograd.grad(loss, free)
    output = attend(u[None], v[None], v[None], scale=1 / tau).output[0]
    both = torch.cat([u, v])
    pairs = (both @ both.mT / tau).fill_diagonal_(-torch.inf)
    positives = torch.arange(2 * batch).roll(batch)
    sphere = Sphere()
    words = torch.arange(batch) % 40
    outcomes = torch.arange(40).repeat(batch, 1)
    # Every word is a target with its probability as weight, and once noise: NCE's expectations are exact.
    hidden, every = q[:1].repeat(40, 1).requires_grad_(), torch.arange(40)
    law, log_Z = torch.softmax(q[0] @ W.mT, -1), torch.logsumexp(q[0] @ W.mT, 0)
    even = torch.full((40,), -math.log(40), dtype=q.dtype)

    def noise_loss(guess: Tensor) -> Tensor:
        bias = (-guess).expand(40)
        return law @ nce(hidden, W, every, every, log_noise=even, bias=bias, reduction="none")

    (pull,) = torch.autograd.grad(noise_loss(log_Z), hidden)
    guesses = log_Z + torch.linspace(-3, 3, 25, dtype=q.dtype)
    losses = [float(noise_loss(guess).detach()) for guess in guesses]
    yield same("InfoNCE against −log p of the positive", each, -scores.log_softmax(-1).diagonal(), 1e-9)
    yield same("gradient against (attention − positive)/τ", slope, (output - v) / tau, 1e-9)
    ways = (cross_entropy(scores, right) + cross_entropy(scores.mT, right)) / 2
    yield most("CLIP against both cross-entropies", abs(clip(q, k, temperature=tau) - ways), 1e-9)
    views = nt_xent(torch.stack([q, k]), temperature=tau) - cross_entropy(pairs, positives)
    yield most("NT-Xent against its cross-entropy", abs(views), 1e-9)
    projected = info_nce(sphere(q), sphere(k), temperature=tau, similarity="dot")
    yield most("cosine against the sphere", abs(info_nce(q, k, temperature=tau) - projected), 1e-9)
    of_words = cross_entropy(q @ W.mT, words)
    yield most("softmax over words", abs(linear_cross_entropy(q, W, words) - of_words), 1e-9)
    sampled = sampled_softmax(q, W, words, outcomes)
    yield most("sampled softmax with all words", abs(sampled - of_words), 1e-9)
    yield most("NCE at the true law: its gradient", pull.sum(0).norm(), 1e-9)
    yield most("NCE at log Z, less that at other guesses", losses[12] - min(losses), 0.0)
    yield curve("", guesses - log_Z, losses)
    yield axes("NCE is least where the guess of log Z is right", "guess − G", "loss")
