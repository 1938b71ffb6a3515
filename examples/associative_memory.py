"""A memory of ten thousand patterns: recall from noise, what it stores, how it is kept, and the classical network beside it."""

import tempfile
from pathlib import Path

import torch

from exptilt.memory import ClassicalHopfield, Hopfield


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10_000, 64, generator=generator)
    noisy = patterns[:100] + 0.7 * torch.randn(100, 64, generator=generator)
    for separation in ("softmax", "sparsemax", "max"):
        memory = Hopfield(patterns, beta=1.0, similarity="euclidean", separation=separation)
        found = memory.retrieve(noisy)
        error = (found.value - patterns[:100]).norm(dim=-1)
        print(
            f"{separation:9s} {found.status.name} after {int(found.steps)} steps, farthest from its pattern {float(error.max()):.2g}"
        )
    basin = Hopfield(patterns, beta=1.0, similarity="euclidean").basin(
        index=range(5), directions=8, generator=generator
    )
    print(
        "basins reach",
        ", ".join(f"{r:.1f}" for r in basin.mean.tolist()),
        f"on average; patterns have norm {float(patterns.norm(dim=-1).mean()):.1f}",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"
        memory.save(path)
        again = Hopfield.load(path, mapped=True)
        print("same after reload:", torch.equal(again.retrieve(noisy).value, found.value))
    signs = patterns[:8].sign()
    classical = ClassicalHopfield.hebbian(signs)
    overlap = (classical.retrieve(noisy[:8].sign()).value * signs).mean(-1)
    print(
        "classical network, 8 patterns on 64 units, overlaps:",
        ", ".join(f"{m:.2f}" for m in overlap.tolist()),
    )


if __name__ == "__main__":
    main()
