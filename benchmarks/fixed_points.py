"""Fixed points against torchdeq 0.1, on the same attention fixed point z = softmax(β X z) X + x.

Same function, start, tolerance (relative residual) and kind of solver. Measured: the solve alone, where
torchdeq is in its evaluation mode and prepares no gradient either; and the solve with the gradients of the
patterns X and of the injection x. torchdeq differentiates implicitly (`ift=True`) with the same kind of
solver backwards, ours is always GMRES. All answers and gradients are held against a float64 solve first.
Then what each can do at all: gradcheck, gradgradcheck, and the transforms of torch.func, with the error
where one fails.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchdeq
from torch import Tensor

import harness
from exptilt.dynamics import fixed_point
from harness import Goal

PAIRS = {"anderson": "anderson", "picard": "fixed_point_iter"}
TOLERANCE = 1e-4
LIMIT = 200
PAGE = harness.FOLDER.parent / "fixed_points.md"


def problem(
    batch: int, count: int, dimension: int, beta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    patterns = (torch.randn(count, dimension, generator=g) / dimension**0.5).to(dtype).requires_grad_()
    injection = (0.5 * torch.randn(batch, dimension, generator=g)).to(dtype).requires_grad_()

    def function(state: Tensor) -> Tensor:
        return torch.softmax(beta * state @ patterns.mT, -1) @ patterns + injection

    return patterns, injection, function, torch.zeros(batch, dimension, dtype=dtype)


def deq(solver: str, tolerance: float = TOLERANCE) -> Any:
    return torchdeq.get_deq(
        f_solver=solver,
        b_solver=solver,
        ift=True,
        f_tol=tolerance,
        b_tol=tolerance,
        f_stop_mode="rel",
        b_stop_mode="rel",
        f_max_iter=LIMIT,
        b_max_iter=LIMIT,
    )


def measure(name: str, sizes: tuple[int, int, int, float], rounds: int) -> tuple[dict[str, Any], list[Goal]]:
    patterns, injection, function, start = problem(*sizes)
    exact = problem(*sizes, dtype=torch.float64)
    reference = fixed_point(exact[2], exact[3]).value
    slopes = torch.autograd.grad(reference.square().sum(), exact[:2])
    print(
        f"\n{name}: {sizes[0]} states, {sizes[1]} patterns, {sizes[2]} dimensions, β = {sizes[3]:g}",
        flush=True,
    )
    results: dict[str, Any] = {}
    goals = []
    for ours, theirs in PAIRS.items():
        model = deq(theirs)

        def solve(ours: str = ours) -> Tensor:
            return fixed_point(function, start, solver=ours, tolerance=TOLERANCE).value

        def rival(model: Any = model) -> Tensor:
            return model(function, start)[0][-1]

        def both(run: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
            return lambda: torch.autograd.grad(run().square().sum(), (patterns, injection))

        def alone(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            return torch.no_grad()(run)

        for run in (solve, rival):
            for got, wanted in zip((run(), *both(run)()), (reference, *slopes), strict=True):
                assert float((got - wanted).detach().norm() / wanted.detach().norm()) < 10 * TOLERANCE
        with torch.no_grad():
            steps = (
                int(fixed_point(function, start, solver=ours, tolerance=TOLERANCE).steps),
                int(model(function, start)[1]["nstep"].max()),
            )
        print(
            f"  {ours}: {steps[0]} steps here, {steps[1]} there "
            f"(where a run that stops at {LIMIT} has not converged)"
        )
        for what, wrap in (("forward", alone), ("forward and backward", both)):
            model.train(what != "forward")
            times = harness.compare(
                {"exptilt": wrap(solve), "torchdeq": wrap(rival)},
                "torchdeq",
                rounds=rounds,
                label=f"{name}, {ours}, {what}",
            )
            harness.print_times(times)
            results[f"{ours}, {what}"] = {
                "times": times,
                "steps": {"exptilt": steps[0], "torchdeq": steps[1]},
            }
            goals.append(Goal(f"{name}, {ours}, {what}, over torchdeq", times["exptilt"].ratio, 1.0))
    return results, goals


def abilities() -> dict[str, dict[str, str]]:
    """What works, on a small float64 problem; an error's first words where it does not."""
    g = torch.Generator().manual_seed(1)
    a, b = (
        0.2 * torch.randn(3, 3, dtype=torch.float64, generator=g),
        torch.randn(2, 3, dtype=torch.float64, generator=g),
    )
    model = deq("anderson", 1e-13)

    def ours(a: Tensor) -> Tensor:
        return fixed_point(lambda z: torch.tanh(z @ a) + b, torch.zeros_like(b)).value

    def theirs(a: Tensor) -> Tensor:
        return model(lambda z: torch.tanh(z @ a) + b, torch.zeros_like(b))[0][-1]

    def unrolled(a: Tensor) -> Tensor:
        z = torch.zeros_like(b)
        for _ in range(200):
            z = torch.tanh(z @ a) + b
        return z

    def squared(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda a: f(a).square().sum()

    checks: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
        "gradcheck": lambda f: torch.autograd.gradcheck(f, (a.clone().requires_grad_(),)),
        "gradgradcheck": lambda f: torch.autograd.gradgradcheck(f, (a.clone().requires_grad_(),)),
        "forward mode": lambda f: torch.autograd.gradcheck(
            f, (a.clone().requires_grad_(),), check_forward_ad=True, check_backward_ad=False
        ),
    }
    for name, transform in {
        "grad": lambda f: torch.func.grad(squared(f)),
        "jacrev": torch.func.jacrev,
        "jacfwd": torch.func.jacfwd,
        "hessian": lambda f: torch.func.hessian(squared(f)),
        "vmap": lambda f: lambda a: torch.func.vmap(f)(torch.stack([a, a / 2])),
    }.items():
        checks[name] = lambda f, transform=transform: torch.testing.assert_close(
            transform(f)(a), transform(unrolled)(a)
        )
    table: dict[str, dict[str, str]] = {}
    for name, check in checks.items():
        table[name] = {}
        for who, f in (("exptilt", ours), ("torchdeq", theirs)):
            try:
                check(f)
                table[name][who] = "yes"
            except Exception as error:  # whatever it is that fails there is what is reported
                table[name][who] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return table


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Steps and times, for the page, from the saved results."""
    header = ["problem, solver, what", "steps", "torchdeq's steps", "ms", "torchdeq's ms", "ratio"]
    rows = []
    for name, cases in results["sizes"].items():
        for case, row in cases.items():
            ours, theirs = row["times"]["exptilt"], row["times"]["torchdeq"]
            times = [f"{1e3 * ours['best']:.1f}", f"{1e3 * theirs['best']:.1f}", f"{ours['ratio']:.2f}"]
            rows.append(
                [f"{name}, {case}", str(row["steps"]["exptilt"]), str(row["steps"]["torchdeq"]), *times]
            )
    return header, rows


def ability_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """What works and what fails, for the page; a bar would end a cell."""
    who = ["exptilt", "torchdeq"]
    return ["", *who], [
        [name, *(row[one].replace("|", "/") for one in who)] for name, row in results["abilities"].items()
    ]


PARTS = (
    harness.Part(PAGE, "fixed points", "fixed_points", table),
    harness.Part(PAGE, "abilities", "fixed_points", ability_table),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    rounds = 2 if arguments.quick else 15
    sizes = {"small": (16, 256, 16, 2.0), "medium": (64, 1024, 32, 1.5), "large": (256, 4096, 64, 2.0)}
    results: dict[str, Any] = {}
    goals: list[Goal] = []
    for name in ("small",) if arguments.quick else tuple(sizes):
        results[name], met = measure(name, sizes[name], rounds)
        goals += met
    can = abilities()
    print("\nWhat works")
    for name, row in can.items():
        print(f"  {name}")
        for who, said in row.items():
            print(f"    {who:9s} {said}")
    harness.print_goals(goals)
    path = harness.save(
        "fixed_points",
        {"sizes": results, "abilities": can, "goals": goals},
        folder=harness.folder(arguments.quick),
    )
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
