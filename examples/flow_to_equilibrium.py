"""Three hundred points that attend to each other: what becomes of them depends on the renormaliser."""

import torch

from exptilt.dynamics import Flow


def main() -> None:
    points = torch.randn(300, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    print("renormaliser  clusters  largest  mean cosine  sliced A² (Gaussian: 0.39)")
    for name in ("sphere", "layer", "batch", "whiten"):
        path = Flow(name, beta=1.0).run(points, 150, keep="last", measure_every=10)
        last, shape = path.clusters, path.gaussianity.sliced
        row = f"{name:12s}  {int(last.count[-1]):8d}  {float(last.largest[-1]):7.2f}"
        row += f"  {float(path.mean_cosine[-1]):11.3f}"
        after = "one point" if shape[5].isnan() else f"{float(shape[5]):.2f}"  # of which no shape can be told
        print(f"{row}  {float(shape[0]):.2f} at first, {after} after 50 steps")


if __name__ == "__main__":
    main()
