"""A time series from a CSV file with a header, or a parquet file; empty cells and NA are missing values.

Cells are separated by commas, semicolons or tabs, whichever the header has most of; with semicolons or tabs
a comma may be the decimal point, and a point or a space may group thousands. Unless told, the rows are named
by the first column that holds dates, or by the very first if it has no name or holds numbers that only rise
while there is another column to model; and every column of numbers that varies is modelled.
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

from exptilt._support.errors import ArgumentError, MissingExtraError

MISSING = {"", "na", "nan", "null", "none", ".", "?", "n/a"}
# 3,14 and 1.234,56 and 1 234,56
COMMA = re.compile(r"\s*[-+]?(\d{1,3}([. \u00a0\u202f']\d{3})+|\d+),\d+([eE][-+]?\d+)?\s*")
Lines = list[tuple[int, list[str]]]
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
        chosen: sentences on what was read, and what was left out.
    """

    source: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    values: NDArray[np.float64]
    index: str | None = None
    chosen: tuple[str, ...] = ()


def read_series(path: Path, columns: Sequence[str] | None, index: str | None) -> Series:
    """Read a CSV or parquet file; raises if a chosen column does not vary.

    Args:
        path: the file.
        columns: which columns; None takes every column of numbers that varies and is not the index.
        index: the column that names the rows; None takes one that looks like it, or numbers the rows.
    """
    header, rows, how = _parquet(path) if path.suffix in (".parquet", ".pq") else _cells(path)
    asked = index is not None
    if index is None:
        index = _index_of(header, rows, columns or ())
    for name in (*(columns or ()), *([index] if index else ())):
        if name not in header:
            raise ArgumentError(f"{path} has no column {name!r}. It has: {', '.join(header)}.")
    found, dropped = dict[str, list[float]](), list[str]()
    for at, name in enumerate(header):
        if name in columns if columns else name != index:
            try:
                numbers = [_number(row[at], f"{path}: line {line} of column {name!r}") for line, row in rows]
            except ArgumentError:
                if columns:
                    raise
                dropped.append(f"{name!r} (not numbers)")
                continue
            if name in found or name == index:
                raise ArgumentError(f"{path} has {header.count(name)} columns called {name!r}. Rename them.")
            found[name] = numbers
    if not found:
        raise ArgumentError(f"{path} has no column of numbers. It has: {', '.join(header)}.")
    still = {name: _why_still(np.array(numbers)) for name, numbers in found.items()}
    if columns is None and any(not why for why in still.values()):
        dropped += [f"{name!r} ({why})" for name, why in still.items() if why]
        found = {name: numbers for name, numbers in found.items() if not still[name]}
    names = tuple(columns or found)
    for name in names:
        if still[name]:
            raise ArgumentError(
                f"{path}: column {name!r} {still[name]}. There are no regimes in it; choose others with "
                "--columns."
            )
    place = None if index is None else header.index(index)
    labels = tuple(str(k) if place is None else row[place].strip() for k, (_, row) in enumerate(rows))
    chosen = [how] if how else []
    if index is not None and not asked:
        chosen.append(f"Rows are named by the column {index!r}; --index chooses another.")
    if dropped:
        chosen.append(f"Left out: {', '.join(dropped)}; --columns chooses.")
    values = np.array([found[name] for name in names]).T
    return Series(str(path), names, labels, values, index, tuple(chosen))


def _why_still(column: NDArray[np.float64]) -> str:
    """Why there can be no regimes in a column; empty if it varies."""
    seen = column[~np.isnan(column)]
    if len(seen) < 2:
        return f"has {len(seen)} observed values"
    return f"is constant ({seen[0]:g})" if np.ptp(seen) == 0 else ""


def _index_of(header: list[str], rows: Lines, columns: Sequence[str]) -> str | None:
    """The column that seems to name the rows; None if there is none."""
    if header[0] not in columns and _names_rows(header, rows):
        return header[0]
    for at, name in enumerate(header[1:], 1):
        if name not in columns and all(DATE.fullmatch(row[at].strip()) for _, row in rows):
            return name
    return None


def _names_rows(header: list[str], rows: Lines) -> bool:
    """Whether the first column seems to name the rows: it has no name, or holds dates, a counter or years."""
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


def _parquet(path: Path) -> tuple[list[str], Lines, str]:
    """The table of a parquet file as cells of text, its index in front unless that only numbers the rows."""
    path.open("rb").close()  # raises if the file is not there
    try:
        import pandas as pd
        import pyarrow  # noqa: F401
    except ImportError as problem:
        raise MissingExtraError("pyarrow", "parquet") from problem
    try:
        table = pd.read_parquet(path)
    except (ValueError, OSError) as problem:
        raise ArgumentError(f"{path} is not a parquet file: {problem}.") from None
    if not isinstance(table.index, pd.RangeIndex):
        table = table.reset_index()
    if not len(table):
        raise ArgumentError(f"{path} has no rows. Pass a table with rows of numbers.")
    text = table.astype(object).where(table.notna(), "").astype(str)
    cells = [[cell.removesuffix(" 00:00:00") for cell in row] for row in text.to_numpy().tolist()]
    return [str(name) for name in table.columns], list(enumerate(cells, 1)), ""


def _cells(path: Path) -> tuple[list[str], Lines, str]:
    """The header, the other lines that are not empty with their line numbers, and how cells were read."""
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
    lines = rows[1:]
    if separator == ",":
        return header, lines, ""
    how = f"Cells are separated by {'semicolons' if separator == ';' else 'tabs'}"
    if any(COMMA.fullmatch(cell) for _, row in lines for cell in row):
        lines = [(line, [_with_point(cell) for cell in row]) for line, row in lines]
        how += ", a comma is the decimal point"
    return header, lines, f"{how}."


def _with_point(cell: str) -> str:
    """A number with a decimal comma, written with a point; other text is unchanged."""
    if not COMMA.fullmatch(cell):
        return cell
    return re.sub(r"[. \u00a0\u202f']", "", cell.strip()).replace(",", ".")


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
