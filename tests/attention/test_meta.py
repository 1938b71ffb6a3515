"""Meta tensors, which have a shape and a dtype and no numbers, go through attention."""

import pytest
import torch
from torch.func import jvp

import exptilt as xt

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def inputs(device, dtype):
    """Query, key and value with grouped heads, and one tensor for every option."""
    q, k, v = (
        torch.zeros(2, h, n, d, device=device, dtype=dtype) for h, n, d in ((4, 5, 8), (2, 7, 8), (2, 7, 3))
    )
    options = {"causal": True, "window": 3, "softcap": 2.0, "mask": torch.ones(5, 7, device=device) > 0}
    shapes = {"sink": (4,), "log_weight": (2, 7), "bias": (5, 7)}
    options |= {name: torch.zeros(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    return q, k, v, options


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_have_shape_and_dtype(dtype):
    q, k, v, options = inputs("meta", dtype)
    q.requires_grad_()
    a = xt.attend(q, k, v, key_mass=True, **options)
    loss = a.output.sum() + a.entropy.sum() + a.key_mass.sum() + a.score_max.sum()
    (gradient,) = torch.autograd.grad(loss, q)
    assert gradient.is_meta
    assert (gradient.shape, gradient.dtype) == (q.shape, q.dtype)
    moved = jvp(lambda x: xt.attend(x, k, v).entropy, (q.detach(),), (q.detach(),))[1]
    assert moved.shape == (2, 4, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_module(dtype):
    layer = xt.MultiheadAttention(8, 2, batch_first=True, device="meta", dtype=dtype)
    x = torch.empty(3, 5, 8, device="meta", dtype=dtype)
    output, weights, seen = layer(x, x, x, statistics=True)
    assert (output.shape, output.dtype, output.device.type) == (x.shape, dtype, "meta")
    assert weights.shape == (3, 5, 5)
    assert seen.entropy.shape == (3, 2, 5)
