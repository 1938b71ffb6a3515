r"""Every process has all queries and some of the keys: each sweeps its own, and three sums join the results.

Process k finds G_k, mean μ_k, variance V_k, entropy H_k and output o_k over its keys. ``tilting/result.py``
says how such results join; here its sums run over processes. With c_k = μ_k − top and z_k = e^{G_k − top},
where top is the largest score of all:

    1. maximum   top
    2. sum       Z = Σ z_k,   Σ z_k c_k,   Σ z_k o_k          which give G, μ, o and w_k = z_k / Z
    3. sum       V = Σ w_k (V_k + (c_k − c)²),   H = Σ w_k (H_k − log w_k)

That is 2 + (Dv + 3) + 3 numbers a query, and one more for every 60 processes after the first 60. The sums
are those of ``collectives.py``, which torch differentiates, so derivatives of all orders and both modes are
exact.
"""

from dataclasses import replace

import torch
from torch import Tensor

from exptilt._support.transforms import is_concrete
from exptilt.distributed.collectives import largest, share, total
from exptilt.distributed.group import GroupError, Members
from exptilt.distributed.pieces import Piece
from exptilt.tilting.arguments import Call
from exptilt.tilting.attend import run
from exptilt.tilting.derivatives import key_mass as masses
from exptilt.tilting.derivatives.identities import Statistics, apart_from
from exptilt.tilting.derivatives.rules import gradient
from exptilt.tilting.problem import Inputs, Settings, wide_dtype
from exptilt.tilting.result import AttentionResult, by_tensor, merge, valued
from exptilt.tilting.score_rule import ScoreRule

_SLOT = 60  # 4^−59 is a normal number of float32
_LOG_WEIGHT = (False, False, False, False, True, False)


def attend(
    call: Call, members: Members, sizes: tuple[int, ...], key_mass: bool, check: bool
) -> AttentionResult:
    """The common result of common queries over the keys of all processes; key_mass is of the keys here.

    The rule of the call refers to all keys, `sizes` of them on each process, in the order of the ranks.
    """
    t = call.inputs
    t = t._replace(query=share(t.query, members))
    if t.bias is not None and t.bias.shape[-1] == 1:  # the same for all keys, and so for all processes
        t = t._replace(bias=share(t.bias, members))
    wide = wide_dtype(call.dtype)
    quiet = replace(call.settings, check=False)
    found = []
    for piece in _pieces(t, call.settings.rule, sizes, members.rank):
        part = replace(call, inputs=piece.cut(t), settings=replace(quiet, rule=piece.rule), dtype=wide)
        found.append((part, run(part)))
    local = found[0][1] if len(found) == 1 else by_tensor(torch.cat, *(tilted for _, tilted in found))
    joined = join(local, members, check and is_concrete(*(x for x in t if x is not None)), t.query)
    joined = with_sink(joined, t.sink)
    mass = None
    if key_mass:
        weight = _share_of_part(local, joined, members)
        mass, row = weight.new_zeros(*weight.shape[:-1], t.key.shape[-2]), 0
        for part, tilted in found:
            rows = slice(row, row + part.inputs.query.shape[-2])
            row = rows.stop
            if part.inputs.key.shape[-2]:  # rows that see no own key add no mass
                mass = mass + _mass(part.inputs, tilted, weight[..., rows], part.settings)
    return replace(joined, output=joined.output.to(call.dtype), key_mass=mass)


def _pieces(t: Inputs, rule: ScoreRule, sizes: tuple[int, ...], rank: int) -> list[Piece]:
    """The own keys' part of the problem, as pieces of consecutive rows.

    Own keys stand at start, …, start + K − 1 of all, query i at i' = i + (all keys) − Q. By causality, rows
    before start see no own key and rows after the last own key see all of them; the rows between end with
    that key, as the causal rule of a piece expects.
    """
    start, Q, K = sum(sizes[:rank]), t.query.shape[-2], t.key.shape[-2]
    first = sum(sizes) - Q  # the key at which query 0 stands
    plain = ScoreRule(rule.scale, softcap=rule.softcap)
    if rule.window is not None:
        device = t.query.device
        own = torch.arange(Q, device=device) + first
        seen = rule.sees(own[:, None], torch.arange(start, start + K, device=device)[None, :])
        return [Piece(slice(None), slice(None), plain, seen)]
    if not rule.causal:
        return [Piece(slice(None), slice(None), plain)]
    none, some = (min(max(x, 0), Q) for x in (start - first, start + K - first))
    cuts = [(0, none, slice(0, 0), plain), (none, some, slice(0, K), replace(plain, causal=True))]
    cuts.append((some, Q, slice(0, K), plain))
    return [Piece(slice(a, b), keys, own) for a, b, keys, own in cuts if b > a or (Q == 0 and a == b == 0)]


def join(
    local: AttentionResult, members: Members, check: bool = False, query: Tensor | None = None
) -> AttentionResult:
    """The common result over the keys of all processes, from each process's result over its own keys.

    `check` raises, on every process, where a log-normalizer is NaN or the query is not finite.
    """
    assert local.parts is not None
    shift, weight, gap = local.parts
    some = weight != 0
    tops = torch.stack([torch.where(some, shift, -torch.inf), local.score_max.detach()])
    flag = local.log_normalizer.new_zeros(1)
    seen = local.log_normalizer if query is None else query
    if check and (bool(local.log_normalizer.isnan().any()) or not bool(torch.isfinite(seen).all())):
        flag, tops = flag + 1 + members.rank, torch.zeros_like(tops)
    tops = tops.detach()
    reduced = largest(torch.cat([tops.flatten(), flag]), members)
    if check and bool(reduced[-1] != 0):
        raise GroupError(
            f"attend: on rank {int(reduced[-1]) - 1} a log-normalizer is NaN or a query is not finite: "
            "query, key, bias or log_weight holds NaN or an infinity there, or the scores overflow. "
            "xt.attend on that rank's own tensors says where; check=False skips this test."
        )
    top, maximum = reduced[:-1].reshape(tops.shape).unbind()
    top = torch.where(top == -torch.inf, 0.0, top)
    apart, slip = apart_from(torch.where(some, shift, top), top)
    # Values come from the parts, derivatives from the rounded results.
    G = torch.where(some, local.log_normalizer, 0.0)
    z = torch.where(some, weight * torch.exp(apart) * (1 + slip), 0.0) * torch.exp(G - G.detach())
    some = z.detach() != 0
    log_z = torch.where(some, z, 1.0).log()
    c = torch.where(some, valued(apart + (gap + slip), local.score_mean), 0.0)
    highest = (local.score_max == maximum) & (maximum != -torch.inf)
    codes = _codes(highest, members, z.dtype)
    rows = torch.cat([torch.stack([z, z * c], -1), codes, z.unsqueeze(-1) * local.output], -1)
    sums = total(rows, members)
    Z, zc = sums[..., 0], sums[..., 1]
    ties, outputs = sums[..., 2:].split([codes.shape[-1], local.output.shape[-1]], -1)
    alive = Z != 0
    safe = torch.where(alive, Z, 1.0)
    log_Z, centre = safe.log(), zc / safe
    output = outputs / safe.unsqueeze(-1)
    w, own_log, own_centre = (share(x, members) for x in (safe, log_Z, centre))
    w, log_w = z / w, torch.where(some, log_z - own_log, 0.0)
    spread = torch.where(w != 0, c - own_centre, 0.0)
    top_share = torch.where(_first_of(codes, ties, members), local.score_max, 0.0)
    last = torch.stack([w * (local.score_variance + spread.square()), w * (local.entropy - log_w), top_share])
    variance, entropy, tie = total(last, members).unbind()
    return AttentionResult(
        output,
        torch.where(alive, top + log_Z, -torch.inf),
        entropy,
        torch.where(alive, top + centre, 0.0),
        variance,
        valued(maximum, tie) if members.count > 1 else local.score_max,
        parts=(top, Z.detach(), centre.detach()),
    )


def _codes(highest: Tensor, members: Members, dtype: torch.dtype) -> Tensor:
    """(..., slots): this process's power of 4 where one of its keys has the largest score of all, else 0.

    Keys on several processes may tie; then the first process counts. The sum of the codes over processes
    shows which: powers of later processes add up to less than a third of an earlier one's. 60 fit in a slot.
    """
    slot, place = divmod(members.rank, _SLOT)
    own = torch.where(highest, 4.0**-place, 0.0).to(dtype).unsqueeze(-1)
    return torch.where(torch.arange(-(-members.count // _SLOT), device=own.device) == slot, own, 0.0)


def _first_of(codes: Tensor, ties: Tensor, members: Members) -> Tensor:
    """(...): whether this is the first process with the largest score, from the codes and their sum."""
    slot = members.rank // _SLOT
    own = codes[..., slot]
    return (own != 0) & (ties[..., :slot] == 0).all(-1) & (ties[..., slot] < 2 * own)


def _share_of_part(local: AttentionResult, joined: AttentionResult, members: Members) -> Tensor:
    """(..., Hq, Q): e^{G_k − G}, the probability of this process's keys among all."""
    assert local.parts is not None
    assert joined.parts is not None
    (shift, weight, _), (top, Z, _) = local.parts, joined.parts
    some = weight != 0
    value = torch.where(some, shift - top + (weight / torch.where(some, Z, 1.0)).log(), 0.0)
    G, own = (
        torch.where(some, x, 0.0) for x in (share(joined.log_normalizer, members), local.log_normalizer)
    )
    return torch.where(some, torch.exp(valued(value, own - G)), 0.0)


def _mass(t: Inputs, local: AttentionResult, weight: Tensor, settings: Settings) -> Tensor:
    """(..., Hq, K): Σ_i w_i p_ij, the derivative of Σ_i w_i G_i by the keys' log-weights, for constant w."""
    assert local.parts is not None
    own = masses.with_own_weights(t)
    shift, _, _ = local.parts
    known = torch.where(shift == -torch.inf, 0.0, shift), *local.parts[1:], local.score_variance.detach()
    inputs, bar, stats = masses.sum_of_G(own, *known)
    found = gradient(
        inputs, bar._replace(log_normalizer=weight), Statistics(*stats), settings, _LOG_WEIGHT
    ).log_weight
    assert found is not None
    return found


def with_sink(x: AttentionResult, sink: Tensor | None) -> AttentionResult:
    """A result with one more outcome of score sink (..., Hq) and value 0; score_max is that of the keys."""
    if sink is None:
        return x
    s = sink.unsqueeze(-1).expand(x.log_normalizer.shape)
    there = s.detach() != -torch.inf
    shift, zero = torch.where(there, s.detach(), 0.0), torch.zeros_like(s)
    mean = torch.where(there, s, 0.0)
    none = torch.full_like(zero, -torch.inf)
    parts = shift, there.to(s.dtype), zero
    outcome = AttentionResult(torch.zeros_like(x.output), s, zero, mean, zero, none, parts=parts)
    return replace(merge([x, outcome]), score_max=x.score_max)
