"""A memory as a store of vectors: nearest patterns, separations, values, growth, edits in place."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from exptilt._support.errors import ArgumentError
from exptilt.memory import ClassicalHopfield, Hopfield, HopfieldLayer, RestrictedBoltzmann
from oracles import memory as oracle

F64 = torch.float64
SIMILARITIES = ("dot", "cosine", "euclidean")


def drawn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def top(x, s, beta, k, similarity="dot"):
    """Places, weights and the weight left out, with the whole matrix."""
    y = torch.softmax(beta * oracle.scores(x, s, similarity), -1)
    weight, index = y.topk(k, -1)
    return index, weight, y.scatter(-1, index, 0.0).sum(-1)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("cells", [1 << 6, 1 << 20])
def test_nearest_is_the_softmax_of_all(similarity, cells, monkeypatch):
    monkeypatch.setattr("exptilt.memory.patterns._TILE_CELLS", cells)
    x, s = drawn(90, 5), drawn(4, 5, seed=1)
    for memory in (Hopfield(x, 1.3, similarity=similarity), grown(x, similarity)):
        for k in (1, 7, 90):
            index, weight, rest = top(x, s, 1.3, k, similarity)
            found = memory.nearest(s, k)
            assert torch.equal(found.index, index)
            assert torch.allclose(found.weight, weight, rtol=1e-11, atol=0)
            assert torch.allclose(found.left_out, rest, rtol=1e-11, atol=1e-300)
        one = memory.nearest(s[2], 3)
        assert torch.equal(one.index, memory.nearest(s, 3).index[2])
        assert one.left_out.shape == ()


def test_a_tiny_rest_keeps_its_digits():
    """1 − Σ weight would be 0: the rest is summed by itself."""
    x = 6 * torch.eye(5, dtype=torch.float32)
    found = Hopfield(x, 1.0).nearest(x[0], 1)
    assert float(found.left_out) == pytest.approx(4 * np.exp(-36.0) / (1 + 4 * np.exp(-36.0)), rel=1e-5)


def test_nearest_of_heads_and_its_derivatives():
    x, s = drawn(2, 9, 3), drawn(3, 2, 4, 3, seed=1)
    beta = torch.tensor([0.5, 2.0], dtype=F64)
    found = Hopfield(x, beta, similarity="euclidean").nearest(s, 2)
    for h in range(2):
        index, weight, rest = top(x[h], s[:, h].reshape(-1, 3), beta[h], 2, "euclidean")
        assert torch.equal(found.index[:, h].reshape(-1, 2), index)
        assert torch.allclose(found.weight[:, h].reshape(-1, 2), weight)
        assert torch.allclose(found.left_out[:, h].reshape(-1), rest)

    def weights(x, beta, s):
        found = Hopfield(x, beta, similarity="euclidean").nearest(s, 2)
        return found.weight, found.left_out

    inputs = (x, beta, s[0])
    assert gradcheck(weights, [z.clone().requires_grad_() for z in inputs])


def grown(x, similarity="dot", values=None, **options):
    """The same memory, appended in pieces of many sizes."""
    ends = [0, 3, 4, 5, 20, 21, 50, len(x)]
    pieces = [slice(a, b) for a, b in pairwise(ends)]
    first, *others = pieces
    memory = Hopfield(
        x[first], 1.3, similarity=similarity, values=None if values is None else values[first], **options
    )
    for piece in others:
        memory = memory.append(x[piece], None if values is None else values[piece])
    return memory


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("separation", ["softmax", "sparsemax", "max"])
def test_a_memory_that_grew_is_the_memory(similarity, separation, tmp_path):
    x, s, v = drawn(90, 5), drawn(12, 5, seed=1), drawn(90, 2, seed=2)
    whole = Hopfield(x, 1.3, similarity=similarity, separation=separation, values=v)
    parts = grown(x, similarity, v, separation=separation)
    parts.save(tmp_path / "m")
    for other in (parts, Hopfield.load(tmp_path / "m", mapped=True), pickle.loads(pickle.dumps(parts))):
        assert torch.allclose(other.step(s), whole.step(s), atol=1e-12)
        assert torch.allclose(other.energy(s), whole.energy(s), atol=1e-12)
        assert torch.allclose(other.read(s), whole.read(s), atol=1e-12)
        ends, expected = (m.retrieve(s, throw=False, max_steps=9).value for m in (other, whole))
        assert torch.allclose(ends, expected, atol=1e-10)
        assert torch.allclose(other.separation(), whole.separation(), atol=1e-12)
        assert torch.equal(other.patterns, x)
        assert torch.equal(other.values, v)
    assert torch.equal(parts.remove([0, 89]).patterns, x[1:-1])
    assert torch.equal(parts.remove([0, 89]).values, v[1:-1])


def test_separation_of_each_pattern():
    x = drawn(70, 5)
    for similarity in SIMILARITIES:
        found = Hopfield(x, similarity=similarity).separation()
        assert torch.allclose(found, oracle.separation(x, similarity), atol=1e-12)
    assert Hopfield(x[:1]).separation().tolist() == [np.inf]
    heads = Hopfield(torch.stack([x, 2 * x])).separation()
    assert torch.allclose(heads[1], 4 * heads[0])


def test_equal_patterns_are_allowed_and_count_together():
    x = drawn(6, 3)
    twice, once = Hopfield(torch.cat([x, x])), Hopfield(x)
    assert torch.allclose(twice.step(x), once.step(x), atol=1e-12)
    assert Hopfield(torch.cat([x, x]), similarity="euclidean").separation().abs().max() < 1e-12


def test_two_memories_that_grow_from_one_stay_apart():
    x = drawn(40, 3)
    base = Hopfield(x[:20]).append(x[20])
    left, right = base.append(x[21]), base.append(x[22])
    further = left.append(x[23])
    assert torch.equal(base.patterns, x[:21])
    assert torch.equal(left.patterns, x[:22])
    assert torch.equal(right.patterns, x[[*range(21), 22]])
    assert torch.equal(further.patterns, x[[*range(22), 23]])
    for memory in (base, left, right, further):
        assert torch.allclose(memory.step(x[30:]), oracle.step(memory.patterns, x[30:], 1.0), atol=1e-12)


def test_appended_patterns_are_learnt():
    x, s = drawn(6, 3), drawn(2, 3, seed=1)

    def step(a, b):
        return Hopfield(a, 0.7).append(b).step(s)

    assert gradcheck(step, (x[:4].clone().requires_grad_(), x[4:].clone().requires_grad_()))


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("separation", ["softmax", "sparsemax", "entmax", "max", "polynomial"])
def test_values_are_read_with_the_weights_of_their_patterns(similarity, separation):
    if (similarity, separation) == ("euclidean", "polynomial"):
        return
    x, s, v = drawn(30, 4), drawn(6, 4, seed=1), drawn(30, 3, seed=2)
    y = oracle.weights(oracle.scores(x, s, similarity), 0.8, separation)
    y = y / y.sum(-1, keepdim=True)  # reading is averaging, whatever the weights of a step sum to
    memory = Hopfield(x, 0.8, similarity=similarity, separation=separation, values=v)
    assert torch.allclose(memory.read(s), y @ v, atol=1e-9)
    same = Hopfield(x, 0.8, similarity=similarity, separation=separation, values=torch.full_like(v, 7.0))
    assert torch.allclose(same.read(s), torch.tensor(7.0, dtype=v.dtype), atol=1e-9)
    assert torch.allclose(memory.step(s), oracle.step(x, s, 0.8, similarity, separation), atol=1e-9)
    leaf = v.clone().requires_grad_()
    Hopfield(x, 0.8, similarity=similarity, separation=separation, values=leaf).read(s).sum().backward()
    assert torch.allclose(leaf.grad, y.sum(0)[:, None].expand(-1, 3), atol=1e-9)


def test_a_polynomial_memory_reads_nothing_where_no_score_is_positive():
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    memory = Hopfield(x, separation="polynomial", values=torch.tensor([[3.0], [5.0]]))
    assert memory.read(torch.tensor([[-1.0, -2.0], [0.0, 2.0]])).tolist() == [[0.0], [5.0]]


def test_values_of_any_kind_are_found():
    x, s = drawn(20, 4, dtype=torch.float32), drawn(3, 4, seed=1, dtype=torch.float32)
    labels = torch.arange(2**40, 2**40 + 20)[:, None]
    memory = Hopfield(x, 1.0, values=labels).append(x[0], labels[0])
    found = memory.nearest(s, 2)
    assert torch.equal(found.values, memory.values[found.index])
    with pytest.raises(ArgumentError, match=r"torch\.int64, which have no mean"):
        memory.read(s)
    with pytest.raises(ArgumentError, match="holds no values"):
        Hopfield(x).read(s)
    with pytest.raises(ArgumentError, match="one row for each pattern"):
        Hopfield(x, values=labels[:3])
    with pytest.raises(ArgumentError, match="Only their number"):
        memory.append(x[0])
    with pytest.raises(ArgumentError, match="Only their number"):
        Hopfield(x).append(x[0], labels[0])
    half = Hopfield(x.half(), 1.0, values=x[:, :2].bfloat16())
    expected = torch.softmax(s @ x.half().float().T, -1) @ x[:, :2].bfloat16().float()
    assert torch.allclose(half.read(s), expected, atol=1e-5)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m, s: m.step(s),
        lambda m, s: m.step(s.repeat(20, 1)),
        lambda m, s: m.energy(s),
        lambda m, s: m.retrieve(s),
        lambda m, s: m.nearest(s, 1),
        lambda m, s: m.separation(),
        lambda m, s: m.save("never"),
    ],
)
def test_a_memory_whose_patterns_were_edited_refuses(ask):
    x, s = drawn(10, 3), drawn(2, 3, seed=1)
    for similarity in SIMILARITIES:
        memory = Hopfield(x, 4.0, similarity=similarity)
        ask(memory, s) if "save" not in ask.__code__.co_names else None
        x[3] *= 2
        with pytest.raises(ArgumentError, match="changed in place after"):
            ask(memory, s)


def test_an_optimizer_s_step_is_an_edit():
    x = torch.nn.Parameter(drawn(5, 3))
    memory, optimizer = Hopfield(x, 1.0), torch.optim.SGD([x], lr=0.1)
    memory.energy(drawn(2, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ArgumentError, match="changed in place after"):
        memory.step(drawn(2, 3))
    assert Hopfield(x, 1.0).step(drawn(2, 3)).isfinite().all()


def test_arrays_that_may_be_written_to_are_copied():
    array, s = drawn(8, 3).numpy(), drawn(2, 3, seed=1)
    memory = Hopfield(array, 2.0, similarity="euclidean")
    before = memory.step(s), memory.energy(s)
    array *= 3
    assert torch.equal(memory.step(s), before[0])
    assert torch.equal(memory.energy(s), before[1])
    array.flags.writeable = False
    assert Hopfield(array).patterns.data_ptr() == array.__array_interface__["data"][0]
    with torch.inference_mode():
        made = Hopfield(drawn(5, 3), 1.0)
        assert made.step(s).isfinite().all()


@pytest.mark.slow
def test_a_memory_made_outside_is_compiled_and_mapped_over():
    x, s = drawn(10, 3), drawn(4, 3, seed=1)
    for similarity in SIMILARITIES:
        memory = Hopfield(x, 2.0, similarity=similarity).append(x[:1])
        for ask in (memory.step, memory.energy):
            whole = torch.compile(ask, fullgraph=True, backend="aot_eager")
            assert torch.allclose(whole(s), ask(s), atol=1e-12)
            assert torch.allclose(torch.func.vmap(ask)(s[:, None])[:, 0], ask(s), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "folder", "old"),
    [
        (lambda: Hopfield(torch.eye(3)), "exptilt.memory.hopfield", "exptilt.memory.hopfield"),
        (
            lambda: ClassicalHopfield.hebbian(torch.ones(1, 3)),
            "exptilt.memory.binary.classical",
            "exptilt.memory.classical",
        ),
        (
            lambda: RestrictedBoltzmann.random(2, 2),
            "exptilt.memory.binary.boltzmann",
            "exptilt.memory.boltzmann",
        ),
    ],
)
def test_old_module_names_are_read(make, folder, old):
    thing = make()
    now = pickle.dumps(thing, protocol=0)
    assert folder.encode() in now
    assert type(pickle.loads(now.replace(folder.encode(), old.encode()))) is type(thing)


def test_layers_pickled_before_they_had_norms_and_dropout():
    layer, x = HopfieldLayer(4), torch.randn(2, 4)
    expected = layer(x, x)
    for name in ("normalize", "dropout"):
        del vars(layer)[name]
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, x), expected)
