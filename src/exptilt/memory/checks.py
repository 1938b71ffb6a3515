"""What a memory asks of patterns, beta and states, and how it says what is wrong."""

import math
import warnings
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete

if TYPE_CHECKING:
    from exptilt.memory.hopfield import Hopfield

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_count(what: str, name: str, value: Any, *, hint: str = "Pass an integer >= 1.") -> None:
    """A number of things is an integer, at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ArgumentError(f"{what}: {name} is {value!r}. {hint}")


def as_tensor(patterns: Any) -> Tensor:
    """A tensor, or a numpy array as a tensor that shares its memory."""
    if isinstance(patterns, np.ndarray):
        with (
            warnings.catch_warnings()
        ):  # torch warns of arrays that may not be written to; nobody writes to them here
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            try:
                return torch.from_numpy(patterns)
            except (TypeError, ValueError) as problem:
                raise ArgumentError(
                    f"Hopfield: patterns is an array that torch cannot share ({problem})."
                ) from None
    if not isinstance(patterns, Tensor):
        raise ArgumentError(
            f"Hopfield: patterns is a {type(patterns).__name__}. Pass a tensor or numpy array (..., N, D)."
        )
    return patterns


def as_patterns(patterns: Any) -> Tensor:
    """Patterns as a tensor ``(..., N, D)`` that shares their memory."""
    patterns = as_tensor(patterns)
    if patterns.dtype not in _DTYPES:
        raise ArgumentError(
            f"Hopfield: patterns has dtype {patterns.dtype}. Pass float64, float32, bfloat16 or float16: patterns.float()."
        )
    if patterns.ndim < 2:
        raise ArgumentError(
            f"Hopfield: patterns has shape {tuple(patterns.shape)}. Pass (..., N, D): N patterns of dimension D."
        )
    if patterns.shape[-2] == 0 or patterns.shape[-1] == 0:
        raise ArgumentError(
            f"Hopfield: patterns has shape {tuple(patterns.shape)}: nothing is stored. Pass at least one pattern."
        )
    return patterns


def as_beta(beta: Any, measure: Tensor) -> Tensor:
    """Beta as ``(...)``, one for each leading index of patterns of which ``(..., N)`` numbers are kept, in their dtype."""
    lead = measure.shape[:-1]
    if isinstance(beta, bool) or not isinstance(beta, Real | np.ndarray | Tensor):
        raise ArgumentError(
            f"Hopfield: beta is {beta!r}. Pass a number, or a tensor {tuple(lead)}, one for each memory."
        )
    value = torch.as_tensor(beta, dtype=measure.dtype, device=measure.device)
    try:
        value = value if value.shape == lead else value.expand(lead)
    except RuntimeError:
        got = tuple(value.shape)
        raise ArgumentError(
            f"Hopfield: beta has shape {got}, patterns have leading axes {tuple(lead)}. Pass one beta a memory."
        ) from None
    if is_concrete(value) and not bool(((value > 0) & value.isfinite()).all()):
        exact = torch.as_tensor(beta, dtype=torch.float64)
        if bool(((exact > 0) & exact.isfinite()).all()):
            raise ArgumentError(
                f"Hopfield: beta is {beta}, which is 0 or infinity in {value.dtype}. Pass patterns in float64."
            )
        raise ArgumentError(
            f"Hopfield: beta is {beta}. It is an inverse temperature: pass a finite number > 0."
        )
    return value


def check_state(memory: "Hopfield", state: Any) -> None:
    """A state is a finite floating tensor ``(..., D)`` on the patterns' device, with their leading axes."""
    if not isinstance(state, Tensor):
        raise ArgumentError(
            f"Hopfield: state is a {type(state).__name__}. Pass a torch tensor: torch.as_tensor(state)."
        )
    lead, D = tuple(memory.patterns.shape[:-2]), memory.dimension
    if (
        state.dtype not in (memory.patterns.dtype, memory.measure.dtype)
        or state.device != memory.patterns.device
    ):
        got = f"{state.dtype} on {state.device}, patterns are {memory.patterns.dtype} on {memory.patterns.device}"
        raise ArgumentError(f"Hopfield: state is {got}. Convert it: state.to(patterns).")
    if state.ndim < 1 or state.shape[-1] != D:
        raise ArgumentError(
            f"Hopfield: state has shape {tuple(state.shape)}, patterns have dimension {D}. Pass states (..., {D})."
        )
    if lead and (state.ndim < len(lead) + 2 or tuple(state.shape[-2 - len(lead) : -2]) != lead):
        wanted = ", ".join(map(str, lead))
        raise ArgumentError(
            f"Hopfield: state has shape {tuple(state.shape)}, patterns have leading axes {lead}. Pass states (..., {wanted}, Q, {D}): "
            "Q of them for each memory; state.expand puts the same before all."
        )
    if not is_concrete(state):
        return
    # A sum is one quick look; one that is not finite may be an overflow, and then every number is looked at.
    if not math.isfinite(state.detach().sum().item()) and not bool(
        (finite := state.isfinite().all(-1)).all()
    ):
        index = tuple((~finite).nonzero()[0].tolist())
        raise ArgumentError(
            f"Hopfield: state{list(index) if index else ''} holds NaN or infinity. Pass finite states."
        )
    if memory.similarity.sphere and not bool((state != 0).any(-1).all()):
        raise ArgumentError(
            "Hopfield: a state is 0 and has no direction, and the similarity is cosine. Pass states that are not 0."
        )
