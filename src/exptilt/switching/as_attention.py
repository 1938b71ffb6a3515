r"""Attention read as a switching filter (THEORY E5).

IMM mixes first: with a message μ over the modes and a transition π,

    w_{i|j} = μ_i π_ij / c_j,     c_j = Σ_i μ_i π_ij,     law_j = collapse_i(w_{i|j}, law_i)

then moves each law by its mode's linear map. Attention is that step with a token for a mode, the uniform
message μ_i = 1/n, a transition that depends on the states, π_ij = e^{s_ij}, one linear map W_v for all,
and no observation. So w_{i|j} = softmax_i(s_ij): the *backward* transition, P(A = i | A' = j), and c_j =
e^{G_j}/n. `attention_as_imm` does it with the filter's own arithmetic.

`as_filter` treats a head as a Markov chain of tokens. Its backward transition B_ji = w_{i|j} is n × n, but
the results need products alone: Bv is attention with values v, B'u the derivative of ⟨u, Bv⟩, both streamed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.checks import number, whole
from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.tilting import attend
from exptilt.tilting.arguments import prepare
from exptilt.tilting.backends.reference import scores
from exptilt.tilting.problem import per_query_head

from .inference.moments import mixture, predict

_FEW = 32  # tokens up to which the transition is a dense matrix


@dataclass(frozen=True)
class MixingStep:
    """One mixing step of IMM whose modes are tokens.

    Attributes:
        message: ``(..., n)``, μ, the prior probability of each token: uniform.
        backward: ``(..., heads, n, n)``, [j, i] = P(A = i | A' = j), the attention weights.
        log_total: ``(..., heads, n)``, log c_j = G_j − log n.
        mean: ``(..., heads, n, Dv)``, of the new law of each token: attention's output.
        covariance: ``(..., heads, n, Dv, Dv)``, of the same law (THEORY E6).
    """

    message: Tensor
    backward: Tensor
    log_total: Tensor
    mean: Tensor
    covariance: Tensor


def attention_as_imm(
    hidden: Tensor,
    W_q: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    *,
    covariance: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> MixingStep:
    """Attention as one mixing step of IMM, with the arithmetic of the filter; it writes out all weights.

    Args:
        hidden: ``(..., n, E)``, the means of the tokens' laws.
        W_q: ``(heads, D, E)``.
        W_k: ``(key heads, D, E)``.
        W_v: ``(key heads, Dv, E)``.
        covariance: ``(..., n, E, E)``, of the tokens' laws; 0 if not given.
        scale: factor of ⟨q,k⟩; 1/sqrt(D) if None.
        mask: booleans that broadcast to ``(..., heads, n, n)``; True where j may come from i.
        causal: whether a token comes from none after it.

    Example:
        >>> hidden = torch.tensor([[0.0], [2.0]])
        >>> one = torch.ones(1, 1, 1)
        >>> step = attention_as_imm(hidden, one, 0 * one, one)  # no token is preferred
        >>> step.backward[0, 0], step.mean[0, 0], step.covariance[0, 0]
        (tensor([0.5000, 0.5000]), tensor([1.]), tensor([[1.]]))
    """
    for name, weight in (("W_q", W_q), ("W_k", W_k), ("W_v", W_v)):
        if weight.ndim != 3 or weight.shape[-1] != hidden.shape[-1]:
            raise ArgumentError(
                f"attention_as_imm: {name} has shape {tuple(weight.shape)}, hidden {tuple(hidden.shape)}. "
                f"Pass (heads, dim, {hidden.shape[-1]})."
            )
    q, k, v = (torch.einsum("...ie,hde->...hid", hidden, weight) for weight in (W_q, W_k, W_v))
    call = prepare("attention_as_imm", q, k, v, scale, None, None, mask, causal)
    n, heads = hidden.shape[-2], W_q.shape[0]
    message = hidden.new_full(hidden.shape[:-1], 1 / n)
    if covariance is None:
        covariance = hidden.new_zeros(*hidden.shape, hidden.shape[-1])
    log_weight = message.log().unsqueeze(-2).unsqueeze(-2) + scores(call.inputs, call.settings.rule)
    log_total = torch.logsumexp(log_weight, -1)
    backward = torch.where(
        log_total.isneginf().unsqueeze(-1), 0.0, (log_weight - log_total.unsqueeze(-1)).exp()
    )
    mean, spread = mixture(
        backward, hidden.unsqueeze(-3).unsqueeze(-4), covariance.unsqueeze(-4).unsqueeze(-5)
    )
    W = per_query_head(W_v, heads, 0).unsqueeze(-3)
    return MixingStep(
        message, backward, log_total, *predict(W, mean, spread, 0.0, torch.zeros(()).to(hidden))
    )


@dataclass(frozen=True)
class HeadFilter:
    """A head as a Markov chain of tokens: stationary law, entropy of a step, second eigenvalue.

    Attributes:
        stationary: ``(..., heads, n)``, the stationary law π = πB of the chain.
        mixing_entropy: ``(..., heads)``, Σ_j π_j H_j, the mean entropy of a step under π, in nats.
        second_eigenvalue: ``(..., heads)``, the modulus of B's second largest eigenvalue.
        steps: number of products that computing the stationary law took.
    """

    stationary: Tensor
    mixing_entropy: Tensor
    second_eigenvalue: Tensor
    steps: int

    @property
    def spectral_gap(self) -> Tensor:
        """``(..., heads)``: 1 − |λ₂|; the larger, the sooner a chain of such steps forgets where it began."""
        return 1 - self.second_eigenvalue

    @property
    def memory(self) -> Tensor:
        """``(..., heads)``: −1/log |λ₂|, after how many steps a difference has fallen to 1/e."""
        return -1 / self.second_eigenvalue.log()


def as_filter(
    query: Tensor,
    key: Tensor,
    *,
    options: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    max_steps: int = 2000,
) -> HeadFilter:
    """A head as a Markov chain over tokens: its stationary law, and how fast it mixes.

    Args:
        query: ``(..., heads, n, D)``, the queries of a head, as the lens passes them to `observe`.
        key: ``(..., key heads, n, D)``, of the same tokens.
        options: of `attend`: scale, log_weight, bias, mask, causal, window, softcap. A sink is refused: it
            is no token.
        tolerance: bound on Σ |π − πB|; the error of π is about `memory` times larger. Default: the square
            root of the dtype's precision.
        max_steps: largest number of products for the stationary law.

    Example:
        >>> q = torch.zeros(1, 40, 2)
        >>> head = as_filter(q, q)  # every token from every token alike
        >>> float(head.mixing_entropy.exp().round()), float(head.spectral_gap.round())
        (40.0, 1.0)
    """
    options = dict(options or {})
    if options.get("sink") is not None or options.get("key_mass"):
        raise ArgumentError(
            "as_filter: options has sink or key_mass, and a sink is not a token of the chain. Leave both out."
        )
    if query.ndim < 3 or key.ndim < 3 or query.shape[-2] != key.shape[-2]:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
        raise ArgumentError(f"as_filter: got {shapes}. Pass (..., heads, n, dim) of the same n tokens.")
    whole("as_filter", "max_steps", max_steps)
    least = (
        torch.finfo(query.dtype).eps ** 0.5
        if tolerance is None
        else number("as_filter", "tolerance", tolerance, above=0)
    )
    query, key = query.detach(), key.detach()
    heads, n = query.shape[-3:-1]
    key = per_query_head(key, heads, -3)  # each head has values of its own
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    if options.get("log_weight") is not None:
        options["log_weight"] = per_query_head(options["log_weight"], heads, -2)

    def forward(v: Tensor) -> Tensor:
        """Bv for v ``(..., heads, n, m)``."""
        return attend(query, key, v, **options).output

    def back(u: Tensor) -> Tensor:
        """B'u for u ``(..., heads, n, 1)``."""
        with torch.enable_grad():
            v = torch.zeros_like(u).requires_grad_()
            (found,) = torch.autograd.grad(forward(v), v, u)
        return found

    seen = attend(query, key, torch.ones(*lead, heads, n, 1).to(query), **options)
    if not bool(seen.log_normalizer.isfinite().all()):
        raise ArgumentError(
            "as_filter: a query sees no key, so its row has no probabilities. Let each token see itself."
        )
    u = torch.full((*lead, heads, n, 1), 1 / n, dtype=query.dtype, device=query.device)
    steps, off = 0, torch.inf
    while off > least:
        if steps == max_steps:
            raise ConvergenceError(
                f"as_filter: πB differs from π by {off:.3g} after {steps} steps. Pass a larger max_steps or "
                "tolerance; a periodic chain never converges."
            )
        before, u = u, back(u)
        u = u / u.sum(-2, keepdim=True)
        steps, off = steps + 1, float((u - before).abs().sum(-2).max())
    second = torch.empty(*lead, heads, dtype=query.dtype)
    if n <= _FEW:
        B = forward(torch.eye(n).to(query).expand(*lead, heads, n, n)) - u.mT  # the eigenvalue 1 taken out
        second = torch.linalg.eigvals(B).abs().amax(-1)
    else:
        for place in np.ndindex(*lead, heads):

            def product(x: np.ndarray, place: tuple[int, ...] = place) -> np.ndarray:
                v = torch.zeros(*lead, heads, n, 1, dtype=query.dtype)
                v[place] = torch.from_numpy(np.asarray(x)).to(query.dtype).reshape(n, 1)
                moved = forward(v.to(query.device))[place] - (u[place] * v[place].to(u)).sum()
                return moved.squeeze(-1).cpu().double().numpy()

            from scipy.sparse.linalg import LinearOperator, eigs

            operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
            begin = np.random.default_rng(0).standard_normal(n)
            value = eigs(operator, k=1, v0=begin, tol=float(least), return_eigenvectors=False)[0]
            second[place] = abs(value)
    entropy = (u.squeeze(-1) * seen.entropy).sum(-1)
    return HeadFilter(u.squeeze(-1), entropy, second.to(query.device), steps)
