"""A small transformer trained on a hidden Markov chain, held against the exact posterior (H7)."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from exptilt._support.files import write_text
from exptilt._support.progress import track
from exptilt.claims.ledger import cache_folder

LENGTH, WIDTH, BATCH, STEPS = 32, 32, 128, 2400
KEPT = Path(__file__).parent / "posterior.json"


class Chain(NamedTuple):
    """A chain of hidden states: ``transition[i, j]`` from i to j, ``emission[i, y]`` of symbol y in state i."""

    transition: np.ndarray
    emission: np.ndarray


def chain() -> Chain:
    """Two states that seldom change, and three symbols."""
    return Chain(np.array([[0.95, 0.05], [0.1, 0.9]]), np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))


def _draws(count: int, generator: torch.Generator) -> Tensor:
    P, E = (torch.from_numpy(x) for x in chain())
    state = torch.randint(2, (count,), generator=generator)
    seen = []
    for _ in range(LENGTH):
        seen.append(torch.multinomial(E[state], 1, generator=generator)[:, 0])
        state = torch.multinomial(P[state], 1, generator=generator)[:, 0]
    return torch.stack(seen, 1)


def exact(symbols: Tensor) -> Tensor:
    """P(next symbol | symbols so far), ``(series, LENGTH − 1, 3)``: the forward recursion of the chain."""
    P, E = (torch.from_numpy(x) for x in chain())
    belief, found = torch.full((len(symbols), 2), 0.5, dtype=torch.float64), []
    for t in range(symbols.shape[1] - 1):
        belief = belief * E[:, symbols[:, t]].mT
        belief = (belief / belief.sum(-1, keepdim=True)) @ P
        found.append(belief @ E)
    return torch.stack(found, 1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(3, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, symbols: Tensor) -> Tensor:
        n = symbols.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        scores: Tensor = self.out(self.body(self.symbol(symbols) + self.place[:n], mask=mask, is_causal=True))
        return scores


def train(steps: int = STEPS, seed: int = 0) -> dict[str, Any]:
    """Train, and measure the mean divergence from the exact posterior in bits, eight times on the way."""
    torch.manual_seed(seed)
    model, generator = _Model(), torch.Generator().manual_seed(seed)
    test = _draws(2000, torch.Generator().manual_seed(seed + 1))
    truth = exact(test)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    at, bits = [], []
    for step in track(range(1, steps + 1), "hidden chain"):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 100) * 0.5 * (1.02 + math.cos(math.pi * step / steps))
        given = _draws(BATCH, generator)
        loss = cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // 8) == 0:
            with torch.no_grad():
                said = model(test[:, :-1]).double().log_softmax(-1)
            at.append(step)
            bits.append(float((truth * (truth.log() - said)).sum(-1).mean()) / math.log(2))
    counts = torch.ones(3, 3, dtype=torch.float64)
    many = _draws(20_000, generator)
    counts.index_put_((many[:, :-1].flatten(), many[:, 1:].flatten()), torch.ones(()).double(), accumulate=True)
    pairs = (counts / counts.sum(-1, keepdim=True))[test[:, :-1]]
    apart = float((truth * (truth / pairs).log()).sum(-1).mean()) / math.log(2)
    return {"steps": at, "bits": bits, "pairs": apart, "seed": seed}


@cache
def results(full: bool) -> dict[str, Any]:
    """The run that comes with the package, or with `full` one made anew and kept in the cache folder."""
    place = cache_folder() / f"posterior-{STEPS}.json" if full else KEPT
    if full and not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, json.dumps(train()) + "\n")
    found: dict[str, Any] = json.loads(place.read_text("utf-8"))
    return found
