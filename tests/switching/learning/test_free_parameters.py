"""Parameters and the numbers that stand for them: intervals on the scale of these."""

import numpy as np
import pytest

from exptilt.switching.learning.free_parameters import interval


@pytest.mark.parametrize(
    ("value", "low", "high", "onto"),
    [
        (3.0, -np.inf, np.inf, lambda x: x),
        (0.2, 0.0, np.inf, np.log),
        (2.5, 1.0, np.inf, lambda x: np.log(x - 1)),
        (0.97, 0.0, 1.0, lambda x: np.log(x / (1 - x))),
        (0.3, 0.1, 0.5, lambda x: np.log((x - 0.1) / (0.5 - x))),
    ],
)
def test_intervals_are_symmetric_on_their_scale(value, low, high, onto):
    """The half-width there is `reach` times the derivative of the scale."""
    reach = 0.05
    ends = interval(value, reach, reach, low, high)
    slope = (onto(value + 1e-6) - onto(value - 1e-6)) / 2e-6
    np.testing.assert_allclose(
        [onto(end) - onto(value) for end in ends], [-slope * reach, slope * reach], rtol=1e-6
    )
    assert low < ends[0] < value < ends[1] < high
