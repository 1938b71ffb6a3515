"""fixed_point: the answers, how samples end, and what is refused."""

import pytest
import torch

from dynamics.fixed_points.problems import F64, SOLVERS, attention, close, contraction, generator, unrolled
from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.dynamics import Status, fixed_point
from exptilt.dynamics.fixed_points import solvers

each = pytest.mark.parametrize("solver", SOLVERS)


@each
@pytest.mark.parametrize(("n", "radius"), [(1, 0.5), (3, 0.9), (40, 0.8)])
def test_linear_has_the_closed_form(solver: str, n: int, radius: float) -> None:
    a, b = contraction(n, radius, n), torch.randn(5, n, dtype=F64, generator=generator(1))
    found = fixed_point(lambda x: x @ a.mT + b, torch.zeros(5, n, dtype=F64), solver=solver)
    close(found.value, torch.linalg.solve(torch.eye(n, dtype=F64) - a, b.mT).mT, 1e-11)
    assert found.converged
    assert (found.residual <= 256 * torch.finfo(F64).eps).all()


@each
def test_attention_against_long_iteration(solver: str) -> None:
    g = generator(2)
    patterns, injection = (
        torch.randn(20, 6, dtype=F64, generator=g),
        0.3 * torch.randn(4, 6, dtype=F64, generator=g),
    )
    function = attention(patterns / 3, injection, 1.0)
    found = fixed_point(function, torch.zeros(4, 6, dtype=F64), solver=solver)
    close(found.value, unrolled(function, torch.zeros(4, 6, dtype=F64)), 1e-11)


def test_random_problems_over_solvers_and_options() -> None:
    g = generator(3)
    for trial in range(40):
        n, batch = int(torch.randint(1, 12, (), generator=g)), [(), (1,), (3,), (2, 2)][trial % 4]
        a, b = (
            contraction(n, 0.2 + 0.7 * float(torch.rand((), generator=g)), trial),
            torch.randn(*batch, n, dtype=F64, generator=g),
        )

        def function(x, a=a, b=b):
            return torch.tanh(x @ a.mT) + b

        solver = SOLVERS[trial % 2]
        extra: dict[str, float] = {"damping": 0.7} if trial % 3 == 0 else {}
        extra |= {"window": 1 + trial % 5} if solver != "picard" and trial % 3 == 1 else {}
        start = 10 * torch.randn(*batch, n, dtype=F64, generator=g)
        found = fixed_point(function, start, solver=solver, **extra)
        close(found.value, function(found.value), 1e-11)
        assert found.code.shape == found.residual.shape == batch
        assert found.trace.shape == (int(found.steps), *batch)
        close(found.trace[-1], found.residual)


@each
def test_accelerated_solvers_need_fewer_steps(solver: str) -> None:
    a, b = contraction(10, 0.95, 4), torch.randn(3, 10, dtype=F64, generator=generator(4))
    picard = fixed_point(lambda x: torch.tanh(x @ a.mT) + b, torch.zeros(3, 10, dtype=F64), solver="picard")
    found = fixed_point(lambda x: torch.tanh(x @ a.mT) + b, torch.zeros(3, 10, dtype=F64), solver=solver)
    if solver != "picard":
        assert int(found.steps) * 1.2 < int(picard.steps)


def test_damping_tames_what_oscillates() -> None:
    """X ↦ −x + 2 oscillates for ever about 1; half steps land on it at once."""
    start = torch.tensor([0.3], dtype=F64)
    assert (
        fixed_point(lambda x: 2 - x, start, solver="picard", throw=False, max_steps=50).status
        is Status.MAX_STEPS
    )
    found = fixed_point(lambda x: 2 - x, start, solver="picard", damping=0.5)
    close(found.value, torch.ones(1, dtype=F64))
    assert int(found.steps) == 2


def test_a_larger_window_needs_fewer_steps() -> None:
    a, b = contraction(30, 0.97, 5), torch.randn(1, 30, dtype=F64, generator=generator(5))
    few, many = (
        fixed_point(lambda x: x @ a.mT + b, torch.zeros(1, 30, dtype=F64), window=w, max_steps=2000).steps
        for w in (10, 1)
    )
    assert few < many


@each
def test_samples_of_different_difficulty_end_by_themselves(solver: str) -> None:
    """Each row ends as it would alone, and does not move after that: its residuals repeat, and it is what
    it was.
    """
    rate = torch.tensor([0.0, 0.5, 0.98], dtype=F64)[:, None]
    together = fixed_point(lambda x: rate * torch.sin(x) + 1, torch.zeros(3, 4, dtype=F64), solver=solver)
    for row in range(3):
        alone = fixed_point(
            lambda x, row=row: rate[row] * torch.sin(x) + 1, torch.zeros(4, dtype=F64), solver=solver
        )
        close(together.value[row], alone.value, 0)
        count = int(alone.steps)
        close(together.trace[:count, row], alone.trace, 0)
        assert (together.trace[count:, row] == alone.trace[-1]).all()


@each
def test_start_at_the_fixed_point_takes_one_step(solver: str) -> None:
    found = fixed_point(lambda x: x / 2, torch.zeros(2, 3, dtype=F64), solver=solver)
    assert int(found.steps) == 1
    assert (found.value == 0).all()
    assert found.converged


def test_zero_as_a_fixed_point_is_reached_from_afar() -> None:
    found = fixed_point(lambda x: x / 2, torch.ones(1, 3, dtype=F64), solver="anderson")
    assert found.value.abs().max() < 1e-12


@each
@pytest.mark.parametrize("scale", [None, 0.0])
def test_a_contraction_to_zero_ends(solver: str, scale: float | None) -> None:
    """The default scale is eps (‖x₀‖ + ‖f(x₀)‖). Without any, squares of what is left underflow, which is
    not the function's fault.
    """
    weights, start = contraction(10, 0.9, 8), torch.ones(3, 10, dtype=F64)
    found = fixed_point(lambda z: torch.tanh(z @ weights), start, solver=solver, scale=scale, max_steps=3000)
    assert found.converged
    size, eps = found.value.norm(dim=-1), torch.finfo(F64).eps
    if scale is None:
        assert int(found.steps) < 200
        image = torch.tanh(found.value @ weights)
        unit = eps * (start.norm(dim=-1) + torch.tanh(start @ weights).norm(dim=-1))
        assert bool((size < unit).all())
        close(found.residual, (image - found.value).norm(dim=-1) / unit)
    else:
        assert bool((size < 1e-150).all())


def test_the_default_scale_leaves_small_fixed_points_relative() -> None:
    found = fixed_point(lambda x: x / 2 + 1e-9, torch.ones(1, dtype=F64), solver="picard")
    close(found.value / 2e-9, torch.ones(1, dtype=F64), 1e-12)


@pytest.mark.parametrize("damping", [1.0, 0.5])
def test_a_step_that_is_not_finite_becomes_picards(damping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one dimension and without a ridge, the Gram matrix of two differences is singular.

    With s = x/2ω the residual is max(1 − s, 3/4 − s/2), and the first points are s = 0, 1/2 and 1, with
    residuals 1, 1/2 and 1/4. All numbers up to the Gram matrix [[1/4, 1/8], [1/8, 1/16]] are then short
    binary fractions, which no processor rounds: the matrix is singular to the last bit, and the fourth point
    can only be Picard's.
    """
    monkeypatch.setattr(solvers, "_RIDGE", 0.0)
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        s = x / (2 * damping)
        return x + torch.maximum(1 - s, 0.75 - s / 2)

    start = torch.zeros(1, dtype=F64)
    found = fixed_point(function, start, window=2, damping=damping, tolerance=1e-12)
    close(found.value, torch.tensor([3 * damping], dtype=F64))
    assert [float(x) / damping for x in seen[:4]] == [0, 1, 2, 2.25]
    assert torch.stack(seen).isfinite().all()


@each
def test_unstable_fixed_points_are_found_by_all_but_picard(solver: str) -> None:
    """3x(1 − x) + slope −2.2 at the fixed point of 4.2 x (1 − x)."""
    function, start = (lambda x: 4.2 * x * (1 - x)), torch.tensor([0.7], dtype=F64)
    found = fixed_point(function, start, solver=solver, throw=False, max_steps=200)
    if solver == "picard":
        assert found.status is Status.NOT_FINITE or found.status is Status.DIVERGED
    else:
        close(found.value, torch.tensor([1 - 1 / 4.2], dtype=F64), 1e-11)


@each
def test_no_fixed_point_is_said(solver: str) -> None:
    """2|x| + 1 > x everywhere. The first sample has a fixed point and is none the worse for its neighbour."""

    def function(x):
        return torch.stack([x[0] / 2 + 1, 2 * x[1].abs() + 1])

    with pytest.raises(ConvergenceError, match=r"diverged.*batch index \(1,\)"):
        fixed_point(function, torch.ones(2, 1, dtype=F64), solver=solver)
    found = fixed_point(function, torch.ones(2, 1, dtype=F64), solver=solver, throw=False)
    close(found.value[0], torch.full((1,), 2.0, dtype=F64))
    assert found.code[0] == Status.CONVERGED.code
    assert found.residual[1] >= 1


@each
def test_nan_is_said_and_stays_in_its_sample(solver: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        bad = torch.tensor([[1.0], [torch.nan], [1.0]], dtype=F64)
        return (x / 2 + 1) * bad

    found = fixed_point(function, torch.zeros(3, 2, dtype=F64), solver=solver, throw=False)
    assert [list(Status)[code] for code in found.code] == [
        Status.CONVERGED,
        Status.NOT_FINITE,
        Status.CONVERGED,
    ]
    close(found.value[[0, 2]], torch.full((2, 2), 2.0, dtype=F64))
    with pytest.raises(ConvergenceError, match="NaN or infinity"):
        fixed_point(function, torch.zeros(3, 2, dtype=F64), solver=solver)


def test_what_did_not_converge_returns_its_best_point() -> None:
    found = fixed_point(
        lambda x: 2 * x + 1, torch.tensor([-0.9], dtype=F64), solver="picard", throw=False, max_steps=5
    )
    assert found.status is Status.MAX_STEPS
    assert float(found.residual) == float(found.trace.min())
    close(found.residual, (found.value + 1).abs()[0] / found.value.abs()[0])
    with pytest.raises(ConvergenceError, match="max_steps"):
        fixed_point(lambda x: 0.99 * x + 1, torch.zeros(2, dtype=F64), solver="picard", max_steps=5)


@each
def test_float32(solver: str) -> None:
    g = generator(6)
    patterns, injection = torch.randn(50, 8, generator=g) / 3, 0.3 * torch.randn(16, 8, generator=g)
    found = fixed_point(attention(patterns, injection, 1.0), torch.zeros(16, 8), solver=solver)
    exact = unrolled(attention(patterns.double(), injection.double(), 1.0), torch.zeros(16, 8, dtype=F64))
    assert found.value.dtype == torch.float32
    close(found.value.double(), exact, 2e-4)


def test_event_dims_and_shapes() -> None:
    x = torch.randn(2, 3, 4, dtype=F64, generator=generator(7))

    def function(z):
        return 0.1 * torch.softmax(z @ z.mT, -1) @ z + x  # tokens interact: an event has two axes

    for dims, shape in ((2, (2,)), (3, ())):
        found = fixed_point(function, torch.zeros_like(x), event_dims=dims)
        close(found.value, unrolled(function, torch.zeros_like(x), 60), 1e-11)
        assert found.code.shape == shape
    scalars = fixed_point(lambda z: z.cos(), torch.zeros(5, dtype=F64), event_dims=0)
    assert scalars.code.shape == (5,)


def test_empty_batch() -> None:
    weight = torch.ones(3, dtype=F64, requires_grad=True)
    found = fixed_point(lambda x: weight * x / 2, torch.zeros(0, 3, dtype=F64))
    assert found.value.shape == (0, 3)
    assert found.converged


def test_a_scale_ends_what_shrinks_to_zero() -> None:
    """x/2 halves the state, and its relative residual is 1 for ever; in units of a scale it is what is left
    over that.
    """
    start = torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=F64)
    assert not fixed_point(
        lambda x: x / 2, start, solver="picard", tolerance=1e-6, max_steps=40, throw=False
    ).converged
    for scale in (2.0, torch.tensor([2.0, 2.0]), torch.tensor(2.0)):
        found = fixed_point(
            lambda x: x / 2, start, solver="picard", tolerance=1e-6, max_steps=40, scale=scale
        )
        size = found.value.norm(dim=-1)
        assert torch.allclose(found.residual, size / 2 / 2, rtol=1e-12)
        assert bool((found.residual <= 1e-6).all())
        assert bool((found.residual > 0.5e-6).all())  # and no farther
    large = fixed_point(
        lambda x: x / 2 + 50, start, scale=1e-3, tolerance=1e-8
    )  # a scale below the state changes nothing
    assert torch.equal(large.value, fixed_point(lambda x: x / 2 + 50, start, tolerance=1e-8).value)

    def halved(rate, scale):
        return fixed_point(lambda x: rate * x, start, solver="picard", tolerance=1e-6, scale=scale).residual

    rates, scales = torch.tensor([0.5, 0.9], dtype=F64), torch.tensor([1.0, 7.0], dtype=F64)
    each_one = torch.stack([halved(r, s) for r, s in zip(rates, scales, strict=True)])
    assert torch.allclose(torch.func.vmap(halved)(rates, scales), each_one, rtol=1e-12)


def test_strictness_apart_from_throwing() -> None:
    """X = x + (a − x)³ has J = 1 at x = a: no derivative exists."""
    a = torch.ones(1, dtype=F64, requires_grad=True)
    for throw, strict, raises in (
        (True, None, True),
        (False, None, False),
        (False, True, True),
        (True, False, False),
    ):
        x = fixed_point(
            lambda x: x + (a - x) ** 3, torch.ones(1, dtype=F64), throw=throw, strict=strict
        ).value
        if raises:
            with pytest.raises(ConvergenceError, match="no derivative exists"):
                torch.autograd.grad(x.sum(), a)
        else:
            assert not torch.autograd.grad(x.sum(), a)[0].isfinite().all()


def test_bad_arguments_are_named() -> None:
    start = torch.zeros(2, 3)

    def same(x):
        return x / 2

    with pytest.raises(ArgumentError, match="start is a list"):
        fixed_point(same, [1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="floating point"):
        fixed_point(same, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"\(2, 3\).*\(2, 2\)"):
        fixed_point(lambda x: x[:, :2], start)
    with pytest.raises(ArgumentError, match="float64"):
        fixed_point(lambda x: x.double(), start)
    with pytest.raises(ArgumentError, match="tuple"):
        fixed_point(lambda x: (x, x), start)  # type: ignore[arg-type, return-value]
    with pytest.raises(ArgumentError, match="no solver is called 'newton'"):
        fixed_point(same, start, solver="newton")
    with pytest.raises(ArgumentError, match="window is not an option of the solver 'picard'"):
        fixed_point(same, start, solver="picard", window=3)
    for wrong in (
        {"event_dims": 3},
        {"event_dims": -1},
        {"max_steps": 0},
        {"max_steps": 2.5},
        {"scale": -1.0},
        {"scale": float("nan")},
        {"scale": "1"},
        {"scale": True},
        {"scale": torch.tensor([1.0, -1.0])},
        {"tolerance": "a"},
        {"tolerance": True},
        {"tolerance": float("nan")},
        {"tolerance": float("inf")},
        {"event_dims": 1.0},
        {"event_dims": True},
        {"window": 2.5},
        {"window": True},
        {"order": 1.5},
        {"order": True},
        {"max_steps": True},
        {"damping": "half"},
        {"solver": 3},
        {"scale": torch.ones(3)},
        {"tolerance": 0.0},
        {"order": 0},
        {"damping": 0.0},
        {"damping": 1.5},
        {"window": 0},
    ):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            fixed_point(same, start, **wrong)  # type: ignore[arg-type]


@each
def test_a_residual_that_must_rise_first(solver: str) -> None:
    """From 0, ‖r‖ has a minimum near 1 that is no fixed point, and must be left behind on the way to 3."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 0.2 * ((x - 1) ** 2 + 0.01) * (3 - x)

    found = fixed_point(function, torch.zeros(1, dtype=F64), solver=solver, max_steps=3000, throw=False)
    close(found.value, torch.full((1,), 3.0, dtype=F64))
    assert (found.trace.diff() > 0).any()


def scalar_problems(count: int, seed: int):
    """Random scalar maps with a known fixed point: contractions, slopes down to −3, cubes, waves, bounded
    tails.
    """
    g = generator(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(count, dtype=F64, generator=g)

    root = torch.randn(count, dtype=F64, generator=g) * 10 ** (2 * uniform() - 1)
    start = root + torch.randn(count, dtype=F64, generator=g) * 10 ** (3 * uniform() - 2)
    slope, width = -3 + 3.95 * uniform(), 0.3 + 2 * uniform()
    kind = torch.randint(0, 8, (count,), generator=g)

    def function(x: torch.Tensor) -> torch.Tensor:
        d = x[:, 0] - root
        w = width * d
        shapes = (
            *(d, torch.tanh(w) / width, torch.sin(w) / width, d / (1 + w**2).sqrt(), torch.atan(w) / width),
            *(d - w**3, d / (1 + w**2), d * torch.exp(-(w**2) / 8)),
        )
        return (root + slope * torch.stack(shapes).gather(0, kind[None])[0]).unsqueeze(-1)

    return function, start.unsqueeze(-1)


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_scalar_problems(seed: int) -> None:
    """All are solved (a cube once ran off, and it says so), and what is called solved is solved."""
    function, start = scalar_problems(1000, seed)
    found = fixed_point(function, start, throw=False)
    solved = found.code == Status.CONVERGED.code
    assert int((~solved).sum()) <= 1
    missed = (function(found.value) - found.value).abs().squeeze(-1)
    assert torch.equal(solved, missed <= 1e-12 * (1 + found.value.abs().squeeze(-1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_drift_to_infinity_is_no_fixed_point(dtype: torch.dtype) -> None:
    """x + e^{−x} and x + 1/x have none, though their residuals vanish; x − x³ has one at 0."""
    start = torch.full((2, 1), 0.5, dtype=dtype)
    for function in (lambda x: x + torch.exp(-x), lambda x: x + 1 / x):
        found = fixed_point(function, start, throw=False)
        assert found.status is Status.DIVERGED
    assert fixed_point(lambda x: x - x**3, start).converged
