"""A time series from a CSV or parquet file; empty cells and NA are missing values.

Cells are separated by commas, semicolons or tabs, whichever the first line has most of; with semicolons or
tabs a comma may be the decimal point, and a point or a space may group thousands; else 1,234.50 in quotes is
a number too. A first line of numbers and dates alone is data, not a header. Unless told, the rows are named
by the first column that holds dates (or by a year, with or without a quarter or month), or by the very first
if it has no name or holds whole numbers that only rise or fall while there is another column to model; every
column of numbers that varies is modelled, but for those of 0 and 1 beside others. Rows are put in order of
their dates.
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
from exptilt.report.regimes.dates import Times, read_times

MISSING = {"", "na", "nan", "null", "none", ".", "?", "n/a", "#n/a", "-"}
# 3,14 and 1.234,56 and 1 234,56
COMMA = re.compile(r"\s*[-+]?(\d{1,3}([. \u00a0\u202f']\d{3})+|\d+),\d+([eE][-+]?\d+)?\s*")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?")
UNITS = re.compile(r"^[$€£]\s*|\s*%$")
FEW = 0.1  # a column with fewer cells that are no numbers is taken for numbers with mistakes in it
EXCEL = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # the first bytes of .xlsx and .xls
Lines = list[tuple[int, list[str]]]


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
        times: what the labels say of time, None if nothing.
        marked: ``(T,)``, where the column of marks is not 0; None if there is none.
    """

    source: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    values: NDArray[np.float64]
    index: str | None = None
    chosen: tuple[str, ...] = ()
    times: Times | None = None
    marked: NDArray[np.bool_] | None = None


def read_series(
    path: Path, columns: Sequence[str] | None, index: str | None, marks: str | None = None
) -> Series:
    """Read a CSV or parquet file, rows in order of time; raises if a chosen column does not vary.

    Args:
        path: the file.
        columns: which columns; None takes every column of numbers that varies and is not the index.
        index: the column that names the rows; None takes one that looks like it, or numbers the rows.
        marks: a column of 0 and 1 that marks rows; it is not modelled.
    """
    header, rows, chosen = _parquet(path) if path.suffix in (".parquet", ".pq") else _cells(path)
    for name in (*(columns or ()), *([index] if index else ()), *([marks] if marks else ())):
        if name not in header:
            raise ArgumentError(f"{path} has no column {name!r}. It has: {', '.join(header)}.")
    names, labels = _labels(header, rows, columns or (), index)
    if names and index is None:
        chosen.append(
            f"Rows are named by the column {' and '.join(map(repr, names))}; --index chooses another."
        )
    times = read_times(labels, names[0]) if names else None
    order = list(range(len(rows)))
    if times is not None and not times.rising:
        order, said = _in_order(path, rows, labels, times)
        rows, labels = [rows[k] for k in order], [labels[k] for k in order]
        times = read_times(labels, names[0])
        chosen.append(said)
    table, dropped = _numbers(path, header, rows, columns, {*names, *([marks] if marks else ())})
    still = {name: _why_still(np.array(cells)) for name, cells in table.items()}
    if columns is None and any(not why for why in still.values()):
        varied = [name for name, why in still.items() if not why]
        marked_only = [name for name in varied if set(table[name]) <= {0.0, 1.0}]
        for name in marked_only if len(marked_only) < len(varied) else ():
            still[name] = f"holds only 0 and 1 (--shade {name} marks its rows)"
        dropped += [f"{name!r}, which {why}" for name, why in still.items() if why]
        table = {name: cells for name, cells in table.items() if not still[name]}
    for name in columns or table:
        if still[name]:
            raise ArgumentError(
                f"{path}: column {name!r} {still[name]}. There are no regimes in it; choose others with "
                "--columns."
            )
    if dropped:
        chosen.append(f"Left out: {'; '.join(dropped)}. Choose columns with --columns.")
    kept = tuple(columns or table)
    marked = None
    if marks:
        at = header.index(marks)
        where = f"{path}: line {{}} of column {marks!r}"
        cells = [_number(row[at], where.format(line)) for line, row in rows]
        marked = np.nan_to_num(np.array(cells)) != 0
    values = np.array([table[name] for name in kept]).T
    named = " and ".join(names) if names else None
    return Series(str(path), kept, tuple(labels), values, named, tuple(chosen), times, marked)


def _numbers(
    path: Path, header: list[str], rows: Lines, columns: Sequence[str] | None, taken: set[str]
) -> tuple[dict[str, list[float]], list[str]]:
    """The columns of numbers by name, and what was left out; raises where a number is spoilt."""
    found, dropped = dict[str, list[float]](), list[str]()
    for at, name in enumerate(header):
        if name not in columns if columns else name in taken:
            continue
        if header.count(name) > 1:
            raise ArgumentError(f"{path} has {header.count(name)} columns called {name!r}. Rename them.")
        bad = [(line, row[at]) for line, row in rows if not _is_number(row[at])]
        words = [cell for _, cell in bad if cell.strip().lower().lstrip("+-") not in ("inf", "infinity")]
        if not columns and len(words) > max(1, FEW * len(rows)):
            dropped.append(f"{name!r}, which does not hold numbers")
            continue
        if bad:
            line, cell = bad[0]
            more = f" ({len(bad) - 1} more are like it)" if len(bad) > 1 else ""
            raise ArgumentError(
                f"{path}: line {line} of column {name!r} holds {cell.strip()!r}, not a finite number{more}. "
                "Mend it, leave the cell empty, or choose other columns with --columns."
            )
        found[name] = [_number(row[at], "") for _, row in rows]
    if not found:
        raise ArgumentError(f"{path} has no column of numbers. It has: {', '.join(header)}.")
    return found, dropped


def _in_order(path: Path, rows: Lines, labels: Sequence[str], times: Times) -> tuple[list[int], str]:
    """The rows' places in order of time, and a sentence on what was done."""
    order = sorted(range(len(rows)), key=lambda k: times.keys[k])
    falling = all(a >= b for a, b in pairwise(times.keys))
    if falling:
        order = list(range(len(rows)))[::-1]
        return order, f"The newest row came first ({labels[0]}): rows were put in order of time."
    for a, b in pairwise(order):
        if times.keys[a] == times.keys[b]:
            raise ArgumentError(
                f"{path}: lines {rows[a][0]} and {rows[b][0]} are both of {labels[a]!r}, and rows are not in "
                "order of time. Pass one series a file, or choose the column that names rows with --index."
            )
    return order, "Rows were not in order of time: they were sorted."


def _why_still(column: NDArray[np.float64]) -> str:
    """Why there can be no regimes in a column; empty if it varies."""
    seen = column[~np.isnan(column)]
    if len(seen) < 2:
        return f"has {len(seen)} observed values"
    return f"is constant at {seen[0]:g}" if np.ptp(seen) == 0 else ""


def _labels(
    header: list[str], rows: Lines, columns: Sequence[str], index: str | None
) -> tuple[list[str], list[str]]:
    """The columns that name the rows, none if there are none, and the rows' labels: 2008, not 2008.0."""

    def column(name: str) -> list[str]:
        cells = [row[header.index(name)].strip() for _, row in rows]
        whole = all(re.fullmatch(r"\d+\.0*", cell) for cell in cells)
        return [cell.split(".")[0] for cell in cells] if whole else cells

    lower = {name.lower(): name for name in header if name not in columns}
    if index is None and "year" in lower:
        for part, letter in (("quarter", "Q"), ("month", "M")):
            if part in lower:
                names = [lower["year"], lower[part]]
                width = 1 if letter == "Q" else 2
                pairs = zip(*map(column, names), strict=True)
                labels = [f"{a}{letter}{b:0>{width}}" for a, b in pairs]
                if read_times(labels) is not None:
                    return names, labels
    for at, name in enumerate(header):
        if name == index if index is not None else name not in columns and _names_rows(at, header, rows):
            return [name], column(name)
    return [], [str(k) for k in range(len(rows))]


def _names_rows(at: int, header: list[str], rows: Lines) -> bool:
    """Whether a column seems to name the rows: it holds dates, or stands first without a name or counting."""
    cells = [re.sub(r"^(\d+)\.0*$", r"\1", row[at].strip()) for _, row in rows]
    counts = all(re.fullmatch(r"[-+]?\d+", cell) for cell in cells)
    dates = len(cells[0]) == 8 or not counts
    if len(header) < 2:
        return False
    if at == 0 and (not header[0] or header[0].startswith("Unnamed:")):
        return True
    if dates and read_times(cells) is not None:
        return True
    beside = (cell for _, row in rows for k, cell in enumerate(row) if k != at)
    others = (_is_number(cell) for cell in beside if cell.strip().lower() not in MISSING)
    first = at == 0 or header[at].lower() == "year"
    return first and counts and len(cells) > 2 and read_times(cells) is not None and any(others)


def _parquet(path: Path) -> tuple[list[str], Lines, list[str]]:
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
    return [str(name) for name in table.columns], list(enumerate(cells, 1)), []


def _cells(path: Path) -> tuple[list[str], Lines, list[str]]:
    """The header, the other lines that are not empty with their line numbers, and how cells were read."""
    with path.open("rb") as file:
        if file.read(4) in EXCEL:
            raise ArgumentError(f"{path} is an Excel workbook. Save its sheet as CSV, and pass that file.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as text:
            head = text.readline()
            text.seek(0)
            separator = max(",;\t", key=head.count)
            reader = csv.reader(text, delimiter=separator)
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not a text file in UTF-8. Save it as CSV in UTF-8.") from None
    except csv.Error as problem:
        raise ArgumentError(f"{path} is not a CSV file: {problem}.") from None
    if not rows:
        raise ArgumentError(f"{path} is empty. Pass a CSV file with a header and rows of numbers.")
    header, lines, chosen = [name.strip() for name in rows[0][1]], rows[1:], list[str]()
    if any(header) and all(_is_data(cell) for cell in header):
        header, lines = [f"column {k + 1}" for k in range(len(header))], rows
        chosen.append("The first line holds numbers: it was read as data, and columns are numbered.")
    if not lines:
        raise ArgumentError(f"{path} has a header and no rows. Pass a CSV file with rows of numbers.")
    for line, row in lines:
        if len(row) != len(header):
            raise ArgumentError(
                f"{path}: line {line} has {len(row)} cells, the header {len(header)}. Mend that "
                "line, or remove lines above the header."
            )
    if separator != ",":
        how = f"Cells are separated by {'semicolons' if separator == ';' else 'tabs'}"
        if any(COMMA.fullmatch(cell) for _, row in lines for cell in row):
            lines = [(line, [_with_point(cell) for cell in row]) for line, row in lines]
            how += ", a comma is the decimal point"
        chosen.append(f"{how}.")
    return header, lines, chosen


def _is_data(cell: str) -> bool:
    """Whether the cell of a first line is a number, a date or missing, not a name."""
    return _is_number(cell) or bool(COMMA.fullmatch(cell)) or read_times([cell.strip()]) is not None


def _with_point(cell: str) -> str:
    """A number with a decimal comma, written with a point; other text is unchanged."""
    if not COMMA.fullmatch(cell):
        return cell
    return re.sub(r"[. \u00a0\u202f']", "", cell.strip()).replace(",", ".")


def _number(cell: str, where: str) -> float:
    """The number in a cell, NaN where it is missing."""
    text = cell.strip()
    if text.lower() in MISSING:
        return math.nan
    text = UNITS.sub("", text)
    try:
        value = float(text.replace(",", "") if THOUSANDS.fullmatch(text) else text)
    except ValueError:
        value = math.inf
    if math.isinf(value):
        raise ArgumentError(f"{where} holds {cell.strip()!r}, not a finite number.")
    return value


def _is_number(cell: str) -> bool:
    try:
        _number(cell, "")
    except ArgumentError:
        return False
    return True
