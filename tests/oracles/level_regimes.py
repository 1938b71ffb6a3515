"""A model of regimes with a level and a variance each, and no state, to be fitted."""

import numpy as np

from exptilt.switching import SwitchingLinearGaussian

HELD = ("dynamics", "process_noise", "observation")


def level_model(levels=(3.0, 9.0), noise=((4.0,), (4.0,))):
    """Regimes with a level and a variance each, and no state."""
    return SwitchingLinearGaussian(
        transition=[[0.9, 0.1], [0.1, 0.9]],
        dynamics=[[0.0]],
        process_noise=[[0.0]],
        observation=[[0.0]],
        observation_noise=np.array(noise)[..., None],
        observation_offset=np.array(levels)[:, None],
        initial_mean=[0.0],
        initial_covariance=[[0.0]],
        initial_probability=[0.5, 0.5],
        start="first",
    )
