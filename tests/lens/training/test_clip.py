"""clip_qk_ brings the largest score of a head to the threshold, and touches no other head."""

import math
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

import exptilt as xt
from exptilt._support.errors import ArgumentError, ExptiltWarning

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
GROUPED = SMALL | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = torch.randint(3, 50, (3, 12), generator=torch.Generator().manual_seed(1))


def llama(**other):
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, attention_bias=True, **other))


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32))


def whisper():
    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    sizes |= {
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 16,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = hf.WhisperModel(hf.WhisperConfig(vocab_size=50, **sizes, **special))
    return model, {"input_features": torch.randn(3, 8, 20), "decoder_input_ids": TOKENS}


def gpt2_cross():
    model = hf.GPT2Model(
        hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, add_cross_attention=True)
    )
    return model, {"input_ids": TOKENS, "encoder_hidden_states": torch.randn(3, 7, 32)}


def multihead(**other):
    model = nn.MultiheadAttention(32, 4, batch_first=True, **other)
    for bias in (model.in_proj_bias, model.bias_k, model.bias_v):
        if bias is not None:
            nn.init.normal_(bias)
    x = torch.randn(3, 9, 32)
    y = torch.randn(3, 11, model.kdim)
    return model, {
        "query": x,
        "key": x if model.kdim == 32 else y,
        "value": x if model.kdim == 32 else y,
        "need_weights": False,
    }


MODELS = {
    "Llama, grouped, rotary": llama,
    "Llama, one key head a head": lambda: hf.LlamaModel(
        hf.LlamaConfig(**(GROUPED | {"num_key_value_heads": 4}))
    ),
    "Llama, wide heads": lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED, head_dim=12)),
    "Gemma 2, softcap": lambda: hf.Gemma2Model(
        hf.Gemma2Config(**GROUPED, head_dim=8, attn_logit_softcapping=9.0, sliding_window=5)
    ),
    "Phi-3, fused": lambda: hf.Phi3Model(hf.Phi3Config(**GROUPED)),
    "Phi-3, fused, one key head a head": lambda: hf.Phi3Model(
        hf.Phi3Config(**(GROUPED | {"num_key_value_heads": 4}))
    ),
    "gpt-oss, sinks": lambda: hf.GptOssModel(
        hf.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=5)
    ),
    "GPT-NeoX, fused by head": lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**SMALL, max_position_embeddings=32)),
    "GPT-2": gpt2,
    "GPT-2 with cross-attention": gpt2_cross,
    "BERT": lambda: hf.BertModel(hf.BertConfig(**SMALL, max_position_embeddings=32)),
    "DistilBERT": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(vocab_size=50, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
    ),
    "Whisper": whisper,
    "MultiheadAttention": multihead,
    "MultiheadAttention with a key of its own": lambda: multihead(add_bias_kv=True),
    "MultiheadAttention, other keys": lambda: multihead(kdim=20, vdim=20),
}


def build(name):
    torch.manual_seed(0)
    made = MODELS[name]()
    model, inputs = made if isinstance(made, tuple) else (made, {"input_ids": TOKENS})
    with torch.no_grad():
        for part, parameter in model.named_parameters():  # scores of every size, biases that matter
            if "norm" not in part.lower() and "ln" not in part and "sink" not in part:
                parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2))
    # gpt-oss multiplies by its experts' weights in no wider format than float32.
    dtype = torch.float32 if name.startswith("gpt-oss") else torch.float64
    inputs = {
        key: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in inputs.items()
    }
    return model.eval().to(dtype), inputs


def look(model, inputs):
    with torch.no_grad(), xt.lens.watch(model, check=False) as seen:
        model(**inputs)
    return seen.record


def scores(model, inputs, layer):
    """Queries of a layer, and all scores before softcap and mask, (batch, head, query, key)."""
    calls = []
    with (
        torch.no_grad(),
        xt.lens.watch(model, observe=lambda call: calls.append(call) if call.layer == layer else None),
    ):
        model(**inputs)
    (call,) = calls
    return call.query, call.query @ call.key.repeat_interleave(
        call.query.shape[1] // call.key.shape[1], dim=1
    ).transpose(-1, -2)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_score_becomes_the_threshold(name, layer):
    model, inputs = build(name)
    before = look(model, inputs)
    if layer >= len(before.calls):
        return  # a single layer of MultiheadAttention
    # Layers feed one another, so clip one alone: what comes before it stays, and its scores are known.
    top, (query, old) = before.by_head("score_max")[layer], scores(model, inputs, layer)
    alone = xt.lens.Record([call for call in before.calls if call.layer == layer])
    threshold = float(sorted(top)[1]) * 0.999
    assert threshold > 0
    expected = [h for h in range(4) if top[h] > threshold]
    assert 0 < len(expected) < 4
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    changed = xt.lens.clip_qk_(model, alone, threshold)
    assert [(c.layer, c.head) for c in changed] == [(layer, h) for h in expected]
    factor = torch.ones(4, dtype=old.dtype)
    for c in changed:
        factor[c.head] = c.factor
    assert all(0 < c.factor < 1 for c in changed)
    new_query, new = scores(model, inputs, layer)
    torch.testing.assert_close(new, old * factor[:, None, None], rtol=1e-4, atol=1e-5)
    after = look(model, inputs).by_head("score_max")[layer]
    for head in range(4):
        assert after[head] == pytest.approx(threshold if head in expected else top[head], rel=1e-5)
    grouped = getattr(getattr(model, "config", None), "num_key_value_heads", 4) == 2
    assert {c.scaled for c in changed} == {"query" if grouped else "query and key"}
    share = factor if grouped else factor.sqrt()
    torch.testing.assert_close(new_query, query * share[:, None, None], rtol=1e-4, atol=1e-5)
    others = [key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])]
    assert 1 <= len(others) <= 5
    assert all(c.name in key for c in changed for key in others)


@pytest.mark.parametrize("name", ["Llama, grouped, rotary", "GPT-2", "BERT", "MultiheadAttention"])
def test_all_layers_in_turn_come_under_the_threshold(name):
    model, inputs = build(name)
    threshold = float(look(model, inputs).by_head("score_max").mean()) / 2
    for _ in range(4):  # a layer above sees other states once a layer below is clipped
        if not xt.lens.clip_qk_(model, look(model, inputs), threshold):
            break
    assert look(model, inputs).by_head("score_max").max() <= threshold * (1 + 1e-6)


def test_query_and_key_share_the_factor_evenly():
    model, inputs = build("GPT-2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    record = look(model, inputs)
    for changed in xt.lens.clip_qk_(model, record, 0.5 * float(record.by_head("score_max").min())):
        for kind in ("weight", "bias"):
            key = f"{changed.name}.c_attn.{kind}"
            new, old = model.state_dict()[key], before[key]
            for begin in (0, 32):
                piece = slice(begin + changed.head * 8, begin + changed.head * 8 + 8)
                torch.testing.assert_close(new[..., piece], old[..., piece] * math.sqrt(changed.factor))
            assert torch.equal(new[..., 64:], old[..., 64:])


def test_nothing_passed_nothing_changed():
    model, inputs = build("BERT")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert xt.lens.clip_qk_(model, look(model, inputs), 1e6) == []
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_cannot_be_clipped_says_so_and_changes_nothing():
    qwen = hf.Qwen3Model(hf.Qwen3Config(**GROUPED, head_dim=8)).eval()
    record = look(qwen, {"input_ids": TOKENS})
    with pytest.raises(
        ArgumentError,
        match=r"Qwen3Attention 'layers.0.self_attn' normalises queries or keys \(q_norm and k_norm\)",
    ):
        xt.lens.clip_qk_(qwen, record, 1e-3)
    t5 = hf.T5EncoderModel(
        hf.T5Config(vocab_size=50, d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=32)
    ).eval()
    with pytest.raises(ArgumentError, match=r"T5Attention .* adds a position bias"):
        xt.lens.clip_qk_(t5, look(t5, {"input_ids": TOKENS}), 1e-3)
    olmo2 = hf.Olmo2Model(hf.Olmo2Config(**GROUPED)).eval()
    with pytest.raises(ArgumentError, match=r"Olmo2Attention .* lower its weight"):
        xt.lens.clip_qk_(olmo2, look(olmo2, {"input_ids": TOKENS}), 1e-3)
    olmo = hf.OlmoModel(hf.OlmoConfig(**GROUPED, clip_qkv=1.0)).eval()
    with pytest.raises(ArgumentError, match=r"OlmoAttention .* \(clip_qkv\)"):
        xt.lens.clip_qk_(olmo, look(olmo, {"input_ids": TOKENS}), 1e-6)

    model, inputs = build("Llama, grouped, rotary")
    record = look(model, inputs)

    class Adapted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, inner.weight

    model.model.layers[1].self_attn.q_proj = Adapted(model.model.layers[1].self_attn.q_proj)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=r"with a Adapted \(q_proj\)"):
        xt.lens.clip_qk_(model, record, 1e-3)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Odd(nn.Module):
    """Attention in a layout of its own."""

    def __init__(self):
        super().__init__()
        self.all_of_it = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.all_of_it(x).reshape(*x.shape[:2], 8, 3).unbind(-1)
        q, k, v = (y.reshape(*x.shape[:2], 2, 4).transpose(1, 2) for y in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_bad_input():
    model, inputs = build("BERT")
    record = look(model, inputs)
    for threshold in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ArgumentError, match="threshold is"):
            xt.lens.clip_qk_(model, record, threshold)
    with pytest.raises(ArgumentError, match="record is a NoneType"):
        xt.lens.clip_qk_(model, None, 1.0)
    with pytest.raises(ArgumentError, match="which this model does not have"):
        xt.lens.clip_qk_(nn.Linear(2, 2), record, 1e-3)
    odd = Odd()
    with pytest.raises(
        ArgumentError,
        match=r"Odd '' keeps its query and key weights in a layout that is not known \(all_of_it\)",
    ):
        xt.lens.clip_qk_(odd, look(odd, {"x": torch.randn(2, 5, 8)}), 1e-6)
    layer, inputs = build("MultiheadAttention")
    layer.in_proj_weight.data[0, 0] = torch.inf
    with pytest.raises(ArgumentError, match="not finite"):
        xt.lens.clip_qk_(layer, look(layer, inputs), 1.0)


def test_a_saturated_softcap_is_clipped_by_what_is_known():
    torch.manual_seed(0)
    config = hf.Gemma2Config(**GROUPED, head_dim=8, attn_logit_softcapping=0.5, sliding_window=5)
    model = hf.Gemma2Model(config).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(1000)
    inputs = {"input_ids": TOKENS}
    with pytest.warns(ExptiltWarning, match=r"head \d is at its softcap 0.5"):
        xt.lens.clip_qk_(model, look(model, inputs), 0.25)
    for _ in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExptiltWarning)
            if not xt.lens.clip_qk_(model, look(model, inputs), 0.25):
                break
    assert look(model, inputs).by_head("score_max").max() <= 0.25 * (1 + 1e-5)


def test_a_record_is_used_once():
    """In a loop that clips after every step, a reading counts until the next one, not every step again."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    x = 30 * torch.randn(2, 10, 16)
    given = {"query": x, "key": x, "value": x, "need_weights": False}
    quiet = {"log": lambda step, readings: None, "max_logit": None, "min_entropy": None}
    monitor = xt.lens.TrainingMonitor(layer, every=10, **quiet)
    changed = []
    for _ in range(20):
        with torch.no_grad(), monitor.step():
            layer(**given)
        changed.append(len(xt.lens.clip_qk_(layer, monitor.record, 5.0)))
    assert changed[0] == 4
    assert sum(changed[1:10]) == 0
    fresh = look(layer, given)
    assert fresh.by_head("score_max").max() == pytest.approx(5.0, rel=1e-3)
    assert xt.lens.clip_qk_(layer, fresh, 50.0) == []  # nothing passed: the record is still good
    assert len(xt.lens.clip_qk_(layer, fresh, 2.0)) == 4


LATENT = SMALL | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 6, "max_position_embeddings": 32, "first_k_dense_replace": 2, "n_routed_experts": 4}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
MODELS_OF_LATENTS = {
    "DeepSeek-V3": lambda: hf.DeepseekV3Model(hf.DeepseekV3Config(**LATENT, q_lora_rank=10)),
    "DeepSeek-V3, plain queries": lambda: hf.DeepseekV3Model(hf.DeepseekV3Config(**LATENT, q_lora_rank=None)),
    "DeepSeek-V2": lambda: hf.DeepseekV2Model(hf.DeepseekV2Config(**LATENT, q_lora_rank=10)),
}


@pytest.mark.parametrize("name", MODELS_OF_LATENTS)
def test_latent_attention(name, monkeypatch):
    """Every score of a clipped head is γ times what it was, those of the others stay: the shared keys too."""
    monkeypatch.setitem(MODELS, name, MODELS_OF_LATENTS[name])
    model, inputs = build(name)
    record, (_, old) = look(model, inputs), scores(model, inputs, 0)
    top = record.by_head("score_max")[0]
    threshold = float(sorted(top)[1]) * 0.999
    before = {key: value.clone() for key, value in model.state_dict().items()}
    alone = xt.lens.Record([call for call in record.calls if call.layer == 0])
    changed = xt.lens.clip_qk_(model, alone, threshold)
    assert [c.head for c in changed] == [h for h in range(4) if top[h] > threshold]
    factor = torch.ones(4, dtype=old.dtype)
    for c in changed:
        factor[c.head] = c.factor
    new = scores(model, inputs, 0)[1]
    torch.testing.assert_close(new, old * factor[:, None, None], rtol=1e-4, atol=1e-5)
    query = "q_proj" if "plain" in name else "q_b_proj"
    others = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert others == {f"layers.0.self_attn.{part}.weight" for part in (query, "kv_b_proj")}
    ratio = (model.state_dict()[min(others)] / before[min(others)]).unflatten(0, (4, 14))[
        :, :, 0
    ]  # kv_b_proj
    torch.testing.assert_close(ratio[:, :8], factor.sqrt()[:, None].expand(4, 8))
    assert torch.equal(ratio[:, 8:], torch.ones(4, 6, dtype=ratio.dtype))  # values are left alone


def test_layers_that_share_their_weights_are_clipped_once(monkeypatch):
    sizes = {"embedding_size": 16, "max_position_embeddings": 32} | SMALL | {"num_hidden_layers": 3}
    monkeypatch.setitem(MODELS, "ALBERT", lambda: hf.AlbertModel(hf.AlbertConfig(**sizes)))
    model, inputs = build("ALBERT")
    record, (_, old) = look(model, inputs), scores(model, inputs, 0)
    top = record.by_head("score_max").max(0)
    threshold = float(sorted(top)[1]) * 0.999
    changed = xt.lens.clip_qk_(model, record, threshold)
    assert [c.head for c in changed] == [h for h in range(4) if top[h] > threshold]
    factor = torch.ones(4, dtype=old.dtype)
    for c in changed:
        factor[c.head] = threshold / top[c.head]
    torch.testing.assert_close(scores(model, inputs, 0)[1], old * factor[:, None, None])


@pytest.mark.parametrize("key_mass", [False, True])
def test_a_layer_with_a_head_of_nan_is_refused(key_mass):
    # Its finite heads passed the threshold as well: clipping them would hide that the layer is broken.
    layer = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.mul_(30)
        layer.in_proj_weight[:4] = torch.nan  # the queries of head 0
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), xt.lens.watch(layer, check=False, key_mass=key_mass) as seen:
        layer(x, x, x, need_weights=False)
    top = seen.record.by_head("score_max")
    assert math.isnan(top[0, 0])
    assert top[0, 1] > 5
    before = layer.in_proj_weight.clone()
    with pytest.raises(ArgumentError, match="head 0 has scores that are not finite"):
        xt.lens.clip_qk_(layer, seen.record, 5.0)
    assert torch.equal(layer.in_proj_weight.nan_to_num(), before.nan_to_num())
