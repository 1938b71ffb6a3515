"""Train the small models of claims C3 and H7, whose weights come with the package in half precision.

Run: python examples/train_small_models.py --out folder
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from exptilt._support.progress import track
from exptilt.claims.models import crossing
from exptilt.claims.others import posterior
from exptilt.claims.small_models import drawn


def reverse(model: crossing.Reverser) -> dict[str, Any]:
    """Train to write strings of digits backwards."""
    steps = 1500
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    losses = []
    for _ in track(range(steps), "reversing digits"):
        given = crossing.strings(128, generator)
        loss = cross_entropy(model(given, given.flip(1)).flatten(0, 1), given.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return {"loss": losses[:: steps // 10]}


def follow_chain(model: posterior.Model) -> dict[str, Any]:
    """Train, and note the divergence from the exact posterior in bits, eight times on the way."""
    steps = 2400
    generator = torch.Generator().manual_seed(0)
    test = posterior.draws(2000, torch.Generator().manual_seed(1))
    truth = posterior.exact(test)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    at, bits = [], []
    for step in track(range(1, steps + 1), "hidden chain"):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 100) * 0.5 * (1.02 + math.cos(math.pi * step / steps))
        given = posterior.draws(128, generator)
        loss = cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 8) == 0:
            at.append(step)
            bits.append(posterior.divergence(truth, posterior.predicted(model, test)))
    return {"steps": at, "bits": bits}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pairs = ((crossing.Reverser, reverse, crossing.KEPT), (posterior.Model, follow_chain, posterior.KEPT))
    for make, train, kept in pairs:
        model = drawn(make).train()
        history = train(model)
        weights = {name: value.half().numpy() for name, value in model.state_dict().items()}
        np.savez_compressed(given.out / kept.name, history=np.array(json.dumps(history)), **weights)
        print("wrote", given.out / kept.name)
