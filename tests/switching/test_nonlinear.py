"""Nonlinear modes: linear functions give the linear filters, angles go round, a turning target is caught."""

import numpy as np
import pytest
import torch

from exptilt.switching import SwitchingNonlinear
from oracles.switching_models import random_data, random_model


def as_functions(model):
    W, H = torch.tensor(model.dynamics), torch.tensor(model.observation)
    c, d = torch.tensor(model.dynamics_offset), torch.tensor(model.observation_offset)
    names = (
        "transition",
        "process_noise",
        "observation_noise",
        "initial_mean",
        "initial_covariance",
        "initial_probability",
        "start",
    )
    return SwitchingNonlinear(
        dynamics=[lambda x, k=k: x @ W[k].T + c[k] for k in range(len(W))],
        observation=[lambda x, k=k: x @ H[k].T + d[k] for k in range(len(W))],
        **{name: getattr(model, name) for name in names},
    )


@pytest.mark.parametrize("method", ["imm", "gpb2", "gpb1"])
@pytest.mark.parametrize("linearize", ["extended", "unscented"])
@pytest.mark.parametrize("start", ["before", "first"])
def test_linear_functions_are_the_linear_model(method, linearize, start):
    rng = np.random.default_rng(0)
    model = random_model(rng, 2, 2, 2, start=start)
    y = random_data(rng, 12, 2)
    y[3] = np.nan
    want, got = (
        model.filter(y, method=method),
        as_functions(model).filter(y, method=method, linearize=linearize),
    )
    assert got.log_likelihood == pytest.approx(want.log_likelihood, abs=1e-9)
    np.testing.assert_allclose(got.mean, want.mean, atol=1e-9)
    np.testing.assert_allclose(got.covariance, want.covariance, atol=1e-8)
    np.testing.assert_allclose(got.mode_probability, want.mode_probability, atol=1e-9)


def turning():
    """State (x, y, heading, turn rate, speed) in a straight and a turning mode, seen as range and bearing."""

    def move(x, turn):
        rate = x[..., 3] if turn else torch.zeros_like(x[..., 3])
        heading = x[..., 2] + rate
        steps = x[..., 4] * torch.cos(heading), x[..., 4] * torch.sin(heading)
        return torch.stack([x[..., 0] + steps[0], x[..., 1] + steps[1], heading, x[..., 3], x[..., 4]], -1)

    def look(x):
        return torch.stack([torch.hypot(x[..., 0], x[..., 1]), torch.atan2(x[..., 1], x[..., 0])], -1)

    return SwitchingNonlinear(
        transition=[[0.95, 0.05], [0.1, 0.9]],
        dynamics=[lambda x: move(x, False), lambda x: move(x, True)],
        process_noise=np.diag([1e-3, 1e-3, 1e-4, 1e-4, 1e-4]),
        observation=look,
        observation_noise=np.diag([0.01, 1e-4]),
        initial_mean=[-10.0, 0.0, np.pi, 0.15, 1.0],
        initial_covariance=np.diag([0.5, 0.5, 0.05, 0.01, 0.05]),
        initial_probability=[0.5, 0.5],
        angles=(2,),
        observation_angles=(1,),
    )


@pytest.mark.parametrize("linearize", ["extended", "unscented"])
def test_a_turning_target_that_passes_behind(linearize):
    """It flies away along the line where bearing and heading jump between π and −π, which must not be seen as
    jumps.
    """
    rng = np.random.default_rng(1)
    place, heading, track, bearing = np.array([-10.0, 0.0]), np.pi, [], []
    for t in range(60):
        heading += 0.15 if 20 <= t < 50 else 0.0
        place = place + np.array([np.cos(heading), np.sin(heading)])
        track.append(place.copy())
        bearing.append([np.hypot(*place), np.arctan2(place[1], place[0])])
    y = np.array(bearing) + rng.normal(size=(60, 2)) * [0.1, 0.01]
    y[:, 1] = np.angle(np.exp(1j * y[:, 1]))
    assert (np.abs(np.diff(y[:, 1])) > 3).sum() > 3  # it does go round, more than once
    post = turning().filter(y, linearize=linearize)
    error = np.linalg.norm(post.mean[:, :2] - track, axis=1)
    assert error[5:].max() < 1.0
    assert post.mode_probability[28:48, 1].mean() > 0.8
    assert np.linalg.eigvalsh(post.covariance).min() > 0


def test_what_is_refused():
    with pytest.raises(ValueError, match="method is 'exact'"):
        turning().filter(np.zeros((3, 2)), method="exact")
    with pytest.raises(ValueError, match="linearize is 'cubature'"):
        turning().filter(np.zeros((3, 2)), linearize="cubature")
    with pytest.raises(ValueError, match="pass 2 functions"):
        SwitchingNonlinear(
            transition=np.eye(2),
            dynamics=[lambda x: x],
            process_noise=np.eye(1),
            observation=lambda x: x,
            observation_noise=np.eye(1),
            initial_mean=[0.0],
            initial_covariance=np.eye(1),
            initial_probability=[0.5, 0.5],
        )


def plain_options(**changes):
    options = {
        "transition": np.eye(2),
        "dynamics": [lambda x: x, lambda x: x],
        "process_noise": np.eye(2),
        "observation": lambda x: x[..., :1],
        "observation_noise": np.eye(1),
        "initial_mean": [0.0, 0.0],
        "initial_covariance": np.eye(2),
        "initial_probability": [0.5, 0.5],
    }
    return options | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"initial_mean": 0.0}, "SwitchingNonlinear: initial_mean has shape"),
        ({"process_noise": 1.0}, "SwitchingNonlinear: process_noise has shape"),
        ({"transition": 1.0}, "SwitchingNonlinear: transition is"),
        ({"transition": [[0.9, 0.2], [0.5, 0.5]]}, "SwitchingNonlinear: row 0 of transition sums to 1.1"),
        ({"process_noise": -np.eye(2)}, "SwitchingNonlinear: process_noise of mode 0 is not positive"),
        ({"process_noise": 1j * np.eye(2)}, "SwitchingNonlinear: process_noise is complex"),
        ({"angles": (2,)}, "angles is .*from 0 to 1"),
        ({"observation": lambda x: x}, "observation of mode 0 gives"),
        ({"dynamics": [lambda x: x, lambda x: x[:1]]}, "dynamics of mode 1 gives"),
        ({"observation": lambda x: x[3]}, "observation of mode 0 fails for states of shape"),
    ],
)
def test_models_that_cannot_be(changes, words):
    SwitchingNonlinear(**plain_options())
    with pytest.raises(ValueError, match=words):
        SwitchingNonlinear(**plain_options(**changes))


def test_observations_far_better_than_the_prior():
    """Joseph's form: where the covariance is a difference of large matrices it is no longer one."""
    model = SwitchingNonlinear(
        **plain_options(
            observation=lambda x: 0.3 * x[..., :1] + 0.7 * x[..., 1:],
            observation_noise=[[1e-9]],
            initial_covariance=[[1e8, 3e7], [3e7, 1e8]],
            process_noise=1e-16 * np.eye(2),
        )
    )
    y = 1e-5 * np.random.default_rng(0).normal(size=(40, 1))
    for linearize in ("extended", "unscented"):
        values = np.linalg.eigvalsh(model.filter(y, linearize=linearize).mode_covariance)
        assert (values[..., 0] >= -1e-15 * values[..., 1]).all()
