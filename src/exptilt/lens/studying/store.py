"""Finished units of a study, kept in a folder so that an interrupted study goes on where it stopped and a repeated one is instant.

A unit is filed under a hash of all that it depends on: the weights, the tokens, the options and the version of the measures. It is
written to a temporary file first and renamed when complete, so a half-written unit never stands under its name; one that cannot be read is
measured again. Arrays are kept as .npz without pickle: reading one runs no code.
"""

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

VERSION = 3
"""Of the measures: raise it whenever a number of a unit changes meaning."""

Unit = dict[str, NDArray[Any]]


def fingerprint(model: nn.Module) -> str:
    """Hash of a model's class, configuration and weights.

    Args:
        model: the model.
    """
    found = hashlib.blake2b(digest_size=16)
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    found.update(f"{type(model).__qualname__}\n{text}\n".encode())
    for name, value in model.state_dict().items():
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class Store:
    """A folder of units; without a folder, nothing is kept.

    Args:
        folder: where; made if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str] | None):
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, depends_on: dict[str, Any], make: Callable[[], Unit]) -> Unit:
        """The unit that depends on these things: read if it is there, else made and kept.

        Args:
            depends_on: plain values, all that the unit is a function of.
            make: measures it.
        """
        if self._folder is None:
            return make()
        text = json.dumps({"version": VERSION, **depends_on}, sort_keys=True)
        path = self._folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npz"
        found = _read(path)
        if found is None:
            found = make()
            _write(path, found)
        return found


def _read(path: Path) -> Unit | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None  # torn or foreign: it is measured again and written anew


def _write(path: Path, unit: Unit) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **unit)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
