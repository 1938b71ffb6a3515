"""Checks of arguments: what passes comes back, what does not is named with what to pass."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from exptilt._support import checks
from exptilt._support.errors import ArgumentError

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(("value", "least"), [(1, 1), (0, 0), (np.int64(7), 2), (-3, -3), (10**30, 1)])
def test_whole(value, least):
    found = checks.whole("f", "n", value, least=least)
    assert (type(found), found) == (int, value)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (0.0, {}),
        (-7, {}),
        (Fraction(1, 2), {"above": 0, "below": 1}),
        (np.float32(0.5), {"least": 0.5, "most": 0.5}),
        (1, {"least": 1}),
    ],
)
def test_number(value, bounds):
    found = checks.number("f", "x", value, **bounds)
    assert (type(found), found) == (float, float(value))


REFUSED = {
    "bool": (lambda: checks.whole("f", "n", True), "f: n is True. Pass an integer ≥ 1."),
    "too small": (lambda: checks.whole("f", "n", 2, least=3), "f: n is 2. Pass an integer ≥ 3."),
    "float": (
        lambda: checks.whole("f", "n", 2.0, otherwise=", or None"),
        "f: n is 2.0. Pass an integer ≥ 1, or None.",
    ),
    "text": (lambda: checks.whole("f", "n", "2"), "f: n is '2'. Pass an integer ≥ 1."),
    "nan": (lambda: checks.number("f", "x", math.nan), "f: x is nan. Pass a finite number."),
    "infinite": (lambda: checks.number("f", "x", math.inf), "f: x is inf. Pass a finite number."),
    "true": (lambda: checks.number("f", "x", True), "f: x is True. Pass a finite number."),
    "tensor": (lambda: checks.number("f", "x", X[0, 0]), "f: x is tensor(1.). Pass a finite number."),
    "at the bound": (
        lambda: checks.number("f", "x", 0, above=0, most=1),
        "f: x is 0. Pass a finite number > 0 and ≤ 1.",
    ),
    "beyond": (lambda: checks.number("f", "x", 2, most=1), "f: x is 2. Pass a finite number ≤ 1."),
    "at the end": (
        lambda: checks.number("f", "x", 1.0, least=0, below=1),
        "f: x is 1.0. Pass a finite number ≥ 0 and < 1.",
    ),
    "no such word": (lambda: checks.choice("f", "m", "c", ("a", "b")), "f: m is 'c'. Pass one of 'a', 'b'."),
    "unhashable": (
        lambda: checks.choice("f", "m", [1], ("a",), otherwise=", or a callable"),
        "f: m is [1]. Pass one of 'a', or a callable.",
    ),
    "array for a word": (
        lambda: checks.choice("f", "m", np.ones(2), ("a",)),
        "f: m is array([1., 1.]). Pass one of 'a'.",
    ),
    "no tensor": (
        lambda: checks.floating("f", "x", [1.0]),
        "f: x must be a floating-point tensor; got list. Pass torch.as_tensor(x).",
    ),
    "integers": (
        lambda: checks.floating("f", "x", torch.ones(2, dtype=torch.int64)),
        "f: x must be a floating-point tensor; got torch.int64. Convert it: x.float().",
    ),
    "half": (
        lambda: checks.floating("f", "x", X.half(), dtypes=(torch.float32, torch.float64)),
        "f: x must be a tensor of float32, float64; got torch.float16. Convert it: x.float().",
    ),
    "few axes": (
        lambda: checks.floating("f", "x", X[0], axes=2, shape="(..., N, D)"),
        "f: x has shape (2,). Pass (..., N, D), none of the last 2 empty.",
    ),
    "no entries": (
        lambda: checks.floating("f", "x", X[:0], axes=2),
        "f: x has shape (0, 2). Pass at least 2 axes, leading ones are batch, none of the last 2 empty.",
    ),
    "dtypes": (
        lambda: checks.alike("f", a=X, b=None, c=X.double()),
        "f: a is torch.float32 on cpu, c is torch.float64 on cpu. Pass the same dtype and device: c.to(a).",
    ),
    "devices": (
        lambda: checks.alike("f", a=X, b=X.to("meta")),
        "f: a is torch.float32 on cpu, b is torch.float32 on meta. Pass the same dtype and device: b.to(a).",
    ),
    "seed": (
        lambda: checks.generator("f", 3),
        "f: generator is 3. Pass a torch.Generator, or None for torch's own.",
    ),
    "elsewhere": (
        lambda: checks.generator("f", torch.Generator(), torch.device("meta")),
        "f: generator is on cpu, the draws are made on meta. Pass torch.Generator('meta').",
    ),
    "entry": (
        lambda: checks.entries("f", "x", X, (X < 3).all(-1), "small"),
        "f: x[1] must be small; got [3.0, 4.0].",
    ),
    "scalar entry": (
        lambda: checks.positive("f", x=torch.tensor(-1.0)),
        "f: x must be positive and finite; got -1.0.",
    ),
    "zero": (lambda: checks.positive("f", x=X - 1), "f: x[0, 0] must be positive and finite; got 0.0."),
    "nan entry": (
        lambda: checks.finite("f", a=X, x=torch.tensor([1.0, math.nan])),
        "f: x[1] must be finite; got nan.",
    ),
    "infinite entry": (lambda: checks.finite("f", x=-X.log() / 0), "f: x[0, 0] must be finite; got nan."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        call()


def test_passed():
    source = torch.Generator()
    assert checks.choice("f", "m", "a", ("a", "b")) == "a"
    assert checks.choice("f", "m", None, ("a", None)) is None
    assert checks.floating("f", "x", X, axes=2) is X
    assert checks.generator("f", None) is None
    assert checks.generator("f", source, torch.device("cpu")) is source
    checks.alike("f", a=X, b=None, c=X[0])
    checks.finite("f", x=X, y=X[:0])
    checks.positive("f", x=X)


def test_values_are_not_looked_at_where_they_cannot_be():
    def inside(x):
        checks.positive("f", x=x)
        checks.finite("f", x=x)
        checks.entries("f", "x", x, x > 0, "positive")
        return x

    assert torch.equal(torch.func.vmap(inside)(-X), -X)
    checks.positive("f", x=torch.empty(2, device="meta"))
