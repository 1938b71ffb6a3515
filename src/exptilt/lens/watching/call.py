"""One attention call: the request of the model, and the finished call that observers get.

Tensors are those that scores are computed from: queries and keys after rotary embeddings and per-head norms,
grouped key heads not yet repeated. So

    attend(call.query, call.key, call.value, **call.options)

gives `call.tilted` again, and whatever theory says of G, ∇G or the keys can be tested on these tensors
without knowing the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt.lens.heads.scores import Scores
from exptilt.lens.heads.visibility import Visibility
from exptilt.lens.watching.masks import Readings
from exptilt.lens.watching.modules import Modules
from exptilt.tilting import AttentionResult


@dataclass(frozen=True)
class AttentionCall:
    """One call of one attention layer: its inputs, its output and its statistics.

    Attributes:
        layer: index among the attention modules of the model, in the order of its definition, from 0.
        name: dotted name of the attention module inside the model.
        module: that module; None for a call of `scaled_dot_product_attention` outside any module.
        kind: "self" or "cross".
        step: how often this layer was called before in this watch; decoding with a cache calls it once a
            token.
        query: ``(batch, Hq, Q, D)``.
        key: ``(batch, Hkv, K, D)``; Hkv divides Hq. Unfilled room in a static cache is left out.
        value: ``(batch, Hkv, K, Dv)``.
        options: keyword arguments of `attend`: scale, causal, window, softcap, bias, mask, sink if they
            apply.
        real_query: ``(batch, Q)`` booleans, False at padding; None if nothing is padded.
        real_key: ``(batch, K)`` booleans likewise.
        tilted: output, after dropout if there is any, and statistics of all weights; key mass if the watch
            was asked for it. Detached unless the watch keeps the graph.
    """

    layer: int
    name: str
    module: nn.Module | None
    kind: str
    step: int
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    real_query: Tensor | None
    real_key: Tensor | None
    tilted: AttentionResult

    def pattern(self, head: int, item: int = 0) -> Tensor:
        """Attention of one head over one text, ``(query, key)``, in the precision of its statistics.

        Args:
            head: index in the layer.
            item: index of the text in the batch.
        """
        heads = self.query.shape[1]
        if not 0 <= head < heads:
            raise ArgumentError(f"pattern: head is {head}, and layer {self.layer} has {heads} heads, from 0.")
        own = slice(head, head + 1)
        shared = head * self.key.shape[1] // heads
        options = {
            name: x[:, own] if name in ("bias", "mask") and x.dim() == 4 and x.shape[1] == heads else x
            for name, x in self.options.items()
        }
        if options.get("sink") is not None:
            options["sink"] = options["sink"][own]
        scores = Scores.of(self.query[:, own], self.key[:, shared : shared + 1], options, item)
        G = self.tilted.log_normalizer.detach()[item, own]
        return torch.cat([p[0] for _, p in scores.weights(G)])

    def top(self, query: int, head: int, k: int = 5, item: int = 0) -> list[tuple[int, float]]:
        """The k keys that a query of one head looks at most, each with its share, the largest first.

        Args:
            query: place of the query.
            head: index in the layer.
            k: how many keys.
            item: index of the text in the batch.
        """
        row = self.pattern(head, item)[query]
        share, place = row.topk(min(k, len(row)))
        return list(zip(place.tolist(), share.tolist(), strict=True))


@dataclass
class Request:
    """One attention call as a model asks for it, filled in by a hook; fields as in `AttentionCall`."""

    module: nn.Module | None
    kind: str
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    dropout: float = 0.0  # probability with which a weight is dropped from the output, not from statistics
    quiet: bool = False  # whether `visible` is not needed and left unset
    visible: Visibility = field(init=False)

    @property
    def lengths(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self.query.shape[2], self.key.shape[2]

    def cast(self, dtype: torch.dtype) -> None:
        """Cast query, key and value as autocast does for `scaled_dot_product_attention`."""
        wanted = {torch.float64: torch.float64}.get(self.query.dtype, dtype)
        self.query, self.key, self.value = (x.to(wanted) for x in (self.query, self.key, self.value))

    def keep_keys(self, length: int) -> None:
        """Keep only the first `length` keys and values."""
        self.key, self.value = self.key[:, :, :length], self.value[:, :, :length]

    def see_from_the_start(self) -> None:
        """Let query i see keys 0..i, as torch's ``is_causal`` has it."""
        Q, K = self.lengths
        if Q <= K:
            self.keep_keys(Q)
            self.options["causal"] = True
        else:
            triangle = torch.ones(Q, K, dtype=torch.bool, device=self.query.device).tril()
            self.options["mask"] = triangle[None, None]

    def look(self, real_query: Tensor | None = None, real_key: Tensor | None = None) -> None:
        """Set `visible`, given the real queries ``(batch, Q)`` and keys ``(batch, K)``; None for all."""
        if not self.quiet:
            self.visible = Visibility.of(self.query, self.key, self.options, real_query, real_key)


OPEN: list["Intercepted"] = []
"""All models that are taken over now, in any thread; the latest is last."""


@dataclass(eq=False)
class Intercepted:
    """A model whose attention is taken over: the state of its hooks, and the functions that get its calls."""

    model: nn.Module
    attend: Callable[[Request], Tensor]  # gives the output, (batch, Hq, Q, Dv)
    look_at: Callable[[Request], None]  # for a call whose output torch computes
    note: Callable[[Request, AttentionResult], None]  # for a finished call of a model inside this one
    outer: "Intercepted | None" = None  # the model that was intercepted around this one
    elsewhere: dict[nn.Module, int] = field(default_factory=dict)  # by module that ran, see `looks_elsewhere`
    real_query: Tensor | None = None  # of the last self-attention
    quiet: bool = False  # whether only outputs are wanted: nothing is recorded
    softmax: bool = False  # whether attention is also taken from a softmax over scores
    by_softmax: dict[nn.Module | None, None] = field(default_factory=dict)  # modules that attend by softmax
    shapes: dict[nn.Module | None, torch.Size] = field(default_factory=dict)  # of what modules were given
    before_attention: Callable[[], object] = lambda: None  # called before attention is computed
    edit: Callable[[Request, AttentionResult], AttentionResult] | None = None  # changes finished calls
    plain: dict[tuple[Any, ...], Visibility] = field(default_factory=dict)  # of calls without a mask
    thread: int = 0  # in which the model is taken over; calls from others are not its own

    def __post_init__(self) -> None:
        self.name, self.modules, self.masks = type(self.model).__name__, Modules(self.model), Readings()
        self.busy = False  # at work on an attention call
        self.ran = False  # whether the model was called at all
        self.attended = False  # whether any of its attention was seen, here or by an interception inside
        self._turns: dict[tuple[nn.Module | None, str], int] = {}

    @property
    def here(self) -> bool:
        """Whether the current thread is the one in which the model is taken over."""
        return self.thread == get_ident()

    def work_out(self, request: Request) -> Tensor:
        """The output of a call, ``(batch, Hq, Q, Dv)``."""
        self.mark_attended()
        self.before_attention()
        self.busy = True
        try:
            return self.attend(request)
        finally:
            self.busy = False

    def edited(self, request: Request, tilted: AttentionResult) -> AttentionResult:
        """A finished call with the edits of all interceptions around it, the outermost first."""
        tilted = tilted if self.outer is None else self.outer.edited(request, tilted)
        return tilted if self.edit is None else self.edit(request, tilted)

    def mark_attended(self) -> None:
        """Note that attention was seen, for the interceptions around this one too."""
        self.attended = True
        if self.outer is not None:
            self.outer.mark_attended()

    def keep_shape(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        """Remember the shape of the first tensor that a module is given; a softmax may be asked its batch."""
        given = next((x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor)), None)
        if self.softmax and given is not None:
            self.shapes[module] = given.shape

    def enter(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        """Hook before a forward pass of the model or one inside it: its modules' turns start again at 0."""
        if not self.here:
            return
        self.ran = True
        self.keep_shape(module, arguments, keywords)
        for key in [key for key in self._turns if self.modules.inside(key[0], module)]:
            del self._turns[key]

    def turn(self, module: nn.Module | None, kind: str) -> int:
        """How often a module has attended before in this forward pass: shared layers attend several times."""
        if not self.ran:
            return 0  # a part of the model was called by itself
        turn = self._turns.get((module, kind), 0)
        self._turns[module, kind] = turn + 1
        return turn

    def turns(self, module: nn.Module | None, kind: str) -> int:
        """The number that `turn` will give next."""
        return self._turns.get((module, kind), 0) if self.ran else 0

    def knows(self, module: nn.Module) -> bool:
        """Whether a module belongs to this model, or to one intercepted around it."""
        return module in self.modules or (self.outer is not None and self.outer.knows(module))

    def kind(self, module: nn.Module | None) -> str:
        """Whether the current call of a module is "self" or "cross" attention."""
        return "cross" if module is not None and self.elsewhere.get(module, 0) else "self"

    def is_causal(self, module: nn.Module, asked: bool | None) -> bool:
        """Whether self-attention without a mask is causal: as asked, or as the module says."""
        return bool(getattr(module, "is_causal", True) if asked is None else asked)

    def look(self, request: Request) -> None:
        """Set `visible` of a request without a mask; what all see alike is counted once."""
        own, options = self.own_queries(request), request.options
        if request.quiet or own is not None or options.get("mask") is not None:
            request.look(own)
            return
        place = (*request.lengths, options.get("causal"), options.get("window"), request.query.device)
        if place not in self.plain:
            request.look()
            self.plain[place] = request.visible
        request.visible = self.plain[place]

    def own_queries(self, request: Request) -> Tensor | None:
        """Real queries of cross-attention: those of the last self-attention if it had as many, else None."""
        real, shape = self.real_query, (request.query.shape[0], request.query.shape[2])
        return real if request.kind == "cross" and real is not None and real.shape == shape else None
