"""Every claim would notice: flip a sign or swap an argument in the thing claimed, and its verdict changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from claims.verdicts import SETTINGS, VERDICTS
from exptilt import claims
from exptilt.claims import (
    contrastive,
    duality,
    equilibrium,
    exponential_family,
    filters,
    memory,
    mixing,
    observed,
    trained,
)
from exptilt.claims.experiments import repelling, theorem_one
from exptilt.dynamics import flow
from exptilt.lens.studying import one_text


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


def measure(name, change):
    """A study one measure of which is changed."""

    def of(studied):
        def other(*arguments):
            found = studied(*arguments)
            which = "heads" if name in found.heads else "layers"
            part = getattr(found, which)
            value = replace(part[name], value=change(part[name].value))
            return replace(found, **{which: {**part, name: value}})

        return other

    return of


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
    "A15": (observed, "studied", measure("log_normalizer_variation", lambda x: 1 / (9 * x))),
    "B1": (flow, "slope", downhill),
    "B2": (flow, "slope", downhill),
    "B3": (flow, "slope", downhill),
    "B4": (theorem_one, "Whiten", negated(0)),
    "B5a": (equilibrium, "equilibrium_sweep", gaussian_ends),
    "B5b": (repelling, "Flow", lambda cls: lambda kind, beta: cls(kind, beta=2 * beta)),
    "B6": (equilibrium, "monotone_operator", lambda f: lambda g, x: f(lambda s: 9 * s - g(s), x)),
    "C1": (memory, "Hopfield", method("energy", minus)),
    "C2": (memory, "storage_capacity", polynomial),
    "C3": (memory, "Hopfield", method("step", negated(1))),
    "C4": (memory, "boltzmann_check", two_temperatures),
    "D1": (contrastive, "attend", negated(0)),
    "E1": (filters, "SwitchingLinearGaussian", turned),
    "E2": (filters, "SwitchingLinearGaussian", turned),
    "E3": (filters, "LinearDynamics", lambda cls: lambda W, Q: cls(2 * W, Q)),
    "E4": (filters, "SwitchingLinearGaussian", turned),
    "E5": (mixing, "attend", swapped),
    "E6": (mixing, "propagate", negated(2)),
    "E7": (observed, "fit_linear_link", lambda f: lambda law: replace(f(law), matrix=-f(law).matrix)),
    "E8": (mixing, "_natural", minus),
    "E9": (mixing, "smc", doubled),
    "F1": (observed, "studied", measure("gaussian_p", lambda x: 1 - x)),
    "F2": (observed, "studied", measure("local_gaussian_r2", lambda x: -x)),
    "F3": (one_text, "ascent", negated(4)),
    "F4": (trained, "results", exchanged),
    "F5": (trained, "results", turned_over),
    "F6": (observed, "studied", measure("attention_expansion", lambda x: 1 / x)),
}


LONG = ("A15", "B4", "B6", "C3", "F3", "F6")  # more than a few seconds each


def test_every_claim_has_a_mutation():
    assert sorted(MUTATIONS) == sorted(claim.id for claim in claims.every()) == sorted(VERDICTS)


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=pytest.mark.slow if id in LONG else ()) for id in sorted(MUTATIONS)]
)
def test_the_verdict_changes(id, monkeypatch):
    module, name, change = MUTATIONS[id]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    if module is one_text:  # the study of the changed model must be made anew, and not be kept
        observed.studied.cache_clear()
    found = claims.find(id).run(SETTINGS.get(id), seeds=1)
    monkeypatch.undo()
    if module is one_text:
        observed.studied.cache_clear()
    assert found.verdict.value != VERDICTS[id], found.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "id", sorted(MUTATIONS)
)
def test_three_other_seeds_the_same_verdict(id):
    claim = claims.find(id)
    assert claim.run(SETTINGS.get(id), seed=100, seeds=min(3, claim.seeds)).verdict.value == VERDICTS[id]
