"""Under autograd: gradients, dropout, checkpointing, losses made of statistics."""

import pytest
import torch

import exptilt as xt
from oracles import tiny_models as models


def gradients(model, inputs, real):
    model.zero_grad()
    output = model(**inputs)[0]
    weight = torch.linspace(-1, 1, output[real].numel()).reshape(output[real].shape)
    loss = (output[real] * weight).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(found, expected):
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        scale = max(
            value.abs().max(), 1e-2 * largest
        )  # some gradients, such as that of a key's bias, are 0 but for rounding
        assert torch.allclose(found[name] / scale, value / scale, atol=2e-4), name


@pytest.mark.parametrize("name", models.ALL)
def test_gradients_are_those_of_eager_attention(name):
    model = models.make(name)
    inputs, real = models.inputs(name, "right")
    _, expected = gradients(model, inputs, real)
    with xt.lens.watch(model) as seen:
        _, found = gradients(model, inputs, real)
    close(found, expected)
    assert all(not call.values.requires_grad for call in seen.record.calls)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral", "t5", "bert"])
def test_dropout_drops_from_the_output_and_not_from_the_statistics(name):
    """The random numbers are not those of eager attention, but the seed decides them as well."""
    rate = {"t5": "dropout_rate", "bert": "attention_probs_dropout_prob"}.get(name, "attention_dropout")
    model = models.make(name, **{rate: 0.4})
    inputs, real = models.inputs(name, "right")
    for module in model.modules():  # only attention shall drop
        if isinstance(module, torch.nn.Dropout) and not (name == "bert" and module.p == 0.4):
            module.p = 0.0
    with xt.lens.watch(model) as still:
        gradients(model, inputs, real)
    model.train()
    ends = []
    for _ in range(2):
        torch.manual_seed(7)
        with xt.lens.watch(model) as seen:
            loss, found = gradients(model, inputs, real)
        ends.append((loss, found))
    assert torch.equal(ends[0][0], ends[1][0])
    close(ends[0][1], ends[1][1])
    first, undropped = seen.record.calls[0].values, still.record.calls[0].values
    assert torch.allclose(first, undropped, rtol=1e-5, atol=1e-5, equal_nan=True)
    model.eval()
    quiet, _ = gradients(model, inputs, real)
    assert not torch.allclose(loss, quiet, rtol=1e-3)  # something was dropped


def test_a_checkpointed_layer_is_recorded_once():
    model = models.make("llama").train()
    inputs, real = models.inputs("llama", "right")
    _, expected = gradients(model, inputs, real)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with xt.lens.watch(model) as seen:
        _, found = gradients(model, inputs, real)
    close(found, expected)
    assert [(call.layer, call.step) for call in seen.record.calls] == [(0, 0), (1, 0)]


def test_a_loss_can_be_made_of_statistics():
    model = models.make("llama")
    inputs, _ = models.inputs("llama")
    weight = model.model.layers[0].self_attn.q_proj.weight
    calls = []
    with xt.lens.watch(model, observe=calls.append, keep_graph=True):
        model(**inputs)
    (found,) = torch.autograd.grad(calls[0].tilted.entropy.mean(), weight)
    with torch.no_grad():
        direction = found / found.norm()
        values = []
        for step in (1e-2, -1e-2):
            weight += step * direction
            with xt.lens.watch(model) as seen:
                model(**inputs)
            values.append(seen.record.by_head("entropy")[0].mean())
            weight -= step * direction
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(found.norm()), rel=1e-2)


def test_statistics_are_detached_by_default():
    model, calls = models.make("gpt2"), []
    with xt.lens.watch(model, observe=calls.append, per_token=True, key_mass=True) as seen:
        model(**models.inputs("gpt2")[0])
    assert not any(
        x.requires_grad
        for call in calls
        for x in (call.tilted.entropy, call.tilted.output, call.tilted.key_mass)
    )
    assert not any(x.requires_grad for call in seen.record.calls for x in call.per_token.values())


def test_dropout_after_a_call_of_the_same_shape_without():
    # A call of a known kind goes straight to the compiled core, with a layout that is for its values.
    query, key, value = torch.randn(3, 2, 4, 7, 8)
    whole = xt.attend(query, key, value)
    dropped = xt.attend(query, key, value, dropout=0.5)
    torch.testing.assert_close(whole.entropy, dropped.entropy)  # by another backend: not bit by bit
    assert not torch.allclose(whole.output, dropped.output)
