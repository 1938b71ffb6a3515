"""Dispatch of the `exptilt` command.

A subcommand is a module of this folder with four things:

    SUMMARY               one line for the list in `exptilt --help`
    EXAMPLES              commands that work as printed; they end its help
    configure(parser)     its arguments
    run(arguments) -> int its work; returns the exit code

`main` reads the arguments with the light modules of this folder alone; torch and the rest load inside `run`.
A wrong command line, an error that this package raises on purpose and an error of the disk each get one line
and exit code 2; a bug keeps its traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from exptilt import __version__
from exptilt._support.errors import ExptiltError
from exptilt.cli.arguments import in_checkout, missing

COMMANDS = ("report", "claims", "switch", "bench")
FIRST = {  # the first command to try of each, and the extra that it needs
    "report": ("report", "hf,report"),
    "claims": ("claims A1 A10", ""),
    "switch": ("switch gnp", ""),  # writes its page only with the extra `report`, and says so
    "bench": ("bench --list", ""),
}

EXAMPLES = """\
commands that work as printed:
  exptilt --version
  exptilt claims A1 A10
  exptilt switch gnp

after pip install 'exptilt[hf,report]':
  exptilt report

in a source checkout:
  exptilt bench --list
"""


def command(name: str) -> ModuleType:
    """The module of subcommand `name`."""
    return import_module(f"exptilt.cli.{name}")


class _Version(argparse.Action):
    """Prints the version, and which instruction set the compiled core runs with."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from exptilt._support import native

        try:
            core = f"compiled core: {native.target()}" if native.available() else native.obstacle()
        except ExptiltError as problem:
            core = str(problem)
        print(f"exptilt {__version__} ({core})")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="exptilt",
        description="Softmax attention as an exponential family: "
        "its log-normalizer, its statistics and all its derivatives.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show version and compiled core, and exit"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        module = command(name)
        child = subparsers.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(child)
    return parser


def welcome() -> str:
    """Commands to try first: those that work with what is installed, then what the others need."""
    ready, waiting = [], []
    for name, (words, extra) in FIRST.items():
        line = f"  {'exptilt ' + words:26} {command(name).SUMMARY}"
        if missing(extra):
            waiting += [line, f"  {'':26} (first: pip install 'exptilt[{extra}]')"]
        elif name != "bench" or in_checkout():
            ready.append(line)
    parts = [f"exptilt {__version__}: attention you can measure and differentiate.", "", "Try:", *ready]
    if waiting:
        parts += ["", "After installing more packages:", *waiting]
    parts += ["", "`exptilt COMMAND --help` explains one command, `exptilt --help` lists all."]
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after `exptilt`; None takes them from the process.

    Returns:
        The exit code: 0 done, 1 done in part (a benchmark failed, a claim does not hold), 2 not done, with
        a line that says why, 130 stopped by Ctrl-C.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        print(welcome())
        return 2
    try:
        if argv is not None or sys.stderr.isatty():  # bars are for terminals, lines for files
            return int(command(arguments.command).run(arguments))
        from exptilt._support.progress import told_in_lines

        with told_in_lines(f"exptilt {arguments.command}"):
            return int(command(arguments.command).run(arguments))
    except (ExptiltError, OSError) as problem:
        print(f"exptilt {arguments.command}: {' '.join(str(problem).split())}", file=sys.stderr)
        if isinstance(problem, BrokenPipeError):  # the reader of our output has gone: nothing can be written
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        again = getattr(command(arguments.command), "RESUMES", "")
        print(f"\nexptilt {arguments.command}: stopped.{again}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
