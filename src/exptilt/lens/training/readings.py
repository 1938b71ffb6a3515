r"""Turn a record into one reading per head, over calls, batch items and processes.

With n_c the queries of part c (a call, a batch item, a process), and its maximum and means over them,

    score_max = max_c score_max_c,   entropy = Σ_c n_c entropy_c / Σ_c n_c,   log_normalizer likewise.

So the parts are kept as (maximum, sums, number) until the last division, and a batch split over processes
gives the reading of the whole.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from exptilt.distributed.group import Members
from exptilt.lens.heads.statistics import FIELDS
from exptilt.lens.watching.record import Record

_QUERIES, _TOP = FIELDS.index("queries"), FIELDS.index("score_max")
_MEANS = [FIELDS.index("entropy"), FIELDS.index("log_normalizer")]


@dataclass(frozen=True)
class HeadReading:
    """Statistics of one head over all queries seen.

    Attributes:
        layer: index among the attention modules of the model.
        name: dotted name of that module.
        head: index in the layer.
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

    @property
    def finite(self) -> bool:
        """Whether score_max, entropy and log_normalizer are all finite."""
        return all(math.isfinite(x) for x in (self.score_max, self.entropy, self.log_normalizer))


def spans_processes() -> bool:
    """Whether torch.distributed runs with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gather(record: Record) -> tuple[Tensor, Tensor]:
    """Maxima (layer, head), and sums (3, layer, head) of queries, entropy and G, over all processes."""
    members = Members("reading heads") if spans_processes() else None

    def over_processes(x: Tensor, how: str) -> Tensor:
        return x if members is None else members.reduce(x.to(members.device), how, "reading heads").cpu()

    values = torch.from_numpy(record.joined())
    layers, heads = values.shape[1:]
    size = over_processes(torch.tensor([layers, heads]), "max")
    room = (0, int(size[1]) - heads, 0, int(size[0]) - layers)
    n = values[_QUERIES].nan_to_num()
    # The maximum of a head that diverged is NaN, which backends compare differently; infinity compares alike
    # in all.
    top = values[_TOP].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    top = F.pad(torch.where(n > 0, top, -torch.inf), room, value=-torch.inf)
    sums = F.pad(torch.cat([n[None], torch.where(n > 0, values[_MEANS] * n, 0.0)]), room)
    return over_processes(top, "max"), over_processes(sums, "sum")


def read_heads(record: Record, names: Mapping[int, str]) -> list[HeadReading]:
    """One reading for every head that was seen, by layer and head; `names` maps a layer to its module's name.

    Every process must call this where torch.distributed runs.
    """
    top, sums = _gather(record)
    readings = []
    for layer, head in (sums[0] > 0).nonzero().tolist():
        n, entropy, G = sums[:, layer, head].tolist()
        highest = top[layer, head].item()
        readings.append(HeadReading(layer, names.get(layer, ""), head, round(n), highest, entropy / n, G / n))
    return readings
