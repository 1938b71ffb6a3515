"""A memory as a store of vectors: the nearest and their weights, values, growth, indexes, edits in place."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from exptilt._support.errors import ArgumentError
from exptilt.memory import ClassicalHopfield, Hopfield, HopfieldLayer, RestrictedBoltzmann, patterns
from exptilt.memory.nearest import SearchIndex
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
            assert found.exact
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
def test_a_memory_in_blocks_is_the_memory(similarity, separation, tmp_path, monkeypatch):
    monkeypatch.setattr(patterns, "_LEAST_BLOCK", 0)
    x, s, v = drawn(90, 5), drawn(12, 5, seed=1), drawn(90, 2, seed=2)
    whole = Hopfield(x, 1.3, similarity=similarity, separation=separation, values=v)
    parts = grown(x, similarity, v, separation=separation)
    assert len(parts.blocks) > 2
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
        assert other.duplicates() == []
    assert torch.equal(parts.remove([0, 89]).patterns, x[1:-1])
    assert torch.equal(parts.remove([0, 89]).values, v[1:-1])
    assert grown(torch.cat([x, x[:2]])).duplicates() == [[0, 90], [1, 91]]


def test_append_leaves_the_first_patterns_where_they_are(tmp_path):
    x = drawn(500, 4, dtype=torch.float32)
    Hopfield(x, 1.0).save(tmp_path / "m")
    mapped = Hopfield.load(tmp_path / "m", mapped=True)
    memory = mapped
    for k in range(300):
        memory = memory.append(x[k])
    assert memory.blocks[0] is mapped.blocks[0]  # still in its file
    assert len(memory.blocks) <= 3
    assert memory.count == 800
    assert torch.equal(memory.patterns, torch.cat([x, x[:300]]))
    twice = memory.append(torch.cat([x, x]))
    assert torch.equal(twice.patterns, torch.cat([x, x[:300], x, x]))


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
    later = Hopfield(x, 4.0).append(drawn(1, 3, seed=5))
    x.view(-1)[0] += 1
    with pytest.raises(ArgumentError, match="changed in place after"):
        ask(later, s)


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


class Fake:
    """An index that returns what it is told to."""

    def __init__(self, memory, places):
        self.ntotal, self.places = memory.count, places

    def search(self, query, k):
        return None, self.places


def told(memory, places, exhaustive=False):
    search = SearchIndex.__new__(SearchIndex)
    vars(search).update(
        similarity=memory.similarity, faiss=Fake(memory, places.numpy()), exhaustive=exhaustive
    )
    return search


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_what_an_index_leaves_out_is_bounded(similarity):
    """Candidates of any quality: each weighs at least, and all others at most, what is said."""
    x, s = drawn(60, 4), drawn(9, 4, seed=1)
    for beta in (0.01, 1.0, 30.0):
        memory = Hopfield(x, beta, similarity=similarity, values=x[:, :1])
        y = torch.softmax(beta * oracle.scores(x, s, similarity), -1)
        best = y.topk(5, -1).indices
        poor = torch.stack(
            [torch.randperm(60, generator=torch.Generator().manual_seed(i))[:5] for i in range(9)]
        )
        poor[0, 3:] = -1
        for places, exhaustive in ((best, True), (best, False), (poor, False)):
            search = told(memory, places, exhaustive)
            found = memory.nearest(s, 5, search=search)
            there = found.index >= 0
            true = torch.where(there, y.gather(-1, found.index.clamp_min(0)), 0.0)
            assert not found.exact
            assert (found.weight <= true * (1 + 1e-12)).all()
            assert (found.left_out >= (1 - true.sum(-1)) * (1 - 1e-9) - 1e-15).all()
            assert torch.allclose(found.weight.sum(-1) + found.left_out, torch.ones(9, dtype=F64))
            among = found.weight / found.weight.sum(-1, keepdim=True)
            assert torch.allclose(
                among, true / true.sum(-1, keepdim=True), rtol=1e-9
            )  # exact among themselves
            if exhaustive and beta == 30.0 and similarity == "dot":
                assert found.left_out.median() < 1e-2
            exact = memory.nearest(s, 5, search=search, exact=True)
            assert exact.exact
            assert torch.allclose(exact.weight, true, rtol=1e-9, atol=0)
            assert torch.allclose(exact.left_out, y.sum(-1) - true.sum(-1), rtol=1e-6, atol=1e-14)
            assert torch.equal(exact.values[there], x[:, :1][exact.index[there]])


def test_an_index_that_misses_everything_says_so():
    """Scores beyond those found by more than e^x can hold: what is left out is all."""
    x = torch.tensor([[1.0, 0.0], [1000.0, 0.0]])
    memory = Hopfield(x, 1.0)
    found = memory.nearest(
        torch.tensor([[1.0, 0.0]]), 1, search=told(memory, torch.tensor([[0]])), exact=True
    )
    assert found.left_out.tolist() == [1.0]
    assert found.weight.tolist() == [[0.0]]


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_faiss(similarity):
    pytest.importorskip("faiss", reason="the extra `faiss` is not installed")
    x = drawn(3000, 16, dtype=torch.float32)
    s = x[:20] + 0.3 * drawn(20, 16, seed=1, dtype=torch.float32)
    memory = Hopfield(x, 1.0, similarity=similarity)
    y = torch.softmax(oracle.scores(x, s, similarity), -1)
    swept = memory.nearest(s, 8)
    for kind in ("Flat", "HNSW16", "IVF16,Flat"):
        search = memory.search_index(kind)
        found = memory.nearest(s, 8, search=search)
        true = y.gather(-1, found.index)
        assert search.exhaustive == (kind == "Flat")
        assert (found.weight <= true * (1 + 1e-4)).all()
        assert (found.left_out >= (1 - true.sum(-1)) * (1 - 1e-4) - 1e-6).all()
        exact = memory.nearest(s, 8, search=search, exact=True)
        assert torch.allclose(exact.weight.double(), y.gather(-1, exact.index), rtol=1e-3, atol=1e-9)
        if kind == "Flat":
            assert torch.equal(found.index, swept.index)
            if similarity != "cosine":
                assert found.left_out.median() < 1
        more = memory.append(s[:3])
        with pytest.raises(ArgumentError, match=r"search\.update"):
            more.nearest(s, 8, search=search)
        search.update(more)
        assert search.count == 3003
        assert more.nearest(s[:1], 1, search=search).index.tolist() == [[3000]] or kind != "Flat"
    with pytest.raises(ArgumentError, match="knows no kind"):
        memory.search_index("Flatt")


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
        (
            lambda: Hopfield(torch.eye(3), 9.0).capacity(),
            "exptilt.memory.landscape.recall",
            "exptilt.memory.recall",
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
