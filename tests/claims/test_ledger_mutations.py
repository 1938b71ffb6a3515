"""Every claim would notice: flip a sign or swap an argument in the thing claimed, and its verdict changes."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from claims.verdicts import SETTINGS, VERDICTS
from exptilt import claims
from exptilt.claims import contrastive, duality, equilibrium, exponential_family, filters, memory, mixing
from exptilt.claims.experiments import repelling, theorem_one
from exptilt.claims.models import crossing, questions, subjects, trained
from exptilt.claims.others import posterior, statistics
from exptilt.dynamics import flow
from exptilt.switching import OnlineState


def negated(place):
    """A function of −x, of the argument at this place."""

    def change(function):
        return lambda *a, **o: function(*a[:place], -a[place], *a[place + 1 :], **o)

    return change


def minus(function):
    def turned_round(*arguments, **options):
        found = function(*arguments, **options)
        return tuple(-x for x in found) if isinstance(found, tuple) else -found

    return turned_round


def swapped(function):
    return lambda a, b, *rest, **options: function(b, a, *rest, **options)


def method(name, change):
    """A class whose method is changed."""
    return lambda cls: type(cls.__name__, (cls,), {name: change(getattr(cls, name))})


def downhill(slope):
    def down(*arguments, **options):
        found = slope(*arguments, **options)
        return found._replace(gradient=-found.gradient)

    return down


def turned(cls):
    """A switching model that reads its transition the wrong way round."""

    def made(*, transition, **rest):
        across = np.asarray(transition).T
        return cls(transition=across / across.sum(-1, keepdims=True), **rest)

    return made


def weights(change):
    """Models whose trained weights are changed before they are measured; the control stays."""

    def of(load):
        def other(model, kind, seed):
            net, *rest = load(model, kind, seed)
            if kind == "trained":
                with torch.no_grad():
                    change(net)
            return net, *rest

        return other

    return of


def ties(net):
    """An MLP whose neurons write what they read, and heads that write along the gradient of their G."""
    for block in net.transformer.h:
        block.mlp.c_proj.weight.copy_(block.mlp.c_fc.weight.mT)
        q, k, _ = block.attn.c_attn.weight.split(128, 1)
        block.attn.c_attn.weight[:, 256:] = k
        block.attn.c_proj.weight.copy_(q.mT)


def silent(net):
    """Attention that writes nothing."""
    for block in net.transformer.h:
        block.attn.c_proj.weight *= 0
        block.attn.c_proj.bias *= 0


def self_only(net):
    """Heads whose scores are large for the token itself: weights next to the identity matrix."""
    for block in net.transformer.h:
        block.attn.c_attn.weight[:, 128:256] = block.attn.c_attn.weight[:, :128]
        block.attn.c_attn.weight[:, :256] *= 6
        block.attn.c_attn.bias[:256] = 0


def two_temperatures(check):
    """The Boltzmann machine at one temperature, the network at another."""
    return lambda x, s, beta: check(x, s, beta=beta)._replace(right=check(x, s, beta=2 * beta).right)


def doubled(smc):
    """The joint law with couplings twice as strong."""
    return lambda joint, **o: smc(replace(joint, coupling={k: 2 * J for k, J in joint.coupling.items()}), **o)


def exchanged(load):
    """The trained model for the control, and the control for the trained model."""
    return lambda model, kind, seed: load(model, {"trained": "random"}.get(kind, "trained"), seed)


def as_before(net):
    """A model that training did not change."""
    net.load_state_dict(subjects._load("shakespeare", "0", 0)[0].state_dict())


def forgetful(load):
    """An encoder–decoder whose cross-attention is as it was before training."""

    def other(**options):
        net, begun = load(**options), load(before=True)
        for one, two in zip(net.body.decoder.layers, begun.body.decoder.layers, strict=True):
            one.multihead_attn.load_state_dict(two.multihead_attn.state_dict())
        return net

    return other


def untrained(models):
    """The model before training in place of the trained one."""
    return lambda: (models()[1], *models()[1:])


def gaussian_ends(sweep):
    """Trajectories that end as they begin, but for a kurtosis near a Gaussian's."""

    def ends(path):
        effective, kurtosis = path.clusters.effective, path.gaussianity.kurtosis
        nearer = kurtosis[:1] * torch.linspace(1, 0.1, len(kurtosis))[:, None]
        clusters = SimpleNamespace(count=path.clusters.count, effective=effective[:1].expand_as(effective))
        return SimpleNamespace(
            steps=path.steps, clusters=clusters, gaussianity=SimpleNamespace(kurtosis=nearer)
        )

    def found(**options):
        return tuple(replace(one, path=ends(one.path)) for one in sweep(**options))

    return found


def polynomial(capacity):
    """As many patterns as dimensions: growth by a power."""

    def found(*arguments, **options):
        done = capacity(*arguments, **options)
        count = torch.tensor(done.dimensions)[:, None].expand_as(done.count)
        return replace(done, count=count, limited=torch.zeros_like(count, dtype=torch.bool))

    return found


MUTATIONS = {
    "A1": (exponential_family, "attend", negated(0)),
    "A2": (exponential_family, "fisher_vector_product", minus),
    "A3": (exponential_family, "Gamma", method("tilt", negated(1))),
    "A4": (exponential_family, "Gaussian", method("mean", negated(1))),
    "A5": (exponential_family, "GaussianMixture", method("mean", negated(1))),
    "A6": (exponential_family, "FromDensity", method("log_normalizer", negated(1))),
    "A7": (exponential_family, "attend", swapped),
    "A8": (duality, "attend", negated(0)),
    "A9": (duality, "Empirical", method("conjugate", minus)),
    "A10": (duality, "kl", swapped),
    "A11": (duality, "maximum_entropy", negated(1)),
    "A12": (duality, "Empirical", method("log_normalizer", negated(1))),
    "A13": (duality, "Empirical", method("log_normalizer", negated(1))),
    "A14": (duality, "Empirical", method("mean", negated(1))),
    "A15": (subjects, "_load", exchanged),
    "B1": (flow, "slope", downhill),
    "B2": (flow, "slope", downhill),
    "B3": (flow, "slope", downhill),
    "B4": (theorem_one, "Whiten", negated(0)),
    "B5a": (equilibrium, "equilibrium_sweep", gaussian_ends),
    "B5b": (repelling, "Flow", lambda cls: lambda kind, beta: cls(kind, beta=2 * beta)),
    "B7": (flow, "slope", downhill),
    "B6": (equilibrium, "monotone_operator", lambda f: lambda g, x: f(lambda s: 9 * s - g(s), x)),
    "C1": (memory, "Hopfield", method("energy", minus)),
    "C2": (memory, "storage_capacity", polynomial),
    "C3": (memory, "Hopfield", method("step", negated(1))),
    "C4": (memory, "boltzmann_check", two_temperatures),
    "C6": (memory, "Empirical", method("mean", minus)),
    "C5": (subjects, "_load", weights(ties)),
    "D1": (contrastive, "attend", negated(0)),
    "E1": (filters, "SwitchingLinearGaussian", turned),
    "E10": (subjects, "_load", weights(self_only)),
    "E2": (filters, "SwitchingLinearGaussian", turned),
    "E3": (filters, "LinearDynamics", lambda cls: lambda W, Q: cls(2 * W, Q)),
    "E4": (filters, "SwitchingLinearGaussian", turned),
    "E5": (mixing, "attend", swapped),
    "E6": (mixing, "propagate", negated(2)),
    "E7": (subjects, "_load", weights(as_before)),
    "E8": (mixing, "_natural", minus),
    "E9": (mixing, "smc", doubled),
    "F1": (subjects, "_load", weights(as_before)),
    "F2": (subjects, "_load", exchanged),
    "F3": (subjects, "_load", weights(ties)),
    "F4": (trained, "_above", minus),
    "F5": (trained, "_over", minus),
    "F6": (subjects, "_load", weights(silent)),
    "F7": (subjects, "_load", weights(as_before)),
    "G1": (mixing, "attend", swapped),
}


FURTHER = [
    ("C3", crossing, "load", forgetful),
    ("E4", OnlineState, "laws_updated", lambda _: 4),
    ("F7", subjects, "_left_by_neighbours", lambda f: lambda x: 1 / f(x)),
    ("H7", posterior, "SwitchingLinearGaussian", turned),
    ("H7", posterior, "models", untrained),
    ("H5", statistics, "score_skewness", minus),
]  # other parts of the same claims
LONG = (
    "A15",
    "B4",
    "B6",
    "C2",
    "C3",
    "C5",
    "E7",
    "E10",
    "F1",
    "F2",
    "F3",
    "F6",
    "F7",
)  # more than a few seconds each


def test_every_claim_has_a_mutation():
    assert sorted(MUTATIONS) == sorted(claim.id for claim in claims.every()) == sorted(VERDICTS)


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=pytest.mark.slow if id in LONG else ()) for id in sorted(MUTATIONS)]
)
def test_the_verdict_changes(id, monkeypatch):
    verdict_changes(id, *MUTATIONS[id], monkeypatch)


@pytest.mark.parametrize(
    ("id", "module", "name", "change"),
    [pytest.param(*one, marks=pytest.mark.slow if one[0] in LONG else ()) for one in FURTHER],
)
def test_the_verdict_changes_further(id, module, name, change, monkeypatch):
    verdict_changes(id, module, name, change, monkeypatch)


def verdict_changes(id, module, name, change, monkeypatch):
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    forget()  # a changed model must be measured anew, and not be kept
    found = claims.find(id).run(SETTINGS.get(id), seeds=1)
    monkeypatch.undo()
    forget()
    assert found.verdict.value != VERDICTS.get(id, "measured: holds"), found.reason


def forget():
    for kept in (subjects.profile, subjects.over_training, crossing.measured):
        kept.cache_clear()


@pytest.mark.slow
def test_what_training_does_is_read_off_the_model(monkeypatch):
    """Heads that write along the gradient of their G at the end of training, and only those, are noticed."""

    def aligned():
        forget()
        return next(c for c in questions._alignment_over_training("shakespeare", 256, 0)).passed

    assert not aligned()
    monkeypatch.setattr(subjects, "_load", weights(ties)(subjects._load))
    assert aligned()
    monkeypatch.undo()
    forget()


def test_sensitivity_is_that_of_the_model(monkeypatch):
    """Query and key matrices do nothing where values are the same at all places, which noise must tell."""
    path = Path(__file__).parents[2] / "examples" / "train_without_weights.py"
    training = SimpleNamespace(**runpy.run_path(str(path)))
    text = torch.arange(5).repeat(65)
    monkeypatch.setitem(training.begin.__globals__, "corpus", lambda: (text, text, text, 5))
    w = training.begin(training.FULL, 0)
    rises = training.sensitivity(w, training.begin(training.FULL, 1), text, 0)
    assert min(abs(rises["noise"][kind]) for kind in training.KINDS) > 1e-4
    silent = w | {f"{n}.o": 0 * w[f"{n}.o"] for n in range(training.LAYERS)}
    rises = training.sensitivity(silent, training.begin(training.FULL, 1), text, 0)
    assert max(abs(rises[way][kind]) for way in rises for kind in "qkv") == 0
    assert abs(rises["noise"]["up"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("id", sorted(MUTATIONS))
def test_three_other_seeds_the_same_verdict(id):
    claim = claims.find(id)
    assert claim.run(SETTINGS.get(id), seed=100, seeds=min(3, claim.seeds)).verdict.value == VERDICTS[id]
