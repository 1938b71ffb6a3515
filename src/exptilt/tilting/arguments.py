"""Arguments of attend and its kin: checked, and brought to the canonical form of ``problem.py``.

Whether the arguments of a call fit together depends on shapes, strides, dtypes, devices and options alone. So
does the canonical form, unless a tensor has to be expanded, padded or converted, and so does the layout of
the compiled sweep. `prepare_again` keeps the settings and the layout of every call whose tensors were taken
unchanged, and does not check a call like it again: a small call then costs little more than its kernel.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from exptilt._support.errors import ArgumentError, KeywordError
from exptilt._support.transforms import autocasts, derivatives_wanted, is_plain
from exptilt.tilting.backends.dispatch import BACKENDS, default_backend, forward_layout
from exptilt.tilting.problem import WIDE, Inputs, Settings
from exptilt.tilting.score_rule import ScoreRule

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LAYOUT = "query is (..., heads, length, dim), key and value are (..., key heads, length, dim)"
_SDPA_NAMES = {
    "is_causal": "Write causal=True. For as many queries as keys it is the same; else causal aligns the ends "
    "of the two sequences (query i sees key j where j <= i + K − Q, as decoding needs), is_causal aligns "
    "their beginnings (j <= i): for that, write mask=torch.ones(Q, K, dtype=torch.bool).tril().",
    "attn_mask": "A boolean mask, True where a query may see a key, goes to mask=; numbers that are added to "
    "the scores go to bias=.",
    "dropout_p": "Write dropout=, and seed= for the same weights to be dropped again.",
    "enable_gqa": "Leave it out: key heads that divide the query heads are shared without being asked for.",
}

Result = TypeVar("Result")


class _Wrong(Exception):
    """Says what is wrong with an argument; `prepare` puts the caller's name before it."""


@dataclass(frozen=True)
class Call:
    """A checked call.

    Attributes:
        inputs: in canonical form.
        settings: the rule, the backend, whether results are checked.
        dtype: of the output.
        autocast: whether autocast must be switched off for the sweeps.
        tracked: whether a derivative may be taken.
        layout: of the compiled forward sweep, if it may run on the inputs directly; else None.
    """

    inputs: Inputs
    settings: Settings
    dtype: torch.dtype
    autocast: bool
    tracked: bool
    layout: Any = None


def explain_keywords(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function raise for keywords that it does not have, and say what to write instead.

    Tensors of a kind of their own (`__torch_function__`) take over, as they do for functions of torch.
    """
    known = frozenset(signature(function).parameters)

    def explanation(name: str) -> str:
        alike = get_close_matches(name, known, 1)
        guess = (
            f"Did you mean {alike[0]}=?"
            if alike
            else f"It takes: {', '.join(signature(function).parameters)}."
        )
        return f"{function.__name__}: there is no {name}=. {_SDPA_NAMES.get(name, guess)}"

    @wraps(function)
    def explained(*arguments: Any, **keywords: Any) -> Result:
        for name in keywords:
            if name not in known:
                raise KeywordError(explanation(name))
        given = (*arguments, *keywords.values())
        if has_torch_function(given):
            return handle_torch_function(explained, given, *arguments, **keywords)
        return function(*arguments, **keywords)

    return explained


def _check_tensors(tensors: dict[str, Tensor | None]) -> None:
    query = tensors["query"]
    for label, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise _Wrong(f"{label} is a {type(x).__name__}. Pass a torch tensor: torch.as_tensor({label}).")
        if label == "mask":
            if x.dtype != torch.bool:
                hint = "Pass mask.bool(), True where a query may see a key."
                hint = "An additive mask goes to bias=." if x.is_floating_point() else hint
                raise _Wrong(f"mask has dtype {x.dtype}, not torch.bool. {hint}")
        elif x.dtype not in _DTYPES:
            hint = f"Pass float64, float32, bfloat16 or float16: {label}.float()."
            raise _Wrong(f"{label} has dtype {x.dtype}. {hint}")
        if query is not None and x.device != query.device:
            hint = f"Move them together: {label}.to(query.device)."
            raise _Wrong(f"{label} is on {x.device}, query on {query.device}. {hint}")


def _check_main(main: dict[str, Tensor]) -> None:
    """Check axes, dtypes, dimensions and heads of query, key and value."""
    query, key = main["query"], main["key"]
    for label, x in main.items():
        if x.dim() < 3:
            hint = f"Add the missing axes: {label}.unsqueeze(0)."
            raise _Wrong(f"{label} has shape {tuple(x.shape)}, but {_LAYOUT}. {hint}")
        if x.dtype != query.dtype:
            hint = f"Convert one of them: {label}.to(query.dtype)."
            raise _Wrong(f"{label} is {x.dtype}, query is {query.dtype}. {hint}")
    if query.shape[-1] == 0:
        raise _Wrong(f"query has shape {tuple(query.shape)}: its last axis is empty. {_LAYOUT}.")
    if query.shape[-1] != key.shape[-1]:
        hint = "Scores need the same last axis in both."
        raise _Wrong(f"query has dimension {query.shape[-1]}, key has {key.shape[-1]}. {hint}")
    Hq, Hkv = query.shape[-3], key.shape[-3]
    if Hkv == 0 or Hq == 0 or Hq % Hkv:
        hint = "The number of key heads must divide the number of query heads."
        raise _Wrong(f"query has {Hq} heads, key has {Hkv}. {hint}")
    for label, x in list(main.items())[2:]:
        if x.shape[-3] != Hkv:
            hint = f"Pass one {label} head for each key head."
            raise _Wrong(f"key has {Hkv} heads, {label} has {x.shape[-3]}. {hint}")
        if x.shape[-2] != key.shape[-2]:
            hint = "Both are (..., heads, length, dim); pass the same sequence to both."
            raise _Wrong(f"key has {key.shape[-2]} positions, {label} has {x.shape[-2]}. {hint}")


def _check_numbers(
    scale: float | None, window: int | None, softcap: float | None, backend: str | None
) -> None:
    for label, x in (("scale", scale), ("softcap", softcap)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x)):
            learned = isinstance(x, Tensor) and label == "scale"
            hint = " To learn a scale, multiply the query by it and pass scale=1.0." if learned else ""
            raise _Wrong(f"{label} is {x!r}. Pass a finite number or None.{hint}")
    if softcap is not None and softcap <= 0:
        hint = "but scores become c·tanh(s/c), which needs c > 0. Pass None for no cap."
        raise _Wrong(f"softcap is {softcap}, {hint}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        hint = "Pass how many keys a query sees back from its own place, an integer >= 0, or None for all."
        raise _Wrong(f"window is {window!r}. {hint}")
    if backend is not None and backend not in BACKENDS:
        hint = f"Pass one of {', '.join(BACKENDS)}, or None to choose by device and dtype."
        raise _Wrong(f"backend is {backend!r}. {hint}")


def _pairs(label: str, x: Tensor | None, full: tuple[int, ...]) -> Tensor | None:
    """A bias or mask with as many axes as full, (..., heads, queries, keys); axes of size 1 stay so."""
    if x is None:
        return None
    if x.dim() > len(full) or any(a not in (1, b) for a, b in zip(x.shape[::-1], full[::-1], strict=False)):
        wanted = f"(..., heads, queries, keys) = {full}. Add axes of size 1."
        raise _Wrong(f"{label} has shape {tuple(x.shape)}, which does not broadcast to {wanted}")
    return x if x.dim() == len(full) else x[(None,) * (len(full) - x.dim())]


def _expanded(label: str, x: Tensor | None, shape: tuple[int, ...], layout: str) -> Tensor | None:
    """log_weight or sink, expanded to `shape`."""
    if x is None or x.shape == shape:
        return x
    try:
        return x.expand(shape)
    except RuntimeError:
        wanted = f"{layout} = {shape}."
        raise _Wrong(f"{label} has shape {tuple(x.shape)}, which does not broadcast to {wanted}") from None


def _lead(main: dict[str, Tensor]) -> tuple[int, ...]:
    """The batch axes of a call."""
    leads = [x.shape[:-3] for x in main.values()]
    if all(lead == leads[0] for lead in leads):
        return tuple(leads[0])
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        shapes = ", ".join(f"{label} {tuple(x.shape)}" for label, x in main.items())
        hint = f"{_LAYOUT}; the axes before the heads must agree or be 1."
        raise _Wrong(f"batch axes do not match: {shapes}. {hint}") from None


def _padded(x: Tensor, lead: int) -> Tensor:
    """x with `lead` batch axes."""
    return x if x.dim() == lead + 3 else x[(None,) * (lead + 3 - x.dim())]


def _widened(x: Tensor | None, wide: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype == wide else x.to(wide)


def _as_autocast_does(dtype: torch.dtype, x: Any) -> Any:
    """An argument as autocast casts it: floating point other than float64 gets autocast's dtype."""
    eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if eligible else x


def prepare(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: float | None = None,
    log_weight: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    backend: str | None = None,
    check: bool | None = None,
    *,
    value_name: str = "value",
    autocast: bool = False,
) -> Call:
    """Check a call of `name` and bring it to canonical form.

    Args:
        name: for messages; the other arguments are those of `attend`.
        value_name: the caller's name for the value.
        autocast: whether query, key and value are cast under `torch.autocast`, as torch casts those of its
            own attention.
    """
    try:
        device = query.device.type if isinstance(query, Tensor) else "cpu"
        casting = isinstance(query, Tensor) and autocasts(query.device)
        if casting and autocast:
            dtype = torch.get_autocast_dtype(device)
            query, key, value = (_as_autocast_does(dtype, x) for x in (query, key, value))
        extra = {"bias": bias, "log_weight": log_weight, "sink": sink}
        _check_tensors({"query": query, "key": key, value_name: value, "mask": mask, **extra})
        main = {"query": query, "key": key}
        if value is not None:
            main[value_name] = value
        _check_main(main)
        _check_numbers(scale, window, softcap, backend)
        dtype = query.dtype
        wide = WIDE[dtype]
        for label, x in extra.items():
            if x is not None and x.dtype not in (dtype, wide) and not casting:
                hint = f"Convert one of them: {label}.to(query.dtype)."
                raise _Wrong(f"{label} is {x.dtype}, query is {dtype}. {hint}")
        value = key[..., :0] if value is None else value
        tracked = torch.compiler.is_compiling() or derivatives_wanted((query, key, value, *extra.values()))
        lead = _lead({"query": query, "key": key, value_name: value})
        chosen = backend or default_backend(query.device, dtype)
        # Widened here, so that gradients are added up over broadcast axes before they are rounded. Kernels of
        # a GPU multiply half precision as it is, and add up over the axes of keys and values themselves.
        if tracked and dtype != wide and (chosen != "gpu" or query.shape[:-3] != lead):
            query, key, value = query.to(wide), key.to(wide), value.to(wide)
        (Hq, Q), (Hkv, K) = query.shape[-3:-1], key.shape[-3:-1]
        inputs = Inputs(
            query if query.shape[:-3] == lead else query.expand(*lead, *query.shape[-3:]),
            _padded(key, len(lead)),
            _padded(value, len(lead)),
            _pairs("bias", _widened(bias, wide), (*lead, Hq, Q, K)),
            _expanded("log_weight", _widened(log_weight, wide), (*lead, Hkv, K), "(..., key heads, keys)"),
            _expanded("sink", _widened(sink, wide), (*lead, Hq), "(..., heads)"),
            _pairs("mask", mask, (*lead, Hq, Q, K)),
        )
        if chosen == "cpu" and device != "cpu":
            hint = "Pass backend='tiled' (any device) or None."
            raise _Wrong(f"backend is 'cpu', but query is on {query.device}. {hint}")
        if chosen == "gpu" and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            place = "the CPU" if device == "cpu" else query.device
            hint = "Move the tensors to a CUDA or ROCm GPU, or pass backend=None."
            raise _Wrong(f"backend is 'gpu', but query is on {place}. {hint}")
    except _Wrong as wrong:
        raise ArgumentError(f"{name}: {wrong}") from None
    rule = ScoreRule(
        1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        bool(causal),
        None if window is None or window >= max(Q, K) else window,  # nothing is farther than that
        None if softcap is None else float(softcap),
    )
    looked_at = device == "cpu" if check is None else bool(check)
    settings = Settings(rule, chosen, looked_at and device != "meta")  # meta tensors hold no numbers
    return Call(inputs, settings, dtype, casting, tracked)


_MOST = 4096  # kinds of calls that are remembered
_known: dict[Any, tuple[Settings, Any]] = {}  # settings, and the layout of the sweep


def prepare_again(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, options: tuple[Any, ...]
) -> Call:
    """The checked call of `prepare`, with autocast; a call like an earlier one is not checked again.

    `options` are scale, log_weight, bias, mask, causal, window, softcap, sink, backend and check.
    """
    scale, log_weight, bias, mask, causal, window, softcap, sink, backend, check = options
    found: Any = None
    if not torch.compiler.is_compiling():
        try:
            kind: list[Any] = []
            for x in (query, key, value, bias, log_weight, sink, mask):
                if x is None:
                    kind.append(None)
                else:
                    kind += x.__class__, x.shape, x.stride(), x.dtype, x.device
            tracked = derivatives_wanted((query, key, value, bias, log_weight, sink))
            kind += scale, scale.__class__, causal, window, window.__class__, softcap, softcap.__class__
            kind += backend, check, tracked, torch.get_num_threads()
            known = _known.get(found := tuple(kind))
        except (AttributeError, TypeError, RuntimeError):
            found = known = None  # a tensor without strides, or an option that is no number
        if known is not None and not autocasts(query.device):
            value = key[..., :0] if value is None else value
            t = Inputs(query, key, value, bias, log_weight, sink, mask)
            return Call(t, known[0], query.dtype, False, tracked, known[1])
    call = prepare(name, query, key, value, *options, autocast=True)
    given = query, key, call.inputs.value if value is None else value, bias, log_weight, sink, mask
    if found and not call.autocast and all(x is y for x, y in zip(call.inputs[:7], given, strict=True)):
        if len(_known) >= _MOST:
            _known.clear()
        direct = not tracked and sink is None and all(x is None or is_plain(x) for x in given)
        layout = forward_layout(call.inputs, call.settings.rule, call.settings.backend) if direct else None
        _known[found] = call.settings, layout
    return call
