"""One observation at a time gives what the filter gives of the whole series, and innovations are Gaussian
densities written out.
"""

import numpy as np
import pytest
import scipy.stats
import torch

from exptilt.switching import OnlineState, SwitchingLinearGaussian
from oracles.switching_models import random_data, random_model

OPTIONS = [
    {},
    {"start": "first", "steps": 9},
    {"inputs": 1, "steps": 9},
    {"maps": True},
    {"start": "first", "maps": True},
]
NAMES = ("mode_probability", "log_mode_probability", "mode_mean", "mode_covariance", "mean", "covariance")


@pytest.mark.parametrize("method", ["imm", "gpb2", "gpb1"])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_those_of_the_filter(method, options, tmp_path):
    rng = np.random.default_rng(0)
    model, y = random_model(rng, 2, 2, 2, **options), random_data(rng, 9, 2)
    y[4] = np.nan
    u = rng.normal(size=(9, 1)) if "inputs" in options else None
    post = model.filter(y, method=method, inputs=u)
    state = model.online(method=method)
    for t, row in enumerate(y):
        own = {} if u is None else {"inputs": u[t]}
        ahead = state.predict(**own)
        for name in ("mode_probability", "mode_mean", "mode_covariance", "mean", "covariance"):
            want = getattr(post, f"predicted_{name}")[t]
            np.testing.assert_allclose(getattr(ahead, name), want, atol=1e-12, err_msg=name)
        after, state = ahead.update(row), state.step(row, **own)
        np.testing.assert_array_equal(after._rows, state._rows)
        for name in NAMES:
            want = getattr(post, name)[t]
            np.testing.assert_allclose(getattr(state, name), want, atol=1e-11, err_msg=name)
        assert state.log_likelihood_term == pytest.approx(post.log_likelihood_terms[t], abs=1e-11)
        if t == 4:  # saved, loaded, and taken up from a filter of the steps so far
            state.save(tmp_path / "state")
            state = OnlineState.load(tmp_path / "state")
            begun = model.filter(y[:5], method=method, inputs=None if u is None else u[:5])
            other = OnlineState.after(begun)
            assert other.t == state.t == 5
            np.testing.assert_allclose(other.covariance, state.covariance, atol=1e-12)
            assert other.log_likelihood == pytest.approx(state.log_likelihood, abs=1e-11)
    assert state.log_likelihood == pytest.approx(post.log_likelihood, abs=1e-10)
    if "steps" in options:
        with pytest.raises(ValueError, match="cover 9 steps, and this is step 10"):
            state.step(y[0], **({} if u is None else {"inputs": u[0]}))


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_innovations_are_densities_written_out(method):
    rng = np.random.default_rng(1)
    model, y = random_model(rng, 2, 2, 2), random_data(rng, 5, 2, missing=0.0)
    state = model.online(method=method)
    for row in y:
        state = state.step(row)
    state = state.predict()
    candidates = rng.normal(size=(3, 2))
    candidates[2, 0] = np.nan
    found = state.innovations(candidates)
    for j in range(2):
        H, d, R = (getattr(model, k)[j] for k in ("observation", "observation_offset", "observation_noise"))
        center, S = H @ state.mode_mean[j] + d, H @ state.mode_covariance[j] @ H.T + R
        np.testing.assert_allclose(found.covariance[:, j], np.broadcast_to(S, (3, 2, 2)), atol=1e-12)
        np.testing.assert_allclose(found.innovation[:, j], candidates - center, atol=1e-12)
        for k, z in enumerate(candidates):
            seen = ~np.isnan(z)
            e, part = (z - center)[seen], S[np.ix_(seen, seen)]
            assert found.distance[k, j] == pytest.approx(e @ np.linalg.solve(part, e), abs=1e-12)
            want = scipy.stats.multivariate_normal.logpdf(e, cov=part)
            assert found.log_likelihood[k, j] == pytest.approx(want, abs=1e-12)
    if method == "imm":  # whose modes are Gaussian before the update: Bayes' rule over modes
        after = state.update(candidates[0])
        weight = state.mode_probability * np.exp(found.log_likelihood[0])
        np.testing.assert_allclose(after.mode_probability, weight / weight.sum(), atol=1e-12)
        np.testing.assert_array_equal(after.innovations().distance, found.distance[0])


def test_batches_with_one_model_and_with_many():
    rng = np.random.default_rng(2)
    models = [random_model(rng, 2, 2, 2) for _ in range(3)]
    y = rng.normal(size=(4, 3, 2))
    y[1, 2] = np.nan
    for own, batch in ((models, None), (models[0], 3)):
        state = OnlineState.begin(own, method="gpb2", batch=batch)
        alone = [one.online(method="gpb2") for one in (own if batch is None else [models[0]] * 3)]
        for rows in y:
            state, alone = state.step(rows), [one.step(row) for one, row in zip(alone, rows, strict=True)]
        for k, one in enumerate(alone):
            np.testing.assert_array_equal(state.mean[k], one.mean)
            np.testing.assert_array_equal(state.predict().covariance[k], one.predict().covariance)
        gate = state.innovations(rng.normal(size=(3, 5, 2)))
        assert gate.distance.shape == (3, 5, 2)
        assert gate.covariance.shape == (3, 5, 2, 2, 2)


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_large_batches_are_shared_by_threads(method):
    rng = np.random.default_rng(7)
    model = random_model(rng, 3, 4, 2)
    y = rng.normal(size=(3, 2500, 2))
    y[1, :50, 0] = np.nan
    state = model.online(method=method, batch=2500)
    alone = [model.online(method=method) for _ in range(60)]
    for rows in y:
        state, alone = state.step(rows), [one.step(row) for one, row in zip(alone, rows, strict=False)]
    for k, one in enumerate(alone):
        np.testing.assert_allclose(state.mean[k], one.mean, atol=1e-12)
        np.testing.assert_allclose(state.covariance[k], one.covariance, atol=1e-12)


def test_nothing_seen_and_states_that_branch():
    rng = np.random.default_rng(3)
    model = random_model(rng, 2, 2, 2)
    state = model.online().step([0.1, 0.2])
    twice = state.predict().predict()
    np.testing.assert_array_equal(twice._rows, state.step(None).predict()._rows)
    assert twice.t == 3
    assert repr(twice) == "OnlineState(imm, t=3, predicted, batch=None)"
    kept = state.mean.copy()
    assert (state.step([9.0, 9.0]).mean != state.step([0.0, 0.0]).mean).any()
    np.testing.assert_array_equal(state.mean, kept)


def test_diffuse_states_are_exact(tmp_path):
    rng = np.random.default_rng(4)
    y = rng.normal(size=(6, 2)).cumsum(0)
    y[0] = np.nan
    model = random_model(rng, 2, 2, 2, initial_covariance=np.diag([np.inf, np.inf]))
    post, state = model.filter(y, method="imm"), model.online()
    with pytest.raises(ValueError, match="still diffuse"):
        state.predict()
    for t, row in enumerate(y):
        state = state.step(row)
        state.save(tmp_path / "state")
        state = OnlineState.load(tmp_path / "state")
        np.testing.assert_allclose(state.mode_mean, post.mode_mean[t], atol=1e-11)
        np.testing.assert_allclose(state.mode_covariance, post.mode_covariance[t], atol=1e-11)
    assert state.log_likelihood == pytest.approx(post.log_likelihood, abs=1e-10)
    state.predict()


def test_tensors_come_back_as_tensors():
    rng = np.random.default_rng(5)
    model = random_model(rng, 2, 2, 2)
    model = model.replace(dynamics=torch.tensor(model.dynamics))
    assert isinstance(model.online().step(torch.zeros(2, dtype=torch.float64)).mean, torch.Tensor)
    with pytest.raises(ValueError, match="steps have no derivative"):
        model.replace(dynamics=model.dynamics.requires_grad_()).online()


def test_what_is_refused(tmp_path):
    model = random_model(np.random.default_rng(6), 2, 2, 2)
    with pytest.raises(ValueError, match="method is 'exact'"):
        model.online(method="exact")
    state = model.online()
    with pytest.raises(ValueError, match=r"y has shape \(3,\)"):
        state.step([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="y holds infinite values"):
        state.step([np.inf, 0.0])
    with pytest.raises(ValueError, match="update without a prediction"):
        state.update([0.0, 0.0])
    with pytest.raises(ValueError, match="no prediction yet"):
        state.innovations([0.0, 0.0])
    with pytest.raises(ValueError, match="has no input matrices"):
        state.step([0.0, 0.0], inputs=[1.0])
    with pytest.raises(ValueError, match="there is no file"):
        OnlineState.load(tmp_path / "nothing")
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        OnlineState.load(tmp_path / "other")
    singular = SwitchingLinearGaussian(
        **{name: value for name, value in vars(model).items() if value is not None}
        | {"observation_noise": np.zeros((2, 2)), "observation": np.ones((2, 2)), "observation_offset": None}
    )
    with pytest.raises(ValueError, match=r"innovation covariance .* of mode 0 is not positive definite"):
        singular.online().step([0.0, 0.0])


def test_a_state_is_not_made_by_itself():
    with pytest.raises(ValueError, match=r"Call model\.online"):
        OnlineState()


@pytest.mark.parametrize("method", ["imm", "gpb2", "gpb1"])
@pytest.mark.parametrize("options", [{}, {"start": "first", "steps": 9}, {"inputs": 1}, {"maps": True}])
@pytest.mark.parametrize("batch", [None, 3])
def test_forecasts_are_those_of_the_filter(method, options, batch):
    rng = np.random.default_rng(0)
    model = random_model(rng, 2, 2, 2, **options)
    y = random_data(rng, 6, 2) if batch is None else np.stack([random_data(rng, 6, 2) for _ in range(batch)])
    u = rng.normal(size=(9, 1)) if "inputs" in options else None
    state = model.online(method=method, batch=batch)
    for t in range(6):
        state = state.step(y[..., t, :], inputs=None if u is None else u[t])
    past, ahead = (None, None) if u is None else (u[:6], u[6:])
    want = model.filter(y, method=method, inputs=past).forecast(3, inputs=ahead)
    got = state.forecast(3, inputs=ahead)
    for name in ("mean", "covariance", "lower", "upper", "mode_probability", "state_mean", "level"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-10, err_msg=name)
    if method == "gpb1":  # which joins the modes of a step at which nothing is seen
        return
    later = state.predict(inputs=None if u is None else u[6]).forecast(2, inputs=None if u is None else u[7:])
    np.testing.assert_allclose(later.mean, got.mean[..., 1:, :], atol=1e-10)


def _after(dt):
    """A walk whose pace switches, seen with noise: the model of a step of length dt."""
    leave = (1 - np.exp(-0.4 * dt)) / 2
    return SwitchingLinearGaussian(
        transition=[[1 - leave, leave], [leave, 1 - leave]],
        dynamics=[[1.0]],
        process_noise=[[[0.1 * dt]], [[2.0 * dt]]],
        observation=[[1.0]],
        observation_noise=[[0.5]],
        initial_mean=[0.0],
        initial_covariance=[[1.0]],
        initial_probability=[0.7, 0.3],
    )


@pytest.mark.parametrize("method", ["imm", "gpb2"])
def test_a_clock_gives_each_step_its_length(method, tmp_path):
    """Steps of different lengths are a model whose parameters vary in time."""
    times, y = np.array([0.5, 0.5, 2.0, 2.1, 6.0]), np.array([0.1, 0.3, 2.0, 1.7, -3.0])
    parts = [_after(dt) for dt in np.diff(times, prepend=0.0)]
    names = ("transition", "process_noise")
    whole = _after(1.0).replace(**{name: np.stack([getattr(p, name) for p in parts]) for name in names})
    post = whole.filter(y, method=method)
    state = _after(1.0).online(method=method, clock=_after)
    for t, (time, value) in enumerate(zip(times, y, strict=True)):
        state = state.predict(time=time).update([value]) if t == 1 else state.step([value], time=time)
        assert state.time == time
        np.testing.assert_allclose(state.mean, post.mean[t], atol=1e-12)
        if t == 2:
            state.save(tmp_path / "state")
            state = OnlineState.load(tmp_path / "state", _after)
    assert state.log_likelihood == pytest.approx(post.log_likelihood, abs=1e-11)
    got = state.forecast(2, every=3.0)
    want = OnlineState.after(post.model.replace(**{n: getattr(_after(3.0), n) for n in names}).filter(y[:1]))
    assert got.mean.shape == want.forecast(2).mean.shape
    np.testing.assert_allclose(got.mode_probability[0], state.mode_probability @ _after(3.0).transition)
    growth = np.diff(got.state_covariance[:, 0, 0])
    chance = got.mode_probability[1]
    np.testing.assert_allclose(growth, 3.0 * (chance @ [0.1, 2.0]), rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.step([0.0], time=1.0), r"time is 1.0, the last step was at 2.0: an .* out of sequence"),
        (lambda s: s.step([0.0]), "has a clock. Pass time="),
        (lambda s: s.forecast(2), "has a clock. Pass the time between"),
        (lambda s: s.forecast(2, every=-1.0), "every is -1.0"),
        (lambda s: s.step([0.0], time=np.nan), "time is nan"),
        (lambda _: _after(1.0).online().step([0.0], time=3.0), "no clock. Pass clock="),
        (lambda _: _after(1.0).online(clock=lambda dt: dt).step([0.0], time=3.0), "clock\\(3.0\\) gave 3.0"),
        (lambda _: _after(1.0).replace(start="first").online().forecast(2), "nothing was seen yet"),
    ],
)
def test_what_a_clock_refuses(call, message):
    state = _after(1.0).online(clock=_after).step([0.1], time=2.0)
    with pytest.raises(ValueError, match=message):
        call(state)
