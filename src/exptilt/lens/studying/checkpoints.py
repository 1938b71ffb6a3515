"""The same model at several moments of its training.

A checkpoint is a folder that the class of the studied model can load, or a function that returns a model. Its
step is the number at the end of the folder's name (``checkpoint-100``), or given along with it. Weights are
read from safetensors only: a pickle runs code when it is read.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from exptilt._support.errors import ArgumentError

Source = str | os.PathLike[str] | Callable[[], nn.Module]
Checkpoint = Source | tuple[float, Source]


def moments(checkpoints: Sequence[Checkpoint]) -> list[tuple[float, Source]]:
    """Training step and source of each checkpoint, in the order of the steps."""
    found: list[tuple[float, Source]] = []
    for place, item in enumerate(checkpoints):
        if isinstance(item, tuple):
            step, source = float(item[0]), item[1]
        else:
            source = item
            number = None if callable(item) else re.search(r"(\d+)$", Path(item).name)
            step = float(number[1]) if number else float(place)
        if not callable(source) and not Path(source).is_dir():
            raise ArgumentError(
                f"study: checkpoint {source} is not a folder. Pass folders such as checkpoint-100."
            )
        found.append((step, source))
    return sorted(found, key=lambda moment: moment[0])


def load(source: Source, step: float, like: nn.Module) -> nn.Module:
    """The model of a checkpoint; `like` is the studied model, whose class reads the folder."""
    kind: Any = type(like)
    if callable(source):
        model: Any = source()
    else:
        try:
            model = kind.from_pretrained(str(source), local_files_only=True, use_safetensors=True)
        except Exception as problem:
            reason = str(problem).strip().split("\n")[0]
            raise ArgumentError(
                f"study: checkpoint {source} cannot be loaded as {kind.__name__}: {reason} "
                "Pass folders that save_pretrained wrote, with weights in safetensors."
            ) from problem
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise ArgumentError(
            f"study: a checkpoint gave a {got}. Pass folders, or functions that return a model."
        )
    theirs, ours = ({name: tuple(x.shape) for name, x in m.state_dict().items()} for m in (model, like))
    for name in (*ours, *theirs):
        if theirs.get(name) != ours.get(name):
            which = f"at step {step:g}" if callable(source) else str(source)
            has, wants = (f"shape {x[name]}" if name in x else "no such weight" for x in (theirs, ours))
            raise ArgumentError(
                f"study: checkpoint {which} is of another model: for {name} it has {has}, the studied model "
                f"{wants}. Pass checkpoints of the model that is studied."
            )
    return model.to(next(like.parameters()).device)
