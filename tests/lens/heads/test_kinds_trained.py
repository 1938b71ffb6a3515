"""Kinds of heads of real models: dead ones are taken out, and the others stay what they are in any chunk."""

import numpy as np
import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.lens import models
from exptilt.lens.inputs.texts import Chunk
from exptilt.lens.studying.one_text import Options, measure_repeats, measure_unit

pytestmark = pytest.mark.slow


def load(name):
    where = models.find_checkpoints([models.default_folder()])[-1][1] if name == "shakespeare" else name
    try:
        found = models.load_model(where)
    except ArgumentError:
        pytest.skip(f"{name} is not installed")
    ids = found.tokenizer(models.read_text(models.default_folder() / "text.txt")[:3000])["input_ids"]
    return found.model, torch.tensor(ids[:192])


def output(model, ids, heads):
    edit = xt.lens.edits.zero(heads) if heads else None
    with torch.no_grad(), xt.lens.watch(model, edit=edit):
        return model(ids[None])[0]


@pytest.mark.parametrize("name", ["shakespeare", "minilm", "smollm2"])
def test_only_heads_that_can_be_taken_out_are_dead(name):
    model, ids = load(name)
    size = measure_unit(model, Chunk(ids, 0), Options(details=False))["head:write_size"]
    assert not (size <= 0.01).any()  # none of these models has a dead head
    # The same heads, quieter: dead, and taking them out changes next to nothing.
    quiet = [tuple(int(i) for i in np.unravel_index(k, size.shape)) for k in np.argsort(size, axis=None)[:3]]

    def hush(call):
        changed = call.tilted.output.clone()
        for layer, head in quiet:
            if layer == call.layer:
                changed[:, head] *= 1e-3
        return changed

    with torch.no_grad(), xt.lens.watch(model, edit=hush):
        hushed = model(ids[None])[0]
    least, most = output(model, ids, quiet), output(model, ids, [])
    assert float((hushed - least).norm() / most.norm()) < 1e-3
    # A tenth of all heads, those that write least: they do matter, whatever the first token's length hides.
    few = [tuple(int(i) for i in np.unravel_index(k, size.shape)) for k in np.argsort(size, axis=None)]
    apart = output(model, ids, few[: max(3, size.size // 10)]) - most
    assert float(apart.norm() / most.norm()) > 0.01


def test_kinds_do_not_move_with_the_length_of_chunks():
    # From 128 to 40 tokens 4 of MiniLM's heads on the first token had become 11, 15 local ones 8, and
    # 6 diffuse ones 3.
    try:
        found = models.load_model("minilm")
    except ArgumentError:
        pytest.skip("minilm is not installed")
    text = models.read_text(models.default_folder() / "text.txt")
    by_chunk = [
        xt.lens.study(found.model, found.tokenizer, text, max_tokens=512, chunk=n, progress=False).kinds
        for n in (128, 40)
    ]
    for name in ("first token", "local", "previous token", "next token", "delimiter", "diffuse"):
        long, short = (kinds[name].members for kinds in by_chunk)
        assert (long == short).all(), name
    assert by_chunk[0]["first token"].members.sum() > 5
    assert by_chunk[0]["local"].members.sum() > 5
    assert by_chunk[0]["diffuse"].members.sum() > 2


def test_induction_heads_are_what_repeats_are_predicted_by():
    """Without the five heads of most induction mass SmolLM2 no longer knows that a sequence repeats."""
    model, ids = load("smollm2")
    generator, used, n = torch.Generator().manual_seed(0), ids.unique(), 40
    rows = [used[torch.randperm(len(used), generator=generator)[:n]] for _ in range(4)]
    sequences = torch.stack(rows).repeat(1, 2)
    mass = measure_repeats(model, sequences)["head:induction_mass"]
    order = [tuple(int(i) for i in np.unravel_index(k, mass.shape)) for k in np.argsort(-mass, axis=None)]
    assert (mass > 0.3).sum() > 5

    def losses(heads):
        with torch.no_grad(), xt.lens.watch(model, edit=xt.lens.edits.zero(heads)):
            logits = model(sequences, use_cache=False).logits[:, :-1]
        wrong = torch.nn.functional.cross_entropy(logits.mT, sequences[:, 1:], reduction="none")
        return float(wrong[:, : n - 1].mean()), float(wrong[:, n:].mean())

    others = [order[k] for k in (50, 90, 130, 170, 210)]
    (first, again), (first_without, again_without) = losses(others), losses(order[:5])
    assert again < 2.5  # a repeat is predicted, also without five heads of another kind
    assert again_without > again + 4  # but not without these
    assert abs(first_without - first) < 1  # and nothing else is lost
