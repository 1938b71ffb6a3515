r"""Learning a restricted Boltzmann machine by contrastive divergence.

The gradient of the mean log-likelihood is a difference of two means of −∂F/∂(W, b, c) = (v h̄', v, h̄), with
h̄ = E[h|v]:

    over the data, minus over the machine's own law.

The second mean is not known exactly; block Gibbs chains estimate it. CD-k begins k steps from the data each
time (biased, low variance); PCD keeps its chains from one update to the next, so that they find the law.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exptilt._support.checks import choice, number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.memory.binary.boltzmann import RestrictedBoltzmann


@dataclass(frozen=True)
class Trace:
    """Statistics of the training, by epoch.

    Args:
        data_free_energy: ``(epochs,)``, mean F of the data.
        chain_free_energy: ``(epochs,)``, mean F of the chains; a growing gap means that they lag.
        reconstruction: ``(epochs,)``, mean squared error of v after one step down and up, on probabilities.
        log_likelihood: ``(epochs,)``, exact; empty if not asked for.
    """

    data_free_energy: Tensor
    chain_free_energy: Tensor
    reconstruction: Tensor
    log_likelihood: Tensor


@dataclass(frozen=True)
class Learnt:
    """A trained machine, and the trace of its training."""

    machine: RestrictedBoltzmann
    trace: Trace


def gradient(machine: RestrictedBoltzmann, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means of −∂F/∂W ``(V, H)``, −∂F/∂b ``(V,)``, −∂F/∂c ``(H,)`` over visible ``(B, V)``."""
    h = machine.hidden_mean(visible)
    return visible.mT @ h / len(visible), visible.mean(0), h.mean(0)


@torch.no_grad()
def train_boltzmann(
    machine: RestrictedBoltzmann,
    data: Tensor,
    *,
    method: str = "pcd",
    steps: int = 1,
    epochs: int = 10,
    rate: float = 0.05,
    batch: int = 64,
    decay: float = 0.0,
    chains: int = 64,
    exact: bool = False,
    generator: torch.Generator | None = None,
) -> Learnt:
    """The machine fitted to data, and the trace of its training.

    Args:
        machine: where to begin; `RestrictedBoltzmann.random` makes one.
        data: ``(B, V)``.
        method: ``cd`` starts chains at the data for each update, ``pcd`` keeps them between updates.
        steps: k, Gibbs steps before each update.
        epochs: passes through the data.
        rate: step size; falls linearly to 0.
        batch: examples in one update.
        decay: weights shrink by this times rate at each update.
        chains: number of chains that PCD keeps.
        exact: also trace the exact log-likelihood of the data, for machines that can be enumerated.
        generator: source of all draws; None is seeded with 0, so that a call repeats itself.

    Example:
        >>> data = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).repeat(50, 1).double()
        >>> machine = RestrictedBoltzmann.random(3, 2, size=0.1, generator=torch.Generator().manual_seed(0))
        >>> found = train_boltzmann(machine, data, epochs=100, rate=1.0, exact=True)
        >>> bool(found.trace.log_likelihood[-1] > -1.0)  # −log 8 = −2.08 at first, −log 2 = −0.69 at best
        True
    """
    choice("train_boltzmann", "method", method, ("cd", "pcd"))
    for name, count in {"steps": steps, "epochs": epochs, "batch": batch, "chains": chains}.items():
        whole("train_boltzmann", name, count)
    number("train_boltzmann", "rate", rate, above=0)
    number("train_boltzmann", "decay", decay, least=0)
    if not isinstance(data, Tensor) or data.ndim != 2 or not len(data):
        got = f"has shape {tuple(data.shape)}" if isinstance(data, Tensor) else f"is a {type(data).__name__}"
        raise ArgumentError(f"train_boltzmann: data {got}. Pass a tensor (B, V), at least one example.")
    machine.check(data)
    chance = torch.Generator().manual_seed(0) if generator is None else generator
    low, high = machine.levels
    coins = torch.rand((chains, data.shape[1]), generator=chance, dtype=data.dtype)
    kept = torch.where(coins < 0.5, low, high).to(data)
    updates, done = epochs * -(-len(data) // batch), 0
    rows: list[tuple[Tensor, ...]] = []
    for _ in track(range(epochs), "learning"):
        for at in torch.randperm(len(data), generator=chance).split(batch):
            negative = machine.gibbs(data[at] if method == "cd" else kept, steps, chance)
            kept = negative if method == "pcd" else kept
            pace = rate * (1 - done / updates)
            old = ((1 - pace * decay) * machine.weight, machine.visible_bias, machine.hidden_bias)
            pairs = zip(old, gradient(machine, data[at]), gradient(machine, negative), strict=True)
            w, b, c = (was + pace * (up - down) for was, up, down in pairs)
            machine = replace(machine, weight=w, visible_bias=b, hidden_bias=c)
            done += 1
        error = (data - machine.visible_mean(machine.hidden_mean(data))).square().mean()
        likelihood = [machine.log_likelihood(data).mean()] if exact else []
        energies = machine.free_energy(data).mean(), machine.free_energy(negative).mean()
        rows.append((*energies, error, *likelihood))
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return Learnt(machine, Trace(*columns, *([] if exact else [data.new_zeros(0)])))
