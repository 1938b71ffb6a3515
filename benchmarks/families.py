"""Families against torch.distributions, SciPy, efax and cvxpy, as ratios from one interleaved run.

    round trips      natural → mean → natural parameters at batch 100,000        efax (nobody else has both maps)
    KL, sampling     at batch 100,000                                            torch.distributions, SciPy, efax
    Empirical        natural(mean) at N = 100,000, D = 64                        scipy.optimize: L-BFGS, Newton–CG
    maximum entropy  10,000 outcomes × 100 constraints                           cvxpy with its default solver
                     the same, 20 of them contradictory: which?                  nobody names them

efax is measured where it can be imported; where it cannot, the reason is printed and saved. (Its releases from 1.15 on need Python 3.12,
which some of them do not say; those before need a jax that is no longer published for Python 3.11.) Everything is float64. KL and sampling
start from the parameters in every library: constructing the distribution is part of it. Answers are compared before they are timed. Takes
a few minutes.
"""

from collections.abc import Callable
from typing import Any

import cvxpy
import numpy as np
import scipy.special
import scipy.stats
import torch
from scipy.optimize import minimize
from torch.distributions import kl_divergence

import harness
from exptilt import families as f
from harness import Goal

Cases = dict[str, Callable[[], Any]]
F64 = torch.float64


def uniform(*size: int, low: float, high: float, seed: int) -> torch.Tensor:
    return low + (high - low) * torch.rand(size, dtype=F64, generator=torch.Generator().manual_seed(seed))


def members(batch: int, seed: int) -> dict[str, f.ExponentialFamily]:
    """One member of each family that is measured, with this batch."""

    def u(*size: int, low: float = 0.5, high: float = 5.0, shift: int = 0) -> torch.Tensor:
        return uniform(batch, *size, low=low, high=high, seed=seed + shift)

    root = u(3, 3, low=-1, high=1)
    return {
        "Gaussian": f.Gaussian(u(3, low=-1, high=1, shift=1), root @ root.mT + torch.eye(3, dtype=F64)),
        "Gamma": f.Gamma(u(1), u(1, shift=1)),
        "Beta": f.Beta(u(1), u(1, shift=1)),
        "Dirichlet": f.Dirichlet(u(4)),
        "Poisson": f.Poisson(u(1)),
        "VonMisesFisher": f.VonMisesFisher(u(3)),
    }


def efax_cases(batch: int) -> tuple[dict[str, Cases], str | None]:
    """Round trips of efax, compiled, or why there are none."""
    try:
        import jax

        jax.config.update("jax_enable_x64", True)
        import efax
        import jax.numpy as jnp
    except Exception as error:  # whatever keeps it from being imported is what is reported
        return {}, f"{type(error).__name__}: {error}"

    def trip(natural: Any) -> Callable[[], Any]:
        run = jax.jit(lambda p: p.to_exp().to_nat())
        return lambda: jax.block_until_ready(run(natural))

    ours = members(batch, 0)
    theta = {name: jnp.asarray(member.natural_parameter.numpy()) for name, member in ours.items()}
    made = {
        "Gamma": efax.GammaNP(theta["Gamma"][:, 0], theta["Gamma"][:, 1]),
        "Beta": efax.BetaNP(theta["Beta"]),
        "Dirichlet": efax.DirichletNP(theta["Dirichlet"]),
        "Poisson": efax.PoissonNP(theta["Poisson"][:, 0]),
        "VonMisesFisher": efax.VonMisesFisherNP(theta["VonMisesFisher"]),
    }
    return {name: {"efax": trip(natural)} for name, natural in made.items()}, None


def round_trip(member: f.ExponentialFamily) -> Callable[[], Any]:
    theta, family = member.natural_parameter, type(member)
    return lambda: family.from_mean(family._from_natural(theta).mean_parameter).value.natural_parameter


def again(member: f.ExponentialFamily) -> f.ExponentialFamily:
    """The same member from its parameters, checked as any other."""
    return type(member)(*(getattr(member, field) for field in member.event_dims))


def kl_cases(batch: int) -> dict[str, Cases]:
    first, second = members(batch, 0), members(batch, 10)
    cases: dict[str, Cases] = {}
    for name in ("Gaussian", "Gamma", "Beta", "Dirichlet", "Poisson"):
        p, q = first[name], second[name]
        torch.testing.assert_close(f.kl(p, q).value, kl_divergence(p.to_torch(), q.to_torch()))
        cases[name] = {
            "exptilt": lambda p=p, q=q: f.kl(again(p), again(q)),
            "torch": lambda p=p, q=q: kl_divergence(p.to_torch(), q.to_torch()),
        }
    return cases


def sample_cases(batch: int) -> dict[str, Cases]:
    first = members(batch, 0)
    generator = np.random.default_rng(0)
    cases: dict[str, Cases] = {}
    for name in ("Gaussian", "Gamma", "Beta", "Dirichlet", "Poisson"):
        p = first[name]
        cases[name] = {"exptilt": lambda p=p: again(p).sample(), "torch": lambda p=p: p.to_torch().sample()}
    shape, rate = first["Gamma"].shape.numpy(), first["Gamma"].rate.numpy()
    cases["Gamma"]["SciPy"] = lambda: scipy.stats.gamma(shape, scale=1 / rate).rvs(random_state=generator)
    sphere = f.VonMisesFisher(torch.tensor([1.0, 2.0, 3.0, 1.0], dtype=F64))
    twin = scipy.stats.vonmises_fisher((sphere.vector / sphere.concentration).numpy(), float(sphere.concentration))
    cases["VonMisesFisher"] = {"exptilt": lambda: sphere.sample((batch,)), "SciPy": lambda: twin.rvs(batch, random_state=generator)}
    return cases


def empirical_cases(count: int, dimension: int) -> Cases:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(count, dimension, dtype=F64, generator=generator)
    h = f.Empirical(points)
    mean = h.mean(0.3 * torch.randn(dimension, dtype=F64, generator=generator))
    x, m = points.numpy(), mean.numpy()

    def objective(eta: np.ndarray) -> tuple[float, np.ndarray]:
        score = x @ eta
        value = scipy.special.logsumexp(score)
        return float(value - m @ eta), np.exp(score - value) @ x - m

    def product(eta: np.ndarray, vector: np.ndarray) -> np.ndarray:
        score = x @ eta
        weight = np.exp(score - scipy.special.logsumexp(score))
        along = x @ vector
        return (weight * along) @ x - (weight @ along) * (weight @ x)

    start = np.zeros(dimension)
    tight = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 1000}
    cases: Cases = {
        "exptilt": lambda: h.natural(mean),
        "SciPy L-BFGS": lambda: minimize(objective, start, jac=True, method="L-BFGS-B", options=tight),
        "SciPy Newton-CG": lambda: minimize(objective, start, jac=True, hessp=product, method="Newton-CG", options={"xtol": 1e-10}),
    }
    ours = cases["exptilt"]()
    assert ours.converged
    np.testing.assert_allclose(ours.value.numpy(), cases["SciPy L-BFGS"]().x, atol=1e-5)
    return cases


def entropy_cases(outcomes: int, constraints: int) -> Cases:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(outcomes, constraints, dtype=F64, generator=generator)
    mean = f.Empirical(a).mean(0.2 * torch.randn(constraints, dtype=F64, generator=generator))
    matrix, wanted = a.numpy(), mean.numpy()

    def rival() -> np.ndarray:
        v = cvxpy.Variable(outcomes)
        cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(cvxpy.entr(v))), [cvxpy.sum(v) == 1, matrix.T @ v == wanted]).solve()
        return np.asarray(v.value)

    ours = f.maximum_entropy(a, mean=mean)
    assert ours.converged
    np.testing.assert_allclose(ours.value.probability.numpy(), rival(), atol=1e-5)
    return {"exptilt": lambda: f.maximum_entropy(a, mean=mean), "cvxpy": rival}


def conflict_cases(outcomes: int, constraints: int, together: int) -> Cases:
    """Constraints of which so many contradict each other, none of them alone: their columns sum to zero, their means do not."""
    a = torch.randn(outcomes, constraints, dtype=F64, generator=torch.Generator().manual_seed(1))
    a[:, together - 1] = -a[:, : together - 1].sum(1)
    mean = torch.zeros(constraints, dtype=F64)
    mean[:together] = 0.02
    found = f.maximum_entropy(a, mean=mean)
    assert found.value.conflict == {(): tuple(map(str, range(together)))}
    return {"exptilt": lambda: f.maximum_entropy(a, mean=mean)}


def main() -> None:
    arguments = harness.start(__doc__)
    batch, rounds = (1000, 2) if arguments.quick else (100_000, 7)
    results: dict[str, Any] = {}
    goals = []

    def measure(group: str, name: str, cases: Cases, rounds: int = rounds) -> None:
        rivals = [other for other in cases if other != "exptilt"]
        print(f"\n{group}: {name}", flush=True)
        times = harness.compare(cases, rivals[0] if rivals else "exptilt", rounds=rounds, label=f"{group}, {name}")
        harness.print_times(times)
        results[f"{group}: {name}"] = times
        goals.extend(Goal(f"{group}, {name}, over {other}", times["exptilt"].best / times[other].best, 1.0) for other in rivals)

    efax, reason = efax_cases(batch)
    if reason:
        print(f"efax is left out: {reason}")
        results["efax"] = reason
    for name, member in members(batch, 0).items():
        measure("round trip", name, {"exptilt": round_trip(member)} | efax.get(name, {}))
    for name, cases in kl_cases(batch).items():
        measure("KL", name, cases)
    for name, cases in sample_cases(batch).items():
        measure("sampling", name, cases)
    measure("Empirical", "natural", empirical_cases(*((3000, 8) if arguments.quick else (100_000, 64))))
    measure("maximum entropy", "dense", entropy_cases(*((200, 5) if arguments.quick else (10_000, 100))), 2)
    measure("maximum entropy", "contradictory", conflict_cases(*((200, 5, 3) if arguments.quick else (10_000, 100, 20))), 2)
    harness.print_goals(goals)
    harness.save("families", {"times": results, "goals": goals}, folder=harness.folder(arguments.quick))


if __name__ == "__main__":
    main()
