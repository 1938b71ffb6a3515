"""What users of hflayers have in a layer: norms, dropout, sizes, masks by state, associations."""

import pytest
import torch
import torch.nn.functional as F

from exptilt._support.errors import ConvergenceError
from exptilt.memory import HopfieldLayer, HopfieldPooling, hopfield_attention

F64 = torch.float64


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def plain(layer, state, memory, values=None, seen=None, updates=0):
    """The loop of hflayers, head by head: `update_steps_max` updates of the state, then one look at values.

    Returns the matrix of associations and the output.
    """
    q_in, k_in, v_in = state, memory, memory if values is None else values
    if layer.normalize:
        q_in, k_in, v_in = (
            F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)
            for x, norm in ((q_in, layer.norm_state), (k_in, layer.norm_memory), (v_in, layer.norm_value))
        )
    if layer.connected:
        v_in = layer.to_key(v_in)  # Z = softmax(β R W_Q W_K' Y') Y W_K W_V, eq. 10 of Ramsauer et al.

    def projected(x, projection, h):
        size = 0 if projection is None else projection.out_features // layer.heads
        return x if projection is None else projection(x)[..., size * h : size * (h + 1)]

    matrices, found = [], []
    for h in range(layer.heads):
        q, k = projected(q_in, layer.to_query, h), projected(k_in, layer.to_key, h)
        v = projected(v_in, layer.to_value, h)
        if layer.connected and layer.to_value is None:
            v = projected(memory if values is None else values, layer.to_key, h)
        if layer.normalize_heads:
            q, k = (
                (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() for x in (q, k)
            )
        if layer.bias_pattern:
            k, v = (
                torch.cat([x, bias[h].expand(*x.shape[:-2], 1, -1)], -2)
                for x, bias in ((k, layer.bias_key), (v, layer.bias_value))
            )
        for turn in range(updates + 1):
            score = layer.beta[h] * q @ k.mT
            if seen is not None:
                score[..., : seen.shape[-1]].masked_fill_(~seen, -torch.inf)
            y = torch.softmax(score, -1)
            q = y @ k if turn < updates else y @ v
        matrices.append(y)
        found.append(q)
    joined = torch.cat(found, -1)
    return torch.stack(matrices, -3), joined if layer.to_output is None else layer.to_output(joined)


@pytest.mark.parametrize("updates", [0, 1, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_sizes_norms_and_masks(updates, normalize):
    """`update_steps_max = n` of hflayers is `steps = n + 1`."""
    torch.manual_seed(0)
    layer = HopfieldLayer(
        10,
        heads=3,
        steps=updates + 1,
        memory_dimension=7,
        value_dimension=4,
        head_dimension=5,
        output_dimension=6,
        normalize=normalize,
        beta=[0.3, 1.0, 2.0],
    ).double()
    if normalize:
        with torch.no_grad():
            for norm in (layer.norm_state, layer.norm_memory, layer.norm_value):
                norm.weight.normal_()
                norm.bias.normal_()
    state, memory, values = drawn(2, 4, 10), drawn(2, 9, 7, seed=1), drawn(2, 9, 4, seed=2)
    padding = torch.arange(9) < torch.tensor([[9], [6]])
    own = torch.rand(4, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    own[:, 0] = True
    for mask, association_mask in ((None, None), (padding, None), (None, own), (padding, own)):
        seen = torch.ones(2, 4, 9, dtype=torch.bool)
        seen = seen if mask is None else seen & mask[:, None]
        seen = seen if association_mask is None else seen & association_mask
        matrix, expected = plain(layer, state, memory, values, seen, updates)
        masks = {"mask": mask, "association_mask": association_mask}
        assert torch.allclose(layer(state, memory, values=values, **masks), expected, atol=1e-12)
        assert torch.allclose(layer.association(state, memory, **masks), matrix, atol=1e-12)
    assert expected.shape == (2, 4, 6)


OPTIONS = [
    {"static": ("state", "memory", "values"), "project_output": False},
    {"static": ("state",)},
    {"static": ("memory",)},
    {"static": ("values",)},
    {"connected": True},
    {"connected": True, "static": ("values",)},
    {"normalize_heads": True},
    {"bias_pattern": True},
    {"project_output": False},
    {"static": ("values",), "normalize_heads": True, "bias_pattern": True, "project_output": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_options_of_hflayers(options, steps):
    torch.manual_seed(0)
    layer = HopfieldLayer(6, heads=2, steps=steps, head_dimension=6, beta=[0.3, 1.0], **options).double()
    state, memory, values = drawn(2, 4, 6), drawn(2, 9, 6, seed=1), drawn(2, 9, 6, seed=2)
    own = torch.rand(4, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    own[:, 0] = True
    for seen in (None, own):
        matrix, expected = plain(layer, state, memory, values, seen, steps - 1)
        assert torch.allclose(
            layer(state, memory, values=values, association_mask=seen), expected, atol=1e-12
        )
        assert torch.allclose(layer.association(state, memory, association_mask=seen), matrix, atol=1e-12)
    assert expected.shape == (2, 4, 6 if layer.to_output is not None else 12)
    learnt = HopfieldLayer(6, heads=2, stored=9, head_dimension=6, **options)
    learnt(torch.randn(3, 6)).sum().backward()
    assert all(p.grad is not None for p in learnt.parameters())
    pool = HopfieldPooling(6, heads=2, queries=3, **options).double()
    query = pool.query.expand(2, -1, -1)
    assert torch.allclose(pool(memory), plain(pool.lookup, query, memory)[1], atol=1e-12)


def test_static_values_have_a_size_of_their_own():
    layer = HopfieldLayer(6, heads=2, value_dimension=3, static=("values",))
    assert layer.to_output.in_features == 6
    assert layer(torch.randn(4, 6), torch.randn(5, 6), values=torch.randn(5, 3)).shape == (4, 6)


def test_a_state_that_sees_nothing_is_associated_with_nothing():
    layer, state, memory = HopfieldLayer(4, heads=2), torch.randn(3, 4), torch.randn(5, 4)
    seen = torch.ones(3, 5, dtype=torch.bool)
    seen[1] = False
    matrix = layer.association(state, memory, association_mask=seen)
    assert (matrix[:, 1] == 0).all()
    assert torch.allclose(matrix.sum(-1), seen.any(-1).float().expand(2, 3))
    assert torch.allclose(layer(state, memory, association_mask=seen)[1], layer.to_output.bias)


@pytest.mark.parametrize("steps", [1, 3, None])
def test_dropout_drops_associations(steps):
    torch.manual_seed(0)
    layer = HopfieldLayer(8, heads=2, steps=steps, dropout=0.4).double()
    state, memory = drawn(2, 3, 8), drawn(2, 9, 8, seed=1)
    matrix = layer.association(state, memory)
    torch.manual_seed(5)
    found = layer(state, memory)
    torch.manual_seed(5)
    kept = F.dropout(matrix, 0.4)
    value = layer.to_value(memory).unflatten(-1, (2, 4)).transpose(-2, -3)
    assert torch.allclose(found, layer.to_output((kept @ value).transpose(-2, -3).flatten(-2)), atol=1e-12)
    assert (kept == 0).any()
    layer.eval()
    assert torch.equal(layer(state, memory), layer(state, memory))
    found.sum().backward()
    assert layer.to_value.weight.grad.abs().sum() > 0
    pool = HopfieldPooling(8, heads=2, dropout=0.4, normalize=True)
    assert not torch.equal(pool(memory.float()), pool(memory.float()))
    assert torch.equal(pool.eval()(memory.float()), pool(memory.float()))


def test_stored_patterns_have_sizes_of_their_own():
    layer = HopfieldLayer(6, heads=2, stored=5, memory_dimension=3)
    assert layer.stored.shape == (5, 3)
    assert layer(torch.randn(2, 4, 6)).shape == (2, 4, 6)
    assert layer.association(torch.randn(2, 4, 6)).shape == (2, 2, 4, 5)


def test_layers_without_new_options_keep_their_state():
    names = {
        "log_beta",
        *(f"to_{x}.{y}" for x in ("query", "key", "value", "output") for y in ("weight", "bias")),
    }
    assert set(HopfieldLayer(4).state_dict()) == names
    assert set(HopfieldPooling(4).state_dict()) == {"query", *(f"lookup.{name}" for name in names)}


def test_layer_that_does_not_settle_says_so():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 4), torch.randn(1, 9, 4)
    with pytest.raises(ConvergenceError):
        hopfield_attention(q, k, k, torch.ones(1), steps=None, max_steps=1)
    assert hopfield_attention(q, k, k, torch.ones(1), steps=None, max_steps=1, throw=False).isfinite().all()
