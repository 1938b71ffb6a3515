"""A memory as one file.

The file is in the safetensors format: a header, then the bytes of the tensors. Nothing in it can run code.
The header also holds the similarity, the separation and a checksum (SHA-256) of these and of the tensors'
bytes, so that a file which was cut or changed is refused instead of retrieving something else. The file
is written block by block, so that mapped patterns are not read into memory, and moved to its place at the
end.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, needed
from exptilt._support.files import draft
from exptilt.memory.separation import Entmax, Polynomial, Separation, separation

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_FORMAT = "exptilt.memory.Hopfield/2"
_PART_BYTES = 1 << 24
_KINDS = {  # names of dtypes in the format
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Stored = dict[str, list[Tensor]]  # blocks of rows of a tensor, by its name


def _shape(parts: list[Tensor]) -> tuple[int, ...]:
    """The shape of the blocks joined along their rows."""
    x = parts[0]
    return tuple(x.shape) if len(parts) == 1 else (sum(len(part) for part in parts), *x.shape[1:])


def _bytes(parts: list[Tensor]) -> Iterator[memoryview]:
    for block in parts:
        for part in block.contiguous().reshape(-1).view(torch.uint8).split(_PART_BYTES):
            yield memoryview(part.numpy())


def _checksum(tensors: Stored, about: dict[str, str]) -> str:
    """SHA-256 of the header's entries `about`, and of the tensors' names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, text in sorted(about.items()):
        found.update(f"{name} {json.dumps(text)}\n".encode())
    for name, parts in sorted(tensors.items()):
        found.update(f"{name} {parts[0].dtype} {_shape(parts)}\n".encode())
        for part in _bytes(parts):
            found.update(part)
    return found.hexdigest()


def _described(rule: Separation) -> dict[str, Any]:
    """A separation as the arguments of `_rule`."""
    kind = {"Softmax": "softmax", "Maximum": "max"}.get(type(rule).__name__, type(rule).__name__.lower())
    return {"kind": kind, **vars(rule)}


def _rule(kind: str, **parameters: Any) -> Separation:
    made = {"entmax": Entmax, "polynomial": Polynomial}.get(kind)
    return made(**parameters) if made else separation(kind)


def save(self: "Hopfield", path: str | PathLike[str]) -> None:
    """Write the memory to one file (safetensors), whole or not at all.

    Args:
        path: the file to write; an existing one is replaced at the end, in one move.
    """
    path = Path(path)
    if path.is_dir():
        raise ArgumentError(f"Hopfield.save: path is a folder, {path}. Pass the name of a file in it.")
    if not path.parent.is_dir():
        raise ArgumentError(f"Hopfield.save: there is no folder {path.parent}. Make it first.")
    _ = self.keys  # raises if patterns were written to
    tensors: Stored = {"beta": [self.beta], "patterns": [block.patterns for block in self.blocks]}
    if self.blocks[0].values is not None:
        tensors["values"] = [block.values for block in self.blocks if block.values is not None]
    if self.lead and len(self.blocks) > 1:  # blocks of several memories do not lie one after another
        tensors = {name: [torch.cat(x, -2) if name != "beta" else x[0]] for name, x in tensors.items()}
    tensors = {name: [x.detach().cpu() for x in parts] for name, parts in tensors.items()}
    if (kind := tensors.get("values", tensors["beta"])[0].dtype) not in _KINDS:
        raise ArgumentError(f"Hopfield.save: values are {kind}. Pass real numbers, integers or booleans.")
    about = {
        "format": _FORMAT,
        "similarity": self.similarity.name,
        "separation": json.dumps(_described(self.rule)),
    }
    about["checksum"] = _checksum(tensors, about)
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    # Wide numbers first: each tensor then begins at a multiple of its numbers' size.
    order = sorted(tensors, key=lambda name: -tensors[name][0].element_size())
    for name in order:
        first, shape = tensors[name][0], _shape(tensors[name])
        begin, end = end, end + math.prod(shape) * first.element_size()
        header[name] = {"dtype": _KINDS[first.dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with draft(path) as place, place.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for part in _bytes(tensors[name]):
                file.write(part)


def load(path: str | PathLike[str], *, mapped: bool) -> dict[str, Any]:
    """The arguments of the memory that a file holds; see `Hopfield.load`."""
    safetensors = needed("safetensors", "memory")
    if not Path(path).is_file():
        raise ArgumentError(f"Hopfield.load: there is no file {path}.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as opened:
            about, names = opened.metadata() or {}, set(opened.keys())
            if about.get("format") != _FORMAT or names - {"values"} != {"patterns", "beta"}:
                got = f"{path} is a safetensors file, but not one that Hopfield.save wrote"
                raise ArgumentError(f"Hopfield.load: {got}.")
            tensors = {name: opened.get_tensor(name) for name in names}
    except safetensors.SafetensorError as problem:
        got = f"{path} is not a whole safetensors file ({problem})"
        raise ArgumentError(
            f"Hopfield.load: {got}. The file is truncated, or is not a saved memory."
        ) from None
    said = about.pop("checksum", None)
    if _checksum({name: [x] for name, x in tensors.items()}, about) != said:
        got = f"the contents of {path} do not match their checksum"
        raise ArgumentError(f"Hopfield.load: {got}: the file was changed or damaged.")
    tensors = {name: x if mapped and name != "beta" else x.clone() for name, x in tensors.items()}
    try:
        rule = _rule(**json.loads(about["separation"]))
        return {**tensors, "similarity": about["similarity"], "separation": rule}
    except (KeyError, TypeError, json.JSONDecodeError) as problem:
        raise ArgumentError(f"Hopfield.load: the header of {path} is damaged ({problem!r}).") from None
