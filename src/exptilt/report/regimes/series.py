"""A time series from a CSV file with a header; empty cells, NA and their like are missing values.

Cells are separated by commas, semicolons or tabs, whichever the header has most of; with semicolons or tabs
a comma may be the decimal point. Unless told, the first column names the rows if it has no name, holds dates,
or holds numbers that only rise while there is another column to model.
"""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exptilt._support.errors import ArgumentError

MISSING = {"", "na", "nan", "null", "none", ".", "?", "n/a"}
DECIMAL = re.compile(r"^(\s*[-+]?\d+),(\d+\s*(?:[eE][-+]?\d+)?\s*)$")  # 3,14
# 2001-02-03 (and a time), 2001/2, 2001Q3, 2001-M04, 3.2.2001, 02/03/2001
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}([-/.]\d{1,2})?([ T]\d{1,2}:\d{2}.*)?"
    r"|\d{4}[-: ]?[QqMmWw]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"
)


@dataclass(frozen=True)
class Series:
    """A time series.

    Attributes:
        source: the file it came from.
        columns: names of the components.
        labels: ``(T,)``, what the rows are called.
        values: ``(T, m)``, NaN where missing.
        index: the column that the labels are from, None if the rows are numbered.
    """

    source: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    values: NDArray[np.float64]
    index: str | None = None


def read_series(path: Path, columns: Sequence[str] | None, index: str | None) -> Series:
    """Read a CSV file; each column must vary.

    Args:
        path: the file.
        columns: which columns; None takes every column of numbers that is not the index.
        index: the column that names the rows; None takes the first if it looks like one, or numbers them.
    """
    header, rows = _cells(path)
    if index is None and header[0] not in (columns or ()) and _names_rows(header, rows):
        index = header[0]
    for name in (*(columns or ()), *([index] if index else ())):
        if name not in header:
            raise ArgumentError(f"{path} has no column {name!r}. It has: {', '.join(header)}.")
    found: dict[str, list[float]] = {}
    for at, name in enumerate(header):
        if name in columns if columns else name != index:
            try:
                numbers = [_number(row[at], f"{path}: line {line} of column {name!r}") for line, row in rows]
            except ArgumentError:
                if columns:
                    raise
                continue
            if name in found or name == index:
                raise ArgumentError(f"{path} has {header.count(name)} columns called {name!r}. Rename them.")
            found[name] = numbers
    if not found:
        raise ArgumentError(f"{path} has no column of numbers. It has: {', '.join(header)}.")
    names = tuple(columns or found)
    values = np.array([found[name] for name in names]).T
    for name, column in zip(names, values.T, strict=True):
        seen = column[~np.isnan(column)]
        if len(seen) < 2 or np.ptp(seen) == 0:
            what = f"is constant ({seen[0]:g})" if len(seen) > 1 else f"has {len(seen)} observed values"
            raise ArgumentError(
                f"{path}: column {name!r} {what}. There are no regimes in it; choose others with --columns."
            )
    place = None if index is None else header.index(index)
    labels = tuple(str(k) if place is None else row[place].strip() for k, (_, row) in enumerate(rows))
    return Series(str(path), names, labels, values, index)


def _names_rows(header: list[str], rows: list[tuple[int, list[str]]]) -> bool:
    """Whether the first column looks like what the rows are called: dates, a counter, years."""
    first = [row[0].strip() for _, row in rows]
    if len(header) < 2:
        return False
    if not header[0] or header[0].startswith("Unnamed:") or all(DATE.fullmatch(cell) for cell in first):
        return True
    try:
        numbers = [_number(cell, "") for cell in first]
        rest = [cell for _, row in rows for cell in row[1:] if cell.strip().lower() not in MISSING]
    except ArgumentError:
        return False
    others = any(_is_number(cell) for cell in rest)
    return others and len(numbers) > 2 and all(a < b for a, b in pairwise(numbers))


def _is_number(cell: str) -> bool:
    try:
        _number(cell, "")
    except ArgumentError:
        return False
    return True


def _cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and the other lines that are not empty with their numbers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            file.seek(0)
            separator = max(",;\t", key=head.count)
            reader = csv.reader(file, delimiter=separator)
            rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not a text file in UTF-8. Pass a CSV file.") from None
    except csv.Error as problem:
        raise ArgumentError(f"{path} is not a CSV file: {problem}.") from None
    if len(rows) < 2:
        what = "has a header and no rows" if rows else "is empty"
        raise ArgumentError(f"{path} {what}. Pass a CSV file with a header and rows of numbers.")
    header = [name.strip() for name in rows[0][1]]
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise ArgumentError(
                f"{path}: line {line} has {len(row)} cells, the header {len(header)}. Mend that line."
            )
    if separator == ",":
        return header, rows[1:]
    return header, [(line, [DECIMAL.sub(r"\1.\2", cell) for cell in row]) for line, row in rows[1:]]


def _number(cell: str, where: str) -> float:
    """The number in a cell, NaN where it is missing."""
    if cell.strip().lower() in MISSING:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.inf
    if math.isinf(value):
        raise ArgumentError(
            f"{where} holds {cell.strip()!r}, not a finite number. Mend it, or leave the cell empty."
        )
    return value
