"""A memory as one file.

The file is in the safetensors format: a header, then the bytes of the tensors. Nothing in it can run code. The header also holds the
similarity, the separation and a checksum (SHA-256) of these and of the tensors' bytes, so that a file which was cut or changed is refused
instead of retrieving something else. It is written beside its place and moved there at the end: readers see the old file or the new one,
never half.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.memory.separation import Entmax, Polynomial, Separation, separation

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_FORMAT = "exptilt.memory.Hopfield/2"
_PART_BYTES = 1 << 24


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as problem:
        raise MissingExtraError("safetensors", "hf") from problem
    return safetensors


def checksum(tensors: dict[str, Tensor], about: dict[str, str]) -> str:
    """SHA-256 of what the header says, and of the tensors' names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, text in sorted(about.items()):
        found.update(f"{name} {json.dumps(text)}\n".encode())
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        for part in x.contiguous().reshape(-1).view(torch.uint8).split(_PART_BYTES):
            found.update(memoryview(part.numpy()))
    return found.hexdigest()


def _describe(rule: Separation) -> dict[str, Any]:
    if isinstance(rule, Entmax):
        return {"kind": "entmax", "alpha": rule.alpha}
    if isinstance(rule, Polynomial):
        return {"kind": "polynomial", "degree": rule.degree}
    return {"kind": {"Softmax": "softmax", "Maximum": "max"}[type(rule).__name__]}


def _rule(described: dict[str, Any]) -> Separation:
    if described["kind"] == "entmax":
        return Entmax(described["alpha"])
    if described["kind"] == "polynomial":
        return Polynomial(described["degree"])
    return separation(described["kind"])


def save(memory: "Hopfield", path: Path) -> None:
    """See `Hopfield.save`."""
    library = _library()
    tensors = {
        "patterns": memory.patterns.detach().cpu().contiguous(),
        "beta": memory.beta.detach().cpu().contiguous(),
    }
    about = {
        "format": _FORMAT,
        "similarity": memory.similarity.name,
        "separation": json.dumps(_describe(memory.rule)),
    }
    about["checksum"] = checksum(tensors, about)
    if path.is_dir():
        raise ArgumentError(f"Hopfield.save: {path} is a folder. Pass the name of a file in it.")
    if not path.parent.is_dir():
        raise ArgumentError(f"Hopfield.save: there is no folder {path.parent}. Make it first.")
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        library.torch.save_file(tensors, draft, metadata=about)
        with open(draft, "rb+") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(draft, 0o666 & ~umask)  # what open() would have given; a temporary file is private
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def load(path: Path, *, mapped: bool) -> dict[str, Any]:
    """The arguments of the memory that a file holds; see `Hopfield.load`."""
    library = _library()
    if not path.is_file():
        raise ArgumentError(f"Hopfield.load: there is no file {path}.")
    try:
        with library.safe_open(str(path), framework="pt") as opened:
            about = opened.metadata() or {}
            names = set(opened.keys())
            if about.get("format") != _FORMAT or names != {"patterns", "beta"}:
                raise ArgumentError(
                    f"Hopfield.load: {path} is a safetensors file, but not one that Hopfield.save wrote."
                )
            tensors = {name: opened.get_tensor(name) for name in names}
    except library.SafetensorError as problem:
        raise ArgumentError(
            f"Hopfield.load: {path} is not a whole safetensors file ({problem}). It was cut, or is something else."
        ) from None
    said = about.pop("checksum", None)
    if checksum(tensors, about) != said:
        raise ArgumentError(
            f"Hopfield.load: the contents of {path} do not match their checksum: the file was changed or damaged."
        )
    patterns = tensors["patterns"] if mapped else tensors["patterns"].clone()
    try:
        rule = _rule(json.loads(about["separation"]))
        return {
            "patterns": patterns,
            "beta": tensors["beta"].clone(),
            "similarity": about["similarity"],
            "separation": rule,
        }
    except (KeyError, TypeError, json.JSONDecodeError) as problem:
        raise ArgumentError(f"Hopfield.load: the header of {path} is damaged ({problem!r}).") from None
