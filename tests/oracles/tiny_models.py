"""Tiny models with random weights, large enough for attention to be far from uniform, and inputs for them."""

import torch
import transformers as tf
from transformers import logging

logging.set_verbosity_error()

VOCABULARY = 61
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {
    **_SMALL,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 3,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}

CAUSAL = {
    "llama": lambda **k: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED, **k)),
    "qwen3": lambda **k: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED, **k)),
    "mistral": lambda **k: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED, sliding_window=4, **k)),
    "gemma2": lambda **k: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **_GROUPED, sliding_window=4, attn_logit_softcapping=1.5, query_pre_attn_scalar=8, **k
        )
    ),
    "gpt_oss": lambda **k: tf.GptOssForCausalLM(
        tf.GptOssConfig(**_GROUPED, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, **k)
    ),
    "gpt2": lambda **k: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            **k,
        )
    ),
}
ENCODERS = {"bert": lambda **k: tf.BertModel(tf.BertConfig(**_SMALL, **k), add_pooling_layer=False)}
IMAGE = {
    "vit": lambda **k: tf.ViTModel(
        tf.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=40,
            image_size=16,
            patch_size=4,
            **k,
        )
    )
}
PAIRS = {
    "t5": lambda **k: tf.T5ForConditionalGeneration(tf.T5Config(**_T5, **k)),
    "bart": lambda **k: tf.BartForConditionalGeneration(
        tf.BartConfig(**_PAIR, max_position_embeddings=64, **k)
    ),
    "whisper": lambda **k: tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(**_PAIR, max_source_positions=20, num_mel_bins=8, **k)
    ),
}
ALL = {**CAUSAL, **ENCODERS, **IMAGE, **PAIRS}


def make(name, *, dtype=torch.float32, seed=0, attention="eager", spread=0.4, **config):
    """The model by name, in eval mode, with weights of standard deviation `spread`."""
    torch.manual_seed(seed)
    model = ALL[name](attn_implementation=attention, **config).to(dtype).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and label.endswith("weight") else 0.0, spread)
    return model


def padding(batch, length, side):
    """(batch, length) of ones, zeros at one end of the first and the last item."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    if side == "left":
        mask[0, :4], mask[-1, :1] = 0, 0
    elif side == "right":
        mask[0, -4:], mask[-1, -1:] = 0, 0
    return mask


def inputs(name, side=None, *, batch=3, length=11, dtype=torch.float32, seed=1):
    """Keyword arguments of a forward pass, and which outputs are real: (batch, length) booleans."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(n):
        return torch.randint(3, VOCABULARY, (batch, n), generator=generator)

    if name in IMAGE:
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator, dtype=dtype)}, torch.ones(
            batch, 17, dtype=torch.bool
        )
    if name in PAIRS:
        target = {"decoder_input_ids": tokens(7), "decoder_attention_mask": padding(batch, 7, side)}
        real = target["decoder_attention_mask"].bool()
        if name == "whisper":
            return {
                "input_features": torch.randn(batch, 8, 40, generator=generator, dtype=dtype),
                **target,
            }, real
        return {"input_ids": tokens(length), "attention_mask": padding(batch, length, side), **target}, real
    mask = padding(batch, length, side)
    return {"input_ids": tokens(length), "attention_mask": mask}, mask.bool()
