"""Attention drawn as a filter's mixing step: where each token comes from, what becomes of its uncertainty.

Twenty tokens on a curve, one head. Left: the backward transition, P(A = i | A' = j). Right: each token with
its deviation, and the output as a mixture (a filter's reading) and as an average (what a network computes).

    python examples/attention_as_filter.py [--out FILE.png]
"""

import argparse
from pathlib import Path

import torch

import exptilt as xt


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention drawn as a filter's mixing step.")
    parser.add_argument("--out", type=Path, help="where to draw the picture")
    arguments = parser.parse_args()
    place = torch.linspace(0, 6, 20, dtype=torch.float64)
    hidden = torch.stack([place, place.sin()], -1)
    # scores −2 (place_i − place_j)² but for what is the same for all keys: near tokens come from each other
    query, key = torch.stack([4 * place, -2 * torch.ones_like(place)], -1), torch.stack([place, place**2], -1)
    W_v = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
    noise = torch.zeros_like(hidden)
    noise[:, 1] = torch.where((place > 2) & (place < 4), 0.3, 0.05) ** 2
    found = {
        reading: xt.attention.propagate(
            hidden, noise, query[None], key[None], W_v, reading=reading, scale=1.0
        )
        for reading in ("mixture", "average")
    }
    B = xt.attend(query[None], key[None], torch.eye(20, dtype=torch.float64)[None], scale=1.0).output[0]
    sums, (low, high) = B.sum(1), B.sum(0).aminmax()
    print(
        f"rows of the backward transition sum to {float(sums.mean()):.6f}, columns to {low:.2f} – {high:.2f}"
    )
    for reading, (_, variance) in found.items():
        before, after = float(noise[:, 1].mean()), float(variance.mean())
        print(f"{reading}: mean variance {after:.4f}, of the tokens {before:.4f}")
    if arguments.out:
        import matplotlib.pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(1, 1.5))
        left.imshow(B, cmap="Blues")
        left.set(xlabel="came from token i", ylabel="token j", title="P(A = i | A' = j)")
        right.errorbar(place, hidden[:, 1], noise[:, 1].sqrt(), fmt="k.", label="tokens", capsize=2)
        for color, (reading, (mean, variance)) in zip(("C1", "C0"), found.items(), strict=True):
            m, d = mean[0, :, 0], variance[0, :, 0].sqrt()
            right.fill_between(place, m - d, m + d, color=color, alpha=0.35, label=reading)
        right.legend(frameon=False)
        figure.tight_layout()
        figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
