"""Bad input to the attention module, and to means and covariances that go through it."""

import torch

import exptilt as xt
from exptilt.attention import Moments, propagate

F64 = torch.float64
TOKENS = dict.fromkeys(("query", "key", "value"), torch.zeros(5, 3, 8))
EYE = torch.eye(2)[None]
CARRIED = {
    "mean": torch.ones(4, 2),
    "covariance": torch.ones(4, 2),
    "query": torch.ones(1, 4, 2),
    "key": torch.ones(1, 4, 2),
    "value_weight": torch.ones(1, 2, 2),
}

ROWS = [
    (
        lambda: xt.MultiheadAttention(8, 2)(**TOKENS | {"attn_mask": torch.zeros(3, 3)}),
        "attn_mask",
        "attn_mask has shape",
    ),
    (
        lambda: xt.MultiheadAttention(8, 2)(
            **TOKENS | {"key_padding_mask": torch.zeros(4, 4, dtype=torch.bool)}
        ),
        "key_padding_mask",
        "key_padding_mask has shape",
    ),
    (
        lambda: xt.MultiheadAttention(8, 2)(**TOKENS | {"is_causal": True}),
        "is_causal",
        "attn_mask, which is None",
    ),
    (lambda: xt.MultiheadAttention(8, 2)(**TOKENS | {"key": torch.zeros(5, 8)}), "key", "length, batch, dim"),
    (lambda: propagate(**CARRIED | {"covariance": torch.ones(4, 3)}), "covariance", "covariance has shape"),
    (lambda: propagate(**CARRIED | {"covariance": -torch.ones(4, 2)}), "covariance", "at least 0"),
    (lambda: propagate(**CARRIED | {"covariance": torch.full((4, 2), torch.nan)}), "covariance", "finite"),
    (
        lambda: propagate(**CARRIED | {"covariance": torch.tensor([[1.0, 2.0], [0.0, 1.0]]).expand(4, 2, 2)}),
        "covariance",
        "symmetric",
    ),
    (
        lambda: propagate(**CARRIED | {"covariance": torch.tensor([[1.0, 2.0], [2.0, 1.0]]).expand(4, 2, 2)}),
        "covariance",
        "eigenvalues",
    ),
    (lambda: propagate(**CARRIED | {"covariance": torch.ones(4, 2, 1)}), "covariance", "full rank"),
    (lambda: propagate(**CARRIED | {"covariance": torch.ones(4, 2, dtype=F64)}), "mean", "same dtype"),
    (
        lambda: propagate(**CARRIED | {"mean": torch.ones(4, 2, dtype=torch.int64)}),
        "mean",
        "must be a tensor of",
    ),
    (
        lambda: propagate(**CARRIED | {"value_weight": torch.ones(1, 2, 3)}),
        "value_weight",
        "value_weight has shape",
    ),
    (
        lambda: propagate(**CARRIED | {"value_weight": torch.ones(2, 2)}),
        "value_weight",
        "value_weight has shape",
    ),
    (
        lambda: propagate(**CARRIED | {"output_weight": torch.ones(2, 5)}),
        "output_weight",
        "output_weight has shape",
    ),
    (
        lambda: propagate(**CARRIED | {"query": torch.ones(1, 3, 2), "query_weight": EYE, "key_weight": EYE}),
        "query_weight",
        "query at each position",
    ),
    (lambda: propagate(**CARRIED | {"query_weight": torch.ones(1, 2, 2)}), "query_weight", "go together"),
    (lambda: propagate(**CARRIED | {"reading": "sum"}), "reading", "reading is 'sum'"),
    (lambda: propagate(**CARRIED | {"form": "banded"}), "form", "form is 'banded'"),
    (lambda: propagate(**CARRIED | {"key": torch.ones(1, 3, 2)}), "key", "positions"),
    (lambda: xt.compact(torch.ones(1, 4, 2), torch.ones(1, 4, 2), 0), "budget", "budget is 0"),
    (lambda: xt.compact(torch.ones(1, 4, 2), torch.ones(1, 4, 2), 5), "budget", "budget is 5"),
    (lambda: xt.compact(torch.ones(1, 4, 2), torch.full((1, 4, 2), torch.nan), 2), "value", "must be finite"),
    (
        lambda: Moments(torch.ones(4, 2), torch.ones(4, 3)),
        "covariance",
        r"covariance has shape \(4, 3\), mean \(4, 2\)",
    ),
]
