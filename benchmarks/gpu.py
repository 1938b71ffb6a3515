"""The GPU kernels on a real GPU: first whether they are right, then how long they take.

    python benchmarks/gpu.py

Needs a GPU with Triton, and nothing else to be installed; FlashAttention joins where it is. Right means:
every option alone and with others, in float32, bfloat16 and float16, output, statistics, forward derivative
and gradients against plain torch in float64. Times are milliseconds beside those of SDPA and compiled
FlexAttention: forward with all statistics, forward and backward, forward mode; lengths 1,024 to 16,384 and
one query against 32,768 keys. Results go to gpu-NAME-OF-THE-DEVICE.json. The kernels have not run on a GPU
yet: please send the file with an issue.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import exptilt as xt

OPTIONS: dict[str, Callable[[torch.Generator, int], dict[str, Any]]] = {
    "causal": lambda g, n: {"causal": True},
    "window": lambda g, n: {"window": n // 3},
    "softcap": lambda g, n: {"softcap": 3.0},
    "bias": lambda g, n: {"bias": torch.randn(n, n, generator=g)},
    "mask": lambda g, n: {"mask": torch.rand(n, n, generator=g) < 0.7},
    "log_weight": lambda g, n: {"log_weight": torch.randn(n, generator=g)},
}
SHAPES = ((4, 16, 1024, 64), (2, 16, 4096, 64), (1, 16, 16384, 64), (1, 16, 4096, 128))


def on(device: str, options: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    return {
        name: x.to(device, dtype if dtype and x.is_floating_point() else None) if isinstance(x, Tensor) else x
        for name, x in options.items()
    }


def derivatives(tensors: list[Tensor], tangents: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Output, statistics, forward derivative, gradients."""

    def call(*x: Tensor) -> tuple[Tensor, ...]:
        a = xt.attend(*x, **options)
        return a.output, a.log_normalizer, a.entropy, a.score_variance

    values, pushed = torch.func.jvp(call, tuple(tensors), tuple(tangents))
    leaves = [x.detach().requires_grad_() for x in tensors]
    total = sum(
        x.float().square().sum() if x.dtype != torch.float64 else x.square().sum() for x in call(*leaves)
    )
    return [*values, *pushed, *torch.autograd.grad(total, leaves)]


def correctness(
    device: str, n: int = 200, columns: tuple[int, ...] = (64, 128), most: int = 2
) -> list[dict[str, Any]]:
    """Errors of the kernels and of plain torch in the same dtype, each against float64; up to `most` options
    at a time.
    """
    found = []
    cases = [c for k in range(most + 1) for c in itertools.combinations(OPTIONS, k)]
    for dtype, D, chosen in itertools.product((torch.float32, torch.bfloat16, torch.float16), columns, cases):
        g = torch.Generator().manual_seed(0)
        shapes = (2, 4, n, D), (2, 2, n, D), (2, 2, n, D)
        tensors = [torch.randn(s, generator=g).to(dtype) for s in shapes]
        tangents = [torch.randn(s, generator=g).to(dtype) for s in shapes]
        options: dict[str, Any] = {}
        for name in chosen:
            options |= OPTIONS[name](g, n)
        exact, ours, plain = (
            derivatives([x.to(where, kind) for x in tensors], [x.to(where, kind) for x in tangents], given)
            for where, kind, given in (
                ("cpu", torch.float64, on("cpu", options, torch.float64) | {"backend": "reference"}),
                (device, dtype, on(device, options) | {"backend": "gpu"}),
                (device, dtype, on(device, options) | {"backend": "tiled"}),
            )
        )
        eps = torch.finfo(dtype).eps
        worst = max(
            float((x.double().cpu() - y).abs().max())
            / (2 * float((z.double().cpu() - y).abs().max()) + 8 * eps * (1 + float(y.abs().max())))
            for x, y, z in zip(ours, exact, plain, strict=True)
        )
        found.append(
            {"dtype": str(dtype)[6:], "D": D, "options": list(chosen), "worst": worst, "right": worst <= 1}
        )
    return found


def milliseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def timed(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Milliseconds of ours and of others; causal where there are as many queries as keys."""
    causal = q.shape[2] == k.shape[2]

    def ours(*x: Tensor) -> Tensor:
        return xt.attend(*x, causal=causal, backend="gpu").output

    ways: dict[str, Callable[..., Tensor]] = {
        "sdpa": lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal),
        "attend": ours,
    }
    flex = torch.compile(flex_attention, dynamic=False)
    lengths = q.shape[2], k.shape[2]
    seen = create_block_mask(lambda b, h, i, j: i >= j, None, None, *lengths, q.device) if causal else None
    ways["flex_attention"] = lambda *x: flex(*x, block_mask=seen)
    try:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        if q.dtype != torch.float32:
            ways["flash_attn"] = lambda *x: flash_attn_func(*(y.transpose(1, 2) for y in x), causal=causal)
    except ImportError:
        pass
    tensors, found = (q, k, v), {}
    for name, way in ways.items():
        try:
            with torch.no_grad():
                found[f"{name} forward"] = milliseconds(partial(way, *tensors))
            if q.shape[2] > 1:
                both = partial(lambda way: torch.autograd.grad(way(*tensors).sum(), tensors), way)
                found[f"{name} forward and backward"] = milliseconds(both)
        except Exception as error:  # one that does not run on this GPU must not cost the others' times
            found[f"{name} failed"] = repr(error)[:300]
    tangents = tuple(torch.randn_like(x) for x in tensors)
    found["attend forward mode"] = milliseconds(lambda: torch.func.jvp(ours, tensors, tangents))
    return found


def times(device: str) -> list[dict[str, Any]]:
    """All shapes and dtypes."""
    found = []
    cases = [(shape, shape[2]) for shape in SHAPES] + [((1, 32, 1, 128), 32768)]
    for ((b, h, n, d), keys), dtype in itertools.product(cases, (torch.bfloat16, torch.float32)):
        made = (
            torch.randn(b, h, m, d, device=device, dtype=dtype, requires_grad=True) for m in (n, keys, keys)
        )
        one = {"shape": [b, h, n, keys, d], "dtype": str(dtype)[6:]} | timed(*made)
        found.append(one)
        print(json.dumps(one), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(), help="the folder to write to (this one)")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("No GPU that torch can use was found; nothing was measured. Without one: make gpu-audit.")
        return 1
    name = torch.cuda.get_device_name()
    checked = correctness("cuda")
    wrong = [one for one in checked if not one["right"]]
    print(f"{len(checked) - len(wrong)} of {len(checked)} mixes of options are right on {name}")
    for one in wrong:
        print("  wrong:", one)
    facts = {"device": name, "capability": torch.cuda.get_device_capability(), "torch": torch.__version__}
    facts["triton"] = version("triton")
    results = facts | {"right": checked, "times": times("cuda")}
    path = out / f"gpu-{name.replace(' ', '-')}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(f"Wrote {path}. Please send it with an issue.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
