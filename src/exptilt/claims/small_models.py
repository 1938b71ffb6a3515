"""Small models whose trained weights come with the package, in half precision."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

History = dict[str, Any]
Model = TypeVar("Model", bound=nn.Module)


def drawn(make: Callable[[], Model], seed: int = 0) -> Model:
    """The untrained model; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def trained(make: Callable[[], Model], kept: Path) -> tuple[Model, History]:
    """The model with the weights of a file, and the history of its training."""
    model = drawn(make)
    with np.load(kept) as found:
        model.load_state_dict({name: torch.from_numpy(found[name]).float() for name in model.state_dict()})
        return model.eval(), json.loads(str(found["history"]))
