"""The rules of the house as functions from source text, or from an object, to a list of complaints.

They are functions, so that each can be shown to complain about a bad example (`test_checks.py`) before it is
trusted with the package.
"""

import ast
import functools
import inspect
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

LAYERS: list[set[str]] = [
    {"_support"},
    {"tilting"},
    {"families"},
    {"sampling"},
    {"attention", "dynamics", "switching", "taylor"},
    {"distributed"},
    {"memory", "losses"},  # a memory is a flow with patterns held still, run to its fixed point
    {"lens"},
    {"curvature"},
    {"claims"},
    {"report"},
    {"cli"},
]
ORDER = " > ".join(
    f"({', '.join(sorted(floor))})" if len(floor) > 1 else next(iter(floor)) for floor in reversed(LAYERS)
)
HEIGHT = {folder: height for height, folders in enumerate(LAYERS) for folder in folders}

# Libraries that only some users have or want. Nobody may import them at module level, but for the files named
# here, which in turn are imported only where they are used.
OPTIONAL_LIBRARIES = {
    *("PIL", "matplotlib", "jinja2", "latex2mathml", "pandas", "psutil", "triton", "torchdiffeq"),
    *(
        "transformers",
        "safetensors",
        "tokenizers",
        "huggingface_hub",
        "gguf",
        "accelerate",
        "tensorboard",
        "wandb",
    ),
}
MAY_IMPORT = {
    f"tilting/backends/triton/{name}.py": {"triton"} for name in ("scores", "forward", "derivatives")
}

# Names that torch may change without notice are used in one file, which gives them plain names.
MAY_USE_PRIVATE_TORCH = {"_support/transforms.py"}

LINES_AT_MOST = 500
TEST_LINES_AT_MOST = 600
COLUMNS_AT_MOST = 110
NATIVE_LINES_AT_MOST = 450  # of a file of csrc
NATIVE_COLUMNS_AT_MOST = 120
FILES_AT_MOST = 12
CATALOGUES = {"families/members"}  # one family a file: who looks for one knows its name
NAMES_AT_MOST = 34  # Tilted is AttentionResult


@functools.cache
def parsed(source: str) -> ast.Module:
    """Each file is read by many checks and parsed once; nobody changes the tree."""
    return ast.parse(source)


def dotted(node: ast.AST) -> str:
    """`a.b.c` as written, or nothing where a part is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def imported(node: ast.AST, package: str) -> list[str]:
    """The absolute dotted names that one syntax node imports, as seen from inside `package`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args:
        called = dotted(node.func)
        first = node.args[0]
        if called in {"import_module", "importlib.import_module", "__import__"}:
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                return [first.value]
            if (
                isinstance(first, ast.JoinedStr)
                and first.values
                and isinstance(first.values[0], ast.Constant)
            ):
                return [str(first.values[0].value).rstrip(".")]
    return []


def upward_imports(source: str, path: str) -> list[str]:
    """Imports in `source` (at `path` below src/exptilt) that do not point downwards, inside functions too."""
    *folders, _ = Path(path).parts
    if not folders:
        return []  # the package's own __init__ and __main__ stand above all floors
    home = folders[0]
    if home not in HEIGHT:
        return [f"{path}: folder {home} has no place in LAYERS"]
    package = ".".join(["exptilt", *folders])
    complaints = []
    for node in ast.walk(parsed(source)):
        for name in imported(node, package):
            first, *rest = name.split(".")
            if first != "exptilt" or rest[:1] == ["__version__"]:
                continue
            target = rest[0] if rest else "exptilt"
            if target != home and not HEIGHT.get(target, len(LAYERS)) < HEIGHT[home]:
                complaints.append(f"{path}:{node.lineno}: {home} may not import {name}")
    return complaints


def that_run(tree: ast.Module, *, calls: bool = True) -> list[ast.AST]:
    """All nodes outside `if TYPE_CHECKING`; without `calls` those alone that run on import."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if not calls and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and dotted(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            waiting.extend(node.orelse)
            continue
        found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def eager_optional_imports(source: str, path: str) -> list[str]:
    """Optional libraries that `source` imports as soon as it is itself imported."""
    allowed = MAY_IMPORT.get(path, set())
    return [
        f"{path}:{node.lineno}: {name} is optional; import it inside the function that needs it"
        for node in that_run(parsed(source), calls=False)
        for name in imported(node, "exptilt")
        if name.split(".")[0] in OPTIONAL_LIBRARIES - allowed
    ]


def private_torch_names(source: str, path: str) -> list[str]:
    """Names of torch with an underscore in front that `source` imports or looks up."""
    if path in MAY_USE_PRIVATE_TORCH:
        return []

    def private(name: str) -> bool:
        first, *rest = name.split(".")
        return first == "torch" and any(part.startswith("_") and not part.endswith("__") for part in rest)

    tree = parsed(source)
    known, used = {}, []  # what a name of the file stands for; names of torch and where they are used
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, name in zip(node.names, imported(node, "exptilt"), strict=True):
                used.append((node, name))
                if isinstance(node, ast.ImportFrom) or alias.asname:
                    known[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if first:  # and not what a call returns
                used.append((node, f"{known.get(first, first)}.{rest}"))
            if node.attr.startswith("_dynamo"):  # a mark that the compiler reads, on any object
                used.append((node, f"torch.{node.attr}"))
    found = {(node.lineno, name) for node, name in used if private(name)}
    shortest = {
        (line, name)
        for line, name in found
        if not any(line == at and name.startswith(f"{other}.") for at, other in found)
    }
    return [
        f"{path}:{line}: {name} is private; give it a plain name in _support/transforms.py"
        for line, name in sorted(shortest)
    ]


def too_long(source: str, path: str, most: int = LINES_AT_MOST) -> list[str]:
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, at most {most}"] if lines > most else []


def too_wide(source: str, path: str, most: int = COLUMNS_AT_MOST) -> list[str]:
    """Lines of more columns than we read, marks for linters included, or that the formatter leaves alone."""
    complaints = []
    for number, line in enumerate(source.splitlines(), start=1):
        if len(line) <= most and "fmt" not in line:
            continue
        columns = sum(not unicodedata.combining(letter) for letter in line)  # the dot of ẋ takes no column
        if columns > most:
            complaints.append(f"{path}:{number}: {columns} columns, at most {most}")
        if re.search(r"# *fmt: *(skip|off)", line):
            complaints.append(f"{path}:{number}: the formatter formats every line")
    return complaints


def without_device(source: str, path: str) -> list[str]:
    """Tensors that are made where torch's default device is, and not where the caller's tensors are."""
    if Path(path).parts[0] not in {"attention", "distributed", "losses"}:
        return []
    makers = {f"torch.{name}" for name in ("arange", "empty", "eye", "full", "linspace", "ones", "zeros")}
    return [
        f"{path}:{node.lineno}: {ast.unparse(node.func)} without device="
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in makers
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def missing_heads(source: str, path: str) -> list[str]:
    """Files of C++ that do not begin with what they do, in words."""
    return [] if source.startswith("// ") else [f"{path}: begins without a comment that says what it does"]


def moved_files(source: str, path: str) -> list[str]:
    """Calls by which `source` would put a file in its place by itself."""
    if path == "_support/files.py":
        return []
    words = {"os.replace", "os.rename", "mkstemp", "NamedTemporaryFile"}
    return [
        f"{path}:{node.lineno}: {ast.unparse(node.func)}; files are written by _support/files.py"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call)
        and (dotted(node.func) in words or getattr(node.func, "attr", "") in words)
    ]


def crowded(paths: Iterable[str]) -> list[str]:
    """Folders with more files than one can keep in mind; `__init__.py` is not counted."""
    counts = Counter(Path(path).parent.as_posix() for path in paths if Path(path).name != "__init__.py")
    return [
        f"{folder}: {count} files, at most {FILES_AT_MOST}"
        for folder, count in sorted(counts.items())
        if count > FILES_AT_MOST and folder not in CATALOGUES
    ]


# Folders of tests that no folder of the package stands for.
OTHER_TESTS = {"bad_input", "benchmarks", "browser", "examples", "house", "laws", "native"}


def misnamed_tests(tests: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Files of tests that are not named after the file or folder of the package that they test.

    `tests/lens/watching/test_watch_training.py` is about `lens/watching/watch.py`: it lies in the folder of
    its source, and a subject may follow the name of the source.
    """
    places = {Path(path) for path in sources}
    places |= {parent for path in places for parent in path.parents}
    names: dict[str, set[str]] = {}
    for place in places:
        names.setdefault(place.parent.as_posix(), set()).add(place.stem)
        names.setdefault(place.as_posix(), set()).add(place.stem)  # several files of a folder, by its name
    complaints = []
    for path in sorted(tests):
        folder = Path(path).parent.as_posix()
        if folder.split("/")[0] in OTHER_TESTS:
            continue
        words = Path(path).stem.removeprefix("test_").split("_")
        here = names.get("_support" if folder == "support" else folder, set())
        if not any("_".join(words[:count]) in here for count in range(1, len(words) + 1)):
            complaints.append(f"tests/{path}: no file or folder of src/exptilt/{folder} has this name")
    return complaints


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which files (below src/exptilt) each file imports, inside functions too, but not for types alone."""
    modules = {}
    for path in sources:
        parts = Path(path).with_suffix("").parts
        modules[".".join(["exptilt", *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        package = ".".join(["exptilt", *Path(path).parts[:-1]])
        names = [name for node in that_run(parsed(source)) for name in imported(node, package)]
        found = {modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names}
        if path != "__init__.py":
            found.discard("__init__.py")  # which loads nothing by itself
        graph[path] = {name for name in found if name is not None}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """The groups of nodes of which each leads to every other, one complaint a group."""
    reached = {}
    for start in graph:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting.extend(new)
        reached[start] = seen
    groups = {
        tuple(sorted({node, *(other for other in reached[node] if node in reached[other])}))
        for node in graph
        if node in reached[node]
    }
    return [f"import each other: {', '.join(group)}" for group in sorted(groups)]


def folder_graph(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The graph of imports with every subfolder as one node; `__init__.py`, which gathers, is left out."""

    def node(path: str) -> str:
        parts = Path(path).parts
        return "/".join(parts[:2]) if len(parts) > 2 else path

    found: dict[str, set[str]] = {}
    for path, imports in graph.items():
        if len(Path(path).parts) == 2 and Path(path).name == "__init__.py":
            continue
        ends = found.setdefault(node(path), set())
        ends |= {node(other) for other in imports} - {node(path)}
    return {start: ends & found.keys() for start, ends in found.items()}


def sections(docstring: str) -> dict[str, str]:
    """The `Args:`-like sections of a docstring by name; "" is what stands before the first."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(docstring).splitlines():
        header = re.fullmatch(r"([A-Z][A-Za-z]+):", line)
        if header:
            name = header[1]
            found[name] = []
        elif name and line and not line.startswith(" "):
            name = ""
            found[""].append(line)
        else:
            found[name].append(line)
    return {key: "\n".join(lines) for key, lines in found.items()}


def entries(section: str) -> dict[str, str]:
    """`name: text` and `name, other: text` entries of a section, by name."""
    found: dict[str, str] = {}
    current: list[str] = []
    for line in inspect.cleandoc("\n" + section).splitlines():
        match = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: (.*)", line)
        if match and not line.startswith(" "):
            current = [name.lstrip("*") for name in match[1].split(", ")]
            found |= dict.fromkeys(current, match[2])
        else:
            for name in current:
                found[name] += " " + line.strip()
    return found


def takes_tensor(annotation: object) -> bool:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.search(r"\bTensor\b", text) is not None


def undocumented_call(name: str, function: Callable, docstring: str | None) -> list[str]:
    """Complaints on the docstring of a callable: each parameter in `Args:`, a ``(shape)`` for each tensor."""
    if not docstring:
        return [f"{name}: no docstring"]
    signature = inspect.signature(function)
    parameters = [
        p
        for p in signature.parameters.values()
        if p.name not in {"self", "cls"} and not p.name.startswith("_")
    ]
    parts = sections(docstring)
    described = entries(parts.get("Args", "")) | entries(parts.get("Attributes", ""))
    complaints = []
    for parameter in parameters:
        if parameter.name not in described:
            complaints.append(f"{name}: no entry for {parameter.name} under Args:")
        elif takes_tensor(parameter.annotation) and "``(" not in described[parameter.name]:
            complaints.append(
                f"{name}: {parameter.name} is a tensor; its entry needs a shape such as ``(..., query, dim)``"
            )
    returned = signature.return_annotation
    if (
        returned is not inspect.Signature.empty
        and takes_tensor(returned)
        and "``(" not in parts.get("Returns", "")
    ):
        complaints.append(f"{name}: returns a tensor; Returns: needs a shape such as ``(..., query)``")
    return complaints


def untyped_results(name: str, value: object) -> list[str]:
    """The calls and properties of a public name whose result has no type, or `Any`."""
    if inspect.isclass(value):
        members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
        return [line for key, member in members.items() for line in untyped_results(f"{name}.{key}", member)]
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if not inspect.isfunction(value):
        return []
    given = inspect.unwrap(value).__annotations__.get("return", "Any")
    return [name] if given in ("Any", Any) else []


def undocumented(name: str, value: object) -> list[str]:
    """Complaints on the documentation of one public name: a module, class, function or constant."""
    if isinstance(value, ModuleType):
        return [] if value.__doc__ else [f"{name}: no docstring"]
    if inspect.isclass(value):
        own = value.__dict__.get("__doc__")
        if not own or own.startswith(f"{value.__name__}("):  # what @dataclass writes by itself
            return [f"{name}: no docstring"]
        if issubclass(value, BaseException):
            return []
        complaints = []
        if "__init__" in value.__dict__:
            complaints += undocumented_call(name, value.__init__, own)
        for key, member in value.__dict__.items():
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if key.startswith("_"):
                continue
            if isinstance(member, property) and not member.__doc__:
                complaints.append(f"{name}.{key}: no docstring")
            if inspect.isfunction(member):
                complaints += undocumented_call(f"{name}.{key}", member, member.__doc__)
        return complaints
    if callable(value):
        return undocumented_call(name, value, value.__doc__)
    return []


# A folder of one machine: someone's home, or a place only that machine has.
MACHINE_PATH = re.compile(r"(?<![\w.~/:-])/(?:root|home|work|Users|opt|mnt)/[\w.]+")


def machine_paths(source: str, path: str) -> list[str]:
    return [
        f"{path}:{number}: {match[0]}"
        for number, line in enumerate(source.splitlines(), start=1)
        for match in MACHINE_PATH.finditer(line)
    ]


def mapped_paths(text: str) -> list[str]:
    """The files and folders that the trees of a page name: what is indented below `name/` is in it.

    Words of a description that end in .py, .hpp, .cpp or / are files and folders of the folder they describe.
    """
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        above: list[tuple[int, str]] = []
        for line in [] if language else block.splitlines():
            name, *words = line.split() or [""]
            depth = len(line) - len(line.lstrip())
            above = [(indent, folder) for indent, folder in above if indent < depth]
            parent = above[-1][1] if above else ""
            if name.endswith("/"):
                above.append((depth, parent + name))
            elif not name.endswith((".py", ".hpp", ".cpp")):
                continue
            found.append(parent + name)
            parent = above[-1][1] if above else ""
            stripped = (word.strip(",;:().") for word in words)
            found += [parent + word for word in stripped if re.search(r"\.(py|hpp|cpp)$|/$", word)]
    return found


def quoted_paths(text: str) -> list[str]:
    """The files and folders that a page names between backticks, such as `lens/watch.py` or `lens/heads/`."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    words = re.findall(r"`([\w./-]+)`", prose)
    return [word for word in words if "/" in word and re.search(r"\.[a-z]+$|/$", word)]


def missing_targets(makefile: str, wanted: set[str]) -> list[str]:
    targets = set(re.findall(r"^([a-z-]+):(?!=)", makefile, flags=re.MULTILINE))
    return sorted(f"Makefile: no target {name}" for name in wanted - targets)


def changelog_version(text: str) -> str | None:
    """The newest released version of a changelog, or None."""
    match = re.search(r"^## \[(\d+\.\d+\.\d+)\]", text, flags=re.MULTILINE)
    return match[1] if match else None
