"""Edits of attention while a model runs, against weights that are written out and outputs put in by hand."""

import numpy as np
import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
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
    untouched, _ = run(model, edit=lambda call: None)
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
    with pytest.raises(ArgumentError, match="calls of another run"):
        edits.freeze([])
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8)
    with pytest.raises(ArgumentError, match="cannot be edited"), xt.lens.watch(layer, edit=edits.zero()):
        layer(x, x, x)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_ablation_and_patching_are_single_runs(name):
    model = models.make(name)
    inputs = {"input_ids": IDS}

    def measure(output, inputs):
        return output[0].flatten(1).norm(dim=1)

    found = xt.lens.edits.ablate(model, inputs, measure=measure, progress=False)
    plain, _ = run(model)
    for place in ((0, 1), (1, 3)):
        cut, _ = run(model, edit=xt.lens.edits.zero([place]))
        apart = (cut.flatten(1).norm(dim=1) - plain.flatten(1).norm(dim=1)).double()
        assert found.effect[place] == pytest.approx(float(apart.mean()), rel=1e-3, abs=1e-5)
        assert found.error[place] == pytest.approx(float(apart.std() / 2**0.5), rel=1e-3, abs=1e-5)
    frame = found.to_frame()
    assert len(frame) == 8
    assert (frame.low <= frame.effect).all()
    same = xt.lens.edits.patch(model, inputs, inputs, measure, progress=False)
    np.testing.assert_allclose(same.effect, 0, atol=1e-4)
    by_default = xt.lens.edits.ablate(model, inputs, how="mean", progress=False)
    assert np.isfinite(by_default.effect).all()
    assert not any("forward" in vars(module) for module in model.modules())
