"""Modules that leave no one matrix to speak of, and modules that return NaN, by name."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from exptilt._support.errors import ArgumentError

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def refuse_randomness(model: nn.Module) -> None:
    """Raise if a module in training mode draws at random, or mixes the samples of a batch."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        dropout = isinstance(module, DROPOUT) and module.p > 0
        if dropout or isinstance(module, BATCH_NORM):
            what = "drops at random" if dropout else "mixes the samples of a batch"
            raise ArgumentError(
                f"Curvature: {name} ({type(module).__name__}) {what} while training, so there is no one "
                "matrix. Call model.eval()."
            )


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
