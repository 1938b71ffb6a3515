"""The public names and their signatures, as data: what users wrote yesterday has to work tomorrow.

`python tests/house/public_names.py` (from the project's root) adds what is new to
tests/data/public_names.json. It never removes or changes an entry: that is done by hand, with a line in the
CHANGELOG.
"""

import inspect
import json
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path

from exptilt._support.former import FORMER

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "data" / "public_names.json"


def modules():
    """The package and those of its folders that say what is public."""
    folders = sorted(path.parent.name for path in (ROOT / "src" / "exptilt").glob("[a-z]*/__init__.py"))
    names = ["exptilt", *(f"exptilt.{folder}" for folder in folders if folder != "cli")]
    return {name: import_module(name) for name in names}


def parameters(thing):
    """`{name: "kind=default"}` of a callable, in order; None where Python knows no signature."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return None
    return {
        name: p.kind.description
        + ("" if p.default is p.empty else "=" + re.sub(r" at 0x[0-9a-f]+", "", repr(p.default)))
        for name, p in signature.parameters.items()
    }


def members(cls):
    """Public methods, properties and fields of a class, defined or inherited within this package."""
    found = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("exptilt"):
            continue
        for name in getattr(base, "__annotations__", {}):
            if not name.startswith("_"):
                found[name] = "field"
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            found[name] = parameters(value) if inspect.isfunction(value) else found.get(name, "attribute")
    return dict(sorted(found.items()))


def describe(thing):
    if inspect.isclass(thing):
        return {"class": parameters(thing), "members": members(thing)}
    return parameters(thing) if callable(thing) else type(thing).__name__


def collect(*, former=False):
    """Public names by module; with `former` also those that still work, with a warning."""
    found = {}
    for name, module in modules().items():
        gone = FORMER.get(name.removeprefix("exptilt."), {}) if former else {}
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            found[name] = {key: describe(getattr(module, key)) for key in sorted({*module.__all__, *gone})}
    return found


def differences(old, new, where=""):
    """What of `old` is missing in `new` or would break a caller there; what is new and optional does not."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key, value in old.items():
            found += (
                differences(value, new[key], f"{where}.{key}") if key in new else [f"{where}.{key} is gone"]
            )
        for key in new.keys() - old.keys():
            if isinstance(new[key], str) and _is_parameter(new[key]) and not _is_optional(new[key]):
                found.append(f"{where}: {key} is a new parameter without a default")
        if _positional(old) != _positional(new)[: len(_positional(old))]:
            found.append(f"{where}: positional parameters {_positional(old)} became {_positional(new)}")
        return found
    if (
        isinstance(old, str)
        and isinstance(new, str)
        and old.startswith("keyword-only")
        and new == old.replace("keyword-only", "positional or keyword")
    ):
        return []
    if {old, new} <= {"field", "attribute"}:
        return []
    return [] if old == new else [f"{where}: was {old}, is {new}"]


def _is_parameter(text):
    return text.startswith(("positional", "keyword", "variadic"))


def _is_optional(text):
    return "=" in text or text.startswith("variadic")


def _positional(entry):
    return [key for key, text in entry.items() if isinstance(text, str) and text.startswith("positional")]


def _with_additions(old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        return {
            key: _with_additions(old[key], new.get(key)) if key in old else new[key]
            for key in [*old, *(k for k in new if k not in old)]
        }
    return old


def _as_text(snapshot):
    """JSON with one line a public name, so that a change is one line of a diff."""
    lines = [
        f"{json.dumps(module)}: {{\n"
        + ",\n".join(f"{json.dumps(n)}: {json.dumps(e, ensure_ascii=False)}" for n, e in names.items())
        + "\n}"
        for module, names in snapshot.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def former_table():
    """The table of former names, as docs/stability.md shows it."""
    rows = [
        f"| `{folder}.{name}` | `{path.removeprefix('exptilt.')}` |"
        for folder, names in FORMER.items()
        for name, path in names.items()
    ]
    return "\n".join(["| was | is |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    page = ROOT / "docs" / "stability.md"
    text, mark, _ = page.read_text("utf-8").partition("by: python tests/house/public_names.py -->\n")
    page.write_text(text + mark + "\n" + former_table(), "utf-8")
    before = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    FILE.write_text(_as_text(_with_additions(before, collect())), "utf-8")
    sys.stdout.write(f"{FILE.relative_to(ROOT)} is written\n")
