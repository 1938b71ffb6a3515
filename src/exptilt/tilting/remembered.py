"""`prepare` for calls like one before: what was found right once is not checked again.

Whether the arguments of a call fit together depends on shapes, dtypes, devices and options alone, and so does
what they are made into, unless a tensor has to be expanded, padded or converted. So the settings of every
call whose tensors were taken as they are, are kept under what they depend on; a small call then costs little
more than its kernel.
"""

from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import autocasts, derivatives_wanted
from exptilt.tilting.arguments import Call, prepare
from exptilt.tilting.derivatives.rules import Settings
from exptilt.tilting.problem import Inputs

_MOST = 4096  # kinds of calls that are remembered
_known: dict[Any, Settings] = {}


def _kind(x: Any) -> Any:
    return None if x is None else (x.shape, x.dtype, x.device)


def prepare_again(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: float | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sink: Tensor | None,
    backend: str | None,
    check: bool | None,
) -> Call:
    """The checked call of `arguments.prepare`, with autocast."""
    arguments = (
        *(
            name,
            query,
            key,
            value,
            scale,
            log_weight,
            bias,
            mask,
            causal,
            window,
            softcap,
            sink,
            backend,
            check,
        ),
    )
    tensors = query, key, value, bias, log_weight, sink, mask
    if torch.compiler.is_compiling() or not all(x is None or isinstance(x, Tensor) for x in tensors):
        return prepare(*arguments, autocast=True)
    tracked = derivatives_wanted(tensors)
    options = (
        scale,
        scale.__class__,
        causal,
        window,
        window.__class__,
        softcap,
        softcap.__class__,
        backend,
        check,
    )
    kind = (*map(_kind, tensors), options, tracked)
    try:
        settings = _known.get(kind)
    except TypeError:  # an option that is no number at all: to be explained
        return prepare(*arguments, autocast=True)
    if settings is not None and not autocasts(query.device):
        none = key[..., :0] if value is None else value
        return Call(
            Inputs(query, key, none, bias, log_weight, sink, mask), settings, query.dtype, False, tracked
        )
    call = prepare(*arguments, autocast=True)
    given = query, key, call.inputs.value if value is None else value, bias, log_weight, sink, mask
    if not call.autocast and all(x is y for x, y in zip(call.inputs, given, strict=True)):
        if len(_known) >= _MOST:
            _known.clear()
        _known[kind] = call.settings
    return call
