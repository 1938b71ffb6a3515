"""The four sweeps as torch operators, so that compiled graphs can hold them; each call goes to a backend.

    exptilt::forward    output, statistics, where the maximum is
    exptilt::tangent    sums of the forward derivative
    exptilt::gradient   a cotangent carried back
    exptilt::second     the gradient of a forward derivative

They know no derivatives themselves (``rules.py`` does) and take canonical tensors (``problem.py``). What a backend does not implement goes to
``tiled``, which is said once.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.tilting import tiled
from exptilt.tilting.problem import Gradients, Needs, Options, Tensors

BACKENDS = ("reference", "tiled", "cpu", "gpu")


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """`cpu` for float32 and float64 on the CPU, `gpu` on CUDA where Triton is installed, `tiled` elsewhere."""
    if device.type == "cpu" and dtype in (torch.float32, torch.float64):
        return "cpu"
    if device.type == "cuda" and dtype == torch.float32:
        from importlib.util import find_spec  # noqa: PLC0415

        return "gpu" if find_spec("triton") else "tiled"
    return "tiled"


@cache
def _say_once(backend: str, sweep: str) -> None:
    text = f"the {backend!r} backend has no {sweep} sweep; 'tiled' does it instead (same numbers, plain torch)"
    warnings.warn(text, ExptiltWarning, stacklevel=2)


def _backend(name: str, sweep: str) -> Callable[..., object]:
    module: ModuleType = tiled
    if name == "cpu":
        from exptilt.tilting.cpu import launch as module  # noqa: PLC0415
    elif name == "gpu":
        from exptilt.tilting import gpu as module  # noqa: PLC0415
    if not hasattr(module, sweep):
        _say_once(name, sweep)
        module = tiled
    return getattr(module, sweep)  # type: ignore[no-any-return]


def check_finite(name: str, x: Tensor) -> None:
    """Raise if x holds NaN or an infinity; one pass over x, a second only if its sum is not finite."""
    if x.numel() and not torch.isfinite(x.sum()) and not torch.isfinite(x).all():
        what = "NaN" if torch.isnan(x).any() else "an infinity"
        place = torch.nonzero(~torch.isfinite(x))[0].tolist()
        raise ArgumentError(
            f"attend: {name} holds {what}, first at {place} (batch, head, position, dim). Remove it, or hide that position with mask=; "
            "check=False skips this test."
        )


@torch.library.custom_op("exptilt::forward", mutates_args=())
def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None,
    scale: float, causal: bool, window: int | None, softcap: float | None, backend: str, check: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """output (N, Hq, Q, Dv), statistics (5, N, Hq, Q), where the maximum is (N, Hq, Q)."""
    if check:
        check_finite("query", query)
        check_finite("key", key)
    t = Tensors(query, key, value, bias, log_weight, mask)
    return _backend(backend, "forward")(t, Options(scale, causal, window, softcap))  # type: ignore[return-value]


@forward.register_fake
def _(query, key, value, bias, log_weight, mask, scale, causal, window, softcap, backend, check):  # type: ignore[no-untyped-def]
    rows = query.shape[:3]
    best = query.new_empty(rows, dtype=torch.int64)
    return query.new_empty((*rows, value.shape[3])), query.new_empty((5, *rows)), best


@torch.library.custom_op("exptilt::tangent", mutates_args=())
def tangent(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None,
    query_tangent: Tensor | None, key_tangent: Tensor | None, value_tangent: Tensor | None, bias_tangent: Tensor | None,
    weight_tangent: Tensor | None, rows: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ p (ṡ' v + v̇) (N, Hq, Q, Dv) and sums (4, N, Hq, Q)."""
    t = Tensors(query, key, value, bias, log_weight, mask)
    tangents = Tensors(query_tangent, key_tangent, value_tangent, bias_tangent, weight_tangent)  # type: ignore[arg-type]
    return _backend(backend, "tangent")(t, tangents, rows, Options(scale, causal, window, softcap))  # type: ignore[return-value]


@tangent.register_fake
def _(query, key, value, bias, log_weight, mask, q, k, v, b, w, rows, scale, causal, window, softcap, backend):  # type: ignore[no-untyped-def]
    shape = query.shape[:3]
    return query.new_empty((*shape, value.shape[3])), query.new_empty((4, *shape))


def _fake_gradients(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    wanted = Needs(*needs)
    full = wanted.bias and bias is not None and bias.shape[2] > 1 and bias.shape[3] > 1
    return (
        query.new_empty(query.shape if wanted.query else 0),
        query.new_empty(key.shape if wanted.key else 0),
        query.new_empty(value.shape if wanted.value else 0),
        query.new_empty((*query.shape[:2], key.shape[2]) if wanted.log_weight else 0),
        query.new_empty(query.shape[:3]),
        query.new_empty(bias.shape if full and bias is not None else 0),
    )


def _flat(gradients: Gradients, needs: Needs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients with what was not asked for as tensors of shape (0,)."""
    none = gradients.row_sum.new_empty(0)
    wanted = (needs.query, needs.key, needs.value, needs.log_weight, True, gradients.bias.numel() > 0)
    return tuple(x if w else none.clone() for x, w in zip(gradients, wanted, strict=True))  # type: ignore[return-value]


@torch.library.custom_op("exptilt::gradient", mutates_args=())
def gradient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None,
    cotangent: Tensor, rows: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, wanted = Tensors(query, key, value, bias, log_weight, mask), Needs(*needs)
    found = _backend(backend, "gradient")(t, cotangent, rows, Options(scale, causal, window, softcap), wanted)
    return _flat(found, wanted)  # type: ignore[arg-type]


@gradient.register_fake
def _(query, key, value, bias, log_weight, mask, cotangent, rows, scale, causal, window, softcap, backend, needs):  # type: ignore[no-untyped-def]
    return _fake_gradients(query, key, value, bias, needs)


@torch.library.custom_op("exptilt::second", mutates_args=())
def second(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None, cotangent: Tensor,
    query_tangent: Tensor | None, key_tangent: Tensor | None, value_tangent: Tensor | None, bias_tangent: Tensor | None,
    weight_tangent: Tensor | None, rows: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, wanted = Tensors(query, key, value, bias, log_weight, mask), Needs(*needs)
    tangents = Tensors(query_tangent, key_tangent, value_tangent, bias_tangent, weight_tangent)  # type: ignore[arg-type]
    found = _backend(backend, "second")(t, cotangent, tangents, rows, Options(scale, causal, window, softcap), wanted)
    return _flat(found, wanted)  # type: ignore[arg-type]


@second.register_fake
def _(query, key, value, bias, log_weight, mask, cotangent, q, k, v, b, w, rows, scale, causal, window, softcap, backend, needs):  # type: ignore[no-untyped-def]
    return _fake_gradients(query, key, value, bias, needs)
