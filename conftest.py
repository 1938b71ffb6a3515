"""Names that docstrings may use without importing them (`torch`, `xt`), and what has no doctests to run.

Pages run as typed: they import what they use.

Where several processes share the tests (`make test`), each takes its part of the cores: with as many threads
as cores in each, they would spin in each other's way.
"""

import getpass
import os
import random
import tempfile
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

import exptilt

# Two processes that compile at once with torch's inductor get in each other's way: each has its own cache.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR",
        os.path.join(tempfile.gettempdir(), f"exptilt-inductor-{getpass.getuser()}-{worker}"),
    )

# Triton is published for Linux only. Elsewhere its module has no doctests, and its tests are skipped.
collect_ignore = [] if find_spec("triton") else ["src/exptilt/tilting/backends/triton"]


if (_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    _threads = max(1, (os.cpu_count() or 1) // _processes)
    torch.set_num_threads(_threads)
    os.environ["OMP_NUM_THREADS"] = str(_threads)  # for what the tests start


# The same examples in every run: a failure that comes and goes with the hour helps nobody.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Numbers of torch's global generator, and of Python's, do not depend on which tests ran before."""
    torch.manual_seed(0)
    random.seed(0)


# Examples that take seconds; tests/claims/test_ledger.py runs them, with all others of claims, as slow tests.
_LONG = {"exptilt.claims.memory.moving", "exptilt.claims.models.questions.climbs"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name in _LONG:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _doctest_names(request, doctest_namespace):
    for name, module in (("torch", torch), ("xt", exptilt)):
        if request.path.suffix == ".py":
            doctest_namespace[name] = module
        else:
            doctest_namespace.pop(name, None)
