"""Check that a model gives the same outputs watched and unwatched, by running its first call both ways.

Both runs are in eval mode and without gradients, since dropout draws other random numbers in a watch, and on
copies of the arguments, since a cache grows with every call. Rows of padding are left out if the model was
given an attention mask: a query that sees nothing gives 0 in a watch, and anything elsewhere.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from exptilt._support.errors import ExptiltError
from exptilt._support.transforms import pytree
from exptilt.lens.watching.interception import Interception
from exptilt.lens.watching.modules import evaluating


class WatchedOutputError(ExptiltError, RuntimeError):
    """A watched model gives another output than the unwatched one."""


class Verification:
    """Runs a model's first call watched and unwatched, and raises if the outputs differ."""

    def __init__(self, interception: Interception):
        self._interception = interception
        self.model, self.name = interception.intercepted.model, interception.intercepted.name
        self.under_way = False
        self._handle: Any = None

    def attach(self) -> None:
        """Register the hook that verifies the first call."""
        self._handle = self.model.register_forward_pre_hook(self._run, with_kwargs=True)

    def detach(self) -> None:
        """Remove the hook, if it is still registered."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _run(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.detach()
        self.under_way = True
        try:
            with torch.no_grad(), evaluating(model):
                watched = self._call(args, kwargs)
                self._interception.__exit__(None, None, None)
                try:
                    plain = self._call(args, kwargs)
                finally:
                    self._interception.__enter__()
        finally:
            self.under_way = False
        self._compare(watched, plain, kwargs.get("attention_mask"))

    def _call(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Floating-point tensors in the model's output, from copies of the arguments."""
        args, kwargs = copy.deepcopy((args, kwargs))
        output = self.model(*args, **kwargs)
        parts = output.to_tuple() if hasattr(output, "to_tuple") else output
        return [x for x in pytree.tree_leaves(parts) if isinstance(x, Tensor) and x.is_floating_point()]

    def _compare(self, watched: list[Tensor], plain: list[Tensor], real: Any) -> None:
        for place, (a, b) in enumerate(zip(watched, plain, strict=True)):
            if isinstance(real, Tensor) and real.dim() == 2 and a.shape[:2] == real.shape:
                a, b = a[real.bool()], b[real.bool()]
            size = float(b.double().norm())
            apart = float((a.double() - b.double()).norm())
            allowed = torch.finfo(b.dtype).eps ** 0.5
            if not apart <= allowed * size and size == size:
                raise WatchedOutputError(
                    f"watch: output {place} of {self.name}, of shape {tuple(b.shape)}, differs by "
                    f"{apart / size:.2%} (root mean square) from that of the unwatched model, where rounding "
                    f"allows {allowed:.2%}. The model uses its mask or its attention in a way that a watch "
                    "does not know; do not trust the record."
                )
