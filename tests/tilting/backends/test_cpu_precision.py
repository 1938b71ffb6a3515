"""How exact sums over many queries are, and scores against few keys."""

import pytest
import torch

import exptilt as xt
from oracles.tilting_fuzz import small_tiles


@pytest.mark.parametrize("small", [False, True])
def test_a_mass_over_many_queries(small):
    """A hundred thousand float32 weights are added up with an error of a few units of their last place."""
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 100_000, 8, generator=g), torch.randn(1, 64, 8, generator=g)
    with small_tiles(small):
        found = xt.attend(query, key, key, key_mass=True).key_mass
    weights = torch.softmax(query.double() @ key.double().mT / 8**0.5, -1)
    expected = weights.sum(-2)
    assert ((found.double() - expected).abs() / expected).max() <= 4e-7


@pytest.mark.parametrize("dim", [64, 96, 129, 192, 256])
@pytest.mark.parametrize("keys", [1, 2, 5, 8])
def test_scores_against_few_keys(keys, dim):
    """With few keys dot products are summed differently, and are as exact as those of a library."""
    g = torch.Generator().manual_seed(dim + keys)
    query, key = torch.randn(1, 4000, dim, generator=g), torch.randn(1, keys, dim, generator=g)
    truth = (query.double() @ key.double().mT).amax(-1)
    found = xt.attend(query, key, key, scale=1.0).score_max
    plain = (query @ key.mT).amax(-1)

    def error(x):
        return (x.double() - truth).square().mean().sqrt()

    assert error(found) <= 2 * error(plain)


@pytest.mark.parametrize("queries", [1, 4, 8, 9, 50])
def test_scores_of_few_queries(queries):
    g = torch.Generator().manual_seed(queries)
    query, key = torch.randn(200, queries, 128, generator=g), torch.randn(200, 60, 128, generator=g)
    truth = (query.double() @ key.double().mT).amax(-1)
    found, plain = xt.attend(query, key, key, scale=1.0).score_max, (query @ key.mT).amax(-1)
    errors = [(x.double() - truth).square().mean().sqrt() for x in (found, plain)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("queries", [1, 100])  # one query: its keys are cut into parts, which are joined
def test_the_mean_of_small_scores(backend, queries):
    """Scores far below 1: their mean is a hundredth of the largest, and keeps its digits."""
    g = torch.Generator().manual_seed(queries)
    query, key = (
        0.01 * torch.randn(100 // queries, queries, 16, generator=g),
        torch.randn(2000, 16, generator=g),
    )
    key = key.expand(len(query), -1, -1)

    def mean(q, k):
        scores = q @ k.mT / 4
        return (torch.softmax(scores, -1) * scores).sum(-1)

    found, plain, truth = (
        xt.attend(query, key, key, backend=backend).score_mean,
        mean(query, key),
        mean(query.double(), key.double()),
    )
    errors = [(x.double() - truth).square().mean().sqrt() for x in (found, plain)]
    assert errors[0] <= 3 * errors[1]
