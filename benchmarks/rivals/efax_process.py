"""efax, asked to work in another process: it needs Python 3.12, and exptilt does not.

`make rivals` sets up an interpreter that has it. A case here is a function without arguments like any other:
it sends one line to the worker, waits for the answer, and so takes its turn in an interleaved run. The line
and its answer take some 30 µs.
"""

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

DEFAULT = Path(__file__).resolve().parents[2] / ".venv-efax" / "bin" / "python"


class Efax:
    """A worker with some natural parameters, until the end of a `with` block.

    Args:
        python: an interpreter that has efax and jax.
        parameters: arrays by name, as `efax_worker.cases` asks for them.
        threads: how many cores it may use.
    """

    def __init__(self, python: Path, parameters: dict[str, np.ndarray], threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "parameters.npz"
        np.savez(path, **parameters)  # type: ignore[arg-type]
        words = [str(python), str(Path(__file__).with_name("efax_worker.py")), str(path), str(threads)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._read()
        self.names = self._read().split("\t")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._folder.cleanup()

    def answer(self, name: str) -> np.ndarray:
        """What a case returns, ``(batch, numbers)``."""
        path = Path(self._folder.name) / "answer.npy"
        self._ask(f"save\t{name}\t{path}")
        return np.load(path)

    def case(self, name: str) -> Callable[[], Any]:
        """A function that has the case run once."""
        return lambda: self._ask(f"run\t{name}")

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        if (said := self._read()) != "done":
            raise RuntimeError(f"efax: {line.split()[0]} failed: {said}")

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(
                f"efax: the worker ended with exit code {self._process.wait()}; what it said is above."
            )
        return line.rstrip("\n")
