"""What the benchmarks of samplers and of uncertainty measure is what they say."""

import pytest
import torch

import propagate as carried
import sampling as benchmark


def test_the_exact_mean_and_evidence() -> None:
    mean, variance, log_z = benchmark.exact()
    grid = torch.linspace(-9, 9, 721, dtype=torch.float64)
    x = torch.cartesian_prod(grid, grid)
    density = torch.exp(-x.square().sum(1) / 2) / (2 * torch.pi)
    weight = density * torch.exp(benchmark.LOG_P + x @ benchmark.J.mT).sum(1) * (grid[1] - grid[0]) ** 2
    assert float(weight.sum().log()) == pytest.approx(log_z, rel=1e-6)
    torch.testing.assert_close(weight @ x / weight.sum(), mean)
    gap = (x - mean).square().sum(1)
    assert float(weight @ gap / weight.sum()) == pytest.approx(variance, rel=1e-6)


def test_a_run_and_its_row() -> None:
    cases = benchmark.ours(200)
    found = {
        name: benchmark.summary([benchmark.timed(call) for _ in range(3)]) for name, call in cases.items()
    }
    header, rows = benchmark.table({"samplers": found})
    assert [row[0] for row in rows] == ["exptilt: SMC", "exptilt: Gibbs"]
    assert all(len(row) == len(header) for row in rows)
    assert found["exptilt: SMC"]["error of log evidence"] < 1


def test_tables_of_uncertainty() -> None:
    times = {name: {"best": 0.001, "ratio": 1.0} for name in ("attention", "mixture", "average")}
    header, rows = carried.cost_table({"cost": {"512": times}})
    assert len(rows[0]) == len(header)
    errors = {"mean error / deviation": [0.1, 0.2], "variance error": [0.01, 0.02]}
    model = {**errors, "covariance error": [0.03, 0.04], "coverage": {"0.5": 0.49}}
    header, rows = carried.model_table({"models": {"small": model}})
    assert rows[1] == ["small", "2", "0.200", "2.0 %", "4.0 %", "49.0"]
    assert len(rows[0]) == len(header)
