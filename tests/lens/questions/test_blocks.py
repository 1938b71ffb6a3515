"""Blocks of other families: parallel (GPT-NeoX), norms after the sublayers (OLMo 2), around them (Gemma 2),
scaled sums (Granite).
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from exptilt.lens.inputs.texts import Chunk
from exptilt.lens.questions.blocks import NormEvent, Passage, Tracer, inputs
from exptilt.lens.studying.one_text import Options, measure_unit
from exptilt.lens.watching.watch import watch

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SHAPE |= {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
FAMILIES = {
    "neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {"num_key_value_heads": 2}),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"num_key_value_heads": 2, "head_dim": 8},
    ),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {"num_key_value_heads": 2, "residual_multiplier": 0.3, "attention_bias": True},
    ),
}
IDS = torch.randint(1, 60, (20,), generator=torch.Generator().manual_seed(1))


def build(kind):
    config, model, more = FAMILIES[kind]
    torch.manual_seed(0)
    model = model(config(**SHAPE, **more))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(9.0)
            elif weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model.double().eval()


def by_name(model, kind):
    """Stream before each block, what attention adds, what the MLP adds, read off named modules."""
    layers = model.gpt_neox.layers if kind == "neox" else model.model.layers
    seen = defaultdict(dict)
    parts = {
        "neox": ("attention", "mlp"),
        "granite": ("self_attn", "mlp"),
        "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    }[kind]

    def note(index, name):
        return lambda _, given, output: seen[index].update(
            {name: output[0] if isinstance(output, tuple) else output}
        )

    handles = []
    for index, layer in enumerate(layers):
        handles.append(
            layer.register_forward_pre_hook(lambda _, given, index=index: seen[index].update(before=given[0]))
        )
        handles += [
            layer.get_submodule(x).register_forward_hook(note(index, y))
            for x, y in zip(parts, ("attention", "mlp"), strict=True)
        ]
    with torch.no_grad():
        model(input_ids=IDS[None])
    for handle in handles:
        handle.remove()
    factor = 0.3 if kind == "granite" else 1.0
    return [(x["before"], factor * x["attention"], factor * x["mlp"]) for _, x in sorted(seen.items())]


@pytest.mark.parametrize("kind", FAMILIES)
def test_expansion(kind):
    model = build(kind)
    unit = measure_unit(model, Chunk(IDS, 0), Options())

    def ratio(a, b):
        return float((b[0, 1:].norm(dim=-1) / a[0, 1:].norm(dim=-1)).log().mean().exp())

    for index, (before, attention, mlp) in enumerate(by_name(model, kind)):
        np.testing.assert_allclose(
            unit["block:attention_expansion"][index], ratio(before, before + attention), rtol=1e-5
        )
        np.testing.assert_allclose(
            unit["block:mlp_expansion"][index], ratio(before + attention, before + attention + mlp), rtol=1e-5
        )
    assert np.isfinite(unit["head:ascent_cosine"]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_writes_sum_to_what_is_added(kind, dtype):
    model = build(kind).to(dtype)
    found = []

    def finish(name, passage):
        writes, middle = passage.writes(), passage.middle()
        given = passage.calls[0].tilted.output
        bias = passage.projection(given.transpose(1, 2).flatten(2) * 0)[0] * passage.factor()
        found.append((writes.double().sum(0) + bias.double(), (middle.double() - passage.hidden.double())[0]))

    tracer = Tracer(model, finish)
    with torch.no_grad(), watch(model, observe=tracer.observe) as seen, tracer.attached(seen):
        model(**inputs(model, IDS))
    assert len(found) == 2
    for summed, (before, added, _), (_, taken) in zip(
        [x for x, _ in found], by_name(model, kind), found, strict=True
    ):
        close = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
        assert (summed - added[0].double()).norm() <= close * added.double().norm()
        rounding = torch.finfo(dtype).eps * (before.double().norm() + added.double().norm())
        assert (taken - added[0].double()).norm() <= close * added.double().norm() + rounding


def passage(normed, projected, hidden, norm=None):
    """A made-up passage through a block whose next norm read `normed`."""
    found = Passage(hidden, ((hidden,), {}), projection=nn.Identity(), projected=projected)
    found.norms.append(NormEvent(normed, normed if norm is None else norm(normed), late=True))
    return found


def test_no_factor_where_nothing_scales():
    torch.manual_seed(0)
    hidden, projected = torch.randn(1, 9, 8), torch.randn(1, 9, 8)
    assert passage(hidden + projected, projected, hidden).factor() == 1
    torch.testing.assert_close(
        passage(hidden + 0.2 * projected, projected, hidden).factor(), torch.tensor(0.2)
    )
    assert passage(2 * hidden + projected, projected, hidden).factor() is None
    assert passage(hidden + projected + torch.randn(1, 9, 8), projected, hidden).factor() is None
    assert (
        passage(projected, projected, hidden, norm=nn.LayerNorm(8)).factor() is None
    )  # takes the mean away: no scaling
    weight = torch.randn(8)
    root = projected.square().mean(-1, keepdim=True).add(0.1).rsqrt()
    scaled = passage(projected, projected, hidden, norm=lambda x: weight * root * x)
    torch.testing.assert_close(scaled.factor(), (weight * root)[0], rtol=1e-4, atol=1e-5)
