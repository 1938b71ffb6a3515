"""Keys on many processes: attention, memories and losses joined exactly over torch's process groups."""

from exptilt.distributed.attend import attend
from exptilt.distributed.group import GroupError
from exptilt.distributed.order import gather, shard

__all__ = ["GroupError", "attend", "gather", "shard"]
