"""Random option mixes for attend and its kin: mix k is always the same mix.

A mix is a whole call: tensors of any shape, stride, dtype and size, the options, the backend, and what
is to be compared (gradients, tangents, Fisher products, ...). Every choice is drawn from generators
seeded by the mix's number, so a failure is found again by it.

Most choices favour the places where implementations go wrong: few queries, lengths beside multiples of a
vector or a tile, one head for several queries' heads, rows that see nothing, sinks at the edge of the
dtype, sizes from 1e-30 to 1e30, scores far from 0.
"""

import math
import random
from dataclasses import dataclass, field

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TENSORS = ("query", "key", "value", "bias", "log_weight", "sink")
# Cells of the matrix of scores, and products in it, that one mix may have: the float64 and 80 bit versions
# hold all of them.
CELLS, PRODUCTS = 40_000, 1_000_000
CELLS_80_BIT, PRODUCTS_80_BIT = 6_000, 100_000


@dataclass
class Mix:
    """One call: tensors by name (None where left out), the mask, numbers, and what to compare."""

    seed: int
    tensors: dict
    mask: torch.Tensor | None
    numbers: dict
    backend: str | None
    check: bool | None
    exact: bool  # every score is a whole number that the dtype holds: no rounding before the exponential
    wanted: dict = field(default_factory=dict)
    notes: list = field(default_factory=list)

    @property
    def dtype(self):
        return self.tensors["query"].dtype

    @property
    def wide(self):
        """The dtype sums are taken in."""
        return torch.float32 if self.half else self.dtype

    @property
    def half(self):
        return self.dtype in (torch.bfloat16, torch.float16)

    @property
    def lead(self):
        return tuple(
            torch.broadcast_shapes(*(self.tensors[name].shape[:-3] for name in ("query", "key", "value")))
        )

    @property
    def sizes(self):
        """(Hq, Q, Hkv, K)."""
        return (*self.tensors["query"].shape[-3:-1], *self.tensors["key"].shape[-3:-1])

    def options(self):
        """The keyword arguments of attend, but for the three tensors and key_mass."""
        kept = {name: self.tensors[name] for name in ("bias", "log_weight", "sink")}
        return {**self.numbers, **kept, "mask": self.mask, "backend": self.backend, "check": self.check}

    def __str__(self):
        shown = [f"mix {self.seed}: {str(self.dtype)[6:]}"]
        for name in TENSORS:
            x = self.tensors[name]
            if x is not None:
                other = "" if x.dtype == self.dtype else f" {str(x.dtype)[6:]}"
                shown.append(
                    f"{name} {tuple(x.shape)}{other}{'' if x.is_contiguous() else f' strides {x.stride()}'}"
                )
        if self.mask is not None:
            shown.append(f"mask {tuple(self.mask.shape)}")
        shown += [f"{name}={x!r}" for name, x in self.numbers.items()]
        shown += [f"backend={self.backend!r}", f"check={self.check}", *self.notes]
        return ", ".join(shown)


def _length(draw, largest):
    kind = draw.random()
    if kind < 0.4:
        n = draw.randint(1, 9)
    elif kind < 0.75:
        n = draw.choice([8, 16, 32, 64]) * draw.randint(1, 5) + draw.choice([-1, 0, 1])
    elif kind < 0.79:
        n = draw.choice([0, 1, 2])
    else:
        n = draw.randint(1, 300)
    return min(n, largest)


def _dim(draw, largest=131):
    return min(
        draw.choice([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 128, 130, draw.randint(1, 131)]), largest
    )


def _lead(draw, lead, drop=0.25, one=0.25):
    """Batch axes that broadcast to `lead`."""
    shape = tuple(1 if draw.random() < one else n for n in lead)
    return shape[draw.randint(0, len(lead)) :] if draw.random() < drop else shape


def _pairs(draw, lead, heads, queries, keys):
    """A shape that broadcasts to (*lead, heads, queries, keys)."""
    full = (*lead, heads, queries, keys)
    shape = tuple(n if draw.random() < 0.65 else 1 for n in full)
    return shape[draw.randint(0, len(full) - 1) :] if draw.random() < 0.4 else shape


def _restride(draw, x):
    """The same numbers with strides that nobody would choose, and what was done."""
    kind = draw.choice(["plain"] * 4 + ["transposed", "heads last", "every other", "a slice", "wide rows"])
    if x.dim() < 2 or kind == "plain":
        return x, ""
    if kind == "transposed":
        y = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif kind == "heads last":
        y = x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x
    elif kind == "every other":
        y = torch.stack([x, torch.full_like(x, math.nan if x.dtype.is_floating_point else True)], -1).flatten(
            -2
        )[..., ::2]
    elif kind == "a slice":  # a cache with room left after the last position
        room = torch.full((*x.shape[:-2], x.shape[-2] + 5, x.shape[-1]), 7, dtype=x.dtype)
        room[..., 2:-3, :] = x
        y = room[..., 2:-3, :]
    else:
        y = torch.cat([x, torch.ones_like(x[..., :1])], -1)[..., :-1]
    return y, kind


def _shrink(draw, lead, Hkv, group, Q, K, D, Dv, float64):
    """Fewer batch items, heads, queries until the whole matrix is small enough to hold several times."""
    cells, products = (CELLS_80_BIT, PRODUCTS_80_BIT) if float64 else (CELLS, PRODUCTS)

    def too_much():
        count = math.prod(lead) * Hkv * group * Q * K
        return count > cells or count * (D + Dv) > products

    while too_much():
        if math.prod(lead) > 1 and draw.random() < 0.5:
            lead = ()
        elif Hkv * group > 1:
            Hkv, group = max(1, Hkv - 1), max(1, group - 1)
        elif max(D, Dv) > 16 and draw.random() < 0.6:
            D, Dv = max(1, D // 2), max(1, Dv // 2)
        elif Q > 9:
            Q = Q // 2
        elif lead:
            lead = ()
        elif D + Dv > 8:
            D, Dv = max(1, D // 2), max(1, Dv // 2)
        else:
            K = K // 2
    return lead, Hkv, group, Q, K, D, Dv


def _bias(draw, g, make, shape, offset, exact):
    kind = draw.random()
    x = make(*shape)
    if exact:
        x = (2 * x).round()
    elif kind < 0.2:
        x = 10 * x
    x = x + offset
    if draw.random() < 0.4:
        x = x.masked_fill(torch.rand(shape, generator=g) < draw.choice([0.1, 0.5, 0.9]), -math.inf)
    return x


def _sink(draw, make, shape, dtype, exact, top):
    x = (2 * make(*shape)).round() if exact else 2 * make(*shape)
    x = x + (top if draw.random() < 0.7 else 0.0)
    kind = draw.random()
    if kind < 0.12:
        return torch.full(shape, -math.inf, dtype=torch.float64), "sink −inf"
    if kind < 0.24:
        return torch.full(shape, torch.finfo(dtype).min, dtype=torch.float64), "sink finfo.min"
    if kind < 0.32 and x.numel():
        x.view(-1)[0] = draw.choice([-math.inf, torch.finfo(dtype).min])
        return x, "one sink at the edge"
    return x, ""


def mix_of(seed):
    """The mix of this number."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    name = draw.choices(["float32", "float64", "bfloat16", "float16"], [60, 14, 13, 13])[0]
    dtype = DTYPES[name]
    notes = []

    def make(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    many = draw.random() < 0.05
    lead = draw.choice([(), (), (), (2,), (3,), (2, 1, 3)])
    Hkv, group = draw.choice([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 4), (2, 3)])
    Q, K, D, Dv = _length(draw, 300), _length(draw, 300), _dim(draw), _dim(draw)
    if many:
        K, Q = draw.randint(2000, 8000 if dtype != torch.float64 else 3000), min(max(Q, 1), 9)
    lead, Hkv, group, Q, K, D, Dv = _shrink(draw, lead, Hkv, group, Q, K, D, Dv, dtype == torch.float64)
    Hq = Hkv * group

    exact = draw.random() < 0.08
    shapes = {
        "query": (*_lead(draw, lead), Hq, Q, D),
        "key": (*_lead(draw, lead), Hkv, K, D),
        "value": (*_lead(draw, lead), Hkv, K, Dv),
    }
    lead = tuple(torch.broadcast_shapes(*(shape[:-3] for shape in shapes.values())))
    query, key, value = (make(*shape) for shape in shapes.values())
    numbers = {}
    if exact:  # whole numbers, a scale of a power of two
        query, key = query.round().clamp(-2, 2), key.round().clamp(-2, 2)
        numbers["scale"] = draw.choice([1.0, 2.0, -1.0])
        notes.append("whole scores")
    else:
        kind = draw.random()
        if kind < 0.2:
            power = (
                draw.uniform(0.0, 1.0)
                if dtype == torch.float16
                else draw.choice([0.5, 1.0, 2.0, 4.0, 6.0, 10.0, 15.0, 20.0, 30.0])
            )
            query = query * 10.0**power
            notes.append(f"query × 1e{power:g}")
        elif kind < 0.27:
            power = 3.0 if dtype == torch.float16 else draw.choice([3.0, 10.0, 20.0, 30.0])
            query = query * 10.0**-power
            notes.append(f"query × 1e−{power:g}")
        elif kind < 0.37:
            power = 2.0 if dtype == torch.float16 else draw.choice([5.0, 15.0, 25.0])
            power = draw.choice([power, -power])
            query, key = query * 10.0**power, key * 10.0**-power
            notes.append(f"query × 1e{power:g}, key / 1e{power:g}")
        elif kind < 0.41 and K > 1:  # all keys alike, up to a hair
            key = key[..., :1, :] + draw.choice([0.0, 1e-3]) * key
            notes.append("keys alike")
        if draw.random() < 0.3:
            numbers["scale"] = draw.choice([-0.7, 0.0, 0.3, 1.0, 2.5])
        if draw.random() < 0.2:
            numbers["softcap"] = draw.choice([0.5, 5.0, 30.0])
    if draw.random() < 0.1:
        value = value + draw.choice([10.0, 100.0])
        notes.append("values far from 0")
    if draw.random() < 0.35:
        numbers["causal"] = True
    if draw.random() < 0.25:
        numbers["window"] = draw.choice([0, 1, 2, 5, draw.randint(1, max(K, 1)), K + 1, 10**6])

    beside = draw.choice([dtype, torch.float32]) if dtype in (torch.bfloat16, torch.float16) else dtype
    offset = 0.0
    with_bias, with_weight = draw.random() < 0.4, draw.random() < 0.35
    if (with_bias or with_weight) and draw.random() < 0.25:
        largest = 1e4 if beside == torch.float16 else 1e7
        offset = draw.choice([x for x in (1e4, -1e4, 1e5, -1e6, 1e7, -1e7) if abs(x) <= largest])
        notes.append(f"scores + {offset:g}")
    bias = weight = sink = mask = None
    if with_bias:
        bias = _bias(draw, g, make, _pairs(draw, lead, Hq, Q, K), offset, exact)
    if with_weight:
        shape = (*_lead(draw, lead), draw.choice([1, Hkv, Hkv]), K)
        weight = _bias(draw, g, make, shape, 0.0 if with_bias else offset, exact)
    if draw.random() < 0.3:
        sink, note = _sink(draw, make, (*_lead(draw, lead), draw.choice([1, Hq, Hq])), beside, exact, offset)
        notes += [note] if note else []
    if draw.random() < 0.25:
        mask = torch.rand(_pairs(draw, lead, Hq, Q, K), generator=g) < draw.choice([0.1, 0.5, 0.9])
        if mask.dim() > 1 and mask.shape[-2] > 1 and draw.random() < 0.5:
            mask[..., draw.randrange(mask.shape[-2]), :] = False
            notes.append("a row that sees nothing")

    tensors = {"query": query, "key": key, "value": value, "bias": bias, "log_weight": weight, "sink": sink}
    for label, x in tensors.items():
        if x is None:
            continue
        x, what = _restride(draw, x.to(dtype if label in TENSORS[:3] else beside))
        if (
            x.dim() > 3
            and x.shape[0] == 1
            and lead[len(lead) - x.dim() + 3] > 1
            and draw.random() < 0.5
            and label in TENSORS[:3]
        ):
            x, what = x.expand(lead[len(lead) - x.dim() + 3], *x.shape[1:]), "expanded"
        notes += [f"{label} {what}"] if what else []
        tensors[label] = x
    if mask is not None:
        mask, _ = _restride(draw, mask)
    there = [label for label, x in tensors.items() if x is not None]
    by = (
        there
        if draw.random() < 0.6
        else sorted(draw.sample(there, draw.randint(1, len(there))), key=TENSORS.index)
    )
    wanted = {
        "by": by,
        "gradients": draw.random() < 0.6,
        "tangents": draw.choice(["", "", "jvp", "dual"]),
        "fisher": draw.random() < 0.3,
        "second": draw.random() < 0.2 and dtype != torch.float64,
        "vmap": draw.random() < 0.15,
        "merge": draw.random() < 0.2
        and not (numbers.get("causal") or "window" in numbers)
        and dtype in (torch.float32, torch.float64),
        "alone": draw.random() < 0.3,
    }
    backend, check = draw.choice([None, None, None, "tiled"]), draw.choice([None, True, False])
    return Mix(seed, tensors, mask, numbers, backend, check, exact, wanted, notes)
