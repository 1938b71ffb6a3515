"""The continuous limit: velocities against projections derived by hand, constraints kept, order of
convergence, closed forms.
"""

import math
import sys

import pytest
import scipy.linalg
import torch

from exptilt._support.errors import ArgumentError, ConvergenceError, MissingExtraError
from exptilt.dynamics import RMS, Batch, Flow, Layer, Sphere, Whiten
from exptilt.dynamics.continuous import velocity
from exptilt.families import Gaussian

F64 = torch.float64
S = torch.tensor([[2.0, 0.3, 0.1], [0.3, 1.0, -0.4], [0.1, -0.4, 1.5]], dtype=F64)
M = torch.tensor([0.5, -1.0, 2.0], dtype=F64)


def cloud(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def whiten_tangent(x, v):
    """V − mean v − B(x − m), B S + S B = Cov(v,x) + Cov(x,v), the equation solved by SciPy."""
    cross = (v - v.mean(0)).mT @ (x - M) / len(x)
    B = torch.from_numpy(scipy.linalg.solve_continuous_lyapunov(S.numpy(), (cross + cross.mT).numpy()))
    return v - v.mean(0) - (x - M) @ B.mT


PROJECTIONS = {
    "sphere": (Sphere(1.5), lambda x, v: v - x * (x * v).sum(-1, keepdim=True) / 1.5**2),
    "rms": (RMS(), lambda x, v: v - x * (x * v).mean(-1, keepdim=True)),
    "layer": (Layer(), lambda x, v: v - v.mean(-1, keepdim=True) - x * (x * v).mean(-1, keepdim=True)),
    "batch": (Batch(), lambda x, v: v - v.mean(0) - x * (x * v).mean(0)),
    "whiten": (Whiten(M, S), whiten_tangent),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_velocity_is_the_projection(name):
    renormalize, project = PROJECTIONS[name]
    x = renormalize(cloud(11, 3))
    flow = Flow(renormalize, beta=0.9)
    torch.testing.assert_close(velocity(flow.slope, renormalize, x), project(x, flow.slope(x).gradient))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_constraint_is_kept(name):
    renormalize, _ = PROJECTIONS[name]
    path = Flow(renormalize, beta=1.2).ode(cloud(2, 11, 3), 2.0, samples=4, rtol=1e-7, atol=1e-9)
    assert float((path.states[0] - path.states[-1]).abs().max()) > 0.1
    torch.testing.assert_close(renormalize(path.states), path.states, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(path.states[0], renormalize(cloud(2, 11, 3)))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_steps_converge_to_it_with_order_one(name):
    renormalize, _ = PROJECTIONS[name]
    start, time = renormalize(cloud(9, 3, seed=3)), 0.5
    exact = Flow(renormalize).ode(start, time, samples=2, rtol=1e-9, atol=1e-11).last
    errors = []
    for steps in (16, 32, 64):
        last = Flow(renormalize, step=time / steps).run(start, steps, keep="last", measure_every=None).last
        errors.append(float((last - exact).norm()))
    orders = [math.log2(errors[place] / errors[place + 1]) for place in range(2)]
    assert orders == pytest.approx([1.0, 1.0], abs=0.08)


def test_a_linear_flow_has_a_closed_form():
    """H = N(μ, Σ) without a renormaliser: dη/dt = μ + βΣη, so η + Σ⁻¹μ/β grows by e^{βΣt}."""
    points, beta, time = cloud(5, 3), 0.4, 1.5
    path = Flow(None, beta=beta, patterns=Gaussian(M, S)).ode(points, time, samples=3, rtol=1e-9, atol=1e-11)
    shift = torch.linalg.solve(S, M) / beta
    wanted = (points + shift) @ torch.matrix_exp(beta * S * time) - shift
    torch.testing.assert_close(path.last, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(path.time, torch.tensor([0.0, 0.75, 1.5], dtype=F64))


def test_samples_do_not_change_the_solution():
    few, many = (Flow("sphere").ode(cloud(9, 2), 2.0, samples=n, rtol=1e-9, atol=1e-11) for n in (3, 11))
    torch.testing.assert_close(few.states, many.states[::5], rtol=1e-6, atol=1e-6)
    assert Flow("sphere").ode(cloud(9, 2), 2.0, samples=5, keep=2).kept.tolist() == [0, 2, 4]


def test_held_states_do_not_change_the_solution(monkeypatch):
    whole = Flow("sphere").ode(cloud(9, 2), 2.0, samples=8, rtol=1e-9, atol=1e-11)
    monkeypatch.setattr("exptilt.dynamics.continuous._HELD", 3 * 9 * 2 * 8)  # three samples at a time
    parts = Flow("sphere").ode(cloud(9, 2), 2.0, samples=8, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(parts.states, whole.states, rtol=1e-6, atol=1e-6)
    assert torch.equal(parts.time, whole.time)


def test_causal_and_masked():
    points, mask = cloud(6, 2), torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    flow = Flow("sphere", causal=True, mask=mask)
    exact = flow.ode(points, 0.5, samples=2).last
    steps = (
        Flow("sphere", causal=True, mask=mask, step=0.001)
        .run(Sphere()(points), 500, keep="last", measure_every=None)
        .last
    )
    torch.testing.assert_close(exact, steps, atol=1e-3, rtol=1e-3)


def test_a_renormaliser_of_ones_own():
    """Held to an ellipse of equal weights, the user's function alone is enough."""
    weight = torch.tensor([1.0, 4.0], dtype=F64)
    path = Flow(lambda x: x / (weight * x**2).sum(-1, keepdim=True).sqrt()).ode(
        cloud(5, 2), 1.0, samples=3, rtol=1e-8
    )
    torch.testing.assert_close(
        (weight * path.states**2).sum(-1), torch.ones(3, 5, dtype=F64), atol=1e-6, rtol=1e-6
    )


def test_bad_input():
    points = cloud(5, 3)
    with pytest.raises(ArgumentError, match="renormalising twice is not renormalising once"):
        Flow(Layer(epsilon=1e-2)).ode(points, 1.0)
    with pytest.raises(ArgumentError, match="time is -1"):
        Flow("sphere").ode(points, -1)
    with pytest.raises(ArgumentError, match="keep is 'few'"):
        Flow("sphere").ode(points, 1.0, keep="few")
    with pytest.raises(ArgumentError, match="samples is 1"):
        Flow("sphere").ode(points, 1.0, samples=1)
    with pytest.raises(ConvergenceError, match="5 evaluations did not reach time 1"):
        Flow("sphere").ode(points, 1.0, max_evaluations=5)
    for bad in ({"rtol": -1}, {"rtol": 0, "atol": 0}, {"atol": math.nan}):
        with pytest.raises(ArgumentError, match=r"rtol is .* and atol is"):
            Flow("sphere").ode(points, 1.0, **bad)
    with pytest.raises(ArgumentError, match="float16, too coarse"):
        Flow("sphere").ode(points.half(), 1.0)
    with pytest.raises(ConvergenceError, match="could not go on near time"):
        Flow(None).ode(1e150 * points, 50.0, samples=2)
    with pytest.raises(ArgumentError, match=r"points\[0\] holds NaN"):
        Flow("sphere").ode(points * math.nan, 1.0)


def test_the_bar_counts_the_samples(monkeypatch):
    seen = []

    def track(items, description, *, total, show):
        seen.append((description, total))
        return items

    monkeypatch.setattr("exptilt.dynamics.flow.track", track)
    Flow("sphere").ode(cloud(5, 2), 2.0, samples=4)
    assert seen == [("flow, continuous", 3)]


def test_without_torchdiffeq(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'exptilt\[ode\]'"):
        Flow("sphere").ode(cloud(5, 3), 1.0)
