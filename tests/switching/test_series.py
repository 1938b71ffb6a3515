"""Arrays, tensors, tables, batches, lists; what is kept, what is refused."""

import multiprocessing
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov

from exptilt.switching import SwitchingLinearGaussian
from exptilt.switching.builders import join_modes
from oracles.switching import kalman
from oracles.switching_models import random_data, random_model

FIELDS = (
    "mode_probability",
    "mean",
    "covariance",
    "mode_mean",
    "mode_covariance",
    "log_likelihood_terms",
    "predicted_mean",
    "predicted_covariance",
    "predicted_mode_probability",
    "innovation",
    "innovation_covariance",
    "mixing_probability",
)


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1", "exact"])
def test_a_batch_is_its_series(method):
    rng = np.random.default_rng(0)
    model = random_model(rng, 2, 2, 2, inputs=1)
    lengths = [5, 3, 6]
    series = [random_data(rng, k, 2) for k in lengths]
    inputs = [rng.normal(size=(k, 1)) for k in lengths]
    alone = [model.filter(y, method=method, inputs=u) for y, u in zip(series, inputs, strict=True)]
    together = model.filter(series, method=method, inputs=inputs)
    np.testing.assert_allclose(together.log_likelihood, [post.log_likelihood for post in alone], atol=1e-12)
    for name in FIELDS:
        for a, b in zip(getattr(together, name), alone, strict=True):
            np.testing.assert_allclose(a, getattr(b, name), atol=1e-12)
    smoothed = model.smooth(series, method=method, inputs=inputs)
    for k, y in enumerate(series):
        np.testing.assert_allclose(
            smoothed.mean[k], model.smooth(y, method=method, inputs=inputs[k]).mean, atol=1e-12
        )
    batch = np.stack([y[:3] for y in series])
    stacked = model.filter(batch, method=method, inputs=inputs[0])
    assert stacked.mean.shape == (3, 3, 2)
    assert stacked.log_likelihood.shape == (3,)
    np.testing.assert_allclose(
        stacked.mode_mean[1], model.filter(batch[1], method=method, inputs=inputs[0]).mode_mean, atol=1e-12
    )
    assert model.most_likely_path(batch, inputs=inputs[0]).shape == (3, 3)


def test_threads_change_nothing():
    rng = np.random.default_rng(1)
    model = random_model(rng, 2, 2, 1)
    y = rng.normal(size=(37, 100, 1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = model.filter(y)
        torch.set_num_threads(3)
        three = model.filter(y)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(one.mean, three.mean)
    np.testing.assert_array_equal(one.log_likelihood, three.log_likelihood)


def _in_child(queue, model, y):
    queue.put(float(model.filter(y).log_likelihood.sum()))


def test_after_a_fork_and_from_two_threads():
    rng = np.random.default_rng(2)
    model = random_model(rng, 2, 2, 1)
    y = rng.normal(size=(20, 100, 1))
    want = float(model.filter(y).log_likelihood.sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, model, y), daemon=True)
    child.start()
    assert queue.get(timeout=300) == want  # only a child that hangs takes so long
    child.join()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(float(model.filter(y).log_likelihood.sum())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [want] * 4


def test_tables_keep_their_index():
    rng = np.random.default_rng(3)
    model = random_model(rng, 2, 2, 2)
    index = pd.date_range("2001-01-31", periods=8, freq="ME")
    frame = pd.DataFrame(random_data(rng, 8, 2), index=index, columns=["a", "b"])
    post, plain = model.filter(frame), model.filter(frame.to_numpy())
    for name in ("mode_probability", "mean", "innovation", "predicted_mean"):
        table = getattr(post, name)
        assert (table.index == index).all()
        np.testing.assert_array_equal(table.to_numpy(), getattr(plain, name))
    assert list(post.innovation.columns) == ["a", "b"]
    assert (post.log_likelihood_terms.index == index).all()
    assert post.log_likelihood == plain.log_likelihood
    assert (model.smooth(frame).mean.index == index).all()
    assert (model.most_likely_path(frame).index == index).all()
    ahead = post.forecast(3)
    assert list(ahead.mean.index.strftime("%Y-%m-%d")) == ["2001-09-30", "2001-10-31", "2001-11-30"]
    assert list(ahead.mean.columns) == ["a", "b"]
    one = random_model(rng, 2, 1, 1)
    assert (one.filter(frame["a"]).mean.index == index).all()


def test_tensors_in_tensors_out():
    rng = np.random.default_rng(4)
    model = random_model(rng, 2, 2, 1)
    y = torch.from_numpy(rng.normal(size=(5, 1)))
    post = model.filter(y)
    for name in FIELDS:
        assert isinstance(getattr(post, name), torch.Tensor)
        np.testing.assert_array_equal(getattr(post, name).numpy(), getattr(model.filter(y.numpy()), name))
    assert isinstance(post.forecast(2).mean, torch.Tensor)
    assert isinstance(model.smooth(y).mean, torch.Tensor)
    assert isinstance(
        model.replace(transition=torch.tensor(model.transition)).filter(y.numpy()).mean, torch.Tensor
    )


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_last_only(method):
    rng = np.random.default_rng(5)
    model = random_model(rng, 2, 2, 1)
    series = [random_data(rng, k, 1) for k in (7, 4)]
    whole, last = model.filter(series, method=method), model.filter(series, method=method, store="last")
    np.testing.assert_allclose(last.log_likelihood, whole.log_likelihood, rtol=1e-13)
    for name in ("mode_probability", "mean", "covariance", "mode_mean"):
        np.testing.assert_array_equal(
            getattr(last, name), np.stack([value[-1] for value in getattr(whole, name)])
        )
    np.testing.assert_allclose(last.forecast(3).mean, whole.forecast(3).mean, atol=1e-14)
    with pytest.raises(ValueError, match="only the last step was stored"):
        _ = last.innovation


@pytest.mark.parametrize("method", ["gpb2", "imm", "exact"])
def test_forecasts_are_the_filter_with_nothing_observed(method):
    rng = np.random.default_rng(6)
    model = random_model(rng, 2, 2, 2, maps=True, inputs=2)
    y, u = random_data(rng, 4, 2), rng.normal(size=(7, 2))
    ahead = model.filter(y, method=method, inputs=u[:4]).forecast(3, inputs=u[4:])
    longer = model.filter(np.concatenate([y, np.full((3, 2), np.nan)]), method=method, inputs=u)
    np.testing.assert_allclose(ahead.mode_probability, longer.mode_probability[4:], atol=1e-12)
    np.testing.assert_allclose(ahead.state_mean, longer.mean[4:], atol=1e-10)
    np.testing.assert_allclose(ahead.state_covariance, longer.covariance[4:], atol=1e-9)
    np.testing.assert_allclose(ahead.covariance, longer.innovation_covariance[4:], atol=1e-9)


def test_intervals_hold_what_they_say():
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(7)
    model = random_model(rng, 2, 1, 1, start="first", dynamics_offset=[[3.0], [-3.0]])
    # from a filter that has seen nothing the forecast is the marginal law, which sampling shows
    post = model.filter(np.full((1, 1), np.nan), method="exact")
    ahead = post.forecast(1, level=0.8)
    draws = np.array([model.sample(2, generator=generator).y[1, 0] for _ in range(2000)])
    assert np.mean(draws < ahead.lower[0, 0]) == pytest.approx(0.1, abs=0.03)
    assert np.mean(draws > ahead.upper[0, 0]) == pytest.approx(0.1, abs=0.03)
    assert draws.mean() == pytest.approx(ahead.mean[0, 0], abs=4 * draws.std() / 45)
    assert draws.var() == pytest.approx(ahead.covariance[0, 0, 0], rel=0.15)


def test_diffuse_start_is_the_limit():
    """Against statsmodels' exact diffuse initialisation."""
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    rng = np.random.default_rng(8)
    y = np.cumsum(rng.normal(size=60)) + rng.normal(size=60)
    y[5] = np.nan
    other = UnobservedComponents(y, "local linear trend", use_exact_diffuse=True)
    values = [0.7, 0.4, 0.1]
    want = other.smooth(values)
    model = SwitchingLinearGaussian(
        transition=[[1.0]],
        dynamics=[[1.0, 1.0], [0.0, 1.0]],
        process_noise=np.diag([0.4, 0.1]),
        observation=[[1.0, 0.0]],
        observation_noise=[[0.7]],
        initial_mean=[0.0, 0.0],
        initial_covariance=np.diag([np.inf, np.inf]),
        initial_probability=[1.0],
        start="first",
    )
    post = model.filter(y)
    assert post.log_likelihood == pytest.approx(want.llf, abs=1e-5)
    np.testing.assert_allclose(post.mean[5:], want.filtered_state.T[5:], atol=1e-5)
    np.testing.assert_allclose(model.smooth(y).mean, want.smoothed_state.T, atol=1e-5)


def test_kalman_core_against_pykalman_and_statsmodels():
    from pykalman import KalmanFilter
    from statsmodels.tsa.statespace.sarimax import SARIMAX

    rng = np.random.default_rng(9)
    model = random_model(rng, 1, 3, 2, start="first")
    y = rng.normal(size=(40, 2))
    other = KalmanFilter(
        model.dynamics[0],
        model.observation[0],
        model.process_noise[0],
        model.observation_noise[0],
        model.dynamics_offset[0],
        model.observation_offset[0],
        model.initial_mean[0],
        model.initial_covariance[0],
    )
    post, back = model.filter(y), model.smooth(y)
    means, covs = other.filter(y)
    np.testing.assert_allclose(post.mean, means, atol=1e-10)
    np.testing.assert_allclose(post.covariance, covs, atol=1e-10)
    means, covs = other.smooth(y)
    np.testing.assert_allclose(back.mean, means, atol=1e-10)
    np.testing.assert_allclose(back.covariance, covs, atol=1e-10)
    assert post.log_likelihood == pytest.approx(other.loglikelihood(y), abs=1e-8)
    series = rng.normal(size=80)
    arma = SARIMAX(series, order=(2, 0, 1)).smooth([0.5, 0.2, 0.3, 0.8])
    space = arma.model.ssm
    Q = space["selection"] @ space["state_cov"] @ space["selection"].T
    mine = SwitchingLinearGaussian(
        transition=[[1.0]],
        dynamics=space["transition"],
        process_noise=Q,
        observation=space["design"],
        observation_noise=space["obs_cov"],
        initial_mean=np.zeros(2),
        initial_covariance=solve_discrete_lyapunov(space["transition"], Q),
        initial_probability=[1.0],
        start="first",
    )
    assert mine.filter(series).log_likelihood == pytest.approx(arma.llf, abs=1e-7)
    np.testing.assert_allclose(mine.smooth(series).mean, arma.smoothed_state.T, atol=1e-8)


def test_states_of_different_size():
    """A glider (2 states) and a manoeuvrer (3): against the Kalman filter of either where the other is never
    visited, and finite in between.
    """
    glide, turn = (
        np.array([[1.0, 1.0], [0.0, 1.0]]),
        np.array([[1.0, 1.0, 0.5], [0.0, 1.0, 1.0], [0.0, 0.0, 0.9]]),
    )
    options = {
        "dynamics": [glide, turn],
        "process_noise": [0.01 * np.eye(2), 0.1 * np.eye(3)],
        "observation": [[[1.0, 0.0]], [[1.0, 0.0, 0.0]]],
        "observation_noise": [[1.0]],
        "initial_mean": [np.zeros(2), np.zeros(3)],
        "initial_covariance": [np.eye(2), np.eye(3)],
        "maps": {(0, 1): np.eye(3, 2), (1, 0): np.eye(2, 3)},
        "map_covariance": {(0, 1): np.diag([0.0, 0.0, 1.0])},
    }
    rng = np.random.default_rng(10)
    y = np.cumsum(np.cumsum(rng.normal(size=30)))[:, None]
    for k, size in ((0, 2), (1, 3)):
        model = join_modes(transition=np.eye(2), initial_probability=np.eye(2)[k], **options)
        alone = SwitchingLinearGaussian(
            transition=[[1.0]],
            dynamics=options["dynamics"][k],
            process_noise=options["process_noise"][k],
            observation=options["observation"][k],
            observation_noise=[[1.0]],
            initial_mean=np.zeros(size),
            initial_covariance=np.eye(size),
            initial_probability=[1.0],
        )
        total, filtered, smoothed = kalman(alone, y)
        for method in ("gpb2", "imm", "gpb1"):
            post = model.filter(y, method=method)
            assert post.log_likelihood == pytest.approx(total, abs=1e-9)
            np.testing.assert_allclose(post.mode_mean[:, k, :size], [m for m, _ in filtered], atol=1e-9)
            np.testing.assert_allclose(
                model.smooth(y, method=method).mode_mean[:, k, :size], [m for m, _ in smoothed], atol=1e-8
            )
    mixed = join_modes(transition=[[0.9, 0.1], [0.2, 0.8]], initial_probability=[0.5, 0.5], **options)
    assert mixed.filter(y[:6]).log_likelihood == pytest.approx(
        mixed.filter(y[:6], method="exact").log_likelihood, abs=0.5
    )
    with pytest.raises(ValueError, match=r"Pass maps\[1, 0\]"):
        join_modes(
            transition=np.eye(2),
            initial_probability=[0.5, 0.5],
            **(options | {"maps": {(0, 1): np.eye(3, 2)}}),
        )


GOOD = {
    "transition": np.full((2, 2), 0.5),
    "dynamics": np.eye(2),
    "process_noise": np.eye(2),
    "observation": np.ones((1, 2)),
    "observation_noise": np.eye(1),
    "initial_mean": np.zeros(2),
    "initial_covariance": np.eye(2),
    "initial_probability": np.full(2, 0.5),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"transition": [[0.9, 0.2], [0.5, 0.5]]},
            r"row 0 of transition sums to 1.1.*P\(mode j next \| mode i now\)",
        ),
        ({"transition": [[1.5, -0.5], [0.5, 0.5]]}, r"transition\[0, 1\] is -0.5, a negative probability"),
        ({"transition": np.ones((2, 3))}, r"transition has shape \(2, 3\)"),
        ({"initial_probability": [0.5, 0.4]}, "initial_probability sums to 0.9"),
        ({"initial_probability": [1.0]}, r"initial_probability has shape \(1,\)"),
        ({"process_noise": [np.eye(2), -np.eye(2)]}, "process_noise of mode 1 is not positive semi-definite"),
        (
            {"observation_noise": [[[1.0]], [[-1.0]]]},
            "observation_noise of mode 1 is not positive semi-definite",
        ),
        ({"process_noise": [[1.0, 0.5], [0.0, 1.0]]}, "process_noise of mode 0 is not symmetric"),
        ({"dynamics": np.eye(3)}, "process_noise has shape"),
        ({"observation": np.ones((3, 1, 2))}, r"observation has shape \(3, 1, 2\), but with 2 modes"),
        ({"dynamics": [[np.nan, 0.0], [0.0, 1.0]]}, "dynamics holds nan"),
        ({"initial_covariance": [[np.inf, 1.0], [1.0, 1.0]]}, "diffuse state .* has covariances"),
        ({"initial_mean": np.zeros((4, 2, 2))}, "initial law does not vary in time"),
        ({"start": "later"}, "start is 'later'"),
        (
            {"dynamics_offset": np.zeros((5, 2, 2)), "observation_offset": np.zeros((6, 2, 1))},
            "disagree on the number of steps",
        ),
        ({"dynamics": "hello"}, "dynamics is not a numeric array"),
        ({"map_covariance": np.zeros((2, 2, 2, 2))}, "map_covariance is given without maps"),
    ],
)
def test_models_that_cannot_be(change, words):
    SwitchingLinearGaussian(**GOOD)
    with pytest.raises(ValueError, match=words):
        SwitchingLinearGaussian(**(GOOD | change))


def test_data_that_cannot_be():
    model = SwitchingLinearGaussian(**GOOD)
    for y, words in [
        (np.zeros((5, 2)), r"shape \(5, 2\), expected \(T, 1\)"),
        (np.array([0.0, np.inf]), "infinite values"),
        (np.zeros((0, 1)), "no rows"),
        (["a", "b"], "not a numeric array"),
        ([np.zeros((3, 1)), np.zeros((2, 2))], "series 1 has shape"),
        (np.zeros((0, 3, 1)), "no series|no rows"),
        (pd.DataFrame({"a": ["x", "y"]}), "not numbers"),
    ]:
        with pytest.raises(ValueError, match=words):
            model.filter(y)
    for options, words in [
        ({"method": "ekf"}, "method is 'ekf'"),
        ({"store": "some"}, "store is 'some'"),
        ({"inputs": np.zeros((5, 1))}, "neither dynamics_input"),
        ({"method": "rbpf", "particles": 0}, "particles is 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            model.filter(np.zeros(5), **options)
    with pytest.raises(ValueError, match="no inputs were given"):
        model.replace(dynamics_input=np.ones((2, 1))).filter(np.zeros(5))
    with pytest.raises(ValueError, match="cover 3 steps, the data have 5"):
        model.replace(dynamics_offset=np.zeros((3, 2, 2))).filter(np.zeros(5))
    with pytest.raises(ValueError, match="more than 300000"):
        model.filter(np.zeros(30), method="exact")
    with pytest.raises(ValueError, match="are not parameters"):
        model.replace(dynamic=np.eye(2))
    with pytest.raises(ValueError, match="steps is 0"):
        model.filter(np.zeros(5)).forecast(0)


def test_complex_numbers_are_refused():
    model = SwitchingLinearGaussian(**GOOD)
    for y in (np.zeros(5, complex), torch.zeros(5, dtype=torch.complex128)):
        with pytest.raises(ValueError, match="the series is complex"):
            model.filter(y)
    with pytest.raises(ValueError, match="dynamics is complex"):
        SwitchingLinearGaussian(**(GOOD | {"dynamics": np.eye(2) * 1j}))


def test_sizes_say_what_they_are():
    model = SwitchingLinearGaussian(**GOOD)
    assert (model.modes, model.states, model.outputs, model.steps) == (2, 2, 1, None)
    assert "observed components" in SwitchingLinearGaussian.outputs.__doc__
