"""A memory of ten thousand patterns: recall from noise, how it is kept and how it grows."""

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
        steps, farthest = int(found.steps), float(error.max())
        print(
            f"{separation:9s} {found.status.name} after {steps} steps, farthest from a pattern {farthest:.2g}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"
        memory.save(path)
        again = Hopfield.load(path, mapped=True)
        print("same after reload:", torch.equal(again.retrieve(noisy).value, found.value))
    store = Hopfield(patterns, beta=1.0, similarity="euclidean", values=torch.arange(10_000)[:, None])
    store = store.append(noisy[:1], torch.tensor([[10_000]]))
    nearest = store.nearest(noisy[:1], 2)
    print("nearest:", nearest.values[0, :, 0].tolist(), f"all others weigh {float(nearest.left_out[0]):.1e}")
    signs = patterns[:8].sign()
    classical = ClassicalHopfield.hebbian(signs)
    overlap = (classical.retrieve(noisy[:8].sign()).value * signs).mean(-1)
    print(
        "classical network, 8 patterns on 64 units, overlaps:",
        ", ".join(f"{m:.2f}" for m in overlap.tolist()),
    )


if __name__ == "__main__":
    main()
