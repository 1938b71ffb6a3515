"""The GPU's kernels compile for real GPUs without spilling, and what is said without Triton or a GPU."""

import json
import sys

import pytest

from harness import FOLDER, read
from oracles.processes import child

pytestmark = [
    pytest.mark.slow,  # kernels run in Triton's interpreter, or are compiled for GPUs that are not here
    pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only"),
]


AUDIT = """
import json, sys
from gpu_audit import audit
cases = json.loads(sys.argv[1])
print(json.dumps([one for case in cases for one in audit(*case)]))
"""


def audited(cases):
    return json.loads(child(AUDIT, json.dumps(cases)).splitlines()[-1])


def complaints_of_assembler(kernels):
    """Kernels that break a promise: nothing spilled, half precision on tensor cores, float32 not."""
    promises = {
        "spills": lambda x: x["spilled"] == 0,
        "too much shared memory for some GPU": lambda x: x["shared"] <= 99 * 1024,  # any from 8.0 on has that
        "a product that is not on tensor cores": lambda x: (
            x["dtype"] == "float32"
            or (x["products on tensor cores"] == x["products"] > 0 and x["matrix"] > 0)
        ),
        "float32 on tensor cores": lambda x: x["dtype"] != "float32" or x["matrix"] == 0,
    }
    about = "GPU", "sweep", "dtype", "D", "options"
    return [(name, *(x[k] for k in about)) for x in kernels for name, kept in promises.items() if not kept(x)]


def test_compiles_for_real_gpus():
    """Machine code, without a GPU, of a few kernels."""
    cases = [("sm80", "forward", "bfloat16", 64, False), ("sm80", "forward", "float32", 64, True)]
    cases += [("sm90", "gradient", "float16", 64, False, "gradient by rows")]
    cases += [("sm80", "gradient", "float16", 64, False, "gradient by keys")]
    cases += [("sm80", "gradient", "float32", 64, False, "gradient by rows")]
    kernels = audited(cases)
    assert complaints_of_assembler(kernels) == []
    assert len(kernels) == 5
    broken = [
        kernels[0] | wrong for wrong in ({"spilled": 4}, {"matrix": 0}, {"products on tensor cores": 1})
    ]
    assert [x[0] for x in complaints_of_assembler(broken)] == ["spills"] + 2 * [
        "a product that is not on tensor cores"
    ]
    assert complaints_of_assembler([kernels[1] | {"matrix": 8}])


@pytest.mark.zoo
@pytest.mark.parametrize("sweep", ["forward", "tangent", "gradient", "key mass", "second"])
@pytest.mark.parametrize("generation", ["sm80", "sm90", "sm100"])
def test_all_kernels_compile_for_real_gpus(generation, sweep):
    """None spills, or no more than the page says (`make gpu-audit`, which has more of them)."""
    cases = [
        (generation, sweep, dtype, D, full)
        for dtype in ("bfloat16", "float16", "float32")
        for D, full in ((64, False), (64, True), (128, False))
        if dtype != "float16" or (D, full) == (64, False)  # whose tiles are those of bfloat16
    ]

    def key(x):
        return tuple(x[name] for name in ("GPU", "sweep", "dtype", "D", "options"))

    kernels = audited(cases)
    saved = {key(x): x["spilled"] for path in FOLDER.glob("*/gpu_audit.json") for x in read(path)["kernels"]}
    assert [x for x in complaints_of_assembler(kernels) if x[0] != "spills"] == []
    assert {key(x) for x in kernels if x["spilled"] > saved.get(key(x), 0)} == set()


def test_the_script_for_gpus_without_one():
    """It refuses in one line; in the interpreter its first half runs, and finds every option right."""
    code = """
import json, sys, gpu
sys.argv = ["gpu.py"]
assert gpu.main() == 1
from oracles.triton_interpreter import mend, tiles
mend()
with tiles(32, 32):
    print(json.dumps(gpu.correctness("cpu", n=20, columns=(16,), most=1)))
"""
    refusal, found = child(code, TRITON_INTERPRET="1").splitlines()
    assert refusal.startswith("No GPU that torch can use was found")
    found = json.loads(found)
    assert {tuple(x["options"]) for x in found if not x["right"]} == set()
    assert len(found) == 3 * 7


def test_without_triton():
    """What is missing, and how to get it."""
    code = """
import sys
sys.modules["triton"] = None
import torch, exptilt as xt
from exptilt._support.errors import MissingExtraError
x = torch.zeros(1, 2, 3)
xt.attend(x, x, x, backend="tiled")
try:
    xt.attend(x, x, x, backend="gpu")
except MissingExtraError as problem:
    print(problem)
"""
    assert "pip install 'exptilt[gpu]'" in child(code, TRITON_INTERPRET="1")
