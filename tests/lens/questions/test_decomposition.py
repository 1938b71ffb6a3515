"""The residual stream and the logits as sums of parts, against the model and against weights by name."""

import numpy as np
import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (11,), generator=torch.Generator().manual_seed(1))


def total(parts):
    sums = np.nansum(parts.heads) + parts.mlps.sum() + parts.biases.sum()
    return sums + parts.embedding + parts.constant


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mistral"])
def test_the_parts_sum_to_the_logit(name):
    model = models.make(name, dtype=torch.float64)
    with torch.no_grad():
        logits = model(IDS[None]).logits[0]
    seen = xt.lens.cache(model, IDS)
    stream = seen.hidden[0] + seen.biases.sum(0) + seen.mlps.sum(0) + sum(x.sum(0) for x in seen.writes)
    torch.testing.assert_close(stream, seen.hidden[-1], rtol=1e-10, atol=1e-10)
    for position, token, against in ((-1, 7, None), (4, 9, 30)):
        parts = seen.attribute(token, position=position, against=against)
        wanted = float(logits[position, token] - (0 if against is None else logits[position, against]))
        assert abs(parts.logit - wanted) < 2e-6  # transformers has softmax and norms of some in float32
        assert abs(total(parts) - parts.logit) < (1e-10 if name == "gpt2" else 1e-6), name
    assert parts.heads.shape == (len(seen.writes), len(seen.writes[0]))
    table = parts.to_frame()
    assert abs(table["adds"].sum() - total(parts)) < 1e-10
    assert seen.labels == IDS.tolist()
    assert "MB" in repr(seen)


def test_heads_against_the_weights_of_gpt2():
    model = models.make("gpt2").double()
    calls = []
    with torch.no_grad(), xt.lens.watch(model, observe=calls.append):
        model(IDS[None])
        states = model.transformer(IDS[None], output_hidden_states=True)
    parts = xt.lens.cache(model, IDS).attribute(5, position=8)
    # The last of `hidden_states` is after the norm: its input is taken back by a hook.
    kept = []
    hook = model.transformer.ln_f.register_forward_pre_hook(lambda _, given: kept.append(given[0][0, 8]))
    with torch.no_grad():
        model(IDS[None])
    hook.remove()
    norm, (x,) = model.transformer.ln_f, kept
    sigma = (x.var(unbiased=False) + norm.eps).sqrt()
    row = model.lm_head.weight[5]
    for layer, block in enumerate(model.transformer.h):
        output = calls[layer].tilted.output[0, :, 8]  # (head, dim)
        heads, dim = output.shape
        rows = block.attn.c_proj.weight.reshape(heads, dim, -1)
        write = torch.einsum("hd,hdw->hw", output, rows)
        centred = write - write.mean(-1, keepdim=True)
        wanted = (centred * norm.weight / sigma) @ row
        np.testing.assert_allclose(parts.heads[layer], wanted.detach(), rtol=1e-9, atol=1e-12)
        bias = block.attn.c_proj.bias
        wanted = ((bias - bias.mean()) * norm.weight / sigma) @ row
        np.testing.assert_allclose(parts.biases[layer], wanted.detach(), rtol=1e-6, atol=1e-9)
    emb = states.hidden_states[0][0, 8]
    wanted = ((emb - emb.mean()) * norm.weight / sigma) @ row
    np.testing.assert_allclose(parts.embedding, float(wanted.detach()), rtol=1e-9)
    np.testing.assert_allclose(parts.constant, float((row @ norm.bias).detach()), rtol=1e-9, atol=1e-14)


def test_labels_of_a_tokenizer():
    class Letters:
        def __call__(self, text):
            return {"input_ids": [ord(x) - 90 for x in text]}

        def decode(self, ids):
            return chr(ids[0] + 90)

    seen = xt.lens.cache(models.make("gpt2"), "hello", Letters())
    assert seen.labels == list("hello")
    whole = xt.lens.cache(models.make("gpt2"), {"input_ids": IDS[None], "attention_mask": None})
    torch.testing.assert_close(whole.hidden, xt.lens.cache(models.make("gpt2"), IDS).hidden)
    with pytest.raises(ArgumentError, match="no tokenizer"):
        xt.lens.cache(models.make("gpt2"), "hello")


def test_what_is_no_sum_is_refused():
    with pytest.raises(ArgumentError, match=r"BertModel ends in a norm \(post-norm\)"):
        xt.lens.cache(models.make("bert"), IDS)
    with pytest.raises(ArgumentError, match="encoder and a decoder"):
        xt.lens.cache(models.make("t5"), IDS)
    seen = xt.lens.cache(models.make("gemma2"), IDS)
    with pytest.raises(ArgumentError, match="softcapped"):
        seen.attribute(3)
    with pytest.raises(ArgumentError, match="no output layer"):
        xt.lens.cache(models.make("gpt2").transformer, IDS).attribute(3)
    with pytest.raises(ArgumentError, match="their ids, 0 to 60"):
        xt.lens.cache(models.make("gpt2"), IDS).attribute(61)
    with pytest.raises(ArgumentError, match="their ids"):
        xt.lens.cache(models.make("gpt2"), IDS).attribute(" Mary")
    with pytest.raises(ArgumentError, match="Pass one text"):
        xt.lens.cache(models.make("gpt2"), IDS.expand(2, -1))
