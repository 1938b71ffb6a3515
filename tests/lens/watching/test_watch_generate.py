"""Decoding with caches: the same tokens, and every step recorded."""

import numpy as np
import pytest
import torch
import transformers as tf

import exptilt as xt
from oracles import tiny_models as models

STEPS = 6


def generate(model, inputs, **options):
    keep = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
    return model.generate(**keep, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, **options)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", [*models.CAUSAL, "t5", "bart"])
def test_greedy_tokens_and_steps(name, side):
    model = models.make(name)
    inputs, _ = models.inputs(name, side)
    expected = generate(model, inputs)
    with xt.lens.watch(model) as seen:
        found = generate(model, inputs)
    assert torch.equal(found, expected)
    steps = seen.record.to_frame(by_step=True)
    decoder = steps[~steps.name.str.contains("encoder\\.")]
    counts = decoder[decoder.kind == "self"].groupby(["layer", "item", "head"]).step.apply(list)
    assert len(counts) > 0
    assert all(steps == list(range(STEPS)) for steps in counts)


def test_a_decoding_step_is_the_last_row_of_the_whole():
    """What a step records is what the same query gives in one forward pass over the whole text."""
    model = models.make("llama")
    inputs, _ = models.inputs("llama", "left")
    with xt.lens.watch(model) as seen:
        text = generate(model, inputs)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, STEPS, dtype=torch.int64)], 1)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), xt.lens.watch(model, per_token=True) as whole:
        model(text[:, :-1], attention_mask=mask[:, :-1], position_ids=position[:, :-1])
    frame = seen.record.to_frame(by_step=True)
    for call in whole.record.calls:
        for step in range(1, STEPS):
            row = frame[(frame.layer == call.layer) & (frame.step == step)].sort_values(["item", "head"])
            assert (row.queries == 1).all()
            for name in ("entropy", "log_normalizer", "score_max", "first_key_mass"):
                expected = call.per_token[name][:, :, 11 + step - 1].ravel()
                assert np.allclose(row[name], expected, rtol=1e-3, atol=1e-4), (name, step)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_static_caches_hold_more_room_than_keys(name, cache):
    model = models.make(name)
    inputs, _ = models.inputs(name, "left")
    expected = generate(model, inputs, cache_implementation=cache)
    lengths = []

    def observe(call):
        again = xt.attend(call.query, call.key, call.value, **call.options)
        assert torch.equal(again.output, call.tilted.output)
        if call.layer == 1:
            lengths.append(call.key.shape[2])

    with xt.lens.watch(model, observe=observe):
        found = generate(model, inputs, cache_implementation=cache)
    assert torch.equal(found, expected)
    if name in ("llama", "gemma2"):  # layer 1 sees all: room that holds no key yet is no key
        assert lengths == [11, 12, 13, 14, 15, 16]


def test_a_static_cache_given_by_hand():
    model = models.make("llama")
    ids = models.inputs("llama")[0]["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    cache = tf.StaticCache(config=model.config, max_cache_len=32)
    calls = []
    with torch.no_grad(), xt.lens.watch(model, observe=calls.append):
        parts = [
            model(ids[:, a:b], past_key_values=cache, use_cache=True).logits
            for a, b in ((0, 5), (5, 8), (8, 9), (9, 11))
        ]
    assert torch.allclose(torch.cat(parts, 1), expected, rtol=1e-3, atol=1e-4)
    assert [call.key.shape[2] for call in calls if call.layer == 0] == [5, 8, 9, 11]


def test_beams():
    model = models.make("t5")
    inputs, _ = models.inputs("t5", "right")
    expected = generate(model, inputs, num_beams=3)
    with xt.lens.watch(model) as seen:
        assert torch.equal(generate(model, inputs, num_beams=3), expected)
    frame = seen.record.to_frame()
    assert frame[frame.name.str.startswith("decoder")]["item"].nunique() == 9
