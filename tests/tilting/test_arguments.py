"""Bad input gets an error that names the argument, what it got, and what to pass."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import exptilt as xt
from exptilt._support.errors import ArgumentError
from tilting.cases import normal

Q, K, V = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 6)
NAN = K.clone()
NAN[1, 0, 2, 3] = torch.nan


def test_unknown_option_is_refused():
    with pytest.raises(TypeError):
        xt.attend(Q, K, V, droput=0.1)


def test_what_no_query_sees_is_no_error():
    """Padding may hold anything where the mask hides it."""
    mask = torch.ones(5, dtype=torch.bool)
    mask[2] = False
    for backend in ("cpu", "tiled"):
        a, b = (
            xt.attend(Q + 1, NAN, V + 1, mask=mask, backend=backend),
            xt.attend(Q + 1, K, V + 1, mask=mask, backend=backend),
        )
        assert torch.equal(a.output, b.output)
        assert torch.equal(a.entropy, b.entropy)


def test_check_can_be_switched_off():
    for backend in ("cpu", "tiled"):
        a = xt.attend(Q, NAN, V, check=False, backend=backend)
        bad = torch.isnan(a.output).any(-1)
        assert bad[1, :2].all()  # the query heads that read the bad key
        assert not bad[0].any()
        assert not bad[1, 2:].any()
        assert torch.equal(torch.isnan(a.log_normalizer), bad)
        alone = xt.attend(Q[1:], NAN[1:, :, 2:3], V[1:, :, 2:3], check=False, backend=backend)
        assert torch.isnan(alone.log_normalizer[0, :2]).all()


def test_batch_axes_of_size_one_are_shared():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8), torch.randn(1, 2, 4, 6, 8), torch.randn(1, 1, 4, 6, 8)
    a = xt.attend(q, k, v)
    b = xt.attend(q, k.expand(3, 2, 4, 6, 8), v.expand(3, 2, 4, 6, 8), backend="reference")
    assert torch.allclose(a.output, b.output, atol=1e-5)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32,) * 3,
        (torch.bfloat16,) * 3,
    ],
)
def test_autocast_as_torch_does(dtypes):
    q, k, v = (
        normal(i, 2, 2, n, 8).to(dtype) for i, (n, dtype) in enumerate(zip((5, 7, 7), dtypes, strict=True))
    )
    bias = normal(3, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v)
        found = xt.attend(q, k, v)
        xt.attend(q, k, v, bias=bias)
        G = xt.log_normalizer(q, k)
        product = xt.fisher_vector_product(q, k, torch.ones_like(q))
    assert found.output.dtype == expected.dtype
    assert found.entropy.dtype == torch.float32
    assert G.dtype == torch.float32
    assert product.isfinite().all()
    torch.testing.assert_close(found.output, expected, rtol=2e-2, atol=2e-2)
    cast = xt.attend(*(x.to(expected.dtype) for x in (q, k, v)))
    torch.testing.assert_close(found.output, cast.output)
    torch.testing.assert_close(found.entropy, cast.entropy)


def test_autocast_gradients_come_back_in_their_own_dtype():
    q, k = normal(0, 1, 5, 8).requires_grad_(), normal(1, 1, 7, 8).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = xt.attend(q, k, k).output
    by_q, by_k = torch.autograd.grad(output.float().square().sum(), (q, k))
    assert (by_q.dtype, by_k.dtype) == (torch.float32, torch.bfloat16)
    assert by_q.isfinite().all()
    assert by_q.abs().max() > 0


def test_mixed_dtypes_outside_autocast_are_an_error():
    q, k = normal(0, 1, 5, 8), normal(1, 1, 7, 8).bfloat16()
    with pytest.raises(ArgumentError, match="bfloat16"):
        xt.attend(q, k, k)
    with torch.autocast("cpu", torch.bfloat16, enabled=False), pytest.raises(ArgumentError, match="bfloat16"):
        xt.attend(q, k, k)


@pytest.mark.parametrize("function", ["attend", "log_normalizer"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_causal": True}, ("causal=",)),
        ({"casual": True}, ("Did you mean causal=",)),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, ("mask=", "bias=")),
        ({"attn_mask": torch.zeros(5, 5)}, ("mask=", "bias=")),
    ],
)
def test_names_of_torch_say_what_to_write(function, options, words):
    q = normal(0, 1, 5, 8)
    tensors = (q, q, q) if function == "attend" else (q, q)
    with pytest.raises(TypeError) as error:
        getattr(xt, function)(*tensors, **options)
    text = str(error.value)
    for word in (next(iter(options)), *words):
        assert word.replace("mask=", " mask=") in " " + text.replace("`", " ").replace("(", " "), text


def test_any_other_name_is_refused_as_ever():
    q = normal(0, 1, 5, 8)
    with pytest.raises(TypeError, match="casual"):
        xt.attend(q, q, q, casual=True)
