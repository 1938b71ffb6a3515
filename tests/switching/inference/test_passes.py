"""The hand-written derivative against finite differences and, for `exact`, autograd; over methods and options
mixed at random.
"""

import numpy as np
import pytest
import torch

from exptilt.switching import SwitchingLinearGaussian
from oracles.switching_models import random_data, random_model

OPTIONS = [
    {"M": 2, "n": 2, "m": 1},
    {"M": 3, "n": 1, "m": 2, "start": "first", "maps": True},
    {"M": 2, "n": 2, "m": 2, "inputs": 1, "steps": None},
    {"M": 2, "n": 3, "m": 2, "steps": 5, "maps": True},
    {"M": 1, "n": 2, "m": 2, "start": "first"},
]
NAMES = [
    "transition",
    "dynamics",
    "process_noise",
    "observation",
    "observation_noise",
    "initial_mean",
    "initial_covariance",
    "initial_probability",
    "dynamics_offset",
    "observation_offset",
    "dynamics_input",
    "observation_input",
    "maps",
    "map_covariance",
]
RESULTS = [
    "log_likelihood_terms",
    "mode_probability",
    "mean",
    "covariance",
    "mode_mean",
    "mode_covariance",
    "predicted_mode_probability",
    "predicted_mean",
    "predicted_covariance",
    "innovation",
    "innovation_covariance",
]


def tensors(model):
    return {name: torch.tensor(getattr(model, name)) for name in NAMES if getattr(model, name) is not None}


@pytest.mark.parametrize("case", range(len(OPTIONS)))
@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1", "exact"])
def test_every_parameter(case, method):
    rng = np.random.default_rng(case)
    model = random_model(rng, **OPTIONS[case])
    start = tensors(model)
    T = 5 if method != "exact" else 2
    y = torch.from_numpy(np.stack([random_data(rng, T, model.outputs), random_data(rng, T, model.outputs)]))
    u = rng.normal(size=(T, 1)) if "inputs" in OPTIONS[case] else None
    seen = {}

    def value(values, data):
        """A random combination of all that is differentiable: terms, probabilities, moments, predictions."""
        post = SwitchingLinearGaussian(**values, start=model.start).filter(data, method=method, inputs=u)
        total = 0.0
        for name in RESULTS:
            result = getattr(post, name)
            weight = seen.setdefault(name, torch.from_numpy(rng.normal(size=result.shape)))
            total = total + (weight * result).nansum()
        return total

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    slopes = torch.autograd.grad(value(leaves, y), list(leaves.values()))
    for (name, tensor), slope in zip(start.items(), slopes, strict=True):
        direction = torch.from_numpy(rng.normal(size=tensor.shape))
        if name in ("transition", "initial_probability"):
            direction = direction - direction.mean(-1, keepdim=True)
        if "noise" in name or "covariance" in name:
            direction = direction + direction.mT
        h = 1e-6
        ends = [float(value(start | {name: tensor + sign * h * direction}, y)) for sign in (1, -1)]
        numeric = (ends[0] - ends[1]) / (2 * h)
        assert float((slope * direction).sum()) == pytest.approx(numeric, rel=2e-6, abs=2e-6), name


@pytest.mark.parametrize("method", ["gpb2", "imm", "gpb1"])
def test_derivative_in_the_data(method):
    rng = np.random.default_rng(3)
    model = random_model(rng, 2, 2, 2)
    y = torch.from_numpy(rng.normal(size=(4, 2)))
    y[1, 0] = torch.nan
    leaf = y.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.filter(leaf, method=method).log_likelihood, leaf)
    assert slope[1, 0] == 0
    for t, a in [(0, 0), (1, 1), (3, 0)]:
        h = torch.zeros_like(y)
        h[t, a] = 1e-6
        numeric = (
            float(
                model.filter(y + h, method=method).log_likelihood
                - model.filter(y - h, method=method).log_likelihood
            )
            / 2e-6
        )
        assert float(slope[t, a]) == pytest.approx(numeric, rel=1e-6, abs=1e-6)


def test_structural_zeros_and_unreachable_modes_have_finite_derivatives():
    rng = np.random.default_rng(4)
    model = random_model(
        rng,
        3,
        1,
        1,
        transition=[[0.9, 0.1, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        initial_probability=[0.7, 0.3, 0.0],
    )
    for method in ("gpb2", "imm", "gpb1"):
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors(model).items()}
        total = (
            SwitchingLinearGaussian(**leaves).filter(rng.normal(size=(20, 1)), method=method).log_likelihood
        )
        slopes = torch.autograd.grad(total, list(leaves.values()))
        assert torch.isfinite(total)
        assert all(torch.isfinite(slope).all() for slope in slopes)
        assert slopes[1][2].abs().sum() == 0  # nothing ever moves by mode 2's dynamics


def test_float32_in_float32_out():
    rng = np.random.default_rng(5)
    model = random_model(rng, 2, 2, 1)
    y = torch.from_numpy(rng.normal(size=(6, 1))).float().requires_grad_()
    post = model.filter(y)
    assert post.log_likelihood.dtype == post.mean.dtype == post.mode_probability.dtype == torch.float32
    single = {
        name: torch.tensor(getattr(model, name)).float() for name in NAMES if getattr(model, name) is not None
    }
    assert (
        SwitchingLinearGaussian(**single).filter(y.detach()).mean.dtype == torch.float32
    )  # rounded covariances pass the checks
    post.log_likelihood.backward()
    assert y.grad.dtype == torch.float32


def test_no_derivative_where_there_is_none():
    rng = np.random.default_rng(6)
    model = random_model(rng, 2, 1, 1)
    y = torch.from_numpy(rng.normal(size=(6, 1))).requires_grad_()
    with pytest.raises(ValueError, match="particle filter has no derivative"):
        model.filter(y, method="rbpf")
    with pytest.raises(ValueError, match="keeps nothing to differentiate"):
        model.filter(y, store="last")
    post = model.filter(y)
    with pytest.raises(ValueError, match="has no derivative"):
        _ = post.mixing_probability
    with pytest.raises(ValueError, match="forecast has no derivative"):
        post.forecast(1)
    with torch.no_grad():
        assert not post.mean.requires_grad
        post.forecast(1)
    with pytest.raises(ValueError, match=r"smooth: .* no derivative"):
        model.smooth(y)
