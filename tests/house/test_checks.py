"""Each rule is shown to complain about a bad example, and to let a good one pass."""

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from house import checks


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tilting/tiled.py", "from exptilt.attention import attend"),
        ("tilting/tiled.py", "import exptilt.report.page"),
        ("tilting/tiled.py", "from exptilt import attention"),
        ("tilting/tiled.py", "from exptilt import attend"),
        ("tilting/tiled.py", "import exptilt"),
        ("tilting/tiled.py", "from ..attention import attend"),
        ("tilting/tiled.py", "from .. import attention"),
        ("tilting/deep/file.py", "from ...lens import watch"),
        ("tilting/tiled.py", "def f():\n    from exptilt.cli import main"),
        ("tilting/tiled.py", "def f():\n    import_module('exptilt.cli')"),
        ("tilting/tiled.py", "import importlib\nimportlib.import_module(f'exptilt.lens.{x}')"),
        ("dynamics/flow.py", "from exptilt.attention import attend"),
        ("dynamics/flow.py", "from exptilt.memory import Hopfield"),
        ("_support/errors.py", "from exptilt.tilting import reference"),
        ("elsewhere/file.py", "x = 1"),
    ],
)
def test_upward_import_is_seen(path, source):
    assert checks.upward_imports(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "tilting/tiled.py",
            "from exptilt._support.errors import ArgumentError\n"
            "from . import reference\nfrom .merge import merge\nimport torch",
        ),
        ("memory/hopfield.py", "from exptilt.dynamics import fixed_point\nfrom ..tilting import tiled"),
        ("report/page.py", "from exptilt import __version__\nfrom exptilt.attention import attend"),
        ("cli/main.py", "def f(x):\n    return import_module(f'exptilt.cli.{x}')"),
        ("__init__.py", "from exptilt.attention import attend"),
    ],
)
def test_downward_import_passes(path, source):
    assert checks.upward_imports(source, path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import matplotlib.pyplot as plt",
        "from transformers import AutoModel",
        "try:\n    import triton\nexcept ImportError:\n    triton = None",
        "class A:\n    import pandas",
    ],
)
def test_eager_optional_import_is_seen(source):
    assert checks.eager_optional_imports(source, "tilting/tiled.py")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tilting/backends/triton/scores.py", "import triton"),
        ("tilting/tiled.py", "def f():\n    import triton"),
        ("tilting/tiled.py", "if TYPE_CHECKING:\n    import pandas"),
        ("tilting/tiled.py", "import numpy, torch, scipy"),
    ],
)
def test_allowed_optional_import_passes(path, source):
    assert checks.eager_optional_imports(source, path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch._C._functorch.peek_interpreter_stack()",
        "import torch as t\nx = t._C",
        "from torch.autograd import forward_ad\nx = forward_ad._current_level",
        "from torch import Tensor\nx = Tensor._make_wrapper_subclass",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._pytree import tree_map",
        "import torch._dynamo",
        "def f():\n    f._dynamo_marked_constant = True",
    ],
)
def test_private_name_of_torch_is_seen(source):
    assert len(checks.private_torch_names(source, "lens/watch.py")) == 1
    assert checks.private_torch_names(source, "_support/transforms.py") == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.__version__",
        "from torch import nn\nclass A(nn.Module):\n    def f(self):\n        return self._x",
        "import numpy\nnumpy._x",
    ],
)
def test_other_names_pass(source):
    assert checks.private_torch_names(source, "lens/watch.py") == []


def test_device():
    made = "x = torch.zeros(3, device=y.device), torch.zeros_like(y), y.new_full((2,), 1.0)"
    assert checks.without_device(made, "losses/a.py") == []
    assert checks.without_device("torch.full((2,), 1.0)", "losses/a.py") == [
        "losses/a.py:1: torch.full without device="
    ]
    assert checks.without_device("torch.full((2,), 1.0)", "families/a.py") == []


def test_untyped_results():
    class Bad:
        def some(self): ...
        def any_(self) -> Any: ...
        def text(self) -> "Any": ...
        def good(self) -> int: ...
        def _own(self): ...

        @property
        def seen(self) -> Any: ...

        @classmethod
        def made(cls) -> "Bad": ...

    found = checks.untyped_results("Bad", Bad)
    assert found == ["Bad.some", "Bad.any_", "Bad.text", "Bad.seen"]
    assert checks.untyped_results("some", Bad.some) == ["some"]
    assert checks.untyped_results("number", 3) == []


def test_width():
    assert checks.too_wide("x" * 110 + "\ny = 1  # a remark\n", "a.py") == []
    assert checks.too_wide("x" * 110 + "  # noqa: E741", "a.py") == ["a.py:1: 124 columns, at most 110"]
    assert checks.too_wide("\u03bc\u0307" * 110, "a.py") == []
    assert checks.too_wide("\n" + "x" * 111, "a.py") == ["a.py:2: 111 columns, at most 110"]
    assert checks.too_wide("x" * 120, "a.hpp", 120) == []
    assert checks.too_wide("x" * 121, "a.hpp", 120) == ["a.hpp:1: 121 columns, at most 120"]
    for mark in ("# fmt: skip", "# fmt: off", "#fmt:skip"):
        assert checks.too_wide(f"x = [1,2]  {mark}", "a.py") == ["a.py:1: the formatter formats every line"]


@pytest.mark.parametrize("call", ["os.replace(a, b)", "tempfile.mkstemp()", "NamedTemporaryFile('w')"])
def test_a_file_that_is_moved_is_seen(call):
    assert len(checks.moved_files(f"def f():\n    return {call}", "lens/store.py")) == 1
    assert checks.moved_files(call, "_support/files.py") == []
    assert checks.moved_files("text.replace(a, b)\ndataclasses.replace(x, y=1)", "lens/store.py") == []


def test_names_of_tests():
    sources = ["lens/watching/watch.py", "lens/watching/masks.py", "tilting/attend.py", "_support/files.py"]
    good = [
        "lens/watching/test_watch.py",
        "lens/watching/test_watch_of_two_models.py",
        "lens/test_watching.py",
    ]
    good += [
        "tilting/test_attend_far.py",
        "tilting/test_tilting.py",
        "support/test_files.py",
        "house/test_a.py",
    ]
    assert checks.misnamed_tests(good, sources) == []
    bad = [
        "lens/test_watch.py",
        "lens/watching/test_mended.py",
        "tilting/test_edges.py",
        "new/test_attend.py",
    ]
    assert len(checks.misnamed_tests(bad, sources)) == len(bad)


def test_crowd():
    twelve = [f"lens/{letter}.py" for letter in "abcdefghijkl"]
    assert checks.crowded([*twelve, "lens/__init__.py", "lens/deep/a.py"]) == []
    assert checks.crowded([*twelve, "lens/m.py"]) == ["lens: 13 files, at most 12"]
    assert checks.crowded(f"families/members/{letter}.py" for letter in "abcdefghijklmnop") == []


@pytest.mark.parametrize(
    "back",
    [
        "from exptilt.memory.hopfield import Hopfield",
        "from exptilt.memory import hopfield",
        "from .. import hopfield",
        "import exptilt.memory.hopfield",
        "def f():\n    from exptilt.memory.hopfield import Hopfield",
        "import importlib\ndef f():\n    return importlib.import_module('exptilt.memory.hopfield')",
    ],
)
def test_circle_is_seen(back):
    sources = {
        "__init__.py": "def __getattr__(name):\n    from exptilt.memory import Hopfield",
        "memory/__init__.py": "from exptilt.memory.hopfield import Hopfield",
        "memory/hopfield.py": "import math\nfrom exptilt import __version__\nfrom .landscape import margins",
        "memory/landscape/__init__.py": "",
        "memory/landscape/margins.py": "from .basins import x",
        "memory/landscape/basins.py": back,
    }
    circle = "memory/hopfield.py, memory/landscape/basins.py, memory/landscape/margins.py"
    graph = checks.import_graph(sources)
    assert checks.cycles(graph) == [f"import each other: {circle}"]
    assert checks.cycles(checks.folder_graph(graph)) == [
        "import each other: memory/hopfield.py, memory/landscape"
    ]
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n" + "".join(
        f"    {line}\n" for line in back.splitlines()
    )
    graph = checks.import_graph(sources | {"memory/landscape/basins.py": typed})
    assert checks.cycles(graph) == []
    assert checks.cycles(checks.folder_graph(graph)) == []


def test_a_file_that_imports_its_own_folder_is_a_circle():
    sources = {
        "lens/__init__.py": "from .watch import watch",
        "lens/watch.py": "from exptilt.lens import study",
    }
    assert checks.cycles(checks.import_graph(sources)) == [
        "import each other: lens/__init__.py, lens/watch.py"
    ]


def test_subfolders_in_both_directions_are_seen():
    sources = {
        "lens/heads/a.py": "from exptilt.lens.watching.b import x",
        "lens/watching/b.py": "x = 1",
        "lens/watching/c.py": "from exptilt.lens.heads.d import y",
        "lens/heads/d.py": "y = 1",
    }
    graph = checks.import_graph(sources)
    assert checks.cycles(graph) == []
    assert checks.cycles(checks.folder_graph(graph)) == ["import each other: lens/heads, lens/watching"]
    del sources["lens/watching/c.py"]
    assert checks.cycles(checks.folder_graph(checks.import_graph(sources))) == []


def test_length():
    assert checks.too_long("x\n" * 501, "a.py")
    assert checks.too_long("x\n" * 500, "a.py") == []
    assert checks.too_long("x\n" * 451, "a.hpp", 450) == ["a.hpp: 451 lines, at most 450"]


def test_heads_of_cpp():
    assert checks.missing_heads("// Sums.\n#pragma once\n", "a.hpp") == []
    assert len(checks.missing_heads("#pragma once\n// Sums.\n", "a.hpp")) == 1


def good(query: Tensor, key: "Tensor | None" = None, *, scale: float = 1.0) -> Tensor:
    """Something.

    Args:
        query, key: a line
            and ``(..., dim)`` on the next.
        scale: a number.

    Returns:
        ``(...)``.
    """
    raise NotImplementedError


def no_docstring(x: int) -> int:
    raise NotImplementedError


def no_entry(x: int) -> int:
    """Something about x, which has no entry."""
    raise NotImplementedError


def no_shape(query: Tensor) -> None:
    """Something.

    Args:
        query: the query.
    """


def no_shape_of_optional(key: "torch.Tensor | None" = None) -> None:  # noqa: F821
    """Something.

    Args:
        key: the key.
    """


def no_returned_shape(scale: float) -> Tensor:
    """Something.

    Args:
        scale: a number, not ``(...)``.
    """
    raise NotImplementedError


@dataclass
class BareDataclass:
    x: int


@dataclass
class ShapelessDataclass:
    """Something.

    Attributes:
        x: a tensor.
    """

    x: Tensor


class SilentMethod:
    """A class with a method that says nothing."""

    def run(self) -> None:
        pass


@dataclass
class GoodDataclass:
    """Something.

    Attributes:
        x: ``(..., dim)``.
    """

    x: Tensor

    @property
    def y(self) -> int:
        """A number."""
        return 1


@pytest.mark.parametrize(
    "value",
    [
        no_docstring,
        no_entry,
        no_shape,
        no_shape_of_optional,
        no_returned_shape,
        BareDataclass,
        ShapelessDataclass,
        SilentMethod,
    ],
)
def test_bad_documentation_is_seen(value):
    assert len(checks.undocumented("value", value)) == 1


@pytest.mark.parametrize("value", [good, GoodDataclass, checks, ValueError, "1.0"])
def test_good_documentation_passes(value):
    assert checks.undocumented("value", value) == []


@pytest.mark.parametrize("folder", ["home", "root", "Users", "work", "opt"])
def test_machine_path_is_seen(folder):
    assert checks.machine_paths(f"open('/{folder}/someone/file')", "a.py")


@pytest.mark.parametrize(
    "text", ["https://example.org/home/page", "a/work/b", "/usr/bin/env", "see docs/work/x", "1/work"]
)
def test_other_paths_pass(text):
    assert checks.machine_paths(text, "a.py") == []


def test_paths_of_a_map():
    page = """Some `text/of.py` before.

```
src/exptilt/
  __init__.py      the names
  tilting/         attend.py the call, and (problem.py) more words
    backends/      dispatch.py
  lens/            words
tests/             house/ the rules
csrc/
  frame.hpp        and all.cpp
```

And `lens/watch.py`, `report/`, `make test`, `exptilt.cli`, `a/b` after.
"""
    assert checks.mapped_paths(page) == [
        "src/exptilt/",
        "src/exptilt/__init__.py",
        "src/exptilt/tilting/",
        "src/exptilt/tilting/attend.py",
        "src/exptilt/tilting/problem.py",
        "src/exptilt/tilting/backends/",
        "src/exptilt/tilting/backends/dispatch.py",
        "src/exptilt/lens/",
        "tests/",
        "tests/house/",
        "csrc/",
        "csrc/frame.hpp",
        "csrc/all.cpp",
    ]
    assert checks.quoted_paths(page) == ["text/of.py", "lens/watch.py", "report/"]


def test_targets():
    assert checks.missing_targets("help: x\n\ttest: no\nPIP := 3\n", {"help", "test"}) == [
        "Makefile: no target test"
    ]
    assert checks.missing_targets("help: x\ntest:\n", {"help", "test"}) == []


def test_changelog_version():
    assert checks.changelog_version("## [Unreleased]\n\n## [1.2.3] - 2026-01-01\n## [1.2.2]") == "1.2.3"
    assert checks.changelog_version("nothing") is None
