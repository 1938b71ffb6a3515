"""Masks: rules that are read, rules that are not, and dense ones."""

import pytest
import torch
import transformers as tf
from transformers import masking_utils as m

import exptilt as xt
from exptilt.lens.watching.masks import Rule, RuleMask, make_mask, read_rule
from oracles import heads as oracle
from oracles import tiny_models as models


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


RULES = {
    "causal": (m.causal_mask_function, Rule(True, None)),
    "bidirectional": (m.bidirectional_mask_function, Rule(False, None)),
    "window": (m.sliding_window_causal_mask_function(3), Rule(True, 3)),
    "window both ways": (m.sliding_window_bidirectional_mask_function(3), Rule(False, 4)),
    "window ahead too": (m.and_masks(m.sliding_window_overlay(3), m.bidirectional_mask_function), None),
    "two windows": (
        m.and_masks(m.sliding_window_overlay(3), m.sliding_window_overlay(2), m.causal_mask_function),
        None,
    ),
    "chunks": (m.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)), None),
    "either": (m.or_masks(m.causal_mask_function, m.bidirectional_mask_function), None),
    "of the user": (lambda batch, head, q, k: k <= q, None),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_are_read_or_left_alone(name):
    function, rule = RULES[name]
    assert read_rule(function) == rule


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_its_cells_say(name):
    """What `attend` is told, cell by cell against the dense mask."""
    padding = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    for q_offset, kv_offset, Q, K in ((0, 0, 6, 6), (3, 0, 3, 6), (5, 2, 1, 4), (2, 0, 2, 6)):
        asked = {"batch_size": 2, "q_length": Q, "kv_length": K, "q_offset": q_offset, "kv_offset": kv_offset}
        asked |= {"mask_function": RULES[name][0], "attention_mask": padding}
        mask = make_mask(**asked)
        dense = m.sdpa_mask(**asked, allow_is_causal_skip=False)
        assert mask.shape == dense.shape
        assert mask.dtype == torch.bool
        assert torch.equal(mask & True, dense)
        assert torch.equal(mask[..., :2], dense[..., :2])
        assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(dense, 1.0, 2.0))


def test_a_rule_mask_is_light():
    """A million positions: the dense mask would be a terabyte."""
    mask = make_mask(
        batch_size=1, q_length=10**6, kv_length=10**6, attention_mask=torch.ones(1, 10**6, dtype=torch.bool)
    )
    assert mask.shape == (1, 1, 10**6, 10**6)
    assert mask.padding is None
    assert "causal=True" in repr(mask)


def test_packed_sequences_see_only_themselves():
    model = models.make("llama")
    ids = models.inputs("llama")[0]["input_ids"][:1]
    packed = {
        "input_ids": ids,
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]]),
        "use_cache": False,
    }
    expected = run(model, packed)
    calls = []
    with xt.lens.watch(model, observe=calls.append) as seen:
        found = run(model, packed)
    assert torch.allclose(found, expected, rtol=1e-3, atol=2e-5)
    alone = torch.cat([run(model, {"input_ids": ids[:, a:b]}) for a, b in ((0, 4), (4, 9), (9, 11))], 1)
    assert torch.allclose(found, alone, rtol=1e-3, atol=1e-4)
    assert seen.record.to_frame().visible_keys.iloc[0] == pytest.approx((10 + 15 + 3) / 11)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["llama", "bert", "mistral"])
def test_a_mask_given_by_the_user(name, dtype):
    """(batch, 1, Q, K): random, but every query sees itself. Item 0 hides its last three keys from all: they
    are padding.
    """
    model = models.make(name)
    ids = models.inputs(name)[0]["input_ids"]
    mask = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = mask | torch.eye(11, dtype=torch.bool)
    mask[0, :, :, -3:] = False
    mask[0, :, -3:, 0] = True
    given = (
        mask
        if dtype == torch.bool
        else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    )
    eager = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = run(model, {"input_ids": ids, "attention_mask": eager})
    calls = []
    with xt.lens.watch(model, observe=calls.append) as seen:
        found = run(model, {"input_ids": ids, "attention_mask": given})
    assert torch.allclose(found, expected, rtol=1e-3, atol=2e-5)
    frame = seen.record.to_frame()
    assert (frame[frame["item"] == 0].queries == 8).all()
    assert (frame[frame["item"] > 0].queries == 11).all()
    for call in calls:
        assert torch.equal((oracle.scores(call) > -torch.inf), mask.expand(3, 4, 11, 11))
        assert torch.equal(call.real_key[0], torch.arange(11) < 8)


def test_numbers_in_a_dense_mask_are_added():
    model = models.make("bert")
    ids = models.inputs("bert")[0]["input_ids"]
    bias = torch.randn(3, 1, 11, 11, generator=torch.Generator().manual_seed(0))
    bias[:, :, :, 2] = -torch.inf
    expected = run(model, {"input_ids": ids, "attention_mask": bias})
    calls = []
    with xt.lens.watch(model, observe=calls.append) as seen:
        assert torch.allclose(
            run(model, {"input_ids": ids, "attention_mask": bias}), expected, rtol=1e-3, atol=2e-5
        )
    assert seen.record.calls[0].biased
    assert torch.allclose(
        torch.softmax(oracle.scores(calls[0]), -1).sum((2, 3)), torch.full((3, 4), 11.0, dtype=torch.float64)
    )


def test_a_function_of_the_user_beside_the_causal_one():
    """Image tokens of a multimodal model see each other both ways: the rule is unknown, the mask is made, the
    numbers are right.
    """
    model = models.make("llama")
    inputs, real = models.inputs("llama", "left")
    states = model.get_input_embeddings()(inputs["input_ids"])
    both = {
        "config": model.config,
        "inputs_embeds": states,
        "attention_mask": inputs["attention_mask"],
        "past_key_values": None,
    }
    extra = {"or_mask_function": lambda batch, head, q, k: (q < 6) & (k < 6)}
    expected = run(model, {**inputs, "attention_mask": m.create_causal_mask(**both, **extra)})
    with xt.lens.watch(model) as seen:
        mask = m.create_causal_mask(**both, **extra)
        assert isinstance(mask, RuleMask)
        assert mask.rule is None
        found = run(model, {**inputs, "attention_mask": mask})
    assert torch.allclose(found[real], expected[real], rtol=1e-3, atol=2e-5)
    assert not torch.allclose(found[real], run(model, inputs)[real], rtol=1e-3, atol=2e-5)
    assert seen.record.to_frame().groupby("item").queries.first().tolist() == [7, 11, 10]


def test_a_window_both_ways():
    """ModernBERT: local layers look at both sides, within a distance."""
    torch.manual_seed(0)
    config = tf.ModernBertConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        local_attention=6,
        pad_token_id=0,
        attn_implementation="eager",
        global_attn_every_n_layers=3,
    )
    model = tf.ModernBertModel(config).eval()
    inputs, real = models.inputs("bert", "right")
    expected = run(model, inputs)
    calls = []
    with xt.lens.watch(model, observe=calls.append):
        found = run(model, inputs)
    assert torch.allclose(found[real], expected[real], rtol=1e-3, atol=2e-5)
    assert [call.options.get("window") for call in calls] == [None, 4, 4]


def test_without_the_mask_function_causality_would_be_lost(monkeypatch):
    """What the parity tests would find, if the mask function were not registered under the name of the
    attention function.
    """
    from transformers import AttentionMaskInterface

    model = models.make("llama")
    inputs, real = models.inputs("llama", "left")
    expected = run(model, inputs)
    xt.lens.register()
    for name in ("exptilt", "exptilt-eager"):
        monkeypatch.delitem(AttentionMaskInterface._global_mapping, name)
    with xt.lens.watch(model):
        found = run(model, inputs)
    assert not torch.allclose(found[real], expected[real], rtol=1e-3, atol=2e-5)
