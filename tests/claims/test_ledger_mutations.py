"""Every claim would notice: flip a sign or swap an argument in the thing claimed, and its verdict changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from claims.verdicts import SETTINGS, VERDICTS
from exptilt import claims
from exptilt.claims import contrastive, duality, equilibrium, exponential_family, filters, memory, mixing
from exptilt.claims.experiments import repelling, theorem_one
from exptilt.claims.models import subjects, trained
from exptilt.dynamics import flow
from exptilt.lens.studying import summary


def negated(place):
    """A function of −x, of the argument at this place."""

    def change(function):
        return lambda *a, **o: function(*a[:place], -a[place], *a[place + 1 :], **o)

    return change


def minus(function):
    return lambda *arguments, **options: -function(*arguments, **options)


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


def flattened(net):
    """Scores of all heads, and of the output, next to 0."""
    for block in net.transformer.h:
        block.attn.c_attn.weight[:, :256] *= 0.01
        block.attn.c_attn.bias[:256] *= 0.01
    net.transformer.ln_f.weight *= 0.01
    net.transformer.ln_f.bias *= 0.01


def ties(net):
    """An MLP whose neurons write what they read, and heads that write along the gradient of their G."""
    for block in net.transformer.h:
        block.mlp.c_proj.weight.copy_(block.mlp.c_fc.weight.mT)
        q, k, _ = block.attn.c_attn.weight.split(128, 1)
        block.attn.c_attn.weight[:, 256:] = k
        block.attn.c_proj.weight.copy_(q.mT)


def one_metric(net):
    """Heads with W_q = W_k: symmetric and positive."""
    for block in net.transformer.h:
        block.attn.c_attn.weight[:, 128:256] = block.attn.c_attn.weight[:, :128]


def silent(net):
    """Attention that writes nothing."""
    for block in net.transformer.h:
        block.attn.c_proj.weight *= 0
        block.attn.c_proj.bias *= 0


def calmer(net):
    """Scores of all heads a quarter of what they are."""
    for block in net.transformer.h:
        block.attn.c_attn.weight[:, :128] *= 0.25
        block.attn.c_attn.bias[:128] *= 0.25


def of_normals(cloud):
    """Normal draws in place of hidden states, as many and as wide."""
    return lambda points: cloud(torch.randn(points.shape, generator=torch.Generator().manual_seed(0)))


def self_only(net):
    """Heads whose scores are large for the token itself: weights next to the identity matrix."""
    for block in net.transformer.h:
        block.attn.c_attn.weight[:, 128:256] = block.attn.c_attn.weight[:, :128]
        block.attn.c_attn.weight[:, :256] *= 6
        block.attn.c_attn.bias[:256] = 0


def two_temperatures(check):
    """The Boltzmann machine at one temperature, the network at another."""
    return lambda x, s, beta: replace(check(x, s, beta=beta), right=check(x, s, beta=2 * beta).right)


def doubled(smc):
    """The joint law with couplings twice as strong."""
    return lambda joint, **o: smc(replace(joint, coupling={k: 2 * J for k, J in joint.coupling.items()}), **o)


def exchanged(results):
    """The full model's runs and those without any weights, exchanged."""
    other = {"qk+vo+mlp": "none", "none": "qk+vo+mlp"}

    def found(full):
        data = results(full)
        runs = [one | {"run": other.get(one["run"], one["run"])} for one in data["runs"]]
        return data | {"runs": runs}

    return found


def turned_over(results):
    """Rises of the loss for query and key matrices a hundredth of what they are, and so least of all."""

    def found(full):
        data, less = results(full), {"q": 0.01, "k": 0.01}
        runs = [
            one
            | {
                way: {kind: rise * less.get(kind, 1) for kind, rise in one[way].items()}
                for way in ("noise", "set back")
                if way in one
            }
            | ({"test": one["test"] - 9} if one["run"] == "qk as drawn" else {})
            for one in data["runs"]
        ]
        return data | {"runs": runs}

    return found


def gaussian_ends(sweep):
    """Trajectories that end as they begin, but for a kurtosis near a Gaussian's."""

    def found(**options):
        done = sweep(**options)
        ends = [
            replace(
                one,
                effective=one.effective[:1].expand_as(one.effective),
                kurtosis=one.kurtosis[:1] * torch.linspace(1, 0.1, len(one.kurtosis))[:, None],
            )
            for one in done.settings
        ]
        return replace(done, settings=tuple(ends))

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
    "A13": (duality, "unnormalized_kl", swapped),
    "A14": (duality, "measure_of_members", negated(1)),
    "A15": (subjects, "_load", weights(flattened)),
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
    "C5": (subjects, "_load", weights(ties)),
    "D1": (contrastive, "attend", negated(0)),
    "E1": (filters, "SwitchingLinearGaussian", turned),
    "E10": (subjects, "_load", weights(self_only)),
    "E2": (filters, "SwitchingLinearGaussian", turned),
    "E3": (filters, "LinearDynamics", lambda cls: lambda W, Q: cls(2 * W, Q)),
    "E4": (filters, "SwitchingLinearGaussian", turned),
    "E5": (mixing, "attend", swapped),
    "E6": (mixing, "propagate", negated(2)),
    "E7": (subjects, "_load", weights(one_metric)),
    "E8": (mixing, "_natural", minus),
    "E9": (mixing, "smc", doubled),
    "F1": (summary, "cloud", of_normals),
    "F2": (subjects, "_load", weights(calmer)),
    "F3": (subjects, "_load", weights(ties)),
    "F4": (trained, "results", exchanged),
    "F5": (trained, "results", turned_over),
    "F6": (subjects, "_load", weights(silent)),
    "G1": (mixing, "attend", swapped),
}


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
)  # more than a few seconds each


def test_every_claim_has_a_mutation():
    assert sorted(MUTATIONS) == sorted(claim.id for claim in claims.every()) == sorted(VERDICTS)


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=pytest.mark.slow if id in LONG else ()) for id in sorted(MUTATIONS)]
)
def test_the_verdict_changes(id, monkeypatch):
    module, name, change = MUTATIONS[id]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    subjects.profile.cache_clear()  # a changed model must be measured anew, and not be kept
    found = claims.find(id).run(SETTINGS.get(id), seeds=1)
    monkeypatch.undo()
    subjects.profile.cache_clear()
    assert found.verdict.value != VERDICTS[id], found.reason


@pytest.mark.slow
@pytest.mark.parametrize("id", sorted(MUTATIONS))
def test_three_other_seeds_the_same_verdict(id):
    claim = claims.find(id)
    assert claim.run(SETTINGS.get(id), seed=100, seeds=min(3, claim.seeds)).verdict.value == VERDICTS[id]
