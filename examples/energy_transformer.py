"""An energy-based transformer: digits are completed by going downhill, and training goes through the descent.

The model gives an image one number, its energy E(x). The upper half of a digit is known; the lower half y is
found by a few steps

    y ← y − a ∂E/∂y,

and the weights are trained so that the descent ends at the true half (Gladstone et al. 2025). The gradient of
that loss is a second derivative of the model, through attention, which fused kernels refuse. Here attention
is `xt.attend` itself, with dropout: the same seed drops the same weights in every derivative.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import exptilt as xt
from exptilt._support.plotting import new_figure
from exptilt._support.progress import track


class Energy(nn.Module):
    """The energy of images as tokens ``(batch, token, 4)``: one number each."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2, dropout: float = 0.05) -> None:
        super().__init__()
        self.heads, self.dropout, self.step = heads, dropout, nn.Parameter(torch.tensor(1.0))
        self.read, self.place = nn.Linear(4, width), nn.Linear(2, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.write = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, seed: int = 0, backend: str | None = None) -> Tensor:
        """Energies ``(batch,)``; the seed says which weights of attention are dropped while training."""
        side = math.ceil(x.shape[1] ** 0.5)
        at = torch.linspace(-1, 1, side, device=x.device)
        h = self.read(x) + torch.sin(4 * self.place(torch.cartesian_prod(at, at)[: x.shape[1]]))
        for layer, (qkv, mix, mlp) in enumerate(zip(self.qkv, self.mix, self.mlp, strict=True)):
            y = qkv(F.layer_norm(h, h.shape[-1:]))
            q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in y.chunk(3, -1))
            rate = self.dropout if self.training else 0.0
            o = xt.attend(q, k, v, dropout=rate, seed=seed + layer, backend=backend).output
            h = h + mix(o.transpose(1, 2).flatten(2))
            h = h + mlp(F.layer_norm(h, h.shape[-1:]))
        return self.write(h).sum((1, 2))


def complete(model: nn.Module, known: Tensor, steps: int = 2, *, seed: int = 0, **how: str) -> list[Tensor]:
    """The unknown tokens after each step downhill, from zero; differentiable by the weights."""
    y = torch.zeros_like(known).requires_grad_()
    found = []
    for _ in range(steps):
        energy = model(torch.cat([known, y], 1), seed, **how).sum()
        y = y - model.step * torch.autograd.grad(energy, y, create_graph=True)[0]
        found.append(y)
    return found


def loss(model: nn.Module, known: Tensor, true: Tensor, *, seed: int = 0, **how: str) -> Tensor:
    """Mean squared error after every step."""
    return torch.stack([(y - true).square().mean() for y in complete(model, known, seed=seed, **how)]).mean()


def patches(images: Tensor) -> Tensor:
    """Images ``(batch, 8, 8)`` as 16 tokens of 2 × 2 pixels, row by row."""
    return images.unflatten(2, (4, 2)).unflatten(1, (4, 2)).transpose(2, 3).flatten(3).flatten(1, 2)


def images(tokens: Tensor) -> Tensor:
    """The inverse of `patches`."""
    return tokens.reshape(-1, 4, 4, 2, 2).transpose(2, 3).reshape(-1, 8, 8)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--picture", type=Path, help="where to draw completed digits, such as digits.png")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    tokens = patches(torch.tensor(load_digits().images).float() / 8 - 1)
    tokens = tokens[torch.randperm(len(tokens))]
    (known, true), (fresh, wanted) = ((x[:, :8], x[:, 8:]) for x in (tokens[:1500], tokens[1500:]))
    model = Energy()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=arguments.steps + 1)

    def error() -> float:
        model.eval()
        found = (complete(model, fresh)[-1] - wanted).square().mean().item()
        model.train()
        return found

    before = error()
    for step in track(range(arguments.steps), "training"):
        at = torch.randint(len(known), (64,))
        value = loss(model, known[at], true[at], seed=2 * step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    after = error()
    plain = (true.mean(0) - wanted).square().mean().item()
    print(f"held-out squared error of the lower half: {before:.3f} -> {after:.3f} (mean image: {plain:.3f})")
    if arguments.picture:
        model.eval()
        ways = complete(model, fresh[:10])
        shown = [torch.zeros_like(wanted[:10]) - 1, *(y.detach() for y in ways), wanted[:10]]
        names = ["known", *(f"step {k + 1}" for k in range(len(ways))), "true"]
        with new_figure(7.6, 3.1) as figure:
            for row, (lower, name) in enumerate(zip(shown, names, strict=True)):
                for column, image in enumerate(images(torch.cat([fresh[:10], lower], 1))):
                    axes = figure.add_subplot(len(shown), 10, 10 * row + column + 1)
                    axes.imshow(image, cmap="gray_r", vmin=-1, vmax=1)
                    axes.set(xticks=[], yticks=[])
                    if column == 0:
                        axes.set_ylabel(name, fontsize=8)
            figure.savefig(arguments.picture, dpi=110)
    return before - after


if __name__ == "__main__":
    main()
