r"""Judges attend and its kin on random mixes: at most twice the error of plain torch in the same dtype,
both against a wider truth.

    error(exptilt) <= 2 error(plain torch) + FLOOR

The truth is float64 for float32 and half precision problems, and 80 bits for float64 ones. Plain torch
is the formula with the whole matrix of scores, in the dtype sums are taken in (float32 for half
precision). An error is the largest over a tensor, each entry measured in units of what one rounding of
every number on its way does to it: the formula is evaluated in float64 with every input and intermediate
result shaken by one eps, a few times over, and the unit is the root mean square of what that changes,
plus eps times the entry itself. So entries of small rows count as much as those of large ones, and plain
torch being exact by luck does not count: a rounding or two is in FLOOR.

A root mean square of three draws is itself off by a factor of three at one entry of twenty, and a mix has
thousands of entries. So a mix that is over by three draws is judged again by `MANY`, which tell the unit to
a tenth, and only what is over then counts. A weight below the smallest normal number may be rounded to 0.

Left out, for want of a right answer in the dtype:
- rows whose weights are not determined: scores uncertain by more than `VAGUE`, with several outcomes
  near the largest. Their log-normalizer and maximum are compared, their key masses and outputs have to
  keep the invariants, and they get no cotangent.
- the derivative of a maximum that two keys share, up to rounding.
- entries where plain torch is not finite though the truth is.

Half precision: results that come back in the narrow dtype may be off by one rounding of it.

Run as a program it takes N and START from the environment, judges mixes START, START+1, ... and prints a
table.
"""

import math
import os
import sys
import traceback
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd import forward_ad

import exptilt as xt
from exptilt.tilting.backends import cpu, layout
from oracles.tilting_formula import QUANTITIES, Exact, _per_query_head, exact_tanh, formula, scores
from oracles.tilting_mixes import TENSORS, mix_of

FLOOR = 4.0  # units
DRAWS, MANY = 3, 48
VAGUE = 0.02  # nats by which one rounding may move a score before weights are no longer determined


@dataclass
class Finding:
    """One quantity of one mix: both errors in units, the ratio that must not exceed 2, and what to say if
    it does.
    """

    quantity: str
    found: float
    plain: float
    text: str = ""

    @property
    def ratio(self):
        return self.found / (self.plain + FLOOR / 2)

    @property
    def over(self):
        return not self.ratio <= 2

    def __str__(self):
        return f"{self.quantity}: error {self.found:.3g} units, plain torch {self.plain:.3g}{self.text}"


# --- the row by row state of a problem ---------------------------------------------------------


@dataclass
class Rows:
    """What is known of each row (*lead, Hq, Q): whether its weights are vague, its maximum shared; and the
    spread of all scores.
    """

    vague: torch.Tensor
    shared: torch.Tensor
    spread: float


def rows_of(mix):
    """How far rounding determines the rows of a mix, from float64 scores."""
    t = {name: None if x is None else x.detach().double() for name, x in mix.tensors.items()}
    eps = torch.finfo(mix.wide).eps
    Hq, _, _, K = mix.sizes
    s = scores(mix, t)
    cap, D = mix.numbers.get("softcap"), t["query"].shape[-1]
    scale = 1 / math.sqrt(D) if mix.numbers.get("scale") is None else mix.numbers["scale"]
    if mix.exact:
        blur = torch.zeros_like(s)
    else:
        key = _per_query_head(t["key"], Hq, -3)
        blur = abs(scale) * (t["query"].square() @ key.square().mT).sqrt()
        if cap is not None:
            blur = blur * (1 - torch.tanh(scale * (t["query"] @ key.mT) / cap).square())
        blur = blur.expand(s.shape) + s.masked_fill(s == -math.inf, 0.0).abs()
        for x in (t["bias"], t["log_weight"]):
            if x is not None and x.numel():
                blur = blur + x.masked_fill(x == -math.inf, 0.0).abs().max()
        blur = (eps * blur).masked_fill(s == -math.inf, 0.0)
    if not K:
        empty = torch.zeros(s.shape[:-1], dtype=torch.bool)
        return Rows(empty, empty, 1.0)
    top = s.amax(-1, keepdim=True)
    finite = s > -math.inf
    spread = (top - s)[finite]
    spread = float(spread.max()) if spread.numel() else 1.0
    widest = blur.amax(-1, keepdim=True)
    if K > 1:
        two = s.topk(2, -1).values
        shared = (two[..., 0] - two[..., 1] <= 64 * widest[..., 0]) & (two[..., 1] > -math.inf)
    else:
        shared = torch.zeros(s.shape[:-1], dtype=torch.bool)
    outcomes = s
    if t["sink"] is not None:
        outcomes = torch.cat(
            [s, t["sink"].expand(*mix.lead, Hq)[..., None, None].expand(*s.shape[:-1], 1)], -1
        )
        top = outcomes.amax(-1, keepdim=True)
    near = ((outcomes >= top - 40 - 20 * widest) & (outcomes > -math.inf)).sum(-1) > 1
    return Rows((widest[..., 0] > VAGUE) & near, shared, max(spread, 1.0))


# --- one way to ask every version the same question --------------------------------------------


@dataclass
class Questions:
    """Cotangents, directions and vectors for a mix, as tensors in the dtypes the mix has."""

    bars: dict
    dots: dict
    vector: torch.Tensor
    by: list


def _size(x):
    x = x.detach().double()
    x = x[x.isfinite()]
    return float(x.square().mean().sqrt()) if x.numel() and x.abs().max() > 0 else 1.0


def questions(mix, rows):
    g = torch.Generator().manual_seed(mix.seed + 1)
    Hq, Q, _, K = mix.sizes
    lead, t = mix.lead, mix.tensors

    def random(shape, dtype, factor=1.0):
        return (factor * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)

    firm, wide = ~rows.vague, mix.wide
    bars = {"output": random((*lead, Hq, Q, t["value"].shape[-1]), mix.dtype) * firm[..., None].to(mix.dtype)}
    for name in QUANTITIES[1:-1]:
        factor = {
            "score_mean": 1 / rows.spread,
            "score_variance": rows.spread**-2,
            "entropy": 1 / rows.spread,
        }.get(name, 1.0)
        bars[name] = random((*lead, Hq, Q), wide, factor) * firm.to(wide)
    bars["score_max"] = bars["score_max"] * (~rows.shared).to(wide)
    bars["key_mass"] = random((*lead, Hq, K), wide) * (~rows.vague.any(-1, keepdim=True)).to(wide)
    dots = {}
    for name in TENSORS:
        if t[name] is not None:
            factor = _size(t[name]) / rows.spread if name in ("query", "key") else 1.0
            dots[name] = random(t[name].shape, t[name].dtype, factor)
    still = rows.vague
    while still.dim() + 1 > t["query"].dim():
        still = still.any(0)
    for axis, n in enumerate(t["query"].shape[:-1]):
        if n == 1:
            still = still.any(axis, keepdim=True)
    vector = random(t["query"].shape, mix.dtype) * (~still)[..., None].to(mix.dtype)
    return Questions(bars, dots, vector / _size(t["key"]), mix.wanted["by"])


def _leaves(tensors, by):
    return {name: None if x is None else x.detach().requires_grad_(name in by) for name, x in tensors.items()}


def _backward(values, bars, leaves, by, **options):
    """Gradients by the leaves, zero where nothing flows."""
    names = [name for name in values if values[name] is not None and values[name].requires_grad]
    outputs, cotangents = (
        [values[name] for name in names],
        [bars[name].to(values[name].dtype) for name in names],
    )
    inputs = [leaves[name] for name in by]
    found = (
        torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)
        if outputs
        else [None] * len(by)
    )
    return {
        name: torch.zeros_like(x) if f is None else f for name, x, f in zip(by, inputs, found, strict=True)
    }


def values_of(function, tensors):
    return {name: x.detach() for name, x in function(tensors).items()}


def gradients_of(function, tensors, ask):
    leaves = _leaves(tensors, ask.by)
    return {
        f"d {name}": x.detach() for name, x in _backward(function(leaves), ask.bars, leaves, ask.by).items()
    }


def _unshared(x):
    """The same tensor; a copy if entries share memory, which torch cannot give a tangent."""
    x = x.detach()
    return x.contiguous() if 0 in x.stride() else x


def tangents_of(function, tensors, ask, way):
    by = ask.by
    dots = [ask.dots[name].to(tensors[name].dtype) for name in by]
    if way == "dual":
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(_unshared(tensors[name]), dot)
                for name, dot in zip(by, dots, strict=True)
            ]
            found = function({**tensors, **dict(zip(by, duals, strict=True))})
            moved = {name: forward_ad.unpack_dual(x) for name, x in found.items()}
            moved = {
                name: torch.zeros_like(x.primal) if x.tangent is None else x.tangent
                for name, x in moved.items()
            }
    else:
        inputs = tuple(_unshared(tensors[name]) for name in by)
        moved = torch.func.jvp(
            lambda *x: function({**tensors, **dict(zip(by, x, strict=True))}), inputs, tuple(dots)
        )[1]
    return {f"ṫ {name}": x for name, x in moved.items()}


def second_of(function, tensors, ask):
    """Gradients again, of the first gradients times the directions."""
    leaves = _leaves(tensors, ask.by)
    first = _backward(function(leaves), ask.bars, leaves, ask.by, create_graph=True)
    found = _backward(first, ask.dots, leaves, ask.by)
    return {f"dd {name}": x.detach() for name, x in found.items()}


def plain_fisher(mix, tensors, ask):
    def slope(q):
        def total(q):
            return formula(mix, {**tensors, "query": q})["log_normalizer"].masked_fill(nothing, 0.0).sum()

        return torch.func.grad(total)(q)

    nothing = formula(mix, tensors)["log_normalizer"] == -math.inf
    query = tensors["query"].detach().expand(*mix.lead, *tensors["query"].shape[-3:]).contiguous()
    return {
        "fisher": torch.func.jvp(
            slope, (query,), (ask.vector.to(query.dtype).expand_as(query).contiguous(),)
        )[1]
    }


# --- exptilt, called in the mix's own way ------------------------------------------------------


def _as_dict(a):
    return {name: getattr(a, name) for name in QUANTITIES if getattr(a, name) is not None}


def exptilt_function(mix):
    """Tensors → quantities by name, by attend, or by attend under vmap over the first batch axis."""
    extra = {**mix.numbers, "backend": mix.backend, "check": mix.check}

    def call(t, mask):
        kept = {name: t[name] for name in ("bias", "log_weight", "sink")}
        return _as_dict(
            xt.attend(t["query"], t["key"], t["value"], mask=mask, key_mass=True, **kept, **extra)
        )

    if not (mix.wanted["vmap"] and mix.lead and mix.lead[0] > 1):
        return lambda t: call(t, mix.mask)
    mix.notes.append("under vmap")
    axes = {"query": 3, "key": 3, "value": 3, "bias": 3, "log_weight": 2, "sink": 1, "mask": 3}

    def vmapped(t):
        there, dims = {}, {}
        for name, x in {**t, "mask": mix.mask}.items():
            if x is None:
                continue
            full = x.dim() == len(mix.lead) + axes[name]
            there[name] = x.squeeze(0) if full and x.shape[0] == 1 else x
            dims[name] = 0 if full and x.shape[0] > 1 else None

        def one(t):
            return call({name: t.get(name) for name in TENSORS}, t.get("mask"))

        return torch.func.vmap(one, in_dims=(dims,))(there)

    return vmapped


def merged(mix, g):
    """Results of attend in two or three parts of the keys, joined."""
    t, K = mix.tensors, mix.sizes[3]
    cuts = sorted(int(torch.randint(0, K + 1, (), generator=g)) for _ in range(1 + mix.seed % 2))
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, K], strict=True):
        pairs = {
            name: x if x is None or x.shape[-1] == 1 else x[..., start:stop]
            for name, x in (("bias", t["bias"]), ("mask", mix.mask))
        }
        weight = None if t["log_weight"] is None else t["log_weight"][..., start:stop]
        parts.append(
            xt.attend(
                t["query"],
                t["key"][..., start:stop, :],
                t["value"][..., start:stop, :],
                log_weight=weight,
                **pairs,
                **mix.numbers,
                sink=t["sink"] if start == 0 and not parts else None,
                backend=mix.backend,
                check=mix.check,
            )
        )
    return {f"merge {name}": x for name, x in _as_dict(xt.merge(parts)).items()}


# --- comparing ---------------------------------------------------------------------------------


def _numpy(x):
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else x


def _error(x, truth):
    """Absolute errors; 0 where both are the same infinity, inf where only one is finite."""
    with np.errstate(all="ignore"):
        d = np.where(x == truth, 0.0, np.abs(x - truth))
    return np.where(np.isnan(d), np.inf, d).astype(np.float64)


def _root_mean_square(errors):
    """Over the first axis; scaled first, because squares of 1e-200 and 1e200 are 0 and infinite."""
    largest = np.max(errors, 0)
    safe = np.where(largest > 0, largest, 1.0)
    return largest * np.sqrt(np.mean(np.square(np.array(errors) / safe), 0))


def compare(mix, quantity, found, plain, truth, shaken, keep=None, terms=None):
    """A Finding on one tensor. `terms` is the size of what is summed, where that can cancel to the last
    digit.
    """
    eps, tiny = torch.finfo(mix.wide).eps, torch.finfo(mix.wide).tiny
    dtype = found.dtype
    x, y, truth = _numpy(found), _numpy(plain), _numpy(truth)
    if x.shape != truth.shape:
        return Finding(quantity, math.inf, 0.0, f": shape {x.shape}, must be {truth.shape}")
    if not truth.size:
        return Finding(quantity, 0.0, 0.0)
    size = np.where(np.isfinite(truth), np.abs(truth), 0.0).astype(np.float64)
    moved = _root_mean_square([np.minimum(_error(_numpy(s), truth), 1e150) for s in shaken])
    unit = np.where(np.isfinite(moved) & (moved < 1e149), moved, 0.0) + eps * size + 64 * tiny
    if terms is not None:
        unit = unit + eps * np.where(np.isfinite(terms), np.abs(terms), 0.0)
    # an entry far smaller than the rest need not be as exact as itself
    unit = unit + 0.1 * _root_mean_square(unit.reshape(-1))
    a, b = _error(x, truth), _error(y, truth)
    if dtype != mix.wide:  # came back rounded to half precision
        narrow = torch.finfo(dtype)
        roundings = 1.02 if "under vmap" in mix.notes else 0.51  # vmap may sum over its axis after rounding
        a = np.maximum(a - roundings * narrow.eps * size - narrow.smallest_normal * narrow.eps, 0.0)
        a = np.where(size > 0.99 * narrow.max, 0.0, a)
    counted = np.isfinite(b) if keep is None else np.isfinite(b) & np.broadcast_to(keep, b.shape)
    if not counted.any():
        return Finding(quantity, 0.0, 0.0)
    with np.errstate(all="ignore"):
        units, rival = np.where(counted, a / unit, 0.0), np.where(counted, b / unit, 0.0)
    at = np.unravel_index(units.argmax(), units.shape)
    place = tuple(int(i) for i in at)
    text = f"; worst at {place}: {x[at]:.9g}, truth {truth[at]:.9g}, plain torch {y[at]:.9g}"
    text += f", unit {unit[at]:.3g}"
    return Finding(quantity, float(units.max()), float(rival.max()), text)


def invariants(mix, rows, found, truth):
    """What holds whatever the rounding: weights in [0, 1] that sum to one less the sink's share, outputs
    among the values.
    """
    eps = torch.finfo(mix.wide).eps
    Hq, Q, _, K = mix.sizes
    if not (Q and K):
        return
    mass, t = found["key_mass"].double(), mix.tensors
    alive = torch.as_tensor(np.asarray(_numpy(truth["score_max"]) > -np.inf))
    count = alive.double().sum(-1)
    slack = 16 * eps * (2 + math.log(K))
    if not bool((mass >= 0).all()):
        yield f"a key mass is negative or NaN: {float(mass.min())}"
    if not bool((mass <= count[..., None] * (1 + slack)).all()):
        yield f"a key mass exceeds the number of queries: {float((mass - count[..., None]).max()):.6g} more"
    if t["sink"] is None:
        total = count
    else:  # the sink's share from the truth, where rows have weights that are determined
        with np.errstate(all="ignore"):
            share = np.exp(
                np.minimum(
                    _numpy(t["sink"].expand(*mix.lead, Hq)[..., None]) - _numpy(truth["log_normalizer"]), 0.0
                )
            )
        share = torch.as_tensor(np.asarray(share, dtype=np.float64)).nan_to_num(0.0)
        total = torch.where(alive, 1 - share, 0.0).sum(-1)
    sure = torch.ones_like(total, dtype=torch.bool) if t["sink"] is None else ~rows.vague.any(-1)
    blur = slack if t["sink"] is None else slack + 4 * VAGUE * min(1.0, eps * 1e7)
    wrong = ((mass.sum(-1) - total).abs() > blur * count + 1e-300) & sure
    if wrong.any():
        yield f"key masses sum to {mass.sum(-1)[wrong][0].item():.17g}, must be {total[wrong][0].item():.17g}"
    largest = (
        _per_query_head(t["value"], Hq, -3).double().abs().amax(-2).expand(*mix.lead, Hq, -1)[..., None, :]
    )
    rounding = torch.finfo(mix.dtype).eps if mix.half else 0.0
    if not bool((found["output"].double().abs() <= largest * (1 + slack + rounding)).all()):
        yield "an output lies outside the values, or is NaN"
    for name in ("score_variance", "entropy"):
        if bool((found[name] < -64 * eps * (1 + rows.spread)).any()):
            yield f"{name} is negative: {float(found[name].min()):.6g}"


def _shaker(eps, seed):
    """Multiplies by 1 + eps × a normal number, in numpy or torch."""
    g = np.random.default_rng(seed)

    def shake(x, amount=1.0):
        factor = 1 + amount * eps * g.standard_normal(x.shape)
        return x * (torch.as_tensor(factor) if isinstance(x, torch.Tensor) else factor)

    return shake


def _shaken_second(mix, ask, double, shake):
    """Second derivatives by torch in float64, every step shaken."""
    keep = ("query", "key", "bias", "log_weight", "sink") if mix.exact else ()
    start = {name: x if x is None or name in keep else shake(x) for name, x in double.items()}
    bars = {name: shake(x.double()) for name, x in ask.bars.items()}
    dots = {name: shake(x.double()) for name, x in ask.dots.items()}
    asked = Questions(bars, dots, ask.vector, ask.by)
    return second_of(lambda t: formula(mix, t, shake, exact_tanh), start, asked)


def _prefixed(prefix, found):
    return {prefix + name: x for name, x in found.items()}


@contextmanager
def small_tiles(wanted=True):
    """Sweeps of the compiled kernels in the smallest tiles, so that small problems have many of them."""
    kept, least = cpu.tuning, layout.Tuning(cache_bytes=1, tile_rows=13, backward_rows=13)
    if wanted:
        cpu.tuning = lambda: least
    try:
        yield
    finally:
        cpu.tuning = kept


def judge(mix):
    """Every Finding on a mix; those with odd numbers are swept in the smallest tiles."""
    with small_tiles(mix.seed % 2 == 1):
        return judge_in_place(mix)


def judge_in_place(mix):
    """Every Finding on a mix, in tiles of the size in force; by `MANY` draws if any is over by `DRAWS`."""
    found = _judge(mix, DRAWS)
    return _judge(mix, MANY) if any(finding.over for finding in found) else found


def _judge(mix, draws):
    rows = rows_of(mix)
    ask = questions(mix, rows)
    wanted, t, findings = mix.wanted, mix.tensors, []
    wide = {name: None if x is None else x.detach().to(mix.wide) for name, x in t.items()}
    double = {name: None if x is None else x.detach().double() for name, x in t.items()}
    eps = torch.finfo(mix.wide).eps
    with np.errstate(all="ignore"):
        truth = Exact(mix, np.longdouble if mix.dtype == torch.float64 else np.float64)
        shaken = [Exact(mix, np.float64, _shaker(eps, 3 * mix.seed + k)) for k in range(draws)]
    firm = ~rows.vague
    same_lead = tuple(torch.broadcast_shapes(t["query"].shape[:-3], t["key"].shape[:-3])) == mix.lead
    function = exptilt_function(mix)

    def keep(name):
        """Which entries of a quantity have a right answer."""
        if name == "key_mass":
            return firm.all(-1, keepdim=True).numpy()
        return (firm[..., None] if name == "output" else firm).numpy()

    def keep_value(name):
        return None if name in ("log_normalizer", "score_max") else keep(name)

    def keep_tangent(name):
        return (firm & ~rows.shared).numpy() if name == "score_max" else keep(name)

    def held(kind, ours, plain, right, rough, keeps=lambda name: None, terms=None):
        """Compare what `ours()` returns with the truth `right` and the shaken versions `rough`, and plain
        torch likewise.
        """
        try:
            found = ours()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"
            text = f": raised {type(error).__name__}: {str(error)[:300]} ({place})"
            findings.append(Finding(kind, math.inf, 0.0, text))
            return None
        for name, x in found.items():
            versions = x, plain[name], right[name], [s[name] for s in rough]
            findings.append(
                compare(mix, name, *versions, keeps(name), None if terms is None else terms[name])
            )
        return found

    def by_hand(prefix, derive):
        with np.errstate(all="ignore"):
            return _prefixed(prefix, derive(truth)), [_prefixed(prefix, derive(s)) for s in shaken]

    plain = values_of(lambda t: formula(mix, t), wide)
    found = held(
        "values", lambda: values_of(function, t), plain, *by_hand("", lambda e: e.values), keep_value
    )
    if found is not None:
        broken = list(invariants(mix, rows, found, truth.values))
        findings.append(Finding("invariants", math.inf if broken else 0.0, 0.0, ": " + "; ".join(broken)))
    if wanted["gradients"]:
        rival = gradients_of(lambda t: formula(mix, t), wide, ask)
        held(
            "gradients",
            lambda: gradients_of(function, t, ask),
            rival,
            *by_hand("d ", lambda e: e.gradients(ask.bars)),
        )
    if wanted["tangents"]:
        along = {name: ask.dots[name] for name in ask.by}
        rival = tangents_of(lambda t: formula(mix, t), wide, ask, "dual")
        held(
            "tangents",
            lambda: tangents_of(function, t, ask, wanted["tangents"]),
            rival,
            *by_hand("ṫ ", lambda e: e.tangents(along)),
            lambda name: keep_tangent(name[2:]),
        )
    if wanted["second"]:
        rival = second_of(lambda t: formula(mix, t), wide, ask)
        right = second_of(lambda t: formula(mix, t, tanh=exact_tanh), double, ask)
        rough = [_shaken_second(mix, ask, double, _shaker(eps, 3 * mix.seed + k)) for k in range(draws)]
        with np.errstate(all="ignore"):
            terms = _prefixed("dd ", truth.second_terms(ask.bars, {name: ask.dots[name] for name in ask.by}))
        held("second", lambda: second_of(function, t, ask), rival, right, rough, terms=terms)
    if wanted["fisher"] and same_lead:
        right = by_hand("", lambda e: {"fisher": e.fisher(ask.vector)})
        product = xt.fisher_vector_product
        held(
            "fisher",
            lambda: {"fisher": product(t["query"], t["key"], ask.vector, **mix.options())},
            plain_fisher(mix, wide, ask),
            *right,
        )
    if wanted["alone"] and same_lead:
        right = by_hand("alone ", lambda e: {"log_normalizer": e.values["log_normalizer"]})
        alone = xt.log_normalizer
        held(
            "alone",
            lambda: {"alone log_normalizer": alone(t["query"], t["key"], **mix.options())},
            _prefixed("alone ", plain),
            *right,
        )
    if wanted["merge"]:
        g = torch.Generator().manual_seed(mix.seed + 2)
        right = by_hand("merge ", lambda e: e.values)
        held(
            "merge",
            lambda: merged(mix, g),
            _prefixed("merge ", plain),
            *right,
            lambda name: keep_value(name[6:]),
        )
    return findings


def complaints(seed, most=2.0):
    """What is wrong with a mix, one line each: errors of more than `most` times plain torch's."""
    m = mix_of(seed)
    over = [finding for finding in judge(m) if not finding.ratio <= most]
    return [str(m), *(f"    {finding}" for finding in over)] if over else []


def table(findings):
    """A summary by quantity: how many compared, how many over, the worst ratio."""
    by = defaultdict(list)
    for finding in findings:
        by[finding.quantity].append(finding)
    scale = f"(error / (plain torch + {FLOOR / 2:g} units); over 2 fails)"
    lines = [f"{'quantity':<24}{'compared':>10}{'over':>8}{'worst':>10}   {scale}"]
    for name, group in by.items():
        lines.append(
            f"{name:<24}{len(group):>10}{sum(f.over for f in group):>8}{max(f.ratio for f in group):>10.3g}"
        )
    lines.append(f"{'all':<24}{len(findings):>10}{sum(f.over for f in findings):>8}")
    return "\n".join(lines)


def main():
    """Judge N mixes from START on; print those that fail, then the table. Exits with 1 if any failed."""
    from tqdm import tqdm

    count, start = int(os.environ.get("N", "2000")), int(os.environ.get("START", "1000000"))
    findings, failed = [], 0
    bar = tqdm(range(start, start + count), unit="mix", mininterval=1.0, smoothing=0.05)
    for seed in bar:
        m = mix_of(seed)
        new = judge(m)
        findings += [Finding(f.quantity, f.found, f.plain) for f in new]
        over = [f for f in new if f.over]
        if over:
            failed += 1
            bar.set_postfix(failed=failed)
            tqdm.write("\n".join([str(m), *(f"    {f}" for f in over)]))
    print(table(findings))
    print(f"{failed} of {count} mixes failed; one again: START=<its number> N=1 make fuzz")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
