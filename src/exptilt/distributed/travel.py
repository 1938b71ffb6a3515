"""Tensors that go around the ring: from each process to the next, until all have seen them.

At step t process r holds what came from process r − t. While it computes with that, the same bytes are on
their way to process r + 1, and those of step t + 1 come in from r − 1: sending hides behind computing as long
as it takes less time. All tensors of a process travel as one message.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exptilt.distributed.group import Members

_ALIGNED = 64  # bytes; each tensor of a message begins at a multiple of this
Shape = tuple[tuple[int, ...], torch.dtype] | None  # shape and dtype of a tensor, or None


def _places(shapes: Sequence[Shape]) -> tuple[list[tuple[int, int]], int]:
    """Start and stop of each tensor inside a message, and the message's length, in bytes."""
    found, end = [], 0
    for shape in shapes:
        size = 0 if shape is None else prod(shape[0]) * shape[1].itemsize
        found.append((end, end + size))
        end += -(-size // _ALIGNED) * _ALIGNED
    return found, end


def pack(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The bytes of several tensors, as one message."""
    places, length = _places([None if x is None else (tuple(x.shape), x.dtype) for x in tensors])
    message = torch.empty(length, dtype=torch.uint8, device=device)
    for x, (start, stop) in zip(tensors, places, strict=True):
        if x is not None:
            message[start:stop].view(x.dtype).view(x.shape).copy_(x.detach())
    return message


def unpack(message: Tensor, shapes: Sequence[Shape]) -> list[Tensor | None]:
    """The tensors of a message, as views of its memory."""
    places, _ = _places(shapes)
    return [
        None if shape is None else message[start:stop].view(shape[1]).view(shape[0])
        for shape, (start, stop) in zip(shapes, places, strict=True)
    ]


class Sending:
    """A message on its way to the next process, and one that arrives from the previous process."""

    def __init__(self, members: Members, message: Tensor, shapes: Sequence[Shape], caller: str) -> None:
        self.members, self.caller, self.shapes = members, caller, shapes
        self.message = message  # must live until it is sent
        self.arriving = message.new_empty(_places(shapes)[1])
        steps = [(dist.isend, message, 1), (dist.irecv, self.arriving, -1)]
        operations = [
            dist.P2POp(how, x, members.peer(step), members.group) for how, x, step in steps if x.numel()
        ]
        self.works: list[Any] = []
        if operations:
            with members.waiting(caller):
                self.works = dist.batch_isend_irecv(operations)

    def arrive(self) -> Tensor:
        """Wait for both messages, and return the one that arrived."""
        with self.members.waiting(self.caller):
            for work in self.works:
                work.wait()
        return self.arriving


def tour(
    members: Members, own: Sequence[Tensor | None], shapes: Sequence[Sequence[Shape]], caller: str
) -> Iterator[tuple[int, list[Tensor | None]]]:
    """Rank and tensors of each process in turn, this one first, while the next tensors are on their way."""
    tensors, message, source = list(own), None, members.rank
    device = next(x.device for x in own if x is not None)
    for step in range(members.count):
        coming = (source - 1) % members.count
        sending = None
        if step + 1 < members.count:
            message = pack(own, device) if message is None else message
            sending = Sending(members, message, shapes[coming], caller)
        yield source, tensors
        if sending is not None:
            message = sending.arrive()
            source, tensors = coming, unpack(message, shapes[coming])


class Homewards:
    """Sums that follow the tensors of a tour around the ring and back home: each process adds its part.

    The sum that process r has for the tensors of process s goes on to r + 1, which has those tensors at the
    next step and waits for the sum only when that step is done.
    """

    def __init__(self, members: Members, shapes: Callable[[int], list[Shape]], caller: str) -> None:
        self.members, self.shapes, self.caller = members, shapes, caller
        self.sending: Sending | None = None
        self.sums: list[Tensor | None] = []

    def add(self, source: int, sums: list[Tensor | None], device: torch.device) -> None:
        """Add this process's part for the tensors of `source`, and send the sum on."""
        if self.sending is not None:
            for into, more in zip(sums, unpack(self.sending.arrive(), self.shapes(source)), strict=True):
                if into is not None and more is not None:
                    into.add_(more)
        self.sums = sums
        if self.members.count > 1:
            coming = self.shapes((source - 1) % self.members.count)
            self.sending = Sending(self.members, pack(sums, device), coming, self.caller)

    def arrive(self) -> list[Tensor | None]:
        """The sums of this process's own tensors."""
        if self.sending is None:
            return self.sums
        found = unpack(self.sending.arrive(), self.shapes(self.members.rank))
        return [None if x is None else x.clone() for x in found]
