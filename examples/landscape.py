"""The idea at a glance: the landscape of G in two dimensions, and where its ascent leads under each norm.

Contours are G(η) = log Σ e^{β<x_n,η>} of the points where they begin, arrows its gradient, which is
attention. Points take steps η ← RN(η + ∇G(η)), each of them a pattern of the others. Writes
docs/images/landscape-flows.png.
"""

from pathlib import Path

import torch

import exptilt as xt
from exptilt._support.plotting import COLOURS, new_figure

TITLES = {
    None: "no norm: they run off",
    "sphere": "sphere: one point",
    "batch": "batch norm: two",
    "whiten": "whitening: D + 1 = 3",
}
BETA, SIZE = 1.0, 0.15


def main(path: Path = Path(__file__).parents[1] / "docs" / "images" / "landscape-flows.png") -> None:
    start = torch.randn(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    with new_figure(12.0, 3.4) as figure:
        for axes, (kind, title) in zip(figure.subplots(1, 4), TITLES.items(), strict=True):
            flow = xt.dynamics.Flow(kind, beta=BETA, step=SIZE)
            begin = flow(start) if kind else start
            states = flow.run(begin, 12 if kind is None else 400, measure_every=None, progress=False).states
            reach = 4.2 if kind is None else 1.7 if kind == "sphere" else 2.6
            line = torch.linspace(-reach, reach, 80, dtype=torch.float64)
            grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
            h = xt.Empirical(begin)
            G, slope = h.log_normalizer(BETA * grid), h.mean(BETA * grid[4::8, 4::8])
            axes.contourf(line, line, G, levels=18, cmap="Blues", alpha=0.75)
            axes.quiver(
                line[4::8], line[4::8], slope[..., 0], slope[..., 1], color="0.35", width=0.004, alpha=0.7
            )
            axes.plot(states[:, :, 0], states[:, :, 1], color=COLOURS[1], linewidth=0.7, alpha=0.5)
            axes.scatter(*states[0].T, s=8, color="white", edgecolors="0.3", linewidths=0.6, zorder=3)
            axes.scatter(*states[-1].T, s=26, color=COLOURS[1], edgecolors="white", linewidths=0.5, zorder=4)
            axes.set(
                xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=[], yticks=[], title=title
            )
            axes.grid(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
