"""Share the units of a study among processes: each measures its own, then all get all of them.

The n-th unit is measured by process n modulo the number of processes. A unit does not depend on the process
that measures it, so the study is the same to the last bit. Each process keeps its finished units in the store
as a single process does; with a folder that all of them see, processes that are started again find the
finished units there, even if there are more or fewer processes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch.distributed as dist

from exptilt.distributed.group import Members, agree
from exptilt.lens.studying.store import Store, Unit


class Turns(Store):
    """A store in which the units of other processes are empty until the block of `shared` ends."""

    def __init__(self, folder: str | os.PathLike[str] | None, members: Members) -> None:
        super().__init__(folder)
        self._members = members
        self._units: list[Unit] = []
        self._wanted: list[str] = []

    def get(self, depends_on: dict[str, Any], make: Callable[[], Unit]) -> Unit:
        """The unit, if it is this process's turn; else an empty unit, which `shared` fills."""
        mine = len(self._units) % self._members.count == self._members.rank
        found = super().get(depends_on, make) if mine else {}
        self._units.append(found)
        self._wanted.append(repr(sorted(depends_on.items())))
        return found

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Fill all units at the end of the block; an error in one process is raised in all."""
        try:
            yield
        except Exception as problem:
            agree(self._members, "study", {}, problem=problem)
            raise
        facts = {"model, texts and options": hash_of(self._wanted), "the number of units": len(self._units)}
        agree(self._members, "study", facts)
        count, rank = self._members.count, self._members.rank
        everyone: list[Any] = [None] * count
        with self._members.waiting("study"):
            dist.all_gather_object(everyone, self._units[rank::count], group=self._members.group)
        for source, units in enumerate(everyone):
            for place, unit in zip(range(source, len(self._units), count), units, strict=True):
                self._units[place].update(unit)


def hash_of(words: list[str]) -> str:
    """Short hash of a list of words."""
    return blake2b("\n".join(words).encode(), digest_size=8).hexdigest()
