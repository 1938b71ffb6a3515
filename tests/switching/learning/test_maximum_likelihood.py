"""Published results, reproduced: Lam's model of GNP (Kim 1994), the federal funds rate (Stata's manual),
Hamilton's GNP (1989).
"""

import ast
import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from exptilt.switching import SwitchingLinearGaussian, fit_parameters

REFERENCE = json.loads((Path(__file__).parents[2] / "data" / "reference_lam_gnp.json").read_text())


def wheel_data(module, name):
    """A list of numbers written in a module of an installed wheel, read without running the module."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    values = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == name]
    return np.array(ast.literal_eval(values[0]), dtype=float)


def lam_data():
    return 100 * np.diff(np.log(np.array(REFERENCE["level"][:152])))


def lam_model(x):
    """Logits of staying, phi1, phi2, log sigma, recession offset, rise in booms; everything starts at its
    stationary law.
    """
    p, q = torch.sigmoid(x[0]), torch.sigmoid(x[1])
    transition = torch.stack([torch.stack([p, 1 - p]), torch.stack([1 - q, q])])
    W = torch.stack([x[2:4], torch.tensor([1.0, 0.0], dtype=torch.float64)])
    Q = torch.diag(torch.stack([torch.exp(2 * x[4]), torch.zeros((), dtype=torch.float64)]))
    P = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - torch.kron(W, W), Q.reshape(-1)).reshape(2, 2)
    return SwitchingLinearGaussian(
        transition=transition,
        dynamics=W,
        process_noise=Q,
        observation=[[1.0, -1.0]],
        observation_noise=[[0.0]],
        initial_mean=[0.0, 0.0],
        initial_covariance=(P + P.T) / 2,
        initial_probability=torch.stack([1 - q, 1 - p]) / (2 - p - q),
        observation_offset=torch.stack([x[5], x[5] + x[6]])[:, None],
    )


def published():
    logit = [np.log(REFERENCE["transition"][k][k] / (1 - REFERENCE["transition"][k][k])) for k in range(2)]
    low, high = REFERENCE["offset"]
    return torch.tensor(
        [*logit, *REFERENCE["phi"], np.log(REFERENCE["sigma"]), low, high - low], dtype=torch.float64
    )


def test_lam_likelihood_and_cycle():
    post = lam_model(published()).filter(lam_data())
    assert float(post.log_likelihood_terms[-129:].sum()) == pytest.approx(
        REFERENCE["log_likelihood"], abs=1e-5
    )
    np.testing.assert_allclose(post.mean[-129:, 0], REFERENCE["cycle"], atol=1e-4)


def test_lam_maximum_likelihood_from_a_rough_start():
    fit = fit_parameters(lam_model, [0.0, 1.5, 0.5, 0.0, 0.0, 0.0, 1.0], lam_data(), skip=22, progress=False)
    assert fit.log_likelihood == pytest.approx(REFERENCE["log_likelihood"], abs=1e-5)
    np.testing.assert_allclose(fit.parameters[2:], published()[2:], atol=1e-3)
    np.testing.assert_allclose(fit.model.transition, REFERENCE["transition"], atol=1e-3)
    assert (fit.standard_errors > 0).all()


def test_federal_funds():
    """Statsmodels' test data and Stata's results: log-likelihood −508.63592, its smoothed probabilities and
    its standard errors.
    """
    y = wheel_data("statsmodels.tsa.regime_switching.tests.test_markov_regression", "fedfunds")

    def build(x):
        p, q = torch.sigmoid(x[0]), torch.sigmoid(x[1])
        return SwitchingLinearGaussian(
            transition=torch.stack([torch.stack([p, 1 - p]), torch.stack([1 - q, q])]),
            dynamics=[[0.0]],
            process_noise=[[0.0]],
            observation=[[0.0]],
            observation_noise=torch.exp(2 * x[4]).reshape(1, 1),
            initial_mean=[0.0],
            initial_covariance=[[0.0]],
            initial_probability=torch.stack([1 - q, 1 - p]) / (2 - p - q),
            observation_offset=x[2:4, None],
            start="first",
        )

    logit = [np.log(0.9820939 / 0.0179061), np.log(0.9496413 / 0.0503587)]
    at = torch.tensor([*logit, 3.70877, 9.556793, np.log(2.107562)], dtype=torch.float64)
    for method in ("gpb2", "imm", "gpb1"):
        assert float(build(at).filter(y, method=method).log_likelihood) == pytest.approx(-508.63592, abs=1e-4)
    fit = fit_parameters(build, [2.0, 2.0, 2.0, 8.0, 1.0], y, progress=False)
    assert fit.log_likelihood == pytest.approx(-508.63592, abs=1e-4)
    np.testing.assert_allclose(fit.parameters[2:4], [3.70877, 9.556793], atol=1e-3)
    np.testing.assert_allclose(fit.standard_errors[2:4], [0.1767083, 0.2999889], rtol=1e-3)


def test_hamilton_gnp():
    """An autoregression around a switching mean: 2^5 modes that remember the last five regimes, lags as
    inputs. Log-likelihood −181.26339.
    """
    series = wheel_data("statsmodels.tsa.regime_switching.tests.test_markov_autoregression", "rgnp")
    stay, mean, phi = (0.754673, 0.095915), (-0.358811, 1.163516), (0.013486, -0.057521, -0.246983, -0.212923)
    variance = np.exp(-0.262658) ** 2
    lags = len(phi)
    base = np.array([[stay[0], 1 - stay[0]], [stay[1], 1 - stay[1]]])
    pasts = list(itertools.product(range(2), repeat=lags + 1))  # most recent regime first
    M = len(pasts)
    transition = np.zeros((M, M))
    for i, past in enumerate(pasts):
        for k in range(2):
            transition[i, pasts.index((k, *past[:-1]))] = base[past[0], k]
    ergodic = np.array([stay[1], 1 - stay[0]]) / (stay[1] + 1 - stay[0])
    start = np.array(
        [ergodic[past[-1]] * np.prod([base[past[k + 1], past[k]] for k in range(lags)]) for past in pasts]
    )
    offset = np.array(
        [mean[past[0]] - sum(phi[k] * mean[past[k + 1]] for k in range(lags)) for past in pasts]
    )
    y = series[lags:]
    inputs = np.stack([series[lags - 1 - k : len(series) - 1 - k] for k in range(lags)], 1)

    model = SwitchingLinearGaussian(
        transition=transition,
        dynamics=[[0.0]],
        process_noise=[[0.0]],
        observation=[[0.0]],
        observation_noise=[[variance]],
        initial_mean=[0.0],
        initial_covariance=[[0.0]],
        initial_probability=start / start.sum(),
        observation_offset=offset[:, None],
        observation_input=np.array(phi)[None],
        start="first",
    )
    for method in ("imm", "gpb2"):
        assert model.filter(y, inputs=inputs, method=method).log_likelihood == pytest.approx(
            -181.26339, abs=1e-4
        )
