"""Two models head by head: the divergence of attention that is written out."""

import copy

import numpy as np
import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (4, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_as_written_out(name):
    first = models.make(name)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for x in second.parameters():
            x += 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    texts = [{"input_ids": x[None]} for x in IDS]
    found = xt.lens.compare(first, second, texts)
    with torch.no_grad():
        p, q = ([m(**t, output_attentions=True).attentions for t in texts] for m in (first, second))
    for layer in range(2):
        want = []
        for a, b in zip(p, q, strict=True):
            x, y = a[layer][0].double(), b[layer][0].double()
            kl = torch.where(x > 0, x * (x.clamp(min=1e-300).log() - y.clamp(min=1e-300).log()), 0.0).sum(-1)
            want.append(kl.mean(-1).numpy())
        want = np.array(want)
        np.testing.assert_allclose(found.by_text[:, layer], want, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found.divergence[layer], want.mean(0), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(found.error[layer], want.std(0, ddof=1) / 2, rtol=1e-2, atol=1e-6)
    assert float(np.abs(xt.lens.compare(first, first, texts[:1]).divergence).max()) == 0.0
    assert list(found.to_frame()["divergence"]) == sorted(found.divergence.ravel(), reverse=True)


def test_padding_does_not_count():
    first, second = models.make("llama"), models.make("llama", rms_norm_eps=1e-2)
    whole = xt.lens.compare(first, second, [{"input_ids": IDS[:1, :7]}])
    mask = torch.tensor([[1] * 7 + [0] * 4])
    padded = xt.lens.compare(first, second, [{"input_ids": IDS[:1], "attention_mask": mask}])
    np.testing.assert_allclose(padded.divergence, whole.divergence, rtol=1e-3, atol=1e-8)


def test_bad_input():
    model = models.make("gpt2")
    for texts in (None, [], "text", ["text"]):
        with pytest.raises(ArgumentError, match="list of texts and their tokenizer"):
            xt.lens.compare(model, model, texts)
    with pytest.raises(ArgumentError, match="Pass two studies, or two models"):
        xt.lens.compare(model, None)
    with pytest.raises(ArgumentError, match="same heads over the same tokens"):
        xt.lens.compare(model, models.make("bert"), [{"input_ids": IDS}])
