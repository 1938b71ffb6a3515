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


# Folders in which a few refusals are about data or settings that no parameter holds alone.
LOOSE = {"switching", "claims", "report", "lens"}
# What rows name that is no parameter of the call: part of a result, of a machine, or of a site's law.
INNER = {"keys", "laplacian", "key_mass", "states", "eta", "dimension"}


def parameters(name, module):
    """The parameters of everything public that has this name: functions, classes, their calls, methods."""
    made = getattr(module, name, None)
    kinds = [vars(import_module(f"exptilt.{folder}")).get(name) for folder in FOLDERS] + [made]
    classes = {kind for kind in PUBLIC if inspect.isclass(kind)}
    methods = [getattr(kind, name, None) for kind in classes]
    calls = [
        getattr(kind, call, None)
        for kind in kinds
        for call in ("forward", "__call__")
        if inspect.isclass(kind)
    ]
    return {p for one in (*kinds, *methods, *calls) if callable(one) for p in _signature(one)}


def _signature(function):
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


PUBLIC = [
    getattr(module, name)
    for folder in FOLDERS
    for module in [import_module(f"exptilt.{folder}")]
    for name in module.__all__
]


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in LOOSE])
def test_a_row_names_an_argument_of_the_call(folder):
    module = import_module(f"bad_input.{folder}")
    known = {
        name: parameters(name, module) for call, _, _ in TABLE[folder] for name in names_in(call.__code__)
    }
    odd = [
        (at, argument)
        for at, (call, argument, _) in enumerate(TABLE[folder])
        if argument not in INNER.union(*(known[name] for name in names_in(call.__code__)))
    ]
    assert odd == []


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
