"""How an estimate is shown, compared and converted."""

import math

import numpy as np
import pytest
import torch

from exptilt.families.estimate import Estimate

F64 = torch.float64


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def test_formats_compares_and_converts() -> None:
    exact, bounded = Estimate.exact(t(0.25)[0]), Estimate.bounded(t(1.0)[0], t(2.0)[0])
    sampled = Estimate.sampled(t(1.0, 2.0, 3.0, 4.0), t(0.0)[0], t(math.inf)[0])
    assert f"{exact:.3f}" == "0.250"
    assert f"{sampled:.2f}" == "2.50 ± 0.65"
    assert f"{bounded:>6.1f}" == "   1.5 in [   1.0,    2.0]"
    assert f"{exact}" == str(exact)
    with pytest.raises(ValueError, match="format code"):
        f"{exact:s}"
    assert bool(exact < 0.5)
    assert bool(exact <= bounded)
    assert bool(bounded > exact)
    assert bool(t(0.5)[0] >= exact)
    assert bool(exact == 0.25)
    assert bool(exact != bounded)
    assert max(exact, bounded, sampled) is sampled
    assert (exact == "a quarter") is False
    assert len({exact, bounded, exact}) == 2
    batch = Estimate.exact(t(1.0, 3.0))
    assert (batch < 2).tolist() == [True, False]
    np.testing.assert_array_equal(np.asarray(batch), [1.0, 3.0])
    assert float(exact) == 0.25
    with pytest.raises(TypeError):
        exact < "1"  # type: ignore[operator]  # noqa: B015
