"""Every vector width gives the right numbers on every processor, and so do kernels for a generic one.

Compiling is most of the time, so one small case runs with the other tests and the rest is marked slow.
"""

import os
import subprocess
import sys

import pytest

FORWARD = """
import torch, exptilt as xt
torch.manual_seed(0)
q, k, v = torch.randn(2, 4, 37, 20), torch.randn(2, 2, 83, 20), torch.randn(2, 2, 83, 9)
tensors = dict(bias=torch.randn(37, 83), log_weight=torch.randn(2, 83), sink=torch.randn(4))
options = dict(causal=True, softcap=3.0, **tensors)
found, expected = (xt.attend(q, k, v, backend=backend, **options) for backend in ("cpu", "reference"))
for name in ("output", "log_normalizer", "entropy", "score_mean", "score_variance", "score_max"):
    torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=1e-5)
"""

EVERYTHING = """
import torch, exptilt as xt
from torch.func import grad, jvp

def problem(dtype, Q, K, D, Dv, **more):
    random = lambda *shape: torch.randn(shape, dtype=torch.float64).to(dtype)
    main = [random(2, 4, Q, D), random(2, 2, K, D), random(2, 2, K, Dv)]
    tensors = [*main, random(Q, K), random(2, K), random(4)]
    return tensors, more

def results(tensors, more, backend):
    def statistics(*tensors):
        query, key, value, bias, log_weight, sink = tensors
        options = dict(bias=bias, log_weight=log_weight, sink=sink, key_mass=True, backend=backend, **more)
        return list(vars(xt.attend(query, key, value, **options)).values())[:7]
    def loss(*tensors):
        return sum(x.sin().sum() for x in statistics(*tensors)[:-1])
    everything = tuple(range(6))
    dots = tuple(torch.cos(x) for x in tensors)
    slopes = grad(loss, everything)
    pushed = jvp(statistics, tuple(tensors), dots)[1][:-1]
    return [*statistics(*tensors), *slopes(*tensors), *pushed, *jvp(slopes, tuple(tensors), dots)[1]]

torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 2e-4), (torch.float64, 1e-10)):
    for sizes, more in (
        ((37, 83, 20, 9), {"causal": True, "softcap": 3.0}),
        ((1, 200, 33, 16), {}),
        ((5, 70, 8, 1), {"window": 20}),
        ((130, 61, 16, 64), {"causal": True, "window": 30}),
    ):
        tensors, more = problem(dtype, *sizes, **more)
        pair = results(tensors, more, "cpu"), results(tensors, more, "reference")
        for found, expected in zip(*pair, strict=True):
            # a query that sees nothing has a maximum of −inf
            scale = 1 + expected[expected.isfinite()].abs().max()
            torch.testing.assert_close(found / scale, expected / scale, atol=tolerance, rtol=0)
"""


def run(code, folder, **environment):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_the_widest_vectors_are_compiled_once_and_kept(tmp_path):
    first = run(FORWARD, tmp_path, EXPTILT_VECTOR_BITS="512")
    second = run(FORWARD, tmp_path, EXPTILT_VECTOR_BITS="512")
    assert "compiling the forward kernel of attention for float32" in first
    assert "compiling" not in second
    assert list((tmp_path / "exptilt").glob("*.nbi"))


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["128", "256", "512"])
def test_every_width(bits, tmp_path):
    run(EVERYTHING, tmp_path, EXPTILT_VECTOR_BITS=bits)


@pytest.mark.slow
def test_a_generic_processor(tmp_path):
    run(EVERYTHING, tmp_path, NUMBA_CPU_NAME="generic")


@pytest.mark.parametrize(
    ("name", "text"),
    [("EXPTILT_VECTOR_BITS", "384"), ("EXPTILT_VECTOR_BITS", "wide"), ("EXPTILT_CACHE_KIB", "0")],
)
def test_a_setting_that_means_nothing_is_refused(name, text, monkeypatch):
    from exptilt._support.errors import ArgumentError
    from exptilt.tilting.backends.numba.machine import machine

    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=name):
        machine.__wrapped__()
