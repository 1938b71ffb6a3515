r"""`watch`: look at the attention of a model while it runs, at the price of its attention.

    with xt.lens.watch(model) as seen:
        model(**inputs)
    seen.record.to_frame()

How a model is taken over and given back is in `interception`; here is what is done with each attention call:
`attend` gives the output that the model goes on with, and the statistics along with it.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError, ExptiltError, ExptiltWarning
from exptilt._support.transforms import in_backward, never_compiled, pytree
from exptilt.lens.heads.key_mass import key_mass
from exptilt.lens.heads.statistics import PER_QUERY, first_products, rows, statistic_lines, with_mass
from exptilt.lens.watching.call import AttentionCall, Intercepted, Request
from exptilt.lens.watching.interception import Interception
from exptilt.lens.watching.record import Record, Waiting
from exptilt.lens.watching.transformers_hook import uncast
from exptilt.tilting import AttentionResult, attend

_KNOWN = (
    "Watched are the attention interface of transformers, torch.nn.functional.scaled_dot_product_attention "
    "and torch.nn.MultiheadAttention; some models use the second if loaded with attn_implementation='sdpa'. "
    "Attention written out with a softmax is seen by watch(model, softmax=True), the slow way."
)


class NothingSeenError(ExptiltError, RuntimeError):
    """A watch ended without having seen attention that should have reached it."""


@dataclass(frozen=True)
class Wanted:
    """Options of a watch; see `watch`."""

    per_token: bool = False
    key_mass: bool = False
    observe: Callable[[AttentionCall], object] | None = None
    keep_graph: bool = False
    check: bool | None = None
    softmax: bool = False
    edit: Callable[[AttentionCall], Tensor | None] | None = None


class Watch:
    """A watch on the attention of a model, made by `watch`: enter it, run the model, read `record`."""

    def __init__(self, model: nn.Module, wanted: Wanted):
        self.record = Record()
        self.wanted = wanted
        attend, look_at = uncast(self._attend), uncast(self._look_at)
        self.intercepted = Intercepted(model, attend, look_at, self._note, softmax=wanted.softmax)
        self.intercepted.edit = None if wanted.edit is None else self._edited
        self.modules = self.intercepted.modules
        self._interception = Interception(self.intercepted)
        self._steps: dict[int, int] = {}  # calls so far by layer
        self._seen: set[nn.Module | None] = set()
        self._changed = False  # whether `edit` has changed a call

    def __repr__(self) -> str:
        return f"<Watch of {self.intercepted.name}: {len(self.record.calls)} attention calls; read .record>"

    @never_compiled
    def __enter__(self) -> "Watch":
        self._interception.__enter__()
        return self

    @never_compiled
    def __exit__(self, *raised: Any) -> None:
        self.record.settle()
        self._interception.__exit__(*raised)
        if raised[0] is None:
            self._complain()

    def _complain(self) -> None:
        """Raise or warn if attention was missed."""
        seen = self.intercepted
        by_hand = [m for m in seen.by_softmax if m not in self._seen and m in self.modules]
        ran = [m for m in self.modules.names if m in seen.elsewhere and not self._within(m)]
        strangers = {*self.modules.strangers, *by_hand} - {*self.modules.attending()}
        ran += [m for m in by_hand if m is not None and m not in ran]
        missed = [m for m in ran if m not in strangers or not self.record.calls]
        if missed:
            raise NothingSeenError(
                f"watch: {len(missed)} attention modules of {self.intercepted.name} ran, but their attention "
                f"was not seen: {self._some(missed)}. {_KNOWN}"
            )
        if ran:
            text = (
                f"watch: the record of {self.intercepted.name} is without {len(ran)} modules that compute "
                f"attention without a function that watch can intercept: {self._some(ran)}. {_KNOWN}"
            )
            warnings.warn(text, ExptiltWarning, stacklevel=3)
        if not self.record.calls:
            what = "was not called inside the watch, by the thread that opened it, or has no attention"
            what = "ran, but no attention of it was seen" if seen.ran else what
            raise NothingSeenError(f"watch: {self.intercepted.name} {what}. {_KNOWN}")
        if self.wanted.edit is not None and not self._changed:
            text = f"watch: edit changed no call of {self.intercepted.name}. Layers are numbered from 0."
            warnings.warn(text, ExptiltWarning, stacklevel=3)

    def _within(self, module: nn.Module) -> bool:
        """Whether attention was seen in a module, or in a part of it if the module is a stranger."""
        if module not in self.modules.strangers:
            return module in self._seen
        return any(self.modules.inside(part, module) for part in self._seen)

    def _some(self, modules: Sequence[nn.Module]) -> str:
        """Names and classes of the first three modules."""
        return ", ".join(f"{self.modules.name(m)!r} ({type(m).__name__})" for m in modules[:3])

    def _attend(self, r: Request) -> Tensor:
        """The output (batch, Hq, Q, Dv) of a request, which is recorded."""
        try:
            tilted = self._tilted(r, r.dropout)
        except ArgumentError as problem:
            name = self.modules.name(r.module)
            problem.add_note(f"(in attention of {self.intercepted.name}, module {name!r})")
            raise
        tilted = self.intercepted.edited(r, tilted)
        self._note(r, tilted)
        return tilted.output

    def _edited(self, r: Request, tilted: AttentionResult) -> AttentionResult:
        """The result of a call with the output that `edit` puts in its place."""
        if self.wanted.edit is None or (r.module is not None and r.module not in self.modules):
            return tilted
        if in_backward():
            raise ArgumentError(
                f"watch: {self.modules.name(r.module)!r} runs again in the backward pass, where it cannot be "
                "edited the same way. Call model.gradient_checkpointing_disable()."
            )
        layer = self.modules.number(r.module, self.intercepted.turns(r.module, r.kind))
        place = (layer, self.modules.name(r.module), r.module, r.kind, self._steps.get(layer, 0))
        real = (r.visible.real_query, r.visible.real_key)
        seen = AttentionCall(*place, r.query, r.key, r.value, dict(r.options), *real, tilted)
        found = self.wanted.edit(seen)
        if found is None:
            return tilted
        self._changed = True
        if not isinstance(found, Tensor) or found.shape != tilted.output.shape:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ArgumentError(
                f"watch: edit gave {got} for layer {layer}, whose output has shape "
                f"{tuple(tilted.output.shape)}. Return a tensor of that shape, or None for no change."
            )
        return replace(tilted, output=found.to(tilted.output.dtype))

    def _look_at(self, r: Request) -> None:
        """Record a call whose output torch computes."""
        if self.wanted.edit is not None:
            raise ArgumentError(
                f"watch: the output of {self.modules.name(r.module)!r} cannot be edited: torch computes it, "
                "since its weights are asked for (need_weights=False), dropped out (model.eval()) or "
                "written out."
            )
        with torch.no_grad():
            self._note(r, self._tilted(r))

    def _tilted(self, r: Request, dropout: float = 0.0) -> AttentionResult:
        return attend(r.query, r.key, r.value, **r.options, check=self.wanted.check, dropout=dropout)

    def _note(self, r: Request, tilted: AttentionResult) -> None:
        """Add a finished call to the record, and pass it to `observe`."""
        if in_backward():
            return  # a checkpointed layer runs again inside backward: already recorded
        if self.intercepted.outer is not None:
            self.intercepted.outer.note(r, tilted)
        if r.module is not None and r.module not in self.modules:
            return  # a module of another model that shares its configuration, or belongs to the outer watch
        wanted, visible = self.wanted, r.visible
        if r.kind == "self":
            self.intercepted.real_query = visible.real_query
        kept = tilted.output.requires_grad or tilted.log_normalizer.requires_grad
        still: AttentionResult = pytree.tree_map(Tensor.detach, tilted) if kept else tilted
        with torch.no_grad():
            mass = key_mass(r.query, r.key, r.options, visible, wanted.check) if wanted.key_mass else None
            lines, tokens = statistic_lines(still), None
            products = first_products(r.query, r.key, visible.first)
            if wanted.per_token:
                every = with_mass(rows(lines, products, r.options, visible))
                tokens = dict(zip(PER_QUERY, every, strict=True))
        turn = self.intercepted.turn(r.module, r.kind)
        layer, name = self.modules.number(r.module, turn), self.modules.name(r.module)
        step = self._steps.get(layer, 0)
        self._steps[layer] = step + 1
        self._seen.add(r.module)
        made = (r.query.shape[-1], r.options.get("softcap"), r.options.get("bias") is not None)
        about = (tokens, visible.real_query, mass, *made)
        self.record.add(Waiting((layer, name, r.kind, step), about, lines, products, r.options, visible))
        if wanted.observe is not None:
            shown = replace(tilted if wanted.keep_graph else still, key_mass=mass)
            real = (visible.real_query, visible.real_key)
            seen = (r.query, r.key, r.value, dict(r.options), *real, shown)
            wanted.observe(AttentionCall(layer, name, r.module, r.kind, step, *seen))


@never_compiled
def watch(
    model: nn.Module,
    *,
    per_token: bool = False,
    key_mass: bool = False,
    observe: Callable[[AttentionCall], object] | None = None,
    keep_graph: bool = False,
    check: bool | None = None,
    softmax: bool = False,
    edit: Callable[[AttentionCall], Tensor | None] | None = None,
) -> Watch:
    """Watch a model's attention while it runs; outputs stay the same up to rounding, and memory is O(n).

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
        softmax: also take attention from a softmax over a matrix of scores, for models that write it out.
            This is the slow way: the model has made all n×n scores, and they are read once more.
        edit: called with an `AttentionCall`; the output ``(batch, heads, query, dim)`` that it returns takes
            the place of the call's own, None leaves it. Ready-made ones are in `lens.edits`.

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
    return Watch(model, Wanted(per_token, key_mass, observe, keep_graph, check, softmax, edit))
