"""A cache that compacts itself: exact until it does, small after, and near what the whole cache gives."""

import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.lens.caches import at_next_places, moved_on


def small(seed=0, **more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.15, **more
    )
    model = transformers.LlamaForCausalLM(config).eval()
    xt.lens.register()
    model.set_attn_implementation("exptilt")
    return model


TEXT = 1 + torch.randint(59, (2, 90), generator=torch.Generator().manual_seed(0))


def read(model, text, cache, step):
    """Logits of a text that is read in pieces."""
    with torch.no_grad():
        return torch.cat([model(x, past_key_values=cache).logits for x in text.split(step, 1)], 1)


@pytest.mark.parametrize("step", [1, 30])
def test_nothing_changes_until_it_is_full(step):
    model = small()
    cache = xt.lens.compact_cache(model, 90)
    with torch.no_grad():
        want = model(TEXT).logits
    torch.testing.assert_close(read(model, TEXT, cache, step), want, rtol=1e-4, atol=1e-4)
    assert (cache.compactions, cache.get_seq_length()) == (0, 90)


def test_it_stays_small_and_near_the_whole_cache():
    model = small()
    with torch.no_grad():
        want = model(TEXT).logits[:, 60:]
    far = []
    for budget in (4, 30):
        cache = xt.lens.compact_cache(model, budget, fresh=10, recent=6)
        found = read(model, TEXT, cache, 15)[:, 60:]
        assert cache.compactions >= 2
        assert cache.get_seq_length() == 90
        held = [x.keys.shape[-2] for x in cache.layers]
        assert sum(held) <= 2 * (budget + 6 + 10 + 15)
        assert all(x.log_weight.shape == x.keys.shape[:-1] for x in cache.layers)
        far.append(float((found - want).norm() / want.norm()))
    assert far[1] < 0.5 * far[0]
    assert far[1] < 0.15


def test_generation_and_beams():
    model = small()
    model.generation_config.pad_token_id = 0
    cache = xt.lens.compact_cache(model, 200)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    want = model.generate(TEXT, **options)
    assert torch.equal(model.generate(TEXT, past_key_values=cache, **options), want)
    few = xt.lens.compact_cache(model, 20, fresh=8, recent=4)
    made = model.generate(TEXT, past_key_values=few, num_beams=2, **options)
    assert made.shape == (2, 98)
    assert few.compactions == 1


def test_queries_are_rotated_to_later_places():
    model, seen = small(), []
    with torch.no_grad(), xt.lens.watch(model, observe=seen.append):
        for start in (0, 7):
            model(TEXT, position_ids=start + torch.arange(90)[None])
    module = model.model.layers[0].self_attn
    first = [call for call in seen if call.layer == 0]
    torch.testing.assert_close(moved_on(model, module, first[0].query, 7), first[1].query)
    found = at_next_places(model, module, first[0].query, 40)  # 90 queries to places 90 to 129, in turn
    for start, stop in ((0, 40), (40, 80), (80, 90)):
        want = moved_on(model, module, first[0].query[..., start:stop, :], 90 - start)
        torch.testing.assert_close(found[..., start:stop, :], want)


def test_a_watch_sees_compact_keys():
    model = small()
    cache = xt.lens.compact_cache(model, 10, fresh=10, recent=4)
    read(model, TEXT, cache, 45)
    with torch.no_grad(), xt.lens.watch(model) as seen:
        model(TEXT[:, :5], past_key_values=cache)
    assert len(seen.record.calls) == 2


def test_bad_input():
    model = small()
    for name, x in (("budget", 0), ("fresh", 0), ("recent", -1), ("queries", 0.5)):
        with pytest.raises(ArgumentError, match=f"{name} is {x}"):
            xt.lens.compact_cache(model, **{"budget": 5, name: x})
    cache = xt.lens.compact_cache(model, 10)
    padding = torch.ones_like(TEXT)
    padding[0, :3] = 0
    with pytest.raises(ArgumentError, match="without padding"):
        model(TEXT, attention_mask=padding, past_key_values=cache)
    with pytest.raises(ArgumentError, match="taken back"):
        cache.layers[0].crop(-1)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ArgumentError, match="set_attn_implementation"):
        xt.lens.compact_cache(model, 10)
