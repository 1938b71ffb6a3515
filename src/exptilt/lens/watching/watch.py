r"""`watch`: look at the attention of a model while it runs, at the price of its attention.

    with xt.lens.watch(model) as seen:
        model(**inputs)
    seen.record.to_frame()

On entering, every configuration inside a transformers model is pointed to an attention function and a mask function of this watch, both
under one new name (without the second, causality would be lost), and a torch function mode catches attention that goes through
``scaled_dot_product_attention`` or ``torch.nn.MultiheadAttention``. On leaving, also by an exception, all is as it was found.
"""

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError, ExptiltError, ExptiltWarning
from exptilt._support.transforms import in_backward, pytree
from exptilt.attention import attend
from exptilt.lens.heads.statistics import PER_QUERY, first_key_mass, mass_of_keys, summarise
from exptilt.lens.heads.visibility import Sight
from exptilt.lens.watching.call import AttentionCall
from exptilt.lens.watching.dropout import dropped
from exptilt.lens.watching.masks import make_mask
from exptilt.lens.watching.modules import Layers, looks_elsewhere
from exptilt.lens.watching.record import CallRecord, Record
from exptilt.lens.watching.transformers_hook import attention_function, dense_sight, split_mask
from exptilt.tilting import Tilted

_KNOWN = (
    "Watched are the attention interface of transformers, torch.nn.functional.scaled_dot_product_attention and "
    "torch.nn.MultiheadAttention; some models use the second if loaded with attn_implementation='sdpa'."
)


class NothingSeenError(ExptiltError, RuntimeError):
    """A watch ended without having seen attention that should have reached it."""


def _configurations(model: nn.Module) -> list[Any]:
    """All configurations of transformers inside the model, each once."""
    found: dict[int, Any] = {}
    candidates: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    waiting = [config for config in candidates if hasattr(config, "_attn_implementation_internal")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
            waiting.extend(part for part in parts if hasattr(part, "_attn_implementation_internal"))
    return list(found.values())


class Watch:
    """An open eye on a model. `watch` makes it; enter it, run the model, read `record`."""

    def __init__(
        self,
        model: nn.Module,
        per_token: bool,
        key_mass: bool,
        observe: Callable[[AttentionCall], object] | None,
        keep_graph: bool,
        check: bool | None,
    ):
        self.record = Record()
        self.model, self.model_name = model, type(model).__name__
        self.per_token, self.key_mass, self.observe, self.keep_graph, self.check = (
            per_token,
            key_mass,
            observe,
            keep_graph,
            check,
        )
        self.layers = Layers(model)
        self.own_name = f"exptilt-{id(self)}"
        self._found: list[tuple[Any, Any]] = []  # configurations, and what they said before
        self._handles: list[Any] = []
        self._steps: dict[nn.Module | None, int] = {}
        self._elsewhere: dict[nn.Module, bool] = {}
        self._ran: set[nn.Module] = set()
        self._model_ran = False
        self._last_real: Tensor | None = (
            None  # real queries of the last self-attention, for the cross-attention after it
        )
        self._last_dense: tuple[Any, Any] = (None, None)
        self._mode: Any = None
        self._stance: Any = None
        self._outer: Watch | None = None  # the watch that this one was opened in

    def __enter__(self) -> "Watch":
        if self._mode is not None:
            raise ArgumentError("watch: this watch is already open. Call xt.lens.watch again for another.")
        from exptilt.lens.watching.torch_hook import FunctionalMode, open_watch

        self._outer = open_watch()
        try:
            self._switch()
            self._handles.append(self.model.register_forward_pre_hook(self._model_runs))
            for module in [*self.layers.attending(), *self.layers.strangers]:
                self._handles.append(module.register_forward_pre_hook(self._module_runs, with_kwargs=True))
            if any(
                hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
                for module in self.model.modules()
            ):
                self._stance = torch.compiler.set_stance(
                    "force_eager"
                )  # a compiled graph has no room for a look at it
            self._mode = FunctionalMode(self)
            self._mode.__enter__()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode, self._mode = self._mode, None
        try:
            mode.__exit__(kind, problem, trace)
        finally:
            self._restore()
        if kind is None:
            self._complain()

    def _switch(self) -> None:
        configs = _configurations(self.model) if self.layers.interface else []
        if not configs:
            return
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(self.own_name, partial(attention_function, self))
        AttentionMaskInterface.register(self.own_name, make_mask)
        for config in configs:
            self._found.append((config, config._attn_implementation_internal))
            config._attn_implementation_internal = self.own_name

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if self._found:
            from transformers import AttentionInterface, AttentionMaskInterface

            for config, before in self._found:
                self._give_back(config, before, AttentionInterface._global_mapping)
            AttentionInterface._global_mapping.pop(self.own_name, None)
            AttentionMaskInterface._global_mapping.pop(self.own_name, None)
        self._found.clear()

    def _give_back(self, config: Any, before: Any, registry: dict[str, Any]) -> None:
        """Point a configuration to where it pointed before.

        If another watch has it now (two models that share a configuration, in two threads), that one shall do so when it ends.
        """
        now = config._attn_implementation_internal
        if now == self.own_name:
            config._attn_implementation_internal = before
            return
        for function in list(registry.values()):
            other = function.args[0] if isinstance(function, partial) and function.args else None
            if isinstance(other, Watch):
                other._found = [
                    (c, before if c is config and b == self.own_name else b) for c, b in other._found
                ]

    def _model_runs(self, module: nn.Module, arguments: Any) -> None:
        self._model_ran = True

    def _module_runs(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._ran.add(module)
        self._elsewhere[module] = looks_elsewhere(module, arguments, keywords)

    def _complain(self) -> None:
        ran = [module for module in self.layers.names if module in self._ran and module not in self._steps]
        missed = [module for module in ran if module not in self.layers.strangers or not self.record.calls]
        if missed:
            some = ", ".join(
                f"{self.layers.name(module)!r} ({type(module).__name__})" for module in missed[:3]
            )
            raise NothingSeenError(
                f"watch: {len(missed)} attention modules of {self.model_name} ran, but their attention did not come by: {some}. {_KNOWN}"
            )
        if ran:
            some = ", ".join(f"{self.layers.name(module)!r} ({type(module).__name__})" for module in ran[:3])
            text = f"watch: the record of {self.model_name} is without {len(ran)} modules that attend in a way of their own: {some}. {_KNOWN}"
            warnings.warn(text, ExptiltWarning, stacklevel=3)
        if not self.record.calls:
            what = (
                "ran, but no attention of it came by"
                if self._model_ran
                else "was not called inside the watch, or has no attention"
            )
            raise NothingSeenError(f"watch: {self.model_name} {what}. {_KNOWN}")

    def knows(self, module: nn.Module) -> bool:
        """Whether a module belongs to the watched model, or to that of a watch around this one."""
        return module in self.layers or (self._outer is not None and self._outer.knows(module))

    def kind(self, module: nn.Module | None) -> str:
        """Whether the current call of a module is "self" or "cross" attention."""
        return "cross" if module is not None and self._elsewhere.get(module, False) else "self"

    def is_causal(self, module: nn.Module, asked: bool | None) -> bool:
        """Whether self-attention without a mask is causal: as asked, or as the module says; with eager attention only, never."""
        if not getattr(self.model, "_supports_sdpa", True):
            return False
        return bool(getattr(module, "is_causal", True) if asked is None else asked)

    def own_queries(self, query: Tensor) -> Tensor | None:
        """Real queries as the last self-attention had them, if it had as many: what cross-attention knows of its own side."""
        real = self._last_real
        return real if real is not None and real.shape == (query.shape[0], query.shape[2]) else None

    def dense_sight(
        self, mask: Tensor, Q: int, K: int, kind: str, query: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Sight]:
        """Booleans, numbers to add, and sight of a dense mask, worked out once for all layers that are given the same tensor."""
        own = self.own_queries(query) if kind == "cross" else None
        place = (Q, K, kind, id(own), query.shape[0])
        known, answer = self._last_dense
        if known is not None and known[0]() is mask and known[1] == place:
            return answer
        seen, bias = split_mask(mask, K)
        found = seen, bias, dense_sight(seen, {}, Q, K, kind, own, query)
        self._last_dense = ((weakref.ref(mask), place), found)
        return found

    def attend(
        self, module: nn.Module | None, kind: str, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], sight: Sight,
        dropout: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Attend and record. Returns the output, (batch, Hq, Q, Dv).

        Args:
            module: whose attention it is.
            kind: "self" or "cross".
            query: ``(batch, Hq, Q, D)``.
            key: ``(batch, Hkv, K, D)``.
            value: ``(batch, Hkv, K, Dv)``.
            options: keyword arguments of `attend`.
            sight: what is real and seen.
            dropout: probability with which a weight is dropped from the output; statistics are of the undropped weights.
        """
        try:
            if dropout > 0:
                output = dropped(query, key, value, options, dropout)
                with torch.set_grad_enabled(self.keep_graph and torch.is_grad_enabled()):
                    tilted = attend(query, key, value, **options, check=self.check)
            else:
                tilted = attend(query, key, value, **options, check=self.check)
                output = tilted.output
        except ArgumentError as problem:
            problem.add_note(f"(in attention of {self.model_name}, module {self.layers.name(module)!r})")
            raise
        self.note(module, kind, query, key, value, options, sight, tilted)
        return output

    def note(
        self, module: nn.Module | None, kind: str, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], sight: Sight,
        tilted: Tilted,
    ) -> None:  # fmt: skip
        """Record a call that has been made; arguments as in `attend`."""
        if in_backward():
            return  # a checkpointed layer runs anew inside backward: seen already
        if self._outer is not None:
            self._outer.note(module, kind, query, key, value, options, sight, tilted)
        if module is not None and module not in self.layers:
            return  # a module of another model: it shares its configuration with this one, or belongs to the outer watch
        if kind == "self":
            self._last_real = sight.real_query
        still = pytree.tree_map(Tensor.detach, tilted)
        with torch.no_grad():
            mass = mass_of_keys(query, key, options, sight, self.check) if self.key_mass else None
            first = first_key_mass(query, key, options, sight.first, still.log_normalizer)
            values = summarise(still, first, mass, sight, options.get("sink") is not None)
        step = self._steps.get(module, 0)
        self._steps[module] = step + 1
        layer, name = self.layers.number(module), self.layers.name(module)
        tokens = None
        if self.per_token:
            tokens = {
                label: first if label == "first_key_mass" else getattr(still, label) for label in PER_QUERY
            }
        made = (query.shape[-1], options.get("softcap"), options.get("bias") is not None)
        self.record.calls.append(
            CallRecord(layer, name, kind, step, values, tokens, sight.real_query, mass, *made)
        )
        if self.observe is not None:
            shown = replace(tilted if self.keep_graph else still, key_mass=mass)
            call = AttentionCall(
                layer,
                name,
                module,
                kind,
                step,
                query,
                key,
                value,
                dict(options),
                sight.real_query,
                sight.real_key,
                shown,
            )
            self.observe(call)


def watch(
    model: nn.Module, *, per_token: bool = False, key_mass: bool = False, observe: Callable[[AttentionCall], object] | None = None,
    keep_graph: bool = False, check: bool | None = None,
) -> Watch:  # fmt: skip
    """Watch the attention of a model while it runs; outputs do not change beyond rounding, and memory stays O(n).

    Args:
        model: a transformers model, or any module that attends through ``scaled_dot_product_attention`` or ``nn.MultiheadAttention``.
        per_token: also keep the statistics of every query.
        key_mass: also measure the attention each key gets, which about doubles the time of attention.
        observe: called with an `AttentionCall` for each attention call.
        keep_graph: leave the statistics that `observe` gets inside the autograd graph, so that a loss can be made of them.
        check: raise if NaN or an infinity reaches attention, as in `attend`; False lets a model that diverged run as it does unwatched.

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
    return Watch(model, per_token, key_mass, observe, keep_graph, check)
