"""Arguments of attend and its kin: checked, with messages that say what to pass, and brought to the canonical form of ``problem.py``."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt.tilting.operators import BACKENDS, default_backend
from exptilt.tilting.problem import Options

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LAYOUT = "query is (..., heads, length, dim), key and value are (..., key heads, length, dim)"


@dataclass(frozen=True)
class Call:
    """A checked call: canonical inputs (query, key, value, bias, log_weight, sink, mask), options, and how to shape the results."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    options: Options
    backend: str
    check: bool
    lead: tuple[int, ...]
    dtype: torch.dtype

    def flat(self, x: Tensor) -> Tensor:
        """(..., heads, length, dim) → (N, heads, length, dim), in the dtype sums are taken in."""
        return x.to(self.inputs[0].dtype).expand(*self.lead, *x.shape[-3:]).reshape(math.prod(self.lead), *x.shape[-3:])

    def restore(self, x: Tensor) -> Tensor:
        """(N, ...) → (*lead, ...)."""
        return x if len(self.lead) == 1 else x.unflatten(0, self.lead) if self.lead else x.squeeze(0)


def _fail(name: str, text: str) -> ArgumentError:
    return ArgumentError(f"{name}: {text}")


def _check_tensors(name: str, tensors: dict[str, Tensor | None]) -> None:
    for label, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise _fail(name, f"{label} is a {type(x).__name__}. Pass a torch tensor: torch.as_tensor({label}).")
        if label == "mask":
            if x.dtype != torch.bool:
                hint = "An additive mask goes to bias=." if x.is_floating_point() else "Pass mask.bool(), True where a query may see a key."
                raise _fail(name, f"mask has dtype {x.dtype}, not torch.bool. {hint}")
        elif x.dtype not in _DTYPES:
            raise _fail(name, f"{label} has dtype {x.dtype}. Pass float64, float32, bfloat16 or float16: {label}.float().")
        query = tensors["query"]
        if query is not None and x.device != query.device:
            raise _fail(name, f"{label} is on {x.device}, query on {query.device}. Move them together: {label}.to(query.device).")


def _check_main(name: str, query: Tensor, key: Tensor, value: Tensor | None, value_name: str) -> None:
    pairs: list[tuple[str, Tensor]] = [("query", query), ("key", key)] + ([] if value is None else [(value_name, value)])
    for label, x in pairs:
        if x.dim() < 3:
            raise _fail(name, f"{label} has shape {tuple(x.shape)}, but {_LAYOUT}. Add the missing axes: {label}.unsqueeze(0).")
        if x.dtype != query.dtype:
            raise _fail(name, f"{label} is {x.dtype}, query is {query.dtype}. Convert one of them: {label}.to(query.dtype).")
    if query.shape[-1] == 0:
        raise _fail(name, f"query has shape {tuple(query.shape)}: its last axis is empty. {_LAYOUT}.")
    if query.shape[-1] != key.shape[-1]:
        raise _fail(name, f"query has dimension {query.shape[-1]}, key has {key.shape[-1]}. Scores need the same last axis in both.")
    Hq, Hkv = query.shape[-3], key.shape[-3]
    if Hkv == 0 or Hq == 0 or Hq % Hkv:
        raise _fail(name, f"query has {Hq} heads, key has {Hkv}. The number of key heads must divide the number of query heads.")
    if value is not None:
        if value.shape[-3] != Hkv:
            raise _fail(name, f"key has {Hkv} heads, {value_name} has {value.shape[-3]}. Pass one {value_name} head for each key head.")
        if value.shape[-2] != key.shape[-2]:
            raise _fail(
                name, f"key has {key.shape[-2]} positions, {value_name} has {value.shape[-2]}. "
                "Both are (..., heads, length, dim); pass the same sequence to both.",
            )  # fmt: skip


def _check_numbers(name: str, scale: float | None, window: int | None, softcap: float | None, backend: str | None) -> None:
    for label, x in (("scale", scale), ("softcap", softcap)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x)):
            hint = " To learn a scale, multiply the query by it and pass scale=1.0." if isinstance(x, Tensor) and label == "scale" else ""
            raise _fail(name, f"{label} is {x!r}. Pass a finite number or None.{hint}")
    if softcap is not None and softcap <= 0:
        raise _fail(name, f"softcap is {softcap}, but scores become c·tanh(s/c), which needs c > 0. Pass None for no cap.")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise _fail(
            name, f"window is {window!r}. Pass how many keys a query sees back from its own place, an integer >= 0, or None for all."
        )
    if backend is not None and backend not in BACKENDS:
        raise _fail(name, f"backend is {backend!r}. Pass one of {', '.join(BACKENDS)}, or None to choose by device and dtype.")


def _broadcast_pairs(name: str, label: str, x: Tensor | None, lead: tuple[int, ...], Hq: int, Q: int, K: int) -> Tensor | None:
    """A bias or mask as (N or 1, Hq or 1, Q or 1, K or 1)."""
    if x is None:
        return None
    full = (*lead, Hq, Q, K)
    fits = x.dim() <= len(full) and all(a in (1, b) for a, b in zip(x.shape[::-1], full[::-1], strict=False))
    if not fits:
        raise _fail(
            name,
            f"{label} has shape {tuple(x.shape)}, which does not broadcast to (..., heads, queries, keys) = {full}. Add axes of size 1.",
        )
    x = x.reshape((1,) * (len(full) - x.dim()) + tuple(x.shape))
    if all(a == 1 for a in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def _broadcast_to(name: str, label: str, x: Tensor | None, shape: tuple[int, ...], layout: str, N: int) -> Tensor | None:
    """log_weight or sink expanded to (*lead, ...) and flattened to (N, ...)."""
    if x is None:
        return None
    try:
        x = x.expand(shape)
    except RuntimeError:
        raise _fail(name, f"{label} has shape {tuple(x.shape)}, which does not broadcast to {layout} = {shape}.") from None
    return x.reshape(N, *shape[-(2 if label == "log_weight" else 1) :])


def prepare(
    name: str, query: Tensor, key: Tensor, value: Tensor | None, *, scale: float | None, log_weight: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, causal: bool, window: int | None, softcap: float | None, sink: Tensor | None, backend: str | None,
    check: bool | None, value_name: str = "value",
) -> Call:  # fmt: skip
    """Check a call of `name` and bring it to canonical form.

    Half precision is widened to float32 here, so all sums are taken in float32.
    """
    tensors = {"query": query, "key": key, value_name: value, "bias": bias, "mask": mask, "log_weight": log_weight, "sink": sink}
    _check_tensors(name, tensors)
    _check_main(name, query, key, value, value_name)
    _check_numbers(name, scale, window, softcap, backend)
    leads = [tuple(x.shape[:-3]) for x in (query, key, value) if x is not None]
    try:
        lead = leads[0] if all(x == leads[0] for x in leads) else tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        shapes = ", ".join(
            f"{label} {tuple(x.shape)}" for label, x in (("query", query), ("key", key), (value_name, value)) if x is not None
        )
        raise _fail(name, f"batch axes do not match: {shapes}. {_LAYOUT}; the axes before the heads must agree or be 1.") from None
    dtype = query.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    N, (Hq, Q), (Hkv, K) = math.prod(lead), query.shape[-3:-1], key.shape[-3:-1]
    for label, x in (("bias", bias), ("log_weight", log_weight), ("sink", sink)):
        if x is not None and x.dtype not in (dtype, wide):
            raise _fail(name, f"{label} is {x.dtype}, query is {dtype}. Convert one of them: {label}.to(query.dtype).")

    def flat(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[:-3] == lead:
            return x.to(wide)
        return x.to(wide).expand(*lead, *x.shape[-3:]).reshape(N, *x.shape[-3:])

    def widened(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(wide)

    key_flat = flat(key)
    value_flat = key_flat[..., :0] if value is None else flat(value)
    chosen = backend or default_backend(query.device, wide)
    if chosen == "cpu" and query.device.type != "cpu":
        raise _fail(name, f"backend is 'cpu', but query is on {query.device}. Pass backend='tiled' (any device) or None.")
    if chosen == "gpu" and query.device.type == "cpu" and not _triton_interprets():
        raise _fail(name, "backend is 'gpu', but query is on the CPU. Move the tensors to a GPU, or pass backend=None.")
    inputs = (
        flat(query), key_flat, value_flat,
        _broadcast_pairs(name, "bias", widened(bias), lead, Hq, Q, K),
        _broadcast_to(name, "log_weight", widened(log_weight), (*lead, Hkv, K), "(..., key heads, keys)", N),
        _broadcast_to(name, "sink", widened(sink), (*lead, Hq), "(..., heads)", N),
        _broadcast_pairs(name, "mask", mask, lead, Hq, Q, K),
    )  # fmt: skip
    options = Options(
        1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        bool(causal),
        window,
        None if softcap is None else float(softcap),
    )
    on_cpu = query.device.type == "cpu"
    return Call(inputs, options, chosen, on_cpu if check is None else bool(check), lead, dtype)


def _triton_interprets() -> bool:
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"
