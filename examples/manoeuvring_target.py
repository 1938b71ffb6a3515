"""A target that flies straight, turns left, flies straight and turns right, tracked online by an IMM filter
of three coordinated-turn modes; writes the picture of docs/tracking.md.

State: (x, velocity in x, y, velocity in y), seen as positions with noise. Run:
python examples/manoeuvring_target.py [FILE.png]
"""

import sys

import numpy as np

from exptilt._support.plotting import new_figure
from exptilt.switching import SwitchingLinearGaussian

RATES = (0.0, 0.12, -0.12)  # turn rates of the modes, radians a step
NAMES = ("straight", "left", "right")


def turn(rate: float) -> np.ndarray:
    """The matrix of a coordinated turn of one step."""
    s, c = np.sin(rate), np.cos(rate)
    a, b = (s / rate, (1 - c) / rate) if rate else (1.0, 0.0)
    return np.array([[1, a, 0, -b], [0, c, 0, -s], [0, b, 1, a], [0, s, 0, c]])


def make() -> SwitchingLinearGaussian:
    """Three modes that keep on for 20 steps on average."""
    G = np.kron(np.eye(2), [[0.5], [1.0]])
    return SwitchingLinearGaussian(
        transition=np.full((3, 3), 0.025) + 0.925 * np.eye(3),
        dynamics=np.stack([turn(rate) for rate in RATES]),
        process_noise=0.01 * G @ G.T,
        observation=[[1.0, 0, 0, 0], [0, 0, 1.0, 0]],
        observation_noise=4.0 * np.eye(2),
        initial_mean=[0.0, 2.0, 0.0, 0.0],
        initial_covariance=np.diag([4.0, 1.0, 4.0, 1.0]),
        initial_probability=[1 / 3] * 3,
    )


def flight(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Modes (T,), true states (T, 4) and measurements (T, 2)."""
    rng = np.random.default_rng(seed)
    modes = np.repeat([0, 1, 0, 2, 0], [30, 26, 25, 26, 20])
    x, states = np.array([0.0, 3.0, 0.0, 0.0]), []
    for mode in modes:
        x = turn(RATES[mode]) @ x
        states.append(x)
    track = np.array(states)
    return modes, track, track[:, [0, 2]] + 2.0 * rng.normal(size=(len(modes), 2))


def main() -> None:
    modes, track, seen = flight()
    state, means, probabilities = make().online(method="imm"), [], []
    for y in seen:
        state = state.step(y)
        means.append(state.mean)
        probabilities.append(state.mode_probability)
    mean, probability = np.array(means), np.array(probabilities)
    error = np.linalg.norm(mean[:, [0, 2]] - track[:, [0, 2]], axis=1)
    raw = np.linalg.norm(seen - track[:, [0, 2]], axis=1)
    print(f"mean error {error[10:].mean():.2f}, of the measurements {raw[10:].mean():.2f}")
    print(f"right mode likeliest in {(probability.argmax(1) == modes)[10:].mean():.0%} of the steps")
    with new_figure(9.0, 4.2) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.3))
        left.plot(*seen.T, ".", color="#888888", markersize=3, label="measured")
        left.plot(track[:, 0], track[:, 2], color="#222222", linewidth=1, label="true")
        left.plot(mean[:, 0], mean[:, 2], color="#d95f02", linewidth=1.5, label="filtered")
        left.set_aspect("equal")
        left.set_xlabel("x")
        left.set_ylabel("y")
        left.legend(loc="center")
        right.stackplot(
            np.arange(len(modes)), probability.T, labels=NAMES, colors=("#cfcfcf", "#1b9e77", "#7570b3")
        )
        for k in np.flatnonzero(np.diff(modes)) + 1:
            right.axvline(k, color="#222222", linewidth=0.8, linestyle=":")
        right.set_xlabel("step (dotted: the true changes)")
        right.set_ylabel("P(mode | what was seen so far)")
        right.set_xlim(0, len(modes) - 1)
        right.set_ylim(0, 1)
        right.legend(frameon=True, loc="lower left", facecolor="white", framealpha=0.95)
        figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "manoeuvring_target.png", dpi=110)


if __name__ == "__main__":
    main()
