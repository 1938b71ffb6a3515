"""One idea, many measures: the gradient of the log-normalizer is the mean of the tilted measure."""

import torch

from exptilt import families


def main() -> None:
    torch.manual_seed(0)
    measures = [
        families.Empirical(torch.randn(1000, 1, dtype=torch.float64)),
        families.Gaussian(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64)),
        families.BernoulliProduct(torch.zeros(1, dtype=torch.float64)),
        families.Poisson(torch.ones(1, dtype=torch.float64)),
        families.Exponential(torch.ones(1, dtype=torch.float64)),
        families.FromDensity.quadrature(lambda x: -(x[..., 0].abs() ** 3)),
    ]
    print(f"{'measure':18} {'G(½)':>8} {'mean':>8} {'variance':>9} {'back to ½':>10}")
    eta = torch.tensor([0.5], dtype=torch.float64)
    for h in measures:
        back = h.natural(h.mean(eta)).or_raise()
        numbers = (h.log_normalizer(eta), h.mean(eta), h.covariance(eta), back)
        print(
            f"{type(h).__name__:18} "
            + " ".join(f"{float(x):>{width}.4f}" for x, width in zip(numbers, (8, 8, 9, 10), strict=True))
        )


if __name__ == "__main__":
    main()
