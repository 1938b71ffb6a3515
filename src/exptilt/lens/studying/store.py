"""Finished units of a study, kept in a folder, so that an interrupted or repeated study reuses them.

A unit is filed under a hash of all that it depends on: the weights, the tokens, the options and the version
of the measures. A half-written unit never stands under its name; one that cannot be read is measured again.
Arrays are kept as .npz without pickle: reading one runs no code.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from exptilt._support.files import draft

VERSION = 8
"""Version of the measures: raise it whenever a number of a unit changes meaning."""

Unit = dict[str, NDArray[Any]]


def fingerprint(model: nn.Module) -> str:
    """Hash of a model's class, configuration and weights."""
    found = hashlib.blake2b(digest_size=16)
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    found.update(f"{type(model).__qualname__}\n{text}\n".encode())
    for name, value in model.state_dict().items():
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class Store:
    """A folder of units, made if it does not exist; without a folder, nothing is kept."""

    def __init__(self, folder: str | os.PathLike[str] | None):
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, depends_on: dict[str, Any], make: Callable[[], Unit]) -> Unit:
        """The unit filed under `depends_on`: read if it is there, else made and kept."""
        if self._folder is None:
            return make()
        text = json.dumps({"version": VERSION, **depends_on}, sort_keys=True)
        path = self._folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npz"
        try:
            with np.load(path, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            pass  # not there, torn or foreign: it is measured and written anew
        found = make()
        _write(path, found)
        return found


def _write(path: Path, unit: Unit) -> None:
    with draft(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, **unit)  # type: ignore[arg-type]
