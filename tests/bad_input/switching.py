"""Bad input to switching models, their fits, and attention as a filter."""

import numpy as np
import torch

from exptilt import families as f
from exptilt.switching import (
    DiscountedDynamics,
    LinearDynamics,
    OnlineState,
    SwitchingFamily,
    SwitchingLinearGaussian,
    SwitchingNonlinear,
    as_filter,
    attention_as_imm,
    compare,
    dynamic_factor,
    fit_named_model,
    fit_parameters,
    local_level,
    local_linear_trend,
    markov_autoregression,
    markov_regression,
    markov_var,
    time_varying_regression,
    unobserved_cycle,
)
from exptilt.switching.nonlinear import fit_nonlinear
from oracles.level_regimes import level_model

F64 = torch.float64
Y = np.random.default_rng(0).normal(size=40)
GAMMA = f.Gamma(torch.ones(1), torch.ones(1))
MODEL = SwitchingFamily(torch.ones(1, 1), GAMMA, f.Poisson, [DiscountedDynamics(0.9, GAMMA)])
MATRICES = {
    "transition": [[0.9, 0.1], [0.2, 0.8]],
    "dynamics": [[[1.0]]] * 2,
    "observation": [[[1.0]]] * 2,
    "process_noise": [[[1.0]]] * 2,
    "observation_noise": [[[1.0]]] * 2,
    "initial_probability": [0.5, 0.5],
    "initial_mean": [[0.0]] * 2,
    "initial_covariance": [[[1.0]]] * 2,
}
FUNCTIONS = {
    "transition": np.eye(2),
    "dynamics": [lambda x: x, lambda x: x],
    "process_noise": np.eye(2),
    "observation": lambda x: x[..., :1],
    "observation_noise": np.eye(1),
    "initial_mean": [0.0, 0.0],
    "initial_covariance": np.eye(2),
    "initial_probability": [0.5, 0.5],
}
HEAD = torch.zeros(1, 4, 2)

ROWS = [
    (lambda: markov_regression(Y, regimes=0), "regimes", "regimes is 0"),
    (lambda: markov_regression(Y, switching="level"), "switching", "switching is"),
    (lambda: markov_regression(Y, switching="autoregression"), "switching", "switching is"),
    (lambda: markov_regression(Y, np.ones(3)), "y", "y has 40 rows, x has 3"),
    (lambda: markov_regression(np.ones(40)), "y", "no two different values"),
    (lambda: markov_regression(np.stack([Y, Y])[..., None]), "series", "2 series"),
    (lambda: markov_regression(Y[:5]), "series", "5 observations"),
    (lambda: markov_autoregression(Y, order=0), "order", "order is 0"),
    (lambda: markov_autoregression(Y, order=9), "order", "1024 modes"),
    (lambda: markov_autoregression(np.where(Y > 1, np.nan, Y), order=1), "y", "cannot be a lag"),
    (lambda: markov_var(Y, order=0), "order", "order is 0"),
    (lambda: markov_var(Y, order=9, switching="mean"), "regimes", "1024 modes"),
    (lambda: markov_var(Y, switching=("mean", "intercept")), "switching", "switching is"),
    (lambda: markov_var(np.where(Y > 1, np.nan, Y)), "y", "cannot be lags"),
    (lambda: markov_var(Y[:2]), "y", "more than 2 rows"),
    (lambda: markov_var(np.stack([Y, 2 * Y], 1)), "column", "column 1 is a combination"),
    (lambda: markov_var(np.stack([Y, np.arange(40.0)], 1)), "column", "explain column 1 exactly"),
    (lambda: markov_regression(Y, 3 * Y + 1), "y", "explain y exactly"),
    (lambda: markov_autoregression(np.sin(0.3 * np.arange(60)), order=2), "y", "explain y exactly"),
    (lambda: markov_var(Y, regimes=1, switching=()).impulse_response(0), "steps", "steps is 0"),
    (lambda: markov_var(Y, regimes=1, switching=()).impulse_response(2, shock="x"), "shock", "shock is 'x'"),
    (lambda: markov_regression(Y, regimes=1).impulse_response(2), "fit", "no lags"),
    (lambda: markov_regression(Y, regimes=1).future_paths(2), "fit", "other inputs than lags"),
    (lambda: time_varying_regression(Y, np.ones(3)), "x", "y has 40 rows"),
    (lambda: time_varying_regression(Y, np.zeros(40)), "x", "constant"),
    (lambda: dynamic_factor(np.stack([Y, Y**2], 1), loading_lags=-1), "loading_lags", "loading_lags is -1"),
    (lambda: dynamic_factor(np.stack([Y, Y**2], 1), skip=40), "skip", "skip is 40"),
    (lambda: local_level(Y, switching="slope"), "switching", "switching is"),
    (lambda: local_level(Y, regimes=0), "regimes", "regimes is 0"),
    (lambda: local_level(Y, fixed={"slope": 1.0}), "fixed", "fixed has 'slope'"),
    (lambda: unobserved_cycle(Y, order=0), "order", "order is 0"),
    (lambda: unobserved_cycle(Y, periods=(9, 3)), "periods", "periods is"),
    (lambda: unobserved_cycle(Y, order=1, fixed={"autoregression": [1.0]}), "dynamics", "no stationary law"),
    (lambda: dynamic_factor(Y), "y", "2 components up"),
    (lambda: local_level(np.ones(40)), "component", "constant"),
    (lambda: level_model().walk_forward(Y, first=1), "first", "first=1"),
    (lambda: level_model().walk_forward(Y, options={"fix": 1}), "options", "not known"),
    (lambda: compare(Y, modes=()), "y", "modes="),
    (lambda: compare(Y, first=99), "y", "first=99"),
    (lambda: DiscountedDynamics(0.0, GAMMA), "discount", "discount is 0.0"),
    (lambda: DiscountedDynamics(1.5, GAMMA), "discount", "discount is 1.5"),
    (lambda: DiscountedDynamics(0.5, "rest"), "rest", "one member"),
    (lambda: DiscountedDynamics(0.5, GAMMA)(f.Beta(torch.ones(1), torch.ones(1))), "rest", "same family"),
    (
        lambda: LinearDynamics(torch.eye(1), torch.eye(1))(f.Beta(torch.ones(1), torch.ones(1))),
        "belief",
        "Only Gaussian and Gamma",
    ),
    (
        lambda: LinearDynamics(torch.zeros(1, 1), torch.zeros(1, 1))(f.Beta(torch.ones(1), torch.ones(1))),
        "dynamics",
        "dynamics is singular",
    ),
    (
        lambda: SwitchingFamily(torch.ones(1, 1), GAMMA, f.BernoulliProduct, [DiscountedDynamics(1, GAMMA)]),
        "Gamma",
        "not conjugate",
    ),
    (
        lambda: SwitchingFamily(torch.ones(2, 2), GAMMA, f.Poisson, [DiscountedDynamics(1, GAMMA)]),
        "transition",
        "transition must be",
    ),
    (
        lambda: SwitchingFamily(torch.full((1, 1), 0.5), GAMMA, f.Poisson, [DiscountedDynamics(1, GAMMA)]),
        "transition",
        "sum to 1",
    ),
    (lambda: SwitchingFamily(torch.ones(1, 1), GAMMA, f.Poisson, [3]), "dynamics", "map of beliefs"),
    (lambda: LinearDynamics(torch.eye(2), torch.eye(1)), "dynamics", "one size"),
    (lambda: LinearDynamics(-torch.eye(1), torch.eye(1))(GAMMA), "dynamics", "at least 0"),
    (lambda: LinearDynamics(torch.eye(1), -torch.eye(1)), "process_noise", "diagonal"),
    (
        lambda: SwitchingFamily(
            torch.ones(1, 1), GAMMA, f.Poisson, [DiscountedDynamics(1, f.Gamma(torch.ones(2), torch.ones(2)))]
        ),
        "prior",
        "same dimension",
    ),
    (lambda: MODEL.filter(torch.tensor([[1.0], [-2.0]])), "y", "step 1 is .-2.0., which Poisson cannot give"),
    (lambda: MODEL.filter(torch.tensor([[[1.0]], [[0.5]]])), "series", "of series 1 at step 0"),
    (lambda: MODEL.filter(torch.tensor([[torch.inf]])), "y", "finite"),
    (lambda: MODEL.filter(torch.tensor([[1.0, 2.0]])), "y", "2 columns"),
    (lambda: MODEL.filter(torch.tensor([[1.0], [1e300]], dtype=F64)), "belief", "step 1"),
    (lambda: MODEL.smooth(torch.tensor([[1.0]]), lag=0), "lag", "lag is 0"),
    (lambda: MODEL.fit(torch.tensor([[torch.nan]])), "every", "every row is missing"),
    (lambda: MODEL.fit(torch.tensor([[1.0]]), fixed=("prior",)), "fixed", "fixed is"),
    (lambda: MODEL.fit(torch.tensor([[1.0]]), fixed=("discount", "rest")), "fixed", "nothing is left"),
    (lambda: MODEL.filter(torch.ones(1, 2, 1, 1)), "y", "shape"),
    (lambda: MODEL.filter([["a"]]), "y", "not a numeric array"),
    (lambda: MODEL.filter([[1], [2, 3]]), "y", "rows have different lengths"),
    (lambda: MODEL.filter([]), "y", "has no rows"),
    (lambda: MODEL.filter(torch.tensor([[1.0]]), method="gpb0"), "method", "method is 'gpb0'"),
    (
        lambda: MODEL.forecast(MODEL.filter(torch.tensor([[1.0]])), 1, levels=(1.0,)),
        "levels",
        "levels is 1.0",
    ),
    (
        lambda: attention_as_imm(
            torch.ones(1, 4, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 3), torch.ones(1, 2, 2)
        ),
        "W_k",
        "W_k has shape",
    ),
    (lambda: as_filter(HEAD, HEAD, options={"sink": torch.zeros(1)}), "sink", "not a token"),
    (lambda: as_filter(HEAD, HEAD[:, :3]), "key", "same n tokens"),
    (lambda: as_filter(HEAD, HEAD, options={"window": 0}), "key", "sees no key"),
    (
        lambda: SwitchingLinearGaussian(**MATRICES | {"transition": [[0.9, 0.2], [0.2, 0.8]]}),
        "transition",
        "row 0 of transition sums to 1.1",
    ),
    (lambda: OnlineState(), "OnlineState", "Call model.online()"),
    (lambda: local_linear_trend(Y, regimes=0), "regimes", "regimes is 0"),
    (lambda: fit_parameters(3, Y, [0.0]), "build", "build is a int"),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"initial_mean": 0.0}),
        "initial_mean",
        "SwitchingNonlinear: initial_mean has shape",
    ),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"process_noise": 1.0}),
        "process_noise",
        "SwitchingNonlinear: process_noise has shape",
    ),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"transition": 1.0}),
        "transition",
        "SwitchingNonlinear: transition is",
    ),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"transition": [[0.9, 0.2], [0.5, 0.5]]}),
        "transition",
        "row 0 of transition sums to 1.1",
    ),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"process_noise": -np.eye(2)}),
        "process_noise",
        "process_noise of mode 0 is not positive",
    ),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"process_noise": 1j * np.eye(2)}),
        "process_noise",
        "process_noise is complex",
    ),
    (lambda: SwitchingNonlinear(**FUNCTIONS | {"angles": (2,)}), "angles", "angles is .*from 0 to 1"),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"observation": lambda x: x}),
        "observation",
        "observation of mode 0 gives",
    ),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"dynamics": [lambda x: x, lambda x: x[:1]]}),
        "dynamics",
        "dynamics of mode 1 gives",
    ),
    (
        lambda: SwitchingNonlinear(**FUNCTIONS | {"observation": lambda x: x[3]}),
        "observation",
        "observation of mode 0 fails for states of shape",
    ),
    (lambda: SwitchingNonlinear(**FUNCTIONS | {"dynamics": [lambda x: x]}), "dynamics", "pass 2 functions"),
    (lambda: fit_named_model(Y, kind="levels"), "kind", "kind is 'levels'"),
    (
        lambda: fit_nonlinear(lambda _: SwitchingNonlinear(**FUNCTIONS), [0.0], Y, method="gpb0"),
        "method",
        "method is 'gpb0'",
    ),
]
