"""Numbers near the ends of a dtype, copies of a memory, and what a progress bar is put over."""

import copy
import io
import pickle

import pytest
import torch

from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.claims.experiments import equivalence
from exptilt.claims.experiments.equivalence import boltzmann_check
from exptilt.memory import ClassicalHopfield, Hopfield, Polynomial, RestrictedBoltzmann
from exptilt.memory import nearest as sweeps
from exptilt.memory.binary import boltzmann, classical
from oracles import memory as oracle

F64 = torch.float64


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("size", [1e25, 1e-25, 1e38, 1e-42])
def test_cosine_knows_only_directions(size):
    """float32 squares overflow beyond 1e19 and vanish below 1e-23."""
    x, s = drawn(9, 3).clamp(-2, 2) / 2, drawn(4, 3, seed=1).clamp(-2, 2) / 2
    x, s = x / x.norm(dim=-1, keepdim=True), s / s.norm(dim=-1, keepdim=True)
    plain = Hopfield(x, 5.0, similarity="cosine")
    precision = 1e-6 if size > 1e-37 else 1e-2  # numbers below that have few digits left
    for memory, state in ((plain, s * size), (Hopfield(x * size, 5.0, similarity="cosine"), s)):
        torch.testing.assert_close(memory.step(state), plain.step(s), rtol=0, atol=10 * precision)
        torch.testing.assert_close(memory.energy(state), plain.energy(s), rtol=0, atol=10 * precision)
        torch.testing.assert_close(
            memory.retrieve(state).value, plain.retrieve(s).value, rtol=0, atol=100 * precision
        )


def test_only_zero_has_no_direction():
    with pytest.raises(ArgumentError, match=r"patterns\[1\] is 0"):
        Hopfield(torch.tensor([[1e-44, 0.0], [0.0, 0.0]]), similarity="cosine")


@pytest.mark.parametrize("states", [2, 12])
@pytest.mark.parametrize("rule", ["softmax", "sparsemax", "max", Polynomial(3)], ids=str)
def test_what_overflows_ends_where_it_stands(states, rule):
    x = drawn(40, 6)
    memory = Hopfield(x * 1e18, 1.0, separation=rule)
    start = x[:states] * 1e18
    start[-1] *= 100  # its scores are beyond float32
    found = memory.retrieve(start, throw=False)
    assert found.status.name == "NOT_FINITE"
    assert found.code[:-1].max() < found.code[-1]
    assert torch.equal(found.value[-1], start[-1])
    assert found.residual[-1] == torch.inf
    assert found.residual[:-1].isfinite().all()
    assert int(found.steps) < 1000
    assert (found.trace[:, -1] == torch.inf).all()
    assert memory.energy(start)[-1] == torch.inf
    assert memory.step(start)[-1].isnan().all()
    with pytest.raises(ConvergenceError, match="NaN or infinity"):
        memory.retrieve(start)


def test_what_overflows_in_one_memory_moves_on_in_another():
    x = drawn(2, 9, 4, dtype=F64)
    memory = Hopfield(x, torch.tensor([1e308, 1.0], dtype=F64))
    state = 100 * drawn(2, 3, 4, seed=1, dtype=F64)
    found = memory.retrieve(state, throw=False)
    assert (found.code[0] == found.code.max()).all()
    assert torch.equal(found.value[0], state[0])
    alone = Hopfield(x[1], 1.0).retrieve(state[1])
    assert (found.code[1] == 0).all()
    assert torch.allclose(found.value[1], alone.value, atol=1e-9)


@pytest.mark.parametrize("rule", ["sparsemax", "entmax"])
def test_sparse_weights_have_an_energy_at_any_beta(rule):
    x, s = drawn(30, 5), drawn(7, 5, seed=1)
    sharp = Hopfield(x, 1e38, separation=rule)
    torch.testing.assert_close(sharp.energy(s), Hopfield(x, separation="max").energy(s), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        sharp.step(s).double(), oracle.step(x, s, 1.0, separation="max"), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("similarity", ["dot", "cosine", "euclidean"])
def test_copies_retrieve_the_same(similarity):
    memory = Hopfield(
        drawn(30, 5),
        2.0,
        similarity=similarity,
        separation=Polynomial(4) if similarity == "cosine" else "softmax",
    )
    state = drawn(12, 5, seed=1)
    file = io.BytesIO()
    torch.save(memory, file)
    file.seek(0)
    copies = (
        pickle.loads(pickle.dumps(memory)),
        copy.deepcopy(memory),
        copy.copy(memory),
        torch.load(file, weights_only=False),
    )
    for again in copies:
        assert torch.equal(
            again.retrieve(state, throw=False, max_steps=9).value,
            memory.retrieve(state, throw=False, max_steps=9).value,
        )
        assert again.rule == memory.rule
    assert copies[1].patterns.data_ptr() != memory.patterns.data_ptr()
    learnt = copy.deepcopy(
        Hopfield(drawn(4, 3).requires_grad_(), torch.tensor(1.0, requires_grad=True), similarity=similarity)
    )
    learnt.energy(drawn(2, 3)).sum().backward()
    assert learnt.patterns.grad is not None
    assert learnt.beta.grad is not None


def test_what_takes_long_has_a_bar(monkeypatch):
    seen = []

    def track(items, description, *, total=None, show=None):
        if show is None:
            seen.append(description)
        return list(items)

    for module in (boltzmann, classical, equivalence, sweeps):
        monkeypatch.setattr(module, "track", track)
    spins = drawn(3, 8).sign()
    RestrictedBoltzmann.random(3, 2).log_partition()
    boltzmann_check(spins, spins)
    ClassicalHopfield.hebbian(spins).retrieve(spins, throw=False)
    Hopfield(spins, 1.0).separation()
    assert seen == ["log Z", "integrals", "states settled", "separation"]
