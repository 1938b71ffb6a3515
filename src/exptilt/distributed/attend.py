r"""`attend` for keys on several processes: the same numbers as one process would get from all keys.

    G = log Σ_r e^{G_r},    o = Σ_r e^{G_r − G} o_r,    …                       (``tilting/result.py``)

The results over parts of the keys join exactly, so nothing is approximated. ``parts.py`` says what the
processes exchange.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from exptilt._support.checks import choice
from exptilt._support.errors import ArgumentError, BackendError
from exptilt._support.transforms import full_precision, is_concrete
from exptilt.distributed.group import Group, GroupError, Members, agree
from exptilt.distributed.order import ORDERS
from exptilt.distributed.parts import replicated, sharded
from exptilt.tilting.arguments import Call, explain_keywords, prepare
from exptilt.tilting.result import AttentionResult

QUERIES = ("replicated", "sharded")
_Three = tuple[Tensor, Tensor, Tensor]  # query, key and value


@explain_keywords
def attend(
    query: Tensor,
    key_shard: Tensor,
    value_shard: Tensor,
    *,
    group: Group = None,
    queries: str = "replicated",
    order: str = "contiguous",
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    key_mass: bool = False,
    backend: str | None = None,
    check: bool = True,
) -> AttentionResult:
    r"""Exact attention over keys that lie on several processes, with all statistics of `exptilt.attend`.

    Every process of the group makes the same call with its own keys. Two layouts:

    ``queries="replicated"``: all processes pass the same queries and get the same results. If each then
    computes the same loss, gradients are those of one process with all keys: each process gets the gradient
    by its own keys, and all get the whole gradient by query and sink. What travels does not depend on the
    number of keys: every process gets the results of all.

    ``queries="sharded"``: each process passes its own queries and gets their results. The objective is the
    sum of the processes' losses. Each process gets its gradient by the process's own query and key; of the
    gradient by a tensor that all processes have, such as sink, it gets a part, and the parts are to be added
    up as data-parallel training does. Each process gathers the keys and values of all, and holds them
    until its backward pass; checkpoint the layers where that is too much.

    All derivatives are exact; all processes must ask for the same ones.

    Args:
        query: ``(..., Hq, Q, D)``; if sharded, this process's queries, whose number may differ.
        key_shard: ``(..., Hkv, K, D)``, this process's keys; K may differ from process to process.
        value_shard: ``(..., Hkv, K, Dv)``.
        group: the processes, as ``torch.distributed.new_group`` returns them; None for all.
        queries: "replicated" or "sharded".
        order: how sharded queries and keys lie in the sequence, which matters for causal and window:
            "contiguous", or "zigzag", which makes causal attention the same work for all (see `shard`).
        scale: factor of ⟨q,k⟩; 1/sqrt(D) if None.
        log_weight: ``(..., Hkv, K)``, of this process's keys; −inf hides a key.
        bias: broadcasts to ``(..., Hq, Q, K)``, for this process's keys; for replicated queries.
        mask: booleans that broadcast to ``(..., Hq, Q, K)``, for this process's keys; for replicated queries.
        causal: query i sees key j where j <= i + (all keys) − Q for replicated queries; a sharded query sees
            the keys that stand no later in the sequence.
        window: as in `exptilt.attend`, in positions of the whole sequence. A window's edge costs a mask.
        softcap: c > 0, for scores c·tanh(s/c).
        sink: ``(..., Hq)``, the score of one more outcome, the same on every process; it counts once.
        key_mass: also return the attention that this process's keys receive from all queries.
        backend: for the sweeps over one process's keys: ``tiled``, ``cpu`` or ``gpu``; None chooses.
        check: first compare the arguments of the processes, 24 bytes each, and raise on all of them if they
            differ or if a result is NaN. False skips this, and assumes that all have equally many keys.

    Returns:
        `AttentionResult`: output ``(..., Hq, Q, Dv)``, statistics ``(..., Hq, Q)``, key_mass ``(..., Hq, K)``
        of this process's keys, or None.
    """
    work = _Work(Members("attend", group), queries, order, key_mass, check)
    options: dict[str, Any] = {"scale": scale, "log_weight": log_weight, "bias": bias, "mask": mask}
    options |= {"softcap": softcap, "sink": sink, "backend": backend}
    return work.attend((query, key_shard, value_shard), causal, window, options)


def attend_agreed(
    query: Tensor,
    key_shard: Tensor,
    value_shard: Tensor,
    members: Members,
    sizes: tuple[int, ...],
    *,
    queries: str = "replicated",
    **options: Any,
) -> AttentionResult:
    """`attend` without its own agreement, for callers whose processes have agreed on all arguments.

    `sizes` is how many keys each process has; options are scale, log_weight and softcap.
    """
    work = _Work(members, queries, "contiguous", False, True, sizes)
    every = dict.fromkeys(("scale", "log_weight", "bias", "mask", "softcap", "sink", "backend"))
    return work.attend((query, key_shard, value_shard), False, None, every | options)


@dataclass(frozen=True)
class _Work:
    """How the processes share a call.

    The fields are those of `attend`. `sizes` is the number of keys of each process, if already agreed upon.
    """

    members: Members
    queries: str
    order: str
    key_mass: bool
    check: bool
    sizes: tuple[int, ...] | None = None

    def attend(
        self, tensors: _Three, causal: bool, window: int | None, options: dict[str, Any]
    ) -> AttentionResult:
        """The result of the call; if this process refuses its arguments, every process raises."""
        try:
            call = self.prepared(tensors, causal, window, options)
        except (ArgumentError, BackendError) as problem:
            if self.check and self.sizes is None:
                agree(self.members, "attend", {}, problem=problem)
            raise
        sizes = self.agreed(call)
        with full_precision(call.inputs.query.device):  # inputs have been cast as autocast would
            return self.run(call, sizes)

    def prepared(self, tensors: _Three, causal: bool, window: int | None, options: dict[str, Any]) -> Call:
        """The checked call for this process's keys; its score rule refers to all keys."""
        choice("attend", "queries", self.queries, QUERIES)
        choice("attend", "order", self.order, ORDERS)
        if options["backend"] == "reference":
            raise ArgumentError(
                "attend: backend is 'reference', which holds all keys. Pass tiled, cpu, gpu or None."
            )
        call = prepare("attend", *tensors, **options, window=window, autocast=True)
        Q, K = (x.shape[-2] for x in tensors[:2])
        if self.queries == "sharded":
            for label in ("bias", "mask"):
                if options[label] is not None:
                    hint = "Pass log_weight, −inf for keys to hide, which goes around with the keys."
                    raise ArgumentError(
                        f"attend: {label} with sharded queries would have a column for every key. {hint}"
                    )
            if (causal or window is not None) and Q != K:
                raise ArgumentError(
                    f"attend: this process has {Q} queries and {K} keys. With causal or window, the queries "
                    "and keys of a process are the same part of the sequence."
                )
        elif self.order != "contiguous":
            raise ArgumentError(
                f"attend: order is {self.order!r}, but queries are replicated. "
                "Pass queries='sharded' with it."
            )
        if self.order == "zigzag" and K % 2:
            raise ArgumentError(
                f"attend: this process has {K} keys, and order 'zigzag' has two equal parts. Use shard."
            )
        rule = replace(call.settings.rule, causal=bool(causal), window=window)
        return replace(call, settings=replace(call.settings, rule=rule))

    def agreed(self, call: Call) -> tuple[int, ...]:
        """Number of keys of each process; raises on every process unless all agree."""
        t = call.inputs
        if self.sizes is not None:
            return self.sizes
        if not self.check:
            return (t.key.shape[-2],) * self.members.count
        keys = {"key": (t.key, -2), "value": (t.value, -2), "log_weight": (t.log_weight, -1)}
        facts: dict[str, Any] = {
            f"the shape of {name} but for its keys": _without(x, axis) for name, (x, axis) in keys.items()
        }
        tracked, spread = (t.query, *(x for x, _ in keys.values())), self.queries == "sharded"
        facts |= {
            "the shape of query": _without(t.query, -2) if spread else tuple(t.query.shape),
            "the shape of sink": None if t.sink is None else tuple(t.sink.shape),
            "the dtype": call.dtype,
            "the device": t.query.device.type,
            "scale, causal, window, softcap": call.settings.rule.numbers,
            "queries, order, key_mass": (self.queries, self.order, self.key_mass),
            "whether derivatives are wanted": call.tracked,
            "whether query, key, value, log_weight need gradients": tuple(
                x is not None and is_concrete(x) and x.requires_grad for x in tracked
            ),
        }
        sizes = agree(self.members, "attend", facts, count=t.key.shape[-2])
        if self.order == "zigzag" and len(set(sizes)) > 1:
            raise GroupError(
                f"attend: the ranks have {sizes} keys, and order 'zigzag' has equal parts. Use shard."
            )
        return sizes

    def run(self, call: Call, sizes: tuple[int, ...]) -> AttentionResult:
        """The result, given how many keys each process has."""
        more = self.key_mass, self.check
        if self.queries == "replicated":
            return replicated(call, self.members, sizes, *more)
        return sharded(call, self.members, sizes, self.order, *more)


def _without(x: Tensor | None, axis: int) -> tuple[int, ...] | None:
    """The shape of a tensor without one of its axes."""
    return None if x is None else (*x.shape[:axis], *x.shape[x.dim() + axis + 1 :])
