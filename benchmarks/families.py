"""Families against torch.distributions, SciPy, efax and cvxpy, as ratios from one interleaved run.

    round trips      natural → mean → natural parameters, batch 100,000   efax (nobody else has both maps)
    KL, sampling     at batch 100,000                                     torch.distributions, SciPy, efax
    Empirical        natural(mean) at N = 100,000, D = 64                 SciPy's L-BFGS and Newton–CG
    maximum entropy  10,000 outcomes × 100 constraints                    cvxpy with its default solver
                     the same, 20 of them contradictory: which?           nobody names them

efax works in a process of its own, in the interpreter `--efax PYTHON`, by default the one that `make rivals`
sets up (it needs Python 3.12, which exptilt does not); where there is none, that is printed and saved.
Everything is float64. KL and sampling of exptilt, torch and SciPy start from the parameters, so that
constructing the distribution is part of it; efax is given its distribution, and checks nothing. Answers are
compared before they are timed. Takes a few minutes, and fills the table of docs/families.md.
"""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
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
from rivals.efax_process import DEFAULT, Efax

PAGE = harness.FOLDER.parent / "families.md"
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


def natural_arrays(member: f.ExponentialFamily, name: str) -> dict[str, np.ndarray]:
    """The natural parameter as efax lays it out: of a Gaussian a vector and a matrix."""
    if not isinstance(member, f.Gaussian):
        return {name: member.natural_parameter.numpy()}
    precision = torch.linalg.inv(member.covariance_matrix)
    return {
        name: (precision @ member.mean_vector[..., None])[..., 0].numpy(),
        f"{name} matrix": (precision / -2).numpy(),
    }


def open_efax(python: Path, batch: int, threads: int) -> Efax:
    """A worker that has the members of both seeds."""
    parameters: dict[str, np.ndarray] = {}
    for which, seed in (("first", 0), ("second", 10)):
        for name, member in members(batch, seed).items():
            parameters |= natural_arrays(member, f"{which} {name}")
    return Efax(python, parameters, threads)


def efax_cases(worker: Efax, batch: int) -> dict[str, Cases]:
    """What efax has, by group and name, after its answers have been held against ours."""
    first, second = members(batch, 0), members(batch, 10)
    cases: dict[str, Cases] = {}
    for title in worker.names:
        group, name = title.split(": ")
        got = worker.answer(title)
        if group == "round trip":  # it solves to a tolerance of its own
            wanted = np.concatenate(
                [array.reshape(batch, -1) for array in natural_arrays(first[name], name).values()], 1
            )
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        elif group == "KL":
            np.testing.assert_allclose(got[:, 0], f.kl(first[name], second[name]).value.numpy(), atol=1e-9)
        else:
            mean = (
                first[name].mean_parameter
                if name in ("Gamma", "Poisson", "Gaussian")
                else first[name].sample()
            )
            np.testing.assert_allclose(
                got.mean(0), mean.mean(0)[: got.shape[1]].numpy(), atol=10 / batch**0.5
            )
        cases[title] = {"efax": worker.case(title)}
    return cases


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
    twin = scipy.stats.vonmises_fisher(
        (sphere.vector / sphere.concentration).numpy(), float(sphere.concentration)
    )
    cases["VonMisesFisher"] = {
        "exptilt": lambda: sphere.sample((batch,)),
        "SciPy": lambda: twin.rvs(batch, random_state=generator),
    }
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
        "SciPy Newton-CG": lambda: minimize(
            objective, start, jac=True, hessp=product, method="Newton-CG", options={"xtol": 1e-10}
        ),
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
        cvxpy.Problem(
            cvxpy.Maximize(cvxpy.sum(cvxpy.entr(v))), [cvxpy.sum(v) == 1, matrix.T @ v == wanted]
        ).solve()
        return np.asarray(v.value)

    ours = f.maximum_entropy(a, mean=mean)
    assert ours.converged
    np.testing.assert_allclose(ours.value.probability.numpy(), rival(), atol=1e-5)
    return {"exptilt": lambda: f.maximum_entropy(a, mean=mean), "cvxpy": rival}


def conflict_cases(outcomes: int, constraints: int, together: int) -> Cases:
    """Constraints of which so many contradict each other, none of them alone.

    Their columns sum to zero, their means do not.
    """
    a = torch.randn(outcomes, constraints, dtype=F64, generator=torch.Generator().manual_seed(1))
    a[:, together - 1] = -a[:, : together - 1].sum(1)
    mean = torch.zeros(constraints, dtype=F64)
    mean[:together] = 0.02
    found = f.maximum_entropy(a, mean=mean)
    assert found.value.conflict == {(): tuple(map(str, range(together)))}
    return {"exptilt": lambda: f.maximum_entropy(a, mean=mean)}


SHOWN = ("exptilt", "torch", "SciPy", "efax", "cvxpy")


def time_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Best milliseconds of everyone, and our ratio to the best of the others, from saved results."""
    rows = []
    for title, found in results["times"].items():
        by = {
            who: min(row["best"] for name, row in found.items() if name.startswith(who))
            for who in SHOWN
            if any(n.startswith(who) for n in found)
        }
        others = [best for who, best in by.items() if who != "exptilt"]
        ratio = f"{by['exptilt'] / min(others):.2f}" if others else ""
        rows.append([title, *(f"{1e3 * by[who]:.3g}" if who in by else "" for who in SHOWN), ratio])
    return ["milliseconds", *SHOWN, "ratio to the best rival"], rows


PARTS = (harness.Part(PAGE, "families times", "families", time_table),)


def main(argv: list[str] | None = None) -> Path:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--efax", type=Path, default=DEFAULT, metavar="PYTHON")
    chosen, rest = own.parse_known_args(argv)
    arguments = harness.start(__doc__, rest)
    batch, rounds = (1000, 2) if arguments.quick else (100_000, 7)
    results: dict[str, Any] = {}
    goals = []

    def measure(title: str, cases: Cases, rounds: int = rounds) -> None:
        rivals = [other for other in cases if other != "exptilt"]
        print(f"\n{title}", flush=True)
        times = harness.compare(cases, rivals[0] if rivals else "exptilt", rounds=rounds, label=title)
        harness.print_times(times)
        results[title] = times
        goals.extend(
            Goal(f"{title}, over {other}", times["exptilt"].best / times[other].best, 1.0) for other in rivals
        )

    with contextlib.ExitStack() as stack:
        theirs: dict[str, Cases] = {}
        rival = "left out: no interpreter with efax; run `make rivals`, or pass --efax PYTHON"
        if chosen.efax.exists():
            worker = stack.enter_context(open_efax(chosen.efax, batch, arguments.threads))
            theirs, rival = efax_cases(worker, batch), worker.versions.replace("\t", " ")
        print(f"efax: {rival}")
        ours: dict[str, Cases] = {
            f"round trip: {name}": {"exptilt": round_trip(member)}
            for name, member in members(batch, 0).items()
        }
        ours |= {f"KL: {name}": cases for name, cases in kl_cases(batch).items()}
        ours |= {f"sampling: {name}": cases for name, cases in sample_cases(batch).items()}
        for title, cases in ours.items():
            measure(title, cases | theirs.get(title, {}))
    measure("Empirical: natural", empirical_cases(*((3000, 8) if arguments.quick else (100_000, 64))))
    measure("maximum entropy: dense", entropy_cases(*((200, 5) if arguments.quick else (10_000, 100))), 2)
    measure(
        "maximum entropy: contradictory",
        conflict_cases(*((200, 5, 3) if arguments.quick else (10_000, 100, 20))),
        2,
    )
    harness.print_goals(goals)
    path = harness.save(
        "families", {"efax": rival, "times": results, "goals": goals}, folder=harness.folder(arguments.quick)
    )
    harness.print_table(*time_table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
