"""The choice of the backend that runs a sweep, and the three sweeps.

    forward    output, lines, where the maximum is
    tangent    sums of the forward derivative
    gradient   a cotangent of the output, or of its forward derivative, carried back

Each takes canonical tensors (``problem.py``) as `Inputs`, then arguments of its own, then the score rule and
the backend's name. None of them has derivatives: ``derivatives/rules.py`` does. The forward sweep also raises
the errors for numbers that are not finite. Tensors without numbers of their own, as in a graph that is traced
or a batch of gradients, go through the sweeps in plain torch.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from exptilt._support import native
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.transforms import is_plain, not_traced
from exptilt.tilting.backends import tiled
from exptilt.tilting.problem import Gradients, Inputs, InputTangents, Needs
from exptilt.tilting.score_rule import ScoreRule

_TRITON = (3, 6), (3, 9)  # first (as in pyproject.toml) and last release that the kernels are written for
_CAPABILITY = (8, 0)
BACKENDS = ("reference", "tiled", "cpu", "gpu")
_MODULES = {"cpu": "exptilt.tilting.backends.cpu", "gpu": "exptilt.tilting.backends.triton.launch"}


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """`cpu` on the CPU where the compiled core is, `gpu` on CUDA where its kernels run, else `tiled`.

    On CUDA float64 is `tiled` too.
    """
    if device.type == "cpu":
        return "cpu" if _core_runs() else "tiled"
    return (
        "gpu" if device.type == "cuda" and dtype != torch.float64 and _kernels_run(device.index) else "tiled"
    )


@not_traced
def _core_runs() -> bool:
    """Whether the compiled core is there; if not, one warning says why and what to do."""
    return _core_looked_up()


@cache
def _core_looked_up() -> bool:
    why = native.obstacle()
    if why:
        text = "attention runs in plain torch (backend='tiled'), several times slower: "
        warnings.warn(text + why, ExptiltWarning, stacklevel=2)
    return not why


@not_traced
def _kernels_run(index: int | None) -> bool:
    """Whether the Triton kernels run on this GPU; the compiler does not trace this."""
    return _looked_up(index)


@cache
def _looked_up(index: int | None) -> bool:
    """Whether the Triton kernels run; if not, one warning says why and what to do."""
    why = _obstacle(index)
    if why:
        text = "attention on this GPU runs in plain torch (backend='tiled'), not in Triton kernels: "
        warnings.warn(text + why, ExptiltWarning, stacklevel=2)
    return not why


def _obstacle(index: int | None) -> str:
    """Why the kernels cannot run on a GPU; an empty text if they can."""
    checked = f"{'.'.join(map(str, _TRITON[0]))} to {'.'.join(map(str, _TRITON[1]))}"
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed. Install it with: pip install 'exptilt[gpu]'"
    if not _TRITON[0] <= tuple(map(int, found.split(".")[:2])) <= _TRITON[1]:
        return (
            f"they are written for Triton {checked}; {found} is installed, with torch {torch.__version__}. "
            "Install one of those, or pass backend='gpu' to use the kernels all the same."
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < _CAPABILITY:
        own = ".".join(map(str, capability))
        return f"they need compute capability 8.0 (A100 and later), and this GPU has {own}."
    return ""


@cache
def _module(backend: str) -> Any:
    return import_module(_MODULES[backend]) if backend in _MODULES else tiled


def sweep(backend: str, name: str) -> Callable[..., Any]:
    """The backend's function for the sweep `name`."""
    found: Callable[..., Any] = getattr(_module(backend), name)
    return found


def forward_layout(t: Inputs, rule: ScoreRule, backend: str) -> Any:
    """The layout of the compiled forward sweep, if it may run on these tensors directly; else None."""
    return _module("cpu").forward_layout(t, rule) if backend == "cpu" else None


def forward(
    t: Inputs, rule: ScoreRule, backend: str, check: bool, layout: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward sweep; with `check`, a NaN or infinity that reaches a result raises an error.

    With a `layout` of `forward_layout`, the place of the maximum is None. Traced tensors are not checked.
    """
    if layout is not None:
        found = _module("cpu").forward(t, rule, layout)
    else:
        usable, t = _usable(backend, t), _without_sink(t)
        check, found = check and usable == backend, sweep(usable, "forward")(t, rule)
    if len(found) == 5:  # the kernel has checked already
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
    """Raise if a sink is NaN or +inf; −inf means no sink."""
    _complain("sink", sink, torch.isnan(sink) | (sink == torch.inf), "(batch, head)")


def _explain(t: Inputs) -> None:
    """Raise an error that says why a log-normalizer is NaN; good calls do not pay for this search."""
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


def tangent(
    t: Inputs, dots: InputTangents, output: Tensor, rows: Tensor, rule: ScoreRule, backend: str
) -> tuple[Tensor, Tensor]:
    """Σ p (ṡ' v + v̇) (..., Hq, Q, Dv) and the four sums, stacked."""
    backend = _usable(backend, t, dots, output, rows)
    found: tuple[Tensor, Tensor] = sweep(backend, "tangent")(_without_sink(t), dots, rows, rule, output)
    return found


def gradient(
    t: Inputs,
    cotangent: Tensor,
    output: Tensor,
    rows: Tensor,
    rule: ScoreRule,
    backend: str,
    needs: Needs,
    dots: InputTangents | None = None,
    output_dot: Tensor | None = None,
) -> Gradients:
    """The gradients, of shape (0,) where not needed; with `dots` those of a tangent."""
    given = _without_sink(t), cotangent, output, rows, rule, needs, dots, output_dot
    found = sweep(_usable(backend, *given), "gradient")(*given)
    none = found.row_sum.new_empty(0)
    return Gradients(*(x if w else none.clone() for x, w in zip(found, needs[:6], strict=True)))


def _without_sink(t: Inputs) -> Inputs:
    """The inputs without the sink, whose share ``identities.py`` adds."""
    return t if t.sink is None else t._replace(sink=None)


def _usable(backend: str, *given: Any) -> str:
    """The backend's name, or "tiled" where a tensor is not an ordinary one."""
    return backend if all_plain(given) else "tiled"


def all_plain(given: Iterable[Any]) -> bool:
    """Whether all tensors are ordinary ones."""
    for x in given:
        kind = x.__class__
        if kind is Inputs or kind is InputTangents:
            if not all_plain(x):
                return False
        elif isinstance(x, Tensor) and not is_plain(x):
            return False
    return True
