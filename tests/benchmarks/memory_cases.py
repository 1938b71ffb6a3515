"""Calls of known size, at module level so that a fresh process can import them."""

import numpy as np
import torch

MEGABYTE = 2**20


def numpy_case(megabytes):
    def run():
        return float(np.ones(megabytes * MEGABYTE // 8).sum())

    return run


def torch_case(megabytes):
    def run():
        return float(torch.ones(megabytes * MEGABYTE // 4).sum())

    return run


def returning_case(megabytes):
    """As much again is used as is returned."""

    def run():
        scratch = torch.ones(megabytes * MEGABYTE // 4)
        return {"output": [scratch + 1]}

    return run


def after_a_large_setup(megabytes):
    """The set-up leaves as much free heap behind as the call needs, which must not be able to hide in it."""
    waste = [
        np.ones(MEGABYTE // 128) for _ in range(16 * megabytes)
    ]  # small enough to come from the heap, not from mmap
    pin = np.ones(MEGABYTE // 128)  # above them, so that the heap cannot shrink by itself
    del waste

    def run():
        blocks = [np.ones(MEGABYTE // 128) for _ in range(16 * megabytes)]
        return float(pin[0] + blocks[-1][0])

    return run


def failing_case():
    raise ValueError("no such luck")
