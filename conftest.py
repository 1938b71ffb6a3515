"""Names that every doctest may use without importing them: `torch` and `xt`."""

import pytest
import torch

import exptilt


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace["torch"] = torch
    doctest_namespace["xt"] = exptilt
