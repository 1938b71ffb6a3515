"""A small MeanFlow model: sets of points drawn in one step, by a transformer whose loss needs a jvp.

Noise e becomes data x along z_t = (1 − t) x + t e, with velocity v = e − x. A MeanFlow model learns the mean
velocity u over [r, t], which obeys

    u(z, r, t) = v − (t − r) du/dt,      du/dt = ∂_z u · v + ∂_t u,

so that z_0 = z_1 − u(z_1, 0, 1) is one step from noise to data. The right-hand side is a forward derivative
of the model along (v, 0, 1): through attention, which fused kernels refuse, and `xt.differentiable` gives.
The data are regular polygons of 8 points at a random angle: points must attend to each other to draw one.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import jvp

import exptilt as xt
from exptilt._support.plotting import COLOURS, new_figure

POINTS = 8


class Velocity(nn.Module):
    """u(z, r, t) of a set of points ``(batch, point, 2)`` and two times ``(batch,)``."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(2, width), nn.Linear(width, 2)
        self.clock = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.place = nn.Parameter(0.5 * torch.randn(POINTS, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """The mean velocity, of the shape of z."""
        times = self.clock(torch.stack([t, t - r], -1))[:, None]
        return self.write(self.blocks(self.read(z) + times + self.place))


def polygons(count: int, generator: torch.Generator) -> Tensor:
    """Regular polygons on the unit circle, ``(count, POINTS, 2)``."""
    angle = 2 * torch.pi * (torch.rand(count, 1, generator=generator) + torch.arange(POINTS) / POINTS)
    return torch.stack([angle.cos(), angle.sin()], -1)


def loss(model: nn.Module, x: Tensor, generator: torch.Generator) -> Tensor:
    """Squared distance from the mean velocity's own equation."""
    e = torch.randn(x.shape, generator=generator)
    times = torch.rand(2, len(x), generator=generator)
    r, t = times.amin(0), times.amax(0)
    same = torch.rand(len(x), generator=generator) < 0.5  # there u is v itself
    r = torch.where(same, t, r)
    z, v = (1 - t)[:, None, None] * x + t[:, None, None] * e, e - x
    u, along = jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = (v - (t - r)[:, None, None] * along).detach()
    apart = (u - target).square().mean((1, 2))
    return (apart / (apart.detach() + 0.05)).mean()  # all samples count alike, however hard


def draw(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
    """Sets of points in one step from noise."""
    start = torch.randn(count, POINTS, 2, generator=generator)
    with torch.no_grad():
        return start - model(start, torch.zeros(count), torch.ones(count))


def errors(samples: Tensor) -> tuple[float, float]:
    """Mean distance from the circle, and of the angles between neighbours from a regular polygon's."""
    radius = samples.norm(dim=-1)
    angle = torch.atan2(samples[..., 1], samples[..., 0])
    gap = torch.remainder(angle.roll(-1, 1) - angle, 2 * torch.pi)
    return float((radius - 1).abs().mean()), float((gap - 2 * torch.pi / POINTS).abs().mean())


def picture(samples: Tensor, data: Tensor, path: Path) -> None:
    """Polygons that were drawn, beside true ones."""
    with new_figure(6.4, 3.4) as figure:
        for place, (title, sets) in enumerate((("data", data), ("one step from noise", samples))):
            axes = figure.add_subplot(1, 2, place + 1)
            for colour, points in zip(COLOURS, sets[:5], strict=False):
                closed = torch.cat([points, points[:1]])
                axes.plot(closed[:, 0], closed[:, 1], "o-", color=colour, markersize=3, linewidth=0.9)
            axes.set(title=title, aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
        figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--picture", type=Path, help="where to draw samples, such as samples.png")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Velocity()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    with xt.differentiable(model):
        for step in range(1, arguments.steps + 1):
            value = loss(model, polygons(128, generator), generator)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
            if step % max(1, arguments.steps // 5) == 0:
                radius, gap = errors(draw(model, 256, generator))
                print(
                    f"step {step:5d}  loss {value.item():.3f}  from the circle {radius:.3f}  angles {gap:.3f}"
                )
    if arguments.picture:
        picture(draw(model, 5, generator), polygons(5, generator), arguments.picture)
        print(f"Drew {arguments.picture}")


if __name__ == "__main__":
    main()
