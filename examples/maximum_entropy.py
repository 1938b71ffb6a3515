"""A loaded die: the least committed law with a mean of 4.5, and constraints that contradict each other."""

import torch

import exptilt as xt


def main() -> None:
    eyes = torch.arange(1.0, 7.0, dtype=torch.float64)
    constraints = torch.stack([eyes, (eyes % 2 == 0).double()], -1)
    found = xt.maximum_entropy(
        constraints, mean=torch.tensor([4.5, 0.5], dtype=torch.float64), names=["mean", "even"]
    )
    print(f"{found.status}; gap {float(found.value.gap):.1e}")
    for face, probability in enumerate(found.value.probability.tolist(), start=1):
        print(f"  {face}: {probability:.4f}")
    impossible = xt.maximum_entropy(
        constraints, mean=torch.tensor([5.9, 0.1], dtype=torch.float64), names=["mean", "even"]
    )
    print(f"{impossible.status}\n  these contradict each other: {', '.join(impossible.value.conflict[()])}")


if __name__ == "__main__":
    main()
