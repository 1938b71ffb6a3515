"""The score rule: who sees whom, counted and summed in O(n), against loops over pairs."""

import itertools

import numpy as np
import pytest
import torch

from exptilt.tilting.problem import Inputs
from exptilt.tilting.score_rule import ScoreRule

RULES = [(False, None), (True, None), (True, 3), (False, 2), (True, 0), (False, 20)]
SIZES = [(5, 7), (7, 5), (1, 6), (6, 6)]


def sees(causal, window, Q, K):
    """(Q, K) booleans, pair by pair."""
    seen = np.zeros((Q, K), dtype=bool)
    for i, j in itertools.product(range(Q), range(K)):
        own = i + K - Q
        back, ahead = own - j, j - own
        seen[i, j] = (ahead <= 0 or not causal) and (
            window is None or (back < window and (causal or ahead < window))
        )
    return seen


def masks(Q, K):
    """None, one for all queries, one by query and head, and one with a single column."""
    g = torch.Generator().manual_seed(Q + K)
    shapes = [(2, 1, 1, K), (2, 3, Q, K), (1, 1, Q, 1)]
    return [None, *(torch.rand(shape, generator=g) < 0.6 for shape in shapes)]


@pytest.mark.parametrize(("Q", "K"), SIZES)
@pytest.mark.parametrize(("causal", "window"), RULES)
def test_counts_and_sums(causal, window, Q, K):
    rule = ScoreRule(1.0, causal, window)
    pairs = sees(causal, window, Q, K)
    for rows in (None, slice(1, 4)):
        found = rule.visible(Q, K, 1, K, torch.device("cpu"), rows)
        wanted = pairs[:, 1:] if rows is None else pairs[rows, 1:]
        np.testing.assert_array_equal(np.ones_like(wanted) if found is None else found, wanted)
    weight = torch.rand(2, 3, Q, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for mask in masks(Q, K):
        seen = np.broadcast_to(pairs if mask is None else pairs & mask.numpy(), (2, 3, Q, K))
        counted = rule.count(Q, K, mask=mask)
        np.testing.assert_array_equal(np.broadcast_to(counted, (2, 3, Q)), seen.sum(-1))
        wanted = (weight.numpy()[..., None] * seen).sum(-2)
        np.testing.assert_allclose(rule.drawn(weight, K, mask).expand(2, 3, K), wanted, atol=1e-14)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("causal", "window"), RULES)
def test_one_column_and_some_rows_are_those_of_the_block(causal, window, softcap):
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, h, n, 3, generator=g, dtype=torch.float64) for h, n in ((4, 5), (2, 7)))
    bias = torch.randn(1, 4, 5, 7, generator=g, dtype=torch.float64)
    log_weight = torch.randn(2, 2, 7, generator=g, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 7, generator=g) < 0.7
    t = Inputs(query, key, key, bias, log_weight, None, mask)
    rule = ScoreRule(0.7, causal, window, softcap)
    z = 0.7 * query @ key.repeat_interleave(2, 1).mT
    whole = rule.block(t, z, 0, 7).scores
    torch.testing.assert_close(
        rule.block(t, z[..., 1:3, 2:6], 2, 6, slice(1, 3)).scores, whole[..., 1:3, 2:6]
    )
    torch.testing.assert_close(rule.column(t), whole[..., 0])
    index = torch.tensor([5, 2])
    wanted = torch.stack([whole[0, ..., 5], whole[1, ..., 2]])
    torch.testing.assert_close(rule.column(t, index), wanted)


def test_the_slope_of_a_saturated_softcap_keeps_its_digits():
    """1 − tanh² would be off by a tenth at 8, and 0 from 9 on."""
    z = torch.linspace(-20, 20, 41)
    slope = ScoreRule(1.0, False, None, 0.5).soften(z).slope
    assert slope is not None
    right = torch.cosh(2 * z.double()) ** -2
    assert ((slope - right).abs() <= 1e-5 * right).all()
