"""The result of `attend` as an object: statistics that are taken apart late behave like any others."""

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch
from torch.utils import _pytree as pytree

import exptilt as xt


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
