"""What is refused, and how it is said."""

import numpy as np
import pytest
import torch

from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.claims.experiments.capacity import storage_capacity
from exptilt.claims.experiments.cliff import classical_cliff
from exptilt.claims.experiments.equivalence import boltzmann_check, linear_attention_check
from exptilt.memory import (
    ClassicalHopfield,
    Entmax,
    Hopfield,
    HopfieldLayer,
    HopfieldPooling,
    Polynomial,
    RestrictedBoltzmann,
    hopfield_attention,
    storage_bound,
    train_boltzmann,
)
from exptilt.memory.theory import separation_needed

X = torch.eye(4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Hopfield(torch.zeros(0, 4)), "nothing is stored"),
        (lambda: Hopfield(torch.zeros(4)), r"\(\.\.\., N, D\)"),
        (lambda: Hopfield([[1.0]]), "list"),
        (lambda: Hopfield(np.zeros((2, 2), int)), "patterns.float"),
        (lambda: Hopfield(torch.tensor([[1.0], [torch.nan]])), r"patterns\[1\] holds NaN"),
        (lambda: Hopfield(torch.tensor([[torch.inf]])), "infinity"),
        (lambda: Hopfield(X, 0.0), "> 0"),
        (lambda: Hopfield(X, -1.0), "> 0"),
        (lambda: Hopfield(X, torch.nan), "> 0"),
        (lambda: Hopfield(X, "1"), "beta is '1'"),
        (lambda: Hopfield(X, torch.ones(3)), "one beta a memory"),
        (lambda: Hopfield(X, similarity="manhattan"), "dot, cosine, euclidean"),
        (lambda: Hopfield(X, separation="softmin"), "softmax, sparsemax"),
        (lambda: Hopfield(X, similarity="euclidean", separation="polynomial"), "no score is positive"),
        (lambda: Hopfield(torch.zeros(2, 3), similarity="cosine"), "no direction"),
        (lambda: Hopfield(X, similarity="cosine").step(torch.zeros(4)), "no direction"),
        (lambda: Hopfield(X).step(torch.tensor([1.0, torch.nan, 0.0, 0.0])), "NaN"),
        (lambda: Hopfield(X).energy(torch.full((2, 4), torch.inf)), "infinity"),
        (lambda: Hopfield(X).retrieve(torch.full((4,), torch.nan)), "NaN"),
        (lambda: Hopfield(X).step(torch.ones(5)), "dimension 4"),
        (lambda: Hopfield(X).step(torch.ones(4, dtype=torch.float64)), "state.to"),
        (lambda: Hopfield(X).step([1.0]), "list"),
        (lambda: Hopfield(X[None]).step(torch.ones(4)), "leading axes"),
        (lambda: Hopfield(X).retrieve(X, max_steps=0), "max_steps"),
        (lambda: Hopfield(X).retrieve(X, tolerance=0.0), "tolerance"),
        (lambda: Hopfield(X).add(torch.ones(5)), "Only their number"),
        (lambda: Hopfield(X).remove(9), "4 patterns"),
        (lambda: Hopfield(X).remove([0, 1, 2, 3]), "nothing is stored"),
        (lambda: Hopfield(X).separation(index=[7]), "4 patterns"),
        (lambda: Hopfield(X[None]).basin(), "one memory at a time"),
        (lambda: Hopfield(X[None]).capacity(), "one memory at a time"),
        (lambda: Hopfield(X[None]).metastable(), "one memory at a time"),
        (lambda: Hopfield(X).basin(directions=0), "directions"),
        (lambda: Hopfield(X).capacity(trials=0), "trials"),
        (lambda: Hopfield(X).metastable(share=0.0), "share"),
        (lambda: Hopfield(X).metastable(torch.ones(4)), r"\(S, 4\)"),
        (lambda: Hopfield(X).metastable(torch.ones(2, 3)), "dimension 4"),
        (lambda: Hopfield(X).metastable(torch.full((2, 4), torch.nan)), "NaN"),
        (lambda: Hopfield(X).metastable(torch.ones(2, 4, dtype=torch.int64)), "state.to"),
        (lambda: Hopfield(X).metastable([[1.0] * 4]), "list"),
        (lambda: Hopfield(X).remove("a"), "index is 'a'. Pass integers"),
        (lambda: Hopfield(X).remove(slice(0, 2)), "Pass integers"),
        (lambda: Hopfield(X).remove(None), "index is None"),
        (lambda: Hopfield(X).remove(True), "4 booleans"),
        (lambda: Hopfield(X).remove(torch.ones(3, dtype=torch.bool)), "4 booleans"),
        (lambda: Hopfield(X).basin(directions=2.5), "directions is 2.5"),
        (lambda: Hopfield(X).basin(precision=0.0), "precision"),
        (lambda: Hopfield(X).metastable(count=2.5), "count"),
        (lambda: Hopfield(X).capacity(trials=1.5), "trials"),
        (lambda: Hopfield(X).capacity(max_steps=0), "max_steps"),
        (lambda: Hopfield(X).capacity(max_steps=2.5), "max_steps"),
        (lambda: Hopfield(X).capacity(noise=-1.0), "noise"),
        (lambda: Hopfield(X).capacity(noise=torch.nan), "noise"),
        (lambda: Hopfield(X).capacity(noise=torch.inf), "noise"),
        (lambda: Hopfield(X).capacity(within=torch.nan), "within"),
        (lambda: Hopfield(X, 1e-300), "0 or infinity in torch.float32. Pass patterns in float64"),
        (lambda: Hopfield(X, 1e300), "0 or infinity in torch.float32"),
        (lambda: Hopfield(X, np.float32(-1.0)), "> 0"),
        (lambda: Hopfield(X).save("/"), "is a folder"),
        (lambda: Entmax(1.0), "softmax"),
        (lambda: Entmax(2.5), "alpha"),
        (lambda: Polynomial(1), ">= 2"),
        (lambda: HopfieldLayer(6, heads=4), "multiple"),
        (lambda: HopfieldLayer(4, beta=-1.0), "beta"),
        (lambda: HopfieldLayer(4)(torch.ones(2, 4)), "pass a memory"),
        (lambda: HopfieldLayer(4, stored=3)(torch.ones(2, 4), torch.ones(2, 4)), "memory=None"),
        (lambda: HopfieldPooling(4, queries=0), "queries"),
        (lambda: HopfieldPooling(4, steps=None), "never learn"),
        (lambda: HopfieldPooling(4, steps=0), "HopfieldPooling: steps"),
        (lambda: HopfieldLayer(4, steps=0), "HopfieldLayer: steps"),
        (lambda: HopfieldLayer(4, stored=0), "stored is 0"),
        (lambda: hopfield_attention(X[None], X[None], X[None], -torch.ones(1)), "inverse temperature"),
        (
            lambda: hopfield_attention(X[None], X[None], X[None], torch.tensor([torch.nan])),
            "inverse temperature",
        ),
        (lambda: hopfield_attention(X[None], X[None], X[None], 1.0), "beta is a float"),
        (lambda: hopfield_attention(X[None], X[None], X[None], torch.ones(3)), "one beta a head"),
        (lambda: hopfield_attention(X[None], X[None], X[None], torch.ones(2, 3)), "one beta a head"),
        (lambda: hopfield_attention(X, X, X, torch.ones(1)), r"\(\.\.\., H, Q, D\)"),
        (lambda: HopfieldLayer(4, heads=2, beta=[1.0, 2.0, 3.0]), "2 of them"),
        (lambda: HopfieldLayer(4, heads=2, beta="1"), "beta is '1'"),
        (lambda: HopfieldPooling(4, heads=2, beta=torch.tensor([1.0, -2.0])), "2 of them"),
        (lambda: Hopfield(X).remove([]), "names no pattern"),
        (lambda: Hopfield(X).remove([0.5]), "Pass integers"),
        (lambda: Hopfield(X).separation(index=[]), "separation: index is .*names no pattern"),
        (lambda: Hopfield(X).basin(index=[]), "basin: index is .*names no pattern"),
        (lambda: Hopfield(X).add([1.0] * 4), "list"),
        (lambda: Hopfield(X).add(np.ones(5, "f4")), "Only their number"),
        (lambda: separation_needed(1, beta=1.0, size=1.0), "count is 1. Pass a finite number ≥ 2"),
        (lambda: separation_needed(5, beta=1.0, size=0.0), "size is 0.0. Pass a finite number > 0"),
        (lambda: boltzmann_check(torch.ones(2, 3), torch.ones(4)), "same N"),
        (lambda: linear_attention_check(torch.ones(2, 3), torch.ones(5, 4)), "same N"),
        (lambda: RestrictedBoltzmann.random(2, 3).hidden_mean(torch.ones(3).double()), r"\(\.\.\., 2\)"),
        (lambda: RestrictedBoltzmann.random(2, 3).visible_mean(torch.ones(2).double()), r"\(\.\.\., 3\)"),
        (lambda: hopfield_attention(X[None], X[None], X[None], torch.ones(1), steps=0), "steps"),
        (lambda: storage_bound(1), "dimension"),
        (lambda: storage_bound(20, beta=torch.inf), "finite"),
        (lambda: storage_bound(20, radius=torch.nan), "finite"),
        (lambda: separation_needed(5, beta=torch.inf, size=1.0), "finite"),
        (lambda: storage_capacity([4, 5.5]), "dimension is 5.5"),
        (lambda: classical_cliff(units=10.5), "units"),
        (lambda: classical_cliff([]), "loads"),
        (lambda: storage_capacity([4]), "two or more"),
        (lambda: ClassicalHopfield(torch.ones(2, 2)), "diagonal"),
        (lambda: ClassicalHopfield(torch.ones(2, 3)), r"\(N, N\)"),
        (lambda: ClassicalHopfield.hebbian(torch.zeros(2, 3)), "−1 and"),
        (lambda: ClassicalHopfield.hebbian(torch.ones(0, 3)), "not empty"),
        (lambda: ClassicalHopfield.hebbian(torch.ones(2, 2, 3)), r"\(P, N\)"),
        (lambda: ClassicalHopfield.pseudo_inverse(torch.ones(3)), r"\(P, N\)"),
        (
            lambda: ClassicalHopfield.hebbian(torch.ones(1, 3)).step(torch.ones(3, dtype=torch.bool)),
            "2 \\* bits",
        ),
        (
            lambda: ClassicalHopfield.hebbian(torch.ones(1, 3)).retrieve(torch.ones(3), max_steps=1.5),
            "max_steps",
        ),
        (lambda: ClassicalHopfield.hebbian(torch.ones(1, 3)).energy(torch.ones(4)), "3 units"),
        (
            lambda: ClassicalHopfield.hebbian(torch.ones(1, 3)).retrieve(torch.ones(3), update="both"),
            "asynchronous",
        ),
        (lambda: RestrictedBoltzmann(torch.ones(2, 3), torch.ones(3), torch.ones(3)), r"\(V, H\)"),
        (lambda: RestrictedBoltzmann(np.ones((2, 3)), np.ones(2), np.ones(3)), "ndarray"),
        (
            lambda: RestrictedBoltzmann(torch.ones(2, 3, dtype=torch.int64), torch.ones(2), torch.ones(3)),
            "torch.int64",
        ),
        (lambda: RestrictedBoltzmann(torch.ones(2, 3), torch.ones(2).double(), torch.ones(3)), "one dtype"),
        (
            lambda: RestrictedBoltzmann.random(2, 3).energy(torch.ones(2).double(), torch.ones(2).double()),
            "hidden is",
        ),
        (lambda: RestrictedBoltzmann.random(2, 3).free_energy([1.0, 0.0]), "a list"),
        (lambda: RestrictedBoltzmann.random(2.5, 3), "visible_units"),
        (lambda: train_boltzmann(RestrictedBoltzmann.random(2, 2), [[1.0, 0.0]]), "a list"),
        (lambda: RestrictedBoltzmann.random(2, 2, hidden="poisson"), "gaussian"),
        (
            lambda: RestrictedBoltzmann.random(2, 2).free_energy(torch.tensor([0.5, 1.0]).double()),
            "values 0 and 1",
        ),
        (lambda: RestrictedBoltzmann.random(2, 2).free_energy(torch.ones(3).double()), r"\(\.\.\., 2\)"),
        (lambda: RestrictedBoltzmann.random(30, 30).log_partition(), "2\\^30"),
        (
            lambda: train_boltzmann(
                RestrictedBoltzmann.random(2, 2), torch.ones(3, 2).double(), method="exact"
            ),
            "'cd', 'pcd'",
        ),
        (
            lambda: train_boltzmann(RestrictedBoltzmann.random(2, 2), torch.ones(0, 2).double()),
            "at least one",
        ),
    ],
)
def test_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_layer_that_does_not_settle_says_so():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 4), torch.randn(1, 9, 4)
    with pytest.raises(ConvergenceError):
        hopfield_attention(q, k, k, torch.ones(1), steps=None, max_steps=1)
    assert hopfield_attention(q, k, k, torch.ones(1), steps=None, max_steps=1, throw=False).isfinite().all()


def test_numbers_of_numpy_are_numbers():
    for beta in (np.float32(2.0), np.int64(2), np.array(2.0), torch.tensor(2.0)):
        assert float(Hopfield(X, beta).beta) == 2.0
    assert int(Hopfield(X, np.float64(9.0)).retrieve(X, max_steps=np.int64(50)).steps) < 50
    assert float(Hopfield(X.double(), 1e-300).beta) == 1e-300
