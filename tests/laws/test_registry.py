"""No public measure escapes the laws."""

import inspect

from exptilt import families
from laws.registry import CASES


def test_every_public_measure_is_registered() -> None:
    bases = {families.Measure, families.ExponentialFamily}
    public = {
        cls
        for name in families.__all__
        if inspect.isclass(cls := getattr(families, name)) and issubclass(cls, families.Measure)
    }
    assert public - bases == {case.cls for case in CASES}


def test_every_class_has_its_integral_taken() -> None:
    assert {case.cls for case in CASES if case.integral} == {case.cls for case in CASES}


def test_every_public_exponential_family_has_extreme_members() -> None:
    assert all(case.extreme() for case in CASES if issubclass(case.cls, families.ExponentialFamily))
