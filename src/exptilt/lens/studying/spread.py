"""A study's units shared out among processes: each measures its turn's, then all have all.

The n-th unit is measured by process n modulo their number. A unit is what one process would have measured, so
the study is the same to the last bit, whoever measured what. Each process keeps its finished units in the
store as one process does; with a folder that all of them see, processes that are started again find there
what was finished, also if there are more or fewer of them.
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
    """A store in which the units of other processes stand empty until `shared` ends."""

    def __init__(self, folder: str | os.PathLike[str] | None, members: Members) -> None:
        super().__init__(folder)
        self._members = members
        self._units: list[Unit] = []
        self._wanted: list[str] = []

    def get(self, depends_on: dict[str, Any], make: Callable[[], Unit]) -> Unit:
        """The unit, if it is this process's turn; else an empty one, to be filled."""
        mine = len(self._units) % self._members.count == self._members.rank
        found = super().get(depends_on, make) if mine else {}
        self._units.append(found)
        self._wanted.append(repr(sorted(depends_on.items())))
        return found

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Fill all units at the end of the block; an error in it is told to every process."""
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
    """A short word that stands for a list of them."""
    return blake2b("\n".join(words).encode(), digest_size=8).hexdigest()
