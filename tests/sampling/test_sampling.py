"""Gibbs, SMC and resampling: against enumeration, closed forms and simulation-based calibration."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from exptilt import attend
from exptilt import families as f
from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.sampling import Joint, gibbs, smc
from exptilt.sampling.resampling import effective_size, systematic

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, dtype=F64, generator=generator(seed))


def discrete() -> tuple[Joint, list[dict[str, Tensor]], Tensor]:
    """Three coupled sites, all their states, and the logs of their probabilities times Z."""
    sites = {
        "bits": f.BernoulliProduct(randn(2)),
        "class": f.Categorical(randn(3, seed=1)),
        "points": f.Empirical(randn(4, 2, seed=2), randn(4, seed=3)),
    }
    coupling = {
        ("bits", "class"): randn(2, 3, seed=4),
        ("points", "bits"): randn(2, 2, seed=5),
        ("class", "points"): randn(3, 2, seed=6),
    }
    joint = Joint(sites, coupling, {"class": randn(3, seed=7)})
    bits = [torch.tensor(b, dtype=F64) for b in itertools.product([0.0, 1.0], repeat=2)]
    places = [list(torch.eye(3, dtype=F64)), list(sites["points"].points)]
    states, logs = [], []
    for b, c, x in itertools.product(bits, *places):
        tilt = b @ coupling["bits", "class"] @ c + x @ coupling["points", "bits"] @ b
        tilt = tilt + c @ coupling["class", "points"] @ x + joint.bias["class"] @ c
        states.append({"bits": b, "class": c, "points": x})
        logs.append(tilt + sum(sites[name].log_prob(value) for name, value in states[-1].items()))
    return joint, states, torch.stack(logs)


def place(states: list[dict[str, Tensor]], drawn: dict[str, Tensor]) -> Tensor:
    """Which of the states each of the draws is."""
    rows = torch.stack([torch.cat(list(state.values())) for state in states])
    flat = torch.cat([drawn[name].reshape(-1, drawn[name].shape[-1]) for name in states[0]], 1)
    return torch.cdist(flat, rows).argmin(-1)


def fits(counts: np.ndarray, probability: np.ndarray) -> bool:
    return bool(scipy.stats.chisquare(counts, probability * counts.sum()).pvalue > 1e-4)


def test_conditionals_are_those_of_the_table() -> None:
    joint, states, log_p = discrete()
    for which in (0, 17, 47):
        for site in joint.sites:
            alike = [
                n
                for n, state in enumerate(states)
                if all(torch.equal(state[o], states[which][o]) for o in joint.sites if o != site)
            ]
            law = joint.conditional(site, states[which])
            values = torch.stack([states[n][site] for n in alike])
            torch.testing.assert_close(law.log_prob(values), torch.log_softmax(log_p[alike], 0))
    torch.testing.assert_close(
        joint.log_tilt({name: torch.stack([s[name] for s in states]) for name in joint.sites}),
        log_p - torch.stack([sum(joint.sites[n].log_prob(s[n]) for n in s) for s in states]),
    )


def test_gibbs_keeps_the_joint_law_and_finds_it() -> None:
    joint, states, log_p = discrete()
    p = torch.softmax(log_p, 0)
    g = generator()
    first = torch.multinomial(p, 20_000, True, generator=g)
    start = {name: torch.stack([s[name] for s in states])[first] for name in joint.sites}
    kept = gibbs(joint, 1, chains=20_000, start=start, discard=2, generator=g)
    assert kept["points"].shape == (1, 20_000, 2)
    assert fits(np.bincount(place(states, kept), minlength=len(states)), p.numpy())
    moved = (place(states, kept) != first).double().mean()
    assert float(moved) > 0.3  # it keeps the law, not the state
    found = gibbs(joint, 1, chains=20_000, discard=60, generator=g)
    assert fits(np.bincount(place(states, found), minlength=len(states)), p.numpy())


def test_gibbs_with_what_is_given() -> None:
    joint, states, log_p = discrete()
    given = {"bits": torch.tensor([1.0, 0.0], dtype=F64)}
    drawn = gibbs(joint, 1, chains=20_000, given=given, discard=40, generator=generator())
    assert torch.equal(drawn["bits"], given["bits"].expand(1, 20_000, 2))
    wanted = [n for n, s in enumerate(states) if torch.equal(s["bits"], given["bits"])]
    counts = np.bincount(place(states, drawn), minlength=len(states))
    assert counts.sum() == counts[wanted].sum()
    assert fits(counts[wanted], torch.softmax(log_p[wanted], 0).numpy())


def test_the_conditional_of_points_is_attention() -> None:
    points, W = randn(6, 3), randn(3, 2, seed=1)
    joint = Joint(
        {"x": f.Empirical(points), "z": f.Gaussian(torch.zeros(2).double(), torch.eye(2).double())},
        {("x", "z"): W},
    )
    z = randn(5, 2, seed=2)
    wanted = attend((z @ W.mT)[None], points[None], points[None], scale=1.0).output[0]
    torch.testing.assert_close(joint.conditional("x", {"z": z}).mean(), wanted)


def mixed() -> tuple[Joint, float]:
    """Classes and a Gaussian, and log Z: a sum over classes of Gaussian integrals."""
    sites = {"class": f.Categorical(randn(3)), "x": f.Gaussian(randn(2, seed=1), torch.eye(2).double())}
    J, b = 2 * randn(3, 2, seed=2), randn(2, seed=3)
    joint = Joint(sites, {("class", "x"): J}, {"x": b})
    return joint, float(
        torch.logsumexp(sites["class"].mean_parameter.log() + sites["x"].log_normalizer(J + b), 0)
    )


@pytest.mark.parametrize("seed", range(3))
def test_evidence_by_enumeration(seed: int) -> None:
    joint, _, log_p = discrete()
    found = smc(joint, particles=500, runs=20, generator=generator(seed))
    assert float(found.standard_error) < 0.05
    assert abs(float(found.log_evidence - torch.logsumexp(log_p, 0))) < 4 * float(found.standard_error)
    assert found.strength[0] == 0
    assert found.strength[-1] == 1
    assert (found.strength.diff() > 0).all()
    assert (found.effective >= 0.5 * 500 * (1 - 1e-9)).all()
    joint, wanted = mixed()
    found = smc(joint, particles=500, runs=20, generator=generator(seed))
    assert abs(float(found.log_evidence) - wanted) < 4 * float(found.standard_error)


def test_particles_have_the_joint_law() -> None:
    joint, states, log_p = discrete()
    found = smc(joint, particles=1000, runs=20, sweeps=5, generator=generator(1))
    share = np.bincount(place(states, found.state), minlength=len(states)) / 20_000
    assert np.abs(share - torch.softmax(log_p, 0).numpy()).sum() / 2 < 0.03


def members() -> dict[str, tuple[f.Measure, Tensor]]:
    def one(*values: float) -> Tensor:
        return torch.tensor(values, dtype=F64)

    return {
        "Gaussian": (f.Gaussian(one(0.5, -1), torch.eye(2).double()), one(2.0, 1.5)),
        "Gamma": (f.Gamma(one(2.0), one(1.5)), one(-3.0)),
        "Beta": (f.Beta(one(2.0), one(1.5)), one(3.0, 1.0)),
        "Poisson": (f.Poisson(one(2.0)), one(1.2)),
        "sphere": (f.VonMisesFisher(one(1.0, 0, 0)), one(0.0, 3, 0)),
        "points": (f.Empirical(randn(7, 2)), one(2.0, -1.0)),
    }


@pytest.mark.parametrize("name", members())
def test_the_evidence_of_one_tilt_is_its_log_normalizer(name: str) -> None:
    h, eta = members()[name]
    found = smc(Joint({"x": h}, bias={"x": eta}), particles=500, runs=20, generator=generator(3))
    exact = h.log_normalizer(eta) - h.log_normalizer(torch.zeros_like(eta))
    assert abs(float(found.log_evidence - exact)) < 4 * float(found.standard_error)
    assert float(found.standard_error) < 0.1


def test_simulation_based_calibration() -> None:
    """The rank of the truth among posterior draws is uniform over 300 data sets."""
    joint, _ = mixed()
    law = joint.sites["class"].mean_parameter.log() + joint.sites["x"].log_normalizer(
        joint.coupling["class", "x"] + joint.bias["x"]
    )
    g = generator(5)
    truth = torch.multinomial(torch.softmax(law, 0), 300, True, generator=g)
    x = joint.conditional("x", {"class": torch.eye(3, dtype=F64)[truth]}).sample(generator=g)
    ranks: dict[str, list[int]] = {"smc": [], "gibbs": []}
    for c, seen in zip(truth.tolist(), x, strict=True):
        known = Joint({"class": joint.sites["class"]}, bias={"class": joint.tilt_of("class", {"x": seen})})
        drawn = {
            "smc": smc(known, particles=19, runs=1, generator=g).state["class"][0],
            "gibbs": gibbs(joint, 1, chains=19, given={"x": seen}, discard=1, generator=g)["class"][0],
        }
        for name, one_hot in drawn.items():
            level = one_hot.argmax(-1)
            ties = int((level == c).sum())
            ranks[name].append(int((level < c).sum()) + int(torch.randint(ties + 1, (), generator=g)))
    for found in ranks.values():
        assert fits(np.bincount(np.array(found) // 4, minlength=5), np.full(5, 0.2))


def test_systematic_resampling() -> None:
    log_weight = randn(5, 40, seed=1) * 2
    share = torch.softmax(log_weight, -1)
    total = torch.zeros_like(share)
    for seed in range(400):
        index = systematic(log_weight, 100, generator=generator(seed))
        count = torch.zeros_like(share).scatter_add_(-1, index, torch.ones_like(index, dtype=F64))
        assert ((count - 100 * share).abs() < 1).all()
        assert (index.diff() >= 0).all()
        total += count
    torch.testing.assert_close(total / 400, 100 * share, atol=0.12, rtol=0)
    dead = torch.tensor([-torch.inf, 0.0, -torch.inf, -800.0, -torch.inf])
    assert set(systematic(dead, 1000, generator=generator()).tolist()) == {1}
    assert torch.allclose(effective_size(log_weight), 1 / share.square().sum(-1))
    assert float(effective_size(torch.full((7,), -1e4))) == pytest.approx(7)


GAUSS = f.Gaussian(torch.zeros(1), torch.eye(1))


def test_what_has_no_joint_law_ends_with_the_step() -> None:
    joint = Joint({"x": GAUSS, "y": GAUSS}, {("x", "y"): torch.full((1, 1), 5.0)})
    with pytest.raises((ConvergenceError, ArgumentError), match=r"step|finite"):
        smc(joint, particles=64, runs=2, sweeps=60, generator=generator())
    with pytest.raises(ConvergenceError, match="after 2 steps"):
        smc(Joint({"x": GAUSS}, bias={"x": torch.full((1,), 30.0)}), max_steps=2, generator=generator())


def test_evidence_is_as_exact_as_its_dtype() -> None:
    """A constant weight has no noise: log Z is 0 to the last digits of float64, whatever log N is."""
    still = Joint({"x": f.Gaussian(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))})
    found = smc(still, particles=1000, runs=3, generator=generator())
    assert float(found.log_evidence.abs()) < 1e-14
    assert found.strength.dtype == F64


def test_a_joint_of_two_dtypes_is_refused_by_name() -> None:
    sites = {"a": f.BernoulliProduct(torch.zeros(1)), "b": f.BernoulliProduct(torch.zeros(1, dtype=F64))}
    with pytest.raises(ArgumentError, match=r"one dtype; got site 'a' torch.float32, site 'b' torch.float64"):
        Joint(sites, {("a", "b"): torch.ones(1, 1)})


def test_sites_that_push_each_other_to_infinity_are_named() -> None:
    """x and y with coupling 2 have no joint law: the draws grow without end."""
    normal = f.Gaussian(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    joint = Joint({"x": normal, "y": normal}, {("x", "y"): torch.full((1, 1), 2.0, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"draws of '.' are not finite.*no joint law"):
        gibbs(joint, 2000)
