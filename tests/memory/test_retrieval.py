"""Retrieval of a few states: against plain steps, in all layouts and shapes, and its bar."""

import numpy as np
import pytest
import torch

from exptilt._support.errors import ArgumentError
from exptilt.memory import Hopfield, retrieval

F32, F64 = torch.float32, torch.float64


def drawn(seed, dtype, most=800):
    generator = torch.Generator().manual_seed(seed)
    N, D, S = (int(torch.randint(1, high, (), generator=generator)) for high in (most, 40, 9))
    x = torch.randn(N, D, dtype=dtype, generator=generator)
    return x, x[torch.randint(N, (S,), generator=generator)] + 0.3 * torch.randn(
        S, D, dtype=dtype, generator=generator
    )


def plain_step(memory):
    """One step in float64, by the formula."""
    x, beta = memory.patterns.double(), float(memory.beta)
    offset = -0.5 * x.square().sum(-1) if memory.similarity.name == "euclidean" else 0.0
    return lambda state: torch.softmax(beta * (state @ x.T + offset), -1) @ x


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_a_few_states_against_plain_steps(dtype, similarity):
    """Value, residual, status and trace are those of a loop over plain steps in float64."""
    precision, tolerance = (2e-5, 1e-4) if dtype == F32 else (1e-11, 1e-9)
    for seed in range(6):
        x, s = drawn(seed, dtype)
        memory = Hopfield(x, (0.3, 1.0, 4.0)[seed % 3], similarity=similarity)
        size, value, step = float(memory.size), s.double(), plain_step(memory)
        close = {"rtol": 0, "atol": precision * (1 + size)}
        torch.testing.assert_close(memory.step(s).double(), step(value), **close)
        for most in (1, 3, 100):
            ours = memory.retrieve(s, tolerance=tolerance, max_steps=most, throw=False)
            moves = (memory.step(ours.value) - ours.value).norm(dim=-1) / memory.size
            torch.testing.assert_close(ours.residual, moves, rtol=1e-3, atol=precision)
            assert int(ours.steps) <= most
            assert ours.trace.shape == (int(ours.steps), len(s))
            assert ours.value.dtype == ours.residual.dtype == ours.trace.dtype == dtype
            assert torch.equal(ours.code == 0, ours.residual <= tolerance)
            if most == 3:
                plain, lengths = value, []
                for _ in range(4):
                    lengths.append((step(plain) - plain).norm(dim=-1) / size)
                    going = lengths[-1] > tolerance
                    plain = torch.where(going[:, None], step(plain), plain) if len(lengths) < 4 else plain
                torch.testing.assert_close(ours.value.double(), plain, **close)
                torch.testing.assert_close(
                    ours.residual.double(), lengths[-1], rtol=1e-2, atol=10 * precision
                )
                for row, length in zip(ours.trace.double(), lengths, strict=False):
                    torch.testing.assert_close(row, length, rtol=1e-2, atol=10 * precision)


def test_states_end_by_themselves_and_repeat_their_last():
    """One starts at its pattern, the other wanders long."""
    x = torch.tensor([[4.0, 0.0], [0.0, 4.0], [1.0, 1.0]], dtype=F64)
    memory = Hopfield(x, 0.26)
    state = torch.tensor([[1.0, 1.0], [3.5, -1.0]], dtype=F64)
    found, alone = memory.retrieve(state), [memory.retrieve(row) for row in state]
    assert int(found.steps) > 16
    for i, one in enumerate(alone):
        steps = int(one.steps)
        torch.testing.assert_close(found.trace[:steps, i], one.trace, rtol=1e-9, atol=1e-13)
        assert (found.trace[steps:, i] == found.trace[steps - 1, i]).all()
    assert len({int(one.steps) for one in alone}) == 2
    assert torch.equal(found.trace[-1], found.residual)
    assert found.trace[0, 1] == pytest.approx(float((memory.step(state[1]) - state[1]).norm() / 4))


def test_the_trace_does_not_reserve_max_steps():
    memory = Hopfield(torch.eye(3), 8.0)
    state = torch.tensor([0.9, 0.3, 0.0])
    found = memory.retrieve(state, max_steps=10**15)
    assert found.trace.shape == (int(found.steps),)


def test_layouts_shapes_and_scalars():
    x, s = drawn(3, F32)
    memory = Hopfield(x, 1.0)
    wide = torch.empty(len(s), 2 * x.shape[1])
    wide[:, ::2] = s
    assert torch.equal(memory.retrieve(wide[:, ::2]).value, memory.retrieve(s).value)
    assert torch.equal(memory.step(s.T.contiguous().T), memory.step(s))
    folded = memory.retrieve(s[:1].expand(4, -1).reshape(2, 2, -1))
    assert folded.value.shape == (2, 2, x.shape[1])
    assert folded.residual.shape == folded.code.shape == folded.distance.shape == (2, 2)
    assert folded.trace.shape == (int(folded.steps), 2, 2)
    one = memory.retrieve(s[0])
    assert one.value.shape == x.shape[1:]
    assert one.residual.shape == ()
    turned = Hopfield(x.T.contiguous().T, 1.0)
    torch.testing.assert_close(turned.step(s), memory.step(s), rtol=0, atol=1e-4)
    before = s.clone()
    memory.retrieve(s)
    assert torch.equal(s, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_states_are_refused(bad):
    memory = Hopfield(torch.eye(4), 1.0)
    state = torch.ones(2, 4)
    state[1, 2] = bad
    for ask in (memory.step, memory.retrieve, memory.energy):
        with pytest.raises(ArgumentError, match=r"state\[1\] holds NaN or infinity"):
            ask(state)


def test_the_bar_counts_every_state(monkeypatch):
    counted = []

    def track(items, description, *, total=None, show=None):
        seen = list(items)
        counted.append((len(seen), total))
        return seen

    monkeypatch.setattr(retrieval, "track", track)
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    assert Hopfield(x, 1.0).retrieve(x).converged
    assert Hopfield(torch.stack([x, -x]), 1.0).retrieve(torch.stack([x[:20], x[:20]])).converged
    Hopfield(x, 1.0).retrieve(x, max_steps=1, throw=False)
    assert counted[:2] == [(30, 30), (20, 20)]
    assert counted[2][0] < 30


@pytest.mark.slow
def test_a_million_patterns_from_their_file(tmp_path):
    x = torch.randn(1_000_000, 64, generator=torch.Generator().manual_seed(0))
    state = x[:256] + 0.3 * torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    here = Hopfield(x, 1.0)
    here.save(tmp_path / "memory")
    mapped = Hopfield.load(tmp_path / "memory", mapped=True)
    found, again = here.retrieve(state), mapped.retrieve(state)
    assert torch.equal(found.value, again.value)
    assert torch.equal(found.trace, again.trace)
    assert ((found.value - x[:256]).norm(dim=-1) < 0.1).all()
    np.save(tmp_path / "x.npy", x.numpy())
    raw = Hopfield(np.load(tmp_path / "x.npy", mmap_mode="r"), 1.0)
    assert torch.equal(raw.retrieve(state[:3]).value, here.retrieve(state[:3]).value)
