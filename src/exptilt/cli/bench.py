"""Run the benchmarks of a source checkout, each in its own process."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from exptilt._support.errors import ArgumentError, ExptiltError

SUMMARY = "run the benchmarks of a source checkout"
EXAMPLES = """\
commands that work as printed:
  exptilt bench --list
"""

HELPERS = {"harness", "pages"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `exptilt bench`."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds, only to check that it runs"
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")


def find_folder() -> Path:
    """The `benchmarks` folder: of the checkout this package is installed from, else of the current folder."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "benchmarks" / "harness.py").is_file():
            return root / "benchmarks"
    raise ExptiltError(
        "there is no benchmarks/ folder here. Benchmarks are part of the source checkout, "
        "not of the installed package: clone the repository and run `make bench` in it."
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the scripts one after the other; go on after one that fails, and say so at the end."""
    folder = find_folder()
    known = sorted(path.stem for path in folder.glob("[a-z]*.py") if path.stem not in HELPERS)
    if arguments.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise ArgumentError(
            f"there is no benchmark called {', '.join(unknown)}. Choose from: {', '.join(known)}"
        )
    names, failed = list(dict.fromkeys(arguments.names)) or known, []
    for position, name in enumerate(names, start=1):
        title = f"[{position}/{len(names)}] {name}"
        print(title, flush=True)
        start = time.monotonic()
        words = [sys.executable, str(folder / f"{name}.py"), *(["--quick"] if arguments.quick else [])]
        code = subprocess.run(words, cwd=folder.parent, check=False).returncode
        ended = f"exit code {code}" if code else "done"
        print(f"{title}: {ended} in {time.monotonic() - start:.0f} s\n", flush=True)
        if code:
            failed.append(name)
    if failed:
        print(f"exptilt bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
