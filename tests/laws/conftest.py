"""Every law runs on every case; a fixed generator per test."""

import zlib

import pytest
import torch


@pytest.fixture
def g(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(request.node.name.encode()))
