"""Bad input to attention over several processes: there is but one, and no group."""

import torch

from exptilt import distributed

X = torch.eye(4)[None]

ROWS = [
    (
        lambda: distributed.attend(X, X, X),
        "torch.distributed",
        "is not initialised. Start the script with torchrun",
    ),
    (lambda: distributed.log_normalizer(X, X), "torch.distributed", "is not initialised"),
    (lambda: distributed.shard(X), "torch.distributed", "shard: .* is not initialised"),
    (lambda: distributed.gather(X), "torch.distributed", "gather: .* is not initialised"),
]
