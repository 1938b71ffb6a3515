r"""Take over the attention of a model for a while, and give the model back as it was.

On entering, every configuration inside a transformers model is pointed to the attention function and the mask
function of exptilt, and a torch function mode catches attention that goes through
``scaled_dot_product_attention`` or ``torch.nn.MultiheadAttention``. On leaving, also by an exception, all is
as it was found. A copy made meanwhile is a copy of the original model, without the new name or the hooks.

A configuration is shared by all threads, so the attention function asks which model is taken over in the
thread that calls it. Other threads get the same outputs, and no record holds their calls.

A layer under non-reentrant activation checkpointing runs again in the backward pass, perhaps after the model
was given back, and must save the same tensors then: the interception opens again for that run.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import RLock, get_ident
from typing import Any

from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import rerun_checkpoint_inside, uncompiled
from exptilt.lens.watching.call import OPEN, Intercepted
from exptilt.lens.watching.modules import looks_elsewhere
from exptilt.lens.watching.torch_hook import FunctionalMode, innermost
from exptilt.lens.watching.transformers_hook import NAMES, register

_HELD: dict[int, list[Any]] = {}  # by id: a configuration that points to us, and how many hold it
_LOCK = RLock()


class _Name(str):
    """Name of our attention implementation; a copy or pickle of it is the name that it replaced."""

    before: Any

    def __reduce__(self) -> Any:
        return copy.copy, (self.before,)


class _Hook:
    """A hook on a module that does not go along when the module is copied or pickled."""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __call__(self, *arguments: Any) -> None:
        # If a hook before this one removes it, torch still calls it this once, but without keywords.
        if len(arguments) == 3:
            self.function(*arguments)

    def __reduce__(self) -> Any:
        return partial, (_nothing,)


def _nothing(*arguments: Any) -> None:
    """Do nothing: the hook that copied and pickled hooks turn into."""


def _configurations(model: nn.Module) -> list[Any]:
    """All configurations of transformers inside the model, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return list(found.values())


class Interception:
    """A context manager: inside it, the attention of a model goes to the functions of an `Intercepted`."""

    def __init__(self, intercepted: Intercepted):
        self.intercepted = intercepted
        # A checkpointed layer must find the same attention when it runs again.
        intercepted.before_attention = partial(rerun_checkpoint_inside, self._again)
        self._restore: ExitStack | None = None  # undoes all changes; None unless this is open

    def __enter__(self) -> "Interception":
        if self._restore is not None:
            raise ArgumentError("watch: this watch is already open. Call xt.lens.watch again for another.")
        seen = self.intercepted
        seen.outer, seen.thread = innermost(), get_ident()
        with ExitStack() as restore:
            self._switch(restore)
            self._hook(restore)
            OPEN.append(seen)
            restore.callback(OPEN.remove, seen)
            restore.enter_context(uncompiled())
            if seen.softmax or not seen.modules.interface_only or seen.modules.strangers:
                restore.enter_context(
                    FunctionalMode(seen)
                )  # which costs microseconds at every torch function
            self._restore = restore.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore.__exit__(*raised)

    def _again(self) -> "Interception":
        """A second interception of the same model, which can be entered while this one is open or later."""
        seen = copy.copy(self.intercepted)
        seen.elsewhere = {}
        return Interception(seen)

    def _hook(self, restore: ExitStack) -> None:
        """Register hooks that tell when the model and its attention modules run."""
        seen, modules = self.intercepted, self.intercepted.modules
        whole = [m for m in modules.names if m is seen.model or hasattr(type(m), "_supports_sdpa")]
        for module in whole:
            restore.callback(module.register_forward_pre_hook(_Hook(seen.enter), with_kwargs=True).remove)
        for module in [*modules.attending(), *modules.strangers]:
            hook = _Hook(self._module_runs)
            restore.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _module_runs(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.intercepted.here:
            self.intercepted.keep_shape(module, arguments, keywords)
            self.intercepted.elsewhere[module] = looks_elsewhere(module, arguments, keywords)

    def _switch(self, restore: ExitStack) -> None:
        """Point all configurations to our functions, and have `restore` point them back."""
        seen = self.intercepted
        configs = _configurations(seen.model) if seen.modules.interface else []
        if not configs:
            return
        register()
        for config in configs:
            with _LOCK:
                held = _HELD.setdefault(id(config), [config, 0])
                held[1] += 1
                before = config._attn_implementation_internal
                if str(before) not in NAMES.values():
                    name = _Name(NAMES[before == "eager"])
                    name.before = before
                    config._attn_implementation_internal = name
            restore.callback(_let_go, config)


def _let_go(config: Any) -> None:
    """Point a configuration back to its former implementation, if no other interception holds it."""
    with _LOCK:
        held = _HELD[id(config)]
        held[1] -= 1
        if held[1]:
            return
        del _HELD[id(config)]
        name = config._attn_implementation_internal
        if isinstance(name, _Name):
            config._attn_implementation_internal = name.before
