r"""A tilting problem in its canonical form.

`Inputs` holds the tensors, all with the same number of batch axes in front, each of them of full size or 1
(the query's are of full size; ``expand`` makes that so, nothing is copied): query (..., Hq, Q, D), key (...,
Hkv, K, D), value (..., Hkv, K, Dv; Dv = 0 when only G is wanted), bias and mask (..., Hq or 1, Q or 1, K or
1) or None, log_weight (..., Hkv or Hq, K) or None, sink (..., Hq) or None. Query head h reads key head h //
(Hq/Hkv). query, key and value may be of half precision; all else, and every result, is of the dtype that sums
are taken in (`wide_dtype`). ``score_rule.py`` defines the scores. packing (..., 1, rows, width) is a plan of
packed sequences or dropped weights (``plan.py``), or None.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from exptilt.tilting.score_rule import ScoreRule


class Inputs(NamedTuple):
    """Tensors of a tilting problem; shapes in the module's docstring."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    log_weight: Tensor | None = None
    sink: Tensor | None = None
    mask: Tensor | None = None
    packing: Tensor | None = None


class InputTangents(NamedTuple):
    """Tangents of the differentiable inputs, or gradients by them; None where there is none."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    log_weight: Tensor | None = None
    sink: Tensor | None = None


class Needs(NamedTuple):
    """The results asked of a backward sweep: gradients, and row and column sums of the scores' derivative."""

    query: bool = True
    key: bool = True
    value: bool = True
    columns: bool = True
    rows: bool = True
    bias: bool = True  # only where the bias has a query and a key axis; else it is a row or column sum
    mass: bool = False  # column sums of the weights alone: the derivative of Σ_i G_i by the log-weights


MASS = Needs(query=False, key=False, value=False, columns=True, rows=False, bias=False, mass=True)


@dataclass(frozen=True)
class Settings:
    """The part of a call that is not a tensor.

    Attributes:
        rule: of the scores.
        backend: name of the backend.
        check: whether a NaN or infinity that reaches a result raises an error.
        needs: of a backward sweep.
    """

    rule: "ScoreRule"
    backend: str
    check: bool = False
    needs: Needs | None = None


class Gradients(NamedTuple):
    """Results of a backward sweep; of shape (0,) where not asked for.

    query (..., Hq, Q, D), key (..., Hkv, K, D), value (..., Hkv, K, Dv), column_sum (..., Hq, K) and row_sum
    (..., Hq, Q) of the derivative by the scores, and that derivative itself summed to bias's shape where bias
    has both a query and a key axis. All batch axes are of full size, but for bias.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    column_sum: Tensor
    row_sum: Tensor
    bias: Tensor


class RowStatistics(NamedTuple):
    """Statistics of each query from the forward sweep, each (..., Hq, Q).

    The largest score is the shift, weight is Σ e^{s − shift}, and gap is the mean score less the shift.
    Log-normalizer, entropy and mean are rounded sums of these three parts; derivatives use the parts.
    """

    log_normalizer: Tensor
    entropy: Tensor
    mean: Tensor
    variance: Tensor
    maximum: Tensor
    weight: Tensor
    gap: Tensor


WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
WIDE |= {dtype: dtype for dtype in (torch.float32, torch.float64)}
"""The dtype that sums are taken in, for each dtype of inputs: float32 for half precision."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in: float32 for half precision."""
    return WIDE.get(dtype, dtype)


def per_query_head(x: Tensor, heads: int, axis: int) -> Tensor:
    """x with each key head, along that axis, repeated for the query heads that read it."""
    return x if x.shape[axis] == heads else x.repeat_interleave(heads // x.shape[axis], dim=axis)


def per_key_head(x: Tensor, heads: int, axis: int) -> Tensor:
    """x summed over the query heads, along that axis (negative), that read the same key head."""
    return x if x.shape[axis] == heads else x.unflatten(axis, (heads, -1)).sum(axis)
