"""Edits of attention while a model runs, against weights that are written out and outputs put in by hand."""

import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError, ExptiltWarning
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))


def run(model, ids=IDS, **options):
    calls = []
    with torch.no_grad(), xt.lens.watch(model, observe=calls.append, **options):
        return model(ids)[0], calls


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "gpt_oss", "gemma2"])
def test_patterns(name):
    model = models.make(name)
    with torch.no_grad():
        weights = model(IDS, output_attentions=True).attentions
    _, calls = run(model)
    for call, dense in zip(calls, weights, strict=True):
        for item, head in ((0, 0), (1, 3)):
            found = call.pattern(head, item)
            torch.testing.assert_close(found, dense[item, head], rtol=1e-4, atol=1e-6)
        place, share = call.top(7, 3, k=2, item=1)[0]
        assert float(dense[1, 3, 7, place]) == pytest.approx(share, rel=1e-4)
        assert share == pytest.approx(float(dense[1, 3, 7].max()), rel=1e-4)
    with pytest.raises(ArgumentError, match="has 4 heads"):
        calls[0].pattern(4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_zero_is_the_projection_without_the_head(name):
    model = models.make(name)
    module = model.transformer.h[1].attn.c_proj if name == "gpt2" else model.model.layers[1].self_attn.o_proj
    width = 8 if name == "gpt2" else module.in_features // 4

    def cut(module, arguments):
        changed = arguments[0].clone()
        changed[..., 2 * width : 3 * width] = 0
        return (changed,)

    dim = module.weight.shape[0] // 4 if name == "gpt2" else width
    width = dim
    handle = module.register_forward_pre_hook(cut)
    with torch.no_grad():
        wanted = model(IDS)[0]
    handle.remove()
    found, calls = run(model, edit=xt.lens.edits.zero([(1, 2)]))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (calls[1].tilted.output[:, 2] == 0).all()
    with pytest.warns(ExptiltWarning, match="changed no call"):
        untouched, _ = run(model, edit=xt.lens.edits.zero([(2, 0)]))
    assert not torch.allclose(found, untouched, atol=1e-4)


def test_the_ready_made_edits():
    model = models.make("gpt2")
    plain, calls = run(model)
    same, _ = run(model, edit=xt.lens.edits.resample(calls))
    torch.testing.assert_close(same, plain)
    frozen, _ = run(model, edit=xt.lens.edits.freeze(calls))
    torch.testing.assert_close(frozen, plain, rtol=1e-4, atol=1e-5)
    _, others = run(model, IDS.flip(1))
    swapped, now = run(model, edit=xt.lens.edits.resample(others, [(0, 1)]))
    torch.testing.assert_close(now[0].tilted.output[:, 1], others[0].tilted.output[:, 1])
    torch.testing.assert_close(now[0].tilted.output[:, 0], calls[0].tilted.output[:, 0])
    assert not torch.allclose(swapped, plain, atol=1e-4)
    _, now = run(model, edit=xt.lens.edits.freeze(others, [(0, 1)]))
    wanted = others[0].pattern(1) @ calls[0].value[0, 1]
    torch.testing.assert_close(now[0].tilted.output[0, 1], wanted, rtol=1e-4, atol=1e-5)
    _, now = run(model, edit=xt.lens.edits.mean([(0, 1)]))
    torch.testing.assert_close(now[0].tilted.output[:, 1, 3], calls[0].tilted.output[:, 1].mean(1))
    _, now = run(model, edit=xt.lens.edits.knock_out([(5, 2)], [(0, 1)]))
    p = calls[0].pattern(1)
    p[5, 2] = 0
    wanted = (p / p.sum(-1, keepdim=True)) @ calls[0].value[0, 1]
    torch.testing.assert_close(now[0].tilted.output[0, 1], wanted, rtol=1e-4, atol=1e-5)


def test_bad_edits():
    model, edits = models.make("gpt2"), xt.lens.edits
    _, calls = run(model, IDS[:, :5])
    for edit, said in (
        (lambda call: call.tilted.output[:, :1], "whose output has shape"),
        (edits.zero([(0, 9)]), "has 4 heads"),
        (edits.knock_out([(0, 99)]), "outside of 11 queries"),
        (edits.resample(calls), "as many tokens"),
    ):
        with pytest.raises(ArgumentError, match=said):
            run(model, edit=edit)
    for wrong, said in (
        (lambda: edits.freeze([]), "calls of another run"),
        (lambda: edits.resample([*calls, *calls]), "several runs"),
        (lambda: edits.zero((0, 1)), "pairs of layer and head"),
    ):
        with pytest.raises(ArgumentError, match=said):
            wrong()
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8)
    with pytest.raises(ArgumentError, match="cannot be edited"), xt.lens.watch(layer, edit=edits.zero()):
        layer(x, x, x)


def test_edits_of_an_outer_watch_come_first():
    model, edits = models.make("gpt2"), xt.lens.edits
    both, _ = run(model, edit=edits.zero([(0, 1), (1, 2)]))
    with xt.lens.watch(model, edit=edits.zero([(0, 1)])):
        inside, calls = run(model, edit=edits.zero([(1, 2)]))
        single, _ = run(model)
    torch.testing.assert_close(inside, both)
    assert (calls[0].tilted.output[:, 1] == 0).all()
    assert not torch.allclose(single, run(model)[0], atol=1e-4)


def test_a_checkpointed_layer_is_not_edited_otherwise_when_it_runs_again():
    model = models.make("gpt2").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    refused = pytest.raises(ArgumentError, match="gradient_checkpointing_disable")
    with refused, xt.lens.watch(model, edit=xt.lens.edits.zero([(0, 1)])):
        model(IDS, labels=IDS).loss.backward()


def test_padding_in_patterns_and_means():
    model = models.make("llama")
    real = torch.ones_like(IDS)
    real[1, :4] = 0
    calls = []
    with torch.no_grad(), xt.lens.watch(model, observe=calls.append):
        model(IDS, attention_mask=real)
    pattern = calls[0].pattern(1, item=1)
    assert (pattern[:4] == 0).all()
    torch.testing.assert_close(pattern[4:].sum(-1), torch.ones(7))
    now = []
    edit = xt.lens.edits.mean([(0, 1)])
    with torch.no_grad(), xt.lens.watch(model, edit=edit, observe=now.append):
        model(IDS, attention_mask=real)
    wanted = calls[0].tilted.output[1, 1, 4:].mean(0)
    torch.testing.assert_close(now[0].tilted.output[1, 1, 7], wanted)


def test_edits_while_generating_with_a_cache():
    model = models.make("llama")
    asked = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad(), xt.lens.watch(model, edit=xt.lens.edits.zero([(1, 2), (0, 0)])):
        found = model.generate(IDS, **asked)
        whole = model(found.sequences).logits[:, 10:-1]
    torch.testing.assert_close(torch.stack(found.logits, 1), whole, rtol=1e-4, atol=1e-4)
