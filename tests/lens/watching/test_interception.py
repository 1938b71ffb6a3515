"""What a watch restores when it ends, what it refuses, and watches of one model that meet."""

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformers import AttentionInterface, AttentionMaskInterface

import exptilt as xt
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.lens.watching.call import Request
from exptilt.lens.watching.masks import RuleMask
from oracles import tiny_models as models


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def state(model):
    """All that a watch might leave behind."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    xt.lens.register()  # stays registered after the first watch
    registries = (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping))
    return (
        [c._attn_implementation for c in configs],
        hooks,
        registries,
        len(_get_current_function_mode_stack()),
        model.training,
    )


@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_all_is_as_before(name):
    model = models.make(name, attention="sdpa" if name == "llama" else "eager")
    before = state(model)
    with xt.lens.watch(model):
        assert state(model) != before
        run(model, models.inputs(name)[0])
    assert state(model) == before

    def stop():
        with xt.lens.watch(model):
            run(model, models.inputs(name)[0])
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        stop()
    assert state(model) == before

    def fail(call):
        raise KeyError("observed")

    with pytest.raises(KeyError, match="observed"), xt.lens.watch(model, observe=fail):
        run(model, models.inputs(name)[0])
    assert state(model) == before


def test_sub_configurations_with_different_implementations_are_restored_one_by_one():
    model = models.make("t5")
    model.encoder.config._attn_implementation_internal = "sdpa"
    before = state(model)
    assert {"sdpa", "eager"} <= set(before[0])
    with xt.lens.watch(model):
        run(model, models.inputs("t5")[0])
    assert state(model) == before


def test_nested_watches_both_see():
    model, inputs = models.make("llama"), models.inputs("llama", "left")[0]
    before = state(model)
    with xt.lens.watch(model) as outer:
        run(model, inputs)
        with xt.lens.watch(model, per_token=True) as inner:
            run(model, inputs)
        run(model, inputs)
    assert state(model) == before
    assert [call.step for call in outer.record.calls] == [0, 0, 1, 1, 2, 2]
    assert [call.step for call in inner.record.calls] == [0, 0]
    assert torch.equal(outer.record.calls[2].values[:12], inner.record.calls[0].values[:12])


def test_a_part_of_a_model():
    model, inputs = models.make("bart"), models.inputs("bart")[0]
    with xt.lens.watch(model) as whole, xt.lens.watch(model.model.decoder) as part:
        run(model, inputs)
    assert len(whole.record.calls) == 6
    assert [call.name for call in part.record.calls] == [
        "layers.0.self_attn",
        "layers.0.encoder_attn",
        "layers.1.self_attn",
        "layers.1.encoder_attn",
    ]
    assert [call.kind for call in part.record.calls] == ["self", "cross"] * 2


def test_two_models_with_one_configuration():
    one = models.make("llama")
    two = tf.LlamaForCausalLM(one.config).eval()
    assert two.config is one.config
    inputs = models.inputs("llama")[0]
    expected = run(two, inputs)
    before = state(one)
    with xt.lens.watch(one) as seen:
        assert torch.allclose(run(two, inputs), expected, atol=1e-5)
        assert not seen.record.calls
        run(one, inputs)
        with xt.lens.watch(two) as other:
            run(one, inputs)
            run(two, inputs)
    assert [call.step for call in seen.record.calls] == [0, 0, 1, 1]
    assert [call.step for call in other.record.calls] == [0, 0]
    assert state(one) == before


def test_watches_of_one_configuration_that_end_in_the_other_order():
    one = models.make("llama")
    two = tf.LlamaForCausalLM(one.config).eval()
    before, inputs = state(one), models.inputs("llama")[0]
    opened, closed, records = threading.Event(), threading.Event(), []

    def first():
        with xt.lens.watch(one) as seen:
            run(one, inputs)
            opened.set()
            closed.wait(60)
        records.append(seen.record)

    thread = threading.Thread(target=first)
    thread.start()
    assert opened.wait(60)
    with xt.lens.watch(two) as seen:
        closed.set()
        thread.join()
        run(two, inputs)
    assert len(records[0].calls) == len(seen.record.calls) == 2
    assert state(one) == before


def test_models_in_threads_do_not_mix():
    names = ("llama", "gpt2", "bert")
    made = {name: (models.make(name), models.inputs(name, "left")[0]) for name in names}
    alone, together = {}, {}

    def look(name, into):
        model, inputs = made[name]
        with xt.lens.watch(model) as seen:
            for _ in range(3):
                run(model, inputs)
        into[name] = seen.record.by_head("entropy")

    for name in names:
        look(name, alone)
    threads = [threading.Thread(target=look, args=(name, together)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together.keys() == alone.keys()
    for name in names:
        assert np.array_equal(alone[name], together[name])


class Strange(nn.Module):
    """A model whose attention passes an option of its own."""

    def __init__(self, model, **extra):
        super().__init__()
        self.inner, self.extra = model, extra

    def forward(self, **inputs):
        return self.inner(**inputs, **self.extra)


@pytest.mark.parametrize(
    "extra",
    [{"head_mask_of_mine": torch.ones(4)}, {"alibi": 1.0}, {"indices": torch.zeros(1)}, {"cache": object()}],
)
def test_an_unknown_option_raises_and_names_it(extra):
    model = Strange(models.make("llama"), **extra)
    before = state(model)
    (option,) = extra
    with (
        pytest.raises(
            ArgumentError,
            match=f"Strange .LlamaAttention 'inner.model.layers.0.self_attn'. passes '{option}'",
        ),
        xt.lens.watch(model),
    ):
        run(model, models.inputs("llama")[0])
    assert state(model) == before


def test_options_that_are_none_or_known_are_passed():
    model = Strange(models.make("llama"), alibi=None, num_items_in_batch=3)
    with xt.lens.watch(model) as seen:
        run(model, models.inputs("llama")[0])
    assert len(seen.record.calls) == 2


def test_output_attentions_raises():
    model = models.make("llama")
    with pytest.raises(ArgumentError, match="output_attentions"), xt.lens.watch(model):
        run(model, {**models.inputs("llama")[0], "output_attentions": True})


def test_sinks_that_are_not_passed_raise():
    model = models.make("llama")
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ArgumentError, match="sinks"), xt.lens.watch(model):
        run(model, models.inputs("llama")[0])


def test_not_a_module():
    with pytest.raises(ArgumentError, match="model is a str"):
        xt.lens.watch("gpt2")


def test_a_model_without_attention():
    model = nn.Sequential(nn.Linear(3, 3))
    with (
        pytest.raises(xt.lens.NothingSeenError, match="Sequential ran, but no attention"),
        xt.lens.watch(model),
    ):
        model(torch.zeros(1, 3))
    with pytest.raises(xt.lens.NothingSeenError, match="was not called"), xt.lens.watch(model):
        pass


class Eager(nn.Module):
    """Names the attention function but goes its own way."""

    def __init__(self):
        super().__init__()
        self.proper = False

    def forward(self, x):
        if self.proper:
            return nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.softmax(x @ x.mT, -1) @ x


def test_attention_that_goes_its_own_way_raises():
    model = nn.Sequential(Eager(), Eager())
    model[0].proper = True
    with (
        pytest.raises(xt.lens.NothingSeenError, match=r"1 attention modules of Sequential ran.*'1'"),
        xt.lens.watch(model),
    ):
        model(torch.randn(1, 2, 3, 4))


class OwnAttention(nn.Module):
    """Attends without any function that could be watched."""

    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


def test_attention_of_an_unknown_kind_is_never_passed_over_in_silence():
    x = torch.randn(1, 2, 3, 4)
    with (
        pytest.raises(xt.lens.NothingSeenError, match=r"'0' .OwnAttention."),
        xt.lens.watch(model := nn.Sequential(OwnAttention())),
    ):
        model(x)
    model = nn.Sequential(OwnAttention(), Eager())
    model[1].proper = True
    with (
        pytest.warns(
            ExptiltWarning,
            match="without 1 modules that compute attention without a function that watch can intercept: '0'",
        ),
        xt.lens.watch(model) as seen,
    ):
        model(x)
    assert [call.name for call in seen.record.calls] == ["1"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_asks_its_configuration_by_name(attention):
    """Falcon does not use the interface. With sdpa it calls the function, which is seen; its eager attention
    cannot be, and raises.
    """
    torch.manual_seed(0)
    sizes = {
        "vocab_size": models.VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = tf.FalconModel(tf.FalconConfig(**sizes, attn_implementation=attention)).eval()
    inputs, real = models.inputs("gpt2", "right")
    expected = run(model, inputs)
    if attention == "eager":
        with (
            pytest.raises(xt.lens.NothingSeenError, match="attn_implementation='sdpa'"),
            xt.lens.watch(model),
        ):
            run(model, inputs)
        return
    with xt.lens.watch(model) as seen:
        found = run(model, inputs)
    assert torch.allclose(found[real], expected[real], rtol=1e-3, atol=2e-5)
    assert seen.record.to_frame().groupby("item").queries.first().tolist() == [7, 11, 10]


def test_a_compiled_model_runs_uncompiled_while_it_is_watched():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = compiled(x)
        with xt.lens.watch(compiled) as seen:
            found = compiled(x)
        again = compiled(x)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(again, expected)
    assert [call.name for call in seen.record.calls] == ["_orig_mod.self_attn"]


def test_a_watch_cannot_be_entered_twice():
    model = models.make("gpt2")
    with xt.lens.watch(model) as seen:
        run(model, models.inputs("gpt2")[0])
        with pytest.raises(ArgumentError, match="already open"):
            seen.__enter__()


def test_nan_is_reported_with_the_layer():
    model = models.make("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(ArgumentError, match="query holds NaN") as caught, xt.lens.watch(model):
        run(model, models.inputs("llama")[0])
    assert "model.layers.1.self_attn" in caught.value.__notes__[0]


def test_rule_masks_are_never_made_dense_where_a_rule_is_enough(monkeypatch):
    def refuse(self):
        raise AssertionError("an n×n mask was made")

    monkeypatch.setattr(RuleMask, "dense", refuse)
    for name in models.ALL:
        for side in ("left", "right"):
            model = models.make(name)
            with xt.lens.watch(model) as seen:
                run(model, models.inputs(name, side)[0])
            assert seen.record.calls


def test_a_module_that_attends_in_two_ways_is_joined_whole():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, z):
            return (
                self.attention(x, x, x, need_weights=False)[0]
                + self.attention(x, z, z, need_weights=False)[0]
            )

    torch.manual_seed(0)
    model, x, z = Both().double(), torch.randn(2, 5, 8).double(), torch.randn(2, 9, 8).double()
    with torch.no_grad(), xt.lens.watch(model, per_token=True) as seen:
        model(x, z)
    assert [call.kind for call in seen.record.calls] == ["self", "cross"]
    wanted = torch.stack([call.per_token["entropy"] for call in seen.record.calls]).mean((0, 1, 3))
    np.testing.assert_allclose(seen.record.by_head("entropy")[0], wanted)
    assert seen.record.by_head("queries").tolist() == [[20, 20]]
    own = seen.record.calls[0].per_token["entropy"] / np.log(5)
    frame = seen.record.to_frame()
    relative = frame[frame.kind == "self"].sort_values(["item", "head"]).relative_entropy
    np.testing.assert_allclose(relative, own.mean(-1).flatten(), rtol=1e-14)  # in the model's own precision


def test_unchecked_nan_reaches_key_mass():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.full((1, 4, 8), torch.nan)
    with torch.no_grad(), xt.lens.watch(layer, key_mass=True, check=False) as seen:
        layer(x, x, x, need_weights=False)
    assert len(seen.record.calls) == 1
    with pytest.raises(ArgumentError), torch.no_grad(), xt.lens.watch(layer, key_mass=True, check=True):
        layer(x, x, x, need_weights=False)


@pytest.mark.parametrize("sink", [False, True])
def test_dropout_of_a_query_that_sees_nothing(sink):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 1, :] = False
    options = {"scale": 0.5, "mask": mask} | ({"sink": torch.zeros(2, dtype=torch.float64)} if sink else {})
    output = xt.attend(query, key, value, **options, dropout=1e-12).output
    torch.testing.assert_close(output, xt.attend(query, key, value, **options).output)
    assert (output[:, :, 1] == 0).all()
    output.sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize(("Q", "K"), [(6, 4), (4, 4), (3, 5)])
def test_causal_without_a_mask_is_torch_s(Q, K):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, Q, 3), torch.randn(1, 2, K, 3), torch.randn(1, 2, K, 3)
    request = Request(None, "self", query, key, value, {"scale": 0.7})
    request.see_from_the_start()
    request.look()
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.7)
    found = xt.attend(request.query, request.key, request.value, **request.options)
    torch.testing.assert_close(found.output, wanted)
    assert request.visible.visible[0, 0].tolist() == [min(i + 1, K) for i in range(Q)]


def test_one_model_watched_in_several_threads():
    # Each record holds the calls of its own thread, and a thread that watches nothing is left alone.
    model, length = models.make("llama"), (5, 7, 9)
    inputs = {n: {"input_ids": torch.arange(3, 3 + n)[None]} for n in length}
    expected = {n: run(model, inputs[n]) for n in length}
    before, barrier, seen, wrong = state(model), threading.Barrier(3), {}, []

    def look(n):
        try:
            with xt.lens.watch(model) if n != 9 else nullcontext() as opened:
                for _ in range(5):
                    barrier.wait(60)
                    assert torch.allclose(run(model, inputs[n]), expected[n], atol=1e-5)
            if opened is not None:
                seen[n] = (
                    {call.values[0].max().item() for call in opened.record.calls},
                    len(opened.record.calls),
                )
        except BaseException as problem:
            wrong.append(problem)
            barrier.abort()

    threads = [threading.Thread(target=look, args=(n,)) for n in length]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen == {5: ({5.0}, 10), 7: ({7.0}, 10)}  # queries of each call
    assert state(model) == before


@pytest.mark.parametrize("where", ["outside", "inside", "function"])
def test_the_model_of_a_compiled_function(where):
    model, inputs = models.make("gpt2"), models.inputs("gpt2")[0]
    expected = run(model, inputs)

    def logits(**inputs):
        return model(**inputs).logits

    def watched(**inputs):
        with xt.lens.watch(model) as seen:
            found = model(**inputs).logits
        return found, seen

    with torch.no_grad():
        if where == "inside":
            found, seen = torch.compile(watched, backend="eager")(**inputs)
        else:
            compiled = torch.compile(model if where == "outside" else logits, backend="eager")
            with xt.lens.watch(model) as seen:
                found = compiled(**inputs)
            found = getattr(found, "logits", found)
    assert torch.allclose(found, expected, atol=1e-5)
    assert len(seen.record.calls) == 2
