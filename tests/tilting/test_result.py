"""The result of `attend` as an object: statistics that are taken apart late behave like any others."""

import copy
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import exptilt as xt
from tilting.cases import FIELDS, normal


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 5, 4, generator=g) for _ in range(3)]


def numbers(a):
    """All tensors of a result, by name."""
    found = {f.name: getattr(a, f.name) for f in fields(a) if getattr(a, f.name) is not None}
    return found | dict(zip(("shift", "weight", "gap"), found.pop("parts"), strict=True))


def test_late_statistics_are_those_of_the_tiled_sweep(tensors):
    for name, x in numbers(xt.attend(*tensors, backend="tiled")).items():
        torch.testing.assert_close(numbers(xt.attend(*tensors))[name], x)
        torch.testing.assert_close(numbers(xt.attend(*tensors))[name], x)  # a call like one before


@pytest.mark.parametrize(
    "passed",
    [
        lambda a: pickle.loads(pickle.dumps(a)),
        copy.copy,
        copy.deepcopy,
        replace,
        lambda a: pytree.tree_map(lambda x: x, a),
    ],
    ids=["pickle", "copy", "deepcopy", "replace", "tree"],
)
def test_late_statistics_survive(tensors, passed):
    expected = numbers(xt.attend(*tensors))
    assert numbers(passed(xt.attend(*tensors))).keys() == expected.keys()
    for name, x in numbers(passed(xt.attend(*tensors))).items():
        assert torch.equal(x, expected[name]), name


def test_each_statistic_is_made_once(tensors):
    a = xt.attend(*tensors)
    assert a.entropy is a.entropy
    assert a.key_mass is None
    assert "entropy" in repr(a)
    with pytest.raises(AttributeError, match="'AttentionResult' object has no attribute 'entropies'"):
        _ = a.entropies


def test_threads_may_change_between_calls(tensors):
    """What is kept of a call fits the number of threads it was made with."""
    before, threads = xt.attend(*tensors), torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(xt.attend(*tensors).output, before.output)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4, 300, 64), (1, 0, 4)])
def test_a_short_repr(shape):
    q = normal(0, *shape)
    a = xt.attend(q, q, q, key_mass=True)
    text = repr(a)
    assert text == str(a)
    assert len(text.splitlines()) <= 15
    assert max(map(len, text.splitlines())) <= 120
    assert "AttentionResult" in text
    assert "float32" in text
    for name in FIELDS:
        assert name in text
    assert str(tuple(q.shape)) in text
    assert str(tuple(q.shape[:-1])) in text


def test_a_repr_shows_ranges():
    q = torch.zeros(1, 2, 4)
    k = torch.zeros(1, 8, 4)
    a = xt.attend(q, k, k, bias=torch.full((2, 8), 1.25))
    assert "1.25" in repr(a)
    assert "key_mass=tensor" not in repr(a)
    nothing = xt.attend(q, k, k, mask=torch.zeros(2, 8, dtype=torch.bool))
    assert "-inf" in repr(nothing).replace("−", "-")


def test_a_repr_of_a_traced_or_differentiated_result():
    """Printing must not need numbers: under a transform, on the meta device or with a graph."""
    q = normal(0, 2, 1, 5, 4).requires_grad_()
    assert len(repr(xt.attend(q, q, q)).splitlines()) <= 15
    seen = []

    def function(x):
        a = xt.attend(x, x, x)
        seen.append(repr(a))
        return a.output

    torch.func.vmap(function)(q.detach())
    torch.func.jvp(function, (q.detach(),), (q.detach(),))
    assert all(len(text.splitlines()) <= 15 for text in seen)


def test_ranges_are_those_of_numpy():
    """What is printed is what is there: the smallest and largest entropy to three digits appear."""
    q, k = normal(0, 1, 50, 4), normal(1, 1, 60, 4)
    a = xt.attend(q, k, k)
    low, high = np.min(a.entropy.numpy()), np.max(a.entropy.numpy())
    text = repr(a)
    assert f"{low:.2f}"[:4] in text
    assert f"{high:.2f}"[:4] in text
