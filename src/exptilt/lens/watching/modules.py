"""The attention modules of a model, in order of definition, and whether a call of one is cross-attention.

A module attends if it is a ``torch.nn.MultiheadAttention`` or if a method of its class names the attention
interface of transformers or ``scaled_dot_product_attention``. That can be read off the compiled code of the
class, before anything is run. A module that attends through a helper outside its class is found only when it
runs, and numbered after the others.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any, cast

from torch import Tensor, nn

INTERFACE, FUNCTION = "ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"
# Base classes that name the interface in order to choose an implementation, not in order to attend.
_BASES = {"transformers.modeling_utils"}
# Arguments by which an attention module is given other states than its own to look at.
_SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@cache
def ways(kind: Any) -> frozenset[str]:
    """How modules of this class attend, by their code: `INTERFACE`, `FUNCTION`, both, or neither."""
    if issubclass(kind, nn.MultiheadAttention):
        return frozenset({FUNCTION})
    found: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object) or base.__module__ in _BASES:
            continue
        for member in vars(base).values():
            member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
            if code is not None:
                found.update({INTERFACE, FUNCTION}.intersection(_names(code)))
    return frozenset(found)


@cache
def _may_attend_otherwise(kind: Any) -> bool:
    """Whether modules of this class may attend without the interface: by their code, or by their file's."""
    if kind.__module__.startswith("torch.nn."):
        return issubclass(kind, nn.MultiheadAttention)
    if not kind.__module__.startswith("transformers."):
        return True
    file = vars(sys.modules[kind.__module__])
    outside = [x for name, x in file.items() if callable(x) and name != "eager_attention_forward"]
    own = [x for x in outside if getattr(x, "__module__", "") == kind.__module__ and not isinstance(x, type)]
    # A module of the interface that attends by hand all the same is missed by name when it has run.
    other = {FUNCTION} if INTERFACE in ways(kind) else {FUNCTION, "softmax"}
    codes = [
        getattr(inspect.unwrap(x), "__code__", None) for x in (*own, *vars(kind).values()) if callable(x)
    ]
    return any(not other.isdisjoint(_names(code)) for code in codes if code is not None)


@cache
def _source_places(kind: Any) -> tuple[tuple[str, int], ...]:
    """Names of the arguments in `_SOURCES` that forward has, with their places."""
    try:
        parameters = list(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()
    return tuple((name, parameters.index(name)) for name in _SOURCES if name in parameters)


def looks_elsewhere(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    """How many tokens a call of module.forward is given to look at beside its own; 0 if it is none."""
    for name, place in _source_places(cast(Any, type(module))):
        given = keywords.get(name, arguments[place] if place < len(arguments) else None)
        if given is not None:
            return max(1, given.shape[-2]) if isinstance(given, Tensor) and given.dim() > 1 else 1
    return 0


class Modules:
    """The attention modules of a model: their numbers and dotted names."""

    def __init__(self, model: nn.Module):
        # Names of all modules, and places of those that attend.
        self.names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        how = {module: ways(cast(Any, type(module))) for module in self.names}
        found = [module for module in self.names if how[module]]
        self.numbers: dict[nn.Module | None, int] = {module: number for number, module in enumerate(found)}
        self._shared: dict[tuple[nn.Module | None, int], int] = {}
        self.interface = any(INTERFACE in how[module] for module in found)
        # Whether all attention goes through the interface, so that no torch function has to be looked at.
        kinds = {type(module) for module in self.names}
        self.interface_only = self.interface and not any(
            _may_attend_otherwise(cast(Any, kind)) for kind in kinds
        )
        near = [self.names[module] for module in found]
        # Modules with Attention in their class name but no known way to attend, and neither inside nor around
        # a module that has one.
        self.strangers: list[nn.Module] = []
        for module, name in self.names.items():
            if "Attention" in type(module).__name__:
                inside = [*near, *(self.names[other] for other in self.strangers)]
                if not any(_related(name, other) for other in inside):
                    self.strangers.append(module)

    def inside(self, module: nn.Module | None, whole: nn.Module) -> bool:
        """Whether `module` is `whole` or a part of it; None is a part of the root model only."""
        name, around = self.name(module), self.name(whole)
        return not around or name == around or name.startswith(f"{around}.")

    def __contains__(self, module: nn.Module | None) -> bool:
        return module in self.names

    def number(self, module: nn.Module | None, turn: int = 0) -> int:
        """Number of a layer: the index of its module among those that attend; an unknown module comes last.

        A module that several layers share attends several times in a forward pass. Each turn after the first
        is a layer of its own, numbered after all modules.
        """
        known = len(self.numbers) + len(self._shared)
        if turn == 0:
            return self.numbers.setdefault(module, known)
        return self._shared.setdefault((module, turn), known)

    def layer_names(self) -> dict[int, str]:
        """Dotted names of modules by the number of the layer."""
        shared = {number: self.name(module) for (module, _), number in self._shared.items()}
        return {number: self.name(module) for module, number in self.numbers.items()} | shared

    def name(self, module: nn.Module | None) -> str:
        """Dotted name of a module, empty for none."""
        return "" if module is None else self.names.get(module, "")

    def attending(self) -> list[nn.Module]:
        """The modules that attend."""
        return [module for module in self.numbers if module is not None]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode; on exit, each module returns to its own mode."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _related(one: str, other: str) -> bool:
    """Whether one of two dotted names is inside the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") or not one or not other
