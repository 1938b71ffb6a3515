"""Kinds of heads, against weights that are written out."""

import dataclasses

import numpy as np
import pytest
import torch

from exptilt.lens.heads.kinds import RULES, kinds
from exptilt.lens.heads.statistics import text_statistics
from exptilt.lens.inputs.texts import Chunk, with_delimiters
from exptilt.lens.questions.blocks import write_size
from exptilt.lens.studying.definitions import HEADS
from exptilt.lens.studying.one_text import Options, measure_repeats, measure_unit
from exptilt.lens.studying.results import HeadMeasure
from exptilt.tilting import attend
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (12,), generator=torch.Generator().manual_seed(0))
ENDS = frozenset({int(IDS[0]), int(IDS[4]), int(IDS[9])})


@pytest.mark.parametrize("name", ["gpt2", "bert", "gpt_oss", "gemma2"])
def test_masses(name):
    model = models.make(name)
    unit = measure_unit(model, Chunk(IDS, 0, frozenset(), ENDS), Options())
    with torch.no_grad():
        weights = torch.stack(model(IDS[None], output_attentions=True).attentions)[:, 0].double()
    q, k = torch.arange(12)[:, None], torch.arange(12)
    near = {"previous_mass": k == q - 1, "next_mass": k == q + 1}
    for kind, there in near.items():
        seen = there & ((k <= q) if name != "bert" else there)
        if name in ("gpt_oss", "gemma2"):  # every other layer sees 4 tokens, which the token before is among
            assert seen.sum() == (11 if kind == "previous_mass" else 0)
        if not seen.any():
            assert np.isnan(unit[f"head:{kind}"]).all()
            continue
        wanted = torch.stack([w[:, seen].mean(-1) for w in weights])
        np.testing.assert_allclose(unit[f"head:{kind}"], wanted, rtol=2e-4, atol=1e-6)
    ends = torch.tensor([int(i) in ENDS for i in IDS])
    ends[0] = False
    wanted = weights[..., ends].sum((-1, -2)) / weights.sum((-1, -2))
    np.testing.assert_allclose(unit["head:delimiter_mass"], wanted, rtol=2e-4)
    even = (weights > 0) / (weights > 0).sum(-1, keepdim=True)
    wanted = even[..., ends].sum((-1, -2)) / even.sum((-1, -2))
    np.testing.assert_allclose(unit["head:delimiter_mass_baseline"], wanted, rtol=1e-6)
    outcomes = (weights > 0).sum(-1)[:, 0] + (name == "gpt_oss")  # a sink is a choice
    many = (outcomes > 1) & (outcomes >= outcomes.max(-1, keepdim=True).values / 2)
    many &= weights[:, 0, :, 0] > 0
    wanted = np.stack([np.median(x[:, use, 0], -1) for x, use in zip(weights, many, strict=True)])
    np.testing.assert_allclose(unit["head:first_token_mass"], wanted, rtol=2e-4)


def shares(weights, causal):
    """`first_token_share` and `near_share` with even attention's, of weights (head, n, n), written out."""
    n = weights.shape[-1]
    q, k = np.arange(n)[:, None], np.arange(n)
    seen = (k <= q) if causal else np.ones((n, n), bool)
    around = seen & (abs(q - k) <= 16)
    full = around.sum(1) == around.sum(1).max()
    keys = (around | (seen & ((k == 0) | (k == n - 1))))[full]
    found = {}
    for name, some in (("first_token_share", k + 0 * q == 0), ("near_share", abs(q - k) <= 4)):
        some = some[full] & keys
        known = some.any(1) & (some.sum(1) < keys.sum(1))
        of_all = [(p * some).sum(-1) / (p * keys).sum(-1) for p in (weights[:, full], 1.0 * keys[None])]
        found[name], found[f"{name}_baseline"] = (
            np.broadcast_to(np.median(x[:, known], -1), len(weights)) for x in of_all
        )
    return found


@pytest.mark.parametrize(("name", "n"), [("gpt2", 12), ("gpt2", 30), ("bert", 12), ("bert", 30)])
def test_shares(name, n):
    model = models.make(name)
    ids = torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n))
    unit = measure_unit(model, Chunk(ids, 0), Options())
    with torch.no_grad():
        weights = torch.stack(model(ids[None], output_attentions=True).attentions)[:, 0].double().numpy()
    for layer, w in enumerate(weights):
        for measure, wanted in shares(w, name == "gpt2").items():
            np.testing.assert_allclose(unit[f"head:{measure}"][layer], wanted, rtol=2e-4, err_msg=measure)


def test_shares_of_a_window_of_near_tokens_only():
    query, key = torch.randn(2, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    options = {"scale": 1.0, "causal": True, "window": 4}
    found = text_statistics(query, key, options, attend(query, key, key, **options)).by_name
    assert found["near_share"].isnan().all()  # it sees nothing else: that makes no head local


def test_the_size_of_a_write_is_taken_token_by_token():
    # The first token of a trained model may be a hundred times as long as the others: it must not hide them.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 16, generator=generator)
    hidden[0] *= 1e4
    shares = torch.tensor([0.05, 1e-3])
    write = shares[:, None, None] * hidden.norm(dim=-1, keepdim=True) * torch.eye(16)[0]
    np.testing.assert_allclose(write_size(write, hidden), shares, rtol=1e-5)
    lone = torch.zeros(1, 9, 16)
    lone[0, 3] = hidden[3] * 0.3  # silent but at one token
    np.testing.assert_allclose(write_size(lone, hidden), [0.1], rtol=1e-5)


def synthetic(n, causal):
    """Weights (4, n, n): 0.3 to the first token; half to the token before; even; half to the next seven."""
    places = torch.arange(n)
    s = torch.zeros(4, n, n)
    s[0, :, 0] = float(np.log(30))  # as 30 of the others: by its mass it was a sink in a short text only
    s[1, places[1:], places[:-1]] = float(np.log(60))
    s[3] += 2.0 * ((places[:, None] - places).abs() <= 7)
    key = torch.eye(n)[None, None].expand(1, 4, n, n)
    options = {"scale": 1.0, "causal": causal}
    query = s[None]
    return text_statistics(query, key, options, attend(query, key, key, **options)).by_name


@pytest.mark.parametrize("causal", [True, False])
def test_first_and_near_do_not_depend_on_how_a_text_is_cut(causal):
    short, middle, long = (synthetic(n, causal) for n in (40, 128, 400))
    for name in ("first_token_share", "near_share"):
        for numbers in (middle, long):  # equal but for where the two ends are near
            np.testing.assert_allclose(numbers[name], short[name], atol=0.01, err_msg=name)
    assert (short["first_token_mass"][0] > 0.4) & (long["first_token_mass"][0] < 0.2)  # this one does

    def members(numbers):
        found = {}
        for name in ("first_token_share", "near_share"):
            value, even = (numbers[x][None].numpy() for x in (name, f"{name}_baseline"))
            found[name] = HeadMeasure("", "", "", "", value, baseline=even)
        return {name: kind.members[0].tolist() for name, kind in kinds(found).items()}

    assert members(short) == members(middle) == members(long)
    assert members(long) == {
        "first token": [causal, False, False, False],
        "local": [False, True, False, False],
    }


def test_repeated_tokens():
    model = models.make("gpt2")
    n, generator = 9, torch.Generator().manual_seed(0)
    sequences = torch.stack([torch.randperm(61, generator=generator)[:n] for _ in range(3)]).repeat(1, 2)
    found = measure_repeats(model, sequences)
    with torch.no_grad():
        weights = torch.stack(model(sequences, output_attentions=True).attentions).double()
    for name, shift in (("duplicate_mass", n), ("induction_mass", n - 1)):
        by_text = torch.stack([weights[..., i, i - shift] for i in range(n, 2 * n)], -1).mean(-1)
        np.testing.assert_allclose(found[f"head:{name}"], by_text.mean(1), rtol=1e-4)
        np.testing.assert_allclose(found[f"error:{name}"], by_text.std(1) / 3**0.5, rtol=1e-3)


def test_what_is_a_delimiter():
    words = {0: "\n", 1: " ", 2: ".", 3: " —", 4: "a.", 5: "word", 6: "</s>", 7: "[UNK]", 8: ""}

    class Words:
        unk_token_id = 7

        def decode(self, ids):
            return words[ids[0]]

    (chunk,) = with_delimiters([Chunk(torch.arange(9), 0, frozenset({6, 7}))], Words())
    assert chunk.delimiters == {0, 1, 2, 3, 6}  # what the tokenizer does not know may be anything


def test_a_head_is_of_a_kind_beyond_two_errors():
    def measure(value, error):
        return HeadMeasure("", "", "", "", np.array([value]), None if error is None else np.array([error]))

    heads = {
        "previous_mass": measure([0.9, 0.55, 0.2], [0.01, 0.03, np.nan]),
        "near_share": measure([0.99, 0.5, 0.3], None),
        "delimiter_mass": dataclasses.replace(
            measure([0.99, 0.9, 0.7], None), baseline=np.array([[0.1, 0.9, 0.6]])
        ),
        "write_size": HeadMeasure("", "", "", "", None),
    }
    found = kinds(heads)
    assert list(found) == ["previous token", "delimiter", "local"]
    assert found["delimiter"].members.tolist() == [
        [True, False, False]
    ]  # in a text of commas, all look there
    assert found["previous token"].members.tolist() == [[True, False, False]]
    assert found["local"].members.tolist() == [[True, True, False]]
    assert all(rule.measure in HEADS for rule in RULES.values())


def test_repr_is_short():
    value = np.linspace(0.0, 1.0, 12).reshape(3, 4)
    measure = HeadMeasure("", "", "", "", value)
    found = kinds({"previous_mass": measure})["previous token"]
    assert repr(found).startswith(f"<{found.members.sum()} of 12 heads: L")
    assert len(repr(found)) < 60
    assert repr(dataclasses.replace(found, members=value > 2)) == "<0 of 12 heads>"
