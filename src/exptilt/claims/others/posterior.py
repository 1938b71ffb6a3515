r"""A small transformer trained on a hidden Markov chain, compared with the exact posterior (H7).

A chain whose modes emit symbols by a table E is a switching model: let symbol y be the unit vector e_y, and
let mode i emit vectors by N(d_i, I). Then log p(e_y | i) = ⟨d_i, e_y⟩ − ½‖d_i‖² up to a constant that all
modes share. Up to another such constant this is log E_iy if d_i = log E_i + c_i, with c_i − ½‖log E_i + c_i‖²
the same for all modes. There is no continuous state, so the mode probabilities of GPB2 in `xt.switching` are
exact. The transformer's weights come with the package; ``examples/train_small_models.py`` made them.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from exptilt.claims.small_models import History, drawn, trained
from exptilt.switching import SwitchingLinearGaussian

LENGTH, WIDTH = 32, 32
KEPT = Path(__file__).parent / "posterior.npz"


class Chain(NamedTuple):
    """A chain of hidden states: ``transition[i, j]`` from i to j, ``emission[i, y]`` of symbol y in i."""

    transition: np.ndarray
    emission: np.ndarray


def chain() -> Chain:
    """Two states that seldom change, and three symbols."""
    return Chain(np.array([[0.95, 0.05], [0.1, 0.9]]), np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))


def draws(count: int, generator: torch.Generator) -> Tensor:
    """Series of symbols, ``(count, LENGTH)``."""
    P, E = (torch.from_numpy(x) for x in chain())
    state = torch.randint(2, (count,), generator=generator)
    seen = []
    for _ in range(LENGTH):
        seen.append(torch.multinomial(E[state], 1, generator=generator)[:, 0])
        state = torch.multinomial(P[state], 1, generator=generator)[:, 0]
    return torch.stack(seen, 1)


def exact(symbols: Tensor) -> Tensor:
    """P(next symbol | symbols so far) by the library's filter, ``(series, LENGTH − 1, 3)``."""
    P, E = chain()
    logs = np.log(E)
    # The larger root of c − ½‖log E_i + c‖² = level, a level that all modes can reach.
    total, square = logs.sum(1) - 1, (logs**2).sum(1)
    level = (total**2 / 6 - square / 2).min()
    c = (-total + np.sqrt(np.maximum(total**2 - 3 * (square + 2 * level), 0))) / 3
    model = SwitchingLinearGaussian(
        transition=P,
        dynamics=[[0.0]],
        process_noise=[[1.0]],
        observation=np.zeros((3, 1)),
        observation_noise=np.eye(3),
        observation_offset=logs + c[:, None],
        initial_mean=[0.0],
        initial_covariance=[[1.0]],
        initial_probability=[0.5, 0.5],
        start="first",
    )
    said = model.filter(one_hot(symbols, 3).double().numpy()).predicted_mode_probability
    return torch.from_numpy(np.asarray(said)[:, 1:] @ E)


def divergence(truth: Tensor, said: Tensor) -> float:
    """Mean divergence in bits of log-probabilities from true ones."""
    return float((truth * (truth.log() - said)).sum(-1).mean()) / math.log(2)


class Model(nn.Module):
    """Two layers that predict the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(3, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, symbols: Tensor) -> Tensor:
        """Scores of the next symbol at every place, ``(series, n, 3)``."""
        n = symbols.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        scores: Tensor = self.out(self.body(self.symbol(symbols) + self.place[:n], mask=mask, is_causal=True))
        return scores


def predicted(model: nn.Module, symbols: Tensor) -> Tensor:
    """log P(next symbol | symbols so far) by a model."""
    with torch.no_grad():
        said: Tensor = model(symbols[:, :-1]).double().log_softmax(-1)
    return said


def models() -> tuple[nn.Module, nn.Module, History]:
    """The trained model, the model before training, and the history of its training."""
    model, history = trained(Model, KEPT)
    return model, drawn(Model), history
