"""SimCLR in miniature: a network learns that two noisy views of a thing belong together, and finds a circle.

Each item is an angle. A view is a picture of a hand of a clock at that angle, 16 × 16 pixels, moved about and
covered with noise. The network never sees the angle; NT-Xent alone arranges its embedding on the sphere.

    python examples/contrastive_embedding.py [--out FILE.png] [--steps 300]
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import exptilt as xt
from exptilt.losses.diagnose import Diagnosis

SIZE, BATCH = 16, 256


def pictures(angle: Tensor, generator: torch.Generator) -> Tensor:
    """A view of each angle: (..., 256) pixels of a bright hand, its centre moved, with noise."""
    grid = torch.linspace(-1, 1, SIZE)
    centre = 0.15 * torch.randn(*angle.shape, 2, 1, 1, generator=generator)
    y, x = grid[:, None] - centre[..., 0, :, :], grid - centre[..., 1, :, :]
    cos, sin = angle.cos()[..., None, None], angle.sin()[..., None, None]
    along, across = x * cos + y * sin, y * cos - x * sin
    light = torch.exp(-((across / 0.15) ** 2)) * ((along > 0) & (along < 0.9))
    return (light + 0.3 * torch.randn(light.shape, generator=generator)).flatten(-2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="draw the embedding before and after to this file")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    encoder = torch.nn.Sequential(
        torch.nn.Linear(SIZE * SIZE, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 3),
    )
    log_temperature = torch.tensor(math.log(0.2), requires_grad=True)
    optimizer = torch.optim.AdamW([*encoder.parameters(), log_temperature], lr=2e-3)
    held_out = 2 * math.pi * torch.rand(512, generator=generator)
    first, second = pictures(held_out.expand(2, -1), generator)

    def look() -> tuple[Tensor, Diagnosis]:
        with torch.no_grad():
            a, b = encoder(first), encoder(second)
            return F.normalize(a, dim=-1), xt.losses.diagnose(a, b, temperature=log_temperature.exp())

    before, at_start = look()
    print("before:", at_start)
    for _ in range(arguments.steps):
        angle = 2 * math.pi * torch.rand(BATCH, generator=generator)
        views = encoder(pictures(angle.expand(2, -1), generator))
        loss = xt.losses.nt_xent(views, temperature=log_temperature.exp().clamp(min=0.05))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after, at_end = look()
    print("after: ", at_end)
    if arguments.out:
        draw(before, after, held_out, arguments.out)


def draw(before: Tensor, after: Tensor, angle: Tensor, path: Path) -> None:
    from exptilt._support.plotting import new_figure

    with new_figure(8.0, 4.0) as figure:
        for place, (title, z) in enumerate((("Before training", before), ("After training", after))):
            axes = figure.add_subplot(1, 2, place + 1, projection="3d")
            axes.scatter(*z.T.tolist(), c=angle.tolist(), cmap="twilight", s=8)
            axes.set(title=title, xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
            axes.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1), zticks=(-1, 0, 1))
            axes.set_box_aspect((1, 1, 1))
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
