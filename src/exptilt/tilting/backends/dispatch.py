"""Which backend runs a sweep, and what is said of numbers that are not finite."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError, BackendError
from exptilt.tilting.backends import tiled
from exptilt.tilting.problem import Inputs
from exptilt.tilting.score_rule import ScoreRule

_TRITON = (3, 6)  # as in pyproject.toml
BACKENDS = ("reference", "tiled", "cpu", "gpu")
_REGISTERED: dict[str, Any] = {}
_MODULES = {"cpu": "exptilt.tilting.backends.numba.launch", "gpu": "exptilt.tilting.backends.triton.launch"}


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """`cpu` on the CPU, `gpu` on CUDA where Triton is installed, `tiled` elsewhere and for float64 there."""
    if device.type == "cpu":
        return "cpu"
    return "gpu" if device.type == "cuda" and dtype != torch.float64 and _triton_fits() else "tiled"


@cache
def _triton_fits() -> bool:
    """Whether Triton is installed in a release that the kernel was checked with."""
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= _TRITON


def register(name: str, sweeps: Any) -> None:
    """Let `Settings.backend` name an object whose methods are the sweeps, over keys that are not all here.

    It also has `maximum_tangent` and `maximum_gradient`, as ``derivatives/identities.py`` has them.
    """
    _REGISTERED[name] = sweeps


def registered(backend: str) -> Any:
    """The object of that name, or None: then all keys are here."""
    return _REGISTERED.get(backend)


def refuse_higher(backend: str) -> None:
    """Raise where keys are not all here: derivatives of third order, and twice forward, need them."""
    if backend in _REGISTERED:
        raise BackendError(
            "attend: derivatives of third order (second ones of key_mass are), and forward derivatives of "
            "forward derivatives, are not known where queries and keys are sharded. For a second derivative "
            "take the forward derivative of a gradient, or the gradient of a gradient."
        )


def sweep(backend: str, name: str) -> Callable[..., Any]:
    """The function that does a sweep."""
    if backend in _REGISTERED:
        own: Callable[..., Any] = getattr(_REGISTERED[backend], name)
        return own
    found: Callable[..., Any] = getattr(
        import_module(_MODULES[backend]) if backend in _MODULES else tiled, name
    )
    return found


def forward(t: Inputs, rule: ScoreRule, backend: str, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The forward sweep; where `check`, a NaN or infinity that reaches a result raises an error."""
    found = sweep(backend, "forward")(t, rule)
    if len(found) == 5:  # the kernel has looked on its way
        output, lines, best, bad, blind = found
    else:
        output, lines, best = found
        bad, blind = (bool(lines[0].isnan().any()), True) if check else (False, False)
    if check:
        if bad:
            _explain(t)
        if blind:  # a query of infinities may have scores of −inf and nothing else
            _complain("query", t.query, ~torch.isfinite(t.query), "(batch, head, position, dim)")
    return output, lines, best


def check_sink(sink: Tensor) -> None:
    """Raise if a sink is NaN or +inf; −inf is no sink at all."""
    _complain("sink", sink, torch.isnan(sink) | (sink == torch.inf), "(batch, head)")


def _explain(t: Inputs) -> None:
    """Raise, and say why a log-normalizer is NaN: looking only now costs nothing where all is well."""
    for name, x in (("query", t.query), ("key", t.key)):
        _complain(name, x, ~torch.isfinite(x), "(batch, head, position, dim)")
    for name, plane, axes in (
        ("bias", t.bias, "(batch, head, query, key)"),
        ("log_weight", t.log_weight, "(batch, head, key)"),
    ):
        if plane is not None:
            _complain(name, plane, torch.isnan(plane) | (plane == torch.inf), axes)
    sizes = f"query up to {t.query.abs().max().item():.1e}, key up to {t.key.abs().max().item():.1e}"
    hint = "Make them smaller, or use a wider dtype. check=False skips this test."
    raise ArgumentError(f"attend: the scores overflow {t.query.dtype} ({sizes}). {hint}")


def _complain(name: str, x: Tensor, bad: Tensor, axes: str) -> None:
    if bad.any():
        what = "NaN" if torch.isnan(x).any() else "an infinity"
        place = torch.nonzero(bad)[0].tolist()
        advice = "Remove it, or hide that position with mask=; check=False skips this test."
        raise ArgumentError(f"attend: {name} holds {what}, first at {place} {axes}. {advice}")
