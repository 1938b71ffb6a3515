"""Effects of heads, against runs of the whole model with one head edited."""

import numpy as np
import pytest
import torch
import transformers as tf

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
ablate = xt.lens.edits.ablate


def run(model, ids=IDS, **options):
    with torch.no_grad(), xt.lens.watch(model, **options):
        return model(ids)[0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_ablation_and_patching_are_single_runs(name):
    model = models.make(name)
    inputs = {"input_ids": IDS}

    def measure(output, inputs):
        return output[0].flatten(1).norm(dim=1)

    found = xt.lens.edits.ablate(model, inputs, measure=measure, progress=False)
    plain = run(model)
    for place in ((0, 1), (1, 3)):
        cut = run(model, edit=xt.lens.edits.zero([place]))
        apart = (cut.flatten(1).norm(dim=1) - plain.flatten(1).norm(dim=1)).double()
        assert found.effect[place] == pytest.approx(float(apart.mean()), rel=1e-3, abs=1e-5)
        assert found.error[place] == pytest.approx(float(apart.std() / 2**0.5), rel=1e-3, abs=1e-5)
    frame = found.to_frame()
    assert len(frame) == 8
    assert (frame.low <= frame.effect).all()
    one = xt.lens.edits.ablate(model, {"input_ids": IDS[:1]}, measure=measure, progress=False)
    np.testing.assert_array_equal(one.to_frame().effect, one.effect.ravel())  # also without an error
    assert one.to_frame().low.isna().all()
    same = xt.lens.edits.patch(model, inputs, inputs, measure, progress=False)
    np.testing.assert_allclose(same.effect, 0, atol=1e-4)
    by_default = xt.lens.edits.ablate(model, inputs, how="mean", progress=False)
    assert np.isfinite(by_default.effect).all()
    assert not any("forward" in vars(module) for module in model.modules())


def shared_keys():
    """A model whose last layers read the keys of earlier ones from the cache."""
    config = tf.Gemma3nTextConfig(
        **SMALL,
        num_hidden_layers=4,
        head_dim=8,
        num_key_value_heads=2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        altup_num_inputs=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=None,
    )
    return tf.Gemma3nForCausalLM(config)


class Alternating(torch.nn.Module):
    """Two blocks that run in turns, twice each, the second before the first."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) for _ in range(3)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for place in (1, 0, 1, 0, 2):
            x = self.layers[place](x)
        return x


@pytest.mark.parametrize("name", ["t5", "shared keys", "shared layers", "alternating"])
def test_blocks_given_again_change_nothing(name):
    torch.manual_seed(0)
    padded = torch.ones_like(IDS)
    padded[1, 8:] = 0
    model, inputs = {
        "t5": lambda: (
            models.make("t5"),
            {"input_ids": IDS, "attention_mask": padded, "decoder_input_ids": IDS[:, :7]},
        ),
        "shared keys": lambda: (shared_keys(), {"input_ids": IDS, "attention_mask": padded}),
        "shared layers": lambda: (
            tf.AlbertModel(tf.AlbertConfig(**SMALL, embedding_size=8, num_hidden_layers=4)),
            {"input_ids": IDS},
        ),
        "alternating": lambda: (Alternating(), {"x": torch.randn(2, 6, 16).double()}),
    }[name]()
    model = model.double().eval()

    def measure(output, _):
        output = output if isinstance(output, torch.Tensor) else output[0]
        return output.flatten(1).norm(dim=1)

    found = ablate(model, inputs, measure=measure, progress=False)
    for layer, head in np.argwhere(np.isfinite(found.effect)).tolist()[::3]:
        with torch.no_grad():
            with xt.lens.watch(model):
                plain = measure(model(**inputs), None)
            with xt.lens.watch(model, edit=xt.lens.edits.zero([(layer, head)])):
                cut = measure(model(**inputs), None)
        assert found.effect[layer, head] == pytest.approx(float((cut - plain).mean()), rel=1e-6, abs=1e-10)


def test_the_default_measure():
    torch.manual_seed(0)
    model = models.make("llama")
    left = torch.cat([torch.ones(2, 3, dtype=torch.long), IDS], 1)
    real = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(IDS)], 1)
    places = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    plain = ablate(model, {"input_ids": IDS}, progress=False)
    with torch.no_grad():
        assert plain.base == pytest.approx(float(model(IDS, labels=IDS).loss), rel=1e-5)
    padded = ablate(model, {"input_ids": left, **places}, progress=False)
    assert padded.base == pytest.approx(plain.base, rel=1e-5)
    np.testing.assert_allclose(padded.effect, plain.effect, atol=1e-5)
    t5 = models.make("t5")
    ids = IDS.flip(1)
    found = ablate(t5, {"input_ids": IDS, "decoder_input_ids": ids}, progress=False)
    with torch.no_grad():
        logits = t5(input_ids=IDS, decoder_input_ids=ids).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert found.base == pytest.approx(float(wanted), rel=1e-5)
    with pytest.raises(ArgumentError, match="decoder_input_ids"):
        ablate(models.make("bart"), {"input_ids": IDS}, progress=False)
    config = tf.BertConfig(**SMALL, num_hidden_layers=1)
    for kind in (tf.BertForMaskedLM, tf.BertForSequenceClassification, tf.BertForTokenClassification):
        # None of them predicts the next token: the change of their logits, which is 0 at first.
        found = ablate(
            kind(config), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, progress=False
        )
        assert found.base == 0
        assert (found.effect > 0).all()


def test_measures_that_are_not_one_number_a_text():
    model, inputs = models.make("gpt2"), {"input_ids": IDS}
    short = torch.ones_like(IDS)
    short[1, 1:] = 0
    for given, measure in (
        (inputs, lambda output, _: output[0].norm()),
        ({**inputs, "attention_mask": short}, None),
    ):
        with pytest.raises(ArgumentError, match="one finite number a text"):
            ablate(model, given, measure=measure, progress=False)


def test_a_cache_and_a_forward_of_others_are_left_alone():
    model = models.make("gpt2")
    cache, block = tf.DynamicCache(config=model.config), model.transformer.h[0]
    with torch.no_grad():
        model(IDS, past_key_values=cache, use_cache=True)
    own = block.forward
    block.forward = lambda *given, **named: own(*given, **named)
    there = block.forward
    found = ablate(model, {"input_ids": IDS, "past_key_values": cache}, progress=False)
    assert block.forward is there
    assert cache.get_seq_length() == 11
    with torch.no_grad():
        logits = model(torch.cat([IDS, IDS], 1)).logits[:, 11:-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
    assert found.base == pytest.approx(float(wanted), rel=1e-5)
