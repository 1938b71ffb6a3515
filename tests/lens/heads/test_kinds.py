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
    near = (weights * ((q - k).abs() <= 8)).sum(-1)
    wanted = np.stack([np.median(x[:, use], -1) for x, use in zip(near, many, strict=True)])
    np.testing.assert_allclose(unit["head:near_mass"], wanted, rtol=1e-4)
    many &= weights[:, 0, :, 0] > 0
    wanted = np.stack([np.median(x[:, use, 0], -1) for x, use in zip(weights, many, strict=True)])
    np.testing.assert_allclose(unit["head:first_token_mass"], wanted, rtol=2e-4)


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


def test_first_and_near_do_not_depend_on_how_a_text_is_cut():
    # A head of queries that all give 0.6 to the first token, another that gives 0.8 to the token before and
    # spreads the rest: by means and root mean squares both depended on the length.
    found = []
    for n in (48, 200):
        key = torch.eye(n)[None, None].expand(1, 2, n, n)
        p = torch.full((2, n, n), 1e-9)
        p[0, :, 0], p[1, torch.arange(1, n), torch.arange(n - 1)] = 0.6, 0.8
        rest = torch.where(p > 0.1, 0.0, 1.0).tril()
        p = p + rest / rest.sum(-1, keepdim=True).clamp(min=1) * torch.tensor([0.4, 0.2])[:, None, None]
        options = {"scale": 1.0, "causal": True}
        query = p.log()[None]
        found.append(text_statistics(query, key, options, attend(query, key, key, **options)).by_name)
    for name, head, value in (("first_token_mass", 0, 0.6), ("near_mass", 1, 0.8)):
        for numbers in found:
            assert abs(float(numbers[name][head]) - value) < 0.05, name


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
        "near_mass": measure([0.99, 0.5, 0.3], None),
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
