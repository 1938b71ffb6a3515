"""`xt.MultiheadAttention` in place of torch's."""

import itertools
import warnings

import pytest
import torch

import exptilt as xt


def masks(kind_padding, kind_mask, N, L, S, heads):
    g = torch.Generator().manual_seed(3)
    padding = None if kind_padding is None else torch.rand(N, S, generator=g) > 0.7
    attn = (
        None
        if kind_mask is None
        else torch.rand((N * heads, L, S) if kind_mask == "3d" else (L, S), generator=g) > 0.7
    )
    for x in (padding, attn):
        if x is not None:
            x[..., 0] = False
    if kind_padding == "float":
        padding = torch.zeros(N, S, dtype=torch.float64).masked_fill(padding, -torch.inf)
    if kind_mask == "float":
        attn = torch.randn(L, S, generator=g, dtype=torch.float64)
    return padding, attn


CONSTRUCTORS = [
    {},
    {"batch_first": True, "bias": False},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"batch_first": True, "kdim": 6, "vdim": 7},
    {"kdim": 6, "vdim": 7, "add_zero_attn": True, "bias": False},
]


@pytest.mark.parametrize("arguments", CONSTRUCTORS, ids=lambda a: "+".join(a) or "plain")
def test_agrees_with_torch(arguments):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(12, 3, dtype=torch.float64, **arguments)
    ours = xt.MultiheadAttention(12, 3, dtype=torch.float64, **arguments)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    N, L, S = 2, 4, 5
    x = [
        torch.randn(N, n, d, dtype=torch.float64)
        for n, d in ((L, 12), (S, arguments.get("kdim", 12)), (S, arguments.get("vdim", 12)))
    ]
    if not arguments.get("batch_first"):
        x = [y.transpose(0, 1) for y in x]
    kinds = itertools.product(
        (None, "bool", "float"), (None, "bool", "float", "3d"), (True, False), (True, False)
    )
    for kind_padding, kind_mask, need_weights, average in kinds:
        padding, attn = masks(kind_padding, kind_mask, N, L, S, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of mixed mask types
            a = theirs(*x, padding, need_weights, attn, average)
        b = ours(*x, padding, need_weights, attn, average)
        assert torch.allclose(a[0], b[0], atol=1e-12)
        assert (a[1] is None) == (b[1] is None)
        assert a[1] is None or torch.allclose(a[1], b[1], atol=1e-12)


def test_unbatched_and_statistics():
    torch.manual_seed(0)
    theirs, ours = torch.nn.MultiheadAttention(8, 2), xt.MultiheadAttention(8, 2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 8)
    (a, weights), (b, none, seen) = (
        theirs(x, x, x, average_attn_weights=False),
        ours(x, x, x, need_weights=False, statistics=True),
    )
    assert torch.allclose(a, b, atol=1e-6)
    assert none is None
    assert seen.entropy.shape == (2, 5)
    assert torch.allclose(seen.entropy, torch.special.entr(weights).sum(-1), atol=1e-5)


def test_gradients_agree():
    torch.manual_seed(0)
    theirs, ours = (
        torch.nn.MultiheadAttention(8, 2, dtype=torch.float64),
        xt.MultiheadAttention(8, 2, dtype=torch.float64),
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    for layer in (theirs, ours):
        layer(x, x, x, need_weights=False)[0].square().sum().backward()
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)


def test_dropout_drops_the_output_not_the_statistics():
    torch.manual_seed(0)
    layer = xt.MultiheadAttention(8, 2, dropout=0.5)
    x = torch.randn(5, 3, 8)
    trained = layer.train()(x, x, x, statistics=True)
    still = layer.eval()(x, x, x, statistics=True)
    assert not torch.allclose(trained[0], still[0])
    assert torch.equal(trained[2].entropy, still[2].entropy)
    torch.manual_seed(1)
    runs = torch.stack([layer.train()(x, x, x, need_weights=False)[0] for _ in range(400)])
    error = runs.std(0) / len(runs) ** 0.5
    assert (
        (runs.mean(0) - still[0]).abs() < 6 * error + 1e-6
    ).all()  # dropped weights are scaled up: the mean stays


def test_inside_a_transformer_layer():
    """It can stand in for torch's module inside torch's own layers."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 8)
    expected = layer(x)
    ours = xt.MultiheadAttention(8, 2, batch_first=True)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attn_mask": torch.zeros(3, 3)}, "attn_mask has shape"),
        ({"key_padding_mask": torch.zeros(4, 4, dtype=torch.bool)}, "key_padding_mask has shape"),
        ({"is_causal": True}, "attn_mask, which is None"),
        ({"key": torch.zeros(5, 8)}, "length, batch, dim"),
    ],
)
def test_bad_input(change, text):
    x = torch.zeros(5, 3, 8)
    with pytest.raises(ValueError, match=text):
        xt.MultiheadAttention(8, 2)(**{"query": x, "key": x, "value": x, **change})
