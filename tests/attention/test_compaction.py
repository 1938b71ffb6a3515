"""Compact keys answer like the keys they stand for."""

import sys

import pytest
import torch

import exptilt as xt
from exptilt._support.errors import ArgumentError
from exptilt.attention.compaction import share_budget

F64 = torch.float64


def clustered(count=12, each=8, spread=0.05, heads=2, D=8, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, dtype=dtype, generator=generator)  # noqa: E731
    k, v = (draw(heads, count, D).repeat_interleave(each, 1) for _ in range(2))
    k, v = k + spread * draw(*k.shape), v + spread * draw(*v.shape)
    mixed = torch.randperm(count * each, generator=generator)
    return draw(2 * heads, 40, D), draw(2 * heads, 30, D), k[:, mixed], v[:, mixed]


def off(few, q, k, v):
    full, ours = xt.attend(q, k, v), few.attend(q)
    return float((ours.output - full.output).norm() / full.output.norm())


def test_all_keys_are_kept_as_they_are():
    q, later, k, v = clustered()
    few = xt.compact(k, v, k.shape[1], q)
    torch.testing.assert_close(few.attend(later).output, xt.attend(later, k, v).output)
    torch.testing.assert_close(few.attend(later).log_normalizer, xt.attend(later, k, v).log_normalizer)
    assert few.error.max() < 1e-12
    assert few.error_log_normalizer.max() < 1e-12


def test_equal_keys_are_joined_exactly():
    q, later, k, v = clustered(spread=0.0)
    few = xt.compact(k, v, 48, q, keep=0.5)
    assert off(few, later, k, v) < 1e-3  # the prior of clusters that nobody attends to is all that is left


def test_clusters_are_found_where_a_subset_fails():
    q, later, k, v = clustered(count=24, spread=0.1)
    ours, subset = (xt.compact(k, v, 48, q, method=m) for m in ("collapse", "subset"))
    assert off(ours, later, k, v) < 0.25 * off(subset, later, k, v)
    assert (ours.error < subset.error).all()


def test_errors_are_those_of_the_queries_given():
    q, _, k, v = clustered()
    few = xt.compact(k, v, 10, q)
    full, ours = xt.attend(q, k, v), few.attend(q)
    apart = (ours.output - full.output).square().sum((-1, -2)) / full.output.square().sum((-1, -2))
    torch.testing.assert_close(few.error, apart.sqrt())
    gap = (ours.log_normalizer - full.log_normalizer).square().mean(-1).sqrt()
    torch.testing.assert_close(few.error_log_normalizer, gap)
    assert xt.compact(k, v, 10).error is None


def test_a_fit_is_better_on_later_queries_and_says_how_good_it_is():
    _, later, k, v = clustered(count=30, each=4, spread=0.5)
    q = torch.randn(4, 400, 8, dtype=F64, generator=torch.Generator().manual_seed(5))
    few, plain = (xt.compact(k, v, 24, q, fit=fit) for fit in (True, False))
    assert off(few, later, k, v) < 0.9 * off(plain, later, k, v)
    assert plain.predicted is None
    full, ours = xt.attend(later, k, v), few.attend(later)
    apart = (ours.output - full.output).norm(dim=(-1, -2)) / full.output.norm(dim=(-1, -2))
    gap = (ours.log_normalizer - full.log_normalizer).square().mean(-1).sqrt()
    for found, want in ((few.predicted, apart), (few.predicted_log_normalizer, gap)):
        assert ((found / want > 0.5) & (found / want < 2)).all()  # 30 later queries
    assert few.append(k, v).predicted is None


def test_keys_are_taken_a_few_at_a_time(monkeypatch):
    q, _, k, v = clustered()
    want = xt.compact(k, v, 10, q)
    monkeypatch.setattr(sys.modules["exptilt.attention.compaction"], "CELLS", 500)
    torch.testing.assert_close(xt.compact(k, v, 10, q).value, want.value)


def test_layers_with_larger_errors_get_more():
    q, _, k, v = clustered(spread=0.5)
    layers = [{"key": k, "value": x, "queries": q, "scale": 0.3} for x in (v, 1 + 0.01 * v, v)]
    found = share_budget(layers, 20)
    assert found[0] == found[2] > 2 * found[1] >= 16
    assert 57 <= sum(found) <= 60


@pytest.mark.parametrize("method", ["collapse", "subset"])
def test_fresh_keys_join_exactly(method):
    q, later, k, v = clustered()
    few = xt.compact(k, v, 20, q, method=method)
    fresh = torch.randn(2, 30, 8, dtype=F64, generator=torch.Generator().manual_seed(3))
    found = few.with_fresh(later, fresh, fresh)
    weight = torch.cat([few.log_weight, torch.zeros(2, 30, dtype=F64)], -1)
    both = [torch.cat([x, fresh], 1) for x in (few.key, few.value)]
    seen = torch.cat([torch.ones(30, 20), torch.ones(30, 30).tril()], 1).bool()
    want = xt.attend(later, *both, log_weight=weight, mask=seen)
    torch.testing.assert_close(found.output, want.output)
    torch.testing.assert_close(found.entropy, want.entropy)
    grown = few.append(fresh, fresh)
    assert grown.length == k.shape[1] + 30
    torch.testing.assert_close(grown.attend(later).output, xt.attend(later, *both, log_weight=weight).output)
    again = xt.compact(grown.key, grown.value, 20, q, log_weight=grown.log_weight)
    assert again.key.shape == (2, 20, 8)
    assert off(again, later, *both) < 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "budget is 0"),
        ({"budget": 97}, "budget is 97, there are 96 keys"),
        ({"method": "magic"}, "'collapse', 'subset'"),
        ({"keep": 1.5}, "keep is 1.5"),
        ({"queries": torch.zeros(3, 5, 8, dtype=F64)}, "a multiple of 2 heads"),
        ({"value": torch.zeros(2, 95, 8, dtype=F64)}, "one value for each key"),
        ({"key": torch.full((2, 96, 8), torch.nan, dtype=F64)}, "key"),
        ({"value": torch.zeros(2, 96, 8)}, "the same dtype"),
        ({"log_weight": torch.zeros(5, dtype=F64)}, "log_weight is"),
        ({"log_weight": torch.full((2, 96), -torch.inf, dtype=F64)}, "hides all keys"),
        ({"log_weight": torch.full((2, 96), torch.nan, dtype=F64)}, "log_weight"),
    ],
)
def test_bad_input(change, message):
    q, _, k, v = clustered()
    with pytest.raises(ArgumentError, match=message):
        xt.compact(**{"key": k, "value": v, "budget": 10, "queries": q} | change)
    with pytest.raises(ArgumentError, match="causal"):
        xt.compact(k, v, 10, q).attend(q, causal=True)
    with pytest.raises(ArgumentError, match="top"):
        xt.compact(k, v, 10, q).with_fresh(q, k, v, top=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 5, 7, dtype=F64)}, r"key is \(2, 5, 7\). Pass \(2, 5, 8\)"),
        ({"value": torch.zeros(2, 4, 8, dtype=F64)}, r"value is \(2, 4, 8\). Pass \(2, 5, 8\)"),
        ({"key": torch.zeros(1, 5, 8, dtype=F64)}, r"Pass \(2, 5, 8\)"),
        ({"key": torch.zeros(2, 5, 8)}, "the same dtype"),
        ({"key": torch.full((2, 5, 8), torch.nan, dtype=F64)}, "must be finite"),
        ({"key": [1.0]}, "key must be"),
    ],
)
def test_bad_keys_are_not_appended(change, message):
    q, _, k, v = clustered()
    few = xt.compact(k, v, 10, q)
    with pytest.raises(ArgumentError, match=message):
        few.append(**{"key": k[:, :5], "value": v[:, :5]} | change)


@pytest.mark.parametrize("shift", [-900.0, 900.0])
def test_a_constant_in_the_log_weights_only_moves_them(shift):
    q, _, k, v = clustered()
    plain, moved = (
        xt.compact(k, v, 10, q, log_weight=torch.full((2, 96), x, dtype=F64)) for x in (0.0, shift)
    )
    torch.testing.assert_close(moved.log_weight - shift, plain.log_weight)
    torch.testing.assert_close(moved.error, plain.error)


def test_a_softcap_holds_for_compact_and_later_keys():
    q, later, k, v = clustered()
    few = xt.compact(k, v, k.shape[1], q)
    fresh = torch.ones(2, later.shape[1], 8, dtype=F64)
    seen = torch.ones(later.shape[1], k.shape[1] + fresh.shape[1], dtype=torch.bool).tril(k.shape[1])
    want = xt.attend(later, torch.cat([k, fresh], 1), torch.cat([v, fresh], 1), softcap=0.5, mask=seen)
    torch.testing.assert_close(few.with_fresh(later, fresh, fresh, softcap=0.5).output, want.output)
    assert not xt.compact(k, 0 * v, 10, q).error.any()
