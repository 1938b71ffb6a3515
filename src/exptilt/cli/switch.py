"""Find the regimes of a time series in a CSV file: a summary here, a page with bands and forecasts, a table of probabilities."""

import argparse
from pathlib import Path

SUMMARY = "find the regimes of a time series in a CSV file"


def whole(text: str) -> int:
    """A whole number, 1 or more."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; pass 1 or more")
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `exptilt switch`."""
    parser.add_argument(
        "file", type=Path, metavar="FILE.csv", help="a CSV file with a header; empty cells are missing values"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME",
        help="columns to model together (default: all columns of numbers)",
    )
    parser.add_argument("--index", metavar="NAME", help="column that names the rows, such as a date")
    parser.add_argument("--modes", type=whole, default=2, help="how many regimes (default: 2)")
    parser.add_argument(
        "--model",
        choices=("level", "local-level"),
        default="level",
        help="regimes with a level and a variance each, or a wandering level with a pace each (default: level)",
    )
    parser.add_argument("--starts", type=whole, default=5, help="how many starts of the fit (default: 5)")
    parser.add_argument(
        "--forecast", type=whole, default=12, metavar="STEPS", help="steps to forecast (default: 12)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the starts (default: 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report"),
        metavar="FOLDER",
        help="where to write index.html and probabilities.csv (default: report)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Fit, print the summary, write page and table."""
    from exptilt.report import switching

    columns = (
        [name for words in arguments.columns for name in words.split(",") if name]
        if arguments.columns
        else None
    )
    study = switching.compute(
        arguments.file, columns=columns, index=arguments.index, kind=arguments.model, modes=arguments.modes, starts=arguments.starts,
        steps=arguments.forecast, seed=arguments.seed,
    )  # fmt: skip
    page, table = switching.write(study, arguments.out)
    print(switching.text(study))
    print(f"\nWrote {page.resolve()}\nWrote {table.resolve()}")
    return 0
