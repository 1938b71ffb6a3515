"""Derivatives of fixed points: closed forms, an unrolled oracle, gradcheck, torch.func transforms in
mixture.
"""

import gc
import itertools
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import exptilt as xt
from dynamics.fixed_points.problems import F64, SOLVERS, close, contraction, generator, unrolled
from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.dynamics import fixed_point
from exptilt.dynamics.fixed_points import jacobian

each = pytest.mark.parametrize("solver", SOLVERS)
A, B = contraction(3, 0.6, 0), torch.randn(2, 3, dtype=F64, generator=generator(0))


def ours(a: torch.Tensor, b: torch.Tensor, solver: str = "anderson", order: int = 2) -> torch.Tensor:
    return fixed_point(
        lambda x: torch.tanh(x @ a.mT) + b, torch.zeros_like(b), solver=solver, order=order
    ).value


def oracle(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return unrolled(lambda x: torch.tanh(x @ a.mT) + b, torch.zeros_like(b), 80)


@pytest.fixture(params=["written out", "GMRES"])
def linear_solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "GMRES":
        monkeypatch.setattr(jacobian, "_DENSE", 0)


@each
@pytest.mark.usefixtures("linear_solver")
def test_gradcheck_and_gradgradcheck(solver: str) -> None:
    inputs = (A[:2, :2].clone().requires_grad_(), B[:1, :2].clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: ours(a, b, solver), inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda a, b: ours(a, b, solver), inputs)


@pytest.mark.usefixtures("linear_solver")
def test_linear_closed_forms() -> None:
    """X = Ax + b has x = (I − A)⁻¹b =: Sb. dx = S db, dx = S dA x, and twice: d²x = 2 S dA S dA x."""
    n = 4
    a, b = contraction(n, 0.7, 1), torch.randn(n, dtype=F64, generator=generator(1))
    direction = torch.randn(n, n, dtype=F64, generator=generator(2))
    s = torch.linalg.inv(torch.eye(n, dtype=F64) - a)

    def solve(a, b):
        return fixed_point(lambda x: a @ x + b, torch.zeros(n, dtype=F64)).value

    close(jacrev(solve, argnums=1)(a, b), s)
    close(jacfwd(solve, argnums=1)(a, b), s)

    def first(t):
        return jvp(lambda a: solve(a, b), (a + t * direction,), (direction,))[1]

    zero = torch.zeros((), dtype=F64)
    close(first(zero), s @ direction @ s @ b)
    close(jvp(first, (zero,), (torch.ones_like(zero),))[1], 2 * s @ direction @ s @ direction @ s @ b)


TRANSFORMS = {
    "grad": grad,
    "hessian": hessian,
    "rev of rev": lambda f: jacrev(jacrev(f)),
    "fwd of fwd": lambda f: jacfwd(jacfwd(f)),
    "rev of fwd": lambda f: jacrev(jacfwd(f)),
    "vmap of grad": lambda f: vmap(grad(f)),
    "vmap of hessian": lambda f: vmap(hessian(f)),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum()),
    "hessian of vmap": lambda f: hessian(lambda x: vmap(f)(x).sum()),
    "jacfwd of vmap": lambda f: jacfwd(vmap(f)),
    "jacrev of vmap": lambda f: jacrev(vmap(f)),
    "vmap of vmap": lambda f: (
        lambda x: vmap(lambda c: vmap(lambda a: f(c * a))(x))(torch.tensor([0.5, 1.0], dtype=F64))
    ),
    "vmap of rev of vmap": lambda f: lambda x: vmap(jacrev(vmap(f)))(torch.stack([x, 0.5 * x])),
}


@pytest.mark.usefixtures("linear_solver")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_against_the_unrolled_oracle(name: str) -> None:
    weight = torch.randn(2, 3, dtype=F64, generator=generator(3))
    argument = torch.stack([A, A.mT]) if "vmap" in name else A
    both = [TRANSFORMS[name](lambda a, x=x: (x(a, B) ** 2 * weight).sum())(argument) for x in (ours, oracle)]
    close(both[0], both[1], 1e-8)
    assert not both[0].requires_grad
    with torch.no_grad():  # where no graph can be recorded below the transforms
        close(TRANSFORMS[name](lambda a: (ours(a, B) ** 2 * weight).sum())(argument), both[1], 1e-8)


def test_jacobians_vjp_and_jvp() -> None:
    for transform in (jacrev, jacfwd):
        for argnums in (0, 1):
            close(transform(ours, argnums)(A, B), transform(oracle, argnums)(A, B), 1e-9)
    tangents = (torch.ones_like(A), torch.ones_like(B))
    close(jvp(ours, (A, B), tangents)[1], jvp(oracle, (A, B), tangents)[1], 1e-9)
    for left, right in zip(vjp(ours, A, B)[1](B), vjp(oracle, A, B)[1](B), strict=True):
        close(left, right, 1e-9)


def test_vmap_over_start_alone_and_solution_fields() -> None:
    starts = torch.randn(4, 2, 3, dtype=F64, generator=generator(4))
    found = vmap(lambda s: fixed_point(lambda x: torch.tanh(x @ A.mT) + B, s))(starts)
    close(found.value, oracle(A, B).expand(4, 2, 3), 1e-11)
    assert found.code.shape == found.residual.shape == (4, 2)
    assert found.trace.shape[0] == 4
    with pytest.raises(ConvergenceError, match=r"\(1, 0\)"):
        vmap(lambda c: fixed_point(lambda x: 2 * c * x.abs() + 1, torch.ones(1, 1, dtype=F64)))(
            torch.tensor([0.1, 1.0], dtype=F64)
        )


def test_plain_backward_after_vmap_and_batched_cotangents() -> None:
    stack = torch.stack([A, A.mT, A / 2]).requires_grad_()
    values = [vmap(lambda a, x=x: x(a, B))(stack) for x in (ours, oracle)]
    grads = [torch.autograd.grad(v.square().sum(), stack, retain_graph=True)[0] for v in values]
    close(*grads, 1e-9)
    basis = torch.eye(18, dtype=F64).reshape(18, 3, 2, 3)
    rows = [
        vmap(lambda u, v=v: torch.autograd.grad(v, stack, u, retain_graph=True)[0])(basis) for v in values
    ]
    close(*rows, 1e-9)
    # Levels of the cotangents' vmaps bear the numbers that those of the solve had.
    scale, some = torch.tensor([0.5, 1.0], dtype=F64), torch.eye(36, dtype=F64).reshape(6, 6, 2, 3, 2, 3)
    values = [vmap(lambda c, x=x: vmap(lambda a: x(c * a, B))(stack))(scale) for x in (ours, oracle)]
    rows = [
        vmap(vmap(lambda u, v=v: torch.autograd.grad(v, stack, u, retain_graph=True)[0]))(some)
        for v in values
    ]
    close(*rows, 1e-9)


@pytest.mark.usefixtures("linear_solver")
def test_order_is_what_it_says() -> None:
    """Derivatives up to the order are exact, the one after it is refused, and the message says what to
    pass.
    """
    b = torch.tensor([0.4], dtype=F64)
    t = torch.tensor(0.7, dtype=F64)

    def nth(order: int, n: int) -> float:
        def f(t):
            return (ours(t.reshape(1, 1), b, order=order) if order else oracle(t.reshape(1, 1), b))[0]

        for k in range(n):
            f = (grad, lambda g: jacfwd(g))[k % 2](f)
        return float(f(t))

    for order, n in itertools.product((1, 2, 3), (1, 2, 3)):
        if n <= order:
            exact = nth(0, n)
            assert abs(nth(order, n) - exact) < 1e-8 * abs(exact), (order, n)
        else:
            with pytest.raises(ArgumentError, match=rf"order {n} .* beyond order={order} .*Pass order={n}"):
                nth(order, n)


PROBLEMS = {
    "coupled": lambda x, t: torch.tanh(t * x) + 0.4,
    "shifted": lambda x, t: 0.5 * torch.sin(x) + t,
    "of many numbers": lambda x, t: torch.tanh(x @ contraction(12, 0.4, 3)) * t + t,
}


@pytest.mark.parametrize("loss", [torch.Tensor.sum, lambda x: x.square().sum()], ids=["linear", "square"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_repeated_backward_beyond_the_order_is_refused(name: str, loss) -> None:
    """Plain autograd says nothing beforehand: n backward passes are exact or an error, never wrong."""
    start = torch.zeros(1, 12 if name == "of many numbers" else 1, dtype=F64)
    t = torch.tensor(0.7, dtype=F64, requires_grad=True)

    def function(x):
        return PROBLEMS[name](x, t)

    def nth(value: torch.Tensor, n: int) -> float:
        for k in range(n):
            (value,) = torch.autograd.grad(value, t, create_graph=k < n - 1)
        return float(value)

    for order, n in itertools.product((1, 2, 3), (1, 2, 3, 4)):
        value = loss(fixed_point(function, start, order=order).value)
        if n <= order:
            assert nth(value, n) == pytest.approx(nth(loss(unrolled(function, start)), n), rel=1e-8)
        else:
            with pytest.raises(ArgumentError, match=rf"beyond order={order} would be wrong"):
                nth(value, n)


def test_mixtures_of_modes_beyond_the_order_are_refused() -> None:
    """A tangent and two backward passes; a Hessian by torch.func and one backward pass after it."""
    start, one = torch.zeros(1, 1, dtype=F64), torch.tensor(1.0, dtype=F64)

    def square(t: torch.Tensor, order: int | None) -> torch.Tensor:
        def f(x):
            return torch.tanh(t * x) + 0.4

        return (fixed_point(f, start, order=order).value if order else unrolled(f, start)).square().sum()

    def tangent_of(passes: int, order: int | None) -> float:
        t = torch.tensor(0.7, dtype=F64, requires_grad=True)
        with forward_ad.dual_level():
            value = square(forward_ad.make_dual(t, one), order)
            for _ in range(passes):
                (value,) = torch.autograd.grad(value, t, create_graph=True)
            return float(forward_ad.unpack_dual(value).tangent.detach())

    for passes in (0, 1):
        assert tangent_of(passes, passes + 1) == pytest.approx(tangent_of(passes, None), rel=1e-8)

    def tangent_of_second(order: int | None) -> float:
        return tangent_of(2, order)

    def slope_of_hessian(order: int | None) -> float:
        t = torch.tensor(0.7, dtype=F64, requires_grad=True)
        return float(torch.autograd.grad(hessian(lambda s: square(s * t, order))(one), t)[0])

    for third in (tangent_of_second, slope_of_hessian):
        assert third(3) == pytest.approx(third(None), rel=1e-8)
        with pytest.raises(ArgumentError, match="Pass order=3"):
            third(2)


def test_parameters_of_modules_get_gradients() -> None:
    layer = torch.nn.Linear(3, 3).double()
    with torch.no_grad():
        layer.weight.mul_(0.5)
    found = [
        v.square().sum()
        for v in (fixed_point(lambda x: torch.tanh(layer(x)), torch.ones(2, 3, dtype=F64)).value,)
    ]
    slow = unrolled(lambda x: torch.tanh(layer(x)), torch.ones(2, 3, dtype=F64), 100).square().sum()
    for left, right in zip(
        torch.autograd.grad(found[0], layer.parameters()),
        torch.autograd.grad(slow, layer.parameters()),
        strict=True,
    ):
        close(left, right, 1e-9)


def test_the_value_is_nobody_elses() -> None:
    start = torch.ones(2, dtype=F64)
    found = fixed_point(lambda x: start, start, solver="picard")
    found.value.zero_()
    assert (start == 1).all()


def test_start_has_no_derivative() -> None:
    start = torch.zeros(3, dtype=F64, requires_grad=True)
    assert not fixed_point(lambda x: x.cos(), start).value.requires_grad
    assert (
        grad(lambda s: fixed_point(lambda x: x.cos(), s).value.sum())(torch.zeros(3, dtype=F64)) == 0
    ).all()


def test_no_grad_prepares_nothing() -> None:
    weight, calls = torch.tensor(0.5, dtype=F64, requires_grad=True), []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return weight * x.cos()

    with torch.no_grad():
        found = fixed_point(function, torch.zeros(1, dtype=F64))
    assert not found.value.requires_grad
    assert len(calls) == int(found.steps)
    calls.clear()
    found = fixed_point(function, torch.zeros(1, dtype=F64))
    # One evaluation for the Jacobian and the first order, one for the second; the solver's need no graph.
    assert calls == [True] + (int(found.steps) - 1) * [False] + [True, True]


def test_gradient_costs_one_linear_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian, "_DENSE", 0)
    solves = []
    real = jacobian.gmres
    monkeypatch.setattr(
        jacobian, "gmres", lambda *args, **options: solves.append(1) or real(*args, **options)
    )
    weight = A.clone().requires_grad_()
    for order in (1, 2, 3):
        torch.autograd.grad(ours(weight, B, order=order).square().sum(), weight)
        assert len(solves) == 1
        solves.clear()
    grad(lambda a: ours(a, B).square().sum())(A)
    assert len(solves) == 1
    solves.clear()
    jvp(lambda a: ours(a, B), (A,), (A,))
    assert len(solves) == 1


@pytest.mark.usefixtures("linear_solver")
def test_loose_tolerances_leave_second_derivatives_right() -> None:
    """As right as the tolerance: 1e-3 here, where leftovers of a solve and its answers are not far apart."""
    weight = torch.randn(2, 3, dtype=F64, generator=generator(8))

    def loss(a: torch.Tensor) -> torch.Tensor:
        start = oracle(a, B).detach()
        return (fixed_point(lambda x: torch.tanh(x @ a.mT) + B, start, tolerance=1e-3).value * weight).sum()

    exact = hessian(lambda a: (oracle(a, B) * weight).sum())(A)
    for transform in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))):
        assert (transform(loss)(A) - exact).abs().max() < 0.02 * exact.abs().max()


def test_large_events_use_gmres_and_agree() -> None:
    n = 80
    a, b = contraction(n, 0.9, 5), torch.randn(3, n, dtype=F64, generator=generator(5))
    a.requires_grad_()
    value, slow = ours(a, b), unrolled(lambda x: torch.tanh(x @ a.mT) + b, torch.zeros_like(b), 300)
    close(torch.autograd.grad(value.sum(), a)[0], torch.autograd.grad(slow.sum(), a)[0], 1e-9)


def test_slow_rotations_have_derivatives() -> None:
    n = 80
    turn = 0.99 * torch.linalg.qr(torch.randn(n, n, dtype=F64, generator=generator(9))).Q
    inverse = torch.linalg.inv(torch.eye(n, dtype=F64) - turn)
    b = torch.randn(n, dtype=F64, generator=generator(10), requires_grad=True)
    value = fixed_point(lambda x: turn @ x + b, inverse @ b.detach()).value
    close(torch.autograd.grad(value.sum(), b)[0], inverse.sum(0), 1e-8)


def test_coupled_samples_are_found_out() -> None:
    """Tokens that attend to each other, passed as if they were independent."""
    x = torch.randn(4, 5, dtype=F64, generator=generator(6), requires_grad=True)

    def function(z):
        return 0.5 * torch.softmax(z @ z.mT, -1) @ z + x

    with pytest.raises(ConvergenceError, match="event_dims"):
        fixed_point(function, torch.zeros_like(x)).value.square().sum().backward()
    fixed_point(function, torch.zeros_like(x), event_dims=2).value.square().sum().backward()


@pytest.mark.usefixtures("linear_solver")
def test_singular_derivative_is_found_out() -> None:
    """X = x − x³ + c at c = 0: the slope is 1 at the fixed point 0, and dx/dc is infinite."""
    c = torch.zeros(1, dtype=F64, requires_grad=True)
    found = fixed_point(lambda x: x - x**3 + c, torch.zeros(1, dtype=F64))
    with pytest.raises(ConvergenceError, match="eigenvalue near 1"):
        found.value.backward()


def test_attention_layer_and_kernels_inside() -> None:
    """Z = norm(z + attend(z) + x) with the library's own attention: first and second derivatives of keys
    and input.
    """
    g = generator(7)
    x, w = 0.5 * torch.randn(1, 3, 4, dtype=F64, generator=g), torch.randn(4, 4, dtype=F64, generator=g) / 3

    def layer(z: torch.Tensor, x: torch.Tensor, w: torch.Tensor, fused: bool) -> torch.Tensor:
        q = (z @ w).unsqueeze(1)
        k = z.unsqueeze(1)
        seen = xt.attend(q, k, k).output if fused else torch.softmax(q @ k.mT / 2, -1) @ k
        return torch.nn.functional.layer_norm(0.2 * z + 0.3 * seen.squeeze(1) + x, (4,))

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fixed_point(
            lambda z: layer(z, x, w, True), torch.zeros_like(x), event_dims=2, max_steps=2000
        ).value[0, 0, 0]

    def slow(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return unrolled(lambda z: layer(z, x, w, False), torch.zeros_like(x), 40)[0, 0, 0]

    for ours, theirs in zip(grad(loss, (0, 1))(x, w), grad(slow, (0, 1))(x, w), strict=True):
        close(ours, theirs, 1e-6)
    direction = torch.randn(4, 4, dtype=F64, generator=g)
    second = [jvp(grad(f, 1), (x, w), (torch.zeros_like(x), direction))[1] for f in (loss, slow)]
    assert second[1].abs().max() > 1e-2
    close(*second, 1e-6)
    patterns = (torch.randn(6, 4, dtype=F64, generator=g) / 2).requires_grad_()
    states, weight = torch.zeros(2, 4, dtype=F64), torch.randn(2, 4, dtype=F64, generator=g)
    values = [
        fixed_point(lambda s: xt.Empirical(patterns).mean(s) / 2, states).value,
        unrolled(lambda s: torch.softmax(s @ patterns.mT, -1) @ patterns / 2, states, 60),
    ]
    close(*values)
    close(*(torch.autograd.grad((value * weight).sum(), patterns)[0] for value in values))


def test_unconverged_samples_keep_a_derivative_and_no_memory_leaks() -> None:
    a = torch.tensor(0.9, dtype=F64, requires_grad=True)
    found = fixed_point(
        lambda x: a * x + 1, torch.zeros(1, dtype=F64), solver="picard", max_steps=3, throw=False
    )
    (slope,) = torch.autograd.grad(found.value.sum(), a)
    close(slope, (found.value / (1 - a)).detach()[0])  # x/(1 − a), at the x where it stopped
    b = torch.tensor(1.0, dtype=F64, requires_grad=True)
    found = fixed_point(
        lambda x: b * x * x, torch.tensor([1.5], dtype=F64), solver="picard", max_steps=3, throw=False
    )
    close(found.value, torch.tensor([1.5], dtype=F64))  # it runs away: the first point was the best
    close(torch.autograd.grad(found.value.sum(), b)[0], torch.tensor(1.5**2 / (1 - 2 * 1.5), dtype=F64))
    gc.collect()
    gc.disable()
    try:
        value = fixed_point(lambda x: torch.tanh(a * x) + 1, torch.zeros(40, dtype=F64)).value
        value.sum().backward()
        seen = weakref.ref(value)
        del value
        assert seen() is None
    finally:
        gc.enable()


def test_compiled_caller() -> None:
    def function(b):
        return 2 * ours(A, torch.sin(b))

    b = B.clone().requires_grad_()
    compiled = torch.compile(function, backend="eager")
    close(compiled(b), function(b))
    close(torch.autograd.grad(compiled(b).sum(), b)[0], torch.autograd.grad(function(b).sum(), b)[0])
