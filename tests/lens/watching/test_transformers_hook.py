"""Models loaded with attn_implementation="exptilt": trained, differentiated, generating, saved, watched."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

import exptilt as xt
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))
REAL = torch.ones_like(IDS)
REAL[1, :3] = 0


def pair(name, other="sdpa", **config):
    """The same model twice: with torch's attention, and with ours."""
    xt.lens.register()
    made = [models.make(name, attention=how, **config) for how in (other, "exptilt")]
    assert [x.config._attn_implementation for x in made] == [other, "exptilt"]
    return made


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss"])
def test_outputs_and_a_training_step(name):
    weights = []
    # The last two know only eager attention, in float32, where left padding may be NaN.
    fused = name not in ("gemma2", "gpt_oss")
    real = REAL if fused else REAL.flip(1)
    for model in pair(name, "sdpa" if fused else "eager", dtype=torch.float64 if fused else torch.float32):
        step = torch.optim.SGD(model.parameters(), 0.1)
        loss = model(IDS, attention_mask=real, labels=IDS.masked_fill(real == 0, -100)).loss
        loss.backward()
        step.step()
        weights.append([loss.detach(), *(p.detach() for p in model.parameters())])
    for found, wanted in zip(weights[1], weights[0], strict=True):
        allowed = 1e-10 if fused else 1e-3
        torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_and_a_decoder(name):
    given = {"input_ids": IDS, "attention_mask": REAL, "decoder_input_ids": IDS[:, :6]}
    plain, ours = (model(**given).logits for model in pair(name, dtype=torch.float64))
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


def test_second_derivatives():
    products = []
    for model in pair("llama", dtype=torch.float64):
        x = model.get_input_embeddings()(IDS).detach().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # which has them
            loss = model(inputs_embeds=x).logits.square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            products.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(products[1], products[0], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(cache):
    asked = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for model in pair("llama"):
        with torch.no_grad():
            made = model.generate(IDS, attention_mask=REAL, cache_implementation=cache, **asked)
        found.append((made.sequences, torch.stack(made.logits)))
    assert found[0][0].equal(found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)


def test_saved_loaded_and_watched(tmp_path):
    _, model = pair("llama")
    with torch.no_grad(), xt.lens.watch(model) as seen:
        plain = model(IDS).logits
        model.save_pretrained(tmp_path)
    assert len(seen.record.calls) == 2
    assert model.config._attn_implementation == "exptilt"
    assert "exptilt" not in (tmp_path / "config.json").read_text()  # others can load it
    for how in ("exptilt", "sdpa"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=how).eval()
        assert again.config._attn_implementation == how
        with torch.no_grad():
            torch.testing.assert_close(again(IDS).logits, plain, rtol=1e-4, atol=1e-5)
