r"""`differentiable`: any derivative of a model with attention, in O(n) memory, without changing the model.

Fused attention in torch has a gradient and no more: `torch.func.jvp` through it raises, and so does a second
backward pass. Attention that is written out has all derivatives, and n×n weights for each of them. The
derivative of attention along a direction is again attention,

    d E_p[v] = E_p[dv] + Cov_p(v, ds),      ds_j = scale (⟨dq, k_j⟩ + ⟨q, dk_j⟩),

streamed over the keys by `attend` to any order. So `attend` computes the model's attention.
"""

import warnings
from contextlib import ContextDecorator
from typing import Any

from torch import Tensor, nn

from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.lens.corrections import Corrections
from exptilt.lens.watching.call import Intercepted, Request
from exptilt.lens.watching.interception import Interception
from exptilt.lens.watching.torch_hook import innermost
from exptilt.lens.watching.transformers_hook import uncast
from exptilt.tilting import attend


class differentiable(ContextDecorator):
    """Context manager and decorator: `attend` computes the model's attention, so all derivatives exist.

    `torch.func.jvp`, ``jacfwd``, double backward, Hessian and Gauss–Newton products and per-sample gradients
    (``vmap(grad)``) work, for every model that `lens.watch` can take over without ``softmax=True``. Nothing
    is recorded; outputs stay the same up to rounding; on leaving, the model is as it was found. Attention
    dropout must be off.

    Args:
        model: a transformers model, or any module that attends through ``scaled_dot_product_attention`` or
            ``nn.MultiheadAttention``.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
        >>> x, v = torch.randn(2, 2, 10, 16)
        >>> with xt.differentiable(layer):
        ...     output, along = torch.func.jvp(layer, (x,), (v,))
        >>> @xt.differentiable(layer)
        ... def curvature(x, v):
        ...     return torch.func.jvp(torch.func.grad(lambda x: layer(x).square().sum()), (x,), (v,))[1]
        >>> along.shape, curvature(x, v).shape
        (torch.Size([2, 10, 16]), torch.Size([2, 10, 16]))
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"differentiable: model is a {type(model).__name__}. Pass a torch.nn.Module, such as a "
                "transformers model."
            )
        self._model = model
        self._open: list[tuple[Interception | None, Corrections]] = []

    def __enter__(self) -> nn.Module:
        around, opened = innermost(), None
        if around is None or self._model not in around.modules:  # else a watch computes its attention already
            seen = Intercepted(self._model, uncast(_attend), _refuse_dropout, lambda *_: None, quiet=True)
            opened = Interception(seen).__enter__()
        corrections = Corrections()
        corrections.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((opened, corrections))
        return self._model

    def __exit__(self, *raised: Any) -> None:
        opened, corrections = self._open.pop()
        corrections.__exit__(*raised)  # type: ignore[no-untyped-call]
        if opened is None:
            return
        opened.__exit__(*raised)
        if raised[0] is None and opened.intercepted.ran and not opened.intercepted.attended:
            text = (
                f"differentiable: {opened.intercepted.name} ran, but none of its attention goes through "
                "transformers' interface, scaled_dot_product_attention or MultiheadAttention, so nothing was "
                "replaced: its derivatives are torch's own, with n×n weights. Load it with "
                "attn_implementation='sdpa' if it has that, or call xt.attend in its forward."
            )
            warnings.warn(text, ExptiltWarning, stacklevel=2)


def _attend(request: Request) -> Tensor:
    """The output of a request, with all derivatives."""
    _refuse_dropout(request)
    return attend(request.query, request.key, request.value, **request.options, check=False).output


def _refuse_dropout(request: Request) -> None:
    """Raise if attention dropout is on: every derivative would have to drop the same weights."""
    if request.dropout > 0:
        raise ArgumentError(
            f"differentiable: a {type(request.module).__name__} drops attention weights with probability "
            f"{request.dropout:g}. Call model.eval(), or set its attention dropout to 0."
        )
