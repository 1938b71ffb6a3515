"""Run by torchrun: attention over the keys of all processes, against one process that has them all."""

import torch
import torch.distributed as dist
from torch.func import jvp

import exptilt as xt
from exptilt.distributed.collectives import total
from exptilt.distributed.group import Members
from exptilt.distributed.order import positions
from oracles.ranks import close, draw

NAMES = ("output", "log_normalizer", "entropy", "score_mean", "score_variance", "score_max")
HEADS, KEY_HEADS, D, DV = 4, 2, 8, 5


def loss(found, names, part=None):
    """A number that depends on every entry of these results, each in its own way; part picks rows."""
    total = 0.0
    for seed, name in enumerate(names):
        x = getattr(found, name)
        if x is None:
            continue
        weight = draw(*x.shape, seed=100 + seed) if part is None else part(name, seed)
        total = total + (torch.where(x.detach().isfinite(), x, 0.0) * weight).sum()
    return total


def whole(queries, length, dtype, options):
    """All tensors, which every process draws alike."""
    q = 2 * draw(2, HEADS, queries, D, seed=1, dtype=dtype)
    k = draw(2, KEY_HEADS, length, D, seed=2, dtype=dtype)
    v = draw(1, KEY_HEADS, length, DV, seed=3, dtype=dtype)
    more = {}
    if options.get("log_weight"):
        more["log_weight"] = draw(2, KEY_HEADS, length, seed=4, dtype=dtype)
    if options.get("bias"):
        more["bias"] = draw(HEADS, queries, length, seed=5, dtype=dtype)
    if options.get("mask"):
        more["mask"] = draw(queries, length, seed=6) > -0.5
    if options.get("sink"):
        more["sink"] = draw(HEADS, seed=7, dtype=dtype)
    plain = {name: x for name, x in options.items() if name in ("causal", "window", "softcap", "key_mass")}
    return q, k, v, more, plain


class Sharding:
    """Which rows and columns this process has."""

    def __init__(self, queries, sizes, order, sharded):
        rank, count = dist.get_rank(), dist.get_world_size()
        sizes = [sizes[i % len(sizes)] for i in range(count)]
        if order == "zigzag":
            self.keys = positions(tuple(sizes), rank, "zigzag")
            self.length = sum(sizes)
        else:
            self.length = sum(sizes)
            self.keys = torch.arange(sizes[rank]) + sum(sizes[:rank])
        if not sharded:
            self.queries, self.rows = queries, torch.arange(queries)
        elif queries is None:
            self.queries, self.rows = self.length, self.keys
        else:
            lengths = [queries + i for i in range(count)]
            self.queries, self.rows = sum(lengths), torch.arange(lengths[rank]) + sum(lengths[:rank])


def compare(
    label,
    options,
    *,
    queries,
    sizes,
    sharded=False,
    order="contiguous",
    dtype=torch.float64,
    twice=False,
    names=NAMES,
):
    """Results, gradients and tangents of this process's part, against those of one process."""
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    cut = Sharding(queries, sizes, order, sharded)
    q, k, v, more, plain = whole(cut.queries, cut.length, dtype, options)
    axes = {"log_weight": -1, "bias": -1, "mask": -1}
    mine = {name: x.index_select(axes[name], cut.keys) if name in axes else x for name, x in more.items()}
    moving = [name for name in ("log_weight", "bias", "sink") if name in more]
    everything = [*names, *(["key_mass"] if plain.get("key_mass") else [])]
    full = [q, k, v, *(more[n] for n in moving)]
    own = [q.index_select(-2, cut.rows), k.index_select(-2, cut.keys), v.index_select(-2, cut.keys)]
    own += [mine[n] for n in moving]
    backend = options.get("backend")

    def one(q, k, v, *rest):
        given = more | dict(zip(moving, rest, strict=True)) | plain
        return xt.attend(q, k, v, **given)

    def many(q, k, v, *rest):
        given = mine | dict(zip(moving, rest, strict=True)) | plain
        how = {"queries": "sharded", "order": order} if sharded else {}
        return xt.distributed.attend(q, k, v, **given, **how, backend=backend)

    def cut_of(name, x):
        """The own part of a result of one process."""
        if name == "key_mass":
            return x.index_select(-1, cut.keys)
        return x.index_select(-2 if name == "output" else -1, cut.rows)

    def part(name, seed):
        shape = getattr(right, name).shape
        return cut_of(name, draw(*shape, seed=100 + seed))

    full = [x.clone().requires_grad_() for x in full]
    own = [x.clone().requires_grad_() for x in own]
    right, found = one(*full), many(*own)
    for name in everything:
        close(getattr(found, name), cut_of(name, getattr(right, name)), tolerance, f"{label}: {name}")
    with torch.no_grad():
        quiet = many(*own)
    for name in everything:
        close(
            getattr(quiet, name), cut_of(name, getattr(right, name)), tolerance, f"{label}: {name}, no grad"
        )

    places = [(-2, cut.rows), (-2, cut.keys), (-2, cut.keys)]
    places += [(-1, cut.keys) if name in axes else None for name in moving]

    def mine_of(i, x):
        """The own part of what belongs to the i-th tensor of one process."""
        return x if places[i] is None else x.index_select(*places[i])

    def summed(i, x):
        """A gradient; of what all have, with queries sharded: the sum over processes."""
        if not sharded or places[i] is not None:
            return x
        x = x.clone()
        dist.all_reduce(x)
        return x

    wanted = torch.autograd.grad(loss(right, everything), full, create_graph=twice)
    got = torch.autograd.grad(loss(found, everything, part), own, create_graph=twice)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        close(summed(i, a), mine_of(i, b), 10 * tolerance, f"{label}: gradient {i}")
    if twice:
        along = [draw(*x.shape, seed=50 + i, dtype=dtype) for i, x in enumerate(full)]
        mine_along = [mine_of(i, x) for i, x in enumerate(along)]
        right2 = torch.autograd.grad(sum((g * x).sum() for g, x in zip(wanted, along, strict=True)), full)
        common = [not sharded and (i == 0 or place is None) for i, place in enumerate(places)]
        got2 = torch.autograd.grad(product(got, mine_along, common, sharded), own)
        for i, (a, b) in enumerate(zip(got2, right2, strict=True)):
            close(summed(i, a), mine_of(i, b), 100 * tolerance, f"{label}: second derivative {i}")
    # forward mode, one direction through all inputs, and one through query and key alone
    dots = [draw(*x.shape, seed=70 + i, dtype=dtype) for i, x in enumerate(full)]
    mine_dots = [mine_of(i, x) for i, x in enumerate(dots)]

    def as_tuple(function):
        return lambda *x: tuple(getattr(function(*x), name) for name in everything)

    right_dot = jvp(as_tuple(one), tuple(x.detach() for x in full), tuple(dots))[1]
    found_dot = jvp(as_tuple(many), tuple(x.detach() for x in own), tuple(mine_dots))[1]
    for name, a, b in zip(everything, found_dot, right_dot, strict=True):
        close(a, cut_of(name, b), 10 * tolerance, f"{label}: tangent of {name}")

    def some(function, given, dots):
        """Tangents along query and key alone."""
        rest = [x.detach() for x in given[2:]]
        given = tuple(x.detach() for x in given[:2])
        return jvp(lambda q, k: as_tuple(function)(q, k, *rest), given, tuple(dots[:2]))[1]

    for name, a, b in zip(everything, some(many, own, mine_dots), some(one, full, dots), strict=True):
        close(a, cut_of(name, b), 10 * tolerance, f"{label}: tangent of {name} by query and key")


def product(grads, along, common, sharded):
    """<gradient, along>; with queries replicated one number, the same on all processes."""
    found = [(g * x).sum() for g, x in zip(grads, along, strict=True)]
    if not sharded:
        members = Members("test")
        found = [x if same else total(x, members) for x, same in zip(found, common, strict=True)]
    return sum(found)


def main():
    everything = {"log_weight": True, "sink": True, "softcap": 3.0, "key_mass": True}
    uneven = (6, 4, 9)
    replicated, sharded = {"sizes": uneven}, {"sizes": uneven, "sharded": True}
    zigzag = {"queries": None, "sizes": (6,), "sharded": True, "order": "zigzag"}
    planes = everything | {"bias": True, "mask": True}
    compare("replicated", planes, queries=7, twice=True, **replicated)
    compare("replicated causal", {"causal": True, "key_mass": True}, queries=9, twice=True, **replicated)
    compare("replicated causal, more queries than keys", {"causal": True}, queries=23, **replicated)
    compare("replicated window", {"causal": True, "window": 5}, queries=9, **replicated)
    compare("replicated float32", everything, queries=7, dtype=torch.float32, **replicated)
    for sizes in ((1,), (1, 3), (2, 1, 0)):
        compare(f"replicated bias {sizes}", {"bias": True}, queries=4, sizes=sizes, twice=True)
    compare("sharded", everything, queries=5, **sharded)
    compare("sharded twice", everything, queries=5, twice=True, **sharded)
    tiled = everything | {"backend": "tiled"}
    compare("sharded tiled", tiled, queries=5, twice=True, **sharded)
    compare("sharded float32", everything, queries=5, dtype=torch.float32, **sharded)
    compare("sharded causal", {"causal": True, "key_mass": True}, queries=None, **sharded)
    compare("sharded window", {"causal": True, "window": 4}, queries=None, **sharded)
    for window in (None, 5):
        options = {"causal": True, "window": window, "log_weight": True, "key_mass": True}
        compare(f"zigzag {window}", options, **zigzag)
    compare("zigzag twice", {"causal": True, "key_mass": True}, twice=True, **zigzag)
    compare("zigzag, not causal", {"window": 4}, **zigzag)
    ties()
    nested()
    traffic()


def ties():
    """Keys on several processes tie: the derivatives of score_max are those of the first one."""
    count, rank = dist.get_world_size(), dist.get_rank()
    for queries, order in (("replicated", "contiguous"), ("sharded", "contiguous"), ("sharded", "zigzag")):
        first = 2 if order == "contiguous" else 1  # in sequence; on rank 0, and on all others as well
        k = torch.zeros(1, 4, 3, dtype=torch.float64)
        k[0, first:] = 1.0
        k.requires_grad_()
        q = torch.ones(1, 4, 3, dtype=torch.float64)
        found = xt.distributed.attend(q, k, k, queries=queries, order=order, scale=1.0).score_max
        (slope,) = torch.autograd.grad(found.sum(), k)
        rows = 4 if queries == "replicated" else 4 * count
        right = torch.zeros_like(k)
        right[0, first] = rows if rank == 0 else 0
        close(slope, right, 1e-12, f"ties, {queries}, {order}")
        along = draw(1, 4, 3, seed=rank)
        moved = jvp(
            lambda k, q=q, how=(queries, order): (
                xt.distributed.attend(q, k, k, queries=how[0], order=how[1], scale=1.0).score_max
            ),
            (k.detach(),),
            (along,),
        )[1]
        right = draw(1, 4, 3, seed=0)[0, first].sum().expand(1, 4)
        close(moved, right, 1e-12, f"ties, {queries}, {order}: tangent")


def traffic():
    """What docs/scaling.md says that sharded queries send: sizes of tensors, forward and backward."""
    sent, collect, reduce = [], Members.collect, Members.reduce

    def collected(self, x, caller):
        sent.append(x.nbytes)
        return collect(self, x, caller)

    def reduced(self, x, how, caller):
        sent.append(x.nbytes)
        return reduce(self, x, how, caller)

    n, count = 16, dist.get_world_size()
    q, k, v = (draw(KEY_HEADS, n, D, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    size = n * KEY_HEADS * D * 4
    try:
        Members.collect, Members.reduce = collected, reduced
        loss = xt.distributed.attend(q, k, v, queries="sharded").output.sum()
        assert sorted(sent) == [24, 24, size, size], sent
        sent.clear()
        loss.backward()
        assert sorted(sent) == [24, count * size, count * size], sent
    finally:
        Members.collect, Members.reduce = collect, reduce


def nested():
    """Forward over forward, and a third derivative, of sharded queries, against one process."""
    count, rank = dist.get_world_size(), dist.get_rank()
    whole = draw(1, 4 * count, 8, seed=9)
    mine = whole[:, 4 * rank : 4 * rank + 4]

    def one(x):
        return xt.attend(x, x, x).output

    def many(x):
        return xt.distributed.attend(x, x, x, queries="sharded").output

    def twice(function):
        return lambda x: jvp(lambda y: jvp(function, (y,), (y.cos(),))[1], (x,), (x.sin(),))[1]

    right = twice(one)(whole)[:, 4 * rank : 4 * rank + 4]
    close(twice(many)(mine), right, 1e-10, "forward over forward")
