"""Fixed points against torchdeq 0.1, on the same attention fixed point z = softmax(β X z) X + x.

Same function, start, tolerance (relative residual) and kind of solver; both answers are held against a float64 solve first. Measured: the
solve alone, and the solve with the gradients of the patterns X and of the injection x. torchdeq differentiates implicitly (`ift=True`) with
the same kind of solver backwards. Then what it can do at all: gradcheck, gradgradcheck, and the transforms of torch.func, with the error
where one fails.
"""

from collections.abc import Callable
from typing import Any

import torch
import torchdeq
from torch import Tensor

import harness
from exptilt.dynamics import fixed_point
from harness import Goal

PAIRS = {"anderson": "anderson", "broyden": "broyden", "picard": "fixed_point_iter"}
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
    with torch.no_grad():
        exact = problem(*sizes, dtype=torch.float64)
        reference = fixed_point(exact[2], exact[3]).value
    print(f"\n{name}: {sizes[0]} states, {sizes[1]} patterns, {sizes[2]} dimensions, β = {sizes[3]:g}", flush=True)
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

        with torch.no_grad():
            for answer in (solve(), rival()):
                torch.testing.assert_close(answer.double(), reference, rtol=0, atol=100 * TOLERANCE)
            steps = int(fixed_point(function, start, solver=ours, tolerance=TOLERANCE).steps), int(model(function, start)[1]["nstep"].max())
        print(f"  {ours}: {steps[0]} steps here, {steps[1]} there (where a run that stops at {LIMIT} has not converged)")
        for what, wrap in (("forward", alone), ("forward and backward", both)):
            times = harness.compare(
                {"exptilt": wrap(solve), "torchdeq": wrap(rival)}, "torchdeq", rounds=rounds, label=f"{name}, {ours}, {what}"
            )
            harness.print_times(times)
            results[f"{ours}, {what}"] = {"times": times, "steps": {"exptilt": steps[0], "torchdeq": steps[1]}}
            goals.append(Goal(f"{name}, {ours}, {what}, over torchdeq", times["exptilt"].ratio, 1.0))
    return results, goals


def abilities() -> dict[str, dict[str, str]]:
    """What works, on a small float64 problem; an error's first words where it does not."""
    g = torch.Generator().manual_seed(1)
    a, b = 0.2 * torch.randn(3, 3, dtype=torch.float64, generator=g), torch.randn(2, 3, dtype=torch.float64, generator=g)
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
        checks[name] = lambda f, transform=transform: torch.testing.assert_close(transform(f)(a), transform(unrolled)(a))
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


def ability_table(abilities: dict[str, dict[str, str]]) -> tuple[list[str], list[list[str]]]:
    """What works and what fails, for the page; a bar would end a cell."""
    return ["", "exptilt", "torchdeq"], [
        [name, *(row[who].replace("|", "/") for who in ("exptilt", "torchdeq"))] for name, row in abilities.items()
    ]


def main() -> None:
    arguments = harness.start(__doc__)
    rounds = 2 if arguments.quick else 5
    sizes = {"small": (16, 256, 16, 2.0), "medium": (64, 1024, 32, 1.5), "large": (256, 4096, 64, 2.0)}
    results: dict[str, Any] = {}
    goals: list[Goal] = []
    for name in ("small",) if arguments.quick else tuple(sizes):
        results[name], met = measure(name, sizes[name], rounds)
        goals += met
    results["abilities"] = abilities()
    print("\nWhat works")
    for name, row in results["abilities"].items():
        print(f"  {name}")
        for who, said in row.items():
            print(f"    {who:9s} {said}")
    harness.print_goals(goals)
    harness.save("fixed_points", {"results": results, "goals": goals}, folder=harness.folder(arguments.quick))
    if not arguments.quick:
        header = ["problem, solver, what", "steps", "torchdeq's steps", "ms", "torchdeq's ms", "ratio"]
        rows = [
            (f"{name}, {case}", row["steps"]["exptilt"], row["steps"]["torchdeq"], *_milliseconds(row["times"]))
            for name, cases in results.items()
            if name != "abilities"
            for case, row in cases.items()
        ]
        harness.write_table(PAGE, "fixed points", header, rows)
        harness.write_table(PAGE, "abilities", *ability_table(results["abilities"]))


def _milliseconds(times: dict[str, harness.Timing]) -> tuple[str, str, str]:
    ours, theirs = times["exptilt"], times["torchdeq"]
    return f"{1e3 * ours.best:.1f}", f"{1e3 * theirs.best:.1f}", f"{ours.ratio:.2f}"


if __name__ == "__main__":
    main()
