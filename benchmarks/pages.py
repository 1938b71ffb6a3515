"""Write the tables of docs/ anew from saved results, without measuring: after a merge or new goals."""

from importlib import import_module
from pathlib import Path

import harness

BENCHMARKS = sorted({path.stem for path in Path(__file__).parent.glob("[a-z]*.py")} - {"harness", "pages"})


def parts(benchmark: str) -> tuple[harness.Part, ...]:
    """The places of pages that a benchmark fills; some fill none."""
    return getattr(import_module(benchmark), "PARTS", ())


if __name__ == "__main__":
    for name in BENCHMARKS:
        harness.write(parts(name))
