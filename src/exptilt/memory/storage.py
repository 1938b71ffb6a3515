"""A memory as one file in the safetensors format: a header, then the bytes of the tensors.

Nothing in it can run code. The header also holds the similarity and the separation. The file is moved to its
place once it is whole.
"""

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exptilt._support.errors import ArgumentError, needed
from exptilt._support.files import draft
from exptilt.memory.separation import Entmax, Polynomial, separation

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_FORMAT = "exptilt.memory.Hopfield/2"


def save(self: "Hopfield", path: str | PathLike[str]) -> None:
    """Write the memory to one file (safetensors), whole or not at all. Needs the extra ``memory``.

    Args:
        path: the file to write; an existing one is replaced at the end, in one move.
    """
    path = Path(path)
    if path.is_dir():
        raise ArgumentError(f"Hopfield.save: path is a folder, {path}. Pass the name of a file in it.")
    if not path.parent.is_dir():
        raise ArgumentError(f"Hopfield.save: there is no folder {path.parent}. Make it first.")
    safetensors = needed("safetensors.torch", "memory")
    _ = self.keys  # raises if patterns were written to
    held = {"beta": self.beta, "patterns": self.patterns, "values": self.values}
    # The library takes contiguous tensors that share no memory.
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in held.items() if x is not None}
    if (kind := tensors.get("values", self.beta).dtype).is_complex:
        raise ArgumentError(f"Hopfield.save: values are {kind}. Pass real numbers, integers or booleans.")
    name = {"Maximum": "max"}.get(type(self.rule).__name__, type(self.rule).__name__.lower())
    rule = json.dumps({"kind": name, **vars(self.rule)})
    about = {"format": _FORMAT, "similarity": self.similarity.name, "separation": rule}
    with draft(path) as place:
        safetensors.save_file(tensors, str(place), about)


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
    tensors = {name: x if mapped and name != "beta" else x.clone() for name, x in tensors.items()}
    rule = json.loads(about["separation"])
    made = {"entmax": Entmax, "polynomial": Polynomial}.get(kind := rule.pop("kind"))
    return {
        **tensors,
        "similarity": about["similarity"],
        "separation": made(**rule) if made else separation(kind),
    }
