"""A target that flies straight, turns, and flies straight again, seen by range and bearing; the bearing
passes from π to −π on the way.

State: position (2), heading, turn rate, speed. Two modes: straight (turn rate ignored) and turning. Run:
python examples/turning_target.py
"""

import numpy as np
import torch

from exptilt.switching import SwitchingNonlinear


def move(x: torch.Tensor, turning: bool) -> torch.Tensor:
    heading = x[..., 2] + (x[..., 3] if turning else 0.0)
    return torch.stack(
        [
            x[..., 0] + x[..., 4] * torch.cos(heading),
            x[..., 1] + x[..., 4] * torch.sin(heading),
            heading,
            x[..., 3],
            x[..., 4],
        ],
        -1,
    )


def look(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.hypot(x[..., 0], x[..., 1]), torch.atan2(x[..., 1], x[..., 0])], -1)


def flight(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """True positions and noisy range–bearing measurements; a turn from step 20 to 50."""
    rng = np.random.default_rng(seed)
    place, heading, track = np.array([-10.0, 5.0]), -np.pi / 2, []
    for t in range(60):
        heading += 0.15 if 20 <= t < 50 else 0.0
        place = place + np.array([np.cos(heading), np.sin(heading)])
        track.append(place)
    positions = np.array(track)
    seen = np.stack([np.hypot(*positions.T), np.arctan2(positions[:, 1], positions[:, 0])], 1) + rng.normal(
        size=(60, 2)
    ) * [0.1, 0.01]
    seen[:, 1] = np.angle(np.exp(1j * seen[:, 1]))
    return positions, seen


def main() -> None:
    positions, seen = flight()
    model = SwitchingNonlinear(
        transition=[[0.95, 0.05], [0.1, 0.9]],
        dynamics=[lambda x: move(x, False), lambda x: move(x, True)],
        process_noise=np.diag([1e-3, 1e-3, 1e-4, 1e-4, 1e-4]),
        observation=look,
        observation_noise=np.diag([0.01, 1e-4]),
        initial_mean=[-10.0, 5.0, -np.pi / 2, 0.15, 1.0],
        initial_covariance=np.diag([0.5, 0.5, 0.05, 0.01, 0.05]),
        initial_probability=[0.5, 0.5],
        angles=(2,),
        observation_angles=(1,),
    )
    for kind in ("extended", "unscented"):
        post = model.filter(seen, linearize=kind)
        error = np.linalg.norm(post.mean[:, :2] - positions, axis=1)
        turn = post.mode_probability[28:48, 1].mean()
        print(
            f"{kind}: mean error {error[5:].mean():.3f}, worst {error[5:].max():.3f}; "
            f"P(turning) during the turn {turn:.2f}"
        )


if __name__ == "__main__":
    main()
