"""The same model at several moments of its training.

A checkpoint is a folder that the class of the studied model can load, or a function that returns a model. Its
step is the number at the end of the folder's name (``checkpoint-100``), or given along with it. Weights are
read from safetensors only: a pickle runs code when it is read.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from exptilt._support.errors import ArgumentError

Source = str | os.PathLike[str] | Callable[[], nn.Module]
Checkpoint = Source | tuple[float, Source]


@dataclass(frozen=True)
class Moment:
    """A checkpoint: the number of training steps, and a folder or a function that returns the model."""

    step: float
    source: Source

    def load(self, like: nn.Module) -> nn.Module:
        """The model at this moment; `like` is the studied model, whose class reads the folder."""
        kind: Any = type(like)
        try:
            if callable(self.source):
                model: Any = self.source()
            else:
                model = kind.from_pretrained(str(self.source), local_files_only=True, use_safetensors=True)
        except Exception as problem:
            if callable(self.source):
                raise
            reason = str(problem).strip().split("\n")[0]
            raise ArgumentError(
                f"study: checkpoint {self.source} cannot be loaded as {kind.__name__}: {reason} "
                "Pass folders that save_pretrained wrote, with weights in safetensors."
            ) from problem
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"study: a checkpoint gave a {type(model).__name__}. Pass folders, or functions that return "
                "a model."
            )
        self._compare(model, like)
        return model.to(next(like.parameters()).device)

    def _compare(self, model: nn.Module, like: nn.Module) -> None:
        """Raise unless both models have the same weights in the same shapes."""
        theirs, ours = ({name: tuple(x.shape) for name, x in m.state_dict().items()} for m in (model, like))
        if theirs == ours:
            return
        name = next(name for name in (*ours, *theirs) if theirs.get(name) != ours.get(name))
        which = f"at step {self.step:g}" if callable(self.source) else str(self.source)
        has, wants = (f"shape {x[name]}" if name in x else "no such weight" for x in (theirs, ours))
        raise ArgumentError(
            f"study: checkpoint {which} is of another model: for {name} it has {has}, the studied model "
            f"{wants}. Pass checkpoints of the model that is studied."
        )


def moments(checkpoints: Sequence[Checkpoint]) -> list[Moment]:
    """Checkpoints (folders, functions, or pairs of a step and either) in the order of their steps."""
    found = []
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
        found.append(Moment(step, source))
    return sorted(found, key=lambda moment: moment.step)
