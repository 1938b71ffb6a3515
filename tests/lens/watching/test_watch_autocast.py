"""Under autocast: rotary models hand float32 queries and bfloat16 values to attention."""

import pytest
import torch

import exptilt as xt
from oracles import tiny_models as models


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "gpt2", "bert"])
def test_outputs_are_as_close_to_float64_as_without_a_watch(name):
    model = models.make(name)
    inputs, _ = models.inputs(name)  # without padding, which some models in float64 make NaN of by themselves
    # gpt-oss multiplies by its experts' weights in no wider format than float32.
    dtype = torch.float32 if name == "gpt_oss" else torch.float64
    exact = models.make(name, dtype=dtype)
    exact.load_state_dict({key: value.to(dtype) for key, value in model.state_dict().items()})
    with torch.no_grad():
        expected = exact(**inputs)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = model(**inputs)[0]
            with xt.lens.watch(model, key_mass=True) as seen:
                found = model(**inputs)[0]
    assert found.dtype == plain.dtype
    error, allowed = ((x.double() - expected).square().mean() for x in (found, plain))
    assert 0 < error <= 4 * allowed
    assert torch.tensor(seen.record.by_head("key_mass_simpson")).isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients(dropout):
    model = models.make("llama", attention_dropout=dropout).train()
    inputs, real = models.inputs("llama", "right")
    with torch.autocast("cpu", dtype=torch.bfloat16), xt.lens.watch(model):
        model(**inputs)[0][real].float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0
