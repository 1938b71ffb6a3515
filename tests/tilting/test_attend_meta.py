"""Meta tensors, which have a shape and a dtype and no numbers, go through attention and losses."""

import pytest
import torch
from torch.func import jvp

import exptilt as xt

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def sizes(result):
    """Shape and dtype of each field of a result."""
    return {
        name: (tuple(x.shape), x.dtype)
        for name in (
            "output",
            "log_normalizer",
            "entropy",
            "score_mean",
            "score_variance",
            "score_max",
            "key_mass",
        )
        if (x := getattr(result, name)) is not None
    }


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
@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
@pytest.mark.parametrize("check", [None, True])
def test_results_have_shape_and_dtype(dtype, backend, check):
    for some in (False, True):
        found = []
        for device in ("meta", "cpu"):
            q, k, v, options = inputs(device, dtype)
            options = {"check": check, "backend": backend} | (options if some else {})
            result = xt.attend(q, k, v, key_mass=some, **options)
            assert result.output.device.type == device
            G, product = (xt.log_normalizer(q, k, **options), xt.fisher_vector_product(q, k, q, **options))
            found.append((sizes(result), G.shape, G.dtype, product.shape, product.dtype))
        assert found[0] == found[1]


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


def test_under_autocast():
    """Autocast is for one kind of device; meta tensors are none of it, and stay as they are."""
    q, k, v, _ = inputs("meta", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert xt.attend(q, k, v).output.dtype == torch.float32


def test_losses():
    x, y, weight = (torch.empty(n, 8, device="meta") for n in (6, 6, 11))
    target = torch.empty(6, dtype=torch.long, device="meta")
    for loss in (
        xt.losses.linear_cross_entropy(x, weight, target, label_smoothing=0.1),
        xt.losses.info_nce(x, y),
        xt.losses.supervised_contrastive(x, target),
        xt.losses.sampled_softmax(x, weight, target, target[:3]),
    ):
        assert loss.is_meta
        assert (loss.shape, loss.dtype) == ((), torch.float32)
