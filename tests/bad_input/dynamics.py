"""Bad input to flows, renormalisers, observations and fixed points."""

import math

import torch

from exptilt import families as F
from exptilt.dynamics import (
    RMS,
    Batch,
    Equilibrium,
    Flow,
    Layer,
    Sphere,
    Whiten,
    clusters,
    fixed_point,
    gaussianity,
    jacobian_penalty,
    monotone_operator,
    spectral_radius,
)
from exptilt.dynamics.observe.clusters import cluster_labels


def cloud(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


ROWS = [
    (lambda: Layer(-1.0), "epsilon", "epsilon is -1.0"),
    (lambda: Sphere(0.0), "radius", "radius is 0.0"),
    (lambda: Whiten(covariance=-torch.eye(2)), "covariance", "not positive definite"),
    (lambda: Whiten([0.0, 0.0]), "mean", "mean is a list"),
    (lambda: Whiten(torch.tensor([torch.nan])), "mean", "mean holds NaN"),
    (lambda: Whiten(covariance=torch.eye(3).numpy()), "covariance", "covariance is a ndarray"),
    (lambda: Whiten()(cloud(9, 2) * torch.nan), "points", r"points\[0\] holds NaN"),
    (lambda: Whiten()(torch.randn(9, 2).half()), "points", r"points are torch\.float16"),
    (lambda: Whiten(torch.zeros(3))(torch.randn(9, 2)), "mean", r"mean must be \(..., 2\)"),
    (lambda: Whiten(covariance=torch.eye(2))(cloud(9, 2)), "covariance", "of the points' dtype"),
    (lambda: Flow(renormalize="norm"), "renormalize", "Pass one of layer, rms, batch, whiten, sphere"),
    (lambda: Flow(renormalize=Sphere), "renormalize", "an instance such as"),
    (lambda: Flow(beta=-1.0), "beta", "beta is -1.0"),
    (lambda: Flow(beta=math.nan), "beta", "beta is nan"),
    (lambda: Flow(step=0.0), "step", "step is 0.0"),
    (lambda: Flow(step=True), "step", "step is True"),
    (lambda: Flow(patterns=[1.0]), "patterns", "patterns is a list"),
    (lambda: Flow(patterns=torch.tensor([[math.nan]])), "patterns", r"patterns\[0\] holds NaN"),
    (lambda: Flow(mask=torch.ones(2, 2)), "mask", "mask must be a tensor of booleans"),
    (
        lambda: Flow(causal=True, patterns=F.Gaussian(torch.zeros(2), torch.eye(2))),
        "patterns",
        "a Gaussian has none",
    ),
    (lambda: Flow("sphere").run(cloud(4, 2), steps=-1), "steps", "steps"),
    (lambda: Flow("sphere").run(cloud(4, 2), steps=2.0), "steps", "steps"),
    (lambda: Flow("sphere").run(cloud(4, 2), steps=True), "steps", "steps"),
    (lambda: Flow("sphere").run(cloud(4, 2), 2, keep="some"), "keep", "keep"),
    (lambda: Flow("sphere").run(cloud(4, 2), 2, keep=0), "keep", "keep"),
    (lambda: Flow("sphere").run(cloud(4, 2), 2, measure_every=0), "measure_every", "measure_every"),
    (lambda: Flow("sphere").run(cloud(4, 2), 2, tolerance=-1.0), "tolerance", "tolerance"),
    (lambda: clusters(cloud(3)), "points", r"floating tensor \(..., N, D\)"),
    (lambda: clusters(torch.ones(0, 2)), "points", r"floating tensor \(..., N, D\)"),
    (lambda: clusters([[1.0, 2.0]]), "points", r"floating tensor \(..., N, D\)"),
    (lambda: clusters(cloud(3, 2).numpy()), "points", r"floating tensor \(..., N, D\)"),
    (lambda: cluster_labels(cloud(3)), "points", r"floating tensor \(..., N, D\)"),
    (lambda: cluster_labels(torch.ones(0, 2)), "points", r"floating tensor \(..., N, D\)"),
    (lambda: cluster_labels([[1.0, 2.0]]), "points", r"floating tensor \(..., N, D\)"),
    (lambda: cluster_labels(cloud(3, 2).numpy()), "points", r"floating tensor \(..., N, D\)"),
    (lambda: gaussianity(cloud(3)), "points", r"floating tensor \(..., N, D\)"),
    (lambda: gaussianity(torch.ones(0, 2)), "points", r"floating tensor \(..., N, D\)"),
    (lambda: gaussianity([[1.0, 2.0]]), "points", r"floating tensor \(..., N, D\)"),
    (lambda: gaussianity(cloud(3, 2).numpy()), "points", r"floating tensor \(..., N, D\)"),
    (lambda: clusters(cloud(4, 2) * math.nan), "points", r"points\[0\] holds NaN"),
    (lambda: cluster_labels(cloud(4, 2) * math.nan), "points", r"points\[0\] holds NaN"),
    (lambda: gaussianity(cloud(4, 2) * math.nan), "points", r"points\[0\] holds NaN"),
    (lambda: clusters(cloud(3, 2), tolerance=-1), "tolerance", "tolerance is -1"),
    (lambda: fixed_point(torch.cos, [1.0, 2.0]), "start", "start is a list"),
    (lambda: fixed_point(torch.cos, torch.zeros(2, dtype=torch.int64)), "start", "floating point"),
    (lambda: spectral_radius(torch.cos, torch.zeros(2, dtype=torch.int64)), "point", "floating point"),
    (lambda: monotone_operator(lambda x: x / 0, torch.zeros(2)), "function", "returned NaN"),
    (
        lambda: spectral_radius(torch.cos, torch.zeros(2), event_dims=1.0),
        "event_dims",
        "spectral_radius: .*event_dims",
    ),
    (
        lambda: spectral_radius(torch.cos, torch.zeros(2), event_dims=2),
        "event_dims",
        "spectral_radius: .*event_dims",
    ),
    (
        lambda: spectral_radius(torch.cos, torch.zeros(2), tolerance="a"),
        "tolerance",
        "spectral_radius: .*tolerance",
    ),
    (
        lambda: spectral_radius(torch.cos, torch.zeros(2), max_restarts=0),
        "max_restarts",
        "spectral_radius: .*max_restarts",
    ),
    (lambda: RMS(-1.0), "epsilon", "epsilon is -1.0"),
    (lambda: Batch(-1.0), "epsilon", "epsilon is -1.0"),
    (lambda: Equilibrium(3), "module", "module is a int"),
    (lambda: Equilibrium(torch.nn.Linear(2, 2), solver="newton"), "solver", "no solver is called 'newton'"),
    (lambda: jacobian_penalty(torch.cos, torch.zeros(2, dtype=torch.int64)), "point", "floating"),
]
