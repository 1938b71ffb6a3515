"""`Hopfield` against the obvious formulas, and what theory says of its energy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exptilt._support.errors import ConvergenceError
from exptilt.memory import Entmax, Hopfield, Polynomial
from oracles import memory as oracle

SIMILARITIES = ("dot", "cosine", "euclidean")
RULES = [
    *(("softmax", None), ("sparsemax", None), ("entmax", None), ("entmax", 1.1), ("entmax", 1.9)),
    *(("max", None), ("polynomial", 2), ("polynomial", 7)),
]
PAIRS = [(a, b, c) for a in SIMILARITIES for b, c in RULES if not (a == "euclidean" and b == "polynomial")]


def rule(separation, parameter):
    if parameter is None:
        return separation
    return Entmax(parameter) if separation == "entmax" else Polynomial(parameter)


@st.composite
def memories(draw, dtype=torch.float64):
    similarity, separation, parameter = draw(st.sampled_from(PAIRS))
    N, D, Q = draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    patterns = torch.randn(N, D, dtype=dtype, generator=generator) * draw(st.sampled_from([0.1, 1.0, 3.0]))
    if draw(st.booleans()):
        patterns = patterns[torch.randint(N, (N,), generator=generator)]  # some are equal
    state = torch.randn(Q, D, dtype=dtype, generator=generator) * draw(st.sampled_from([0.1, 1.0, 10.0]))
    beta = draw(st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3, 1e6]))
    return patterns, state, beta, similarity, separation, parameter


@settings(max_examples=100, deadline=None)
@given(memories())
def test_step_and_energy_are_the_obvious_ones(drawn):
    patterns, state, beta, similarity, separation, parameter = drawn
    memory = Hopfield(patterns, beta, similarity=similarity, separation=rule(separation, parameter))
    z = oracle.scores(patterns, state, similarity)
    # how far a rounding of the scores may move the weights: they are compared where this is small
    rounding = (
        beta
        * 1e-15
        * (1 + state.norm(dim=-1).max() * patterns.norm(dim=-1).max() + patterns.square().sum(-1).max())
    )
    gap = z.topk(min(2, z.shape[-1]), -1).values
    clear = (
        (gap[:, 0] - gap[:, -1] > 1e-9) | (gap[:, 0] == gap[:, -1])
        if separation == "max"
        else torch.ones(len(z), dtype=torch.bool)
    )
    expected = oracle.step(patterns, state, beta, similarity, separation, parameter)
    size = patterns.norm(dim=-1).max() if similarity != "cosine" else 1.0
    if float(rounding) < 1e-7 or separation in ("max", "polynomial"):
        assert torch.allclose(
            memory.step(state)[clear], expected[clear], rtol=0, atol=float(20 * rounding + 1e-9) * float(size)
        )
    energy = oracle.energy(patterns, state, beta, similarity, separation, parameter)
    scale = (
        1 + energy.abs().max() + state.square().sum(-1).max() + patterns.square().sum(-1).max() + 10 / beta
    )
    assert torch.allclose(memory.energy(state), energy, rtol=0, atol=float(scale) * 1e-11)


@settings(max_examples=100, deadline=None)
@given(memories())
def test_energy_never_rises(drawn):
    patterns, state, beta, similarity, separation, parameter = drawn
    memory = Hopfield(patterns, beta, similarity=similarity, separation=rule(separation, parameter))
    energies = [memory.energy(state)]
    for _ in range(12):
        state = memory.step(state)
        energies.append(memory.energy(state))
    rises = torch.stack(energies).diff(dim=0)
    slack = 1e-12 * (1 + patterns.square().sum(-1).max() + energies[0].abs().max() + 10 / beta)
    assert rises.max() <= slack
    if separation != "polynomial":  # states are in the hull by now (on the sphere, of norm 1)
        M2 = patterns.square().sum(-1).max() if similarity != "cosine" else 1.0
        assert energies[-1].min() >= -slack
        assert energies[-1].max() <= 2 * M2 + slack


def test_energy_of_one_pattern_is_half_a_squared_distance():
    x, s = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([0.5, 0.0, 3.0])
    for similarity in ("dot", "euclidean"):
        for separation in ("softmax", "sparsemax", "max"):
            memory = Hopfield(x, 3.0, similarity=similarity, separation=separation)
            assert torch.allclose(memory.energy(s), (s - x[0]).square().sum() / 2)
            assert torch.equal(memory.retrieve(s).value, x[0])


def test_energy_has_the_half_and_its_constants():
    """Two orthogonal patterns and a state worked out by hand."""
    memory = Hopfield(2 * torch.eye(2, dtype=torch.float64), 0.5)
    state = torch.tensor([1.0, 0.0], dtype=torch.float64)
    e = np.e
    expected = -2 * np.log(e + 1) + 0.5 + 2 * np.log(2) + 2.0
    assert float(memory.energy(state)) == pytest.approx(expected, abs=1e-14)
    assert torch.allclose(
        memory.step(state), torch.tensor([2 * e / (e + 1), 2 / (e + 1)], dtype=torch.float64)
    )


def test_step_descends_the_energy_by_its_gradient():
    """ξ − T(ξ) is the gradient of E (not on the sphere), so the step is the concave–convex one."""
    torch.manual_seed(0)
    x = torch.randn(30, 5, dtype=torch.float64)
    for similarity, separation, parameter in PAIRS:
        if similarity == "cosine":
            continue
        memory = Hopfield(x, 0.7, similarity=similarity, separation=rule(separation, parameter))
        state = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(memory.energy(state).sum(), state)
        assert torch.allclose(gradient, state - memory.step(state), atol=1e-9), (similarity, separation)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_heads_have_a_beta_each(similarity):
    torch.manual_seed(1)
    x, s = torch.randn(2, 3, 12, 6, dtype=torch.float64), torch.randn(2, 2, 3, 4, 6, dtype=torch.float64)
    beta = torch.tensor([[0.1, 1.0, 10.0], [0.3, 3.0, 30.0]], dtype=torch.float64)
    for separation in ("softmax", "sparsemax", "max"):
        memory = Hopfield(x, beta, similarity=similarity, separation=separation)
        stepped, energy, settled = memory.step(s), memory.energy(s), memory.retrieve(s, tolerance=1e-5).value
        for b in range(2):
            for h in range(3):
                one = Hopfield(x[b, h], float(beta[b, h]), similarity=similarity, separation=separation)
                assert torch.allclose(stepped[:, b, h], one.step(s[:, b, h]), atol=1e-13)
                assert torch.allclose(energy[:, b, h], one.energy(s[:, b, h]), atol=1e-12)
                assert torch.allclose(
                    settled[:, b, h], one.retrieve(s[:, b, h], tolerance=1e-5).value, atol=1e-8
                )
                assert memory.separation()[b, h].equal(one.separation())


def test_retrieval_stops_each_state_by_itself():
    torch.manual_seed(0)
    x = 4 * torch.eye(16, dtype=torch.float64)
    memory = Hopfield(x, 1.0)
    state = torch.cat([x[:2], 0.3 * torch.randn(3, 16, dtype=torch.float64)])
    found = memory.retrieve(state)
    assert found.converged
    assert (found.residual <= 1e-10).all()
    for i, row in enumerate(state):
        alone = memory.retrieve(row)
        assert torch.allclose(alone.value, found.value[i], atol=1e-12)
        assert alone.steps <= found.steps
    assert memory.retrieve(x[0]).steps < found.steps
    assert torch.allclose(memory.step(found.value), found.value, atol=1e-9)


def test_not_converging_is_said():
    memory = Hopfield(
        torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 1.0
    )
    state = torch.ones(3, 4, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="max_steps"):
        memory.retrieve(state, max_steps=1)
    found = memory.retrieve(state, max_steps=1, throw=False)
    assert not found.converged
    assert found.status.name == "MAX_STEPS"
    assert int(found.steps) == 1
    assert torch.allclose(found.value, memory.step(state))


def test_float32_is_as_good_as_plain_torch():
    torch.manual_seed(0)
    x, s = torch.randn(3000, 32), torch.randn(40, 32)
    exact = oracle.step(x, s, 0.5)
    plain = torch.softmax(0.5 * s @ x.T, -1) @ x
    ours = Hopfield(x, 0.5).step(s)
    floor = 4e-7 * (
        1 + oracle.scores(x, s, "dot").abs().max() / 2
    )  # a few units in the last place of the scores, as for attend
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + floor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_half_precision_and_parts(dtype, similarity, monkeypatch):
    """Patterns in half precision are widened part by part and the parts merged."""
    monkeypatch.setattr("exptilt.memory.patterns._PART_NUMBERS", 512)
    torch.manual_seed(0)
    x, s = torch.randn(301, 8).to(dtype), torch.randn(5, 8)
    memory = Hopfield(x, 0.5, similarity=similarity)
    assert torch.allclose(memory.step(s).double(), oracle.step(x, s, 0.5, similarity), atol=1e-5)
    assert torch.allclose(memory.energy(s).double(), oracle.energy(x, s, 0.5, similarity), atol=1e-4)
    assert memory.step(s.to(dtype)).dtype == dtype


def test_many_tiles(monkeypatch):
    monkeypatch.setattr("exptilt.memory.patterns._TILE_CELLS", 1 << 8)
    torch.manual_seed(0)
    x, s = torch.randn(333, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    for similarity, separation, parameter in PAIRS:
        memory = Hopfield(x, 1.3, similarity=similarity, separation=rule(separation, parameter))
        assert torch.allclose(
            memory.step(s), oracle.step(x, s, 1.3, similarity, separation, parameter), atol=1e-10
        )
    assert torch.allclose(Hopfield(x, 1.0).separation(), oracle.separation(x), atol=1e-12)


def test_add_and_remove():
    torch.manual_seed(0)
    x = torch.randn(10, 4)
    memory = Hopfield(x[:7], 2.0, similarity="euclidean", separation=Entmax(1.2))
    grown = memory.add(x[7:9]).add(x[9])
    assert grown.count == 10
    assert torch.equal(grown.patterns, x)
    assert grown.similarity.name == "euclidean"
    assert grown.rule == Entmax(1.2)
    assert float(grown.beta) == 2.0
    shrunk = grown.remove([0, -1]).remove(3)
    assert torch.equal(shrunk.patterns, x[[1, 2, 3, 5, 6, 7, 8]])
    assert torch.equal(grown.remove(torch.arange(10) > 4).patterns, x[:5])
    assert memory.count == 7


def test_memory_mapped_patterns(tmp_path):
    torch.manual_seed(0)
    x, s = torch.randn(500, 8), torch.randn(6, 8)
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    from_file = torch.from_file(str(tmp_path / "raw"), shared=True, size=x.numel(), dtype=torch.float32).view(
        500, 8
    )
    from_file.copy_(x)
    here = Hopfield(x, 1.0)
    for other in (Hopfield(mapped, 1.0), Hopfield(from_file, 1.0)):
        assert torch.equal(other.step(s), here.step(s))
        assert torch.equal(other.retrieve(s, throw=False).value, here.retrieve(s, throw=False).value)
    assert Hopfield(mapped, 1.0).patterns.data_ptr() == mapped.__array_interface__["data"][0]


@pytest.mark.parametrize("rule", ["softmax", "sparsemax", "max"])
def test_no_states_at_all(rule):
    one, heads = (
        Hopfield(torch.eye(3), separation=rule),
        Hopfield(torch.eye(3).expand(2, 3, 3), separation=rule),
    )
    for memory, shape in ((one, (0, 3)), (one, (2, 0, 3)), (heads, (2, 0, 3)), (heads, (0, 2, 4, 3))):
        found = memory.retrieve(torch.zeros(shape))
        assert found.value.shape == shape
        assert found.residual.shape == shape[:-1]
        assert found.converged


@pytest.mark.parametrize("max_steps", [1, 2, 5, 1000])
def test_the_residual_belongs_to_the_value(max_steps):
    torch.manual_seed(0)
    x, s = torch.randn(2, 12, 4, dtype=torch.float64), torch.randn(2, 30, 4, dtype=torch.float64)
    memory = Hopfield(x, torch.tensor([0.3, 3.0], dtype=torch.float64))
    found = memory.retrieve(s, max_steps=max_steps, throw=False, tolerance=1e-6)
    moves = (memory.step(found.value) - found.value).norm(dim=-1) / memory.size[:, None]
    assert torch.allclose(found.residual, moves, rtol=1e-6, atol=1e-14)
    assert torch.equal(found.code == 0, moves <= 1e-6)
    if max_steps == 1:
        assert torch.allclose(found.value, memory.step(s), atol=1e-12)


def test_add_takes_one_numpy_pattern():
    more = Hopfield(np.eye(3)).add(np.ones(3))
    assert torch.equal(more.patterns, torch.cat([torch.eye(3), torch.ones(1, 3)]).double())


X = torch.eye(4)


def test_numbers_of_numpy_are_numbers():
    for beta in (np.float32(2.0), np.int64(2), np.array(2.0), torch.tensor(2.0)):
        assert float(Hopfield(X, beta).beta) == 2.0
    assert int(Hopfield(X, np.float64(9.0)).retrieve(X, max_steps=np.int64(50)).steps) < 50
    assert float(Hopfield(X.double(), 1e-300).beta) == 1e-300
