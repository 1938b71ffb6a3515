"""Arguments of attend and its kin: checked, with messages that say what to pass, and brought to the canonical form of ``problem.py``."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, KeywordError
from exptilt._support.transforms import derivatives_wanted
from exptilt.tilting.backends.dispatch import BACKENDS, default_backend
from exptilt.tilting.derivatives.rules import Settings
from exptilt.tilting.problem import Inputs, wide_dtype
from exptilt.tilting.score_rule import ScoreRule

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LAYOUT = "query is (..., heads, length, dim), key and value are (..., key heads, length, dim)"
_SDPA_NAMES = {
    "is_causal": "Write causal=True. For as many queries as keys it is the same; else causal aligns the ends of the two sequences "
    "(query i sees key j where j <= i + K − Q, as decoding needs), where is_causal aligns their beginnings (j <= i): "
    "for that, write mask=torch.ones(Q, K, dtype=torch.bool).tril().",
    "attn_mask": "A boolean mask, True where a query may see a key, goes to mask=; numbers that are added to the scores go to bias=.",
    "dropout_p": "There is no dropout here: drop entries of the value, or of the output.",
    "enable_gqa": "Leave it out: key heads that divide the query heads are shared without being asked for.",
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Call:
    """A checked call.

    Attributes:
        inputs: canonical.
        settings: the rule, the backend, whether results are checked.
        dtype: of the output.
        autocast: whether autocast must be kept out of what follows.
        tracked: whether anyone may ask for a derivative.
    """

    inputs: Inputs
    settings: Settings
    dtype: torch.dtype
    autocast: bool
    tracked: bool


def explain_keywords(function: Callable[..., Result]) -> Callable[..., Result]:
    """Say what to write instead of keywords of `scaled_dot_product_attention` that are called otherwise here."""

    @wraps(function)
    def explained(*arguments: Any, **keywords: Any) -> Result:
        for name in keywords:
            if name in _SDPA_NAMES:
                raise KeywordError(f"{function.__name__}: there is no {name}=. {_SDPA_NAMES[name]}")
        return function(*arguments, **keywords)

    return explained


def _fail(name: str, text: str) -> ArgumentError:
    return ArgumentError(f"{name}: {text}")


def _check_tensors(name: str, tensors: dict[str, Tensor | None]) -> None:
    for label, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise _fail(
                name, f"{label} is a {type(x).__name__}. Pass a torch tensor: torch.as_tensor({label})."
            )
        if label == "mask":
            if x.dtype != torch.bool:
                hint = (
                    "An additive mask goes to bias=."
                    if x.is_floating_point()
                    else "Pass mask.bool(), True where a query may see a key."
                )
                raise _fail(name, f"mask has dtype {x.dtype}, not torch.bool. {hint}")
        elif x.dtype not in _DTYPES:
            raise _fail(
                name,
                f"{label} has dtype {x.dtype}. Pass float64, float32, bfloat16 or float16: {label}.float().",
            )
        query = tensors["query"]
        if query is not None and x.device != query.device:
            raise _fail(
                name,
                f"{label} is on {x.device}, query on {query.device}. Move them together: {label}.to(query.device).",
            )


def _check_main(name: str, query: Tensor, key: Tensor, value: Tensor | None, value_name: str) -> None:
    pairs: list[tuple[str, Tensor]] = [("query", query), ("key", key)] + (
        [] if value is None else [(value_name, value)]
    )
    for label, x in pairs:
        if x.dim() < 3:
            raise _fail(
                name,
                f"{label} has shape {tuple(x.shape)}, but {_LAYOUT}. Add the missing axes: {label}.unsqueeze(0).",
            )
        if x.dtype != query.dtype:
            raise _fail(
                name,
                f"{label} is {x.dtype}, query is {query.dtype}. Convert one of them: {label}.to(query.dtype).",
            )
    if query.shape[-1] == 0:
        raise _fail(name, f"query has shape {tuple(query.shape)}: its last axis is empty. {_LAYOUT}.")
    if query.shape[-1] != key.shape[-1]:
        raise _fail(
            name,
            f"query has dimension {query.shape[-1]}, key has {key.shape[-1]}. Scores need the same last axis in both.",
        )
    Hq, Hkv = query.shape[-3], key.shape[-3]
    if Hkv == 0 or Hq == 0 or Hq % Hkv:
        raise _fail(
            name,
            f"query has {Hq} heads, key has {Hkv}. The number of key heads must divide the number of query heads.",
        )
    if value is not None:
        if value.shape[-3] != Hkv:
            raise _fail(
                name,
                f"key has {Hkv} heads, {value_name} has {value.shape[-3]}. Pass one {value_name} head for each key head.",
            )
        if value.shape[-2] != key.shape[-2]:
            text = f"key has {key.shape[-2]} positions, {value_name} has {value.shape[-2]}. "
            raise _fail(name, text + "Both are (..., heads, length, dim); pass the same sequence to both.")


def _check_numbers(
    name: str, scale: float | None, window: int | None, softcap: float | None, backend: str | None
) -> None:
    for label, x in (("scale", scale), ("softcap", softcap)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x)):
            hint = (
                " To learn a scale, multiply the query by it and pass scale=1.0."
                if isinstance(x, Tensor) and label == "scale"
                else ""
            )
            raise _fail(name, f"{label} is {x!r}. Pass a finite number or None.{hint}")
    if softcap is not None and softcap <= 0:
        raise _fail(
            name,
            f"softcap is {softcap}, but scores become c·tanh(s/c), which needs c > 0. Pass None for no cap.",
        )
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise _fail(
            name,
            f"window is {window!r}. Pass how many keys a query sees back from its own place, an integer >= 0, or None for all.",
        )
    if backend is not None and backend not in BACKENDS:
        raise _fail(
            name,
            f"backend is {backend!r}. Pass one of {', '.join(BACKENDS)}, or None to choose by device and dtype.",
        )


def _pairs(
    name: str, label: str, x: Tensor | None, lead: tuple[int, ...], Hq: int, Q: int, K: int
) -> Tensor | None:
    """A bias or mask with all batch axes, those of size 1 as they are."""
    if x is None:
        return None
    full = (*lead, Hq, Q, K)
    if x.dim() > len(full) or any(a not in (1, b) for a, b in zip(x.shape[::-1], full[::-1], strict=False)):
        shape = f"(..., heads, queries, keys) = {full}"
        raise _fail(
            name,
            f"{label} has shape {tuple(x.shape)}, which does not broadcast to {shape}. Add axes of size 1.",
        )
    return x if x.dim() == len(full) else x[(None,) * (len(full) - x.dim())]


def _expanded(name: str, label: str, x: Tensor | None, shape: tuple[int, ...], layout: str) -> Tensor | None:
    """log_weight or sink, with all axes."""
    if x is None or x.shape == shape:
        return x
    try:
        return x.expand(shape)
    except RuntimeError:
        raise _fail(
            name, f"{label} has shape {tuple(x.shape)}, which does not broadcast to {layout} = {shape}."
        ) from None


def _lead(name: str, query: Tensor, key: Tensor, value: Tensor, value_name: str) -> tuple[int, ...]:
    """The batch axes of a call."""
    leads = [x.shape[:-3] for x in (query, key, value)]
    if leads[0] == leads[1] == leads[2]:
        return tuple(leads[0])
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        shapes = ", ".join(
            f"{label} {tuple(x.shape)}" for label, x in (("query", query), ("key", key), (value_name, value))
        )
        raise _fail(
            name,
            f"batch axes do not match: {shapes}. {_LAYOUT}; the axes before the heads must agree or be 1.",
        ) from None


def _padded(x: Tensor, lead: int) -> Tensor:
    """With so many batch axes."""
    return x if x.dim() == lead + 3 else x[(None,) * (lead + 3 - x.dim())]


def _widened(x: Tensor | None, wide: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype == wide else x.to(wide)


def _as_autocast_does(dtype: torch.dtype, x: Any) -> Any:
    """What autocast makes of an argument of `scaled_dot_product_attention`: floating point other than float64 gets its dtype."""
    eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if eligible else x


def prepare(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
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
    value_name: str = "value",
    autocast: bool = False,
) -> Call:
    """Check a call of `name` and bring it to canonical form.

    Args:
        name: for messages; the other arguments are those of `attend`.
        value_name: what the caller calls the value.
        autocast: whether query, key and value are cast under `torch.autocast`, as torch casts those of its own attention.
    """
    device = query.device.type if isinstance(query, Tensor) else "cpu"
    casting = torch.is_autocast_enabled(device)
    if casting and autocast:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (_as_autocast_does(dtype, x) for x in (query, key, value))
    tensors = {
        "query": query,
        "key": key,
        value_name: value,
        "bias": bias,
        "mask": mask,
        "log_weight": log_weight,
        "sink": sink,
    }
    _check_tensors(name, tensors)
    _check_main(name, query, key, value, value_name)
    _check_numbers(name, scale, window, softcap, backend)
    dtype = query.dtype
    wide = wide_dtype(dtype)
    for label, x in (("bias", bias), ("log_weight", log_weight), ("sink", sink)):
        if x is not None and x.dtype not in (dtype, wide) and not casting:
            raise _fail(
                name, f"{label} is {x.dtype}, query is {dtype}. Convert one of them: {label}.to(query.dtype)."
            )
    if value is None:
        value = key[..., :0]
    tracked = torch.compiler.is_compiling() or derivatives_wanted((query, key, value, bias, log_weight, sink))
    if (
        tracked and dtype != wide
    ):  # here, so that gradients are added up over broadcast axes before they are rounded
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    lead = _lead(name, query, key, value, value_name)
    (Hq, Q), (Hkv, K) = query.shape[-3:-1], key.shape[-3:-1]

    inputs = Inputs(
        query if query.shape[:-3] == lead else query.expand(*lead, *query.shape[-3:]),
        _padded(key, len(lead)),
        _padded(value, len(lead)),
        _pairs(name, "bias", _widened(bias, wide), lead, Hq, Q, K),
        _expanded(name, "log_weight", _widened(log_weight, wide), (*lead, Hkv, K), "(..., key heads, keys)"),
        _expanded(name, "sink", _widened(sink, wide), (*lead, Hq), "(..., heads)"),
        _pairs(name, "mask", mask, lead, Hq, Q, K),
    )
    chosen = backend or default_backend(query.device, dtype)
    if chosen == "cpu" and device != "cpu":
        raise _fail(
            name,
            f"backend is 'cpu', but query is on {query.device}. Pass backend='tiled' (any device) or None.",
        )
    if chosen == "gpu":
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise _fail(
                name,
                "backend is 'gpu', but query is on the CPU. Move the tensors to a GPU, or pass backend=None.",
            )
        inputs = inputs._replace(
            query=inputs.query.to(wide), key=inputs.key.to(wide), value=inputs.value.to(wide)
        )
    rule = ScoreRule(
        1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        bool(causal),
        None if window is None or window >= max(Q, K) else window,  # nothing is farther than that
        None if softcap is None else float(softcap),
    )
    return Call(
        inputs,
        Settings(rule, chosen, device == "cpu" if check is None else bool(check)),
        dtype,
        casting,
        tracked,
    )
