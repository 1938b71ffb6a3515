"""Modules outside transformers: scaled_dot_product_attention and nn.MultiheadAttention, one record."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import heads as oracle


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Attention(nn.Module):
    """Calls scaled_dot_product_attention with whatever it was given."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def qkv(Q=5, K=7, heads=(4, 4), lead=(2,), dtype=torch.float64):
    g = generator()
    sizes = ((heads[0], Q), (heads[1], K), (heads[1], K))
    return [2 * torch.randn(*lead, h, n, 8, generator=g, dtype=dtype) for h, n in sizes]


SDPA = {
    "plain": (qkv(), {}),
    "scale": (qkv(), {"scale": 0.3}),
    "causal": (qkv(6, 6), {"is_causal": True}),
    "causal, fewer queries": (qkv(4, 7), {"is_causal": True}),
    "causal, more queries": (qkv(7, 4), {"is_causal": True}),
    "causal and booleans": (
        qkv(4, 7),
        {"is_causal": True, "attn_mask": torch.rand(4, 7, generator=generator()) < 0.7},
    ),
    "causal and numbers": (
        qkv(7, 4),
        {"is_causal": True, "attn_mask": torch.randn(7, 4, generator=generator(), dtype=torch.float64)},
    ),
    "grouped": (qkv(heads=(4, 2)), {"enable_gqa": True}),
    "one key head for all": (qkv(heads=(4, 1)), {}),
    "booleans": (qkv(), {"attn_mask": torch.rand(5, 7, generator=generator()) < 0.6}),
    "booleans of one head": (qkv(), {"attn_mask": torch.rand(2, 4, 5, 7, generator=generator()) < 0.6}),
    "hidden keys": (qkv(), {"attn_mask": torch.tensor([1, 1, 1, 0, 1, 1, 0]).bool()[None]}),
    "a query that sees nothing": (qkv(), {"attn_mask": torch.arange(5)[:, None].expand(5, 7) != 2}),
    "numbers": (qkv(), {"attn_mask": torch.randn(5, 7, generator=generator(), dtype=torch.float64)}),
    "numbers and −inf": (
        qkv(),
        {
            "attn_mask": torch.zeros(5, 7, dtype=torch.float64).masked_fill(
                torch.ones(5, 7).triu(2).bool(), -torch.inf
            )
        },
    ),
    "three axes": (qkv(lead=()), {}),
    "five axes": (qkv(lead=(2, 3)), {"attn_mask": torch.rand(3, 1, 5, 7, generator=generator()) < 0.7}),
    "float32": (qkv(dtype=torch.float32), {}),
}


@pytest.mark.parametrize("name", SDPA)
def test_scaled_dot_product_attention(name):
    tensors, options = SDPA[name]
    model, calls = Attention(**options), []
    expected = model(*tensors)
    with xt.lens.watch(model, observe=calls.append, key_mass=True) as seen:
        found = model(*tensors)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.allclose(found, expected, atol=1e-5 if name == "float32" else 1e-10)
    (call,) = calls
    assert (call.name, call.layer, call.kind, call.module) == ("", 0, "self", model)
    s = oracle.scores(call)
    N, _, Q, K = s.shape
    real = [
        torch.ones(N, n, dtype=torch.bool) if x is None else x
        for x, n in ((call.real_query, Q), (call.real_key, K))
    ]
    dead = torch.isneginf(s).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    assert torch.allclose(
        (p @ call.value.double().repeat_interleave(s.shape[1] // call.value.shape[1], 1)).reshape(
            expected.shape
        ),
        expected.double(),
        atol=1e-5,
    )
    frame = seen.record.to_frame()
    for column, value in oracle.statistics(s, p, *real).items():
        assert np.allclose(frame[column], value.ravel(), rtol=1e-5, atol=1e-6, equal_nan=True), column


def test_what_torch_refuses_is_still_refused_by_torch():
    model, tensors = Attention(), qkv(heads=(4, 2))
    with pytest.raises(RuntimeError) as expected:
        model(*tensors)
    with pytest.raises(RuntimeError) as found, xt.lens.watch(model):
        model(*tensors)
    assert str(found.value) == str(expected.value)


def test_gradients():
    model = Attention(is_causal=True)
    tensors = [x.requires_grad_() for x in qkv(6, 6)]
    expected = torch.autograd.grad(model(*tensors).sin().sum(), tensors)
    with xt.lens.watch(model):
        found = torch.autograd.grad(model(*tensors).sin().sum(), tensors)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_dropout_keeps_torch_s_random_numbers():
    model, tensors = Attention(dropout_p=0.5), qkv()
    torch.manual_seed(0)
    expected = model(*tensors)
    torch.manual_seed(0)
    with xt.lens.watch(model) as seen:
        found = model(*tensors)
    assert torch.equal(found, expected)
    with xt.lens.watch(model := Attention()) as still:
        model(*tensors)
    assert torch.equal(seen.record.calls[0].values[:12], still.record.calls[0].values[:12])


def layer(**options):
    torch.manual_seed(0)
    made = nn.MultiheadAttention(16, 4, batch_first=True, **options).double().eval()
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(0, 0.7, generator=generator(1))
    return made


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("masked", [None, "padding", "causal", "both"])
def test_multihead_attention(weights, kind, masked):
    model, calls = layer(), []
    x = torch.randn(3, 6, 16, generator=generator(2), dtype=torch.float64)
    y = x if kind == "self" else torch.randn(3, 8, 16, generator=generator(3), dtype=torch.float64)
    options = {"need_weights": weights, "average_attn_weights": False}
    length = y.shape[1]
    if masked in ("padding", "both"):
        options["key_padding_mask"] = torch.arange(length) >= torch.tensor([length, 3, length - 1])[:, None]
    if masked in ("causal", "both"):
        options["attn_mask"] = torch.ones(6, length).triu(1).bool()
    with torch.no_grad():
        expected = model(x, y, y, **options)
        _, probabilities = model(x, y, y, **{**options, "need_weights": True})
        with xt.lens.watch(model, observe=calls.append, key_mass=True) as seen:
            found = model(x, y, y, **options)
    assert torch.allclose(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)
    assert not weights or torch.allclose(found[1], expected[1])
    (call,) = calls
    assert (call.kind, call.name, call.module) == (kind, "", model)
    real_key = torch.ones(3, length, dtype=torch.bool)
    if masked in ("padding", "both"):
        real_key = ~options["key_padding_mask"]
    elif masked == "causal":
        real_key = (torch.arange(length) < 6).expand(3, length)  # nobody sees the last two
    real_query = real_key if kind == "self" else torch.ones(3, 6, dtype=torch.bool)
    if kind == "cross" and masked == "both":
        real_key = real_key & (torch.arange(length) < 6)
    s = oracle.scores(call)
    assert torch.allclose(torch.softmax(s, -1), probabilities)
    frame = seen.record.to_frame()
    for column, value in oracle.statistics(s, probabilities, real_query, real_key).items():
        assert np.allclose(frame[column], value.ravel(), equal_nan=True), column


def test_multihead_attention_with_keys_of_its_own_and_other_dimensions():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, kdim=5, vdim=6, add_bias_kv=True, add_zero_attn=True).double()
    q, k, v = (torch.randn(n, 2, d, dtype=torch.float64) for n, d in ((5, 16), (7, 5), (7, 6)))
    expected = model(q, k, v)
    with xt.lens.watch(model) as seen:
        found = model(q, k, v)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    frame = seen.record.to_frame()
    assert (frame.visible_keys == 9).all()
    assert (frame.kind == "cross").all()


def test_training_with_dropout_gives_torch_s_own_output():
    model = layer(dropout=0.4).train()
    x = torch.randn(3, 6, 16, generator=generator(2), dtype=torch.float64)
    for weights in (True, False):
        torch.manual_seed(1)
        expected = model(x, x, x, need_weights=weights)[0]
        torch.manual_seed(1)
        with xt.lens.watch(model) as seen:
            found = model(x, x, x, need_weights=weights)[0]
        assert torch.equal(found, expected)
        assert len(seen.record.calls) == 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_transformer_encoder_and_its_fast_path(training, nested):
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(one, 3, enable_nested_tensor=nested).train(training)
    x = torch.randn(3, 6, 16, generator=generator(2), dtype=torch.float64)
    hidden = torch.arange(6) >= torch.tensor([6, 3, 5])[:, None]
    with torch.set_grad_enabled(training):
        expected = model(x, src_key_padding_mask=hidden)
        with xt.lens.watch(model) as seen:
            found = model(x, src_key_padding_mask=hidden)
    assert torch.allclose(found[~hidden], expected[~hidden])
    frame = seen.record.to_frame()
    assert frame.name.unique().tolist() == [f"layers.{i}.self_attn" for i in range(3)]
    assert frame.groupby("item").queries.first().tolist() == [6, 3, 5]


def test_transformer_decoder_has_cross_attention():
    torch.manual_seed(0)
    one = nn.TransformerDecoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(one, 2).eval()
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        expected = model(x, memory, tgt_mask=causal, tgt_is_causal=True)
        with xt.lens.watch(model) as seen:
            found = model(x, memory, tgt_mask=causal, tgt_is_causal=True)
    assert torch.allclose(found, expected, atol=1e-5)
    frame = seen.record.to_frame().drop_duplicates("layer")
    assert frame.kind.tolist() == ["self", "cross"] * 2
    assert frame.visible_keys.tolist() == [3.0, 7.0] * 2


def test_calls_of_other_models_are_left_alone():
    model, other, tensors = Attention(), Attention(), qkv()
    with xt.lens.watch(model) as seen:
        other(*tensors)
        model(*tensors)
    assert len(seen.record.calls) == 1
    with xt.lens.watch(model) as seen:
        model(*tensors)
        F.scaled_dot_product_attention(*tensors)  # in nobody's name
    assert [(call.name, call.layer) for call in seen.record.calls] == [("", 0), ("", 1)]


def through_a_helper(x):
    return F.scaled_dot_product_attention(x, x, x)


class Helped(nn.Module):
    def forward(self, x):
        return through_a_helper(x)


def test_attention_in_a_helper_belongs_to_the_module_that_called_it():
    model = nn.Sequential(Helped(), Helped())
    with xt.lens.watch(model) as seen:
        model(torch.randn(1, 2, 3, 4))
    assert [(call.name, call.layer) for call in seen.record.calls] == [("0", 0), ("1", 1)]


@pytest.mark.parametrize(
    "options", [{}, {"attn_kv_heads": 2}, {"alibi_pos_bias": True}, {"attn_num_mem_kv": 2}]
)
def test_x_transformers_both_ways(options):
    """Its fused path through sdpa, and its own softmax: outputs unchanged, and the same statistics."""
    x_transformers = pytest.importorskip("x_transformers", reason="x-transformers is not installed")
    ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    entropies = []
    for fused in (True, False):
        torch.manual_seed(0)
        sizes = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, "attn_flash": fused}
        layers = x_transformers.Decoder(**sizes, **options)
        model = (
            x_transformers.TransformerWrapper(num_tokens=61, max_seq_len=32, attn_layers=layers)
            .double()
            .eval()
        )
        with torch.no_grad():
            plain = model(ids)
            with xt.lens.watch(model, softmax=not fused) as seen:
                watched = model(ids)
        torch.testing.assert_close(watched, plain, rtol=1e-12, atol=1e-12)
        entropies.append(seen.record.by_head("entropy"))
    np.testing.assert_allclose(entropies[0], entropies[1], rtol=1e-6)  # its own softmax is in float32


class Fairseq(nn.Module):
    """Attention written out as fairseq has it: scores (batch · heads, n, n)."""

    def __init__(self, heads=4, says=True, tokens_first=False):
        super().__init__()
        self.into, self.count, self.tokens_first = nn.Linear(16, 48), heads, tokens_first
        if says:
            self.num_heads = heads

    def forward(self, x, mask):
        x = x.transpose(0, 1) if self.tokens_first else x
        (b, n, _), h = x.shape, self.count
        q, k, v = (y.view(b, n, h, 4).transpose(1, 2).flatten(0, 1) for y in self.into(x).split(16, -1))
        scores = torch.bmm(q, k.mT).view(b, h, n, n).masked_fill(~mask[:, None, None], -1e9)
        return torch.bmm(torch.softmax(scores.view(b * h, n, n), -1), v)


@pytest.mark.parametrize("how", [{}, {"says": False}, {"says": False, "tokens_first": True}])
def test_a_softmax_over_batch_and_heads_together(how):
    model, x = Fairseq(**how), torch.randn(3, 5, 16, generator=generator())
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    x = x.transpose(0, 1) if how.get("tokens_first") else x
    with torch.no_grad(), xt.lens.watch(model, softmax=True) as seen:
        model(x, mask)
    frame = seen.record.to_frame()
    assert len(frame) == 12
    assert frame.groupby("item").queries.first().tolist() == [3, 5, 4]
    same = torch.randn(5, 5, 16, generator=generator())  # as many items as tokens: which is which?
    if how.get("tokens_first"):
        return
    with torch.no_grad(), xt.lens.watch(model, softmax=True) as seen:
        model(same, mask[:1].expand(5, 5))
    assert seen.record.by_head("entropy").shape == (1, 4)


def test_a_softmax_whose_batch_cannot_be_told_is_refused():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Fairseq(says=False)

        def forward(self, given):
            return self.part(*given)

    model, given = Listed(), [torch.randn(3, 5, 16), torch.ones(3, 5).bool()]
    refused = pytest.raises(ArgumentError, match="tells them apart")
    with refused, torch.no_grad(), xt.lens.watch(model, softmax=True):
        model(given)


class HeadsOutside(nn.Module):
    """Attention over scores (heads · batch, n, n), which `apart` takes apart again."""

    def __init__(self, apart):
        super().__init__()
        self.num_heads, self.apart = 4, apart

    def forward(self, x):
        q = torch.cat(x.chunk(4, -1))
        return self.apart(torch.bmm(torch.softmax(torch.bmm(q, q.mT), -1), q))


def test_heads_outside_of_the_batch_are_refused():
    x = torch.randn(3, 5, 16, generator=generator())
    for apart in (lambda y: y.view(4, 3, 5, 4), lambda y: y.chunk(4), lambda y: torch.split(y, 3)):
        model = HeadsOutside(apart)
        refused = pytest.raises(ArgumentError, match="heads outside of the batch")
        with refused, torch.no_grad(), xt.lens.watch(model, softmax=True):
            model(x)
    refused = pytest.raises(ArgumentError, match="as many batch items as heads")
    with refused, torch.no_grad(), xt.lens.watch(model, softmax=True):
        model(x[:1].expand(4, 5, 16))


class ProductAttention(nn.Module):
    """The inner part of attention, which is given queries (batch · heads, n, dim)."""

    def forward(self, q):
        return torch.bmm(torch.softmax(torch.bmm(q, q.mT), -1), q)


class Outer(nn.Module):
    """Attention whose softmax is in a part that does not know the batch."""

    def __init__(self, heads):
        super().__init__()
        self.part, self.heads = ProductAttention(), heads

    def forward(self, x):
        n = x.shape[-2]
        return self.part(x.reshape(-1, n, self.heads, 4).transpose(1, 2).flatten(0, 1))


def test_inputs_that_disagree_about_the_batch_are_refused():
    model = Outer(4)
    model.part.num_heads = 5  # of 12 rows that are 3 batch items: no whole number of them
    x = torch.randn(3, 5, 16, generator=generator())
    refused = pytest.raises(ArgumentError, match="tells them apart")
    with refused, torch.no_grad(), xt.lens.watch(model, softmax=True):
        model(x)
    del model.part.num_heads
    with refused, torch.no_grad(), xt.lens.watch(model, softmax=True):
        model(x)  # 12 items for the part, 3 for the model
    with refused, torch.no_grad(), xt.lens.watch(model, softmax=True):
        model(x[0, :4])  # 4 tokens of 16, or 4 texts of 16 tokens


class Joint(nn.Module):
    """Attention of its own tokens and of others together, as diffusion transformers have it."""

    def forward(self, hidden_states, encoder_hidden_states):
        x = torch.cat([encoder_hidden_states, hidden_states], 1).unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x)


class Across(nn.Module):
    def forward(self, hidden_states, encoder_hidden_states):
        q, k = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (hidden_states, encoder_hidden_states))
        return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize(("make", "kind"), [(Joint, "self"), (Across, "cross")])
def test_attention_of_two_sequences_together_is_not_cross_attention(make, kind):
    model = make()
    with xt.lens.watch(model) as seen:
        model(torch.randn(1, 5, 8), encoder_hidden_states=torch.randn(1, 5, 8))
    assert [call.kind for call in seen.record.calls] == [kind]
