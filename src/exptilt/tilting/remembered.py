"""`prepare` with a memory: a call like an earlier one is not checked again.

Whether the arguments of a call fit together depends on shapes, strides, dtypes, devices and options alone. So
does the canonical form, unless a tensor has to be expanded, padded or converted, and so does the layout of
the compiled sweep. The settings and the layout of every call whose tensors were taken unchanged are kept; a
small call then costs little more than its kernel.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt._support.transforms import autocasts, derivatives_wanted, is_plain
from exptilt.tilting.arguments import Call, prepare
from exptilt.tilting.backends.dispatch import forward_layout
from exptilt.tilting.problem import Inputs, Settings

_MOST = 4096  # kinds of calls that are remembered


class _Known(NamedTuple):
    """Settings of a kind of call; the layout of its sweep where it may go to the compiled core at once."""

    settings: Settings
    layout: Any


_known: dict[Any, _Known] = {}


def prepare_again(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, options: tuple[Any, ...]
) -> Call:
    """The checked call of `arguments.prepare`, with autocast.

    Args:
        name: of the function, for messages.
        options: scale, log_weight, bias, mask, causal, window, softcap, sink, backend and check.
    """
    scale, log_weight, bias, mask, causal, window, softcap, sink, backend, check = options
    if torch.compiler.is_compiling():
        return prepare(name, query, key, value, *options, autocast=True)
    try:
        kind: list[Any] = [
            None if x is None else (x.__class__, x.shape, x.stride(), x.dtype, x.device)
            for x in (query, key, value, bias, log_weight, sink, mask)
        ]
        tracked = derivatives_wanted((query, key, value, bias, log_weight, sink))
        kind += scale, scale.__class__, causal, window, window.__class__, softcap, softcap.__class__
        kind += backend, check, tracked, torch.get_num_threads()
        known = _known.get(found := tuple(kind))
    except (AttributeError, TypeError, RuntimeError):  # a tensor without strides, an option that is no number
        return prepare(name, query, key, value, *options, autocast=True)
    if known is not None and not autocasts(query.device):
        none = key[..., :0] if value is None else value
        t = Inputs(query, key, none, bias, log_weight, sink, mask)
        return Call(t, known.settings, query.dtype, False, tracked, known.layout)
    call = prepare(name, query, key, value, *options, autocast=True)
    given = query, key, call.inputs.value if value is None else value, bias, log_weight, sink, mask
    if not call.autocast and all(x is y for x, y in zip(call.inputs[:7], given, strict=True)):
        if len(_known) >= _MOST:
            _known.clear()
        direct = not tracked and sink is None and all(x is None or is_plain(x) for x in given)
        layout = forward_layout(call.inputs, call.settings.rule, call.settings.backend) if direct else None
        _known[found] = _Known(call.settings, layout)
    return call
