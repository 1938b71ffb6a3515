"""Attribution of a loss to keys and heads, against patching what a head writes and running again."""

import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.lens import models as trained
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
F64 = torch.float64


def loss_of(output, _):
    """Some number a text that depends on all of the output."""
    x = output[0]
    return (
        (x * torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype).reshape(x[0].shape)).flatten(1).sum(1).tanh()
    )


def patched(model, layer, head, new, step, measure=loss_of, ids=IDS):
    """(batch,): the derivative of the loss towards what `new` makes the head write, by running again."""

    def edit(sign):
        def moved(call):
            if call.layer != layer:
                return None
            output = call.tilted.output.clone()
            output[:, head] += sign * step * (new(call)[:, head] - output[:, head])
            return output

        return moved

    found = []
    for sign in (1, -1):
        with torch.no_grad(), xt.lens.watch(model, edit=edit(sign)):
            found.append(measure(model(ids), None))
    return (found[0] - found[1]) / (2 * step)


def without_key(key):
    def new(call):
        return xt.lens.edits.without([key], None)(call)

    return new


def without_value(key):
    def new(call):
        value = call.value.clone()
        value[:, :, key] = 0
        return xt.attend(call.query, call.key, value, **call.options).output

    return new


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gemma2"])
def test_as_patching_and_running_again(name):
    model = models.make(name).to(F64)
    found = xt.lens.edits.attribute(model, {"input_ids": IDS}, measure=loss_of)
    assert found.loss.shape == (2,)
    for layer, head, key in ((0, 1, 2), (1, 3, 0), (1, 2, 8)):
        for ours, new in ((found.total, without_key(key)), (found.value, without_value(key))):
            want = patched(model, layer, head, new, 1e-3)
            torch.testing.assert_close(ours[layer][:, head, key], want, rtol=1e-5, atol=1e-7)
    for total, value, pattern in zip(found.total, found.value, found.pattern, strict=True):
        torch.testing.assert_close(value + pattern, total)
    want = patched(model, 1, 2, lambda call: torch.zeros_like(call.tilted.output), 1e-3)
    torch.testing.assert_close(found.by_head()[1, :, 2], want, rtol=1e-5, atol=1e-7)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm", "decoder"])
def test_trained_models_as_patching_and_running_again(name):
    """To 1e-6 of the largest: all parts of three keys in each of two layers."""
    kept = trained.load_model(name if name == "minilm" else trained.default_folder() / "checkpoint-4096")
    model = kept.model.eval().to(F64)
    ids = kept.tokenizer("The quick brown fox jumps over the dog.", return_tensors="pt").input_ids

    def measure(output, _):
        return output[0].sin().flatten(1).mean(1)

    found = xt.lens.edits.attribute(model, {"input_ids": ids}, measure=measure)
    for layer, head, key in ((0, 1, 2), (0, 3, 5), (3, 0, 0), (3, 2, 4)):
        for ours, new in ((found.total, without_key(key)), (found.value, without_value(key))):
            want = patched(model, layer, head, new, 1e-4, measure, ids)
            size = float(ours[layer].abs().max())
            assert size > 1e-6
            torch.testing.assert_close(ours[layer][:, head, key], want, rtol=1e-6, atol=1e-6 * size)


def test_the_default_is_the_loss_of_the_next_token():
    model = models.make("gpt2")
    found = xt.lens.edits.attribute(model.requires_grad_(False), {"input_ids": IDS})
    torch.testing.assert_close(found.loss.mean(), model(IDS, labels=IDS).loss)


def test_without_keys_is_a_mask():
    model = models.make("llama")
    calls = []
    with torch.no_grad(), xt.lens.watch(model, observe=calls.append):
        model(IDS)
    edges = [(i, j) for i in range(9) for j in (0, 4)]
    for call in calls:
        want = xt.lens.edits.knock_out(edges, [(1, 2)])(call)
        found = xt.lens.edits.without([0, 4], [(1, 2)])(call)
        assert (found is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(found, want)


def test_bad_input():
    model = models.make("gpt2")
    with pytest.raises(ArgumentError, match="one number a text"):
        xt.lens.edits.attribute(model, {"input_ids": IDS}, measure=lambda *_: torch.zeros(2))
    with (
        pytest.raises(ArgumentError, match="has 9 keys"),
        xt.lens.watch(model, edit=xt.lens.edits.without([9])),
    ):
        model(IDS)
