"""Derivatives of steps, energies and retrievals; `torch.func` and `torch.compile`."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from exptilt._support.errors import ConvergenceError
from exptilt.memory import Entmax, Hopfield, HopfieldLayer, HopfieldPooling, Polynomial, hopfield_attention

F64 = torch.float64
RULES = ["softmax", "sparsemax", Entmax(1.3), Polynomial(3)]


def drawn(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


PAIRS = [
    (a, b)
    for a in ("dot", "cosine", "euclidean")
    for b in RULES
    if not (a == "euclidean" and isinstance(b, Polynomial))
]


@pytest.mark.parametrize(("similarity", "rule"), PAIRS, ids=str)
def test_step_and_energy_are_differentiable_twice(similarity, rule):
    x, s, beta = (
        drawn(4, 2).requires_grad_(),
        drawn(2, 2, seed=1).requires_grad_(),
        torch.tensor(0.8, dtype=F64, requires_grad=True),
    )

    def both(x, s, beta):
        memory = Hopfield(x, beta, similarity=similarity, separation=rule)
        return memory.step(s), memory.energy(s)

    assert gradcheck(both, (x, s, beta), atol=1e-5)
    assert gradgradcheck(both, (x, s, beta), atol=1e-5)


def test_the_largest_passes_gradients_to_its_pattern():
    x = drawn(6, 3).requires_grad_()
    s = drawn(2, 3, seed=1)
    memory = Hopfield(x, 1.0, separation="max")
    memory.step(s).sum().backward()
    chosen = (s @ x.detach().T).argmax(-1)
    expected = torch.zeros(6, 3, dtype=F64).index_add(0, chosen, torch.ones(2, 3, dtype=F64))
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("rule", ["softmax", Entmax(1.3)], ids=str)
def test_retrieval_is_differentiated_implicitly(rule):
    """Against finite differences of whole retrievals, first and second order; by patterns and by beta."""
    x, beta, s = 1.5 * drawn(7, 3), torch.tensor(0.6, dtype=F64), drawn(2, 3, seed=3)

    def settled(x, beta):
        return Hopfield(x, beta, separation=rule).retrieve(s, tolerance=1e-13, max_steps=5000).value

    inputs = (x.requires_grad_(), beta.requires_grad_())
    assert gradcheck(settled, inputs, atol=1e-6)
    if rule == "softmax":
        assert gradgradcheck(settled, inputs, atol=1e-5)
    assert settled(*inputs).requires_grad
    plain = Hopfield(x.detach(), 0.6, separation=rule).retrieve(s, tolerance=1e-13, max_steps=5000)
    assert torch.equal(settled(*inputs).detach(), plain.value)


def test_a_derivative_that_does_not_exist_is_an_error():
    """Patterns ±1 at β = 1: J = β Var = 1 at ξ = 0, where the two attractors part."""
    x = torch.tensor([[1.0], [-1.0]], dtype=F64, requires_grad=True)
    start = torch.zeros(1, 1, dtype=F64)
    settled = Hopfield(x, 1.0).retrieve(start).value
    with pytest.raises(ConvergenceError, match="no derivative exists"):
        settled.sum().backward()
    with pytest.raises(ConvergenceError, match="no derivative exists"):
        torch.func.grad(lambda x: Hopfield(x, 1.0).retrieve(start).value.sum())(x.detach())
    Hopfield(x, 1.0).retrieve(start, throw=False).value.sum().backward()
    assert not x.grad.isfinite().all()


@pytest.mark.slow
def test_a_state_that_goes_to_zero_settles_under_transforms_too():
    x = torch.tensor([[0.99, 0.0], [-0.99, 0.0]], dtype=F64)
    start = torch.tensor([0.3, 0.1], dtype=F64)
    plain = Hopfield(x, 1.0).retrieve(start)
    found = torch.func.vmap(lambda x, s: Hopfield(x, 1.0).retrieve(s))(x[None], start[None])
    assert torch.allclose(found.value[0], plain.value, atol=1e-12)
    assert torch.allclose(found.residual[0], plain.residual, rtol=1e-6)
    heads = torch.stack([x, 2 * x])
    states = start.expand(2, 3, 2)
    both = torch.func.vmap(lambda s: Hopfield(heads, torch.tensor([1.0, 0.1], dtype=F64)).retrieve(s).value)(
        states[None]
    )[0]
    assert torch.allclose(
        both, Hopfield(heads, torch.tensor([1.0, 0.1], dtype=F64)).retrieve(states).value, atol=1e-9
    )


def test_functional_transforms():
    x, s, beta = drawn(4, 9, 5), drawn(4, 6, 5, seed=1), torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=F64)
    for rule in RULES:

        def step(x, s, beta, rule=rule):
            return Hopfield(x, beta, separation=rule).step(s)

        batched = torch.func.vmap(step)(x, s, beta)
        assert torch.allclose(
            batched, torch.stack([step(*each) for each in zip(x, s, beta, strict=True)]), atol=1e-11
        ), rule
        forward, backward = (
            f(lambda z: step(x[0], z, beta[0]))(s[0]) for f in (torch.func.jacfwd, torch.func.jacrev)
        )
        assert torch.allclose(forward, backward, atol=1e-11)

    def settled(x, s, beta):
        return Hopfield(x, beta).retrieve(s, max_steps=3000).value

    alone = torch.stack([settled(*each) for each in zip(x, s, beta, strict=True)])
    assert torch.allclose(torch.func.vmap(settled)(x, s, beta), alone, atol=1e-7)


@pytest.mark.slow
def test_compiled():
    torch.manual_seed(0)
    x, s = torch.randn(20, 4), torch.randn(5, 4)
    compiled = torch.compile(lambda x, s: Hopfield(x, 2.0).step(s), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, s), Hopfield(x, 2.0).step(s), atol=1e-6)
    layer = HopfieldLayer(8, heads=2, steps=3)
    state, memory = torch.randn(2, 3, 8), torch.randn(2, 7, 8)
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(whole(state, memory), layer(state, memory), atol=1e-6)
    whole(state, memory).square().sum().backward()
    ours = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(state, memory).square().sum().backward()
    assert all(torch.allclose(a, b.grad, atol=1e-5) for a, b in zip(ours, layer.parameters(), strict=True))


def test_layer_is_the_obvious_one():
    """Each head by itself, with its own beta, in plain torch; three steps, the last of which reads values."""
    torch.manual_seed(0)
    layer = HopfieldLayer(12, heads=3, steps=3).double()
    assert torch.allclose(layer.beta, torch.full((3,), 0.5, dtype=F64))  # 1/sqrt(4), the head dimension
    assert torch.allclose(HopfieldLayer(12, heads=3, beta=7.0).beta, torch.full((3,), 7.0))
    layer.log_beta.data = torch.tensor([-1.0, 0.5, 2.0], dtype=F64)
    state, memory = drawn(2, 4, 12), drawn(2, 6, 12, seed=1)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    found = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        q, k, v = (
            layer.to_query(state)[..., part],
            layer.to_key(memory)[..., part],
            layer.to_value(memory)[..., part],
        )
        for turn in range(3):
            score = (layer.beta[h] * q @ k.mT).masked_fill(~mask[:, None], -torch.inf)
            q = torch.softmax(score, -1) @ (v if turn == 2 else k)
        found.append(q)
    assert torch.allclose(layer(state, memory, mask=mask), layer.to_output(torch.cat(found, -1)), atol=1e-12)


def test_beta_of_a_head_touches_that_head_only():
    torch.manual_seed(0)
    q, k, v = drawn(3, 5, 4), drawn(3, 9, 4, seed=1), drawn(3, 9, 2, seed=2)
    a = hopfield_attention(q, k, v, torch.tensor([1.0, 1.0, 1.0], dtype=F64), steps=2)
    b = hopfield_attention(q, k, v, torch.tensor([1.0, 5.0, 1.0], dtype=F64), steps=2)
    assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert (a[1] - b[1]).abs().max() > 0.01


@pytest.mark.parametrize("steps", [1, 3, None])
def test_layers_under_autocast(steps):
    torch.manual_seed(0)
    layer, x, m = HopfieldLayer(8, heads=2, steps=steps), torch.randn(2, 3, 8), torch.randn(2, 9, 8)
    exact = layer(x, m)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x, m)
        pooled = HopfieldPooling(8, heads=2, beta=3.0)(m)
    assert found.dtype == pooled.dtype == torch.bfloat16
    assert torch.allclose(found.float(), exact, atol=0.05)
    gradient, *_ = torch.autograd.grad(exact.sum(), [layer.log_beta])
    (found.float().sum() + pooled.float().sum()).backward()
    assert torch.allclose(layer.log_beta.grad, gradient, atol=0.1 * float(gradient.abs().max()) + 0.02)


def test_heads_begin_with_a_beta_each():
    for make in (HopfieldLayer, lambda *a, **b: HopfieldPooling(*a, **b).lookup):
        for beta in (torch.tensor([1.0, 2, 3, 4]), [1, 2, 3, 4], np.array([1.0, 2.0, 3.0, 4.0])):
            layer = make(8, heads=4, beta=beta)
            assert torch.allclose(layer.beta, torch.tensor([1.0, 2.0, 3.0, 4.0]))
            assert layer.log_beta.is_leaf
        assert torch.allclose(make(8, heads=4, beta=np.float32(3)).beta, torch.full((4,), 3.0))
        assert torch.allclose(make(8, heads=2).beta, torch.full((2,), 0.5))


def test_layers_with_implicit_gradients():
    """`to_query` is left out: a fixed point does not depend on its start; unrolled, its gradient dies."""
    torch.manual_seed(0)
    layer = HopfieldLayer(4, heads=2, stored=6, steps=None, beta=2.0).double()
    unrolled = HopfieldLayer(4, heads=2, stored=6, steps=400, beta=2.0).double()
    unrolled.load_state_dict(layer.state_dict())
    state = drawn(3, 4)
    gradients = []
    for which in (layer, unrolled):
        which(state).square().sum().backward()
        gradients.append([p.grad for name, p in which.named_parameters() if not name.startswith("to_query")])
    assert torch.allclose(layer(state), unrolled(state), atol=1e-3)
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=5e-3 * float(1 + b.abs().max()))
    assert layer.log_beta.grad.abs().min() > 0
    assert layer.to_query.weight.grad is None


def test_pooling_ignores_order_and_padding():
    torch.manual_seed(0)
    pool = HopfieldPooling(8, queries=3, heads=2, steps=2)
    x = torch.randn(2, 7, 8)
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    out = pool(x, mask=mask)
    assert out.shape == (2, 3, 8)
    order = torch.randperm(7)
    assert torch.allclose(pool(x[:, order], mask=mask[:, order]), out, atol=1e-5)
    assert torch.allclose(pool(x[1:, :5])[0], out[1], atol=1e-5)
    many = torch.func.vmap(pool)(x[:, None])[:, 0]
    assert torch.allclose(many, pool(x), atol=1e-5)
