r"""Attention under a forward Laplacian: a few rows of queries at a time.

With scores s, weights p, values v, and a prime for what is centred under p, the output o = E[v] moves as

    ∂_d o = E[∂_d v] + E[v s'_d],      Δo = E[Δv] + 2 Σ_d E[∂_d v s'_d] + E[(v − o)(Δs + Σ_d s'_d²)],

covariances and a third cumulant of scores and values. Here they come from the rules of the score, the softmax
and the product with the values in turn. Rows of queries go one block after another, as many as a head has
dimensions: the scores of a block and their derivatives take no more than the keys and theirs, so memory grows
as the length, for each direction.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import pytree
from exptilt.taylor.jets import OWN, SPECIAL, NoRuleError
from exptilt.tilting import AttentionResult
from exptilt.tilting.arguments import prepare
from exptilt.tilting.backends import reference
from exptilt.tilting.problem import Inputs, per_query_head
from exptilt.tilting.score_rule import ScoreRule, columns

_STATISTICS = "log_normalizer", "entropy", "score_mean", "score_variance", "score_max"


def _blocks(t: Inputs, rule: ScoreRule) -> Iterator[tuple[Inputs, ScoreRule]]:
    """The problem of a few queries at a time; causality and window become part of its mask."""
    length_q, length_k = t.query.shape[-2], t.key.shape[-2]
    step = max(16, t.query.shape[-1])
    plain = ScoreRule(rule.scale, softcap=rule.softcap)
    for start in range(0, max(length_q, 1), step):
        rows = slice(start, min(start + step, length_q))
        seen = rule.visible(length_q, length_k, 0, length_k, t.query.device, rows)
        mask = None if t.mask is None else columns(t.mask, 0, length_k, rows)
        if seen is not None:
            mask = seen[(None,) * (t.query.dim() - 2)] if mask is None else mask & seen
        bias = None if t.bias is None else columns(t.bias, 0, length_k, rows)
        yield t._replace(query=t.query[..., rows, :], bias=bias, mask=mask), plain


def _output(t: Inputs, rule: ScoreRule) -> Tensor:
    """The output, as ``backends/reference.py`` finds it."""
    s = reference.scores(t, rule)
    keys = s.shape[-1]
    if t.sink is not None:
        s = torch.cat([s, t.sink[..., None, None].expand(*s.shape[:-1], 1)], -1)
    if any(x is not None for x in (t.mask, t.bias, t.log_weight)):  # else every query sees a key
        dead = (s == -torch.inf).all(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    else:
        p = torch.softmax(s, -1)
    return p[..., :keys] @ per_query_head(t.value.to(s.dtype), s.shape[-3], -3)


class _Result(AttentionResult):
    """A result whose statistics are found when one of them is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "parts":
            return None
        if name not in _STATISTICS:
            raise AttributeError(f"AttentionResult has no attribute {name!r}")
        t, rule = self.__dict__["_problem"]
        found = [reference.attend(*block)[1:6] for block in _blocks(t, rule)]
        self.__dict__.update(
            zip(_STATISTICS, (torch.cat(x, -1) for x in zip(*found, strict=True)), strict=True)
        )
        return self.__dict__[name]


def _flatten(x: _Result) -> tuple[list[Any], list[str]]:
    there = ["output", *_STATISTICS, *(["key_mass"] if x.key_mass is not None else [])]
    return [getattr(x, name) for name in there], there


pytree.register_pytree_node(
    _Result, _flatten, lambda values, names: AttentionResult(**dict(zip(names, values, strict=True)))
)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mass: bool = False,
    dropout: float = 0.0,
    seed: Any = None,
    top: int | None = None,
    segments: Tensor | None = None,
    **options: Any,
) -> AttentionResult:
    if dropout or top is not None or segments is not None:
        raise NoRuleError(
            "laplacian: there is no rule for attend with dropout, top or segments. Leave them out."
        )
    call = prepare("attend", query, key, value, **options, autocast=True)
    t, rule = call.inputs, call.settings.rule
    output = torch.cat([_output(*block) for block in _blocks(t, rule)], -2)
    result = object.__new__(_Result)
    result.__dict__.update(output=output.to(call.dtype), _problem=(t, rule))
    if key_mass:
        masses = [reference.attend(*block)[6] for block in _blocks(t, rule)]
        result.__dict__["key_mass"] = torch.stack(masses).sum(0)
    return result


def _log_normalizer(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    flat = query.dim() == 2 and key.dim() == 2
    query, key = (query[None], key[None]) if flat else (query, key)
    G = _attend(query, key, key[..., :1], **options).log_normalizer
    return G[0] if flat else G


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's own attention: its mask may be numbers to add, and its causality aligns the beginnings."""
    if dropout_p:
        raise NoRuleError(
            "laplacian: there is no rule for attention with dropout. Call .eval() on the model first."
        )
    options: dict[str, Any] = {"scale": scale}
    if is_causal:
        ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        options["mask"] = ones.tril()
    if attn_mask is not None:
        options["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    flat = query.dim() == 2
    query, key, value = (x[None] if flat else x for x in (query, key, value))
    found = _attend(query, key, value, **options).output
    return found[0] if flat else found


OWN.update(attend=_attend, log_normalizer=_log_normalizer)
SPECIAL["scaled_dot_product_attention"] = _scaled_dot_product_attention
