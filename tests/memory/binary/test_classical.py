"""Classical networks, Boltzmann machines, and the equivalences between them."""

import itertools
import math

import pytest
import torch

from exptilt._support.errors import ConvergenceError
from exptilt._support.solution import Status
from exptilt.claims.experiments.cliff import classical_cliff
from exptilt.claims.experiments.equivalence import linear_attention, linear_attention_check
from exptilt.memory import ClassicalHopfield

F64 = torch.float64


def spins(*shape, seed=0):
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1


@pytest.mark.parametrize("rule", ["hebbian", "pseudo_inverse"])
def test_weights_and_energy(rule):
    x, s = spins(3, 11), spins(4, 11, seed=1)
    memory = getattr(ClassicalHopfield, rule)(x)
    if rule == "hebbian":
        expected = sum(torch.outer(p, p) for p in x) / 11
    else:
        q, _ = torch.linalg.qr(x.T)
        expected = q @ q.T
    expected = expected - torch.diag(expected.diagonal())
    assert torch.allclose(memory.weight, expected, atol=1e-12)
    for state, energy in zip(s, memory.energy(s), strict=True):
        pairs = sum(
            float(expected[i, j] * state[i] * state[j]) for i in range(11) for j in range(11) if i < j
        )
        assert float(energy) == pytest.approx(-pairs)


@pytest.mark.parametrize("rule", ["hebbian", "pseudo_inverse"])
def test_asynchronous_flips_never_raise_the_energy(rule):
    x, s = spins(12, 40), spins(30, 40, seed=1)
    memory = getattr(ClassicalHopfield, rule)(x)
    last = memory.energy(s)
    for sweeps in range(1, 8):
        found = memory.retrieve(s, max_steps=sweeps, throw=False)
        energy = memory.energy(found.value)
        assert (energy <= last + 1e-12).all()
        last = energy
    found = memory.retrieve(s)
    assert torch.equal(memory.step(found.value), found.value)
    assert (found.residual == 0).all()


def test_asynchronous_kernel_is_the_obvious_loop():
    x, s = spins(9, 31), spins(5, 31, seed=1)
    memory = ClassicalHopfield.hebbian(x)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(5))
    expected = s.clone()
    for row in expected:
        for i in order.tolist():
            field = float(memory.weight[i] @ row)
            if abs(field) > 1e-9:
                row[i] = math.copysign(1.0, field)
    assert torch.equal(memory._sweep(s, order), expected)
    assert not torch.equal(s, expected)
    one = memory.retrieve(s, max_steps=1, throw=False, generator=torch.Generator().manual_seed(5)).value
    assert torch.equal(one, expected)


def test_ties_keep_their_value():
    """One pattern of two units and its mirror image cancel: no field, nothing moves."""
    memory = ClassicalHopfield.hebbian(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    for state in itertools.product((-1.0, 1.0), repeat=2):
        assert memory.step(torch.tensor(state)).tolist() == list(state)
        assert memory.retrieve(torch.tensor(state)).value.tolist() == list(state)


def test_pseudo_inverse_stores_what_hebb_does_not():
    x = spins(40, 60)
    x[1] = x[0] * torch.where(torch.arange(60) < 6, -1.0, 1.0)  # two patterns that are much alike
    assert torch.equal(ClassicalHopfield.pseudo_inverse(x).step(x), x)
    assert not torch.equal(ClassicalHopfield.hebbian(x).step(x), x)
    twice = ClassicalHopfield.pseudo_inverse(torch.cat([x, x[:5]]))
    assert torch.allclose(twice.weight, ClassicalHopfield.pseudo_inverse(x).weight, atol=1e-8)


@pytest.mark.parametrize("count", [30, 45])
def test_patterns_that_span_everything_bind_nothing(count):
    """From N independent patterns on the projection is 1, all weights are 0, and every state stays."""
    x = spins(count, 30)
    memory = ClassicalHopfield.pseudo_inverse(x)
    assert (memory.weight == 0).all()
    for update in ("asynchronous", "synchronous"):
        assert torch.equal(memory.retrieve(x, update=update).value, x)


def test_synchronous_updates_may_cycle():
    memory = ClassicalHopfield(torch.tensor([[0.0, -1.0], [-1.0, 0.0]]))
    state = torch.tensor([1.0, 1.0])
    with pytest.raises(ConvergenceError, match="stalled"):
        memory.retrieve(state, update="synchronous")
    found = memory.retrieve(
        torch.stack([state, state * torch.tensor([1, -1])]), update="synchronous", throw=False
    )
    assert found.code.tolist() == [Status.STALLED.code, Status.CONVERGED.code]
    assert found.residual.tolist() == [1.0, 0.0]
    assert int(found.steps) == 2
    assert memory.retrieve(state, update="synchronous", throw=False, max_steps=1).status is Status.MAX_STEPS
    assert memory.retrieve(state).converged
    some = ClassicalHopfield.hebbian(spins(30, 40)).retrieve(
        spins(50, 40, seed=1), update="synchronous", throw=False
    )
    assert set(some.code.tolist()) == {
        Status.CONVERGED.code,
        Status.STALLED.code,
    }  # fixed or a cycle of two, nothing else
    assert int(some.steps) < 40


def test_classical_cliff():
    """N = 1000: almost all recalled at load 0.13, about half at 0.16; recalled is an overlap above 0.9."""
    found = classical_cliff([0.05, 0.13, 0.16, 0.20], seeds=2)
    low, before, after, far = found.mean.tolist()
    assert low == 1.0
    assert before > 0.9
    assert 0.25 < after < 0.75
    assert far < 0.15
    assert found.overlap[0].min() > 0.99
    x = spins(40, 100)  # a load of 0.4, which the projection rule still recalls
    assert torch.equal(ClassicalHopfield.pseudo_inverse(x).retrieve(x).value, x)


def test_linear_attention_is_a_classical_memory():
    x, s = spins(5, 16), spins(20, 16, seed=1)
    check = linear_attention_check(x, s)
    assert check.gap == 0.0
    assert not torch.equal(check.left, s)
    q, k, v = (torch.randn(n, 4, dtype=F64, generator=torch.Generator().manual_seed(n)) for n in (3, 8, 8))
    expected = torch.stack([sum((ki @ qi) * vi for ki, vi in zip(k, v, strict=True)) for qi in q])
    assert torch.allclose(linear_attention(q, k, v), expected, atol=1e-12)
