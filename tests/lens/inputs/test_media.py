"""Studies of models that read pictures, against attention written out."""

import numpy as np
import pytest
import torch
from transformers import (
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
    WhisperConfig,
    WhisperModel,
)

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.lens.inputs import media
from exptilt.lens.inputs.media import Layout

SMALL = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
QUIET = {"progress": False}


def seeded(make):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
                parameter.normal_(0, 0.5)
    return model


def vit():
    return seeded(lambda: ViTModel(ViTConfig(**SMALL, image_size=40, patch_size=4), add_pooling_layer=False))


def pictures(count=3):
    return list(torch.randn(count, 3, 40, 40, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def seen():
    model = vit()
    found = xt.lens.study(model, None, pictures(), **QUIET)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.stack(pictures()), output_attentions=True).attentions
    return found, torch.stack(weights).double()  # (layer, picture, head, query, key)


def test_masses_of_patches(seen):
    found, weights = seen
    place = torch.arange(101) - 1
    row, column = place // 10, place % 10
    q, k = torch.arange(101)[:, None], torch.arange(101)
    for name, there in {
        "previous_mass": (k == q - 1) & (column[:, None] > 0) & (place[:, None] >= 0),
        "next_mass": (k == q + 1) & (column[:, None] < 9) & (place[:, None] >= 0),
    }.items():
        wanted = weights[..., there].mean(-1).mean(1)
        np.testing.assert_allclose(found.heads[name].value, wanted, rtol=1e-4)
    square = (row[:, None] - row) ** 2 + (column[:, None] - column) ** 2
    around = square <= 16
    around[0] = around[:, 0] = False  # the class token has no place
    full = around.sum(1) >= 0.75 * around.sum(1).max()
    around[1:, [0, 100]] = True  # and beside them the ends
    total, around_near = (weights * around).sum(-1), (weights * (around & (square <= 4))).sum(-1)
    for name, part in (("near_share", around_near), ("first_token_share", weights[..., 0])):
        share = (part / total)[..., full].quantile(0.5, -1).mean(1)
        np.testing.assert_allclose(found.heads[name].value, share, rtol=1e-4)
    first = weights[..., 0].quantile(0.5, -1).mean(1)
    np.testing.assert_allclose(found.heads["first_token_mass"].value, first, rtol=1e-4)
    assert found.heads["delimiter_mass"].value is None
    assert found.heads["induction_mass"].value is None
    assert found.heads["ascent_cosine"].value is not None
    assert found.heads["link_symmetry"].value is not None


def test_strips_are_over_cells_of_the_picture(seen):
    found, weights = seen
    assert found.picture.rows == found.picture.columns == 5
    assert found.picture.special == 1
    assert found.picture.pixels.shape == (40, 40, 3)
    assert len(found.strip_tokens) == 26
    assert found.strip_tokens[:3] == ["[class]", "rows 0–1, columns 0–1", "rows 0–1, columns 2–3"]
    cells = torch.tensor([0, *(1 + (i // 20) * 5 + (i % 10) // 2 for i in range(100))])
    onto = torch.nn.functional.one_hot(cells).double()
    wanted = onto.T @ weights[:, 0] @ onto / onto.sum(0)[:, None]
    for detail in found.details:
        np.testing.assert_allclose(detail.strip, wanted[detail.layer, detail.head], atol=6e-5)
        np.testing.assert_allclose(detail.strip.sum(-1), 1, atol=2e-3)
    drawn = weights[1].sum(2).mean(0)[2]  # by key, of layer 1, head 2
    top = found.details[6].top_tokens[0]
    assert top.token in ("[class]", *Layout(0, 10, 10).names())
    assert top.lift == pytest.approx(float(drawn.max()), rel=1e-3)


def test_what_is_said_of_pictures(seen):
    found, _ = seen
    assert found.text_facts == {"pictures": 3, "tokens": 303, "patches": "10 × 10"}
    assert any("the token before is the patch to the left" in note for note in found.notes)
    assert found.kinds["local"].about.startswith("looks more at patches 1 or 2 away")
    again = xt.lens.Study.from_json(found.to_json())
    np.testing.assert_array_equal(again.picture.pixels, found.picture.pixels)
    assert again.to_json() == found.to_json()


def test_files_and_processors(tmp_path, seen):
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("b.png", "a.png"):
        Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(tmp_path / name)
    named = media.files([tmp_path])
    assert list(named) == ["a.png", "b.png"]
    processor = ViTImageProcessor(size={"height": 40, "width": 40})
    found = xt.lens.study(vit(), processor, named, max_tokens=150, **QUIET)
    assert found.text_facts["pictures"] == 1
    assert "1 of 2 pictures were not read (max_tokens)." in found.notes
    shown = processor(images=Image.open(tmp_path / "a.png"), return_tensors="pt")["pixel_values"][0]
    wanted = (255 * (shown * 0.5 + 0.5)).round().permute(1, 2, 0)
    np.testing.assert_allclose(found.picture.pixels, wanted, atol=1)
    (tmp_path / "none").mkdir()
    with pytest.raises(ArgumentError, match="has no pictures"):
        media.files([tmp_path / "none"])
    (tmp_path / "broken.png").write_text("no picture")
    with pytest.raises(ArgumentError, match="cannot be read as a picture"):
        xt.lens.study(vit(), processor, tmp_path / "broken.png", **QUIET)


def test_other_sizes_of_pictures():
    layout = Layout(2, 3, 17)
    assert layout.coarse == Layout(2, 3, 6)
    cells = layout.cells()
    assert cells.tolist()[:8] == [0, 1, 2, 2, 2, 3, 3, 3]
    assert int(cells.max()) == layout.coarse.tokens - 1
    assert layout.names(coarse=True)[:3] == ["[class]", "[extra 1]", "row 0, columns 0–2"]
    assert layout.names(coarse=True)[7] == "row 0, columns 15–16"
    assert len(set(layout.names())) == layout.tokens


def test_what_cannot_be_read():
    with pytest.raises(ArgumentError, match=r"ViTModel reads pictures, and text 1 is a str"):
        xt.lens.study(vit(), None, ["a cat"], **QUIET)
    with pytest.raises(ArgumentError, match="needs its image processor"):
        xt.lens.study(vit(), None, np.zeros((40, 40, 3), np.uint8), **QUIET)
    with pytest.raises(ArgumentError, match="there are no pictures"):
        xt.lens.study(vit(), None, [], **QUIET)
    swin = SwinModel(
        SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1], num_heads=[2], window_size=4)
    )
    with pytest.raises(ArgumentError, match="attends within windows"):
        xt.lens.study(swin.eval(), None, [torch.randn(3, 16, 16)], **QUIET)
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    whisper = WhisperModel(WhisperConfig(**sizes, **ends, decoder_attention_heads=4, vocab_size=64))
    with pytest.raises(ArgumentError, match="WhisperModel does not run on tokens alone"):
        xt.lens.study(whisper.eval(), None, [torch.randn(80, 200)], **QUIET)
