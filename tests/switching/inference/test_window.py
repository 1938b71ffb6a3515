"""GPB_k for any k, against the enumeration of mode paths (THEORY E1)."""

import numpy as np
import pytest
import torch

from exptilt._support.errors import ArgumentError
from exptilt.switching import SwitchingLinearGaussian, fit_parameters
from exptilt.switching.inference.window import follows, newest
from exptilt.switching.parameters import INITIAL


def _covariance(rng, *shape):
    A = rng.normal(size=(*shape, shape[-1]))
    return A @ A.swapaxes(-1, -2) + 0.3 * np.eye(shape[-1])


def _model(M=2, seed=0, **changes):
    rng = np.random.default_rng(seed)
    n, m = 2, 1
    transition = rng.dirichlet(np.ones(M), M)
    values = {
        "transition": transition,
        "dynamics": 0.6 * rng.normal(size=(M, n, n)),
        "process_noise": _covariance(rng, M, n),
        "observation": rng.normal(size=(M, m, n)),
        "observation_noise": _covariance(rng, M, m),
        "initial_mean": rng.normal(size=(M, n)),
        "initial_covariance": _covariance(rng, n),
        "initial_probability": rng.dirichlet(np.ones(M)),
    }
    return SwitchingLinearGaussian(**(values | changes)), 3 * rng.normal(size=(6, m))


def test_windows_follow_one_another():
    now = newest(3, 4, "filter")
    table = follows(now)
    assert table.shape == (27, 27)
    assert (table.sum(0) == 3).all()
    assert (table.sum(1) == 3).all()
    modes = [(w // 9, w // 3 % 3, w % 3) for w in range(27)]
    for w, v in np.argwhere(table):
        assert modes[w][1:] == modes[v][:-1]


@pytest.mark.parametrize("start", ["before", "first"])
@pytest.mark.parametrize("diffuse", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_exact_for_k_beyond_the_series(start, diffuse, mapped):
    changes = {"start": start}
    if diffuse:
        changes["initial_covariance"] = np.diag([np.inf, 1.0])
    if mapped:
        rng = np.random.default_rng(5)
        changes |= {"maps": rng.normal(size=(2, 2, 2, 2)), "map_covariance": _covariance(rng, 2, 2, 2)}
    model, y = _model(**changes)
    y = y[:4].copy()
    y[1] = np.nan
    want, back = model.filter(y, method="exact"), model.smooth(y, method="exact")
    got = model.filter(y, method="gpb5")
    smooth = model.smooth(
        y, method="gpb6"
    )  # nothing may be merged at the end, the mode before the data included
    names = ("log_likelihood_terms", "mode_probability", "mean", "covariance", "mode_mean", "mode_covariance")
    for name in (*names, "mixing_probability", "predicted_mean", "innovation_covariance"):
        np.testing.assert_allclose(
            getattr(got, name), getattr(want, name), rtol=1e-7, atol=1e-9, err_msg=name
        )
    for name in ("mode_probability", "mean", "covariance", "pair_probability"):
        found, known = getattr(smooth, name), getattr(back, name)
        np.testing.assert_allclose(found, known, rtol=1e-6, atol=1e-8, err_msg=name)


def test_error_falls_with_k():
    """The mean distance to the exact likelihood over some models falls with each k, to nothing."""
    errors = np.zeros(7)
    for seed in range(6):
        model, y = _model(seed=seed)
        exact = model.filter(y, method="exact").log_likelihood
        errors += [abs(model.filter(y, method=f"gpb{k}").log_likelihood - exact) for k in range(1, 8)]
    assert (np.diff(errors[:5]) < 0).all()
    assert errors[4] < errors[1] / 20
    assert errors[6] < 1e-11  # nothing is collapsed before the likelihood of a series of 6 steps is known


def test_third_order_forgets_at_the_third_step():
    """GPB3 is exact for two steps after the mode before them, and is not for three."""
    model, y = _model(M=3, seed=2)
    y = y[:3]
    two = model.filter(y[:2], method="exact")
    got = model.filter(y, method="gpb3")
    np.testing.assert_allclose(got.log_likelihood_terms[:2], two.log_likelihood_terms, rtol=1e-12)
    exact = model.filter(y, method="exact").log_likelihood
    gap = [abs(model.filter(y, method=f"gpb{k}").log_likelihood - exact) for k in (2, 3, 4)]
    assert gap[0] > gap[1] > 1e-9 > gap[2]


def test_counts_of_laws():
    model, y = _model(M=3)
    kept = {m: model.filter(y, method=m).laws_kept for m in ("gpb1", "gpb2", "imm", "gpb3", "gpb5", "exact")}
    assert kept == {"gpb1": 1, "gpb2": 3, "imm": 3, "gpb3": 9, "gpb5": 81, "exact": 3**7}
    updated = {m: model.online(method=m).laws_updated for m in ("gpb1", "imm", "gpb2")}
    assert updated == {"gpb1": 3, "imm": 3, "gpb2": 9}


def test_batches_inputs_and_the_last_step():
    rng = np.random.default_rng(1)
    changes = {"dynamics_input": rng.normal(size=(2, 2, 1)), "observation_offset": rng.normal(size=(2, 1))}
    model, y = _model(**changes)
    u = rng.normal(size=(6, 1))
    both = model.filter([y, y[:4]], method="gpb4", inputs=u)
    one = model.filter(y[:4], method="gpb4", inputs=u)
    np.testing.assert_allclose(both.mean[1], one.mean, rtol=1e-12)
    last = model.filter(y, method="gpb4", inputs=u, store="last")
    np.testing.assert_allclose(last.mode_mean, both.mode_mean[0][-1], rtol=1e-12)
    np.testing.assert_allclose(last.log_likelihood, both.log_likelihood[0], rtol=1e-12)


def test_structural_zeros():
    """A chain that cannot go everywhere, and starts in one mode: exact all the same."""
    transition = np.array([[0.5, 0.5, 0.0], [0.0, 0.3, 0.7], [1.0, 0.0, 0.0]])
    model, y = _model(M=3, transition=transition, initial_probability=[0.0, 1.0, 0.0])
    want, got = model.filter(y[:4], method="exact"), model.filter(y[:4], method="gpb5")
    np.testing.assert_allclose(got.log_likelihood_terms, want.log_likelihood_terms, rtol=1e-10)
    np.testing.assert_allclose(got.mean, want.mean, rtol=1e-10)
    assert np.isfinite(got.mode_covariance).all()


def test_gradient_through_windows():
    model, y = _model()
    W = torch.tensor(model.dynamics, requires_grad=True)
    P = torch.tensor(model.transition, requires_grad=True)
    post = model.replace(dynamics=W, transition=P).filter(y, method="gpb3")
    post.log_likelihood.backward()
    one = np.zeros((2, 2, 2))
    one[0, 0, 1] = 1e-6
    for tensor, name, step in (
        (W, "dynamics", one),
        (P, "transition", np.array([[1e-6, -1e-6], [0.0, 0.0]])),
    ):
        ends = [
            model.replace(**{name: tensor.detach().numpy() + sign * step})
            .filter(y, method="gpb3")
            .log_likelihood
            for sign in (1, -1)
        ]
        want = (ends[0] - ends[1]) / 2e-6
        got = float((tensor.grad * torch.from_numpy(step)).sum()) / 1e-6
        assert got == pytest.approx(want, rel=1e-6)


def test_fits_by_windows():
    """The likelihood that is climbed is that of GPB3, and its summary and regimes are too; EM says no."""
    model, _ = _model(seed=3)
    y = model.sample(40, generator=torch.Generator().manual_seed(0)).y
    held = ("transition", "process_noise", "observation", "observation_noise")
    fit = model.fit(y, method="mle", filter="gpb3", fixed=held)
    assert fit.log_likelihood == pytest.approx(fit.model.filter(y, method="gpb3").log_likelihood, abs=1e-9)
    assert fit.log_likelihood > model.filter(y, method="gpb3").log_likelihood
    assert "log-likelihood" in fit.summary()
    np.testing.assert_allclose(
        fit.regime_probability(), fit.model.smooth(y, method="gpb3").mode_probability, rtol=1e-12
    )
    tensors = {name: torch.from_numpy(getattr(model, name)) for name in (*held, "dynamics")}
    tensors |= {name: torch.from_numpy(getattr(model, name)) for name in INITIAL}
    found = fit_parameters(
        lambda x: SwitchingLinearGaussian(**(tensors | {"dynamics": x[0] * tensors["dynamics"]})),
        [1.0],
        y,
        filter="gpb3",
    )
    want = found.model.filter(y, method="gpb3").log_likelihood
    assert found.log_likelihood == pytest.approx(float(want), abs=1e-9)
    with pytest.raises(ArgumentError, match=r"filter is 'gpb3', and EM takes one of .*Use method=\"mle\""):
        model.fit(y, filter="gpb3")
    with pytest.raises(ArgumentError, match="fit_parameters: filter is 'gpb0'"):
        fit_parameters(lambda x: model, [1.0], y, filter="gpb0")


def test_bad_orders_are_refused():
    model, y = _model(M=4)
    with pytest.raises(ArgumentError, match=r"M\^8 laws, which with 4 modes are 65536, more than 1024"):
        model.filter(y, method="gpb9")
    for name in ("gpb0", "gpb", "gpb2.5", "gpb-3"):
        with pytest.raises(ArgumentError, match=f"method is '{name}'"):
            model.filter(y, method=name)
    singular = model.replace(observation_noise=np.zeros((4, 1, 1)), observation=np.zeros((4, 1, 2)))
    with pytest.raises(ArgumentError, match=r"gpb3: at step 0 of series 0 .* of mode 0 is not positive"):
        singular.filter(y, method="gpb3")
