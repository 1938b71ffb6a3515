"""Users' functions recorded as tapes: values and Jacobians are the functions', in torch and in numpy."""

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from exptilt.switching import SwitchingNonlinear
from exptilt.switching.nonlinear.programs import Tapes


def recorded(function, n=3, size=3, r=0):
    tapes = Tapes(n, r)
    tapes.record(function, "f", np.linspace(0.7, 1.2, n), size)
    return tapes


def by_hand(x):
    out = torch.zeros_like(x)
    out[..., 0] = x[..., 1] * 2.0
    out[..., 1:] = x[..., 1:].flip(-1).clamp(min=0.6, max=5.0)
    return out


def by_hand_in_numpy(x):
    out = np.zeros_like(x)
    out[..., 0] = x[..., 1] * 2.0
    out[..., 1:] = x[..., 1:][..., ::-1].clip(0.6, 5.0)
    return out


def in_place(x):
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[..., :2] = x[..., :2]
    out[..., 1].mul_(x[..., 2]).add_(3.0)
    out += torch.linalg.inv(WEIGHT)[0]
    return out


WEIGHT = torch.tensor([[0.3, -0.2, 0.5], [1.0, 0.4, 0.0], [0.2, 0.9, -0.7]], dtype=torch.float64)
MATRIX = WEIGHT.numpy()
FUNCTIONS = [
    lambda x: torch.stack([x[..., 0].sin() / x[..., 1], x[..., 1] ** 3, torch.tan(x[..., 2])], -1),
    lambda x: torch.tanh(x @ WEIGHT.T + WEIGHT[0]) - torch.relu(x - 1.0),
    lambda x: torch.cat(
        [torch.hypot(x[..., :1], x[..., 1:2]), torch.atan2(x[..., 1:2], x[..., 2:]), 1 / x[..., :1]], -1
    ),
    lambda x: torch.where(x > 1.0, x.exp(), x.log()) * x.sum(-1, keepdim=True),
    lambda x: torch.stack([x.norm(dim=-1), x.abs().mean(-1), torch.sqrt(x.square().sum(-1))], -1),
    lambda x: torch.sigmoid(x) + torch.maximum(x, x.roll(1, -1)) + x.expm1() * x.log1p() - x.atan(),
    lambda x: x.pow(x) + x.pow(1.5) - (x / 4).acos() + (x / 4).asin() * x.cosh() + x.sinh() * x.sign(),
    by_hand,
    lambda x: torch.where((x > 0.8) & ~(x > 1.5) | (x < 0.6), x.exp(), -x),
    in_place,
    lambda x: x * WEIGHT[0, 0].item(),
]
IN_NUMPY = [
    lambda x: np.stack([np.sin(x[..., 0]) / x[..., 1], x[..., 1] ** 3, np.tan(x[..., 2])], -1),
    lambda x: np.tanh(x @ MATRIX.T + MATRIX[0]) - np.maximum(x - 1.0, 0.0),
    lambda x: np.concatenate(
        [np.hypot(x[..., :1], x[..., 1:2]), np.arctan2(x[..., 1:2], x[..., 2:]), 1 / x[..., :1]], -1
    ),
    lambda x: np.where(x > 1.0, np.exp(x), np.log(x)) * x.sum(-1, keepdims=True),
    lambda x: np.stack([np.linalg.norm(x, axis=-1), abs(x).mean(-1), np.sqrt(np.sum(x**2, -1))], -1),
    lambda x: (
        1 / (1 + np.exp(-x)) + np.maximum(x, np.roll(x, 1, -1)) + np.expm1(x) * np.log1p(x) - np.arctan(x)
    ),
    lambda x: x**x + x**1.5 - np.arccos(x / 4) + np.arcsin(x / 4) * np.cosh(x) + np.sinh(x) * np.sign(x),
    by_hand_in_numpy,
    lambda x: np.where((x > 0.8) & ~(x > 1.5) | (x < 0.6), np.exp(x), -x),
    lambda x: np.sin(x) * np.prod(x, -1)[..., None],
    lambda x: np.einsum("ij,...j->...i", MATRIX, x) + np.float64(2) ** x,
    lambda x: np.array([x[..., 0], np.cos(x[..., 1]), x[..., 2] * 2]).T,
    lambda x: np.asarray(x) * 2 + np.ones_like(x),
    lambda x: np.moveaxis(np.stack([np.dot(x, MATRIX[0]), np.max(x, -1), x.min(axis=-1)]), 0, -1),
]


@pytest.mark.parametrize("style", ["torch", "numpy"])
def test_tapes_are_the_functions(style):
    """Values and Jacobians at points where every branch is taken; torch's Jacobians, or differences."""
    points = np.random.default_rng(0).uniform(0.5, 2.0, size=(6, 3))
    for k, function in enumerate(FUNCTIONS if style == "torch" else IN_NUMPY):
        tapes = recorded(function)
        value, both = (tapes.values(program, points, np.empty(0)) for program in (0, 1))
        want = function(torch.from_numpy(points) if style == "torch" else points)
        np.testing.assert_allclose(value, want, rtol=1e-13, atol=1e-13, err_msg=str(k))
        np.testing.assert_array_equal(both[:, :3], value)
        for x, row in zip(points, both, strict=True):
            slope = row[3:].reshape(3, 3)
            if style == "torch":
                jacobian = (
                    torch.func.jacfwd(function)(torch.from_numpy(x)) if function is not in_place else None
                )
            else:
                shifts = 1e-6 * np.eye(3)
                jacobian = np.stack([(function(x + d) - function(x - d)) / 2e-6 for d in shifts], -1)
            if jacobian is not None:
                close = 1e-12 if style == "torch" else 1e-7
                np.testing.assert_allclose(slope, jacobian, rtol=close, atol=close, err_msg=str(k))


UNARY = {
    "sin": lambda m, v: m.sin(v),
    "cos": lambda m, v: m.cos(v),
    "tanh": lambda m, v: m.tanh(v),
    "exp": lambda m, v: m.exp(-v * v),
    "log": lambda m, v: m.log(1.5 + v * v),
    "sqrt": lambda m, v: m.sqrt(0.5 + v * v),
    "square": lambda m, v: m.square(v) / 3,
    "abs": lambda m, v: abs(v),
    "log1p": lambda m, v: m.log1p(abs(v)),
    "expm1": lambda m, v: m.expm1(0.3 * m.sin(v)),
    "sinh": lambda m, v: m.sinh(m.tanh(v)),
    "reciprocal": lambda m, v: m.reciprocal(2 + m.cos(v)),
    "neg": lambda m, v: -v,
    "power": lambda m, v: (1 + v * v) ** 0.7,
}
BINARY = {
    "add": lambda m, v, w: v + w,
    "sub": lambda m, v, w: v - 0.5 * w,
    "mul": lambda m, v, w: v * w,
    "div": lambda m, v, w: v / (1 + w * w),
    "hypot": lambda m, v, w: m.hypot(v, 1 + abs(w)),
    "atan2": lambda m, v, w: (m.atan2 if m is torch else m.arctan2)(v, 2 + m.cos(w)),
    "maximum": lambda m, v, w: m.maximum(v, w),
    "where": lambda m, v, w: m.where(v > w, v * w, w - v),
    "and": lambda m, v, w: m.where((v > 0.4) & ((w < 0.9) | (v > w)), m.sin(w), v),
    "pow": lambda m, v, w: (1.2 + m.cos(v)) ** m.tanh(w),
}


def expression(rng, n, r):
    """A random function of the state (and inputs) as a list of steps, for torch or numpy."""
    steps, count = [], n + r
    for _ in range(rng.integers(3, 25)):
        if rng.random() < 0.5:
            steps.append((UNARY[rng.choice([*UNARY])], rng.integers(0, count, 1)))
        else:
            steps.append((BINARY[rng.choice([*BINARY])], rng.integers(0, count, 2)))
        count += 1
    picks = rng.integers(0, count, 3)

    def function(library, x, *u):
        values = [x[..., i] for i in range(n)] + [u[0][..., i] for i in range(r)]
        for step, places in steps:
            values.append(step(library, *(values[k] for k in places)))
        return library.stack([values[k] for k in picks], -1)

    return function


@pytest.mark.parametrize("seed", range(25))
def test_random_expressions(seed):
    """Values and Jacobians against torch's, in both styles, at any number of points."""
    rng = np.random.default_rng(seed)
    n, r = int(rng.integers(1, 6)), int(rng.integers(0, 3))
    function = expression(rng, n, r)
    u = rng.uniform(-1.0, 1.0, r)
    given = () if r == 0 else (torch.from_numpy(u),)
    points = rng.uniform(-1.5, 1.5, size=(int(rng.integers(1, 12)), n))

    def at(x):
        return function(torch, x, *given)

    want = np.stack([at(x).numpy() for x in torch.from_numpy(points)])
    slopes = np.stack([torch.func.jacrev(at)(x).numpy() for x in torch.from_numpy(points)])
    for library in (torch, np):
        tapes = recorded(lambda *args, m=library: function(m, *args), n, 3, r)
        value, both = (tapes.values(program, points, u) for program in (0, 1))
        np.testing.assert_allclose(value, want, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(both[:, 3:].reshape(-1, 3, n), slopes, rtol=1e-9, atol=1e-10)
        alone = np.concatenate([tapes.values(1, x[None], u) for x in points])
        np.testing.assert_array_equal(alone, both)  # a point knows nothing of its neighbours


def test_other_numbers_have_the_same_instructions():
    first, second = (recorded(lambda x, k=k: k * x.sin() + k) for k in (2.0, 3.0))
    assert first.code == second.code
    assert first.numbers != second.numbers


def model(function, **options):
    return SwitchingNonlinear(
        **{
            "transition": np.eye(2),
            "dynamics": [lambda x: x, function],
            "process_noise": np.eye(2),
            "observation": lambda x: x[..., :1],
            "observation_noise": np.eye(1),
            "initial_mean": [0.0, 0.0],
            "initial_covariance": np.eye(2),
            "initial_probability": [0.5, 0.5],
        }
        | options
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x if x.sum() > 0 else -x, "Use torch.where or np.where"),
        (lambda x: np.sin(x) if np.all(x > 0) else np.cos(x), "numpy's logical_and.reduce"),
        (lambda x: np.stack([x[..., 0] if x[..., :1].sum() > 0 else x[..., 1]] * 2, -1), "Use torch.where"),
        (lambda x: torch.special.i0(x), "dynamics of mode 1 cannot be compiled: it uses torch's i0"),
        (
            lambda x: np.cumsum(np.sin(x), -1),
            "dynamics of mode 1 cannot be compiled: it uses numpy's add.acc",
        ),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "torch's div with rounding_mode"),
        (lambda x: x + torch.from_numpy(np.sin(x.detach().numpy())), "its compiled form"),
        (lambda x: x + torch.rand(2, dtype=x.dtype), "its compiled form"),
        (lambda x: np.array(np.sin(x), dtype=float), "makes a plain number of a state"),
        (lambda x: np.sin(x) + (math.sin(x[0]) if x.ndim == 1 else 0.0), "makes a plain number of a state"),
        (
            lambda x: np.stack([np.sin(x[..., 0])] * 3, -1),
            r"gives \(3,\) for .* Return an array of shape \(2,\)",
        ),
        (lambda x: np.sin(x)[5], "fails for states of shape"),
        (lambda x: [x], "gives list"),
    ],
)
def test_functions_that_cannot_be_recorded(function, words):
    with pytest.raises(ValueError, match=words):
        model(function)


def test_functions_in_numpy_filter_as_those_in_torch():
    y = np.random.default_rng(0).normal(size=(20, 1))
    pairs = [
        (model(torch.sin, observation=lambda x: torch.exp(x[..., :1] / 4)), "torch"),
        (model(np.sin, observation=lambda x: np.exp(x[..., :1] / 4)), "numpy"),
    ]
    for linearize in ("extended", "unscented"):
        one, other = (made.smooth(y, linearize=linearize) for made, _ in pairs)
        np.testing.assert_array_equal(one.mode_mean, other.mode_mean)
        np.testing.assert_array_equal(one.mode_covariance, other.mode_covariance)


def test_copies_have_tapes_of_their_own():
    """Structs hold addresses: a copy must not use those of what it was copied from."""
    y = np.random.default_rng(0).normal(size=(20, 1))
    made = model(np.sin)
    want = made.filter(y).mean
    for copied in (copy.deepcopy(made), copy.copy(made), pickle.loads(pickle.dumps(made._core))):
        if isinstance(copied, SwitchingNonlinear):
            np.testing.assert_array_equal(copied.filter(y).mean, want)
        else:
            assert copied.address("extended") != made._core.address("extended")


def test_series_on_several_threads():
    y = np.random.default_rng(0).normal(size=(40, 30, 1))
    made, threads, found = model(np.sin), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(made.smooth(y, linearize="unscented").mode_covariance)
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_torchs_compiler_is_not_loaded():
    """Its import takes longer than all that is recorded."""
    code = (
        "import sys, numpy as np, torch; from exptilt.switching.nonlinear.programs import Tapes; "
        "Tapes(2, 0).record(torch.sin, 'f', np.zeros(2), 2); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
