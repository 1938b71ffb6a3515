"""Which backend is chosen for a GPU: releases of Triton, old GPUs, float64, other devices."""

import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import exptilt as xt
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.tilting.backends import dispatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")


TRITONS = {"3.5.1": False, "3.6.0": True, "3.9.0": True, "3.10.0": False, "4.0.0": False, None: False}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there: its capability and Triton's release as a test sets them."""
    facts = {"triton": "3.9.0", "capability": (9, 0)}

    def version(name):
        if facts[name] is None:
            raise dispatch.PackageNotFoundError
        return facts[name]

    monkeypatch.setattr(dispatch, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: facts["capability"])
    dispatch._looked_up.cache_clear()
    yield facts
    dispatch._looked_up.cache_clear()


def chosen(dtype=torch.bfloat16):
    return dispatch.default_backend(torch.device("cuda", 0), dtype)


@pytest.mark.parametrize("triton", TRITONS)
def test_releases_of_triton(gpu, triton):
    """Others than those checked go to plain torch, and one line says so, once."""
    gpu["triton"] = triton
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert {chosen(), chosen(torch.float32)} == {"gpu" if TRITONS[triton] else "tiled"}
    assert len(said) == (not TRITONS[triton])
    for warning in said:
        text = str(warning.message)
        assert "\n" not in text
        assert "backend='tiled'" in text
        assert "pip install 'exptilt[gpu]'" in text if triton is None else f"{triton} is installed" in text


def test_old_gpus(gpu):
    gpu["capability"] = (7, 5)
    with pytest.warns(ExptiltWarning, match=r"compute capability 8\.0 .* has 7\.5"):
        assert chosen() == "tiled"


def test_float64_stays_in_plain_torch(gpu, recwarn):
    assert chosen(torch.float64) == "tiled"
    assert len(recwarn) == 0


@pytest.mark.slow
def test_the_choice_breaks_no_graph(gpu):
    """Looking up releases is not traced."""
    call = torch.compile(lambda x: x + len(chosen(x.dtype)), backend="eager", fullgraph=True)
    assert call(torch.zeros(())) == len("gpu")
    gpu["triton"] = None
    dispatch._looked_up.cache_clear()
    torch._dynamo.reset()
    with pytest.warns(ExptiltWarning, match="not installed"):
        assert call(torch.zeros(())) == len("tiled")


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with FakeTensorMode():
        x = torch.zeros(1, 2, 3, device="mps")
        with pytest.raises(
            ArgumentError, match=r"query is on mps:0\. Move the tensors to a CUDA or ROCm GPU"
        ):
            xt.attend(x, x, x, backend="gpu")
