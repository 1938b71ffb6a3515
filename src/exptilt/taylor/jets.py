r"""Tensors that carry derivatives along, and how operations of torch come to their rules.

A `Jet` is a tensor y that depends on coordinates x_1 … x_D of an input. It carries its value, its D
derivatives ∂_d y and its Laplacian Δy = Σ_d ∂²_d y, the last two stacked as D + 1 rows. Torch hands every
operation on a jet to `_apply`, which finds the rule by the name of the operation: functions, methods and
operators that do the same have one name. Functions that torch has written in Python run as they are, on jets.
The rules are in ``rules.py`` and ``attention.py``; what has none is refused by its name.
"""

from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor

from exptilt._support.errors import ExptiltError

Rule = Callable[..., Any]
SPECIAL: dict[str, Rule] = {}  # rules of one operation: what they take is what it takes
KINDS: list[tuple[frozenset[str], Rule]] = []  # rules of a kind of operations, which get the operation first


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class NoRuleError(ExptiltError, NotImplementedError):
    """The function uses an operation for which a forward Laplacian has no rule."""


class Jet(Tensor):
    """A tensor with its derivatives by D coordinates and its Laplacian.

    Attributes:
        value: ``(...)``.
        rows: ``(D + 1, ...)``, the D derivatives, then the Laplacian.
    """

    value: Tensor
    rows: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _apply(func, args, kwargs or {})


def make_jet(value: Tensor, rows: Tensor) -> Jet:
    """A jet of the given value and rows.

    The tensor itself holds no numbers: a result that did not go by the rules is known by its device, "meta".
    """
    jet = torch.empty(value.shape, dtype=value.dtype, device="meta").as_subclass(Jet)
    jet.value, jet.rows = value, rows if rows.dtype == value.dtype else rows.to(value.dtype)
    return jet


def value_of(x: Any) -> Any:
    """An argument with every jet replaced by its value."""
    if isinstance(x, Jet):
        return x.value
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(value_of(y) for y in x)
    return x


CONSTANT = words("""
    shape dtype device ndim dim size numel nelement stride layout requires_grad is_leaf grad_fn grad
    names is_cuda is_cpu is_meta is_sparse is_nested is_quantized is_floating_point is_complex
    is_contiguous itemsize is_mkldnn is_mps is_xpu is_inference element_size data detach eq ne lt le gt
    ge argmax argmin argsort sign floor ceil round isnan isinf isfinite isneginf isposinf zeros_like
    ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
    item float__ bool int index__ len tolist repr format isclose allclose equal any all logical_not
    is_same_size result_type hash signbit nonzero
""")
OWN: dict[str, Rule] = {}  # of functions of exptilt: ``attention.py``
_TORCH = BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
_IN_PLACE = "It writes into a tensor; write the same with a new one."


def refusal(name: str, hint: str = "") -> str:
    """The message of a `NoRuleError`."""
    hint = hint or (
        "Rules are there for attention (xt.attend, torch's), linear maps, norms, activations, elementwise "
        "functions, products, determinants and views: write the function with these, or take the trace of "
        "torch.func.hessian."
    )
    return f"laplacian: there is no rule for {name}. {hint}"


def name_of(func: Any) -> str:
    """A name that a function has in common with the method and the operator that do the same."""
    name = str(getattr(func, "__name__", type(func).__name__))
    if name == "__get__":
        return str(func.__self__.__name__)
    if name in ("__float__", "__index__"):  # numbers, not a change of dtype
        return f"{name.strip('_')}__"
    return name.strip("_") if name.startswith("__") else name


def _body(func: FunctionType) -> FunctionType:
    """A copy of a function that torch has written in Python, which hands over to nobody as a whole.

    Each operation in it comes here by itself instead.
    """
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, module = name_of(func), str(getattr(func, "__module__", None) or "torch.Tensor")
    if "input" in kwargs and not args:
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    if module == "exptilt.tilting.attend" and name in OWN:
        return OWN[name](*args, **kwargs)
    if not isinstance(func, _TORCH) or not module.startswith("torch"):
        raise NoRuleError(refusal(f"{module}.{name}"))
    if name in CONSTANT:
        return func(*value_of(args), **{key: value_of(x) for key, x in kwargs.items()})
    kwargs = {key: x for key, x in kwargs.items() if x is not None}
    if kwargs.pop("inplace", False) or "out" in kwargs:
        raise NoRuleError(refusal(f"{name} in place", _IN_PLACE))
    if name in SPECIAL:
        return SPECIAL[name](*args, **kwargs)
    for names, rule in KINDS:
        if name in names:
            return rule(func, *args, **kwargs)
    if isinstance(func, FunctionType):
        return _body(func)(*args, **kwargs)
    in_place = name.endswith("_") or name == "setitem"
    raise NoRuleError(refusal(f"{module}.{name}", _IN_PLACE if in_place else ""))
