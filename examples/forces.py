"""Forces as gradients of an energy: a network that learns the Lennard-Jones potential of small clusters.

The energy is a sum over atoms. An atom i sees the others through attention with scores −g |x_i − x_j|², one
width g a head, which is a product of coordinates and a weight of each key,

    −g |x_i − x_j|² = 2g ⟨x_i, x_j⟩ − g |x_j|² − g |x_i|²,

so nothing of size n×n is made. The log-normalizer G_i − g |x_i|² = log Σ_j e^{−g |x_i − x_j|²} says how many
neighbours are how near, and does not change when the cluster is turned or moved; what the atoms tell each
other is a mean of their features under the same weights. Forces are −∂E/∂x, exact, so the energy is
conserved; training on them takes a second derivative through attention and through its log-normalizer.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import exptilt as xt
from exptilt._support.plotting import COLOURS, caption, new_figure
from exptilt._support.progress import track

ATOMS = 7


class Potential(nn.Module):
    """Energies ``(batch,)`` of atoms ``(batch, atom, 3)``."""

    def __init__(self, heads: int = 12, width: int = 48) -> None:
        super().__init__()
        self.log_g = nn.Parameter(torch.linspace(-1.5, 3.0, heads))
        self.first = nn.Sequential(nn.Linear(heads, width), nn.SiLU(), nn.Linear(width, width), nn.Tanh())
        self.last = nn.Sequential(
            nn.Linear(heads + heads * 8, 2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )
        self.tell = nn.Linear(width, 8)

    def forward(self, x: Tensor, backend: str | None = None) -> Tensor:
        """The energy, which does not change when all atoms are turned or moved."""
        x = x - x.mean(1, keepdim=True)
        g = self.log_g.exp()[:, None, None]
        size = g[..., 0] * x.square().sum(-1)[:, None]  # g |x|², by head and atom
        q, k = 2 * g * x[:, None], x[:, None].expand(-1, len(g), -1, -1)

        def seen(values: Tensor) -> tuple[Tensor, Tensor]:
            v = values[:, None].expand(-1, len(g), -1, -1)
            a = xt.attend(q, k, v, scale=1.0, log_weight=-size, backend=backend)
            return a.output, (a.log_normalizer - size).transpose(1, 2)

        near = seen(x[..., :1])[1]
        told, near = seen(self.tell(self.first(near)))
        return self.last(torch.cat([near, told.transpose(1, 2).flatten(2)], -1)).sum((1, 2))


def forces(model: nn.Module, x: Tensor, **how: str) -> tuple[Tensor, Tensor]:
    """Energy and forces, both differentiable by the weights."""
    x = x.requires_grad_()
    energy = model(x, **how)
    return energy, -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def loss(model: nn.Module, x: Tensor, energy: Tensor, force: Tensor, **how: str) -> Tensor:
    """Squared errors of energies an atom and of forces."""
    e, f = forces(model, x, **how)
    return ((e - energy) / x.shape[1]).square().mean() + (f - force).square().mean()


def lennard_jones(x: Tensor) -> Tensor:
    """The true energy, Σ 4 (r⁻¹² − r⁻⁶) over pairs."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)
    r6 = (x[:, i] - x[:, j]).square().sum(-1).pow(-3)
    return (4 * r6 * (r6 - 1)).sum(-1)


def simulate(chains: int, frames: int, temperature: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
    """Positions ``(chain, frame, atom, 3)`` of clusters in a heat bath, their energies and forces."""

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: lennard_jones(y).sum())(x)

    x = 1.3 * torch.randn(chains, ATOMS, 3)
    for step in range(600):  # downhill first: random places are far too near each other
        g = slope(x) + 0.1 * x
        x = x - g * (0.02 / g.norm(dim=-1, keepdim=True).clamp(min=2.0)) * (1 - step / 700)
    kept = []
    for step in range(40 * frames):
        noise = (2 * temperature * 5e-4) ** 0.5 * torch.randn_like(x)
        x = x - 5e-4 * (slope(x) + 0.1 * (x - x.mean(1, keepdim=True))) + noise
        kept += [x] if step % 40 == 39 else []
    y = torch.stack(kept, 1)
    flat = y.flatten(0, 1)
    return y, lennard_jones(flat).view(chains, frames), -slope(flat).view_as(y)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--picture", type=Path, help="where to draw forces, such as forces.png")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    x, energy, force = simulate(128, 30)
    train, held = slice(0, 112), slice(112, None)  # other clusters, not other moments of the same
    middle = energy[train].mean()
    (x, energy, force), (y, e, f) = (
        [z[part].flatten(0, 1) for z in (x, energy - middle, force)] for part in (train, held)
    )
    model = Potential()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=arguments.steps + 1)

    def errors() -> tuple[float, float]:
        guess, push = forces(model, y)
        return (guess - e).abs().mean().item() / ATOMS, (push - f).abs().mean().item()

    before = errors()
    for _ in track(range(arguments.steps), "training"):
        at = torch.randint(len(x), (32,))
        value = loss(model, x[at], energy[at], force[at])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    after = errors()
    size = f.abs().mean().item()
    print(
        f"held-out clusters: error of forces {before[1]:.3f} -> {after[1]:.3f} (their mean size: {size:.3f})"
    )
    print(f"error of energies, an atom: {before[0]:.3f} -> {after[0]:.3f}")
    if arguments.picture:
        push = forces(model, y)[1].detach()
        with new_figure(4.2, 3.6) as figure:
            axes = figure.add_subplot()
            axes.plot([-40, 40], [-40, 40], color="0.7", linewidth=0.8)
            axes.plot(f.flatten(), push.flatten(), ".", color=COLOURS[0], markersize=2, alpha=0.4)
            caption(axes, "Forces on atoms of held-out clusters", "Lennard-Jones", "gradient of the network")
            axes.set(xlim=(-30, 30), ylim=(-30, 30))
            figure.savefig(arguments.picture, dpi=110)
    return before[1] - after[1]


if __name__ == "__main__":
    main()
