"""Dense stand-in, to be deleted."""
import torch
from torch import Tensor


def log_normalizer(query: Tensor, key: Tensor, *, scale: float, log_weight: Tensor) -> Tensor:
    return torch.logsumexp(scale * query @ key.mT + log_weight.unsqueeze(-2), -1)


def attend_mean(query: Tensor, key: Tensor, *, scale: float, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    scores = scale * query @ key.mT + log_weight.unsqueeze(-2)
    return torch.softmax(scores, -1) @ key, torch.logsumexp(scores, -1)
