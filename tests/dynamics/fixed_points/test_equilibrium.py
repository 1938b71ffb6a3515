"""Equilibrium: the module."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

from dynamics.fixed_points.problems import F64, close, generator, unrolled
from exptilt._support.errors import ArgumentError, ConvergenceError
from exptilt.dynamics import Equilibrium, Status, fixed_point, jacobian_penalty
from exptilt.dynamics.fixed_points import equilibrium, solve


class Layer(nn.Module):
    """norm(z/4 + attention(z) + x): tokens attend to each other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.value, self.norm = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(z / 4 + 0.3 * torch.softmax(self.query(z) @ z.mT / 4, -1) @ self.value(z) + x)


def layer(dim: int = 4) -> Layer:
    torch.manual_seed(0)
    return Layer(dim).double()


def inputs() -> Tensor:
    return torch.randn(3, 5, 4, dtype=F64, generator=generator(0))


@pytest.mark.parametrize("solver", ["anderson", "picard"])
def test_output_and_gradients_against_unrolling(solver: str) -> None:
    f, x = layer(), inputs().requires_grad_()
    z = Equilibrium(f, solver=solver, event_dims=2)(x)
    slow = unrolled(lambda state: f(state, x), torch.zeros_like(x), 200)
    close(z, slow, 1e-9)
    weight = torch.randn(z.shape, dtype=F64, generator=generator(1))
    for left, right in zip(
        *(torch.autograd.grad((v * weight).sum(), (x, *f.parameters())) for v in (z, slow)), strict=True
    ):
        close(left, right, 1e-8)


def test_state_dict_is_the_modules() -> None:
    f = layer()
    model = Equilibrium(f, event_dims=2)
    assert model.state_dict().keys() == f.state_dict().keys()
    other = Equilibrium(layer(), event_dims=2)
    with torch.no_grad():
        other.module.query.weight.zero_()
    other.load_state_dict(f.state_dict())
    assert (other.module.query.weight == f.query.weight).all()
    nested = nn.Sequential(nn.Linear(4, 4).double(), model)
    names = set(nested.state_dict())
    assert "1.query.weight" in names
    twin = nn.Sequential(nn.Linear(4, 4).double(), Equilibrium(Layer(4).double(), event_dims=2))
    twin.load_state_dict(nested.state_dict())
    close(twin(inputs()), nested(inputs()), 1e-12)
    with pytest.raises(RuntimeError, match="Missing"):
        other.load_state_dict({})


def test_training_learns() -> None:
    torch.manual_seed(1)
    teacher, student = Equilibrium(layer(), event_dims=2), Equilibrium(Layer(4).double(), event_dims=2)
    x = inputs()
    target = teacher(x).detach()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.03)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (student(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.02 * losses[0]


def test_solution_is_told_and_holds_no_graph() -> None:
    model = Equilibrium(layer(), event_dims=2)
    assert model.solution is None
    z = model(inputs())
    assert model.solution.status is Status.CONVERGED
    assert not model.solution.value.requires_grad
    assert model.solution.trace.shape == (int(model.solution.steps), 3)
    again = model(inputs(), start=z.detach())
    assert int(model.solution.steps) == 1
    close(again, z, 1e-12)
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(model)
        del model, z, again
        assert seen() is None
    finally:
        gc.enable()


def test_copies_modes_and_transforms() -> None:
    model = Equilibrium(layer(), event_dims=2).eval()
    assert not model.module.training
    x = inputs()
    expected = model(x)
    close(copy.deepcopy(model)(x), expected, 1e-12)
    close(pickle.loads(pickle.dumps(model))(x), expected, 1e-12)
    parameters = {name.removeprefix("module."): value.detach() for name, value in model.named_parameters()}

    def loss(p):
        return (
            torch.func.functional_call(model, {f"module.{k}": v for k, v in p.items()}, (x,)).square().mean()
        )

    found = torch.func.grad(loss)(parameters)
    slow = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for left, right in zip(found.values(), slow, strict=True):
        close(left, right, 1e-9)
    assert "anderson" in repr(model)


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {}

    def watched(function, start, options):
        passed.update(vars(options))
        return solve.solve(function, start, options)

    monkeypatch.setattr(equilibrium, "solve", watched)
    options = {
        "solver": "anderson",
        "tolerance": 1e-9,
        "max_steps": 321,
        "event_dims": 2,
        "damping": 0.9,
        "window": 3,
        "order": 3,
        "scale": 0.5,
        "throw": False,
        "strict": True,
    }
    model = Equilibrium(layer(), **options)
    model(inputs())
    assert passed == {"caller": "Equilibrium"} | options
    assert set(options) == set(inspect.signature(fixed_point).parameters) - {"function", "start"}
    assert "damping=0.9" in repr(model)


@pytest.mark.parametrize(
    "wrong",
    [
        {"solver": "foo"},
        {"tolerance": "a"},
        {"max_steps": 0},
        {"event_dims": 1.0},
        {"solver": "picard", "window": 3},
        {"window": 2.5},
        {"damping": 2.0},
        {"order": 1.5},
        {"scale": -1.0},
        {"scale": torch.tensor([-1.0])},
    ],
)
def test_options_are_checked_at_construction(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=rf"Equilibrium: .*{list(wrong)[-1]}"):
        Equilibrium(layer(), **wrong)  # type: ignore[arg-type]


def test_not_converging_is_said() -> None:
    class Twice(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 2 * z.abs() + x

    with pytest.raises(ConvergenceError, match="diverged"):
        Equilibrium(Twice())(torch.ones(2, 3))
    quiet = Equilibrium(Twice(), throw=False)
    quiet(torch.ones(2, 3))
    assert quiet.solution.status is Status.DIVERGED
    with pytest.raises(ArgumentError, match=r"nn\.Module"):
        Equilibrium(lambda z, x: z)  # type: ignore[arg-type]


class Gated(nn.Module):
    """Two inputs beside z: one by place, one by name."""

    def forward(self, z: Tensor, x: Tensor, *, gate: Tensor | float = 1.0) -> Tensor:
        return gate * torch.tanh(z) / 2 + x


class Paired(nn.Module):
    def forward(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(z * x[0]) / 2 + x[1].mean(-1, keepdim=True)


def test_several_inputs() -> None:
    x, gate = (torch.randn(3, 4, dtype=F64, generator=generator(s)).requires_grad_() for s in (2, 3))
    values = [
        Equilibrium(Gated())(x, gate=gate),
        unrolled(lambda z: gate * torch.tanh(z) / 2 + x, torch.zeros_like(x), 200),
    ]
    close(*values, 1e-11)
    for left, right in zip(*(torch.autograd.grad(v.square().sum(), (x, gate)) for v in values), strict=True):
        close(left, right, 1e-9)
    with pytest.raises(TypeError, match="gait"):
        Equilibrium(Gated())(x, gait=gate)


def test_a_tuple_needs_a_start() -> None:
    pair = (torch.rand(3, 4, dtype=F64), torch.rand(3, 7, dtype=F64))
    with pytest.raises(ArgumentError, match=r"x is a tuple, .* Pass start="):
        Equilibrium(Paired())(pair)
    start = torch.zeros(3, 4, dtype=F64)
    slow = unrolled(lambda z: Paired()(z, pair), start)
    close(Equilibrium(Paired())(pair, start), slow, 1e-11)


@pytest.mark.slow
def test_jacobian_penalty() -> None:
    """Against the matrix written out; its gradient against that of the matrix; as torchdeq for the same
    draws.
    """
    f, x = layer(), inputs()[:1]
    z = Equilibrium(f, event_dims=2)(x).detach()

    def exact() -> Tensor:
        matrix = torch.func.jacrev(lambda z: f(z, x))(z)
        return matrix.square().sum() / z.numel()

    def estimate() -> Tensor:
        return jacobian_penalty(lambda z: f(z, x), z, draws=3000, generator=generator(5))

    weight = f.query.weight
    assert float(estimate().detach()) == pytest.approx(float(exact().detach()), rel=0.05)
    slope, wanted = (torch.autograd.grad(value(), weight)[0] for value in (estimate, exact))
    assert (slope - wanted).norm() < 0.15 * wanted.norm()
    with pytest.raises(ArgumentError, match="draws is 0"):
        jacobian_penalty(torch.cos, z, draws=0)
    with pytest.raises(ArgumentError, match="must return the shape"):
        jacobian_penalty(lambda z: z[0], z)
    torchdeq = pytest.importorskip("torchdeq")
    torch.manual_seed(7)
    seen = z.clone().requires_grad_()
    theirs = torchdeq.loss.jac_reg(f(seen, x), seen, vecs=2)
    torch.manual_seed(7)
    vectors = [torch.randn(*z.shape).to(z) for _ in range(2)]  # as they are drawn there

    def drawn(*_: object, **__: object) -> Tensor:
        return vectors.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", drawn)
        ours = jacobian_penalty(lambda z: f(z, x), z, draws=2)
    close(ours, theirs, 1e-12)
