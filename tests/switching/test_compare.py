"""Numbers of regimes compared."""

import numpy as np
import pytest

from exptilt.switching import compare, fit_named_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 5])
def test_split_regimes_are_tried_beside_the_other_starts(seed):
    """Starts from the split regimes of the smaller fit alone end 2 to 5 nats lower here."""
    rng = np.random.default_rng(seed)
    regime = np.cumsum(rng.random(200) < 0.05) % 3
    y = np.array([0, 1.5, 4])[regime] + np.array([0.5, 1, 0.7])[regime] * rng.normal(size=200)
    alone = fit_named_model(y, kind="level", modes=4, progress=False)
    found = compare(y, modes=(3, 4), folds=0, progress=False)
    assert found.log_likelihood[1] > alone.log_likelihood - 1e-3
    assert found.log_likelihood[1] > found.log_likelihood[0]
