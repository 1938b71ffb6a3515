"""Modules that leave no one matrix to speak of, and modules that return NaN, by name."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError

BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def refuse_training(model: nn.Module) -> None:
    """Raise if a module mixes the samples of a batch, or if activations are checkpointed."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, BATCH_NORM):
            raise ArgumentError(
                f"Curvature: {name} ({type(module).__name__}) mixes the samples of a batch while training, "
                "so there is no one matrix. Call model.eval()."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ArgumentError(
                f"Curvature: {name or 'the model'} ({type(module).__name__}) checkpoints its activations, "
                "which torch.func cannot differentiate. Call model.gradient_checkpointing_disable()."
            )


@contextmanager
def randomness_refused(model: nn.Module) -> Iterator[None]:
    """Context that raises if a module of the model draws random numbers, such as dropout while training."""
    before: list[Tensor] = []

    def leave(module: nn.Module, *_: object) -> None:
        if not torch.equal(before.pop(), _random_state()):
            raise ArgumentError(
                f"Curvature: {names[module] or 'the model'} ({type(module).__name__}) draws random numbers, "
                "so there is no one matrix. Call model.eval(), which turns dropout off."
            )

    names = {module: name for name, module in model.named_modules()}
    hooks = [m.register_forward_pre_hook(lambda *_: before.append(_random_state())) for m in names]
    hooks += [m.register_forward_hook(leave) for m in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _random_state() -> Tensor:
    """The states of torch's generators, of the processor and of the current GPU if it is in use."""
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cat([torch.get_rng_state(), *([torch.cuda.get_rng_state()] if gpu else [])])


def first_not_finite(model: nn.Module, runs: Iterable[object]) -> str | None:
    """The first module whose output is not finite while `runs` runs the model; None if there is none."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
                found.append(name or "the model")

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        for _ in runs:
            if found:
                return found[0]
    finally:
        for hook in hooks:
            hook.remove()
    return None
