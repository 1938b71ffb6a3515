r"""Does a head ascend its own log-normalizer (THEORY F3)?

Theory: attention with values and output tied to keys and queries writes w_i = ∇_h G(q(h_i)) into the residual
stream, a unit step of gradient ascent on G (THEORY B1). A trained head has free W_v and W_o; so take its
write as it is,

    w_a,i = what the output projection adds for head a alone,        g_a,i = ∇_h G_a(q_a(h_i)), keys fixed,

and ask for the cosine of the two, and for G_a(q_a(h_i + w_a,i)) − G_a(q_a(h_i)). The hidden state h is the
residual stream before the block; q(h) runs through the block's norm, query projection, per-head norm and
rotation, while the keys are held fixed.

Baseline: the write of head a against the gradients of the other heads b ≠ a of its layer. A head that ascends
its own G does better on it than on the others'.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt.tilting import log_normalizer

ASKED = 128  # queries of a text at which every head is asked; all of them if the text has no more


class Ascent(NamedTuple):
    """Means over the queries of one sequence, each ``(head,)``."""

    cosine: Tensor  # of write and gradient of the same head
    cosine_baseline: Tensor  # mean over the gradients of other heads; NaN if there are none
    gain: Tensor  # change in the head's own G after its write
    gain_baseline: Tensor  # mean change in the other heads' G after this head's write


def ascent(
    query_at: Callable[[Tensor], Tensor], hidden: Tensor, key: Tensor, options: dict[str, Any], write: Tensor
) -> Ascent:
    """Cosine and gain of every head of one layer on one sequence, with their baselines.

    `query_at` takes hidden states ``(batch, query, width)`` to queries ``(batch, Hq, query, D)``, token by
    token and differentiably; hidden is ``(1, query, width)``, key ``(1, Hkv, key, D)``, `options` are those
    of `attend`, and write ``(head, query, width)`` is what each head adds to the residual stream. In a long
    text each head is asked at `ASKED` queries or a few more, which are drawn at random.
    """
    key, turns = key.detach(), _turns(write.shape[0], write.shape[1]).to(write.device)
    token = torch.arange(write.shape[1], device=write.device)
    with torch.enable_grad():
        start = hidden.detach().requires_grad_()
        query = query_at(start)
        G = log_normalizer(query, key, **options)
        (slope,) = torch.autograd.grad(_finite(G).sum(), query, retain_graph=True)
        gradients = []
        for head in turns:  # the slope at the query of one head, carried back to the hidden state
            only = torch.zeros_like(slope)
            only[0, head, token] = slope[0, head, token]
            gradients.append(torch.autograd.grad(query, start, only, retain_graph=True)[0][0])
    with torch.no_grad():
        moved = query_at(hidden + write[turns, token])
        after = log_normalizer(moved, key.expand(len(turns), -1, -1, -1), **options)
        whose = torch.nn.functional.one_hot(turns, write.shape[0]).double()  # (turn, query, head)
        change = torch.einsum("tia,tbi->ab", whose, _finite(after - G.detach()).double())
        change = change / whose.sum((0, 1))[:, None]  # (whose write, whose G)
        cosines = _cosines(write, torch.stack(gradients), whose)
    return Ascent(*_own_and_others(cosines), *_own_and_others(change))


def _turns(heads: int, queries: int) -> Tensor:
    """``(turn, query)``: the heads that are asked at each query, different ones in each turn."""
    asked = torch.randperm(queries, generator=torch.Generator().manual_seed(0)) % heads
    turns = min(heads, -(-ASKED * heads // max(queries, 1)))
    return (asked + torch.arange(turns)[:, None]) % heads


def _finite(G: Tensor) -> Tensor:
    """G with 0 where it is not finite: a query that sees nothing has G = −inf before and after any write."""
    return torch.where(G.isfinite(), G, torch.zeros_like(G))


def _cosines(write: Tensor, gradient: Tensor, whose: Tensor) -> Tensor:
    """(head, head): cosine of one head's write and another's gradient, mean over queries with both.

    The gradients ``(turn, query, width)`` are of the heads that `whose` ``(turn, query, head)`` marks by 1.
    """
    (w, alive_w), (g, alive_g) = _unit(write), _unit(gradient)
    cosine = torch.einsum("aid,tid->tai", w, g).double()
    return torch.einsum("tai,tib->ab", cosine, whose) / torch.einsum("ai,ti,tib->ab", alive_w, alive_g, whose)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ``(..., width)`` of length 1, or 0 where they are 0, and 1 where they are not 0."""
    tiny = torch.finfo(x.dtype).tiny
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.where(size > tiny, x / size.clamp_min(tiny), 0.0), (size > tiny)[..., 0].double()


def _own_and_others(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal, and the mean of each row without it."""
    heads = pairs.shape[0]
    own = pairs.diagonal()
    others = (pairs.sum(1) - own) / (heads - 1) if heads > 1 else torch.full_like(own, torch.nan)
    return own.clone(), others
