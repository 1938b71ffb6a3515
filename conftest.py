"""Names that every doctest may use without importing them: `torch` and `xt`; and what cannot be imported for its doctests."""

from importlib.util import find_spec

import pytest
import torch

import exptilt

# Triton is published for Linux only. Elsewhere its one module has no doctests to run; its tests say that they are skipped.
collect_ignore = [] if find_spec("triton") else ["src/exptilt/tilting/backends/triton.py"]


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace["torch"] = torch
    doctest_namespace["xt"] = exptilt
