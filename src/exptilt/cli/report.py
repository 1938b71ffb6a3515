"""Write a page of attention statistics for one small example."""

import argparse
from pathlib import Path

SUMMARY = "write report/index.html: the statistics of attention on one small example"

LARGEST_SEED = 2**63 - 1


def seed(text: str) -> int:
    """A seed from the command line: a whole number that a torch generator takes."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 0 <= value <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{value} is out of range; pass a whole number from 0 to {LARGEST_SEED}")
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `exptilt report`."""
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help="where to write index.html (default: report)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the example's keys (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Compute the example, write its page, say where it is."""
    from exptilt.report import example

    study = example.compute(seed=arguments.seed)
    path = example.write(study, arguments.out)
    print(example.text(study))
    print(f"\nWrote {path.resolve()}")
    return 0
