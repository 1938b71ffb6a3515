"""Public names and signatures stay: what is in the snapshot is still there and can be called as before."""

import copy
import json
from importlib import import_module

import pytest

from house import public_names


@pytest.fixture(scope="module")
def snapshot():
    return json.loads(public_names.FILE.read_text("utf-8"))


def test_nothing_is_lost_or_changed(snapshot):
    assert public_names.differences(snapshot, public_names.collect()) == []


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
        here = getattr(import_module(f"exptilt.{folder}"), name)
        assert getattr(import_module(module), name) is here, public
