r"""Many keys replaced by a few whose log-normalizer and mean value agree.

A cluster C of keys answers a query with Σ_{j∈C} e^{s_j} and with the mean of its values. One key k̄ with a
log-weight b and a value v̄ stands for it where b + ⟨q, k̄⟩ ≈ G_C(q) = log Σ_{j∈C} e^{⟨q, k_j⟩} for the
queries that will come. `compact` sees m_j, the attention that key j gets from given queries, and takes

    k̄ = Σ w_j k_j,   v̄ = Σ w_j v_j,   w_j ∝ m_j within C,   e^b = Σ_{j∈C} Σ_i p_ij / Σ_i e^{⟨q_i, k̄⟩ − G_i}

so that the mass of the cluster, and with it its part of the mean output, is right on average over these
queries: the projection of the cluster's measure, tilted as the queries tilt it, onto one weighted point. The
heaviest keys stay as they are. Clusters are those of weighted k-means in the queries' own metric,
E_q[(s_j − s_k)²] + ‖v_j − v_k‖² / Var v: the squared difference of two scores, in nats.

Then log-weights and values are fitted to G and output of the queries, by least squares with a ridge towards
what they are. A fit to the earlier half of the queries must do better on the later half than no fit, or there
is none; the error there is the prediction for queries to come.
"""

import math
from collections.abc import Mapping, Sequence
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
CELLS = 2**18  # weights held at a time: 1 MB in float32
FEWEST = 8  # queries of a head that can be fitted and held out
RIDGE = 0.01  # of values, in squared weights of queries: that of one which gives a key a tenth of its weight
PULL, STEPS = 0.1, 20  # the same of log-weights; multiplicative steps from the solution of any sign


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
        predicted: ``(..., Hq)``, the error of the output over the later half of the queries, when log-weights
            and values were fitted to the earlier half; None where nothing was fitted.
        predicted_log_normalizer: ``(..., Hq)``, the same of G, in nats.
        scale: factor of ⟨q,k⟩ that the weights belong to.
    """

    key: Tensor
    value: Tensor
    log_weight: Tensor
    length: int
    error: Tensor | None
    error_log_normalizer: Tensor | None
    scale: float
    predicted: Tensor | None = None
    predicted_log_normalizer: Tensor | None = None

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
        caller, K = "Compact.append", key.shape[-2] if isinstance(key, Tensor) and key.dim() > 1 else 0
        for name, new, old in (("key", key, self.key), ("value", value, self.value)):
            checks.floating(caller, name, new, axes=3, shape="(..., heads, keys, dimension)")
            wanted = (*old.shape[:-2], K, old.shape[-1])
            if new.shape != wanted:
                raise ArgumentError(f"{caller}: {name} is {tuple(new.shape)}. Pass {wanted}.")
        checks.alike(caller, compact=self.key, key=key, value=value)
        checks.finite(caller, key=key, value=value)
        errors = "error", "error_log_normalizer", "predicted", "predicted_log_normalizer"
        none: dict[str, Any] = dict.fromkeys(errors)
        return replace(
            self,
            key=torch.cat([self.key, key], -2),
            value=torch.cat([self.value, value], -2),
            log_weight=torch.nn.functional.pad(self.log_weight, (0, K)),
            length=self.length + K,
            **none,
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
    fit: bool = True,
    log_weight: Tensor | None = None,
    scale: float | None = None,
) -> Compact:
    """A few weighted keys and values that attend nearly as all of `key` and `value` do.

    Args:
        key: ``(..., Hkv, K, D)``, without a position of their own or rotated already.
        value: ``(..., Hkv, K, Dv)``.
        budget: how many keys to leave in each head, from 1 to K.
        queries: ``(..., Hq, Q, D)``, like those that will come, in the order of time: those of the tokens so
            far, and of a model with rotary positions rotated to the places after the last key. Pass all there
            are: a key that none of them attends to may be lost. None takes the keys themselves as queries of
            equal weight, which is much worse.
        method: ``collapse`` keeps the heaviest keys and joins the others in clusters; ``subset`` keeps the
            heaviest keys only.
        keep: share of the budget for keys that stay as they are, from 0 to 1; for ``collapse``.
        fit: whether to fit log-weights and values to G and output of the queries; for ``collapse``, and from
            8 queries on. What is fitted fails where queries to come are of another kind.
        log_weight: ``(..., Hkv, K)``, of keys that stand for others already.
        scale: factor of ⟨q,k⟩; 1/sqrt(D) if None.

    Returns:
        `Compact`, with the errors measured on `queries` and predicted for later ones. Nothing is
        differentiated.

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
    highest = weight.amax(-1, keepdim=True)  # weights count relative to each other
    with full_precision(k.device):
        full = attend(q, k, v, scale=scale, log_weight=weight)
        rows = math.prod(shape), -1
        problem = _Problem(
            k.flatten(0, -3),
            v.flatten(0, -3),
            (weight - highest).flatten(0, -2),
            q.reshape(*rows, D),
            full.output.reshape(*rows, v.shape[-1]),
            full.log_normalizer.reshape(rows) - highest.reshape(-1, 1),
            scale,
        )
        few, guess = problem.joined(budget, method, keep), None
        if fit and queries is not None and method == "collapse" and q.shape[-2] >= FEWEST and budget < K:
            few, guess = problem.fitted(few, q.shape[-2])
        keys, values, weights = (x.reshape(*shape, *x.shape[1:]) for x in few)
        weights = weights + highest
        made = Compact(keys.to(key.dtype), values.to(value.dtype), weights, K, None, None, scale)
        if queries is None:
            return made
        ours = attend(q, keys, values, scale=scale, log_weight=weights)
    error = _relative(ours.output - full.output, full.output)
    apart = (ours.log_normalizer - full.log_normalizer).square().mean(-1).sqrt()
    made = replace(made, error=error, error_log_normalizer=apart)
    if guess is None:
        return made
    output, gap = (x.reshape(q.shape[:-2]) for x in guess)
    return replace(made, predicted=output, predicted_log_normalizer=gap)


def _relative(off: Tensor, whole: Tensor) -> Tensor:
    """Root mean square of off (..., Q, Dv), relative to that of whole; 0 where nothing is off."""
    off, whole = (x.square().sum((-1, -2)).sqrt() for x in (off, whole))
    return torch.where(off == 0, 0.0, off / whole)  # also where the output is 0


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


Few = tuple[Tensor, Tensor, Tensor]  # keys (heads, B, D), values (heads, B, Dv), log-weights (heads, B)


def _take(x: Tensor, at: Tensor) -> Tensor:
    """The vectors of x (heads, K, ·) at the places (heads, n)."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def _sum_by(label: Tensor, count: int, x: Tensor) -> Tensor:
    """Sums (heads, count, ·) of x (heads, n, ·) over the members of each cluster."""
    return x.new_zeros(x.shape[0], count, x.shape[-1]).scatter_add_(1, label[..., None].expand_as(x), x)


@dataclass(frozen=True)
class _Problem:
    """Keys, values and log-weights of all key heads, and what the queries that read each of them get.

    key (heads, K, D), value (heads, K, Dv), weight (heads, K), query (heads, N, D), output (heads, N, Dv) and
    log-normalizer (heads, N).
    """

    key: Tensor
    value: Tensor
    weight: Tensor
    query: Tensor
    output: Tensor
    G: Tensor
    scale: float

    def attention(self, key: Tensor, weight: Tensor) -> Tensor:
        """e^{s − G} (heads, N, n) of some keys."""
        return torch.baddbmm(weight[:, None] - self.G[..., None], self.query, key.mT, alpha=self.scale).exp_()

    def masses(self) -> tuple[Tensor, Tensor]:
        """Squared attention of each key, and its attention, summed over the queries; a few at a time."""
        heavy, mass = self.weight.new_zeros(2, *self.weight.shape)
        size = max(1, CELLS // self.weight.shape[1])
        for head, (k, w) in enumerate(zip(self.scale * self.key, self.weight, strict=True)):
            for q, G in zip(self.query[head].split(size), self.G[head].split(size), strict=True):
                p = torch.addmm(w, q, k.mT).sub_(G[:, None]).exp_()
                one = torch.ones_like(G)
                mass[head] += one @ p  # a product sums faster than p.sum(0)
                heavy[head] += one @ p.square_()
        return heavy, mass

    def joined(self, budget: int, method: str, keep: float) -> Few:
        """The heaviest keys as they are, and clusters of the others."""
        kept = budget if method == "subset" else min(budget, round(keep * budget))
        kept = budget if self.key.shape[1] - kept <= budget - kept else kept
        heavy, mass = self.masses()
        order = heavy.argsort(1, descending=True)
        stay, rest = order[:, :kept].sort(1).values, order[:, kept:].sort(1).values
        exact = _take(self.key, stay), _take(self.value, stay), self.weight.gather(1, stay)
        if kept == budget:
            return exact
        count = budget - kept
        k, v, mass, prior = (
            _take(x, rest) for x in (self.key, self.value, mass[..., None], self.weight.exp()[..., None])
        )
        label = self.clusters(k, v, mass, count)
        w = mass + PRIOR * prior / prior.sum(1, keepdim=True).clamp(min=torch.finfo(prior.dtype).tiny)
        total, own = _sum_by(label, count, w), _sum_by(label, count, prior)[..., 0]
        some = total > 0
        inverse = torch.where(some, 1 / total, 0.0)
        middle, mean = (_sum_by(label, count, w * x) * inverse for x in (k, v))
        reached = self.attention(middle, torch.zeros_like(own)).sum(1)
        got = _sum_by(label, count, mass)[..., 0]
        log_weight = own.log() + ((got + PRIOR * own) / (own * reached + PRIOR * own)).log()
        log_weight = torch.where(some[..., 0], log_weight, -torch.inf)
        return (
            torch.cat([exact[0], middle], 1),
            torch.cat([exact[1], mean], 1),
            torch.cat([exact[2], log_weight], 1),
        )

    def clusters(self, k: Tensor, v: Tensor, mass: Tensor, count: int) -> Tensor:
        """The cluster (heads, n) of each key by weighted k-means, in the metric of scores and values."""
        second = (self.query.mT @ self.query) * (self.scale**2 / self.query.shape[1])
        values, vectors = torch.linalg.eigh(second)
        tiny = torch.finfo(v.dtype).tiny
        spread = (v - v.mean(1, keepdim=True)).square().sum(-1).mean(1).clamp(min=tiny).sqrt()
        x = torch.cat([k @ (vectors * values.clamp(min=0).sqrt()[:, None]), v / spread[:, None, None]], -1)
        w = mass + mass.mean(1, keepdim=True) * 0.1 + tiny
        centres = x[:, torch.linspace(0, x.shape[1] - 1, count, device=x.device).long()]
        label = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        for _ in range(ROUNDS):
            label = torch.baddbmm(centres.square().sum(-1)[:, None], x, centres.mT, beta=-0.5).argmax(-1)
            total, moved = _sum_by(label, count, w), _sum_by(label, count, w * x)
            centres = torch.where(total > 0, moved / total, centres)
        return label

    def fitted(self, few: Few, length: int) -> tuple[Few, tuple[Tensor, Tensor]]:
        """The few keys with log-weights and values fitted, and errors of output and G on held-out queries.

        There are `length` queries of each query head, one head after another.
        """
        key, value, weight = few
        N = self.G.shape[1]
        A = self.attention(key, weight)
        both = [x.unflatten(1, (-1, length)).tensor_split([length // 2], 2) for x in (A, self.output)]
        halves = [(a.flatten(1, 2), out.flatten(1, 2)) for a, out in zip(*both, strict=True)]
        grams = [x.mT @ x for x, _ in halves]

        def solved(gram: Tensor, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            """Factors (heads, B) of the weights, and the values, from the sum over some of the halves.

            Rows of the values' fit count by the square of their weight's sum, which is near 1.
            """
            shifted, right = gram.clone(), torch.stack([x.sum(1) for x, _ in parts]).sum(0) + PULL
            shifted.diagonal(dim1=-2, dim2=-1).add_(PULL)
            w = _solve(shifted, right[..., None])[..., 0].clamp(min=0.01)
            for _ in range(STEPS):  # for min |A w − 1|², w ≥ 0: every step is downhill
                w = w * right / (w[:, None] @ shifted)[:, 0]
            left = gram * w[:, None] * w[..., None]
            sums = torch.stack([x.mT @ ((x @ w[..., None]) * out) for x, out in parts]).sum(0)
            pull = w[..., None] * sums - left @ value
            left.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
            return w, value + _solve(left, pull)

        w, values = solved(grams[0], halves[:1])
        held, target = halves[1]
        off, plain = _normalized(held * w[:, None]) @ values - target, _normalized(held) @ value - target
        use = (off.square().sum((1, 2)) < plain.square().sum((1, 2)))[:, None]
        off = torch.where(use[..., None], off, plain)
        gap = (held * torch.where(use, w, 1.0)[:, None]).sum(-1).log()
        off, target, gap = (x.unflatten(1, (N // length, -1)) for x in (off, target, gap))
        errors = _relative(off, target), gap.square().mean(-1).sqrt()
        w, values = solved(grams[0] + grams[1], halves)
        w, values = torch.where(use, w, 1.0), torch.where(use[..., None], values, value)
        return (key, values, weight + w.log()), errors


def _solve(left: Tensor, right: Tensor) -> Tensor:
    """The solution of a symmetric positive definite system."""
    return torch.cholesky_solve(right, torch.linalg.cholesky(left))


def _normalized(A: Tensor) -> Tensor:
    """Rows divided by their sums; 0 where they are 0."""
    return A / A.sum(-1, keepdim=True).clamp(min=torch.finfo(A.dtype).tiny)


def share_budget(layers: Sequence[Mapping[str, Any]], budget: int) -> list[int]:
    """Budgets of several layers, `budget` on average: in proportion to the error that half of it leaves.

    Layers are given as arguments of `compact`. The error is that of all heads of a layer together, over every
    fourth query.
    """
    errors = []
    for layer in layers:
        q = layer["queries"][..., ::4, :]
        few = compact(**{**layer, "queries": q, "budget": max(1, budget // 2), "fit": False})
        options = {name: layer[name] for name in ("scale", "log_weight") if name in layer}
        full = attend(q, layer["key"], layer["value"], **options).output
        errors.append(float((few.attend(q).output - full).norm() / full.norm().clamp(min=1e-30)))
    least, most = min(8, budget), [layer["key"].shape[-2] for layer in layers]

    def parts(factor: float) -> list[int]:
        return [int(min(m, max(least, factor * x))) for x, m in zip(errors, most, strict=True)]

    low, high = 0.0, budget * len(layers) / max(min(errors), 1e-6)
    for _ in range(60):  # the factor at which the parts add up
        middle = (low + high) / 2
        low, high = (middle, high) if sum(parts(middle)) <= budget * len(layers) else (low, middle)
    return parts(low)
