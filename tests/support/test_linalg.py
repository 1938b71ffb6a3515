"""What `repaired` mends becomes a covariance; what it cannot mend it names."""

import warnings
from typing import Any

import pytest
import torch

from exptilt import families as f
from exptilt._support.errors import ExptiltWarning
from exptilt._support.linalg import repaired


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "matrix",
    [
        -torch.eye(2),
        torch.zeros(2, 2),
        1e-20 * torch.tensor([[0.0, 1], [1, 0]]),
        torch.tensor([[1.0, 5], [3, 1]]),
        -torch.ones(5, 5),
    ],
)
def test_anything_becomes_a_covariance(matrix: torch.Tensor, dtype: torch.dtype) -> None:
    matrix = matrix.to(dtype)
    with pytest.warns(ExptiltWarning, match="added up to"):
        mended = repaired(matrix)
    f.Gaussian(torch.zeros(matrix.shape[-1], dtype=dtype), mended)
    added = mended - (matrix + matrix.mT) / 2
    torch.testing.assert_close(added, added[0, 0] * torch.eye(matrix.shape[-1], dtype=dtype))
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    floor = torch.finfo(dtype).eps ** 0.5 * (float(values.abs().max()) or 1)
    assert float(torch.linalg.eigvalsh(mended)[0]) == pytest.approx(floor, rel=0.02)


def test_the_warning_says_which_got_most() -> None:
    batch = torch.eye(2).repeat(2, 3, 1, 1)
    batch[1, 2] *= -3
    batch[0, 1] *= -2
    with pytest.warns(ExptiltWarning, match=r"added up to 3 to the diagonal \(matrix \[1, 2\]\)"):
        repaired(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f.Gaussian(torch.zeros(2), torch.func.vmap(repaired)(batch[0]))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.tensor([[1.0, 0.0], [float("nan"), 1.0]]), r"matrix\[1, 0\] is NaN or infinite"),
        (torch.eye(2, dtype=torch.int64), r"floating-point tensor \(..., D, D\); got torch.int64 \(2, 2\)"),
        (torch.zeros(2, 3), r"got torch.float32 \(2, 3\)"),
        (torch.zeros(0, 2, 2), r"no matrix to repair; got shape \(0, 2, 2\)"),
        ([[1.0]], "got list"),
    ],
)
def test_what_cannot_be_mended(matrix: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repaired(matrix)
    with pytest.raises(ValueError, match="floor must be positive"):
        repaired(torch.eye(2), floor=-1.0)
