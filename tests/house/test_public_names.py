"""Public names and signatures stay: what is in the snapshot is still there and can be called as before."""

import copy
import json
import warnings
from importlib import import_module

import pytest

from exptilt._support.former import FORMER
from house import public_names


@pytest.fixture(scope="module")
def snapshot():
    return json.loads(public_names.FILE.read_text("utf-8"))


def test_nothing_is_lost_or_changed(snapshot):
    """Former names of the table in ``_support/former.py`` are still there, too."""
    assert public_names.differences(snapshot, public_names.collect(former=True)) == []


def test_public_names_are_few():
    """At most 20 in a folder, 155 in all. Laws (families/members) and theory are folders of families."""
    found = {name: set(names) for name, names in public_names.collect().items()}
    top, families = found.pop("exptilt"), import_module("exptilt.families")
    for inner in ("families.members", "families.theory"):
        names = {n for n in families.__all__ if inner in getattr(families, n).__module__}
        found["exptilt.families"] -= names
        found[f"exptilt.{inner}"] = names
    found["exptilt.families.members"] = set()  # one name a law, as many as there are
    assert {name: len(names) for name, names in found.items() if len(names) > 20} == {}
    folders = {path.partition(".")[2] for path in found}
    assert len((top - folders).union(families.__all__, *found.values())) <= 155


@pytest.mark.parametrize("folder", FORMER)
def test_former_names_warn_and_say_what_to_write(folder):
    module = import_module(f"exptilt.{folder}")
    page = (public_names.ROOT / "docs" / "stability.md").read_text("utf-8")
    for name, path in FORMER[folder].items():
        assert name not in module.__all__
        with pytest.warns(FutureWarning, match=f"exptilt.{folder}.{name} goes in the next release: write"):
            found = getattr(module, name)
        home, _, current = path.rpartition(".")
        assert found is getattr(import_module(home), current)
        assert f"`{folder}.{name}` | `{path.removeprefix('exptilt.')}`" in page, name
    with pytest.raises(AttributeError, match=f"module 'exptilt.{folder}' has no attribute 'nothing'"):
        _ = module.nothing


def test_everything_public_is_in_the_snapshot(snapshot):
    new = [
        f"{module}.{name}"
        for module, names in public_names.collect().items()
        for name in names
        if name not in snapshot.get(module, {})
    ]
    assert new == [], "run: python tests/house/public_names.py"


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda s: s.pop("scale"), "scale is gone"),
        (lambda s: s.update(causal="keyword-only=True"), "was keyword-only=False"),
        (lambda s: s.update(extra="keyword-only"), "without a default"),
    ],
)
def test_a_break_would_be_seen(snapshot, edit, complaint):
    changed = copy.deepcopy(snapshot)
    edit(changed["exptilt"]["attend"])
    assert any(complaint in line for line in public_names.differences(snapshot, changed))


def test_a_new_option_is_no_break(snapshot):
    changed = copy.deepcopy(snapshot)
    changed["exptilt"]["attend"]["extra"] = "keyword-only=None"
    changed["exptilt"]["new_name"] = {}
    assert public_names.differences(snapshot, changed) == []


def test_classes_are_found_where_older_pickles_look_for_them():
    """tests/data/former_modules.json: in which module each public class lay before folders were divided."""
    former = json.loads((public_names.ROOT / "tests" / "data" / "former_modules.json").read_text("utf-8"))
    assert len(former) > 50
    for public, module in former.items():
        folder, name = public.split(".")
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            here = getattr(import_module(f"exptilt.{folder}"), name)
        assert getattr(import_module(module), name) is here, public
