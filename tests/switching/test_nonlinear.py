"""Nonlinear modes: linear functions give the linear filters, angles go round, a turning target is caught."""

import numpy as np
import pytest
import torch

from exptilt._support.errors import ArgumentError
from exptilt.switching import OnlineState, SwitchingNonlinear
from exptilt.switching.nonlinear import fit_nonlinear
from oracles.nonlinear import smooth_back
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


@pytest.mark.parametrize("linearize", ["extended", "unscented"])
def test_smoothing_and_forecasts_of_linear_functions_are_those_of_the_linear_model(linearize):
    rng = np.random.default_rng(0)
    model = random_model(rng, 2, 2, 2)
    y = np.stack([random_data(rng, 9, 2) for _ in range(2)])
    other = as_functions(model)
    want, got = model.smooth(y, method="gpb2"), other.smooth(y, method="gpb2", linearize=linearize)
    np.testing.assert_allclose(got.log_likelihood, want.log_likelihood, atol=1e-9)
    for name in ("mode_probability", "mean", "covariance", "mode_mean", "mode_covariance"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-8, err_msg=name)
    want = model.filter(y, method="gpb2").forecast(3)
    got = other.filter(y, method="gpb2", linearize=linearize).forecast(3)
    for name in (
        "mean",
        "covariance",
        "lower",
        "upper",
        "mode_probability",
        "state_mean",
        "state_covariance",
    ):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-8, err_msg=name)


@pytest.mark.parametrize("linearize", ["extended", "unscented"])
def test_inputs_are_those_of_the_linear_model(linearize):
    """One of them is the time, of which the dynamics are a function."""
    rng = np.random.default_rng(1)
    T = 8
    W, B = rng.normal(size=(T, 2, 2, 2)) * 0.5, rng.normal(size=(2, 2, 1))
    model = random_model(rng, 2, 2, 2, offsets=False, dynamics=W, dynamics_input=B)
    u = rng.normal(size=(T, 1))
    y = random_data(rng, T, 2)
    weights, effects, H = torch.tensor(W), torch.tensor(B), torch.tensor(model.observation)

    def move(x, given, k):
        now = (given[..., 1:2] == torch.arange(T)).double()  # (..., T), 1 at this step
        moved = torch.stack([x @ weights[t, k].T for t in range(T)], -2)
        return (now[..., None] * moved).sum(-2) + given[..., :1] * effects[k, :, 0]

    names = ("transition", "process_noise", "observation_noise")
    initial = ("initial_mean", "initial_covariance", "initial_probability")
    other = SwitchingNonlinear(
        dynamics=[lambda x, given, k=k: move(x, given, k) for k in range(2)],
        observation=[lambda x, given, k=k: x @ H[k].T for k in range(2)],
        inputs=2,
        **{name: getattr(model, name) for name in (*names, *initial)},
    )
    given = np.concatenate([u, np.arange(T)[:, None]], 1)
    want, got = (model.filter(y, method="imm", inputs=u), other.filter(y, linearize=linearize, inputs=given))
    np.testing.assert_allclose(got.mean, want.mean, atol=1e-9)
    back = model.smooth(y, method="imm", inputs=u)
    np.testing.assert_allclose(other.smooth(y, linearize=linearize, inputs=given).mean, back.mean, atol=1e-8)
    with pytest.raises(ValueError, match="functions take inputs"):
        other.filter(y)


def test_a_derivative_is_refused():
    with pytest.raises(ValueError, match="have no derivative"):
        turning().filter(torch.zeros(3, 2, requires_grad=True))


def test_parameters_are_found():
    """A damped pendulum seen by its sine: frequency and noise, from 300 steps."""
    rng = np.random.default_rng(3)

    def build(theta):
        def move(x, damping):
            speed = x[..., 1] - 0.1 * theta[0] * torch.sin(x[..., 0]) - damping * x[..., 1]
            return torch.stack([x[..., 0] + 0.1 * speed, speed], -1)

        return SwitchingNonlinear(
            transition=[[0.98, 0.02], [0.02, 0.98]],
            dynamics=[lambda x: move(x, 0.0), lambda x: move(x, 0.2)],
            process_noise=np.diag([1e-6, 1e-3]),
            observation=lambda x: torch.sin(x[..., :1]),
            observation_noise=(theta[1].exp() * torch.eye(1)).detach(),
            initial_mean=[1.0, 0.0],
            initial_covariance=0.01 * np.eye(2),
            initial_probability=[0.5, 0.5],
        )

    x, y = np.array([1.0, 0.0]), []
    for t in range(300):
        speed = x[1] - 0.1 * 4.0 * np.sin(x[0]) - (0.2 if t % 100 > 70 else 0.0) * x[1] + 0.03 * rng.normal()
        x = np.array([x[0] + 0.1 * speed, speed])
        y.append(np.sin(x[0]) + 0.1 * rng.normal())
    fit = fit_nonlinear(build, [3.0, -3.0], np.array(y), linearize="unscented")
    assert fit.status.value.startswith("converged")
    assert np.abs(fit.parameters - [4.0, np.log(0.01)]).max() < 3 * fit.standard_errors.max()
    assert (fit.standard_errors < 0.5).all()


def heading(**options):
    """Two turns of heading and place at a speed that is an input, seen by range and bearing."""

    def move(rate):
        def step(x, u):
            heading = x[..., 2] + rate
            ahead = [x[..., 0] + u[..., 0] * heading.cos(), x[..., 1] + u[..., 0] * heading.sin(), heading]
            return torch.stack(ahead, -1)

        return step

    def look(x, u):
        return torch.stack([torch.hypot(x[..., 0], x[..., 1]), torch.atan2(x[..., 1], x[..., 0])], -1)

    return SwitchingNonlinear(
        **{
            "transition": [[0.9, 0.1], [0.3, 0.7]],
            "dynamics": [move(0.1), move(-0.4)],
            "process_noise": np.diag([0.01, 0.02, 0.001]),
            "observation": look,
            "observation_noise": np.diag([0.1, 0.01]),
            "initial_mean": [-3.0, 0.4, 3.0],
            "initial_covariance": np.diag([0.5, 0.4, 0.2]),
            "initial_probability": [0.6, 0.4],
            "angles": (2,),
            "observation_angles": (1,),
            "inputs": 1,
        }
        | options
    )


def turned(T, seed):
    """Observations around a path that crosses the cut of the bearings, and speeds."""
    rng = np.random.default_rng(seed)
    angle = 3.0 + 0.15 * np.arange(T) + 0.05 * rng.normal(size=T)
    y = np.stack([3 + 0.2 * rng.normal(size=T), np.arctan2(np.sin(angle), np.cos(angle))], -1)
    y[4] = np.nan
    y[6, 0] = np.nan
    return y, rng.uniform(0.5, 1.0, size=(T, 1))


@pytest.mark.parametrize("linearize", ["extended", "unscented"])
def test_the_smoother_is_the_slow_one(linearize):
    """A plain pass with covariances and pseudo-inverses; covariances of the compiled one are positive."""
    y, u = turned(12, 0)
    model = heading()
    for method in ("imm", "gpb2"):
        post = model.filter(y, method=method, linearize=linearize, inputs=u)
        got = model.smooth(y, method=method, linearize=linearize, inputs=u)
        law = [
            torch.from_numpy(getattr(post, k)) for k in ("mode_probability", "mode_mean", "mode_covariance")
        ]
        want = smooth_back(model, law, torch.from_numpy(u), linearize == "unscented")
        np.testing.assert_allclose(got.mode_probability, want[0], atol=1e-11)
        off = got.mode_mean - want[1].numpy()
        off[..., 2] = np.arctan2(np.sin(off[..., 2]), np.cos(off[..., 2]))
        np.testing.assert_allclose(off, 0.0, atol=1e-10)
        np.testing.assert_allclose(got.mode_covariance, want[2], atol=1e-10)
        assert (np.linalg.eigvalsh(got.mode_covariance) > 0).all()


@pytest.mark.parametrize("method", ["imm", "gpb2", "gpb1"])
@pytest.mark.parametrize(("linearize", "start"), [("extended", "first"), ("unscented", "before")])
def test_one_observation_at_a_time(method, linearize, start, tmp_path):
    """Steps are those of the filter, saved and taken up in between; a batch is its members."""
    y, u = turned(9, 1)
    model = heading(start=start)
    post = model.filter(y, method=method, linearize=linearize, inputs=u)
    state = model.online(method=method, linearize=linearize)
    pair = model.online(method=method, linearize=linearize, batch=2)
    for t, row in enumerate(y):
        before = state
        state, pair = state.step(row, inputs=u[t]), pair.step(np.stack([y[0], row]), inputs=u[t])
        after = before.predict(inputs=u[t]).update(row)
        np.testing.assert_array_equal(after._rows, state._rows)
        for name in ("mode_probability", "mode_mean", "mode_covariance", "mean", "covariance"):
            want = getattr(post, name)[t]
            np.testing.assert_allclose(getattr(state, name), want, atol=1e-12, err_msg=name)
            np.testing.assert_allclose(getattr(pair, name)[1], want, atol=1e-12, err_msg=name)
        assert state.log_likelihood_term == pytest.approx(post.log_likelihood_terms[t], abs=1e-12)
        if t == 4:
            state.save(tmp_path / "state")
            state = OnlineState.load(tmp_path / "state", model)
            begun = model.filter(y[:5], method=method, linearize=linearize, inputs=u[:5])
            other = OnlineState.after(begun)
            assert other.t == state.t == 5
            np.testing.assert_allclose(other.covariance, state.covariance, atol=1e-13)
            assert other.log_likelihood == pytest.approx(state.log_likelihood, abs=1e-12)
    assert state.log_likelihood == pytest.approx(post.log_likelihood, abs=1e-11)


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_innovations_of_functions(method):
    """A linear function has the innovations of the linear model; an angle's go around the circle."""
    rng = np.random.default_rng(1)
    model, y = random_model(rng, 2, 2, 2), random_data(rng, 5, 2)
    one, other = model.online(method=method), as_functions(model).online(method=method)
    for row in y:
        one, other = one.step(row), other.step(row)
    candidates = rng.normal(size=(3, 2))
    candidates[2, 0] = np.nan
    for a, b in ((one, other), (one.predict(), other.predict())):
        for given in (candidates, candidates[0]):
            for name, want in a.innovations(given)._asdict().items():
                found = getattr(b.innovations(given), name)
                np.testing.assert_allclose(found, want, atol=1e-9, err_msg=name)
    state = heading().online(method=method).predict(inputs=[0.7])
    center = np.array([3.0, np.pi - 0.01])
    near, far = (state.innovations(center + np.array([0.0, turn])).innovation for turn in (0.0, 2 * np.pi))
    np.testing.assert_allclose(near, far, atol=1e-12)


@pytest.mark.parametrize("method", ["imm", "gpb2", "gpb1"])
@pytest.mark.parametrize("batch", [None, 2])
def test_online_forecasts_are_those_of_the_filter(method, batch):
    model, rng = heading(), np.random.default_rng(0)
    y = 3.0 + 0.2 * rng.normal(size=(5, 2) if batch is None else (batch, 5, 2))
    u = np.full((8, 1), 0.5)
    state = model.online(method=method, batch=batch)
    for t in range(5):
        state = state.step(y[..., t, :], inputs=u[t])
    got = state.forecast(3, inputs=u[5:])
    want = model.filter(y, method=method, inputs=u[:5]).forecast(3, inputs=u[5:])
    for name in ("mean", "covariance", "lower", "upper", "mode_probability", "state_mean"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-10, err_msg=name)


def test_online_functions_that_are_refused(tmp_path):
    model = heading()
    state = model.online().step([3.0, 3.1], inputs=[0.5])
    state.save(tmp_path / "state")
    other = heading(process_noise=np.eye(3))
    none = {
        "process_noise": np.zeros((2, 2)),
        "initial_covariance": np.zeros((2, 2)),
        "observation_noise": [[0.0]],
    }
    silent = SwitchingNonlinear(**plain_options(observation=lambda x: x[..., :1], **none))
    for refused, words in (
        (lambda: OnlineState.load(tmp_path / "state"), "Pass model=, the SwitchingNonlinear"),
        (lambda: OnlineState.load(tmp_path / "state", other), "another process_noise"),
        (lambda: state.step([3.0, 3.1]), "inputs are none. Pass \\(1,\\)"),
        (lambda: state.step([3.0], inputs=[0.5]), "y has shape"),
        (lambda: model.online(method="exact"), "method is 'exact'"),
        (lambda: model.online(linearize="none"), "linearize is 'none'"),
        (lambda: model.online(batch=0), "batch is 0"),
        (lambda: model.online(batch=2.5), "batch is 2.5"),
        (lambda: state.step([3.0, 1j], inputs=[0.5]), "y cannot be read"),
        (lambda: state.step(torch.ones(2, requires_grad=True), inputs=[0.5]), "without a derivative"),
        (lambda: OnlineState.begin(model), "got SwitchingNonlinear"),
        (lambda: OnlineState.after(3), "got int"),
        (lambda: silent.online().predict().innovations([1.0]), "not positive definite"),
        (lambda: state.update([3.0, 3.1]), "update without a prediction"),
    ):
        with pytest.raises(ValueError, match=words):
            refused()


def _two_modes(f=lambda x: 0.9 * x, h=lambda x: x[..., :1] ** 2, **options):
    return SwitchingNonlinear(
        transition=[[0.9, 0.1], [0.2, 0.8]],
        dynamics=[lambda x: 0.95 * x, f],
        process_noise=0.1 * np.eye(2),
        observation=[lambda x: 1.0 * x[..., :1], h],
        observation_noise=[[0.1]],
        initial_mean=[1.0, 0.0],
        initial_covariance=np.eye(2),
        initial_probability=[0.5, 0.5],
        **options,
    )


def _divides(x):
    return x * (1 / 0)


def _looks_up(x):
    return {}["gain"] * x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"f": _divides}, r"dynamics of mode 1 \(_divides\) fails .*ZeroDivisionError: division by zero"),
        ({"f": _looks_up}, r"dynamics of mode 1 \(_looks_up\) fails .*KeyError: 'gain'"),
        ({"h": _looks_up}, r"observation of mode 1 \(_looks_up\) fails .*KeyError"),
        (
            {"h": lambda x: torch.sqrt(x[..., :1] - 5)},
            r"observation of mode 1 gives \[nan\] for the state \[0.9",
        ),
        (
            {"h": lambda x: torch.maximum(torch.sqrt(x[..., :1] - 5), x[..., :1])},
            r"observation of mode 1 gives \[nan\]",
        ),
        ({"f": lambda x: np.log(x)}, r"at step 0 of series 0 dynamics of mode 1 gives \[0.0, -inf\]"),
        ({"alpha": 0.001, "beta": 2.0}, "weight -666663 in covariances"),
        ({"alpha": 0.0}, "alpha above 0"),
        ({"kappa": -2.0}, "kappa above -2"),
        ({"beta": np.nan}, "finite numbers"),
    ],
)
def test_functions_that_fail_and_wrong_points_are_named(options, message):
    with pytest.raises(ArgumentError, match=message):
        _two_modes(**options).filter([[1.0], [np.nan], [2.0]])


@pytest.mark.parametrize(("alpha", "beta", "kappa"), [(1.0, 0.0, None), (0.9, 2.0, 1.0), (1.3, 1.0, -0.5)])
def test_sigma_points_as_published(alpha, beta, kappa):
    """One mode against the unscented filter as van der Merwe writes it, covariances as sums."""
    n, T = 2, 4
    rng = np.random.default_rng(3)

    def f(x):
        return np.stack([x[..., 0] + 0.3 * np.sin(x[..., 1]), 0.9 * x[..., 1]], -1)

    def h(x):
        return x[..., :1] ** 2 + x[..., 1:]

    Q, R, y = np.diag([0.1, 0.2]), np.array([[0.3]]), rng.normal(size=(T, 1)) + 1
    model = SwitchingNonlinear(
        transition=[[1.0]],
        dynamics=[f],
        process_noise=Q,
        observation=h,
        observation_noise=R,
        initial_mean=[1.0, 0.5],
        initial_covariance=np.eye(n),
        initial_probability=[1.0],
        alpha=alpha,
        beta=beta,
        kappa=kappa,
    )
    post = model.filter(y, linearize="unscented")
    lam = alpha**2 * (n + (1.0 if kappa is None else kappa)) - n
    wm = np.r_[lam / (n + lam), np.full(2 * n, 0.5 / (n + lam))]
    wc = wm + np.r_[1 - alpha**2 + beta, np.zeros(2 * n)]

    def points(x, P):
        L = np.sqrt(n + lam) * np.linalg.cholesky(P).T
        return np.concatenate([x[None], x + L, x - L])

    x, P, total = np.array([1.0, 0.5]), np.eye(n), 0.0
    for row in y:
        X = f(points(x, P))
        x = wm @ X
        P = (wc[:, None] * (X - x)).T @ (X - x) + Q
        X = points(x, P)
        Y = h(X)
        mean = wm @ Y
        S = (wc[:, None] * (Y - mean)).T @ (Y - mean) + R
        C = (wc[:, None] * (X - x)).T @ (Y - mean)
        e = row - mean
        total -= 0.5 * float(np.log(2 * np.pi * S[0, 0]) + e[0] ** 2 / S[0, 0])
        x, P = x + (C @ np.linalg.solve(S, e)), P - C @ np.linalg.solve(S, C.T)
    assert post.log_likelihood == pytest.approx(total, abs=1e-10)
    np.testing.assert_allclose(post.mean[-1], x, atol=1e-10)
    np.testing.assert_allclose(post.covariance[-1], P, atol=1e-10)
