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


def encoder(attention, hooked):
    """A padded batch through torch's encoder with attention of that class, and what hooks on it saw."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.self_attn = attention(8, 2, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    seen = []
    if hooked:
        for each in model.layers:
            each.self_attn.register_forward_hook(lambda _, given, out: seen.append((given[0], *out)))
    x, padding = torch.randn(3, 6, 8), torch.arange(6) >= torch.tensor([[4], [6], [1]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
        return model(x, src_key_padding_mask=padding), seen


@pytest.mark.parametrize("hooked", [False, True])
def test_inside_an_encoder_that_nests_its_batch(hooked):
    """With a hook, torch's encoder calls its layers' attention with the nested tensors that it makes."""
    theirs, seen = encoder(torch.nn.MultiheadAttention, hooked)
    found, ours = encoder(xt.MultiheadAttention, hooked)
    assert torch.allclose(found, theirs, atol=1e-6)
    assert len(ours) == len(seen) == 2 * hooked
    for (given, output, _), (_, right, _) in zip(ours, seen, strict=True):
        assert given.is_nested
        assert [len(x) for x in output.unbind()] == [4, 6, 1]
        assert torch.allclose(output.to_padded_tensor(0.0), right.to_padded_tensor(0.0), atol=1e-6)


NESTED = "ignore:The PyTorch API of nested tensors:UserWarning"


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("average", [True, False])
def test_nested_tensors_as_torch_has_them(average):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    ours = xt.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.nested.nested_tensor([torch.randn(n, 8, dtype=torch.float64) for n in (4, 6, 1)])
    with torch.no_grad():
        a, weights = theirs(x, x, x, average_attn_weights=average)
        b, shown, seen = ours(x, x, x, average_attn_weights=average, statistics=True)
    assert torch.allclose(a.to_padded_tensor(0.0), b.to_padded_tensor(0.0), atol=1e-12)
    assert torch.allclose(weights, shown, atol=1e-12)
    for i, sequence in enumerate(x.unbind()):
        n = len(sequence)
        alone = ours(sequence, sequence, sequence, statistics=True)[2]
        for name in ("log_normalizer", "entropy", "score_mean", "score_variance", "score_max"):
            assert torch.allclose(getattr(seen, name)[i, :, :n], getattr(alone, name), atol=1e-12)
        assert (seen.log_normalizer[i, :, n:] == -torch.inf).all()
        assert (seen.entropy[i, :, n:] == 0).all()


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("arguments", [{}, {"add_bias_kv": True, "add_zero_attn": True, "bias": False}])
def test_nested_tensors_have_gradients(layout, arguments):
    """Keys of other lengths than the queries, options that torch does not take here, and a residual."""
    torch.manual_seed(0)
    layer = xt.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64, **arguments)
    leaves = [torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 6, 1, 3, 2, 5)]
    q, k = (torch.nested.as_nested_tensor(x, layout=layout) for x in (leaves[:3], leaves[3:]))
    added = q + layer(q, k, k, need_weights=False)[0]
    found = torch.autograd.grad(torch.nested.to_padded_tensor(added, 0.0).square().sum(), leaves)
    one_by_one = [x + layer(x, y, y)[0] for x, y in zip(leaves[:3], leaves[3:], strict=True)]
    right = torch.autograd.grad(sum(x.square().sum() for x in one_by_one), leaves)
    for a, b in zip(found, right, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.filterwarnings(NESTED)
def test_nested_tensors_that_do_not_fit():
    x, y = (torch.nested.nested_tensor([torch.zeros(n, 8) for n in lengths]) for lengths in ((4, 2), (4, 3)))
    layer = xt.MultiheadAttention(8, 2, batch_first=True)
    with pytest.raises(ValueError, match="batch_first=True"):
        xt.MultiheadAttention(8, 2)(x, x, x)
    with pytest.raises(ValueError, match="all of query, key and value nested"):
        layer(x, torch.zeros(2, 4, 8), torch.zeros(2, 4, 8))
    with pytest.raises(ValueError, match="key_padding_mask with nested tensors"):
        layer(x, x, x, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\[4, 2\] in key, \[4, 3\] in value"):
        layer(x, x, y)
