"""No public measure or law escapes the laws."""

import inspect

from exptilt import families
from laws.registry import CASES, LAWS


def test_every_public_law_is_registered() -> None:
    bases = {families.Measure, families.ExponentialFamily}
    classes = {cls for name in families.__all__ if inspect.isclass(cls := getattr(families, name))}
    public = {cls for cls in classes if hasattr(cls, "log_prob")} - bases
    assert public == {case.cls for case in LAWS}
    assert {cls for cls in public if issubclass(cls, families.Measure)} == {case.cls for case in CASES}


def test_every_class_has_its_integral_taken() -> None:
    assert {case.cls for case in LAWS if case.integral} == {case.cls for case in LAWS}


def test_every_public_exponential_family_has_extreme_members() -> None:
    assert all(case.extreme() for case in CASES if issubclass(case.cls, families.ExponentialFamily))
