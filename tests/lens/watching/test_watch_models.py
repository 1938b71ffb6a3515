"""Models with masks of their own, shared layers, copies, checkpointing, or attention written out by hand."""

import copy
import pickle

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import exptilt as xt
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.lens.watching.masks import make_mask
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (2, 10), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(2, 10, dtype=torch.int64)
PADDED[0, 7:] = 0


def spread(model):
    """The model in eval mode with larger weights, so that attention is far from even."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def deepseek_v4():
    sizes = {"vocab_size": 61, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_hash_layers": 0}
    rest = {"o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 2}
    more = {"sliding_window": 4, "qk_rope_head_dim": 8, "max_position_embeddings": 64, "hc_mult": 2}
    kinds = {"layer_types": ["compressed_sparse_attention"] * 2}
    config = tf.AutoConfig.for_model("deepseek_v4", **sizes, **heads, **experts, **rest, **more, **kinds)
    return spread(tf.AutoModelForCausalLM.from_config(config))


def beit(attention="sdpa"):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    picture = {"image_size": 16, "patch_size": 4, "use_relative_position_bias": True}
    return spread(tf.BeitModel(tf.BeitConfig(**sizes, **picture, attn_implementation=attention)))


def test_a_model_that_appends_to_its_mask():
    model = deepseek_v4()
    with torch.no_grad():
        expected = model(IDS).logits
        with xt.lens.watch(model):
            found = model(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_adds_to_its_mask(attention):
    model, x = beit(attention), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x).last_hidden_state
        with xt.lens.watch(model, per_token=True) as seen:
            found = model(x).last_hidden_state
        eager = beit("eager")
        scores = []
        hook = eager.layers[0].attention.register_forward_pre_hook(
            lambda module, args, kwargs: scores.append((args, kwargs)), with_kwargs=True
        )
        eager(x)
        hook.remove()
        (hidden,), kwargs = scores[0][0][:1], scores[0][1]
        module, bias = eager.layers[0].attention, kwargs["attention_mask"]
        query, key = (
            part(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for part in (module.q_proj, module.k_proj)
        )
        by_hand = (query @ key.mT / 8**0.5 + bias).amax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.record.calls[0].per_token["score_max"], by_hand, rtol=1e-4, atol=1e-4)


class Plain(nn.Module):
    """Attention through torch's function."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x, mask=None):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(-2, -3) for y in self.mix(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(-2, -3).flatten(-2)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["function", "module", "interface"])
def test_checkpointing_that_runs_again_after_the_watch(kind, inside):
    torch.manual_seed(0)
    if kind == "interface":
        model = models.make("llama").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        run = lambda: model(IDS)[0].square().mean()  # noqa: E731
    else:
        encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        model, x = Plain() if kind == "function" else encoder, torch.randn(2, 5, 8)
        run = lambda: checkpoint(model, x, use_reentrant=False).square().mean()  # noqa: E731
    run().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with xt.lens.watch(model) as seen:
        loss = run()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-5)
    assert [call.step for call in seen.record.calls] == [0] * len(seen.record.calls)


@pytest.mark.parametrize("lowest", [-1e4, -1e9, -torch.inf, torch.finfo(torch.float32).min])
def test_masks_made_by_hand_are_padding(lowest):
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(1, 10, 8)
    mask = torch.zeros(1, 1, 1, 10)
    mask[..., 4:] = lowest
    with torch.no_grad(), xt.lens.watch(model) as seen:
        found = model(x, mask)
    torch.testing.assert_close(found, model(x, mask))
    assert seen.record.to_frame().queries.tolist() == [4, 4]
    assert seen.record.to_frame().visible_keys.tolist() == [4, 4]


def test_a_position_bias_that_goes_as_low_is_no_mask():
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(1, 10, 8)
    distance = torch.arange(10.0) - torch.arange(10.0)[:, None]
    with torch.no_grad(), xt.lens.watch(model) as seen:
        model(x, -2000 * distance.abs()[None, None])
    assert seen.record.to_frame().visible_keys.tolist() == [10, 10]


def test_shared_layers_are_layers():
    sizes = {"vocab_size": 61, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 40}
    model = spread(tf.AlbertModel(tf.AlbertConfig(**sizes, num_hidden_layers=3, num_attention_heads=4)))
    with torch.no_grad():
        with xt.lens.watch(model) as seen:
            model(IDS)
            model(IDS)
        model.set_attn_implementation("eager")
        weights = torch.stack(model(IDS, output_attentions=True).attentions).double()
    wanted = -torch.special.xlogy(weights, weights).sum(-1).mean((1, 3))
    np.testing.assert_allclose(seen.record.by_head("entropy"), wanted, rtol=1e-4)
    assert [(c.layer, c.step) for c in seen.record.calls] == [(i, n) for n in range(2) for i in range(3)]
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), xt.lens.watch(model) as alone:  # a part that is called by itself, twice
        for _ in range(2):
            model.encoder.albert_layer_groups[0].albert_layers[0].attention(torch.randn(1, 4, 32))
    assert [call.layer for call in alone.record.calls] == [0, 0]


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
@pytest.mark.parametrize("Q", [4, 5])
def test_causal_biases_of_torch(bias, Q):
    class Model(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, bias(q.shape[-2], k.shape[-2]))

    torch.manual_seed(0)
    model, q, k = Model(), torch.randn(1, 2, Q, 4), torch.randn(1, 2, 5, 4)
    with torch.no_grad(), xt.lens.watch(model) as seen:
        found = model(q, k)
    torch.testing.assert_close(found, model(q, k))
    first = 5 - Q if bias is causal_lower_right else 0
    assert seen.record.to_frame().visible_keys[0] == np.mean([first + i + 1 for i in range(Q)])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_inside_a_watch(how):
    model = models.make("llama", attention="sdpa")
    with torch.no_grad():
        expected = model(IDS).logits
        with xt.lens.watch(model), xt.lens.watch(model) as seen:
            model(IDS)
            other = how(model)
            calls = len(seen.record.calls)
            assert torch.equal(other(IDS).logits, expected)  # nothing of the copy is recorded
            assert len(seen.record.calls) == calls
        assert other.config._attn_implementation == "sdpa"
        assert torch.equal(other(IDS).logits, expected)


class Head(nn.Module):
    """What a student writes; the class has no telling name."""

    def __init__(self, causal=False):
        super().__init__()
        self.mix, self.causal = nn.Linear(8, 24), causal

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(-2, -3) for y in self.mix(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 2
        if self.causal:
            hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        return (weights @ v).transpose(-2, -3).flatten(-2)


class Router(nn.Module):
    """A softmax that is no attention."""

    def forward(self, x):
        return x * torch.softmax(x, -1).amax(-1, keepdim=True)


def test_what_is_not_seen_is_told_of_whatever_its_name():
    torch.manual_seed(0)
    model, x = nn.Sequential(Plain(), Router(), Head()), torch.randn(2, 5, 8)
    with pytest.warns(ExptiltWarning, match=r"without 1 modules .*: '2' \(Head\)"), xt.lens.watch(model):
        model(x)
    alone = nn.Sequential(Head())
    with pytest.raises(xt.lens.NothingSeenError, match=r"softmax=True"), xt.lens.watch(alone):
        alone(x)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_written_out_is_seen_by_its_softmax(causal):
    torch.manual_seed(0)
    by_hand, x = nn.Sequential(Head(causal), Router()).double().eval(), torch.randn(2, 5, 8).double()
    with xt.lens.watch(by_hand, softmax=True, key_mass=True, per_token=True) as seen:
        found = by_hand(x)
    assert torch.equal(found, by_hand(x))
    (call,) = seen.record.calls
    q, k, v = (y.unflatten(-1, (2, 4)).transpose(-2, -3) for y in by_hand[0].mix(x).chunk(3, -1))
    wanted = xt.attend(q, k, v, causal=causal, key_mass=True)
    for name in ("entropy", "log_normalizer", "score_max", "score_variance"):
        torch.testing.assert_close(call.per_token[name], getattr(wanted, name).detach())
    torch.testing.assert_close(call.key_mass, wanted.key_mass.detach())
    assert call.name == "0"


HAND_WRITTEN = {
    "gptj": lambda: tf.GPTJModel(
        tf.GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    ),
    "bloom": lambda: tf.BloomModel(tf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)),
    "mpt": lambda: tf.MptModel(tf.MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4)),
    "deberta": lambda: tf.DebertaV2Model(
        tf.DebertaV2Config(
            vocab_size=61,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=40,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        )
    ),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_architectures_that_write_attention_out(name):
    model = spread(HAND_WRITTEN[name]())
    given = {"input_ids": IDS, "attention_mask": PADDED}
    with torch.no_grad():
        plain = model(**given, output_attentions=True)
        with xt.lens.watch(model, softmax=True, per_token=True) as seen:
            found = model(**given)[0]
    assert torch.equal(found, plain[0])
    assert [call.layer for call in seen.record.calls] == [0, 1]
    for call, weights in zip(seen.record.calls, plain.attentions, strict=True):
        p, real = weights.double(), PADDED.bool()[:, None].expand(2, 4, 10)
        wanted = -torch.special.xlogy(p, p).sum(-1)
        got = call.per_token["entropy"].double()
        torch.testing.assert_close(got[real], wanted[real], rtol=1e-4, atol=1e-5)
    assert seen.record.to_frame().groupby("item").queries.first().tolist() == [7, 10]


def test_studies_of_models_that_do_not_run_again_and_that_want_pictures():
    class Letters:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [3 + ord(c) % 50 for c in text]}

        def decode(self, ids):
            return "".join(chr(97 + i % 26) for i in ids)

    texts = ["to be or not to be", "that is the question"]
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4}
    falcon = tf.FalconForCausalLM(tf.FalconConfig(**sizes, num_hidden_layers=2)).eval()
    found = xt.lens.study(falcon, Letters(), texts)
    assert found.heads["link_symmetry"].value.shape == (2, 4)
    heads = {"num_key_value_heads": 4, "attention_head_dim": 16, "attention_hidden_size": 64}
    mamba = {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1}
    blocks = {"layers_block_type": ["mamba", "hybrid", "hybrid"], "hybrid_layer_ids": [1, 2]}
    more = {"num_hidden_layers": 3, "num_mem_blocks": 1, "chunk_size": 16, "intermediate_size": 40}
    zamba = tf.Zamba2ForCausalLM(tf.Zamba2Config(**sizes, **heads, **mamba, **blocks, **more)).eval()
    found = xt.lens.study(zamba, Letters(), texts)
    assert found.heads["entropy"].value.shape == (2, 4)
    assert found.heads["ascent_cosine"].value is None
    parts = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    picture = {**parts, "image_size": 16, "patch_size": 8}
    clip = tf.CLIPModel(tf.CLIPConfig(text_config={**parts, "vocab_size": 61}, vision_config=picture)).eval()
    with pytest.raises(ArgumentError, match=r"CLIPModel does not run on tokens alone .* text_model"):
        xt.lens.study(clip, Letters(), texts)


def test_a_module_that_is_not_causal_is_not_made_so():
    """PaliGemma without token types has a causal mask that sdpa leaves to the modules, which are not."""
    from transformers import PaliGemmaConfig, PaliGemmaModel

    small = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 61}
    vision = {**small, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_id=60, projection_dim=16)
    model = PaliGemmaModel(config).double().eval()
    ids = torch.randint(3, 59, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(input_ids=ids).last_hidden_state
        with xt.lens.watch(model) as seen:
            watched = model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(watched, plain, rtol=1e-10, atol=1e-10)
    assert float(seen.record.to_frame().visible_keys.min()) == 9.0


def test_an_unknown_rule_can_be_calculated_with():
    """A model may ask which rows of its mask are empty, where the mask is a function of its own."""

    def near(batch, head, query, key):
        return (query // 3 == key // 3) & (query < 4)

    mask = make_mask(
        batch_size=1, q_length=6, kv_length=6, mask_function=near, use_vmap=True, dtype=torch.float32
    )
    assert torch.all(~mask, dim=-1)[0, 0].tolist() == [False] * 4 + [True] * 2


def test_t5gemma():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "sliding_window": 4}
    part = tf.T5GemmaModuleConfig(**sizes)
    torch.manual_seed(0)
    model = tf.T5GemmaForConditionalGeneration(
        tf.T5GemmaConfig(encoder=part, decoder=tf.T5GemmaModuleConfig(**sizes), vocab_size=61)
    ).eval()
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
    with torch.no_grad():
        expected = model(**given).logits
        with xt.lens.watch(model) as seen:
            found = model(**given).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert [call.kind for call in seen.record.calls] == ["self"] * 2 + ["self", "cross"] * 2
    assert seen.record.to_frame().query("layer == 0").queries.unique().tolist() == [6, 9]
