"""Small models that are trained within minutes; their weights come with the package, in half precision."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from exptilt.claims.ledger import cache_folder

History = dict[str, Any]
Model = TypeVar("Model", bound=nn.Module)


def drawn(make: Callable[[], Model], seed: int = 0) -> Model:
    """The model as it is before training, the same for each seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def trained(
    make: Callable[[], Model], train: Callable[[Model], History], kept: Path, *, full: bool
) -> tuple[Model, History]:
    """The model with its kept weights, and what was noted while it was trained.

    Args:
        make: the model before training.
        train: trains it in place, and says what happened.
        kept: the file that comes with the package.
        full: train anew, once, and keep that in the cache folder.
    """
    place, model = cache_folder() / kept.name if full else kept, drawn(make)
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        history = train(model.train())
        weights = {name: value.half().numpy() for name, value in model.state_dict().items()}
        np.savez_compressed(place, history=np.array(json.dumps(history)), **weights)
    with np.load(place) as found:
        values = {name: torch.from_numpy(found[name]).float() for name in model.state_dict()}
        model.load_state_dict(values)
        return model.eval(), json.loads(str(found["history"]))
