"""What the scripts that several processes run have in common."""

import torch
import torch.distributed as dist


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(mine, right, tolerance, what):
    mine, right = mine.double(), right.double()
    assert mine.shape == right.shape, (what, mine.shape, right.shape)
    same = (mine == right) | ((mine - right).abs() <= tolerance * (1 + right.abs()))
    if not bool(same.all()):
        raise AssertionError(f"{what}: off by {(mine - right).abs().max():.2e}, allowed {tolerance:.0e}")


def raised(kind, call):
    """The message of the error that a call raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")


def cut(x, sizes):
    """This process's rows."""
    rank = dist.get_rank()
    return x[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
