"""The data of a curvature: batches that come again, the same in every pass."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt._support.transforms import pytree


def fingerprint(batch: Any) -> str:
    """A hash of all tensors of a batch, with their dtypes and shapes."""
    found = hashlib.blake2b(digest_size=16)
    leaves, spec = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    found.update(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


class Batches:
    """Batches to go through again and again; raises if a pass is not like the first.

    Args:
        data: a list of batches, or a loader that gives the same batches in the same order each time.
        show: whether to show a bar: True, False, or None for terminals only.
    """

    def __init__(self, data: Iterable[Any], show: bool | None) -> None:
        if isinstance(data, Mapping | Tensor | str) or not hasattr(data, "__iter__"):
            raise ArgumentError(
                f"Curvature: data is a {type(data).__name__}. Pass a list of batches, such as "
                "[{'input_ids': ids, 'labels': ids}]."
            )
        if iter(data) is data:
            raise ArgumentError(
                f"Curvature: data is a {type(data).__name__} that can be read only once, and every product "
                "reads it again. Pass list(data), or a DataLoader."
            )
        self.data, self.show = data, show
        self.marks = [fingerprint(batch) for batch in data]
        if not self.marks:
            raise ArgumentError("Curvature: data has no batches. Pass at least one.")

    def __len__(self) -> int:
        return len(self.marks)

    def __iter__(self) -> Iterator[Any]:
        seen = 0
        show = self.show if len(self.marks) > 1 else False
        for batch in track(self.data, "batches", total=len(self.marks), show=show):
            if seen == len(self.marks) or fingerprint(batch) != self.marks[seen]:
                raise ArgumentError(
                    f"Curvature: batch {seen} of data is not the same as in the first pass, so products "
                    "would be of other matrices. Turn off shuffling and random changes, or pass list(data)."
                )
            seen += 1
            yield batch
        if seen < len(self.marks):
            raise ArgumentError(
                f"Curvature: data had {len(self.marks)} batches in the first pass and {seen} now. Pass "
                "list(data)."
            )
