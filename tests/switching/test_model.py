"""Batches whose series have models of their own: each series is what its own model gives alone."""

import numpy as np
import pytest
import torch

from exptilt.switching import SwitchingLinearGaussian
from exptilt.switching.inference.filter import filter_series
from exptilt.switching.inference.smooth import smooth_series
from oracles.switching_models import random_data, random_model

RESULTS = (
    "log_likelihood",
    "mean",
    "covariance",
    "mode_probability",
    "innovation",
    "predicted_mode_covariance",
)


@pytest.mark.parametrize("method", ["imm", "gpb2", "exact"])
@pytest.mark.parametrize("options", [{}, {"start": "first", "steps": 7}, {"inputs": 1, "mixed": True}])
def test_each_series_is_that_of_its_own_model(method, options):
    rng = np.random.default_rng(0)
    options = dict(options)
    mixed = options.pop("mixed", False)
    models = [random_model(rng, 2, 2, 2, **options) for _ in range(3)]
    if mixed:  # some vary in time, others do not
        models[1] = models[1].replace(dynamics=rng.normal(size=(7, 2, 2, 2)) * 0.5)
    y = np.stack([random_data(rng, 5, 2) for _ in models])
    u = rng.normal(size=(3, 7, 1)) if "inputs" in options else None
    inputs = {} if u is None else {"inputs": u[:, :5]}
    post, back = (
        filter_series(models, y, method=method, **inputs),
        smooth_series(models, y, method=method, **inputs),
    )
    ahead = post.forecast(2, inputs=None if u is None else u[:, 5:])
    for k, model in enumerate(models):
        own = {} if u is None else {"inputs": u[k, :5]}
        alone, alone_back = model.filter(y[k], method=method, **own), model.smooth(y[k], method=method, **own)
        for name in RESULTS:
            np.testing.assert_allclose(getattr(post, name)[k], getattr(alone, name), atol=1e-12, err_msg=name)
        np.testing.assert_allclose(back.mean[k], alone_back.mean, atol=1e-12)
        want = alone.forecast(2, inputs=None if u is None else u[k, 5:])
        np.testing.assert_allclose(ahead.mean[k], want.mean, atol=1e-12)
        np.testing.assert_allclose(ahead.covariance[k], want.covariance, atol=1e-12)


def test_gradients_reach_each_model():
    rng = np.random.default_rng(1)
    y = np.stack([random_data(rng, 5, 1) for _ in range(2)])
    models, leaves = [random_model(rng, 2, 2, 1) for _ in range(2)], []
    tensors = [
        {
            name: torch.tensor(value).requires_grad_()
            for name, value in vars(model).items()
            if isinstance(value, np.ndarray)
        }
        for model in models
    ]
    posts = filter_series([SwitchingLinearGaussian(**values) for values in tensors], y, method="imm")
    leaves = [values["dynamics"] for values in tensors]
    slopes = torch.autograd.grad(posts.log_likelihood.sum() + posts.mean.sum(), leaves)
    for values, data, slope in zip(tensors, y, slopes, strict=True):
        alone = SwitchingLinearGaussian(**values).filter(data, method="imm")
        (want,) = torch.autograd.grad(alone.log_likelihood + alone.mean.sum(), values["dynamics"])
        torch.testing.assert_close(slope, want)


def test_what_is_refused():
    rng = np.random.default_rng(2)
    one, other = random_model(rng, 2, 2, 1), random_model(rng, 2, 2, 2)
    with pytest.raises(ValueError, match="model 1 differs from model 0 in modes, states, outputs"):
        filter_series([one, other], np.zeros((2, 3, 1)))
    with pytest.raises(ValueError, match="2 models and 3 series"):
        filter_series([one, one], np.zeros((3, 3, 1)))
    with pytest.raises(ValueError, match="pass a model, or a list of models"):
        filter_series([], np.zeros((3, 3, 1)))
