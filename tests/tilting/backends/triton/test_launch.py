"""How GPU kernels are launched: tiles by generation, streams, and torch's transforms around them.

What needs kernels to run does so in Triton's interpreter, in a process of its own; what needs machine code
compiles it ahead of time.
"""

import json
import sys

import pytest
import torch

from oracles.processes import child

pytestmark = [
    pytest.mark.slow,  # kernels run in Triton's interpreter, or are compiled for GPUs that are not here
    pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only"),
]


def read(code, **environment):
    """The last line that a process prints, read as JSON."""
    return json.loads(child(code, **environment).splitlines()[-1])


def test_table():
    """Every generation has a tile for every sweep, size of a number and head dimension."""
    config = pytest.importorskip("exptilt.tilting.backends.triton.config")
    sweeps = {sweep for sweep, _ in config.TILES}
    assert len(sweeps) == 10
    assert set(config.GENERATIONS) == {"sm80", "sm90", "sm100", "gfx942"}
    for table in config.GENERATIONS.values():
        assert set(table) == {(sweep, size) for sweep in sweeps for size in (2, 4, 8)}
        for tile in (tile for tiles in table.values() for tile in tiles):
            assert all(n & (n - 1) == 0 for n in tile)
            assert min(tile[:3]) >= config.NARROWEST
    assert config.generation_of(torch.device("cpu")) == "sm80"


TRANSFORMS = """
import json, torch, exptilt as xt
from exptilt.tilting.backends.triton import launch
from torch._subclasses.fake_tensor import FakeTensorMode

found = {}
g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(3, 2, n, 8, generator=g, dtype=torch.float64) for n in (5, 7, 7))

def close(x, y, tolerance=1e-12):
    return bool((x - y).abs().max() < tolerance)

def attend(q, k, v, **options):
    return xt.attend(q, k, v, backend="gpu", causal=True, **options).output

# vmap, and a gradient for each sample
loop = torch.stack([attend(*x) for x in zip(q, k, v)])
found["vmap"] = close(torch.vmap(attend)(q, k, v), loop)
each = torch.vmap(torch.func.grad(lambda *x: attend(*x).sin().sum()))(q, k, v)
alone = torch.func.grad(lambda *x: attend(*x).sin().sum())(q, k, v)
found["vmap of grad"] = close(each, alone)

# autocast: inputs go to half precision, in which the kernel gets them
seen = []
plain = launch.kind_of
def kind_of(sweep, t, *rest, **more):
    seen.append((sweep, t.query.dtype))
    return plain(sweep, t, *rest, **more)
launch.kind_of = kind_of
single = [x.float().requires_grad_() for x in (q, k, v)]
with torch.autocast("cpu", dtype=torch.float16):
    half = attend(*single)
grads = torch.autograd.grad(half.float().sin().sum(), single)
launch.kind_of = plain
exact = [x.half().double().requires_grad_() for x in (q, k, v)]
wanted = torch.autograd.grad(attend(*exact).sin().sum(), exact)
found["autocast"] = half.dtype == torch.float16 and close(half.double(), attend(*exact), 2e-3)
near = [x.dtype == torch.float32 and close(x, y, 5e-3) for x, y in zip(grads, wanted)]
found["autocast gradient"] = all(near)
found["not widened"] = len(seen) >= 3 and all(number == torch.float16 for _, number in seen)

# compiled, without a break in the graph; and tensors without numbers
starts = torch.tensor([0, 2, 5])
key_starts = torch.tensor([0, 4, 7])
def packed(q, k, v):
    return xt.tilting.attend_packed(q, k, v, starts, key_starts, backend="gpu", causal=True).output
def dropped(q, k, v):
    return attend(q, k, v, dropout=0.4, seed=3)
for name, call, some in (("packed", packed, [q[0], k[0], v[0]]), ("dropped", dropped, [q, k, v])):
    both = []
    for made in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in some]
        out = made(*leaves)
        both.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    found["compile " + name] = all(close(x, y) for x, y in zip(*both))
with FakeTensorMode():
    x = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16)
    a = xt.attend(x, x, x, backend="gpu")
    shapes, numbers = (a.output.shape, a.entropy.shape), (a.output.dtype, a.entropy.dtype)
    found["fake"] = shapes == ((2, 4, 6, 8), (2, 4, 6)) and numbers == (torch.bfloat16, torch.float32)
    x = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16, requires_grad=True)  # more of cuda needs a GPU
    a = xt.attend(x, x, x, key_mass=True, backend="gpu", check=False)
    (grad,) = torch.autograd.grad(a.output.float().sum() + a.key_mass.sum(), x)
    found["fake gradient"] = a.key_mass.shape == (2, 4, 6) and grad.shape == x.shape and grad.dtype == x.dtype

# launched with the tensors' GPU current, whose current stream Triton takes
inside = []
class Current:
    def __init__(self, like): self.like = like
    def __enter__(self): inside.append(self.like)
    def __exit__(self, *problem): inside.append(None)
torch.cuda.device_of = Current
plain = launch.forward_kernel
class Kernel:
    def __getitem__(self, grid):
        found["stream"] = inside[-1] is not None and inside[-1].device == q.device
        return plain[grid]
launch.forward_kernel = Kernel()
attend(q, k, v)
print(json.dumps(found))
"""


def test_transforms():
    found = read(TRANSFORMS, TRITON_INTERPRET="1")
    assert [name for name, right in found.items() if not right] == []
    assert len(found) == 10


AUDIT = """
import json, torch, gpu_audit
from exptilt.tilting import plan

def spilled(sweep, part, generation, number, full=False, made=None):
    t, rule = gpu_audit.problem(number, 64, full)
    if made is not None:
        t = t._replace(query=t.query[:1], key=t.key[:1], value=t.value[:1], packing=made[None])
    call = gpu_audit.launched(sweep, generation, t, rule)[part]
    found = gpu_audit.compiled(generation, call, 64)
    return found["spilled"] if found["matrix"] else "no matrix instruction"

starts = torch.tensor([0, 500, 1024])
packed = plan.make(starts, starts[:-1], starts[1:])
dropped = plan.make(starts, starts[:-1], starts[1:], torch.tensor(3), 0.1)
found = {
    "packed": spilled("forward", "forward", "sm80", torch.bfloat16, made=packed),
    "dropped": spilled("gradient", "gradient by keys", "sm90", torch.bfloat16, made=dropped),
    "forward": spilled("forward", "forward", "gfx942", torch.float16, full=True),
    "second": spilled("second", "second by keys", "gfx942", torch.float32, full=True),
}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_plans_and_amd_compile(tmp_path):
    """Machine code for packed sequences, dropped weights and MI300: nothing spilled, matrix cores used."""
    found = read(AUDIT, TRITON_CACHE_DIR=str(tmp_path))
    assert found == dict.fromkeys(found, 0)
    assert len(found) == 4
