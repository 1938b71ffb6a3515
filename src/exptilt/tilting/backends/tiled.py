r"""The sweeps in plain torch, a tile of keys at a time: any device, any dtype, no n×n matrix.

The same sweeps as the compiled kernels, whose files give the formulas (``csrc/attention/forward.hpp``,
``csrc/attention/tangent.hpp``, ``csrc/attention/backward.hpp``). Nothing is written in place, so torch can
differentiate the sweeps themselves: that is how derivatives of third and higher order are found.
"""

import torch
from torch import Tensor

from exptilt.tilting.problem import (
    Gradients,
    Inputs,
    InputTangents,
    Needs,
    per_key_head,
    per_query_head,
    wide_dtype,
)
from exptilt.tilting.score_rule import ScoreRule, columns, mean_score, weights

FAR = -1e15  # stands in for a distance of −inf, which weighs nothing: 0 times its square is 0
_LEAST_CELLS, _TILE_CELLS = 1 << 18, 1 << 21  # scores held at once, in each of some twenty tensors
_TILE_KEYS = 1024  # most keys of a tile; longer sums are cut, and so as exact as pairwise sums


def _tiles(t: Inputs) -> list[tuple[int, int]]:
    """Start and stop of each tile of keys, with about as many scores as the queries have numbers."""
    rows = max(1, t.query[..., 0].numel())
    K = t.key.shape[-2]
    cells = min(_TILE_CELLS, max(_LEAST_CELLS, t.query.numel()))
    width = max(16, min(K, cells // rows, _TILE_KEYS))
    return [(j, min(j + width, K)) for j in range(0, K, width)]


def _widened(t: Inputs) -> Inputs:
    """The inputs with a query in the dtype that sums are taken in; keys and values follow tile by tile."""
    return t._replace(query=t.query.to(wide_dtype(t.query.dtype)))


def _against(x: Tensor, y: Tensor) -> Tensor:
    """x (..., Hq, Q, D) times y (..., Hkv, w, D), transposed: (..., Hq, Q, w)."""
    Hq, Hkv = x.shape[-3], y.shape[-3]
    return x @ y.mT if Hq == Hkv else (x.unflatten(-3, (Hkv, -1)) @ y.unsqueeze(-3).mT).flatten(-4, -3)


def _average(p: Tensor, y: Tensor) -> Tensor:
    """p (..., Hq, Q, w) times y (..., Hkv, w, D): (..., Hq, Q, D)."""
    Hq, Hkv = p.shape[-3], y.shape[-3]
    return p @ y if Hq == Hkv else (p.unflatten(-3, (Hkv, -1)) @ y.unsqueeze(-3)).flatten(-4, -3)


def _gather(p: Tensor, x: Tensor, heads: int) -> Tensor:
    """pᵀ x, p (..., Hq, Q, w), x (..., Hq, Q, D), summed over a key head's query heads: (..., Hkv, w, D)."""
    return per_key_head(p.mT @ x, heads, -3)


def _finite(x: Tensor) -> Tensor:
    """x with 0 for NaN and infinities: a key that nobody sees must not spoil a sum."""
    return torch.where(torch.isfinite(x), x, 0.0)


def _middle(t: Inputs) -> Tensor:
    """(..., Hkv, 1, Dv): the mean value, a constant.

    Subtracted from values and outputs it cancels out of gradients, and values far from 0 lose no digits.
    """
    v = _finite(t.value.detach().to(t.query.dtype))
    return v.sum(-2, keepdim=True) / max(1, v.shape[-2])


class _Tile:
    """Scores of one tile of keys, with the softcap's slope and bend; hidden scores are −inf."""

    def __init__(self, t: Inputs, rule: ScoreRule, j0: int, j1: int):
        self.k, self.v = t.key[..., j0:j1, :].to(t.query.dtype), t.value[..., j0:j1, :].to(t.query.dtype)
        self.s, self.slope, self.bend = rule.block(t, rule.scale * _against(t.query, self.k), j0, j1)

    def weights(self, rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """p = e^{s − shift} / weight, the centred score c = s − shift − gap, and where p is not 0."""
        d = self.s - rows[0]
        p = torch.exp(d) * rows[1]
        return p, (d - rows[2]).clamp(min=FAR), p != 0

    def push(
        self, t: Inputs, dots: InputTangents, rule: ScoreRule, j0: int, j1: int
    ) -> tuple[Tensor, Tensor]:
        """ż and ṡ, the tangents of scale ⟨q,k⟩ and of the score."""
        z = torch.zeros_like(self.s)
        if dots.query is not None:
            z = z + rule.scale * _against(dots.query.to(z.dtype), self.k)
        if dots.key is not None:
            z = z + rule.scale * _against(t.query, dots.key[..., j0:j1, :].to(z.dtype))
        s = z if self.slope is None else z * self.slope
        return z, s + columns(dots.bias, j0, j1) + weights(dots.log_weight, t.query.shape[-3], j0, j1)


def forward(t: Inputs, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
    """Output (..., Hq, Q, Dv), the members of `problem.RowStatistics` stacked, and where the maximum is."""
    t = _widened(t)
    shape = t.query.shape[:-1]
    top = t.query.new_full(shape, -torch.inf)
    weight, gap, square, about_zero, size = (t.query.new_zeros(shape) for _ in range(5))
    output = t.query.new_zeros((*shape, t.value.shape[-1]))
    best = torch.zeros(shape, dtype=torch.int64, device=t.query.device)
    for j0, j1 in _tiles(t):
        tile = _Tile(t, rule, j0, j1)
        high, at = tile.s.detach().max(-1)  # the shift cancels out of every result: no derivative
        best = torch.where(high > top, at + j0, best)
        m = torch.maximum(high, top)
        shift = torch.where(m == -torch.inf, 0.0, m)
        d = tile.s - shift.unsqueeze(-1)
        e = torch.exp(d)
        d = d.clamp(min=FAR)
        z = e.sum(-1)
        c = (e * d).sum(-1) / torch.where(z != 0, z, 1.0)
        M = (e * (d - c.unsqueeze(-1)).clamp(min=FAR).square()).sum(-1)
        rebase = torch.exp(top - shift)
        old = weight * rebase
        gap = torch.where(old != 0, gap + torch.where(top == -torch.inf, 0.0, top - shift), 0.0)
        total = old + z
        some = torch.where(total != 0, total, 1.0)
        share, rest = z / some, old / some
        apart = torch.where(z != 0, c - gap, 0.0)
        square = square * rebase + M + apart.square() * old * share
        # from the side that weighs more, so that a share near 0 costs no digits
        gap = torch.where(share > 0.5, c - apart * rest, gap + apart * share)
        p = e / some.unsqueeze(-1)
        s = torch.where(e != 0, tile.s, 0.0)
        about_zero = about_zero * rest + (p * s).sum(-1)
        size = size * rest + (p * s.detach().abs()).sum(-1)
        weight, top = total, m
        output = output * rebase.unsqueeze(-1) + _average(e, tile.v)
    alive = weight != 0
    z = torch.where(alive, weight, 1.0)
    log_z, shift = z.log(), torch.where(alive, top, 0.0)
    G = torch.where(alive, shift + log_z, -torch.inf)
    entropy = torch.where(alive, log_z - gap, 0.0)
    mean = torch.where(alive, mean_score(shift, gap, about_zero, size), 0.0)
    return output / z.unsqueeze(-1), torch.stack([G, entropy, mean, square / z, top, weight, gap]), best


def tangent(
    t: Inputs, dots: InputTangents, rows: Tensor, rule: ScoreRule, output: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) and the sums r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ', stacked; rows: shift, inverse, gap, r.

    With the output of the forward sweep r is Σ p ṡ, and fewer digits are lost
    (``csrc/attention/tangent.hpp``).
    """
    t = _widened(t)
    shape = t.query.shape[:-1]
    x0, x1, x2, m0, m1, m2 = (t.query.new_zeros(shape) for _ in range(6))
    settled = ~rows[3].isnan()
    r = torch.where(settled, rows[3].detach(), 0.0)
    pushed = t.query.new_zeros((*shape, t.value.shape[-1]))
    lines = [x.unsqueeze(-1) for x in rows.unbind()]
    for j0, j1 in _tiles(t):
        tile = _Tile(t, rule, j0, j1)
        p, c, some = tile.weights(lines)
        _, s = tile.push(t, dots, rule, j0, j1)
        z = p.detach().sum(-1)
        first = ~settled & (z > 0)
        mean = torch.where(some, p * s, 0.0).detach().sum(-1) / torch.where(z > 0, z, 1.0)
        r = torch.where(first, mean, r)
        settled = settled | first
        x = torch.where(some, p * (s - r.unsqueeze(-1)), 0.0)
        x0, x1, x2 = x0 + x.sum(-1), x1 + (x * c).sum(-1), x2 + (x * c * c).sum(-1)
        m0, m1, m2 = m0 + p.sum(-1), m1 + (p * c).sum(-1), m2 + (p * c * c).sum(-1)
        pushed = pushed + _average(x, tile.v)
        if dots.value is not None:
            pushed = pushed + _average(p, dots.value[..., j0:j1, :].to(p.dtype))
    if output is not None:
        start, r = r, x0 + r * m0
        by = r - start
        pushed = pushed - by.unsqueeze(-1) * output
        x0, x1, x2 = x0 - by * m0, x1 - by * m1, x2 - by * m2
    return pushed, torch.stack([r, x0, x1, x2])


def gradient(
    t: Inputs,
    cotangent: Tensor,
    output: Tensor,
    rows: Tensor,
    rule: ScoreRule,
    needs: Needs,
    dots: InputTangents | None = None,
    output_dot: Tensor | None = None,
) -> Gradients:
    """Gradients by the inputs from a cotangent (..., Hq, Q, Dv) of the output, or of its tangent.

    rows: shift, inverse, gap, a0, a1, a2; where only the mass of the keys is wanted, the first three. output
    is that of the forward sweep. With `dots` the gradients are those of the forward derivative `output_dot`,
    and rows have pushed, e0, e1 as well.
    """
    t = _widened(t)
    lines = [x.unsqueeze(-1) for x in rows.unbind()]
    if dots is not None and output_dot is not None:
        return _second(t, cotangent, output, output_dot, dots, lines, rule, needs)
    zero = torch.zeros_like(lines[0])
    a0, a1, a2 = (zero + 1, zero, zero) if needs.mass else lines[3:]
    sums, tiles, middle = _Sums(t, needs), _tiles(t), _middle(t)
    far = _against(cotangent, middle)
    met = (cotangent * (output - per_query_head(middle, output.shape[-3], -3))).sum(-1, keepdim=True)
    for j0, j1 in tiles:
        tile = _Tile(t, rule, j0, j1)
        p, c, some = tile.weights(lines)
        y = _against(cotangent, tile.v - middle)
        if len(tiles) == 1:  # the same number, from the very terms that it is subtracted from
            met = torch.where(some, p * y, 0.0).sum(-1, keepdim=True)
            met = met - far * (1 - p.sum(-1, keepdim=True))
        d = torch.where(some, p * (y - met + a0 + c * (a1 + a2 * c)), 0.0)
        z = d if tile.slope is None else d * tile.slope
        sums.add(d, tile, [(z, _finite(tile.k))], [(z, t.query)], p, cotangent)
    return sums.collect(rule.scale)


def _second(
    t: Inputs,
    cotangent: Tensor,
    output: Tensor,
    output_dot: Tensor,
    dots: InputTangents,
    lines: list[Tensor],
    rule: ScoreRule,
    needs: Needs,
) -> Gradients:
    """`gradient` of a forward derivative."""
    a0, a1, a2, pushed, e0, e1 = lines[3:]
    sums, tiles = _Sums(t, needs), _tiles(t)
    met, met_dot = ((cotangent * x).sum(-1, keepdim=True) for x in (output, output_dot))
    for j0, j1 in tiles:
        tile = _Tile(t, rule, j0, j1)
        p, c, some = tile.weights(lines)
        z, s = tile.push(t, dots, rule, j0, j1)
        y = _against(cotangent, tile.v)
        x = s - pushed
        g = (
            torch.zeros_like(y)
            if dots.value is None
            else _against(cotangent, dots.value[..., j0:j1, :].to(p.dtype))
        )
        if len(tiles) == 1:
            met = torch.where(some, p * y, 0.0).sum(-1, keepdim=True)
            met_dot = torch.where(some, p * (x * y + g), 0.0).sum(-1, keepdim=True)
        y, g = y - met + a0 + c * (a1 + a2 * c), g - met_dot
        d = torch.where(some, p * ((y + a1 + 2 * a2 * c) * x + g + e0 + e1 * c), 0.0)
        m1, m2 = d, torch.where(some, p * y, 0.0)
        if tile.slope is not None and tile.bend is not None:
            m1, m2 = d * tile.slope + torch.where(some, m2 * tile.bend * z, 0.0), m2 * tile.slope
        for_query, for_key = [(m1, _finite(tile.k))], [(m1, t.query)]
        if dots.key is not None:
            for_query.append((m2, dots.key[..., j0:j1, :].to(p.dtype)))
        if dots.query is not None:
            for_key.append((m2, dots.query.to(p.dtype)))
        sums.add(d, tile, for_query, for_key, torch.where(some, p * x, 0.0), cotangent)
    return sums.collect(rule.scale)


class _Sums:
    """Results of a backward sweep: sums over tiles for the queries, one piece per tile for the keys."""

    def __init__(self, t: Inputs, needs: Needs):
        self.t, self.needs = t, needs
        self.heads = t.key.shape[-3]
        self.query, self.rows = torch.zeros_like(t.query), t.query.new_zeros(t.query.shape[:-1])
        self.key: list[Tensor] = []
        self.value: list[Tensor] = []
        self.columns: list[Tensor] = []
        self.bias: list[Tensor] = []

    def add(
        self,
        d: Tensor,
        tile: _Tile,
        for_query: list[tuple[Tensor, Tensor]],
        for_key: list[tuple[Tensor, Tensor]],
        p: Tensor,
        cotangent: Tensor,
    ) -> None:
        """Add the results of one tile.

        d is the derivative by the scores; for_query and for_key are the pairs to multiply for query and key;
        p are the weights that carry the cotangent to the value.
        """
        self.rows = self.rows + d.sum(-1)
        if self.needs.query:
            for m, k in for_query:
                self.query = self.query + _average(m, k)
        if self.needs.key:
            self.key.append(
                sum(
                    (_gather(m, q, self.heads) for m, q in for_key[1:]),
                    start=_gather(*for_key[0], self.heads),
                )
            )
        if self.needs.value:
            self.value.append(_gather(p, cotangent, self.heads))
        if self.needs.columns:
            self.columns.append(d.sum(-2))
        if self.needs.bias and self.t.bias is not None:
            self.bias.append(d.sum_to_size((*self.t.bias.shape[:-1], d.shape[-1])))

    def collect(self, scale: float) -> Gradients:
        q, lead = self.t.query, self.t.query.shape[:-3]
        none = q.new_zeros(0)

        def joined(pieces: list[Tensor], shape: tuple[int, ...], axis: int, needed: bool) -> Tensor:
            return (
                none.clone()
                if not needed
                else torch.cat(pieces, axis)
                if pieces
                else q.new_zeros((*lead, *shape))
            )

        (heads, K, D), Dv = self.t.key.shape[-3:], self.t.value.shape[-1]
        bias = none.clone()
        if self.needs.bias and self.t.bias is not None:
            bias = torch.cat(self.bias, -1)
        return Gradients(
            scale * self.query if self.needs.query else none.clone(),
            scale * joined(self.key, (heads, K, D), -2, self.needs.key),
            joined(self.value, (heads, K, Dv), -2, self.needs.value),
            joined(self.columns, (q.shape[-3], K), -1, self.needs.columns),
            self.rows if self.needs.rows else none.clone(),
            bias,
        )
