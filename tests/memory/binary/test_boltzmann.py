"""Boltzmann machines: likelihoods by enumeration, Gibbs steps, learning, and the classical network inside."""

import itertools
import math

import pytest
import torch

from exptilt.claims.experiments.equivalence import boltzmann_check, integrated_free_energy
from exptilt.memory import RestrictedBoltzmann, hopfield_to_boltzmann, train_boltzmann
from exptilt.memory.binary.boltzmann import _log_integral
from exptilt.memory.binary.contrastive_divergence import gradient
from oracles import memory as oracle

F64 = torch.float64


def spins(*shape, seed=0):
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1


@pytest.mark.parametrize("visible", ["binary", "spin"])
@pytest.mark.parametrize("sizes", [(5, 3), (3, 5)])
def test_exact_likelihood_by_enumeration(visible, sizes):
    generator = torch.Generator().manual_seed(0)
    w, b, c = (torch.randn(s, dtype=F64, generator=generator) for s in (sizes, sizes[:1], sizes[1:]))
    machine = RestrictedBoltzmann(w, b, c, visible=visible)
    expected = oracle.boltzmann_log_partition(w, b, c, machine.levels)
    assert float(machine.log_partition()) == pytest.approx(expected, abs=1e-10)
    every = torch.tensor(list(itertools.product(machine.levels, repeat=sizes[0])), dtype=F64)
    assert float(machine.log_likelihood(every).exp().sum()) == pytest.approx(1.0)
    v = every[3]
    total = torch.stack(
        [
            -machine.energy(v, torch.tensor(h, dtype=F64))
            for h in itertools.product((0.0, 1.0), repeat=sizes[1])
        ]
    )
    assert float(machine.free_energy(v)) == pytest.approx(-float(torch.logsumexp(total, 0)))


def test_gaussian_hidden_units_are_integrated_out():
    machine = RestrictedBoltzmann.random(
        4, 3, hidden="gaussian", size=1.0, generator=torch.Generator().manual_seed(0)
    )
    v = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]], dtype=F64)
    assert torch.allclose(machine.free_energy(v), integrated_free_energy(machine, v), atol=1e-12)
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=F64)
    assert float(machine.log_likelihood(every).exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("hidden", "visible"),
    [("binary", "binary"), ("binary", "spin"), ("gaussian", "binary"), ("gaussian", "spin")],
)
def test_gradient_is_that_of_the_free_energy(hidden, visible):
    machine = RestrictedBoltzmann.random(
        4, 3, hidden=hidden, visible=visible, size=0.7, generator=torch.Generator().manual_seed(0)
    )
    start = torch.full((6, 4), machine.levels[1], dtype=F64)
    v = machine.gibbs(start, 1, torch.Generator().manual_seed(1))
    leaves = [p.clone().requires_grad_() for p in (machine.weight, machine.visible_bias, machine.hidden_bias)]
    loss = RestrictedBoltzmann(*leaves, hidden, visible).free_energy(v).mean()
    for ours, exact in zip(gradient(machine, v), torch.autograd.grad(-loss, leaves), strict=True):
        assert torch.allclose(ours, exact, atol=1e-12)


@pytest.mark.parametrize("field", [-500.0, -0.3, 0.0, 60.0])
def test_spins_in_a_strong_field_have_second_derivatives(field):
    """log 2 cosh f has the derivatives tanh f and 1 − tanh² f."""
    f = torch.tensor([field], requires_grad=True)
    (slope,) = torch.autograd.grad(_log_integral("spin", f), f, create_graph=True)
    (bend,) = torch.autograd.grad(slope, f)
    torch.testing.assert_close(slope.detach(), f.detach().tanh())
    torch.testing.assert_close(bend, 1 - f.detach().tanh().square())


@pytest.mark.parametrize("hidden", ["binary", "gaussian"])
@pytest.mark.parametrize("visible", ["binary", "spin"])
def test_gibbs_keeps_the_law(hidden, visible):
    generator = torch.Generator().manual_seed(3)
    machine = RestrictedBoltzmann.random(3, 2, hidden=hidden, visible=visible, size=0.8, generator=generator)
    machine = RestrictedBoltzmann(
        machine.weight, torch.tensor([0.5, -0.3, 0.1], dtype=F64), machine.hidden_bias + 0.2, hidden, visible
    )
    every = torch.tensor(list(itertools.product(machine.levels, repeat=3)), dtype=F64)
    p = machine.log_likelihood(every).exp()
    start = torch.full((20000, 3), machine.levels[1], dtype=F64)
    drawn = machine.gibbs(start, 30, generator)
    share = (drawn[:, None] == every).all(-1).double().mean(0)
    assert (share - p).abs().max() < 4.5 * math.sqrt(0.25 / 20000)
    assert (p.max() - p.min()) > 0.05


@pytest.mark.parametrize("method", ["cd", "pcd"])
@pytest.mark.parametrize("hidden", ["binary", "gaussian"])
def test_learning_raises_the_likelihood(method, hidden):
    data = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], dtype=F64).repeat(40, 1)
    begin = RestrictedBoltzmann.random(
        4, 3, hidden=hidden, size=0.1, generator=torch.Generator().manual_seed(0)
    )
    rate, decay = (0.1, 0.01) if hidden == "gaussian" else (0.6, 0.0)
    found = train_boltzmann(
        begin, data, method=method, steps=2, epochs=60, rate=rate, decay=decay, batch=20, exact=True
    )
    trace = found.trace.log_likelihood
    assert trace.shape == (60,)
    assert float(trace[-1]) > -1.6 > float(begin.log_likelihood(data).mean())
    assert float(found.machine.log_likelihood(data).mean()) == pytest.approx(float(trace[-1]))
    assert float(found.trace.data_free_energy[-1]) == pytest.approx(
        float(found.machine.free_energy(data).mean())
    )
    assert found.trace.reconstruction[-1] < found.trace.reconstruction[0]
    assert found.trace.chain_free_energy.isfinite().all()
    assert torch.equal(
        begin.weight,
        RestrictedBoltzmann.random(4, 3, size=0.1, generator=torch.Generator().manual_seed(0)).weight,
    )
    again = train_boltzmann(begin, data, method=method, steps=2, epochs=2, rate=0.1, batch=20)
    assert torch.equal(
        again.machine.weight,
        train_boltzmann(begin, data, method=method, steps=2, epochs=2, rate=0.1, batch=20).machine.weight,
    )
    assert again.trace.log_likelihood.numel() == 0


def test_a_classical_network_is_a_boltzmann_machine():
    x, s = spins(5, 16), spins(7, 16, seed=1)
    for beta in (0.1, 1.0, 3.0):
        check = boltzmann_check(x, s, beta=beta)
        assert check.gap < 1e-12
        machine = hopfield_to_boltzmann(x, beta=beta)
        assert torch.allclose(machine.free_energy(s), check.right, atol=1e-10)
    assert check.left.std() > 0.1
