r"""Many keys replaced by a few whose log-normalizer and mean value agree.

A cluster C of keys answers a query with Σ_{j∈C} e^{s_j} and with the mean of its values. One key k̄ with a
log-weight b and a value v̄ stands for it where b + ⟨q, k̄⟩ ≈ G_C(q) = log Σ_{j∈C} e^{⟨q, k_j⟩} for the
queries that will come. `compact` sees m_j, the attention that key j gets from given queries, and takes

    k̄ = Σ w_j k_j,   v̄ = Σ w_j v_j,   w_j ∝ m_j within C,   e^b = Σ_{j∈C} Σ_i p_ij / Σ_i e^{⟨q_i, k̄⟩ − G_i}

so that the mass of the cluster, and with it its part of the mean output, is right on average over these
queries: the projection of the cluster's measure, tilted as the queries tilt it, onto one weighted point. The
heaviest keys stay as they are. Clusters are those of weighted k-means in the queries' own metric,
E_q[(s_j − s_k)²] + ‖v_j − v_k‖² / Var v: the squared difference of two scores, in nats.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import full_precision, is_concrete
from exptilt.tilting import AttentionResult, attend, merge

METHODS = ("collapse", "subset")
ROUNDS = 6  # of k-means
PRIOR = 1e-3  # queries' worth of mass at which a cluster that no query attends to counts its keys


@dataclass(frozen=True)
class Compact:
    """A few weighted keys that stand for many.

    Attributes:
        key: ``(..., Hkv, B, D)``.
        value: ``(..., Hkv, B, Dv)``.
        log_weight: ``(..., Hkv, B)``, added to the scores; −inf for places that are not taken.
        length: how many keys they stand for.
        error: ``(..., Hq)``, relative error of the output over the queries given to `compact`, as a root mean
            square; None without queries.
        error_log_normalizer: ``(..., Hq)``, root mean square error of G over them, in nats; None without.
        scale: factor of ⟨q,k⟩ that the weights belong to.
    """

    key: Tensor
    value: Tensor
    log_weight: Tensor
    length: int
    error: Tensor | None
    error_log_normalizer: Tensor | None
    scale: float

    def attend(self, query: Tensor, **options: Any) -> AttentionResult:
        """Attention of the queries ``(..., Hq, Q, D)`` over the compact keys, with options of `attend`."""
        refused = sorted({"scale", "log_weight", "causal", "window"} & options.keys())
        if refused:
            raise ArgumentError(
                f"Compact.attend: {refused[0]} needs the position of each key, which compact keys "
                "do not have. Leave it out."
            )
        return attend(query, self.key, self.value, scale=self.scale, log_weight=self.log_weight, **options)

    def with_fresh(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> AttentionResult:
        """Attention over the compact keys and later ones ``(..., Hkv, K, D)``, causal among these.

        Options are those of `attend`; log_weight, bias and mask are of the later keys alone.
        """
        refused = sorted(
            options.keys() - {"log_weight", "bias", "mask", "sink", "softcap", "backend", "check"}
        )
        if refused:
            raise ArgumentError(
                f"Compact.with_fresh: {refused[0]} does not hold for the compact keys, or cannot be joined. "
                "Leave it out."
            )
        both = {name: x for name, x in options.items() if name in ("softcap", "backend", "check")}
        fresh = attend(query, key, value, scale=self.scale, causal=True, **options)
        return merge([self.attend(query, **both), fresh])

    def append(self, key: Tensor, value: Tensor) -> "Compact":
        """A compact cache with these keys ``(..., Hkv, K, D)`` appended; its errors are no longer known."""
        key, value = (torch.cat([x, y.to(x)], -2) for x, y in ((self.key, key), (self.value, value)))
        weight = torch.cat(
            [
                self.log_weight,
                self.log_weight.new_zeros((*self.log_weight.shape[:-1], key.shape[-2] - self.key.shape[-2])),
            ],
            -1,
        )
        length = self.length + key.shape[-2] - self.key.shape[-2]
        return replace(
            self,
            key=key,
            value=value,
            log_weight=weight,
            length=length,
            error=None,
            error_log_normalizer=None,
        )


@torch.no_grad()
def compact(
    key: Tensor,
    value: Tensor,
    budget: int,
    queries: Tensor | None = None,
    *,
    method: str = "collapse",
    keep: float = 0.5,
    log_weight: Tensor | None = None,
    scale: float | None = None,
) -> Compact:
    """A few weighted keys that answer queries like `key` and `value` do.

    Args:
        key: ``(..., Hkv, K, D)``, without a position of their own or rotated already.
        value: ``(..., Hkv, K, Dv)``.
        budget: how many keys to leave in each head, from 1 to K.
        queries: ``(..., Hq, Q, D)``, like those that will come: those of the last tokens will do. None takes
            the keys themselves as queries of equal weight, which is much worse.
        method: ``collapse`` keeps the heaviest keys and joins the others in clusters; ``subset`` keeps the
            heaviest keys only.
        keep: share of the budget for keys that stay as they are, from 0 to 1; for ``collapse``.
        log_weight: ``(..., Hkv, K)``, of keys that stand for others already.
        scale: factor of ⟨q,k⟩; 1/sqrt(D) if None.

    Returns:
        `Compact`, with the errors measured on `queries`. Nothing is differentiated.

    Example:
        >>> k = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)).repeat_interleave(32, 1)
        >>> few = xt.compact(k, k, 4, keep=0.0)  # four different keys, 32 times each
        >>> torch.allclose(few.attend(k).output, xt.attend(k, k, k).output, atol=1e-5)
        True
    """
    caller = "compact"
    checks.choice(caller, "method", method, METHODS)
    checks.number(caller, "keep", keep, least=0, most=1)
    for name, x in (("key", key), ("value", value)):
        checks.floating(caller, name, x, axes=3, shape="(..., heads, keys, dimension)")
    checks.finite(caller, key=key, value=value)
    if key.shape[:-1] != value.shape[:-1]:
        raise ArgumentError(
            f"{caller}: key is {tuple(key.shape)}, value is {tuple(value.shape)}. "
            "Pass one value for each key."
        )
    K, D = key.shape[-2:]
    if checks.whole(caller, "budget", budget) > K:
        raise ArgumentError(f"{caller}: budget is {budget}, there are {K} keys. Pass at most as many.")
    scale = D**-0.5 if scale is None else checks.number(caller, "scale", scale)
    asked = key if queries is None else checks.floating(caller, "queries", queries, axes=3)
    checks.finite(caller, queries=asked)
    checks.alike(caller, key=key, value=value, queries=asked)
    heads = key.shape[-3]
    if asked.shape[-1] != D or asked.shape[-3] % heads or asked.shape[:-3] != key.shape[:-3]:
        raise ArgumentError(
            f"{caller}: queries are {tuple(asked.shape)}, key is {tuple(key.shape)}. Pass (..., heads, "
            f"queries, {D}) with a multiple of {heads} heads."
        )
    k, v, q = (x.float() if x.dtype.itemsize < 4 else x for x in (key, value, asked))
    weight = k.new_zeros(k.shape[:-1]) if log_weight is None else _checked(caller, log_weight, k)
    shape = k.shape[:-2]
    rows = q.reshape(*shape, -1, D)  # all query heads that read a key head
    highest = weight.amax(-1, keepdim=True)  # weights count relative to each other
    heads_of = [x.flatten(0, -3) for x in (k, v, (weight - highest)[..., None], rows)]
    with full_precision(k.device):
        parts = [
            _one(keys, values, w[:, 0], query, scale, budget, method, keep)
            for keys, values, w, query in zip(*heads_of, strict=True)
        ]
        few = [torch.stack(x).reshape(*shape, *x[0].shape) for x in zip(*parts, strict=True)]
        few[2] = few[2] + highest
        made = Compact(few[0].to(key.dtype), few[1].to(value.dtype), few[2], K, None, None, scale)
        if queries is None:
            return made
        full = attend(q, k, v, scale=scale, log_weight=weight)
        ours = attend(q, few[0], few[1], scale=scale, log_weight=few[2])
    off, size = ((x.square().sum((-1, -2))).sqrt() for x in (ours.output - full.output, full.output))
    apart = (ours.log_normalizer - full.log_normalizer).square().mean(-1)
    error = torch.where(off == 0, 0.0, off / size)  # also where the output is 0
    return replace(made, error=error, error_log_normalizer=apart.sqrt())


def _checked(caller: str, log_weight: Any, key: Tensor) -> Tensor:
    """The log-weights (..., Hkv, K), which leave each head some key."""
    checks.floating(caller, "log_weight", log_weight)
    shape = key.shape[:-1]
    if log_weight.dim() > len(shape) or any(
        a not in (1, b) for a, b in zip(log_weight.shape[::-1], shape[::-1], strict=False)
    ):
        raise ArgumentError(f"{caller}: log_weight is {tuple(log_weight.shape)}. Pass {tuple(shape)}.")
    weight: Tensor = log_weight.to(key).expand(shape)
    if is_concrete(weight):
        good = weight < torch.inf
        checks.entries(caller, "log_weight", weight, good, "finite, or −inf for a key that does not count")
        if bool((weight.amax(-1) == -torch.inf).any()):
            raise ArgumentError(f"{caller}: log_weight hides all keys of a head. Leave one finite.")
    return weight


def _one(
    k: Tensor, v: Tensor, weight: Tensor, q: Tensor, scale: float, budget: int, method: str, keep: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Key (B, D), value (B, Dv) and log-weight (B,) for one key head."""
    s = scale * (q @ k.mT) + weight
    G = s.logsumexp(-1)
    p = (s - G[:, None]).exp_()
    heavy = p.square().mean(0)
    kept = budget if method == "subset" else min(budget, round(keep * budget))
    kept = budget if k.shape[0] - kept <= budget - kept else kept
    order = heavy.argsort(descending=True)
    stay, rest = order[:kept].sort().values, order[kept:].sort().values
    exact = k[stay], v[stay], weight[stay]
    if kept == budget:
        return exact
    count = budget - kept
    mass = p[:, rest].sum(0)
    label = _clusters(k[rest], v[rest], mass, q, scale, count)
    prior = weight[rest].exp()
    w = mass + PRIOR * prior / prior.sum()

    def joined(x: Tensor) -> Tensor:
        """Sums over the keys of each cluster."""
        return x.new_zeros(count, *x.shape[1:]).index_add_(0, label, x)

    total, own = joined(w), joined(prior)
    some = total > 0
    inverse = torch.where(some, 1 / total, 0.0)[:, None]
    middle, mean = joined(w[:, None] * k[rest]) * inverse, joined(w[:, None] * v[rest]) * inverse
    reached = (scale * (q @ middle.mT) - G[:, None]).exp_().sum(0)
    log_weight = own.log() + ((joined(mass) + PRIOR * own) / (own * reached + PRIOR * own)).log()
    log_weight = torch.where(some, log_weight, -torch.inf)
    return (torch.cat([exact[0], middle]), torch.cat([exact[1], mean]), torch.cat([exact[2], log_weight]))


def _clusters(k: Tensor, v: Tensor, mass: Tensor, q: Tensor, scale: float, count: int) -> Tensor:
    """The cluster of each key by weighted k-means, in the metric of the queries' scores and of the values."""
    second = (q.mT @ q) * (scale**2 / q.shape[0])
    values, vectors = torch.linalg.eigh(second)
    spread = (v - v.mean(0)).square().sum(-1).mean().clamp(min=torch.finfo(v.dtype).tiny).sqrt()
    x = torch.cat([k @ (vectors * values.clamp(min=0).sqrt()), v / spread], -1)
    w = (mass + mass.mean() * 0.1 + torch.finfo(v.dtype).tiny)[:, None]
    centres = x[torch.linspace(0, x.shape[0] - 1, count, device=x.device).long()]
    label = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
    for _ in range(ROUNDS):
        label = (x @ centres.mT - 0.5 * centres.square().sum(-1)).argmax(-1)
        total = x.new_zeros(count, 1).index_add_(0, label, w)
        moved = torch.zeros_like(centres).index_add_(0, label, w * x)
        centres = torch.where(total > 0, moved / total, centres)
    return label
