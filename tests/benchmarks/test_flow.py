"""The benchmark of flows compares like with like."""

import torch

import flow as benchmark


def test_the_benchmark_compares_like_with_like():
    cases = benchmark.cases_for(64)
    torch.testing.assert_close(cases["Flow"](), cases["naive"](), rtol=1e-4, atol=1e-4)
    assert cases["measuring"]()["clusters"].count == 64
