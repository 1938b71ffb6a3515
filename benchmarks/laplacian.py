"""Time and memory of the Laplacian of a network with attention: one sweep beside nested derivatives of torch.

A wave function in the manner of Psiformer: 16 particles, each a token, go through layers of attention and
tanh, and a determinant of orbitals makes log|ψ|. Its Laplacian by the 48 coordinates is found by
`xt.laplacian`, by 48 Hessian products one after another (jvp of grad), and by the same 48 at once under vmap,
as torch.func.hessian has it. For memory, attention over n tokens depends on two numbers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "taylor.md"
PARTICLES, WIDTHS = 16, (64, 256)
LENGTHS, QUICK = (1024, 2048, 4096), (128,)
WAYS = "one sweep", "48 products in turn", "48 products under vmap"


class WaveFunction(nn.Module):
    """log|ψ| of particles ``(..., particle, 3)``."""

    def __init__(self, width: int, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.heads, self.read, self.orbitals = heads, nn.Linear(4, width), nn.Linear(width, PARTICLES)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in self.qkv
        )

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample."""
        far = x.norm(dim=-1, keepdim=True)
        h = self.read(torch.cat([x, far], -1))
        for qkv, mix, mlp in zip(self.qkv, self.mix, self.mlp, strict=True):
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in qkv(h).chunk(3, -1))
            h = h + mix(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))
            h = h + mlp(h)
        found: Tensor = torch.linalg.slogdet(self.orbitals(h) * torch.exp(-far))[1]
        return found


def ways(width: int, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Tensor]]:
    """The Laplacian of the wave function at one point, in three ways."""
    torch.manual_seed(0)
    model = WaveFunction(width).to(dtype).requires_grad_(False)
    x = torch.randn(PARTICLES, 3, dtype=dtype)
    unit = torch.eye(x.numel(), dtype=dtype).reshape(-1, *x.shape)

    def second(along: Tensor) -> Tensor:
        return (jvp(grad(model), (x,), (along,))[1] * along).sum()

    def math(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the only one of torch's that has second derivatives
                return function()

        return run

    return dict(
        zip(
            WAYS,
            (
                lambda: xt.laplacian(model, x).laplacian,
                math(lambda: torch.stack([second(along) for along in unit]).sum()),
                math(lambda: vmap(second)(unit).sum()),
            ),
            strict=True,
        )
    )


def attention(way: str, n: int) -> Callable[[], object]:
    """A call that makes the Laplacian, by two numbers, of a mean over attention at n tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 2, n, 32, generator=generator)

    def function(c: Tensor) -> Tensor:
        h = tokens[0] * c[0] + tokens[1] * c[1]
        return F.scaled_dot_product_attention(h, h.sin(), h.cos()).square().mean()

    c, unit = torch.ones(2), torch.eye(2)

    def nested() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return [jvp(grad(function), (c,), (along,))[1] for along in unit]

    return (lambda: xt.laplacian(function, c).laplacian) if way == "one sweep" else nested


def prepare(way: str, n: int) -> Callable[[], object]:
    """In the new process: one small call, so that code is loaded, then the call to measure."""
    attention(way, 64)()
    return attention(way, n)


def measure(widths: tuple[int, ...], lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Times by width, bytes by length, and the largest relative difference of results in float64."""
    times, apart = {}, 0.0
    for width in widths:
        exact = [way() for way in ways(width, torch.float64).values()]
        apart = max(apart, *(((x - exact[0]) / exact[0]).abs().item() for x in exact[1:]))
        times[width] = harness.compare(
            ways(width), WAYS[0], rounds=rounds, slow={WAYS[1]: min(3, rounds)}, label=f"width {width}"
        )
    memory = [
        {"n": n} | {way: harness.peak_extra_memory(prepare, way, n).beyond for way in ("one sweep", "nested")}
        for n in harness.track(list(lengths), "lengths")
    ]
    goals = [
        Goal(f"one sweep over products {how}, width {width}", 1 / times[width][way].ratio, 1 / 5, "×")
        for width in widths
        for how, way in (("in turn", WAYS[1]), ("under vmap", WAYS[2]))
    ]
    return {"times": times, "memory": memory, "apart": apart, "goals": goals}


def time_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: milliseconds by width, and how many times as long as one sweep."""
    rows = []
    for width, times in results["times"].items():
        cells = [f"{1000 * times[way]['best']:,.0f}" for way in WAYS]
        cells[1:] = [
            f"{cell} ({times[way]['ratio']:.1f} ×)" for cell, way in zip(cells[1:], WAYS[1:], strict=True)
        ]
        rows.append([width, *cells])
    return ["width", *(f"{way}, ms" for way in WAYS)], rows


def memory_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: megabytes beyond inputs and results, by length."""
    rows = [
        [f"{row['n']:,}", f"{row['one sweep'] / 1e6:,.0f}", f"{row['nested'] / 1e6:,.0f}"]
        for row in results["memory"]
    ]
    return ["tokens", "one sweep, MB", "nested, math attention, MB"], rows


PARTS = (
    harness.Part(PAGE, "laplacian time", "laplacian", time_table),
    harness.Part(PAGE, "laplacian memory", "laplacian", memory_table),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    found = measure((32,), QUICK, 1) if arguments.quick else measure(WIDTHS, LENGTHS, 9)
    path = harness.save("laplacian", found, folder=harness.folder(arguments.quick))
    results = harness.read(path)
    print(f"\nIn float64 the three ways differ by {results['apart']:.1e}.\n")
    harness.print_table(*time_table(results))
    harness.print_table(*memory_table(results))
    harness.print_goals(found["goals"])
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
