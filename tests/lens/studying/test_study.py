"""`study` from end to end: what it returns, how it resumes, what it refuses."""

import importlib
import json

import numpy as np
import pytest
import torch
from torch import nn

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.lens import Study, study
from exptilt.lens.inputs.texts import cut, token_texts
from exptilt.lens.studying.definitions import BLOCKS, HEADS, PLACES
from exptilt.lens.studying.store import Store, fingerprint
from exptilt.lens.training.readings import read_heads
from oracles.transformers_by_hand import tiny

module = importlib.import_module("exptilt.lens.studying.study")  # the name in the package is the function

TEXTS = [
    "the cat sat on the mat and looked at the moon",
    "a stitch in time saves nine, they say; but nobody counts the stitches any more",
]


class Letters:
    """A tokenizer of letters, with an opening token 1 and a closing token 2."""

    all_special_ids = (1, 2)

    def __call__(self, text, add_special_tokens=True):
        ids = [3 + ord(c) % 50 for c in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    def decode(self, ids):
        return "".join(chr(64 + int(i)) for i in ids)


@pytest.fixture(scope="module")
def gpt2():
    return tiny("gpt2").float()


@pytest.fixture(scope="module")
def found(gpt2):
    return study(
        gpt2,
        Letters(),
        TEXTS,
        name="tiny",
        chunk=40,
        checkpoints=[(10, lambda: gpt2), (0, lambda: tiny("gpt2", 1).float())],
    )


def test_everything_is_there(found):
    assert list(found.heads) == list(HEADS)
    assert list(found.layers) == [*PLACES, *BLOCKS]
    for name, measure in found.heads.items():
        assert measure.about
        assert measure.assumes
        assert (measure.value is None) == bool(measure.reason), name
        if measure.value is not None:
            assert measure.value.shape == (2, 4)
            low, high = measure.span
            assert np.nanmin(measure.value) >= (-np.inf if low is None else low - 1e-9)
            assert np.nanmax(measure.value) <= (np.inf if high is None else high + 1e-9)
    for layer in found.layers.values():
        assert layer.about
        assert isinstance(layer.assumes, str)
    assert found.heads["entropy"].error is not None
    assert found.heads["link_symmetry"].error is None
    assert found.heads["ascent_cosine"].baseline is not None
    assert found.layers["spectrum"].value.shape[0] == 3
    np.testing.assert_allclose(np.nansum(found.layers["spectrum"].value, 1), 1.0, rtol=1e-6)
    assert len(found.details) == 8
    assert found.name == "tiny"
    assert found.text_facts["texts"] == 2
    assert found.text_facts["tokens"] == sum(len(t) for t in TEXTS) + 2 * found.text_facts["chunks"]
    assert any("cut into chunks" in note for note in found.notes)
    assert list(found.layer_names) == ["transformer.h.0.attn", "transformer.h.1.attn"]


def test_values_are_means_over_units(gpt2, found):
    taken = cut(Letters(), TEXTS, length=40, max_tokens=None, vocabulary=60)
    chunks = taken.chunks
    assert taken.was_cut
    units = [module.measure_unit(gpt2, c, module.Options()) for c in chunks]
    sizes = [len(c.ids) for c in chunks]
    wanted = np.average([u["head:entropy"] for u in units], axis=0, weights=sizes)
    np.testing.assert_allclose(found.heads["entropy"].value, wanted, rtol=1e-6)
    np.testing.assert_allclose(
        found.heads["ascent_cosine"].baseline,
        np.average([u["head:ascent_cosine_baseline"] for u in units], axis=0, weights=sizes),
        rtol=1e-4,
    )


def test_details(found):
    detail = found.details[5]
    assert (detail.layer, detail.head) == (1, 1)
    for name in ("entropy", "log_normalizer", "score_max"):
        assert detail.histograms[name].counts.sum() == found.text_facts["tokens"]
    lifts = [token.lift for token in detail.top_tokens]
    assert lifts == sorted(lifts, reverse=True)
    assert all(token.count >= 1 and 0 < token.mass <= 1 for token in detail.top_tokens)
    size = len(found.strip_tokens)
    assert detail.strip.shape == (size, size)
    np.testing.assert_allclose(
        detail.strip.sum(1), 1.0, atol=1e-2
    )  # causal: a row's keys are all in the strip
    assert np.triu(detail.strip, 1).max() == 0


def test_training_curves(found):
    training = found.training
    assert training.steps.tolist() == [0.0, 10.0]
    np.testing.assert_allclose(training.heads["entropy"][1], found.heads["entropy"].value, rtol=1e-5)
    assert not np.allclose(training.heads["entropy"][0], training.heads["entropy"][1])
    assert training.layers["hidden_norm"].shape == (2, 3)
    assert training.loss[0] != training.loss[1]
    assert np.isfinite(training.loss).all()


def test_json_round_trip(found):
    text = found.to_json()
    again = Study.from_json(text)
    assert again.to_json() == text
    assert again.details[0].top_tokens == found.details[0].top_tokens


def test_frame_has_a_row_per_head(found):
    frame = found.to_frame()
    assert len(frame) == 8
    assert {"entropy", "entropy_error", "ascent_cosine_baseline"} <= set(frame)


def test_the_model_is_left_alone(gpt2):
    gpt2.train()
    gpt2.transformer.h[0].eval()
    before = gpt2.config._attn_implementation
    weights = fingerprint(gpt2)
    study(gpt2, Letters(), TEXTS[0])
    assert gpt2.training
    assert not gpt2.transformer.h[0].training
    assert gpt2.transformer.h[1].training
    assert gpt2.config._attn_implementation == before
    assert fingerprint(gpt2) == weights
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt2.modules())
    gpt2.eval()


def test_interrupted_study_resumes(gpt2, tmp_path, monkeypatch):
    real, done = module.measure_unit, []

    def interrupted(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return real(*args)

    monkeypatch.setattr(module, "measure_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(gpt2, Letters(), TEXTS, chunk=40, store=tmp_path)
    assert not list(tmp_path.glob(".*draft"))
    count = []
    monkeypatch.setattr(module, "measure_unit", lambda *args: count.append(1) or real(*args))
    whole = study(gpt2, Letters(), TEXTS, chunk=40, store=tmp_path)
    assert len(count) == whole.text_facts["chunks"] - 2
    torn = sorted(tmp_path.glob("*.npz"))[1]
    torn.write_bytes(torn.read_bytes()[:100])
    count.clear()
    again = study(gpt2, Letters(), TEXTS, chunk=40, store=tmp_path)
    assert len(count) <= 1
    count.clear()
    assert (
        study(gpt2, Letters(), TEXTS, chunk=40, store=tmp_path).to_json()
        == again.to_json()
        == whole.to_json()
    )
    assert not count


def test_store_knows_what_a_unit_depends_on(tmp_path):
    store, calls = Store(tmp_path), []

    def make():
        calls.append(1)
        return {"x": np.arange(3), "names": np.array(["a", "bc"])}

    first = store.get({"model": "m", "tokens": "1"}, make)
    second = store.get({"tokens": "1", "model": "m"}, make)
    assert len(calls) == 1
    assert first["names"].tolist() == second["names"].tolist() == ["a", "bc"]
    store.get({"model": "m", "tokens": "2"}, make)
    assert len(calls) == 2
    model = nn.Linear(2, 2)
    before = fingerprint(model)
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    assert fingerprint(model) != before


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        Store(tmp_path).get({}, lambda: {"x": 1 / 0})

    class Unwritable:
        def __array__(self, *args, **kwargs):
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="space"):
        Store(tmp_path).get({}, lambda: {"x": Unwritable()})
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_folders(gpt2, tmp_path):
    for step in (20, 3):
        gpt2.save_pretrained(tmp_path / f"checkpoint-{step}")
    training = study(
        gpt2, Letters(), TEXTS[0], checkpoints=[tmp_path / "checkpoint-20", tmp_path / "checkpoint-3"]
    ).training
    assert training.steps.tolist() == [3.0, 20.0]
    np.testing.assert_allclose(training.heads["entropy"][0], training.heads["entropy"][1])
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ArgumentError, match="cannot be loaded as GPT2LMHeadModel"):
        study(gpt2, Letters(), TEXTS[0], checkpoints=[tmp_path / "checkpoint-3"])
    with pytest.raises(ArgumentError, match="not a folder"):
        study(gpt2, Letters(), TEXTS[0], checkpoints=[tmp_path / "nowhere"])
    with pytest.raises(ArgumentError, match="functions that return a model"):
        study(gpt2, Letters(), TEXTS[0], checkpoints=[lambda: 7])


def test_chunks():
    taken = cut(Letters(), ["x" * 100, "yy"], length=42, max_tokens=None, vocabulary=None)
    chunks = taken.chunks
    assert (taken.unread, taken.silent) == (0, [])
    assert [len(c.ids) for c in chunks] == [
        36,
        35,
        35,
        4,
    ]  # of nearly equal length, each with its two special tokens
    assert taken.was_cut
    assert all(c.ids[0] == 1 and c.ids[-1] == 2 for c in chunks)
    assert [c.text for c in chunks] == [0, 0, 0, 1]
    tokens, counts, inverse = chunks[3].distinct
    assert tokens.tolist() == [1, 2, 3 + ord("y") % 50]
    assert counts.tolist() == [1, 1, 2]
    assert inverse[0] == 0  # a special first token counts
    assert (
        sum(len(c.ids) for c in cut(Letters(), ["x" * 100], length=42, max_tokens=50, vocabulary=None).chunks)
        == 50
    )


@pytest.mark.parametrize(
    ("most", "read", "silent"),
    [(50, 50, [1, 2]), (106, 106, [1, 2]), (107, 106, [1, 2]), (110, 110, [2]), (999, 113, [])],
)
def test_what_is_left_out_is_counted(most, read, silent):
    """x: 106 tokens in three chunks, yy: 4, z: 3, each with its special ones; a chunk of one token is not
    read.
    """
    taken = cut(Letters(), ["x" * 100, "yy", "z"], length=42, max_tokens=most, vocabulary=None)
    assert sum(len(c.ids) for c in taken.chunks) == read
    assert taken.unread == 113 - read
    assert taken.silent == silent


def test_notes_say_what_was_not_read(gpt2):
    found = study(gpt2, Letters(), [*TEXTS, "never read"], max_tokens=60, chunk=40)
    whole = sum(
        len(cut(Letters(), [t], length=40, max_tokens=None, vocabulary=None).chunks) * 2 + len(t)
        for t in [*TEXTS, "never read"]
    )
    assert found.notes[0] == f"Only the first 60 of {whole} tokens were read (max_tokens); texts not read: 3."
    assert found.text_facts["tokens"] == 60
    assert found.text_facts["texts"] == 2
    assert not any("max_tokens" in note for note in study(gpt2, Letters(), TEXTS[0]).notes)
    named = study(
        gpt2,
        Letters(),
        {"a.txt": TEXTS[0], "blank.txt": " ", "b.txt": TEXTS[1], "c.txt": "never read"},
        max_tokens=60,
        chunk=40,
    )
    assert named.text_facts["text"] == "a.txt, b.txt"
    assert named.notes[0].endswith("texts not read: c.txt.")
    assert (
        study(gpt2, Letters(), ["one text", " ", "another", "left out"], max_tokens=19)
        .notes[0]
        .endswith("texts not read: 4.")
    )


@pytest.mark.parametrize("blanks", [0, 63, 64, 200])
def test_special_tokens_after_blanks(blanks):
    class Stripping(Letters):
        """Drops blanks at both ends, as many tokenizers do."""

        def __call__(self, text, add_special_tokens=True):
            return super().__call__(text.strip(), add_special_tokens)

    for tokenizer in (Letters(), Stripping()):
        ids = (
            cut(tokenizer, [" " * blanks + "word"], length=500, max_tokens=None, vocabulary=None)
            .chunks[0]
            .ids.tolist()
        )
        assert ids == tokenizer(" " * blanks + "word")["input_ids"]


def test_special_tokens_that_cannot_be_told():
    class Between(Letters):
        def __call__(self, text, add_special_tokens=True):
            ids = super().__call__(text, False)["input_ids"]
            return {"input_ids": [x for i in ids for x in (1, i)] if add_special_tokens else ids}

    with pytest.raises(ArgumentError, match="which special tokens"):
        cut(Between(), ["word"], length=50, max_tokens=None, vocabulary=None)


def test_checkpoint_of_another_model(gpt2, tmp_path):
    from transformers import GPT2LMHeadModel

    other, deeper = (
        GPT2LMHeadModel(type(gpt2.config)(**(gpt2.config.to_diff_dict() | x)))
        for x in ({"n_embd": 16}, {"n_layer": 3})
    )
    other.save_pretrained(tmp_path / "checkpoint-7")
    for source, message in (
        (lambda: other, "at step 5 is of another model.*shape .60, 16."),
        (lambda: deeper, "no such weight"),
    ):
        with pytest.raises(ArgumentError, match=message):
            study(gpt2, Letters(), TEXTS[0], checkpoints=[(5, source)])
    with pytest.raises(ArgumentError, match="checkpoint-7 is of another model"):
        study(gpt2, Letters(), TEXTS[0], checkpoints=[tmp_path / "checkpoint-7"])


def test_model_that_does_not_read_text():
    from transformers import ViTConfig, ViTModel

    seeing = ViTModel(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=32,
            patch_size=16,
        )
    )
    with pytest.raises(ArgumentError, match=r"ViTModel reads pictures, and text 1 is a str"):
        study(seeing, Letters(), TEXTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": []}, "no text"),
        ({"texts": ["", "  \n"]}, "empty or blank"),
        ({"texts": [b"bytes"]}, "bytes"),
        (
            {"tokenizer": lambda text, **_: {"input_ids": [99]}},
            "does not match the model: it gives token 99, the model knows tokens 0 to 59",
        ),
        ({"tokenizer": object()}, "does not turn text into input_ids"),
        ({"model": nn.Linear(3, 3)}, "Pass a transformers model"),
        ({"model": "gpt2"}, "Pass a transformers model"),
        ({"chunk": 2}, "no room"),
        ({"chunk": 0}, "chunk is 0"),
        ({"chunk": 1}, "chunk is 1"),
        ({"chunk": 40.5}, "chunk is 40.5"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"max_tokens": -5}, "max_tokens is -5"),
    ],
)
def test_refusals(gpt2, change, message):
    given = {"model": gpt2, "tokenizer": Letters(), "texts": TEXTS} | change
    model, tokenizer, texts = (given.pop(name) for name in ("model", "tokenizer", "texts"))
    with pytest.raises(ArgumentError, match=message):
        study(model, tokenizer, texts, **given)


def test_model_without_attention():
    class Config:
        is_encoder_decoder = False

    class Plain(nn.Module):
        config = Config()

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(60, 4)

        def forward(self, input_ids):
            return self.embedding(input_ids)

    with pytest.raises(ArgumentError, match="no attention to study in Plain"):
        study(Plain(), Letters(), TEXTS)


def test_where_a_question_does_not_apply():
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    shape = {
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    shape |= {
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    normed = study(Qwen3ForCausalLM(Qwen3Config(**shape)), Letters(), TEXTS)
    assert normed.heads["link_symmetry"].value is None
    assert "affine" in normed.heads["link_symmetry"].reason
    assert normed.heads["ascent_cosine"].value is not None
    capped = study(
        Gemma2ForCausalLM(Gemma2Config(**shape, sliding_window=16, query_pre_attn_scalar=8)), Letters(), TEXTS
    )
    assert "softcapped" in capped.heads["gaussian_r2"].reason
    assert capped.heads["ascent_gain"].value is not None
    assert np.isfinite(capped.layers["mlp_expansion"].value).all()
    both = study(
        T5ForConditionalGeneration(
            T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        ),
        Letters(),
        TEXTS,
    )
    cross = [i for i, name in enumerate(both.layer_names) if name.endswith("(cross)")]
    assert cross == [3, 5]
    assert np.isnan(both.heads["ascent_cosine"].value[cross]).all()
    assert np.isfinite(both.heads["ascent_cosine"].value[[0, 1, 2, 4]]).all()
    assert np.isfinite(both.heads["entropy"].value).all()
    assert np.isnan(both.heads["link_symmetry"].value[cross]).all()
    assert any("same text" in note for note in both.notes)
    json.loads(both.to_json())


def test_one_definition_of_every_statistic(gpt2):
    """What a record and a study call by the same name is the same number, here of one text."""
    taken = cut(Letters(), TEXTS[:1], length=64, max_tokens=None, vocabulary=60)
    with torch.no_grad(), xt.lens.watch(gpt2, key_mass=True) as seen:
        gpt2(input_ids=taken.chunks[0].ids[None])
    found = study(gpt2, Letters(), TEXTS[:1], chunk=64)
    assert found.text_facts["chunks"] == 1
    shared = set(HEADS) & set(seen.record.to_frame().columns)
    assert {"entropy", "relative_entropy", "effective_keys", "score_max", "key_mass_divergence"} < shared
    for name in shared:
        np.testing.assert_allclose(
            seen.record.by_head(name), found.heads[name].value, rtol=1e-5, err_msg=name
        )
    readings = {(r.layer, r.head): r for r in read_heads(seen.record, {})}
    for name in ("entropy", "score_max", "log_normalizer"):
        for (layer, head), reading in readings.items():
            assert getattr(reading, name) == pytest.approx(found.heads[name].value[layer, head], rel=1e-5)


def test_a_study_of_an_earlier_release_is_read(found):
    data = json.loads(found.to_json())
    data["heads"]["key_mass_concentration"] = data["heads"].pop("key_mass_divergence")
    again = Study.from_json(json.dumps(data))
    assert set(again.heads) == set(HEADS)
    np.testing.assert_array_equal(
        again.heads["key_mass_divergence"].value, found.heads["key_mass_divergence"].value
    )


def test_tokens_keep_their_word_starts():
    class Pieces:
        words = ("\u2581to", "day", "\u2581", "<s>")

        def convert_ids_to_tokens(self, ids):
            return [self.words[i] for i in ids]

        def decode(self, ids):
            return self.words[ids[0]].replace("\u2581", "")

    assert token_texts(Pieces(), [0, 1, 2, 3]) == [" to", "day", " ", "<s>"]


def test_a_study_is_read_from_its_file(found, tmp_path):
    path = tmp_path / "study.json"
    path.write_text(found.to_json(), "utf-8")
    for given in (path, str(path)):
        assert Study.from_json(given).name == found.name
    with pytest.raises(ArgumentError, match="neither JSON nor a file that can be read"):
        Study.from_json(str(tmp_path / "none.json"))
