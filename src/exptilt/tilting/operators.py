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
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt.tilting import tiled
from exptilt.tilting.problem import Gradients, Needs, Options, Tensors, has_full_bias

BACKENDS = ("reference", "tiled", "cpu", "gpu")


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """`cpu` for float32 and float64 on the CPU, `gpu` on CUDA where Triton is installed, `tiled` elsewhere."""
    if device.type == "cpu" and dtype in (torch.float32, torch.float64):
        return "cpu"
    if device.type == "cuda" and dtype == torch.float32:
        from importlib.util import find_spec

        return "gpu" if find_spec("triton") else "tiled"
    return "tiled"


@cache
def _say_once(backend: str, sweep: str) -> None:
    text = f"the {backend!r} backend has no {sweep} sweep; 'tiled' does it instead (same numbers, plain torch)"
    warnings.warn(text, ExptiltWarning, stacklevel=2)


def _backend(name: str, sweep: str) -> Callable[..., Any]:
    module: ModuleType = tiled
    if name == "cpu":
        from exptilt.tilting.cpu import launch as module
    elif name == "gpu":
        from exptilt.tilting import gpu as module
    if not hasattr(module, sweep):
        _say_once(name, sweep)
        module = tiled
    return getattr(module, sweep)  # type: ignore[no-any-return]


def _check_query(query: Tensor) -> None:
    """Raise if the query holds NaN or an infinity; its sum tells, and only if that is not finite is it searched."""
    if query.numel() and not torch.isfinite(query.sum()):
        _complain("query", query, ~torch.isfinite(query), "(batch, head, position, dim)")


def _check_result(t: Tensors, log_normalizer: Tensor) -> None:
    """Raise if a log-normalizer is NaN, and say why: looking here costs nothing, whereas the keys are many. A NaN that no query sees does no harm."""
    if not torch.isnan(log_normalizer).any():
        return
    _complain("key", t.key, ~torch.isfinite(t.key), "(batch, head, position, dim)")
    for name, x, axes in (("bias", t.bias, "(batch, head, query, key)"), ("log_weight", t.log_weight, "(batch, head, key)")):
        if x is not None:
            _complain(name, x, torch.isnan(x) | (x == torch.inf), axes)
    sizes = f"query up to {t.query.abs().max().item():.1e}, key up to {t.key.abs().max().item():.1e}"
    raise ArgumentError(f"attend: the scores overflow {t.query.dtype} ({sizes}). Make them smaller, or use a wider dtype. check=False skips this test.")


def _complain(name: str, x: Tensor, bad: Tensor, axes: str) -> None:
    if bad.any():
        what = "NaN" if torch.isnan(x).any() else "an infinity"
        place = torch.nonzero(bad)[0].tolist()
        raise ArgumentError(
            f"attend: {name} holds {what}, first at {place} {axes}. Remove it, or hide that position with mask=; check=False skips this test."
        )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None,
    scale: float, causal: bool, window: int | None, softcap: float | None, backend: str, check: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (N, Hq, Q, Dv), statistics (5, N, Hq, Q), where the maximum is (N, Hq, Q)."""
    if check:
        _check_query(query)
    t = Tensors(query, key, value, bias, log_weight, mask)
    output, statistics, best = _backend(backend, "forward")(t, Options(scale, causal, window, softcap))
    if check:
        _check_result(t, statistics[0])
    return output, statistics, best


forward_operator = torch.library.custom_op("exptilt::forward", _forward, mutates_args=())


@forward_operator.register_fake
def _(query, key, value, bias, log_weight, mask, scale, causal, window, softcap, backend, check):  # type: ignore[no-untyped-def]
    rows = query.shape[:3]
    best = query.new_empty(rows, dtype=torch.int64)
    return query.new_empty((*rows, value.shape[3])), query.new_empty((5, *rows)), best


def _tangent(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None,
    query_tangent: Tensor | None, key_tangent: Tensor | None, value_tangent: Tensor | None, bias_tangent: Tensor | None,
    weight_tangent: Tensor | None, rows: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ p (ṡ' v + v̇) (N, Hq, Q, Dv) and sums (4, N, Hq, Q)."""
    t = Tensors(query, key, value, bias, log_weight, mask)
    tangents = Tensors(query_tangent, key_tangent, value_tangent, bias_tangent, weight_tangent)  # type: ignore[arg-type]
    return _backend(backend, "tangent")(t, tangents, rows, Options(scale, causal, window, softcap))  # type: ignore[return-value]


tangent_operator = torch.library.custom_op("exptilt::tangent", _tangent, mutates_args=())


@tangent_operator.register_fake
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


def _flat(gradients: Gradients, t: Tensors, needs: Needs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients with what was not asked for as tensors of shape (0,)."""
    none = gradients.row_sum.new_empty(0)
    wanted = (needs.query, needs.key, needs.value, needs.log_weight, True, needs.bias and has_full_bias(t))
    return tuple(x if w else none.clone() for x, w in zip(gradients, wanted, strict=True))  # type: ignore[return-value]


def _gradient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None,
    cotangent: Tensor, rows: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, wanted = Tensors(query, key, value, bias, log_weight, mask), Needs(*needs)
    found = _backend(backend, "gradient")(t, cotangent, rows, Options(scale, causal, window, softcap), wanted)
    return _flat(found, t, wanted)  # type: ignore[arg-type]


gradient_operator = torch.library.custom_op("exptilt::gradient", _gradient, mutates_args=())


@gradient_operator.register_fake
def _(query, key, value, bias, log_weight, mask, cotangent, rows, scale, causal, window, softcap, backend, needs):  # type: ignore[no-untyped-def]
    return _fake_gradients(query, key, value, bias, needs)


def _second(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, log_weight: Tensor | None, mask: Tensor | None, cotangent: Tensor,
    query_tangent: Tensor | None, key_tangent: Tensor | None, value_tangent: Tensor | None, bias_tangent: Tensor | None,
    weight_tangent: Tensor | None, rows: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None, backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The members of `Gradients`, of shape (0,) where not needed."""
    t, wanted = Tensors(query, key, value, bias, log_weight, mask), Needs(*needs)
    tangents = Tensors(query_tangent, key_tangent, value_tangent, bias_tangent, weight_tangent)  # type: ignore[arg-type]
    found = _backend(backend, "second")(t, cotangent, tangents, rows, Options(scale, causal, window, softcap), wanted)
    return _flat(found, t, wanted)  # type: ignore[arg-type]


second_operator = torch.library.custom_op("exptilt::second", _second, mutates_args=())


@second_operator.register_fake
def _(query, key, value, bias, log_weight, mask, cotangent, q, k, v, b, w, rows, scale, causal, window, softcap, backend, needs):  # type: ignore[no-untyped-def]
    return _fake_gradients(query, key, value, bias, needs)


def _when_traced(operator: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The operator where a graph is being traced (tensors are of a subclass then), the plain function, which costs less, elsewhere."""

    @wraps(plain)
    def call(query: Tensor, *rest: Any) -> Any:
        return (plain if type(query) in (Tensor, Parameter) else operator)(query, *rest)

    return call


forward = _when_traced(forward_operator, _forward)
tangent = _when_traced(tangent_operator, _tangent)
gradient = _when_traced(gradient_operator, _gradient)
second = _when_traced(second_operator, _second)
