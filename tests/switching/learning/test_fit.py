"""EM and maximum likelihood: fixed points, monotone traces, what is fixed stays, standard errors, reasons to
stop, bad input.
"""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm

from exptilt.switching import FitStatus, SwitchingLinearGaussian, fit_named_model
from exptilt.switching.learning.climb import climb
from exptilt.switching.learning.summary import Fit
from oracles.switching_models import random_model


def slope_of(model, y, names, method="gpb2", inputs=None):
    """Gradient of the log-likelihood in the named parameters."""
    leaves = {name: torch.tensor(getattr(model, name)).requires_grad_() for name in names}
    total = model.replace(**leaves).filter(y, method=method, inputs=inputs).log_likelihood.sum()
    return dict(zip(names, torch.autograd.grad(total, list(leaves.values())), strict=True))


@pytest.mark.slow
def test_em_ends_where_the_slope_is_zero():
    """One mode, so the E-step is exact: the trace never falls, and at its end the gradient vanishes.
    Components missing one by one, inputs too.
    """
    rng = np.random.default_rng(0)
    truth = random_model(
        rng,
        1,
        2,
        2,
        inputs=1,
        dynamics=[[0.8, 0.1], [-0.2, 0.5]],
        observation=np.eye(2),
        observation_noise=[[0.5, 0.3], [0.3, 0.5]],
    )
    u = rng.normal(size=(80, 1))
    y = truth.sample(80, inputs=u, generator=torch.Generator().manual_seed(0)).y
    y[rng.random(y.shape) < 0.15] = np.nan
    y[40] = np.nan
    options = {"inputs": u, "fixed": ("observation", "observation_offset", "process_noise", "transition")}
    start = truth.replace(
        dynamics=0.5 * np.eye(2),
        observation_noise=np.eye(2),
        dynamics_offset=np.zeros(2),
        observation_input=np.zeros((2, 1)),
    )
    fit = start.fit(y, max_steps=2000, tolerance=1e-6, **options)
    assert fit.status is FitStatus.CONVERGED
    assert fit.decreases == 0
    assert (np.diff(fit.trace) > -1e-9).all()
    names = ["dynamics", "observation_noise", "dynamics_offset", "dynamics_input", "observation_input"]
    before, after = (slope_of(model, y, names, inputs=u) for model in (start, fit.model))
    for name in names:
        assert after[name].abs().max() < 0.01 * before[name].abs().max(), name
    np.testing.assert_array_equal(fit.model.observation, start.observation)
    mle = start.fit(y, method="mle", tolerance=1e-9, **options)
    assert mle.log_likelihood == pytest.approx(fit.log_likelihood, abs=0.02)


def test_em_of_a_hidden_markov_chain_is_baum_welch():
    """No state: one EM step must be the textbook one."""
    rng = np.random.default_rng(1)
    y = np.concatenate([rng.normal(-1, 0.5, 40), rng.normal(2, 1.0, 60)])
    transition, level, sd, initial = (
        np.array([[0.9, 0.1], [0.3, 0.7]]),
        np.array([-0.5, 1.0]),
        np.array([0.8, 1.2]),
        np.array([0.6, 0.4]),
    )
    model = SwitchingLinearGaussian(
        transition=transition,
        dynamics=[[0.0]],
        process_noise=[[0.0]],
        observation=[[0.0]],
        observation_noise=(sd**2)[:, None, None],
        initial_mean=[0.0],
        initial_covariance=[[0.0]],
        initial_probability=initial,
        observation_offset=level[:, None],
        start="first",
    )
    fit = model.fit(y, fixed=("dynamics", "process_noise", "observation"), learn_initial=False, max_steps=1)
    density = norm.logpdf(y[:, None], level, sd)
    forward = [np.log(initial) + density[0]]
    for row in density[1:]:
        forward.append(logsumexp(forward[-1][:, None] + np.log(transition), axis=0) + row)
    backward = [np.zeros(2)]
    for row in density[:0:-1]:
        backward.append(logsumexp(np.log(transition) + row + backward[-1], axis=1))
    backward = backward[::-1]
    gamma = np.exp(np.array(forward) + backward - logsumexp(forward[-1]))
    pairs = sum(
        np.exp(
            forward[t][:, None]
            + np.log(transition)
            + density[t + 1]
            + backward[t + 1]
            - logsumexp(forward[-1])
        )
        for t in range(len(y) - 1)
    )
    assert fit.steps == 1
    np.testing.assert_allclose(fit.model.transition, pairs / pairs.sum(1, keepdims=True), atol=1e-9)
    mean = gamma.T @ y / gamma.sum(0)
    np.testing.assert_allclose(fit.model.observation_offset[:, 0], mean, atol=1e-9)
    np.testing.assert_allclose(
        fit.model.observation_noise[:, 0, 0],
        (gamma * (y[:, None] - mean) ** 2).sum(0) / gamma.sum(0),
        atol=1e-9,
    )
    assert fit.trace[0] == pytest.approx(logsumexp(forward[-1]), abs=1e-9)


def test_the_initial_law_is_learned_from_many_series():
    """One mode, everything else held: EM ends at the slope's zero; with a shared law of two modes the trace
    rises.
    """
    rng = np.random.default_rng(8)
    for M, shared in ((1, ()), (2, ("initial_mean", "initial_covariance"))):
        model = random_model(
            rng, M, 2, 2, observation=np.eye(2), observation_noise=0.2 * np.eye(2), start="first"
        )
        generator = torch.Generator().manual_seed(0)
        y = np.stack([model.sample(4, generator=generator).y for _ in range(60)])
        start = model.replace(initial_mean=np.zeros(2), initial_covariance=2 * np.eye(2))
        names = (
            "transition",
            "dynamics",
            "process_noise",
            "observation",
            "observation_noise",
            "dynamics_offset",
            "observation_offset",
        )
        fit = start.fit(y, fixed=names, shared=shared, learn_initial=True, max_steps=300, tolerance=1e-7)
        assert fit.log_likelihood > start.filter(y).log_likelihood.sum() + 1
        if M == 1:
            assert fit.decreases == 0
            for name, slope in slope_of(fit.model, y, ["initial_mean", "initial_covariance"]).items():
                assert slope.abs().max() < 0.05, name
        else:
            np.testing.assert_allclose(fit.model.initial_mean[0], fit.model.initial_mean[1])
        held = start.fit(y, fixed=names[1:], max_steps=1)
        np.testing.assert_array_equal(held.model.initial_mean, start.initial_mean)


def test_masks_and_sharing_hold_in_both_methods():
    rng = np.random.default_rng(2)
    truth = random_model(
        rng,
        2,
        2,
        1,
        transition=[[0.9, 0.1], [0.1, 0.9]],
        dynamics=[[0.6, 0.1], [1.0, 0.0]],
        observation=[[1.0, 0.0]],
        offsets=False,
    )
    truth = truth.replace(
        process_noise=[np.diag([0.1, 0.01]), np.diag([2.0, 0.01])], observation_noise=[[0.2]]
    )
    y = truth.sample(150, generator=torch.Generator().manual_seed(1)).y
    fixed = {
        "dynamics": [[False, False], [True, True]],
        "process_noise": [[False, True], [True, True]],
        "observation": True,
    }
    for method in ("em", "mle"):
        fit = truth.fit(
            y,
            method=method,
            fixed=fixed,
            shared=("dynamics", "observation_noise"),
            max_steps=30 if method == "em" else 300,
        )
        W, Q, R = fit.model.dynamics, fit.model.process_noise, fit.model.observation_noise
        np.testing.assert_allclose(W[0], W[1], atol=1e-12)
        np.testing.assert_array_equal(W[:, 1], [[1.0, 0.0]] * 2)
        assert (Q[:, 0, 1] == 0).all()
        assert Q[0, 0, 0] != Q[1, 0, 0]
        np.testing.assert_allclose(R[0], R[1], atol=1e-12)
        assert fit.log_likelihood > truth.filter(y).log_likelihood
        assert fit.free_parameters == 2 + 2 + 2 + 1
        assert fit.log_likelihood == pytest.approx(fit.model.filter(y).log_likelihood, abs=1e-8)
    assert np.isnan(fit.standard_errors["dynamics"][:, 1]).all()
    assert (fit.standard_errors["dynamics"][:, 0] > 0).all()


def test_standard_errors_of_a_mean():
    """One mode, no state: the level's is s/√N, the variance's s²√(2/N)."""
    rng = np.random.default_rng(3)
    y = rng.normal(3, 2, 400)
    model = SwitchingLinearGaussian(
        transition=[[1.0]],
        dynamics=[[0.0]],
        process_noise=[[0.0]],
        observation=[[0.0]],
        observation_noise=[[1.0]],
        initial_mean=[0.0],
        initial_covariance=[[0.0]],
        initial_probability=[1.0],
        observation_offset=[0.0],
    )
    for method in ("em", "mle"):
        fit = model.fit(
            y, method=method, fixed=("transition", "dynamics", "process_noise", "observation"), tolerance=1e-9
        )
        assert fit.model.observation_offset[0, 0] == pytest.approx(y.mean(), abs=1e-4)
        assert fit.model.observation_noise[0, 0, 0] == pytest.approx(y.var(), rel=1e-4)
        assert fit.standard_errors["observation_offset"][0, 0] == pytest.approx(y.std() / 20, rel=1e-3)
        assert fit.standard_errors["observation_noise"][0, 0, 0] == pytest.approx(
            y.var() * np.sqrt(2 / 400), rel=1e-3
        )
        assert fit.aic == pytest.approx(4 - 2 * fit.log_likelihood)
        assert fit.bic == pytest.approx(2 * np.log(400) - 2 * fit.log_likelihood)


def test_restarts_tensors_and_reasons():
    rng = np.random.default_rng(4)
    y = torch.from_numpy(np.concatenate([rng.normal(0, 1, 50), rng.normal(6, 1, 50)]))
    model = SwitchingLinearGaussian(
        transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64),
        dynamics=[[0.0]],
        process_noise=[[0.0]],
        observation=[[0.0]],
        observation_noise=[[4.0]],
        initial_mean=[0.0],
        initial_covariance=[[0.0]],
        initial_probability=[0.5, 0.5],
        observation_offset=[[3.0], [3.0]],
    )
    fixed = ("dynamics", "process_noise", "observation")
    # both modes are alike: a saddle that EM cannot leave, but the curvature shows the way
    alone = model.fit(y, fixed=fixed)
    found = model.fit(y, fixed=fixed, restarts=4, generator=torch.Generator().manual_seed(0))
    assert len(found.restarts) == 5
    assert found.log_likelihood == max(found.restarts)
    assert alone.log_likelihood == pytest.approx(found.log_likelihood, abs=1e-4)
    assert found.same_end == 5
    assert isinstance(found.model.observation_offset, torch.Tensor)
    short = model.fit(y, fixed=fixed, max_steps=1, tolerance=1e-12)
    assert short.status is FitStatus.MAX_STEPS
    assert "max_steps" in short.status.value


@pytest.mark.parametrize(
    ("y", "options", "words"),
    [
        (np.full(20, np.nan), {}, "every value is missing"),
        (np.full(20, 3.0), {}, "component 0 is constant"),
        (np.zeros((0, 1)), {}, "no rows"),
        (None, {"method": "bayes"}, "method is 'bayes'"),
        (None, {"fixed": ("speed",)}, "'speed' is not a parameter"),
        (None, {"filter": "exact"}, "filter is 'exact'"),
        (None, {"shared": ("transition",)}, "transition cannot be shared"),
        (None, {"fixed": {"dynamics": np.zeros((3, 3), bool)}}, "mask of dynamics has shape"),
        (None, {"skip": 5}, "EM cannot leave terms out"),
        (
            None,
            {
                "fixed": (
                    "transition",
                    "dynamics",
                    "process_noise",
                    "observation",
                    "observation_noise",
                    "dynamics_offset",
                    "observation_offset",
                )
            },
            "every parameter is fixed",
        ),
        (
            None,
            {
                "fixed": {"process_noise": [[False, True], [True, False]], "observation_noise": True},
                "method": "em",
                "restarts": -1,
            },
            "restarts=-1",
        ),
    ],
)
def test_fits_that_cannot_be(y, options, words):
    rng = np.random.default_rng(5)
    model = random_model(rng, 2, 2, 1)
    with pytest.raises(ValueError, match=words):
        model.fit(rng.normal(size=20) if y is None else y, **options)


def test_em_says_what_it_cannot_move():
    rng = np.random.default_rng(6)
    model = random_model(rng, 2, 2, 1, observation_noise=[[0.0]])
    with pytest.raises(ValueError, match="without noise EM cannot move it"):
        model.fit(
            rng.normal(size=30), fixed=("dynamics", "process_noise", "dynamics_offset", "observation_noise")
        )
    moving = random_model(rng, 2, 2, 1, steps=30)
    with pytest.raises(ValueError, match="varies in time"):
        moving.fit(rng.normal(size=30))


@pytest.mark.parametrize("kind", ["level", "local-level"])
def test_ready_models_find_what_was_put_in(kind):
    rng = np.random.default_rng(7)
    regime = (np.arange(300) // 50) % 2
    y = (
        np.where(regime, rng.normal(4, 2, 300), rng.normal(0, 1, 300))
        if kind == "level"
        else np.cumsum(rng.normal(size=300) * np.where(regime, 3, 0.2))
    )
    y[7] = np.nan
    fit = fit_named_model(y, kind=kind, starts=3)
    back = fit.model.smooth(y)
    assert ((back.mode_probability[:, 1] > 0.5) == regime).mean() > 0.9
    if kind == "level":
        np.testing.assert_allclose(fit.model.observation_offset[:, 0], [0, 4], atol=0.6)
    else:
        assert fit.model.process_noise[1, 0, 0] > 20 * fit.model.process_noise[0, 0, 0]
    assert fit.log_likelihood == pytest.approx(fit.model.filter(y).log_likelihood, abs=1e-4)


def level_model(M, **changes):
    """No state: a level and a variance a regime."""
    values = {
        "transition": np.eye(M)
        if M == 1
        else np.full((M, M), 0.1 / (M - 1)) + (0.9 - 0.1 / (M - 1)) * np.eye(M),
        "dynamics": [[0.0]],
        "process_noise": [[0.0]],
        "observation": [[0.0]],
        "observation_noise": np.ones((M, 1, 1)),
        "initial_mean": [0.0],
        "initial_covariance": [[0.0]],
        "initial_probability": np.full(M, 1 / M),
        "observation_offset": np.arange(M)[:, None],
        "start": "first",
    }
    return SwitchingLinearGaussian(**(values | changes))


NO_STATE = ("dynamics", "process_noise", "observation")


@pytest.mark.parametrize("shift", [1e6, 1e8])
def test_em_of_data_far_from_zero(shift):
    """The fit of shifted data is the shifted fit: sums of squares of the data themselves would lose all
    digits.
    """
    rng = np.random.default_rng(9)
    y = np.where(np.arange(200) // 40 % 2, rng.normal(4, 1.5, 200), rng.normal(0, 0.5, 200))
    y = np.round(y * 2**20) / 2**20  # so that y + shift loses little
    start = level_model(2, observation_offset=[[0.5], [3.0]])
    near = start.fit(y, fixed=NO_STATE)
    moved = start.replace(observation_offset=start.observation_offset + shift)
    far = moved.fit(y + shift, fixed=NO_STATE)
    np.testing.assert_allclose(far.model.observation_noise, near.model.observation_noise, rtol=1e-5)
    np.testing.assert_allclose(far.model.observation_offset - shift, near.model.observation_offset, atol=1e-5)
    assert far.log_likelihood == pytest.approx(near.log_likelihood, abs=1e-4)


def test_em_that_loses_a_regime_returns_its_best_step():
    """A regime that shrinks onto three equal points has no maximum; that is said, and the model returned is
    sound.
    """
    rng = np.random.default_rng(10)
    y = rng.normal(size=100)
    y[[20, 50, 80]] = 3.0
    start = level_model(2, observation_offset=[[0.0], [3.0]], observation_noise=[[[1.0]], [[1e-4]]])
    fit = start.fit(y, fixed=NO_STATE, max_steps=2000, tolerance=1e-12)
    assert fit.status is FitStatus.DEGENERATE
    assert fit.log_likelihood == fit.trace.max()
    assert fit.model.filter(y).log_likelihood == pytest.approx(fit.log_likelihood, abs=1e-6)


def test_a_likelihood_near_zero_at_the_start_does_not_end_the_climb():
    """The tolerance is in nats, whatever the log-likelihood was at the start."""
    rng = np.random.default_rng(11)
    y = 1e-3 * rng.normal(size=20_000)
    sd = 0.3985  # where a thousand points of size 0.001 have a log-likelihood of about 0
    start = level_model(1, observation_offset=[[0.0]], observation_noise=[[[sd**2]]])
    assert abs(start.filter(y).log_likelihood) < 300
    fit = start.fit(y, method="mle", fixed=(*NO_STATE, "transition"), tolerance=1e-6)
    best = norm.logpdf(y, y.mean(), y.std()).sum()
    assert fit.status is FitStatus.CONVERGED
    assert fit.log_likelihood == pytest.approx(best, abs=0.01)


def test_standard_errors_beside_a_transition_that_has_gone_to_zero():
    """Regimes visited as 0, 1, 2, 0, 1, 2: the levels' errors are known though transitions 0 → 2 never
    happen.
    """
    rng = np.random.default_rng(12)
    regime = (np.arange(360) // 20) % 3
    y = 10.0 * regime + rng.normal(size=360)
    start = level_model(3, observation_offset=[[0.0], [10.0], [20.0]])
    fit = start.fit(y, method="mle", fixed=NO_STATE, shared="observation_noise", tolerance=1e-10)
    errors = fit.standard_errors
    np.testing.assert_allclose(
        errors["observation_offset"][:, 0], y[regime == 0].std() / np.sqrt(120), rtol=0.15
    )
    never = fit.model.transition < 1e-6
    assert never.sum() == 3
    assert np.isnan(errors["transition"][never]).all()
    stay = np.diagonal(fit.model.transition)
    np.testing.assert_allclose(np.diagonal(errors["transition"]), np.sqrt(stay * (1 - stay) / 120), rtol=0.1)


def test_a_climb_that_finds_no_better_point_is_not_called_converged():
    def evaluate(x):  # a slope that is small beside the value, and points the wrong way
        return 1e6 + float((x - 1.0) @ (x - 1.0)), -2.0 * (x - 1.0)

    end = climb(evaluate, np.zeros(1), 50, 1e-6, False)
    assert end.status is FitStatus.STALLED
    assert "negative" in end.reason
    assert end.trace[0] == -1e6 - 1.0
    assert end.trace == sorted(end.trace)  # no step lowers the likelihood


def test_names_may_be_given_alone():
    rng = np.random.default_rng(13)
    y = rng.normal(size=60)
    start = level_model(2)
    one = start.fit(y, fixed=NO_STATE, shared="observation_noise", max_steps=3)
    many = start.fit(y, fixed=NO_STATE, shared=["observation_noise"], max_steps=3)
    assert one.log_likelihood == many.log_likelihood


@pytest.mark.parametrize("shift", [1e5, 1e7])
def test_em_of_a_level_that_wanders_far_from_zero(shift):
    """The state itself is large: the noise of its steps must not drown in squares of the state."""
    rng = np.random.default_rng(14)
    y = np.cumsum(rng.normal(size=150)) + 0.5 * rng.normal(size=150)
    values = {
        "transition": [[1.0]],
        "dynamics": [[1.0]],
        "process_noise": [[0.5]],
        "observation": [[1.0]],
        "observation_noise": [[0.5]],
        "initial_mean": [0.0],
        "initial_covariance": [[4.0]],
        "initial_probability": [1.0],
    }
    fixed = ("transition", "dynamics", "observation")
    start = SwitchingLinearGaussian(**values)
    near = start.fit(y, fixed=fixed, max_steps=40)
    moved = start.replace(initial_mean=[shift])
    far = moved.fit(y + shift, fixed=fixed, max_steps=40)
    np.testing.assert_allclose(far.model.process_noise, near.model.process_noise, rtol=1e-6)
    np.testing.assert_allclose(far.model.observation_noise, near.model.observation_noise, rtol=1e-6)


def test_repr_is_short():
    model = random_model(np.random.default_rng(0), 2, 1, 1)
    fit = Fit(
        model=model, log_likelihood=-1234.5678, status=FitStatus.MAX_STEPS, free_parameters=3, observations=20
    )
    assert repr(fit) == (
        "<Fit of SwitchingLinearGaussian: log-likelihood -1234.57, 3 free parameters, 20 observed values;\n"
        " stopped at max_steps; the log-likelihood was still rising>"
    )
