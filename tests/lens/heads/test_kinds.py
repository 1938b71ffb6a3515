"""Kinds of heads, against weights that are written out."""

import numpy as np
import pytest
import torch

from exptilt.lens.heads.kinds import RULES, kinds
from exptilt.lens.inputs.texts import Chunk, with_delimiters
from exptilt.lens.studying.definitions import HEADS
from exptilt.lens.studying.one_text import Options, measure_repeats, measure_unit
from exptilt.lens.studying.results import HeadMeasure
from oracles import tiny_models as models

IDS = torch.randint(3, 61, (12,), generator=torch.Generator().manual_seed(0))
ENDS = frozenset({int(IDS[0]), int(IDS[4]), int(IDS[9])})


@pytest.mark.parametrize("name", ["gpt2", "bert", "gpt_oss", "gemma2"])
def test_masses_and_widths(name):
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
    square = (weights * (q - k) ** 2).sum(-1) / weights.sum(-1)
    choice = slice(None) if name in ("bert", "gpt_oss") else slice(1, None)  # a sink is a choice
    np.testing.assert_allclose(unit["head:width"], square[..., choice].mean(-1).sqrt(), rtol=2e-3)


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
    words = {0: "\n", 1: " ", 2: ".", 3: " —", 4: "a.", 5: "word", 6: "</s>"}

    class Words:
        def decode(self, ids):
            return words[ids[0]]

    (chunk,) = with_delimiters([Chunk(torch.arange(7), 0, frozenset({6}))], Words())
    assert chunk.delimiters == {0, 2, 3, 6}


def test_a_head_is_of_a_kind_beyond_two_errors():
    def measure(value, error):
        return HeadMeasure("", "", "", "", np.array([value]), None if error is None else np.array([error]))

    heads = {
        "previous_mass": measure([0.9, 0.55, 0.2], [0.01, 0.03, np.nan]),
        "width": measure([1.0, 7.9, 40.0], None),
        "write_size": HeadMeasure("", "", "", "", None),
    }
    found = kinds(heads)
    assert list(found) == ["previous token", "local"]
    assert found["previous token"].members.tolist() == [[True, False, False]]
    assert found["local"].members.tolist() == [[True, True, False]]
    assert all(rule.measure in HEADS for rule in RULES.values())
