r"""The two ways in which processes share the keys of a call.

**Common queries.** Every process sweeps its own keys for all queries; the results of all are exchanged, Dv +
8 numbers a query and process, and each process merges them (``tilting/result.py``).

**Sharded queries.** Keys and values are gathered, and every process sweeps all of them for its own queries. A
process then holds all keys of one call, but only its own queries, results and gradients; with causality a
process sweeps the keys up to its own place alone. In order "zigzag" process r of P has the parts r and 2P − 1
− r of 2P, so that all have the same work.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.distributed.collectives import every, home, share, stack
from exptilt.distributed.group import GroupError, Members, agree
from exptilt.distributed.order import positions
from exptilt.tilting.arguments import Call
from exptilt.tilting.attend import run
from exptilt.tilting.derivatives import key_mass as masses
from exptilt.tilting.derivatives.identities import Statistics
from exptilt.tilting.derivatives.rules import gradient
from exptilt.tilting.problem import Inputs, wide_dtype
from exptilt.tilting.result import AttentionResult, by_tensor, merge, share_of
from exptilt.tilting.score_rule import ScoreRule, columns

_ROWS = "log_normalizer", "entropy", "score_mean", "score_variance", "score_max"
_LOG_WEIGHT = (False, False, False, False, True, False)


def _cut(call: Call, rows: slice, keys: slice, rule: ScoreRule, seen: Tensor | None = None) -> Call:
    """The call for some rows and keys, which see each other by `rule` and the booleans `seen`; no sink."""
    t = call.inputs

    def plane(x: Tensor | None) -> Any:
        return None if x is None else columns(x, keys.start, keys.stop, rows)

    mask = plane(t.mask)
    if seen is not None:
        own = seen[(None,) * (t.query.dim() - 2)]
        mask = own if mask is None else own & mask
    part = t._replace(
        query=t.query[..., rows, :],
        key=t.key[..., keys, :],
        value=t.value[..., keys, :],
        bias=plane(t.bias),
        log_weight=None if t.log_weight is None else t.log_weight[..., keys],
        sink=None,
        mask=mask,
    )
    quiet = replace(call.settings, rule=rule, check=False)
    return replace(call, inputs=part, settings=quiet, layout=None)


def replicated(
    call: Call, members: Members, sizes: tuple[int, ...], key_mass: bool, check: bool
) -> AttentionResult:
    """The common result of common queries over the keys of all processes; key_mass is of the keys here.

    The rule of the call refers to all keys, `sizes` of them on each process, in the order of the ranks.
    """
    t, rule, dtype = call.inputs, call.settings.rule, call.dtype
    t = t._replace(query=share(t.query, members))
    if _one_bias(t, members, sizes) and t.bias is not None:
        t = t._replace(bias=share(t.bias, members))
    call = replace(call, inputs=t, dtype=wide_dtype(dtype))
    start, Q, K = sum(sizes[: members.rank]), t.query.shape[-2], t.key.shape[-2]
    first = sum(sizes) - Q  # the key at which query 0 stands
    plain, all_rows, all_keys = ScoreRule(rule.scale, softcap=rule.softcap), slice(0, Q), slice(0, K)
    if rule.window is not None:
        own = torch.arange(Q, device=t.query.device) + first
        seen = rule.sees(own[:, None], torch.arange(start, start + K, device=own.device)[None, :])
        parts = [_cut(call, all_rows, all_keys, plain, seen)]
    elif rule.causal:
        # Rows before `none` see no own key and rows from `some` on see all of them; the rows between end with
        # the last own key, as the causal rule expects.
        none, some = (min(max(x, 0), Q) for x in (start - first, start + K - first))
        cuts = [(0, none, slice(0, 0), plain), (none, some, all_keys, replace(plain, causal=True))]
        cuts.append((some, Q, all_keys, plain))
        cuts = [x for x in cuts if x[1] > x[0]] or cuts[:1]
        parts = [_cut(call, slice(a, b), keys, own_rule) for a, b, keys, own_rule in cuts]
    else:
        parts = [_cut(call, all_rows, all_keys, plain)]
    found = [run(part) for part in parts]
    local = by_tensor(torch.cat, *found)
    look = check and is_concrete(*(x for x in t if x is not None))
    joined = join(local, members, t.query if look else None, t.sink)
    joined = replace(joined, output=joined.output.to(dtype))
    if not key_mass:
        return joined
    whole = replace(joined, log_normalizer=share(joined.log_normalizer, members))
    weight = share_of(local, whole)
    mass, row = weight.new_zeros(*weight.shape[:-1], K), 0
    for part, tilted in zip(parts, found, strict=True):
        rows = slice(row, row := row + part.inputs.query.shape[-2])
        if part.inputs.key.shape[-2]:  # rows that see no own key add no mass
            mass = mass + _mass(part, tilted, weight[..., rows])
    return replace(joined, key_mass=mass)


def _one_bias(t: Inputs, members: Members, sizes: tuple[int, ...]) -> bool:
    """Whether the bias is the same for all keys, and so for all processes.

    That of a process with one key may also be its own column: the others' then says.
    """
    one = t.bias is not None and t.bias.shape[-1] == 1
    if 1 not in sizes or len(set(sizes)) == 1:
        return one and sizes[members.rank] != 1
    all_of = members.collect(torch.tensor([int(one)], device=members.device), "attend")
    return bool(torch.cat(all_of).all())


def join(
    local: AttentionResult, members: Members, query: Tensor | None = None, sink: Tensor | None = None
) -> AttentionResult:
    """The common result over the keys of all processes, from each process's result over its own keys.

    If the queries are given, every process raises where a log-normalizer is NaN or a query is not finite. A
    sink (..., Hq) is one more outcome with value 0.
    """
    assert local.parts is not None
    own_G = local.log_normalizer
    if query is not None:
        own_G = torch.where(torch.isfinite(query).all(-1), own_G, torch.nan)
    rows = torch.stack([own_G, *(getattr(local, name) for name in _ROWS[1:]), *local.parts], -1)
    width = local.output.shape[-1]
    parts = []
    for rank, x in enumerate(stack(torch.cat([local.output, rows], -1), members).unbind()):
        output, lines = x[..., :width], x[..., width:].unbind(-1)
        if query is not None and bool(lines[0].isnan().any()):
            raise GroupError(
                f"attend: on rank {rank} a log-normalizer is NaN or a query is not finite: "
                "query, key, bias or log_weight holds NaN or an infinity there, or the scores overflow. "
                "xt.attend on that rank's own tensors says where; check=False skips this test."
            )
        shift, weight, gap = (line.detach() for line in lines[5:])
        G, entropy, mean, variance, maximum = lines[:5]
        of_keys = shift, weight, gap
        parts.append(AttentionResult(output, G, entropy, mean, variance, maximum, parts=of_keys))
    if sink is not None:
        s = sink.unsqueeze(-1).expand(own_G.shape)
        there, zero = s.detach() != -torch.inf, torch.zeros_like(s)
        mean, none = torch.where(there, s, 0.0), torch.full_like(s, -torch.inf)
        own = mean.detach(), there.to(s.dtype), zero
        parts.append(AttentionResult(torch.zeros_like(local.output), s, zero, mean, zero, none, parts=own))
    return merge(parts)


def _mass(part: Call, local: AttentionResult, weight: Tensor) -> Tensor:
    """(..., Hq, K): Σ_i w_i p_ij, the derivative of Σ_i w_i G_i by the keys' log-weights, for constant w."""
    assert local.parts is not None
    shift = torch.where(local.parts[0] == -torch.inf, 0.0, local.parts[0])
    known = shift, *local.parts[1:], local.score_variance.detach()
    inputs, bar, stats = masses.sum_of_G(masses.with_own_weights(part.inputs), *known)
    bar = bar._replace(log_normalizer=weight)
    found = gradient(inputs, bar, Statistics(*stats), part.settings, _LOG_WEIGHT).log_weight
    assert found is not None
    return found


def sharded(
    call: Call, members: Members, sizes: tuple[int, ...], order: str, key_mass: bool, check: bool
) -> AttentionResult:
    """The result of this process's own queries over the keys of all; key_mass is of the keys here."""
    t, rule = call.inputs, call.settings.rule
    weight = None if t.log_weight is None else t.log_weight.unsqueeze(-1)
    place = torch.cat([positions(sizes, rank, order, t.query.device) for rank in range(members.count)])
    keys = every(members, sizes, t.key, t.value, weight)
    if order != "contiguous":
        by_place = place.argsort()
        keys = [x if x is None else x.index_select(-2, by_place) for x in keys]
    key, value, weight = keys
    assert key is not None
    assert value is not None
    t = t._replace(key=key, value=value, log_weight=None if weight is None else weight[..., 0])
    call = replace(call, inputs=t)
    found, mass = [], None
    own = positions(sizes, members.rank, order)
    Q, L = t.query.shape[-2], sum(sizes)
    count = 2 if order == "zigzag" else 1
    for rows in (slice(i * Q // count, (i + 1) * Q // count) for i in range(count)):
        seen, low, high, here = None, 0, L, rule
        if (rule.causal or rule.window is not None) and Q:
            start, stop = int(own[rows.start]), int(own[rows.stop - 1]) + 1
            high = stop if rule.causal or rule.window is None else min(stop + rule.window, L)
            low = 0 if rule.window is None else max(start - rule.window, 0)
            if not rule.causal:
                at = torch.arange(low, high, device=t.query.device)
                seen, here = rule.sees(own[rows].to(at)[:, None], at[None, :]), replace(rule, window=None)
        part = _cut(call, rows, slice(low, high), here, seen)
        part = replace(part, inputs=part.inputs._replace(sink=t.sink))
        found.append(run(part, key_mass=key_mass))
        if key_mass:
            own_mass = found[-1].key_mass
            assert own_mass is not None
            piece = torch.nn.functional.pad(own_mass, (low, L - high))
            mass = piece if mass is None else mass + piece
            found[-1] = replace(found[-1], key_mass=None)
    result = by_tensor(torch.cat, *found)
    if mass is not None:
        mass = home(mass.index_select(-1, place).unsqueeze(-1), members, sizes)[..., 0]
        result = replace(result, key_mass=mass)
    if check and is_concrete(t.query, t.key):
        bad = bool(result.log_normalizer.isnan().any()) or not bool(torch.isfinite(t.query).all())
        error = ArgumentError(
            "attend: a log-normalizer is NaN or a query is not finite: query, key or log_weight of some "
            "rank holds NaN or an infinity, or the scores overflow. check=False skips this test."
        )
        agree(members, "attend", {}, problem=error if bad else None)
    return result
