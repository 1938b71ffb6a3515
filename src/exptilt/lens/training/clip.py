r"""QK-clip: rescale the query and key weights of heads whose scores have passed a threshold.

Scores are bilinear: s = scale · ⟨W_q x, W_k y⟩, and a rotary embedding turns both sides without changing
their length. So factors a on the query rows of a head and b on its key rows multiply every score of the head
by ab. With m the largest score seen and t the threshold,

    γ = t / m,      a = b = √γ    where a key head serves one query head
                    a = γ, b = 1  where it serves several, so that the scores of the others stay as they are

and biases of queries and keys are scaled along. In latent attention, where a part of the keys is shared by
all heads, the other part and its queries get √γ, the queries of the shared part γ. Layers that share their
weights (ALBERT) count as one: the largest score of any of them decides. Under a softcap c the score seen is
m = c·tanh(x/c), so γ = artanh(t/c) / artanh(m/c).
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import nn

from exptilt._support.checks import number
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.lens.training.projections import Projections, find_projections
from exptilt.lens.training.readings import HeadReading, read_heads
from exptilt.lens.watching.record import CallRecord, Record


@dataclass(frozen=True)
class ClippedHead:
    """A head whose weights were rescaled.

    Attributes:
        layer: index among the attention modules of the model.
        name: dotted name of that module.
        head: index in the layer.
        score_max: the largest score seen before the change.
        factor: γ, by which the scores of this head are multiplied from now on (before a softcap).
        scaled: "query and key", each by √γ, or "query" alone, by γ.
    """

    layer: int
    name: str
    head: int
    score_max: float
    factor: float
    scaled: str


def _factor(score_max: float, threshold: float, softcap: float | None, place: str) -> float:
    """Factor γ for the scores of a head; warns if its softcap hides how large the score was."""
    if softcap is None:
        return threshold / score_max
    # In float32 tanh rounds to 1 from about 9 on. The largest float32 below 1 is used then: a lower bound on
    # the true score.
    seen = min(score_max / softcap, 1 - 2.0**-24)
    if seen < score_max / softcap:
        warnings.warn(
            f"clip_qk_: {place} is at its softcap {softcap:g}, which hides how large the score was. "
            "It was scaled by what can be known; watch and clip again.",
            ExptiltWarning,
            stacklevel=3,
        )
    return math.atanh(threshold / softcap) / math.atanh(seen)


def _weights(reading: HeadReading, calls: list[CallRecord] | None, module: nn.Module | None) -> Projections:
    """The weights to scale for a head that passed the threshold; raises if that would not help."""
    place = f"layer {reading.layer} ({reading.name}), head {reading.head}"
    if not math.isfinite(reading.score_max):
        raise ArgumentError(
            f"clip_qk_: {place} has scores that are not finite; no factor brings them back. Go back to a "
            "checkpoint."
        )
    if calls is None:
        raise ArgumentError(
            f"clip_qk_: {place} passed the threshold in another process but was not run in this one. Run it "
            "in all."
        )
    if module is None:
        raise ArgumentError(
            f"clip_qk_: the record has a module {reading.name!r}, which this model does not have. "
            "Pass the model that was watched."
        )
    if any(call.biased for call in calls):
        raise ArgumentError(
            f"clip_qk_: {type(module).__name__} {reading.name!r} adds a position bias or a mask with numbers "
            "to its scores, which the weights of queries and keys do not scale."
        )
    return find_projections(module, reading.name, calls[0].dim, calls[0].values.shape[-1])


def _largest(readings: list[HeadReading]) -> list[HeadReading]:
    """For each head of each module, the reading with the largest score among the layers that share it."""
    found: dict[tuple[str, int], HeadReading] = {}
    for reading in readings:
        known = found.setdefault((reading.name, reading.head), reading)
        if reading.score_max > known.score_max:
            found[reading.name, reading.head] = reading
    return list(found.values())


@torch.no_grad()
def clip_qk_(model: nn.Module, record: Record, threshold: float) -> list[ClippedHead]:
    """Rescale in place the weights of heads whose largest score passed a threshold, down to the threshold.

    If one of these heads cannot be rescaled, an error is raised and no weight changes. A record works once:
    after a change it describes the old weights, and a second call with it does nothing. Where
    torch.distributed runs, every process must call this; the largest score over all processes counts, and
    all make the same change. Moments that an optimizer keeps are left alone.

    Args:
        model: the model that was watched, or its DistributedDataParallel wrapper.
        record: ``seen.record`` of a watch, or ``monitor.record``.
        threshold: the largest score wanted, above 0.

    Returns:
        The heads that were changed, by layer and head; empty if none passed the threshold.

    Example:
        >>> layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = 30 * torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(0))
        >>> with xt.lens.watch(layer) as seen:
        ...     output, _ = layer(x, x, x)
        >>> changed = xt.lens.clip_qk_(layer, seen.record, threshold=5.0)
        >>> with xt.lens.watch(layer) as seen:
        ...     output, _ = layer(x, x, x)
        >>> len(changed), round(float(seen.record.by_head("score_max").max()), 3)
        (4, 5.0)
    """
    if not isinstance(record, Record):
        raise ArgumentError(
            f"clip_qk_: record is a {type(record).__name__}. Pass the record of a watch, or a monitor's "
            "after its first reading."
        )
    threshold = number("clip_qk_", "threshold", threshold, above=0)
    if record.spent:
        return []
    calls: dict[int, list[CallRecord]] = {}
    for call in record.calls:
        calls.setdefault(call.layer, []).append(call)
    modules = dict(model.named_modules())
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # A monitor names modules as in the wrapped model, a watch as in the model it was given.
        modules = dict(model.module.named_modules()) | modules
    plan = []
    readings = read_heads(record, {layer: some[0].name for layer, some in calls.items()})
    for reading in _largest(readings):
        if reading.score_max > threshold:
            some = calls.get(reading.layer)
            weights = _weights(reading, some, modules.get(reading.name))
            place = f"layer {reading.layer} ({reading.name}), head {reading.head}"
            factor = _factor(reading.score_max, threshold, some[0].softcap if some else None, place)
            plan.append((reading, weights, factor))
    changed, record.spent = [], bool(plan)
    for reading, weights, factor in plan:
        alone = weights.key[0].heads == weights.query[0].heads
        for rows in weights.query:
            rows.of(reading.head).mul_(factor ** (rows.power or (0.5 if alone else 1.0)))
        for rows in weights.key if alone else []:
            rows.of(reading.head).mul_(math.sqrt(factor))
        r, scaled = reading, "query and key" if alone else "query"
        changed.append(ClippedHead(r.layer, r.name, r.head, r.score_max, factor, scaled))
    return changed
