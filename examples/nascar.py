"""Laps on an oval whose driver turns where the track ends: the NASCAR task of recurrent switching models.

Linderman et al. (2017) made it to show modes that the state picks: two straights and two turns, each a linear
system in the plane; which of them comes next depends on where the car is. Ten noisy numbers are seen of the
two coordinates. A model whose chain does not know where the car is sees the same track, but cannot say where
a straight ends. Run: python examples/nascar.py [picture.png]
"""

import sys

import numpy as np
import torch

from exptilt.switching import SwitchingLinearGaussian
from exptilt.switching.nonlinear import RecurrentSwitching

NAMES = ("right turn", "left turn", "upper straight", "lower straight")


def track(sharp: float = 8.0, seen: int = 10) -> RecurrentSwitching:
    """The model: rotations about (2, 0) and (−2, 0) beyond them, straights to the right and to the left."""

    def turn(angle: float) -> np.ndarray:
        return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])

    dynamics = np.stack([turn(-np.pi / 24), turn(-np.pi / 24), np.eye(2), np.eye(2)])
    centers = np.array([[2.0, 0.0], [-2.0, 0.0]])
    offset = np.concatenate(
        [centers - np.einsum("kab,kb->ka", dynamics[:2], centers), [[0.13, 0], [-0.13, 0]]]
    )
    score = sharp * np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    weight = np.exp(sharp * np.array([-2.0, -2.0, 0.0, 0.0]))  # a turn where |x| − 2 exceeds |y|
    modes = SwitchingLinearGaussian(
        transition=np.tile(weight / weight.sum(), (4, 1)),
        dynamics=dynamics,
        dynamics_offset=offset,
        process_noise=1e-4 * np.eye(2),
        observation=np.random.default_rng(0).normal(size=(seen, 2)),
        observation_noise=0.3**2 * np.eye(seen),
        initial_mean=[0.0, 1.0],
        initial_covariance=0.01 * np.eye(2),
        initial_probability=[0.0, 0.0, 1.0, 0.0],
    )
    return RecurrentSwitching(model=modes, recurrence=score)


def main() -> None:
    own = track()
    draw = own.sample(400, generator=torch.Generator().manual_seed(0))
    pairs = np.stack([draw.modes[:-1], draw.modes[1:]], 1)
    counts = np.ones((4, 4)) * 0.1
    np.add.at(counts, tuple(pairs.T), 1.0)
    blind = own.model.replace(transition=counts / counts.sum(1, keepdims=True))  # as often as it happened
    for name, model in (("recurrent", own), ("its chain alone", blind)):
        post, back = model.filter(draw.y), model.smooth(draw.y)
        error = np.sqrt(((back.mean - draw.states) ** 2).sum(1).mean())
        right = (back.mode_probability.argmax(1) == draw.modes).mean()
        if model is own:
            path = back.mode_probability.argmax(1)
        print(
            f"{name}: log-likelihood {post.log_likelihood:.0f}, modes right {100 * right:.0f} %, "
            f"position off by {error:.3f}"
        )
    if len(sys.argv) > 1:
        picture(own, draw.states, path, sys.argv[1])


def picture(own: RecurrentSwitching, states: np.ndarray, path: np.ndarray, file: str) -> None:
    """Draw the smoothed modes along the track, and laps that the model draws by itself."""
    import matplotlib.pyplot as plt

    free = own.sample(400, generator=torch.Generator().manual_seed(1))
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharex=True, sharey=True, layout="constrained")
    shown = (("smoothed from ten noisy numbers a step", states, path), ("drawn", free.states, free.modes))
    for axis, (title, points, modes) in zip(axes, shown, strict=True):
        axis.plot(*points.T, color="0.85", linewidth=1, zorder=0)
        for k, name in enumerate(NAMES):
            axis.scatter(*points[modes == k].T, s=9, label=name)
        axis.set(title=title, xlabel="x", aspect="equal")
    axes[0].set_ylabel("y")
    axes[1].legend(loc="center", frameon=False, fontsize=8)
    figure.savefig(file, dpi=140)


if __name__ == "__main__":
    main()
