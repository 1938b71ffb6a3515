"""Diffusion transformers of diffusers, random and small, watched and differentiated."""

import pytest
import torch

import exptilt as xt

pytestmark = pytest.mark.slow
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed; `make models` brings it")


def drawn(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return model.eval().requires_grad_(False)


def dit():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4}
    model = diffusers.DiTTransformer2DModel(
        **sizes, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10
    )
    rest = {"timestep": torch.tensor([1, 5]), "class_labels": torch.tensor([0, 3])}
    return drawn(model), torch.randn(2, 4, 8, 8), rest, [16, 16], ["self", "self"]


def flux():
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": [4, 4, 8]}
    wide = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, **sizes, **wide
    )
    rest = {"encoder_hidden_states": torch.randn(1, 6, 32), "pooled_projections": torch.randn(1, 32)}
    rest |= {"timestep": torch.tensor([0.5]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
    return drawn(model), torch.randn(1, 16, 4), rest, [22, 22], ["self", "self"]


def wan():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    rest = {"timestep": torch.tensor([3]), "encoder_hidden_states": torch.randn(1, 5, 16)}
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1, **sizes
    )
    return drawn(model), torch.randn(1, 4, 2, 8, 8), rest, [32, 5], ["self", "cross"]


@pytest.mark.parametrize("make", [dit, flux, wan])
def test_watched_and_differentiated(make):
    torch.manual_seed(0)
    model, x, rest, keys, kinds = make()

    def run(x):
        return model(x, **rest).sample

    plain = run(x)
    with xt.lens.watch(model) as seen:
        torch.testing.assert_close(run(x), plain, rtol=1e-4, atol=1e-4)
    assert [call.kind for call in seen.record.calls] == kinds
    assert seen.record.by_head("visible_keys")[:, 0].tolist() == keys
    assert model.double() is model
    x, v = x.double(), torch.randn_like(x).double()
    rest |= {name: y.double() for name, y in rest.items() if y.is_floating_point()}
    with xt.differentiable(model):
        _, along = torch.func.jvp(run, (x,), (v,))
    wanted = (run(x + 1e-4 * v) - run(x - 1e-4 * v)) / 2e-4
    assert float((along - wanted).norm() / wanted.norm()) < 1e-3  # their embeddings are in float32
