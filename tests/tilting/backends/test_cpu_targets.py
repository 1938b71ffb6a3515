"""Every instruction set that this processor runs gives the right numbers."""

import os
import subprocess
import sys

import pytest

from exptilt._support import native

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


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def runs(target):
    """Whether this processor runs a target that was built."""
    file = native._found().get(target)
    return file is not None and native._open(file) is not None


# The other tests run on the best target.
@pytest.mark.parametrize(
    "target",
    [pytest.param(name, marks=pytest.mark.slow if name in ("v4", "v3") else ()) for name in native.TARGETS],
)
def test_every_target(target):
    if not runs(target):
        pytest.skip(f"this processor does not run {target}, or it was not built")
    run(EVERYTHING, EXPTILT_TARGET=target)


def test_a_cache_that_means_nothing_is_refused(monkeypatch):
    from exptilt._support.errors import ArgumentError
    from exptilt.tilting.backends import layout

    monkeypatch.setenv("EXPTILT_CACHE_KIB", "0")
    with pytest.raises(ArgumentError, match="EXPTILT_CACHE_KIB"):
        layout.tuning.__wrapped__()
