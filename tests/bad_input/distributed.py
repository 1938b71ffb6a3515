"""Bad input to attention over several processes: there is but one, and no group."""

import torch

from exptilt import distributed

X = torch.eye(4)[None]

ROWS = [
    (lambda: distributed.attend(X, X, X), "group", "is not initialised. Start the script with torchrun"),
    (lambda: distributed.shard(X), "group", "shard: .* is not initialised"),
    (lambda: distributed.gather(X), "group", "gather: .* is not initialised"),
]
