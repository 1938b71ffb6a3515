r"""The statistics of a head: one definition of each, for a watch's record, a study, a monitor and a page.

Over the queries i of a head that count (real ones that see a key):

    entropy            mean of H_i                    effective_keys   mean of e^{H_i}
    relative_entropy   mean of H_i / log(outcomes of i), over queries with more than one outcome
    log_normalizer     mean of G_i, and its variance  score_mean, score_variance   means over queries
    score_max          the largest                    visible_keys     mean of n_i, the keys query i sees
    first_key_mass     mean of p_i1 = e^{s_i1 − G_i}, s_i1 the score of the first real key
    key_mass_simpson, key_mass_divergence             see `heads.key_mass`

and of one text, in a study, also

    first_token_mass              median of p_i1 over the queries that see the first key and many others
    first_token_share             median of p_i1 over what i gives to keys within 16 and at both ends
    near_share                    the same of what i gives to keys within 4
    log_normalizer_variation      standard deviation of G_i − log Σ_j h_ij, h the keys' weights (1, or e^bias)
    normalizer_cv                 standard deviation over mean of Z_i / Σ_j h_ij, Z = e^G (THEORY A15)

Z grows with the number of keys a query sees, so Z per key is tested for constancy. For small variation the
standard deviation of log Z *is* the coefficient of variation of Z, but it stays meaningful when one query in
a thousand has a Z that dwarfs the rest. The first key's mass needs one score a query, so O(n) work; the mass
of all keys is a second sweep over them. Many keys are `MANY`, or half of what the query that sees most sees:
queries at the start of a text have little choice, and how many of them there are depends on how it was cut.

A longer text takes from the mass on any one key and gives to the far ones, so a threshold on a mass would
depend on how texts were cut. The two shares do not: their keys are the same 35 in a text of any length
(fewer in one shorter than 34 tokens), and only queries count that see all keys within 16. The ends are the
first key and the last, where many models put attention that has nowhere to go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt._support.transforms import pytree
from exptilt.lens.heads.key_mass import divergence, simpson
from exptilt.lens.heads.visibility import Visibility
from exptilt.tilting import AttentionResult, attend, log_normalizer
from exptilt.tilting.problem import Inputs, wide_dtype

PER_QUERY = ("entropy", "log_normalizer", "score_mean", "score_variance", "score_max", "first_key_mass")
MANY = 32  # keys that a query must see to count in a median over queries
NEAR, AROUND = 4, 16  # how far a near key may be in tokens, and how far one that it is compared with
NEAR_PATCHES, AROUND_PATCHES = 2, 4  # the same in patches of a picture
FIELDS = (
    *("queries", "relative_queries", "visible_keys", "entropy", "relative_entropy", "effective_keys"),
    *("log_normalizer", "log_normalizer_variance", "score_mean", "score_variance", "score_max"),
    *("first_key_mass", "key_mass_simpson", "key_mass_divergence"),
)


def first_products(query: Tensor, key: Tensor, first: Tensor | None) -> Tensor:
    """Inner products ``(batch, Hq, Q)`` of queries with the first real key, at ``first`` ``(batch,)`` or 0.

    All that a score of the first key needs later, when query and key are gone.
    """
    if key.shape[2] == 0:
        return query.new_zeros(query.shape[:3])
    wide, heads = wide_dtype(query.dtype), query.shape[1] // key.shape[1]
    one = key[:, :, :1] if first is None else torch.take_along_dim(key, first[:, None, None, None], 2)
    one = one if heads == 1 else one.repeat_interleave(heads, 1)
    return (query.to(wide) * one.to(wide)).sum(-1)  # a third of the time of a product of matrices


def rows(
    lines: Sequence[Tensor], products: Tensor, options: Mapping[str, Any], visible: Visibility
) -> Tensor:
    """Input of `summarise`, ``(6, ..., batch, Hq, Q)``: `PER_QUERY` with the first key's score for its mass.

    `lines` are those of `statistic_lines`, `products` those of `first_products`, both of one call or stacked;
    `options` those of `attend`.
    """
    G = lines[1]
    if visible.length == 0:
        s = torch.full_like(G, -torch.inf)
    else:  # a query and a key of one component each have the product as their product
        one = products.new_ones(()).expand(*products.shape[:-1], visible.length, 1)
        s = _column(products[..., None], one, options, visible, visible.first)
    return torch.stack([*lines, s.to(G.dtype)])


def statistic_lines(tilted: AttentionResult) -> list[Tensor]:
    """The statistics `PER_QUERY` of a result, ``(batch, Hq, Q)`` each, without the mass of the first key."""
    return [getattr(tilted, name) for name in PER_QUERY[:-1]]


def with_mass(rows: Tensor) -> Tensor:
    """`rows` with the mass of the first key in place of its score: the statistics `PER_QUERY`."""
    G, s = rows[1], rows[5]
    return torch.cat([rows[:5], torch.exp((s - G).clamp(max=0)).masked_fill(torch.isneginf(G), 0.0)[None]])


def _column(
    query: Tensor, key: Tensor, options: Mapping[str, Any], visible: Visibility, index: Tensor | None
) -> Tensor:
    """Scores of one key ``(batch, Hq, Q)``, the first or that of index ``(batch,)``; −inf where hidden."""
    tensors = {name: options.get(name) for name in ("bias", "log_weight", "mask")}
    rule = replace(visible.rule, scale=options["scale"], softcap=options.get("softcap"))
    return rule.column(Inputs(query, key, key, **tensors), index)


def summarise(rows: Tensor, mass: Tensor | None, visible: Visibility, sink: bool) -> Tensor:
    """The statistics `FIELDS` of each head and batch item, ``(fields, ..., batch, Hq)``.

    `rows` ``(6, ..., batch, Hq, Q)`` are those of one call, or of several that see alike; `mass`
    ``(..., batch, Hq, K)`` is the attention on every key (its statistics are NaN for None); `sink` says
    whether a sink is one more outcome.
    """
    H, G, score_mean, score_variance, score_max, first_mass = with_mass(rows)
    top = torch.where(G.isnan(), G, score_max)  # a maximum over scores that are not numbers is none
    lead, Q = G.shape[:-1], G.shape[-1]
    counted = visible.counted
    seen = visible.visible.to(G.dtype).expand_as(G)
    every = torch.stack([seen, H, H.exp(), G, score_mean, score_variance, first_mass])
    if counted is None:
        number = G.new_full(lead, Q)
        means = every.mean(-1)
        spread = (G - means[3][..., None]).square().mean(-1)
    else:
        number = counted.sum(-1).to(G.dtype).expand(lead)
        means = every.masked_fill(~counted, 0.0).sum(-1) / number
        spread = (G - means[3][..., None]).square().masked_fill(~counted, 0.0).sum(-1) / number
        top = top.masked_fill(~counted, -torch.inf)
    unknown = torch.full_like(number, torch.nan)
    seen, entropy, effective, normalizer, mean, variance, first = means
    found = {
        "queries": number,
        "relative_queries": visible.inverse_log(sink)[1].to(G.dtype).expand(lead),
        "visible_keys": seen,
        "entropy": entropy,
        "relative_entropy": evenness(H, visible, sink),
        "effective_keys": effective,
        "log_normalizer": normalizer,
        "log_normalizer_variance": spread,
        "score_mean": mean,
        "score_variance": variance,
        "score_max": top.amax(-1) if Q else top.new_full(lead, -torch.inf),
        "first_key_mass": first,
        "key_mass_simpson": unknown if mass is None else simpson(mass),
        "key_mass_divergence": unknown if mass is None else divergence(mass, visible.even()[0]).to(G.dtype),
    }
    return torch.stack([found[name] for name in FIELDS])


def evenness(entropy: Tensor, visible: Visibility, sink: bool) -> Tensor:
    """Entropy ``(..., Q)`` over its largest possible value, mean over queries with a choice."""
    inverse, queries = visible.inverse_log(sink)
    return (entropy * inverse.to(entropy.dtype)).sum(-1) / queries


class TextStatistics(NamedTuple):
    """Statistics of the heads of one layer on one text."""

    by_name: dict[str, Tensor]  # (head,) in float64; NaN where no query counts
    mean_key: Tensor  # (head, query, D), ∇G: keys averaged under attention (a sink is a key at the origin)
    drawn: Tensor  # (head, key), attention each key draws, summed over queries
    even: Tensor  # (head or 1, key), what each key would draw from queries that attend evenly
    seen_by: Tensor  # (head or 1, key), number of queries that see each key


def text_statistics(
    query: Tensor,
    key: Tensor,
    options: dict[str, Any],
    tilted: AttentionResult,
    item: int = 0,
    places: Tensor | None = None,
) -> TextStatistics:
    """Statistics of one text without padding, from the arguments of `attend` and its result `tilted`.

    `places` ``(key, d)`` are the positions of patches; None for words in a row.
    """
    visible = Visibility.of(query, key, options)
    sink = options.get("sink") is not None
    again = attend(query, key, key, **options, key_mass=True)
    assert again.key_mass is not None
    wide: AttentionResult = pytree.tree_map(lambda x: x.detach().double(), tilted)
    G = wide.log_normalizer
    products = first_products(query, key, visible.first)
    lines = rows(statistic_lines(wide), products, options, visible)
    numbers = summarise(lines, again.key_mass.double(), visible, sink)
    found = dict(zip(FIELDS, numbers[:, item], strict=True))
    found["score_max"] = found["score_max"].masked_fill(found["queries"] == 0, torch.nan)
    found["evenness"] = found["relative_entropy"]
    live, outcomes = (visible.visible > 0).expand_as(G), visible.visible + int(sink)
    many = (outcomes > 1) & (outcomes >= min(MANY, float(outcomes.max()) / 2))
    found["first_token_mass"] = _median(with_mass(lines)[5], many & ~torch.isneginf(lines[5]))[item]
    if any(options.get(name) is not None for name in ("bias", "log_weight", "sink")):
        log_measure = log_normalizer(torch.zeros_like(query), key, **options)  # a query of 0 tilts nothing
    else:
        log_measure = visible.visible.double().log()
    per_key = G - log_measure.double()
    found["log_normalizer_variation"] = _deviation(per_key, live)[item]
    found["normalizer_cv"] = _variation(per_key, live)[item]
    if query.shape[2] == key.shape[2]:
        found |= {name: x[item] for name, x in shares(query, key, options, places).items()}
    even, seen_by = (x[item if x.shape[0] > 1 else 0] for x in visible.even())
    return TextStatistics(found, again.output[item], again.key_mass[item].double(), even, seen_by)


def shares(
    query: Tensor, key: Tensor, options: dict[str, Any], places: Tensor | None = None
) -> dict[str, Tensor]:
    """`first_token_share` and `near_share` with their baselines, ``(batch, Hq)``, by two log-normalizers.

    Arguments are those of `text_statistics`, of as many queries as keys.
    """
    n, visible = key.shape[2], Visibility.of(query, key, options)
    own = torch.arange(n, device=query.device)
    ends = [(0, _column(query, key, options, visible, None))]
    ends += [(n - 1, _column(query, key, options, visible, own[-1:].expand(len(query))))] if n > 1 else []
    pictured = places is not None and len(places) == n
    apart = torch.cdist(places, places).to(own.device) if pictured and places is not None else None

    def within(far: int) -> tuple[Tensor, Tensor]:
        """Log-normalizer over the keys within a distance, and their number."""
        some: dict[str, Any] = {**options, "sink": None}
        if apart is None:
            some["window"] = min(far + 1, options.get("window") or far + 1)
        else:
            there = (apart <= far)[None, None]
            some["mask"] = there if options.get("mask") is None else there & options["mask"]
        G, count = log_normalizer(query, key, **some), Visibility.of(query, key, some).visible
        return G.double(), count.double().expand_as(G)

    reach = (NEAR_PATCHES, AROUND_PATCHES) if pictured else (NEAR, AROUND)
    (near, few), (total, count) = within(reach[0]), within(reach[1])
    # Of a picture few patches have all their neighbours.
    use = count >= count.amax(-1, keepdim=True) * (0.75 if pictured else 1.0)
    if pictured and places is not None:
        use = use & ~places.to(own.device).isnan().any(-1)
    for place, score in ends:
        outside = (own - place).abs() > reach[1] if apart is None else ~(apart[:, place] <= reach[1])
        score = score.double().masked_fill(~outside, -torch.inf)
        total, count = torch.logaddexp(total, score), count + ~torch.isneginf(score)
    parts = {"first_token_share": (ends[0][1].double(), torch.ones_like(count)), "near_share": (near, few)}
    found = {}
    for name, (part, number) in parts.items():
        known = use & ~torch.isneginf(part) & (number < count)  # where it is not all that is seen
        found[name] = _median((part - total).exp().clamp(max=1), known)
        found[f"{name}_baseline"] = _median(number / count, known)
    return found


def _median(x: Tensor, use: Tensor) -> Tensor:
    """Median over the last axis, of the entries in use; NaN where there is none."""
    return x.masked_fill(~use, torch.nan).nanquantile(0.5, -1)


def _mean(x: Tensor, use: Tensor) -> Tensor:
    """Mean over the last axis, of the entries in use."""
    return torch.where(use, x, 0.0).sum(-1) / use.sum(-1)


def _deviation(x: Tensor, use: Tensor) -> Tensor:
    """Standard deviation over the last axis, of the entries in use; NaN for fewer than two."""
    off = torch.where(use, x - _mean(x, use)[..., None], 0.0)
    count = use.sum(-1)
    return (off.square().sum(-1) / (count - 1)).sqrt().masked_fill(count < 2, torch.nan)


def _variation(log_x: Tensor, use: Tensor) -> Tensor:
    """Coefficient of variation of x over the last axis, from log x, shifted so that nothing overflows."""
    shifted = torch.where(use, log_x, -torch.inf)
    x = torch.exp(shifted - shifted.amax(-1, keepdim=True))
    return _deviation(x, use) / _mean(x, use)
