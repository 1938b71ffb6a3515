"""The part of a sequence that each process has: `shard` cuts the sequence up, `gather` joins it again."""

from math import prod

import torch
from torch import Tensor

from exptilt._support.checks import choice
from exptilt._support.errors import ArgumentError
from exptilt.distributed.group import Group, Members

ORDERS = ("contiguous", "zigzag")


def positions(sizes: tuple[int, ...], rank: int, order: str, device: torch.device | None = None) -> Tensor:
    """Positions of a process's entries in the whole sequence, ascending, ``(sizes[rank],)``.

    In order "zigzag" process r has parts r and 2P − 1 − r of 2P equal ones.
    """
    if order == "contiguous":
        return torch.arange(sizes[rank], device=device) + sum(sizes[:rank])
    half = torch.arange(sizes[rank] // 2, device=device)
    return torch.cat([half + rank * half.numel(), half + (2 * len(sizes) - 1 - rank) * half.numel()])


def shard(x: Tensor, *, dim: int = -2, order: str = "contiguous", group: Group = None) -> Tensor:
    """The part of a tensor that belongs to this process; every process passes the whole tensor.

    Args:
        x: ``(..., length, ...)``, the same on every process.
        dim: the axis that is cut up.
        order: "contiguous" cuts it into one part for each process, the first parts longer by one if the
            length does not divide evenly. "zigzag" cuts it into 2P parts of one length, of which process r
            gets parts r and 2P − 1 − r: with causality all processes then have the same work.
        group: the processes; None for all.

    Returns:
        ``(..., part, ...)``.
    """
    members = Members("shard", group)
    choice("shard", "order", order, ORDERS)
    place = positions(parts(x.shape[dim], members.count, order, "shard"), members.rank, order, x.device)
    return x.index_select(dim, place)


def gather(x: Tensor, *, dim: int = -2, order: str = "contiguous", group: Group = None) -> Tensor:
    """The whole tensor, from the parts that `shard` gave to the processes; without derivatives.

    Args:
        x: ``(..., part, ...)``; the processes' parts may differ in length.
        dim: the axis along which the parts are joined.
        order: as in `shard`.
        group: the processes; None for all.

    Returns:
        ``(..., length, ...)``, the same on every process.
    """
    members = Members("gather", group)
    choice("gather", "order", order, ORDERS)
    size = torch.tensor([x.shape[dim]], device=x.device)
    sizes = tuple(int(n) for n in members.collect(size, "gather"))
    rows = x.movedim(dim, 0)
    flat = rows.reshape(len(rows), prod(rows.shape[1:]))
    found = torch.cat(members.rows(flat, sizes, "gather"))
    place = torch.cat([positions(sizes, rank, order, x.device) for rank in range(members.count)])
    whole = torch.empty_like(found)
    whole[place] = found
    return whole.reshape(len(whole), *rows.shape[1:]).movedim(0, dim)


def parts(length: int, count: int, order: str, caller: str) -> tuple[int, ...]:
    """Number of the `length` entries that each of `count` processes gets."""
    if order == "zigzag":
        if length % (2 * count):
            hint = f"Pad it to {-(-length // (2 * count)) * 2 * count}, or pass order='contiguous'."
            raise ArgumentError(
                f"{caller}: {length} entries cannot be cut into {2 * count} equal parts. {hint}"
            )
        return (length // count,) * count
    return tuple(length // count + (rank < length % count) for rank in range(count))
