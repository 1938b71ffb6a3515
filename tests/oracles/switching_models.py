"""Random models for the tests."""

import numpy as np

from exptilt.switching import SwitchingLinearGaussian


def spread(rng, *shape, low=0.2):
    a = rng.normal(size=shape) * 0.6
    return a @ a.swapaxes(-1, -2) + low * np.eye(shape[-1])


def simplex(rng, *shape):
    return (
        rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])
        if len(shape) > 1
        else rng.dirichlet(np.ones(shape[-1]))
    )


def random_model(
    rng, M=2, n=2, m=1, *, start="before", steps=None, offsets=True, inputs=0, maps=False, **changes
):
    """A model with asymmetric transition, all matrices different; `steps` makes everything vary in time."""
    lead = () if steps is None else (steps,)
    values = {
        "transition": simplex(rng, *lead, M, M),
        "dynamics": rng.normal(size=(*lead, M, n, n)) * 0.5,
        "process_noise": spread(rng, *lead, M, n, n),
        "observation": rng.normal(size=(*lead, M, m, n)),
        "observation_noise": spread(rng, *lead, M, m, m),
        "initial_mean": rng.normal(size=(M, n)),
        "initial_covariance": spread(rng, M, n, n),
        "initial_probability": simplex(rng, M),
        "start": start,
    }
    if offsets:
        values |= {
            "dynamics_offset": rng.normal(size=(*lead, M, n)),
            "observation_offset": rng.normal(size=(*lead, M, m)),
        }
    if inputs:
        values |= {
            "dynamics_input": rng.normal(size=(M, n, inputs)),
            "observation_input": rng.normal(size=(M, m, inputs)),
        }
    if maps:
        values |= {"maps": rng.normal(size=(M, M, n, n)) * 0.7, "map_covariance": spread(rng, M, M, n, n)}
    return SwitchingLinearGaussian(**(values | changes))


def random_data(rng, T, m, missing=0.2):
    y = rng.normal(size=(T, m)) * 2
    y[rng.random((T, m)) < missing] = np.nan
    return y
