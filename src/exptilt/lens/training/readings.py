r"""From a record to one reading a head: over calls, over the batch, over processes.

With n_c the queries of part c (a call, a batch item, a process), and its maximum and means over them,

    score_max = max_c score_max_c,   entropy = Σ_c n_c entropy_c / Σ_c n_c,   log_normalizer likewise.

So the parts are kept as (maximum, sums, number) until the last division, and a batch split over processes gives the reading of the whole.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from exptilt.lens.heads.statistics import FIELDS
from exptilt.lens.watching.record import Record

_QUERIES, _TOP = FIELDS.index("queries"), FIELDS.index("score_max")
_MEANS = [FIELDS.index("entropy"), FIELDS.index("log_normalizer")]


@dataclass(frozen=True)
class HeadReading:
    """What one head did.

    Attributes:
        layer: place among the attention modules of the model.
        name: dotted name of that module.
        head: place in the layer.
        queries: how many queries were seen.
        score_max: the largest score of any visible key; infinite if a score was not a number.
        entropy: mean over queries, in nats.
        log_normalizer: mean over queries.
    """

    layer: int
    name: str
    head: int
    queries: int
    score_max: float
    entropy: float
    log_normalizer: float


def spans_processes() -> bool:
    """Whether torch.distributed runs with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gather(record: Record) -> tuple[Tensor, Tensor]:
    """Maxima ``(layer, head)`` and sums ``(3, layer, head)`` of queries, entropy and log-normalizer, over all processes."""
    size = torch.zeros(2, dtype=torch.int64)
    for call in record.calls:
        size = torch.maximum(size, torch.tensor([call.layer + 1, call.values.shape[-1]]))
    across = spans_processes()
    # What travels must lie where the backend can reach it; without a GPU that is the CPU.
    device = (
        record.calls[0].values.device
        if across and record.calls and dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    if across:
        size = size.to(device)
        dist.all_reduce(size, dist.ReduceOp.MAX)
    layers, heads = size.tolist()
    top = torch.full((layers, heads), -torch.inf, dtype=torch.float64)
    sums = torch.zeros(3, layers, heads, dtype=torch.float64)
    for call in record.calls:
        values = call.values.detach().cpu().double()
        n, (layer, H) = values[_QUERIES], (call.layer, values.shape[-1])
        # The maximum of a head that diverged is not a number, and how that compares depends on the backend: infinity is the same to all.
        highest = torch.where(
            n > 0, values[_TOP].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), -torch.inf
        )
        top[layer, :H] = torch.maximum(top[layer, :H], highest.amax(0))
        sums[0, layer, :H] += n.sum(0)
        sums[1:, layer, :H] += torch.where(n > 0, values[_MEANS] * n, 0.0).sum(1)
    if across:
        top, sums = top.to(device), sums.to(device)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        dist.all_reduce(sums, dist.ReduceOp.SUM)
    return top.cpu(), sums.cpu()


def read_heads(record: Record, names: Mapping[int, str]) -> list[HeadReading]:
    """One reading for every head that was seen, by layer and head. Every process must call this where torch.distributed runs.

    Args:
        record: what a watch saw, in this process.
        names: dotted names of the attention modules by layer.
    """
    top, sums = _gather(record)
    readings = []
    for layer, head in (sums[0] > 0).nonzero().tolist():
        n, entropy, log_normalizer = sums[:, layer, head].tolist()
        reading = HeadReading(
            layer,
            names.get(layer, ""),
            head,
            round(n),
            top[layer, head].item(),
            entropy / n,
            log_normalizer / n,
        )
        readings.append(reading)
    return readings


def finite(reading: HeadReading) -> bool:
    """Whether all numbers of a reading are."""
    return all(math.isfinite(x) for x in (reading.score_max, reading.entropy, reading.log_normalizer))
