"""Bad input, in one table: call, argument, message.

The files beside this one hold the rows, one file a public folder. A refusal is an `ExptiltError` whose text
names the argument, says what was got, and what to pass instead. Every public call has a row.
"""

import inspect
import re
from importlib import import_module

import pytest

from exptilt._support.errors import ExptiltError

FOLDERS = (
    *("tilting", "families", "sampling", "attention", "taylor", "switching", "dynamics"),
    *("distributed", "losses", "memory", "lens", "curvature", "claims", "report"),
)
TABLE = {folder: import_module(f"bad_input.{folder}").ROWS for folder in FOLDERS}


@pytest.mark.parametrize(
    ("call", "argument", "message"),
    [row for rows in TABLE.values() for row in rows],
    ids=[f"{folder}-{at}-{row[1]}" for folder, rows in TABLE.items() for at, row in enumerate(rows)],
)
def test_refused(call, argument, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ExptiltError) as caught:
        call()
    text = str(caught.value)
    assert argument in text
    if isinstance(message, str):
        assert re.search(message, text), text
    else:
        assert [words for words in message if words not in text] == [], text


# Results, statuses and what holds no argument to check. Theirs to refuse is what made them.
WITHOUT = {
    "AttentionResult",
    "Tilted",
    "Estimate",
    "ExponentialFamily",
    "Measure",
    "Solution",
    "Status",
    "Fit",
    "FitStatus",
    "GroupError",
    "AttentionCall",
    "HeadKind",
    "NothingSeenError",
    "Picture",
    "Record",
    "Study",
    "register",
    "Claim",
    "Verdict",
    "every",
    "Formula",
    "Page",
    "Section",
    "render",
    "write",
    "write_page",
}


def names_in(code):
    """The names that a function reads, in functions inside it too."""
    inner = (part for part in code.co_consts if inspect.iscode(part))
    return set(code.co_names).union(*map(names_in, inner))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_public_call_has_a_row(folder):
    module = import_module(f"exptilt.{folder}")
    called = set().union(*(names_in(call.__code__) for call, _, _ in TABLE[folder]))
    public = {name for name in module.__all__ if callable(getattr(module, name))}
    assert sorted(public - called - WITHOUT) == []
