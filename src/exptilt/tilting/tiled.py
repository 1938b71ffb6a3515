r"""The sweeps in plain torch, a tile of keys at a time: any device, any dtype, no n×n matrix.

The same four sweeps as the compiled kernels (their docstrings give the formulas: ``cpu/forward.py``, ``cpu/gradient.py``, ``cpu/tangent.py``,
``cpu/second.py``). Nothing is written in place, so torch can differentiate the sweeps themselves: that is how derivatives of third and higher order are had.
"""

import torch
from torch import Tensor

from exptilt.tilting.problem import Gradients, Needs, Options, Tensors, has_full_bias, per_key_head, visibility

FAR = -1e15  # see cpu/rows.py
_TILE_CELLS = 1 << 21  # scores held at once


def _tiles(t: Tensors) -> list[tuple[int, int]]:
    """Where the tiles of keys begin and end; their size does not depend on data."""
    rows = max(1, t.query.shape[0] * t.query.shape[1] * t.query.shape[2])
    K = t.key.shape[2]
    width = max(16, min(K, _TILE_CELLS // rows))
    return [(j, min(j + width, K)) for j in range(0, K, width)]


def _against(x: Tensor, y: Tensor) -> Tensor:
    """X (N, Hq, Q, D) times y (N, Hkv, w, D), transposed: (N, Hq, Q, w)."""
    Hq, Hkv = x.shape[1], y.shape[1]
    return x @ y.mT if Hq == Hkv else (x.unflatten(1, (Hkv, -1)) @ y.unsqueeze(2).mT).flatten(1, 2)


def _average(p: Tensor, y: Tensor) -> Tensor:
    """P (N, Hq, Q, w) times y (N, Hkv, w, D): (N, Hq, Q, D)."""
    Hq, Hkv = p.shape[1], y.shape[1]
    return p @ y if Hq == Hkv else (p.unflatten(1, (Hkv, -1)) @ y.unsqueeze(2)).flatten(1, 2)


def _gather(p: Tensor, x: Tensor, heads: int) -> Tensor:
    """P (N, Hq, Q, w), transposed, times x (N, Hq, Q, D), summed over query heads of a key head: (N, Hkv, w, D)."""
    return per_key_head(p.mT @ x, heads)


class _Tile:
    """Scores of one tile of keys, with the softcap's slope and bend; hidden scores are −inf."""

    def __init__(self, t: Tensors, options: Options, j0: int, j1: int):
        self.k, self.v = t.key[:, :, j0:j1], t.value[:, :, j0:j1]
        s = options.scale * _against(t.query, self.k)
        self.slope: Tensor | None = None
        self.bend: Tensor | None = None
        if options.softcap is not None:
            tanh = torch.tanh(s / options.softcap)
            self.slope = 1 - tanh.square()
            self.bend = (-2 / options.softcap) * tanh * self.slope
            s = options.softcap * tanh
        s = s + _columns(t.bias, j0, j1) + _weights(t.log_weight, t.query.shape[1], j0, j1)
        for hidden in (visibility(options, t.query.shape[2], j0, j1, t.key.shape[2], s.device), t.mask):
            if hidden is not None:
                s = s.masked_fill(~(_columns(hidden, j0, j1) if hidden is t.mask else hidden), -torch.inf)
        self.s = s

    def weights(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """P = e^{s − G} and the centred score c = s − mean."""
        return torch.exp(self.s - rows[0][..., None]), (self.s - rows[1][..., None]).clamp(min=FAR)

    def push(self, t: Tensors, tangents: Tensors, options: Options, j0: int, j1: int) -> tuple[Tensor, Tensor]:
        """ż and ṡ, the tangents of scale <q,k> and of the score."""
        z = torch.zeros_like(self.s)
        if tangents.query is not None:
            z = z + options.scale * _against(tangents.query, self.k)
        if tangents.key is not None:
            z = z + options.scale * _against(t.query, tangents.key[:, :, j0:j1])
        s = z if self.slope is None else z * self.slope
        return z, s + _columns(tangents.bias, j0, j1) + _weights(tangents.log_weight, t.query.shape[1], j0, j1)


def _columns(x: Tensor | None, j0: int, j1: int) -> Tensor | float:
    """The tile's part of a bias or mask, which may have one column for all keys."""
    return 0.0 if x is None else x[..., j0:j1] if x.shape[-1] > 1 else x


def _weights(x: Tensor | None, heads: int, j0: int, j1: int) -> Tensor | float:
    if x is None:
        return 0.0
    return x[:, :, j0:j1].repeat_interleave(heads // x.shape[1], 1)[:, :, None]


def forward(t: Tensors, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """As ``cpu.launch.forward``."""
    shape = t.query.shape[:3]
    top = t.query.new_full(shape, -torch.inf)
    weight, mean, square = (t.query.new_zeros(shape) for _ in range(3))
    output = t.query.new_zeros((*shape, t.value.shape[3]))
    best = torch.zeros(shape, dtype=torch.int64, device=t.query.device)
    for j0, j1 in _tiles(t):
        tile = _Tile(t, options, j0, j1)
        high, at = tile.s.detach().max(-1)  # the shift cancels out of every result: no derivative
        best = torch.where(high > top, at + j0, best)
        m = torch.maximum(high, top)
        shift = torch.where(m == -torch.inf, 0.0, m)
        e = torch.exp(tile.s - shift[..., None])
        d = (tile.s - shift[..., None]).clamp(min=FAR)
        z = e.sum(-1)
        c = (e * d).sum(-1) / torch.where(z != 0, z, 1.0)
        M = (e * (d - c[..., None]).clamp(min=FAR).square()).sum(-1)
        rebase = torch.exp(top - shift)
        old = weight * rebase
        mean = torch.where(old != 0, mean + torch.where(top == -torch.inf, 0.0, top - shift), 0.0)
        total = old + z
        share = z / torch.where(total != 0, total, 1.0)
        gap = torch.where(z != 0, c - mean, 0.0)
        square = square * rebase + M + gap.square() * old * share
        mean, weight, top = mean + gap * share, total, m
        output = output * rebase[..., None] + _average(e, tile.v)
    alive = weight != 0
    z = torch.where(alive, weight, 1.0)
    shift = torch.where(alive, top, 0.0)
    G = torch.where(alive, shift + z.log(), -torch.inf)
    entropy = torch.where(alive, z.log() - mean, 0.0)
    mean = torch.where(alive, shift + mean, 0.0)
    return output / z[..., None], torch.stack([G, entropy, mean, square / z, top]), best


def tangent(t: Tensors, tangents: Tensors, rows: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """As ``cpu.launch.tangent``."""
    shape = t.query.shape[:3]
    x0, x1, x2, r = (t.query.new_zeros(shape) for _ in range(4))
    settled = torch.zeros(shape, dtype=torch.bool, device=t.query.device)
    output = t.query.new_zeros((*shape, t.value.shape[3]))
    for j0, j1 in _tiles(t):
        tile = _Tile(t, options, j0, j1)
        p, c = tile.weights(rows)
        _, s = tile.push(t, tangents, options, j0, j1)
        z = p.detach().sum(-1)
        first = ~settled & (z > 0)
        r = torch.where(first, (p * s).detach().sum(-1) / torch.where(z > 0, z, 1.0), r)
        settled = settled | first
        x = p * (s - r[..., None])
        x0, x1, x2 = x0 + x.sum(-1), x1 + (x * c).sum(-1), x2 + (x * c * c).sum(-1)
        output = output + _average(x, tile.v)
        if tangents.value is not None:
            output = output + _average(p, tangents.value[:, :, j0:j1])
    return output, torch.stack([r, x0, x1, x2])


def gradient(t: Tensors, cotangent: Tensor, rows: Tensor, options: Options, needs: Needs) -> Gradients:
    """As ``cpu.launch.gradient``."""
    _, _, a0, a1, a2 = (x[..., None] for x in rows)
    sums = _Sums(t, needs)
    for j0, j1 in _tiles(t):
        tile = _Tile(t, options, j0, j1)
        p, c = tile.weights(rows)
        d = p * (_against(cotangent, tile.v) + a0 + c * (a1 + a2 * c))
        z = d if tile.slope is None else d * tile.slope
        sums.add(d, tile, [(z, tile.k)], [(z, t.query)], p, cotangent)
    return sums.collect(options.scale)


def second(t: Tensors, cotangent: Tensor, tangents: Tensors, rows: Tensor, options: Options, needs: Needs) -> Gradients:
    """As ``cpu.launch.second``."""
    _, _, a0, a1, a2, pushed, b1, b2, e0, e1 = (x[..., None] for x in rows)
    sums = _Sums(t, needs)
    for j0, j1 in _tiles(t):
        tile = _Tile(t, options, j0, j1)
        p, c = tile.weights(rows)
        z, s = tile.push(t, tangents, options, j0, j1)
        y = _against(cotangent, tile.v) + a0 + c * (a1 + a2 * c)
        x = s - pushed
        g = 0.0 if tangents.value is None else _against(cotangent, tangents.value[:, :, j0:j1])
        d = p * ((y + b1 + b2 * c) * x + g + e0 + e1 * c)
        m1, m2 = d, p * y
        if tile.slope is not None and tile.bend is not None:
            m1, m2 = d * tile.slope + m2 * tile.bend * z, m2 * tile.slope
        for_query, for_key = [(m1, tile.k)], [(m1, t.query)]
        if tangents.key is not None:
            for_query.append((m2, tangents.key[:, :, j0:j1]))
        if tangents.query is not None:
            for_key.append((m2, tangents.query))
        sums.add(d, tile, for_query, for_key, p * x, cotangent)
    return sums.collect(options.scale)


class _Sums:
    """What a backward sweep gathers: sums over tiles for the queries, one piece per tile for the keys."""

    def __init__(self, t: Tensors, needs: Needs):
        self.t, self.needs, self.full_bias = t, needs, needs.bias and has_full_bias(t)
        self.heads = t.key.shape[1]
        self.query, self.rows = torch.zeros_like(t.query), t.query.new_zeros(t.query.shape[:3])
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
        """One tile: d the derivative by the scores, pairs to multiply for query and key, p the weights that carry the cotangent to the value."""
        self.rows = self.rows + d.sum(-1)
        if self.needs.query:
            for m, k in for_query:
                self.query = self.query + _average(m, k)
        if self.needs.key:
            self.key.append(sum((_gather(m, q, self.heads) for m, q in for_key), start=torch.zeros_like(tile.k)))
        if self.needs.value:
            self.value.append(_gather(p, cotangent, self.heads))
        if self.needs.log_weight:
            self.columns.append(d.sum(2))
        if self.full_bias and self.t.bias is not None:
            self.bias.append(d.sum_to_size((*self.t.bias.shape[:3], d.shape[3])))

    def collect(self, scale: float) -> Gradients:
        q, k, v = self.t.query, self.t.key, self.t.value
        none = q.new_zeros(0)

        def joined(pieces: list[Tensor], like: Tensor, axis: int, needed: bool) -> Tensor:
            return none.clone() if not needed else torch.cat(pieces, axis) if pieces else torch.zeros_like(like)

        columns = q.new_zeros((*q.shape[:2], k.shape[2]))
        bias = joined(self.bias, self.t.bias, 3, True) if self.full_bias and self.t.bias is not None else none.clone()
        return Gradients(
            scale * self.query if self.needs.query else none.clone(), scale * joined(self.key, k, 2, self.needs.key) ,
            joined(self.value, v, 2, self.needs.value), joined(self.columns, columns, 2, self.needs.log_weight), self.rows, bias,
        )  # fmt: skip
