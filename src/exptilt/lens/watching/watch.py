r"""`watch`: look at the attention of a model while it runs, at the price of its attention.

    with xt.lens.watch(model) as seen:
        model(**inputs)
    seen.record.to_frame()

On entering, every configuration inside a transformers model is pointed to an attention function and a mask
function of this watch, both under one new name (without the second, causality would be lost), and a torch
function mode catches attention that goes through ``scaled_dot_product_attention`` or
``torch.nn.MultiheadAttention``. On leaving, also by an exception, all is as it was found.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError, ExptiltError, ExptiltWarning
from exptilt._support.transforms import in_backward, pytree
from exptilt.attention import attend
from exptilt.lens.heads.key_mass import key_mass
from exptilt.lens.heads.statistics import PER_QUERY, first_key, summarise
from exptilt.lens.watching.call import AttentionCall, Intercepted, Request
from exptilt.lens.watching.dropout import dropped
from exptilt.lens.watching.masks import make_mask
from exptilt.lens.watching.modules import looks_elsewhere
from exptilt.lens.watching.record import CallRecord, Record
from exptilt.lens.watching.torch_hook import FunctionalMode, innermost
from exptilt.lens.watching.transformers_hook import attention_function
from exptilt.tilting import Tilted

_KNOWN = (
    "Watched are the attention interface of transformers, torch.nn.functional.scaled_dot_product_attention "
    "and "
    "torch.nn.MultiheadAttention; some models use the second if loaded with attn_implementation='sdpa'."
)


class NothingSeenError(ExptiltError, RuntimeError):
    """A watch ended without having seen attention that should have reached it."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a watch; see `watch`."""

    per_token: bool = False
    key_mass: bool = False
    observe: Callable[[AttentionCall], object] | None = None
    keep_graph: bool = False
    check: bool | None = None


def _configurations(model: nn.Module) -> list[Any]:
    """All configurations of transformers inside the model, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if hasattr(config, "_attn_implementation_internal") and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return list(found.values())


def _uncast(function: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """A function of a request, called outside of autocast with what autocast makes of the request."""

    def called(r: Request) -> Any:
        device = r.query.device.type
        if not torch.is_autocast_enabled(device):
            return function(r)
        r.cast(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return function(r)

    return called


class Watch:
    """An open eye on a model. `watch` makes it; enter it, run the model, read `record`."""

    def __init__(self, model: nn.Module, wanted: Wanted):
        self.record = Record()
        self.wanted = wanted
        attend, look_at = _uncast(self._attend), _uncast(self._look_at)
        self.intercepted = Intercepted(model, attend, look_at, self._note)
        self.modules = self.intercepted.modules
        self.own_name = f"exptilt-{id(self)}"
        self._handles: list[Any] = []
        self._steps: dict[nn.Module | None, int] = {}
        self._model_ran = False
        self._mode: FunctionalMode | None = None
        self._stance: Any = None

    def __enter__(self) -> "Watch":
        if self._mode is not None:
            raise ArgumentError("watch: this watch is already open. Call xt.lens.watch again for another.")
        self.intercepted.outer = innermost()
        model = self.intercepted.model
        try:
            self._switch()
            self._handles.append(model.register_forward_pre_hook(self._model_runs))
            for module in [*self.modules.attending(), *self.modules.strangers]:
                self._handles.append(module.register_forward_pre_hook(self._module_runs, with_kwargs=True))
            if any(hasattr(x, "_orig_mod") or x._compiled_call_impl is not None for x in model.modules()):
                # A compiled graph has no room for a look at it.
                self._stance = torch.compiler.set_stance("force_eager")
            self._mode = FunctionalMode(self.intercepted)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode, self._mode = self._mode, None
        try:
            if mode is not None:
                mode.__exit__(kind, problem, trace)  # type: ignore[no-untyped-call]
        finally:
            self._restore()
        if kind is None:
            self._complain()

    def _switch(self) -> None:
        """Point all configurations to this watch."""
        configs = _configurations(self.intercepted.model) if self.modules.interface else []
        if not configs:
            return
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(self.own_name, partial(attention_function, self.intercepted))
        AttentionMaskInterface.register(self.own_name, make_mask)
        for config in configs:
            self.intercepted.configurations.append((config, config._attn_implementation_internal))
            config._attn_implementation_internal = self.own_name

    def _restore(self) -> None:
        """Leave all as it was found."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if self.intercepted.configurations:
            from transformers import AttentionInterface, AttentionMaskInterface

            for config, before in self.intercepted.configurations:
                self._give_back(config, before, AttentionInterface._global_mapping)
            AttentionInterface._global_mapping.pop(self.own_name, None)
            AttentionMaskInterface._global_mapping.pop(self.own_name, None)
        self.intercepted.configurations.clear()

    def _give_back(self, config: Any, before: Any, registry: dict[str, Any]) -> None:
        """Point a configuration to where it pointed before.

        If another watch has it now (two models that share a configuration, in two threads), that one does so
        when it ends.
        """
        if config._attn_implementation_internal == self.own_name:
            config._attn_implementation_internal = before
            return
        for function in list(registry.values()):
            other = function.args[0] if isinstance(function, partial) and function.args else None
            if isinstance(other, Intercepted):
                other.configurations = [
                    (c, before if c is config and b == self.own_name else b) for c, b in other.configurations
                ]

    def _model_runs(self, module: nn.Module, arguments: Any) -> None:
        self._model_ran = True

    def _module_runs(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.intercepted.elsewhere[module] = looks_elsewhere(module, arguments, keywords)

    def _complain(self) -> None:
        """Raise or warn if attention was missed."""
        ran = [m for m in self.modules.names if m in self.intercepted.elsewhere and m not in self._steps]
        missed = [m for m in ran if m not in self.modules.strangers or not self.record.calls]
        if missed:
            raise NothingSeenError(
                f"watch: {len(missed)} attention modules of {self.intercepted.name} ran, but their attention "
                "did not "
                f"come by: {self._some(missed)}. {_KNOWN}"
            )
        if ran:
            text = (
                f"watch: the record of {self.intercepted.name} is without {len(ran)} modules that compute "
                "attention "
                f"without a function that watch can intercept: {self._some(ran)}. {_KNOWN}"
            )
            warnings.warn(text, ExptiltWarning, stacklevel=3)
        if not self.record.calls:
            what = "was not called inside the watch, or has no attention"
            what = "ran, but no attention of it came by" if self._model_ran else what
            raise NothingSeenError(f"watch: {self.intercepted.name} {what}. {_KNOWN}")

    def _some(self, modules: Sequence[nn.Module]) -> str:
        """Names and classes of the first three."""
        return ", ".join(f"{self.modules.name(m)!r} ({type(m).__name__})" for m in modules[:3])

    def _attend(self, r: Request) -> Tensor:
        """Attend and record; the output is (batch, Hq, Q, Dv)."""
        try:
            if r.dropout > 0:
                output = dropped(r.query, r.key, r.value, r.options, r.dropout)
                with torch.set_grad_enabled(self.wanted.keep_graph and torch.is_grad_enabled()):
                    tilted = self._tilted(r)
            else:
                tilted = self._tilted(r)
                output = tilted.output
        except ArgumentError as problem:
            problem.add_note(
                f"(in attention of {self.intercepted.name}, module {self.modules.name(r.module)!r})"
            )
            raise
        self._note(r, tilted)
        return output

    def _look_at(self, r: Request) -> None:
        """Record a call whose output is worked out elsewhere."""
        with torch.no_grad():
            self._note(r, self._tilted(r))

    def _tilted(self, r: Request) -> Tilted:
        return attend(r.query, r.key, r.value, **r.options, check=self.wanted.check)

    def _note(self, r: Request, tilted: Tilted) -> None:
        """Record a call that has been made."""
        if in_backward():
            return  # a checkpointed layer runs anew inside backward: seen already
        if self.intercepted.outer is not None:
            self.intercepted.outer.note(r, tilted)
        if r.module is not None and r.module not in self.modules:
            return  # a module of another model that shares its configuration, or belongs to the outer watch
        wanted, visible = self.wanted, r.visible
        if r.kind == "self":
            self.intercepted.real_query = visible.real_query
        still: Tilted = pytree.tree_map(Tensor.detach, tilted)
        with torch.no_grad():
            mass = key_mass(r.query, r.key, r.options, visible, wanted.check) if wanted.key_mass else None
            first = first_key(r.query, r.key, r.options, visible, still.log_normalizer).mass
            values = summarise(still, first, mass, visible, r.options.get("sink") is not None)
        step = self._steps.get(r.module, 0)
        self._steps[r.module] = step + 1
        layer, name = self.modules.number(r.module), self.modules.name(r.module)
        tokens = {label: getattr(still, label, first) for label in PER_QUERY} if wanted.per_token else None
        made = (r.query.shape[-1], r.options.get("softcap"), r.options.get("bias") is not None)
        self.record.calls.append(
            CallRecord(layer, name, r.kind, step, values, tokens, visible.real_query, mass, *made)
        )
        if wanted.observe is not None:
            shown = replace(tilted if wanted.keep_graph else still, key_mass=mass)
            real = (visible.real_query, visible.real_key)
            seen = (r.query, r.key, r.value, dict(r.options), *real, shown)
            wanted.observe(AttentionCall(layer, name, r.module, r.kind, step, *seen))


def watch(
    model: nn.Module,
    *,
    per_token: bool = False,
    key_mass: bool = False,
    observe: Callable[[AttentionCall], object] | None = None,
    keep_graph: bool = False,
    check: bool | None = None,
) -> Watch:
    """Watch the attention of a model while it runs; its outputs stay the same up to rounding, and memory is
    O(n).

    Args:
        model: a transformers model, or any module that attends through ``scaled_dot_product_attention`` or
            ``nn.MultiheadAttention``.
        per_token: also keep the statistics of every query.
        key_mass: also measure the attention each key gets, which is a second sweep over the keys.
        observe: called with an `AttentionCall` for each attention call.
        keep_graph: leave the statistics that `observe` gets inside the autograd graph, so that a loss can be
            made of them.
        check: raise if NaN or an infinity reaches attention, as in `attend`; False lets a model that diverged
            run as it does unwatched.

    Returns:
        A context manager; inside and after it, ``.record`` is the `Record`.

    Example:
        >>> layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 16)
        >>> with xt.lens.watch(layer) as seen:
        ...     output, weights = layer(x, x, x)
        >>> seen.record.by_head("entropy").shape
        (1, 4)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"watch: model is a {type(model).__name__}. Pass a torch.nn.Module, such as a transformers model."
        )
    return Watch(model, Wanted(per_token, key_mass, observe, keep_graph, check))
