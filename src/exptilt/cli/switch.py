"""Find the regimes of a time series in a CSV or parquet file: a summary here, a page, and its numbers."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from exptilt.cli.arguments import check_paths, positive, seed

SUMMARY = "find the regimes of a time series in a CSV or parquet file"
EXAMPLES = """\
commands that work as printed:
  exptilt switch gnp
  exptilt switch gnp --lags 1 --forecast 8 --out report
"""


def series_file(name: str) -> Path:
    """The file of this name; "gnp", where there is no such file, is the one that comes with exptilt."""
    path, own = Path(name), Path(__file__).parents[1] / "report" / "regimes" / "gnp.csv"
    return own if name == own.stem and not path.exists() else path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `exptilt switch`."""
    kinds = (
        "what differs by regime: level and variance (level), how fast the level wanders (local-level), or "
        "the rate of counts (counts) (default: level)"
    )
    where = "where to write index.html and its CSV and JSON files (default: report)"
    columns = "columns to model together (default: all columns of numbers that vary)"
    add = parser.add_argument
    add(
        "file",
        type=series_file,
        metavar="FILE.csv",
        help="a CSV file (commas, semicolons or tabs; decimal commas too; rows in any order of time), or a "
        "parquet file; empty cells are missing values; gnp: growth of US output, which comes with exptilt",
    )
    add("--columns", nargs="+", metavar="NAME", help=columns)
    add(
        "--index",
        metavar="NAME",
        help="column of dates or row numbers (default: the first column of dates, or a counter in front)",
    )
    add("--modes", type=positive, default=2, help="how many regimes (default: 2)")
    add("--model", choices=("level", "local-level", "counts"), default="level", help=kinds)
    lags = "lags of an autoregression around the levels, one column only (default: 0)"
    add("--lags", type=seed, default=0, metavar="COUNT", help=lags)
    shade = "periods to shade, FROM..TO such as 2007-12..2009-06, or the name of a column of 0 and 1"
    add("--shade", nargs="+", default=(), metavar="SPAN", help=shade)
    add("--starts", type=positive, default=5, help="how many starting points the fit tries (default: 5)")
    add("--forecast", type=positive, default=12, metavar="STEPS", help="steps to forecast (default: 12)")
    most = "compare 1 to MODES regimes by BIC and log score (default: 4; 1 skips the comparison)"
    add("--compare", type=positive, default=4, metavar="MODES", help=most)
    add("--seed", type=seed, default=0, help="seed of the starts (default: 0)")
    add("--out", type=Path, default=Path("report"), metavar="FOLDER", help=where)


def run(arguments: argparse.Namespace) -> int:
    """Fit, print the summary, write page and table."""
    check_paths("FILE.csv", [arguments.file])
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        install = "pip install 'exptilt[report]'"
        say(
            f"{' and '.join(missing)} is not installed: writing a summary and tables, but no page "
            f"({install})."
        )
    from exptilt._support.files import write_together
    from exptilt.report import regimes

    found = regimes.find_regimes(
        arguments.file,
        columns=[name for words in arguments.columns or () for name in words.split(",") if name] or None,
        index=arguments.index,
        kind=arguments.model,
        modes=arguments.modes,
        lags=arguments.lags,
        starts=arguments.starts,
        steps=arguments.forecast,
        seed=arguments.seed,
        counts=range(1, arguments.compare + 1) if arguments.compare > 1 else (),
        shade=arguments.shade,
    )
    print(regimes.text(found), flush=True)
    if missing:
        first = write_together(arguments.out, regimes.tables(found))[0]
        print(f"\nWrote CSV and JSON files into {first.resolve().parent}.")
        return 1
    page, _ = regimes.write_regimes(found, arguments.out)
    print(f"\nWrote {page.resolve()}, with its CSV and JSON files beside it. Open it in a browser.")
    return 0


def say(text: str) -> None:
    """Print a line on standard error."""
    print(f"exptilt switch: {text}", file=sys.stderr, flush=True)
