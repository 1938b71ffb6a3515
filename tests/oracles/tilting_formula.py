"""Attention by the obvious formulas with the whole matrix of scores: in any torch dtype, and in 80
bits with derivatives by hand.

`formula` is what one would write in plain torch: scores, softmax, logsumexp, sums. In the problem's own
dtype it is the rival. `Exact` is the truth: numpy in float64, or in 80 bits for float64 problems, with
derivatives written out by hand, so that nothing is shared with torch's autograd. Both can be shaken:
every step is then off by about one rounding, which tells how large an error nobody can be blamed for.
Neither shares anything with the package.
"""

import math

import numpy as np
import torch

QUANTITIES = ("output", "log_normalizer", "entropy", "score_mean", "score_variance", "score_max", "key_mass")


def visible(Q, K, causal=False, window=None, **_):
    """(Q, K) booleans."""
    own, j = torch.arange(Q)[:, None] + K - Q, torch.arange(K)[None]
    seen = torch.ones(Q, K, dtype=torch.bool)
    if causal:
        seen &= j <= own
    if window is not None:
        seen &= own - j < window
        if not causal:
            seen &= j - own < window
    return seen


def hidden(mix):
    """Booleans that broadcast to (*lead, Hq, Q, K), True where a query does not see a key."""
    _, Q, _, K = mix.sizes
    seen = visible(Q, K, **mix.numbers)
    return ~(seen if mix.mask is None else seen & mix.mask)


def _scale(mix):
    scale = mix.numbers.get("scale")
    return 1 / math.sqrt(mix.tensors["query"].shape[-1]) if scale is None else scale


def _per_query_head(x, heads, axis):
    return x if x.shape[axis] == heads else x.repeat_interleave(heads // x.shape[axis], axis)


def scores(mix, t, shake=lambda x: x):
    """(*lead, Hq, Q, K), −inf where hidden."""
    Hq, Q, _, K = mix.sizes
    z = shake(_scale(mix) * (t["query"] @ _per_query_head(t["key"], Hq, -3).mT))
    cap = mix.numbers.get("softcap")
    s = z if cap is None else shake(cap * torch.tanh(z / cap))
    s = s.expand(*mix.lead, Hq, Q, K)
    if t["bias"] is not None:
        s = shake(s + t["bias"])
    if t["log_weight"] is not None:
        weight = t["log_weight"]
        s = shake(
            s + _per_query_head(weight.expand(*weight.shape[:-2], mix.sizes[2], K), Hq, -2)[..., None, :]
        )
    return s.masked_fill(hidden(mix) | (s == -math.inf), -math.inf)  # nothing flows to a score of −inf


def formula(mix, t, shake=None):
    """Every quantity by its name, from tensors `t` of one dtype. `shake` is applied to what a computer
    would round.
    """
    Hq, _, _, K = mix.sizes
    after = shake or (lambda x: x)
    s = scores(mix, t, (lambda x: x) if mix.exact else after)
    rows = s.shape[:-1]
    maximum = s.gather(-1, s.detach().argmax(-1, keepdim=True))[..., 0] if K else s.new_full(rows, -math.inf)
    if t["sink"] is not None:
        sink = t["sink"].expand(*mix.lead, Hq)
        s = torch.cat([s, sink[..., None, None].expand(*rows, 1)], -1)
    dead = (s == -math.inf).all(-1)
    if not s.shape[-1]:
        s = torch.cat([s, s.new_full((*rows, 1), -math.inf)], -1)
    s_safe = s.masked_fill(dead[..., None], 0.0)
    top = s_safe.detach().amax(-1)
    if shake is None:
        G, log_p, p = torch.logsumexp(s_safe, -1), torch.log_softmax(s_safe, -1), torch.softmax(s_safe, -1)
    else:  # step by step, so that each step is rounded, backwards too
        e = shake(torch.exp(s_safe - top[..., None]))
        e = e.masked_fill(e < torch.finfo(mix.wide).tiny, 0.0)
        z = shake(e.sum(-1))
        G, log_p, p = (
            shake(top) + z.log(),
            s_safe - top[..., None] - z.log()[..., None],
            shake(e / z[..., None]),
        )
    p = p.masked_fill(dead[..., None], 0.0)
    nothing = p == 0  # such an outcome adds nothing, however far its score
    above = (s_safe - top[..., None]).masked_fill(nothing, 0.0)
    mean_above = (p * above).sum(-1)
    mean = top + mean_above
    centred = (above - mean_above[..., None]).masked_fill(nothing, 0.0)
    variance = (p * after(centred).square()).sum(-1)
    entropy = -(p * after(log_p.masked_fill(nothing, 0.0))).sum(-1)
    keys = p[..., :K]
    return {
        "output": keys @ _per_query_head(t["value"], Hq, -3),
        "log_normalizer": G.masked_fill(dead, -math.inf),
        "entropy": entropy,
        "score_mean": mean,
        "score_variance": variance,
        "score_max": maximum,
        "key_mass": keys.sum(-2),
    }


class Exact:
    """All quantities of a mix in a numpy dtype, their tangents and gradients, and G's Hessian, by hand.

    `shake` is applied to everything that a computer would round on the way.
    """

    def __init__(self, mix, number=np.longdouble, shake=None):
        rounded = shake is not None
        self.mix, self.number, self.shake = mix, number, shake or (lambda x, amount=1.0: x)
        t, (Hq, _, Hkv, K) = mix.tensors, mix.sizes
        lead, shake = mix.lead, self.shake
        before = (lambda x, amount=1.0: x) if mix.exact else shake  # whole scores are not rounded
        # a sum of n terms in order strays further the longer it is; the √n/10 is a chosen allowance
        walk, self.value_walk = (
            1 + math.sqrt(t["query"].shape[-1]) / 10,
            1 + math.sqrt(t["value"].shape[-1]) / 10,
        )
        self.group = Hq // Hkv
        query = np.broadcast_to(self._of(t["query"]), (*lead, *t["query"].shape[-3:]))
        key = self._heads(np.broadcast_to(self._of(t["key"]), (*lead, *t["key"].shape[-3:])), -3)
        self.q, self.k = before(query, walk), before(key, walk)
        self.v = shake(
            self._heads(np.broadcast_to(self._of(t["value"]), (*lead, *t["value"].shape[-3:])), -3)
        )
        self.scale, cap = number(_scale(mix)), mix.numbers.get("softcap")
        z = before(self.scale * (self.q @ self.k.swapaxes(-1, -2)))
        if cap is None:
            s, self.d1, self.d2 = z, np.ones_like(z), np.zeros_like(z)
            self.d1_of_best = self.d1
        else:
            bent = before(np.tanh(z / cap))
            s, self.d1 = before(cap * bent), 1 - bent**2
            self.d2 = -2 * bent * self.d1 / cap
            # the maximum is one key's score, whose slope may come from a product of its own
            again = before(self.scale * (before(query, walk) @ before(key, walk).swapaxes(-1, -2)))
            self.d1_of_best = 1 - before(np.tanh(again / cap)) ** 2
        for name in ("bias", "log_weight"):
            s = before(s + self._spread(name, t[name])) if t[name] is not None else s
        s = np.where(hidden(mix).expand(s.shape).numpy(), -np.inf, s)
        self.best = s.argmax(-1)[..., None] if K else None
        maximum = (
            np.take_along_axis(s, self.best, -1)[..., 0] if K else np.full(s.shape[:-1], -np.inf, number)
        )
        self.s = np.concatenate([s, self._spread("sink", t["sink"])], -1)
        self.dead = (self.s == -np.inf).all(-1)
        top = np.where(self.dead, 0, self.s.max(-1))
        above = self.s - top[..., None]
        e = shake(np.exp(above))
        if rounded:
            e = np.where(e < torch.finfo(mix.wide).tiny, 0, e)
        z = shake(np.where(self.dead, 1, e.sum(-1)))
        self.p = shake(e / z[..., None])
        nothing = self.p == 0
        above = np.where(nothing, 0, above)
        mean_above = (self.p * above).sum(-1)
        self.c = shake(np.where(nothing, 0, above - mean_above[..., None]))
        self.variance = (self.p * self.c**2).sum(-1)
        log_p = shake(np.where(nothing, 0, above - np.log(z)[..., None]))
        self.output = self.p[..., :K] @ self.v
        self.values = {
            "output": self.output,
            "log_normalizer": np.where(self.dead, -np.inf, shake(top) + np.log(z)),
            "entropy": -(self.p * log_p).sum(-1),
            "score_mean": shake(top) + mean_above,
            "score_variance": self.variance,
            "score_max": maximum,
            "key_mass": self.p[..., :K].sum(-2),
        }

    def _of(self, x):
        return x.detach().double().numpy().astype(self.number)

    def _heads(self, x, axis):
        return np.repeat(x, self.group, axis) if self.group > 1 else x

    def _spread(self, name, x, absent=-np.inf):
        """A bias, log_weight or sink (or its tangent) in the shape of the scores (..., Q, K), or (..., Q,
        1) for a sink.
        """
        Hq, Q, Hkv, K = self.mix.sizes
        lead = self.mix.lead
        if name == "sink":
            if x is None:
                return np.full((*lead, Hq, Q, 1), absent, self.number)
            return np.broadcast_to(
                np.broadcast_to(self._of(x), (*lead, Hq))[..., None, None], (*lead, Hq, Q, 1)
            )
        if x is None:
            return self.number(0)
        if name == "bias":
            return self._of(x)
        return self._heads(np.broadcast_to(self._of(x), (*lead, Hkv, K)), -2)[..., None, :]

    def score_tangents(self, t):
        """The scores' tangents, the sink's in the last place, and the values'."""
        lead = self.mix.lead
        dz = self.number(0)
        if t.get("query") is not None:
            dq = self.shake(np.broadcast_to(self._of(t["query"]), self.q.shape))
            dz = dz + self.scale * (dq @ self.k.swapaxes(-1, -2))
        if t.get("key") is not None:
            dk = self.shake(
                self._heads(np.broadcast_to(self._of(t["key"]), (*lead, *t["key"].shape[-3:])), -3)
            )
            dz = dz + self.scale * (self.q @ dk.swapaxes(-1, -2))
        ds = (
            self.d1 * dz
            + self._spread("bias", t.get("bias"))
            + self._spread("log_weight", t.get("log_weight"))
        )
        ds = np.concatenate(
            [np.broadcast_to(ds, self.d1.shape), self._spread("sink", t.get("sink"), 0.0)], -1
        )
        v = t.get("value")
        dv = (
            None
            if v is None
            else self.shake(self._heads(np.broadcast_to(self._of(v), (*lead, *v.shape[-3:])), -3))
        )
        return np.where(self.s == -np.inf, 0, self.shake(ds)), dv

    def tangents(self, t):
        """How every quantity moves along tangents `t` by name."""
        ds, dv = self.score_tangents(t)
        K, p, c = self.mix.sizes[3], self.p, self.c
        dG = self.shake((p * ds).sum(-1))
        dp = p * (ds - dG[..., None])
        turned = (p * c * ds).sum(-1)
        keys = p[..., :K]
        maximum = (
            np.where(self.values["score_max"] == -np.inf, 0, np.take_along_axis(ds, self.best, -1)[..., 0])
            if K
            else 0 * dG
        )
        return {
            "output": dp[..., :K] @ self.v + (0 if dv is None else keys @ dv),
            "log_normalizer": dG,
            "entropy": -turned,
            "score_mean": dG + turned,
            "score_variance": (p * (c**2 - self.shake(self.variance)[..., None] + 2 * c) * ds).sum(-1),
            "score_max": maximum,
            "key_mass": dp[..., :K].sum(-2),
        }

    def gradients(self, bars):
        """By every tensor of the mix, of the sum of all quantities times `bars`."""
        b = {name: self.shake(self._of(x)) for name, x in bars.items()}
        K, p, c = self.mix.sizes[3], self.p, self.c
        zero = np.zeros((*p.shape[:-1], 1), self.number)
        flow = np.concatenate([b["output"] @ self.v.swapaxes(-1, -2) + b["key_mass"][..., None, :], zero], -1)
        flow = self.shake(flow)
        # what is subtracted from all outcomes of a row is a sum over the values' axis, with roundings of
        # its own
        terms = np.sqrt(((b["output"] * self.output) ** 2).sum(-1)) + (
            p[..., :K] * np.abs(b["key_mass"])[..., None, :]
        ).sum(-1)
        t = flow - ((p * flow).sum(-1) + self.shake(terms, self.value_walk) - terms)[..., None]
        t = (
            t
            + b["log_normalizer"][..., None]
            + b["score_mean"][..., None] * (1 + c)
            - b["entropy"][..., None] * c
        )
        t = t + b["score_variance"][..., None] * (c**2 - self.shake(self.variance)[..., None] + 2 * c)
        s_bar = self.shake(p * t)
        pairs, z_bar = s_bar[..., :K], self.scale * self.d1 * s_bar[..., :K]
        if K:
            at = np.zeros_like(pairs)
            bar = np.where(self.values["score_max"] == -np.inf, 0, b["score_max"])[..., None]
            np.put_along_axis(at, self.best, self.shake(bar), -1)
            pairs, z_bar = pairs + at, z_bar + self.scale * self.d1_of_best * at
        found = {
            "query": z_bar @ self.k,
            "key": self._gather(z_bar.swapaxes(-1, -2) @ self.q, -3),
            "value": self._gather(p[..., :K].swapaxes(-1, -2) @ b["output"], -3),
            "bias": pairs,
            "log_weight": self._gather(pairs.sum(-2), -2),
            "sink": s_bar[..., K].sum(-1),
        }
        there = {name: x for name, x in self.mix.tensors.items() if x is not None}
        return {name: _summed(found[name], x.shape) for name, x in there.items()}

    def second_terms(self, bars, t):
        """The size of what second derivatives sum: first ones times the scores' tangents, and <bar, dv>.

        Of a lone outcome these leave nothing, and what is left of their roundings is nobody's fault. By
        every tensor of the mix.
        """
        b = {name: np.abs(self._of(x)) for name, x in bars.items()}
        ds, dv = self.score_tangents(t)
        K, p, c = self.mix.sizes[3], self.p, np.abs(self.c)
        zero = np.zeros((*p.shape[:-1], 1), self.number)
        flow = np.concatenate(
            [np.sqrt(b["output"] ** 2 @ (self.v**2).swapaxes(-1, -2)) + b["key_mass"][..., None, :], zero], -1
        )
        size = (
            flow
            + (b["log_normalizer"] + b["score_mean"])[..., None]
            + (b["score_mean"] + b["entropy"])[..., None] * c
        )
        size = size + b["score_variance"][..., None] * (c**2 + self.variance[..., None] + 2 * c)
        size = size * np.maximum(np.abs(ds).max(-1, keepdims=True), 1)
        if dv is not None:
            size[..., :K] += np.sqrt(b["output"] ** 2 @ (dv**2).swapaxes(-1, -2))
        size = self.value_walk * p * size
        pairs, z_bar = size[..., :K] ** 2, (self.scale * self.d1 * size[..., :K]) ** 2
        found = {
            "query": z_bar @ self.k**2,
            "key": self._gather(z_bar.swapaxes(-1, -2) @ self.q**2, -3),
            "value": self._gather((p[..., :K] ** 2).swapaxes(-1, -2) @ b["output"] ** 2, -3),
            "bias": pairs,
            "log_weight": self._gather(pairs.sum(-2), -2),
            "sink": (size[..., K] ** 2).sum(-1),
        }
        there = {name: x for name, x in self.mix.tensors.items() if x is not None}
        return {name: np.sqrt(_summed(found[name], x.shape)) for name, x in there.items()}

    def _gather(self, x, axis):
        """Summed over the query heads that read one key head."""
        axis = x.ndim + axis
        return x.reshape(*x.shape[:axis], x.shape[axis] // self.group, self.group, *x.shape[axis + 1 :]).sum(
            axis + 1
        )

    def fisher(self, vector):
        """∇²G times one vector for each query."""
        dz = self.scale * (np.broadcast_to(self._of(vector), self.q.shape) @ self.k.swapaxes(-1, -2))
        K, ds = self.mix.sizes[3], self.shake(self.d1 * dz)
        p = self.p[..., :K]
        dp = p * (ds - self.shake((p * ds).sum(-1, keepdims=True)))
        return self.scale * ((dp * self.d1 + p * self.d2 * dz) @ self.k)


def _summed(x, shape):
    """Summed over the axes that broadcasting added to `shape`."""
    extra = x.ndim - len(shape)
    x = x.sum(tuple(range(extra))) if extra else x
    for axis, n in enumerate(shape):
        if n == 1 and x.shape[axis] != 1:
            x = x.sum(axis, keepdims=True)
    return x
