r"""Attention on chosen keys, and the kinds of heads that it defines.

On one text, from p_ij = e^{s_ij − G_i} at one key for each query, so O(n):

    previous_mass    mean of p_{i,i−1}          next_mass        mean of p_{i,i+1}
    delimiter_mass   share of the attention that all keys draw that goes to delimiters after the first key
    first_token_share, near_share               medians over queries, see `heads.statistics`

On n random tokens, followed by the same n again in the same order:

    duplicate_mass   mean of p_{i,i−n}, on the first occurrence of the same token
    induction_mass   mean of p_{i,i−n+1}, on the token after that occurrence, which is the one to come next

Shares and evenness are measured on pieces of a text that are as long whatever the chunks of a study, so that
kinds do not depend on how texts were cut.

A kind is a threshold on one of these. A head is of the kind if it is beyond the threshold by two standard
errors (by the value alone where the error is not known), so a head may be of several kinds, or of none. Where
the share under uniform attention is known, a head must also be halfway from that share to 1: in a text of
commas every head looks at commas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exptilt.lens.heads.scores import Scores

Array = NDArray[np.float64]


class Rule(NamedTuple):
    """Rule that defines one kind of head: a measure, a threshold, and the side of it that counts."""

    measure: str
    threshold: float
    above: bool
    about: str


RULES = {
    "previous token": Rule("previous_mass", 0.5, True, "looks mostly at the token before"),
    "next token": Rule("next_mass", 0.5, True, "looks mostly at the token after"),
    "first token": Rule("first_token_share", 0.5, True, "looks more at the first token than at 32 near ones"),
    "delimiter": Rule("delimiter_mass", 0.5, True, "looks mostly at blanks, line ends and punctuation"),
    "local": Rule("near_share", 0.5, True, "looks more at the 4 tokens on either side than at the next 12"),
    "duplicate": Rule("duplicate_mass", 0.3, True, "looks from a repeated token at where it stood first"),
    "induction": Rule("induction_mass", 0.3, True, "looks from a repeated token at what came after it"),
    "diffuse": Rule("evenness", 0.9, True, "looks almost evenly at all that it sees"),
    "dead": Rule("write_size", 0.01, False, "writes less than a hundredth of each token's state"),
}
# Rules that replace those above for pictures, whose tokens are patches row by row.
PICTURES = {
    "previous token": Rule("previous_mass", 0.5, True, "looks mostly at the patch to the left"),
    "next token": Rule("next_mass", 0.5, True, "looks mostly at the patch to the right"),
    "first token": Rule("first_token_share", 0.5, True, "looks more at the first token than at near patches"),
    "local": Rule("near_share", 0.5, True, "looks more at patches 1 or 2 away than at those 3 or 4 away"),
}


@dataclass(frozen=True, repr=False)
class HeadKind:
    """The heads of one kind.

    Attributes:
        name: such as "previous token".
        about: what such a head does, in a few words.
        measure: name of the head measure that decides.
        threshold: beyond which a head is of the kind.
        above: whether beyond is above; else below.
        value: ``(layer, head)``, the measure.
        error: ``(layer, head)``, its standard error, or None.
        members: ``(layer, head)`` booleans: beyond the threshold by two standard errors.
    """

    name: str
    about: str
    measure: str
    threshold: float
    above: bool
    value: Array
    error: Array | None
    members: NDArray[np.bool_]

    def __repr__(self) -> str:
        count, places = int(self.members.sum()), np.argwhere(self.members)[:4]
        some = [f"L{layer}H{head}" for layer, head in places] + ["..."] * (count > 4)
        return f"<{count} of {self.members.size} heads{': ' if some else ''}{' '.join(some)}>"


Kind = HeadKind  # former name, for studies pickled under it


def kinds(heads: Mapping[str, Any], *, picture: bool = False) -> dict[str, HeadKind]:
    """Kinds of heads by name, for every rule whose measure is in `heads`; `picture` if tokens are patches."""
    found = {}
    for name, rule in (RULES | (PICTURES if picture else {})).items():
        measure = heads.get(rule.measure)
        if measure is None or measure.value is None:
            continue
        slack = 0.0 if measure.error is None else 2 * np.nan_to_num(measure.error)
        with np.errstate(invalid="ignore"):
            if rule.above:
                even = getattr(measure, "baseline", None)
                least = rule.threshold if even is None else np.fmax(rule.threshold, (1 + even) / 2)
                members = measure.value - slack >= least
            else:
                members = measure.value + slack <= rule.threshold
        words = (name, rule.about, rule.measure, rule.threshold, rule.above)
        found[name] = HeadKind(*words, measure.value, measure.error, members)
    return found


def mass_at(scores: Scores, G: Tensor, index: Tensor) -> Tensor:
    """Mean over queries of the attention on one key each, ``(head,)``; NaN if no query sees its key.

    G is ``(head, query)``, index ``(query,)`` the key of each query, or −1 for none.
    """
    rule, t = scores.rule, scores.inputs
    Q, K = t.query.shape[1], t.key.shape[1]
    at = index.clamp(min=0)
    s = rule.soften(rule.scale * (t.query * t.key[:, at]).sum(-1)).scores

    def pick(x: Tensor) -> Tensor:
        return torch.take_along_dim(x.expand(x.shape[0], Q, K), at[None, :, None], -1).squeeze(-1)

    if t.bias is not None:
        s = s + pick(t.bias)
    if t.log_weight is not None:
        s = s + t.log_weight[:, at]
    seen = (index >= 0).expand_as(s)
    if (allowed := rule.sees(torch.arange(Q, device=s.device) + K - Q, at)) is not None:
        seen = seen & allowed
    if t.mask is not None:
        seen = seen & pick(t.mask)
    p = torch.exp((s - G.to(s.dtype)).clamp(max=0)).double()
    return torch.where(seen, p, 0.0).sum(-1) / seen.sum(-1)
