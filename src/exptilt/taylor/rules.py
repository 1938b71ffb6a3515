r"""The rules by which operations move the derivatives of a jet.

An operation f(y) moves value, derivatives and Laplacian by the chain rule,

    ∂_d f = f'(y) ∂_d y,      Δf = f'(y) Δy + Σ_d f''(y)[∂_d y, ∂_d y],                          (chain)

so the Laplacian of a network takes one sweep from input to output. What f' and f'' are is settled by kind:

- linear (views, sums, cuts): f'' = 0, and all rows go through f itself;
- a product of two: f'' is twice the product of the rows, Δ(ab) = Δa b + a Δb + 2 Σ_d ∂_d a ∂_d b;
- elementwise: f' and f'' are tensors of the shape of y, found once;
- softmax and logsumexp: cumulants, below; layer norms and determinants have formulas of their own;
- others that torch can differentiate forwards twice (norms, products): direction by direction.

Every name in the tables is held against torch's Hessian by a test: some that torch can differentiate forwards
twice come out wrong (linalg.solve, slogdet), so no name is taken in unseen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from exptilt.taylor.jets import (
    KINDS,
    SPECIAL,
    Jet,
    NoRuleError,
    Rule,
    make_jet,
    name_of,
    refusal,
    value_of,
    words,
)


def _has_jet(x: Any) -> bool:
    return isinstance(x, Jet) or (isinstance(x, (list, tuple)) and any(_has_jet(y) for y in x))


def _over_rows(function: Rule, *rows: Tensor) -> Any:
    """The function of each row."""
    return vmap(function)(*rows)


def _packed(values: Any, rows: Any) -> Any:
    """A jet, or several if the results are a tuple; integers and booleans carry no derivatives."""
    if isinstance(values, Tensor):
        return make_jet(values, rows) if values.is_floating_point() else values
    pairs = [_packed(v, r) for v, r in zip(values, rows, strict=True)]
    return type(values)(pairs) if hasattr(values, "_fields") or isinstance(values, list) else tuple(pairs)


def _aligned(rows: Tensor, axes: int) -> Tensor:
    """Rows (D + 1, ...) with axes of size 1 after the first, so that they broadcast to `axes` axes."""
    missing = axes + 1 - rows.dim()
    return rows if missing <= 0 else rows.reshape(len(rows), *(1,) * missing, *rows.shape[1:])


def _with_second(rows: Tensor, second: Tensor) -> Tensor:
    """Rows with `second` added to the Laplacian. The rows are new: nobody else has them."""
    rows[-1] += second
    return rows


# --- linear ---


def _linear(func: Rule, x: Any, *rest: Any, **options: Any) -> Any:
    rest = tuple(value_of(y) for y in rest)
    if not isinstance(x, Jet):
        return func(x, *rest, **options)
    values = func(x.value, *rest, **options)
    given = rest + tuple(options.values())
    if name_of(func) in LAST and all(_from_the_end(y) for y in given):  # the same axes of the rows
        return _packed(values, func(x.rows, *rest, **options))
    return _packed(values, _over_rows(lambda row: func(row, *rest, **options), x.rows))


def _from_the_end(x: Any) -> bool:
    """Whether x names axes by negative numbers, so that one more axis in front changes nothing."""
    return (
        isinstance(x, bool)
        or (isinstance(x, int) and x < 0)
        or (isinstance(x, tuple) and all(y < 0 for y in x))
    )


def _index(x: Any, index: Any) -> Any:
    def plain(at: Any) -> tuple[Any, ...]:
        at = value_of(at)
        return at.nonzero(as_tuple=True) if isinstance(at, Tensor) and at.dtype == torch.bool else (at,)

    parts = index if isinstance(index, tuple) else (index,)
    return _linear(Tensor.__getitem__, x, tuple(part for at in parts for part in plain(at)))


def _add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    value = torch.add(value_of(x), value_of(y), alpha=alpha)
    parts = [
        _aligned(z.rows if factor == 1 else factor * z.rows, value.dim())
        for z, factor in ((x, 1), (y, alpha))
        if isinstance(z, Jet)
    ]
    rows = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return make_jet(value, rows.expand(len(rows), *value.shape))


def _sub(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return _add(x, y, alpha=-alpha)


def _rsub(x: Any, y: Any) -> Any:
    return _add(y if isinstance(y, Tensor) else torch.as_tensor(y).to(x.value), x, alpha=-1)


def _where(condition: Tensor, x: Any = None, y: Any = None) -> Any:
    if x is None:
        return torch.where(value_of(condition))
    value = torch.where(value_of(condition), value_of(x), value_of(y))
    x_rows, y_rows = (_aligned(z.rows, value.dim()) if isinstance(z, Jet) else 0.0 for z in (x, y))
    rows = torch.where(value_of(condition), x_rows, y_rows)
    return make_jet(value, rows.expand(len(rows), *value.shape))


def _masked_fill(x: Any, mask: Tensor, value: Any) -> Any:
    value = value if isinstance(value, Tensor) else torch.as_tensor(value, device=mask.device).to(x.dtype)
    return _where(mask, value, x)


def _pad(x: Jet, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    rows = _over_rows(lambda row: torch.nn.functional.pad(row, pad, mode), x.rows)
    return make_jet(torch.nn.functional.pad(x.value, pad, mode, value), rows)


def _join(func: Rule) -> Rule:
    """The rule of cat and stack."""

    def joined(tensors: Any, dim: int = 0) -> Any:
        count = next(len(x.rows) for x in tensors if isinstance(x, Jet))
        rows = [x.rows if isinstance(x, Jet) else x.new_zeros(()).expand(count, *x.shape) for x in tensors]
        return make_jet(func(value_of(list(tensors)), dim), func(rows, dim + 1 if dim >= 0 else dim))

    return joined


# --- products ---


def _product(multiply: Rule, x: Any, y: Any) -> Any:
    """The rule of a function that is linear in each of two arguments, whose rows may be its arguments too."""
    value = multiply(value_of(x), value_of(y))
    rows: Tensor | None = None
    if isinstance(x, Jet):
        rows = multiply(_aligned(x.rows, value.dim()), value_of(y))
    if isinstance(y, Jet):
        more = multiply(value_of(x), _aligned(y.rows, value.dim()))
        rows = more if rows is None else rows + more
    if isinstance(x, Jet) and isinstance(y, Jet) and rows is not None:
        both = multiply(_aligned(x.rows[:-1], value.dim()), _aligned(y.rows[:-1], value.dim()))
        rows = _with_second(rows, 2 * both.sum(0))
    return make_jet(value, rows if rows is not None else value)


def _mul(x: Any, y: Any) -> Any:
    return _product(torch.mul, x, y)


def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise NoRuleError(refusal("div(rounding_mode=…)"))
    return (
        x * y.reciprocal() if isinstance(y, Jet) else make_jet(x.value / y, _aligned(x.rows, _axes(x, y)) / y)
    )


def _axes(x: Any, y: Any) -> int:
    return max(int(x.dim()), y.dim() if isinstance(y, Tensor) else 0)


def _matmul(x: Any, y: Any) -> Any:
    if x.dim() == 1 or y.dim() == 1:
        left, right = (x[None] if x.dim() == 1 else x), (y[:, None] if y.dim() == 1 else y)
        found = _matmul(left, right)
        found = found.squeeze(-1) if y.dim() == 1 else found
        return found.squeeze(-1 if y.dim() == 1 else -2) if x.dim() == 1 else found
    return _product(torch.matmul, x, y)


def _affine(x: Any, weight: Any, bias: Any = None) -> Any:
    found = torch.matmul(x, weight.mT if weight.dim() > 1 else weight)
    return found if bias is None else found + bias


def _einsum(equation: str, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        raise NoRuleError(refusal("einsum with lists of axes"))
    if len(operands) > 2:
        return _curved(torch.einsum, equation, *operands)
    if len(operands) == 1:
        return _linear(lambda x: torch.einsum(equation, x), operands[0])

    def multiply(x: Tensor, y: Tensor) -> Any:
        def one(x: Tensor, y: Tensor) -> Tensor:
            return torch.einsum(equation, x, y)

        sizes = operands[0].dim(), operands[1].dim()
        axes = tuple(0 if z.dim() > size else None for z, size in zip((x, y), sizes, strict=True))
        return one(x, y) if axes == (None, None) else vmap(one, axes)(x, y)

    x, y = operands
    value = multiply(value_of(x), value_of(y))
    parts = [multiply(x.rows, value_of(y))] if isinstance(x, Jet) else []
    parts += [multiply(value_of(x), y.rows)] if isinstance(y, Jet) else []
    rows = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if len(parts) == 2:
        rows = _with_second(rows, 2 * multiply(x.rows[:-1], y.rows[:-1]).sum(0))
    return make_jet(value, rows)


# --- curved ---


def _tanh(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(x)
    slope = 1 - y * y
    return y, slope, -2 * y * slope


def _silu(x: Tensor) -> tuple[Tensor, ...]:
    p = torch.sigmoid(x)
    bend = p * (1 - p)
    return x * p, p + x * bend, bend * (2 + x * (1 - 2 * p))


_SLOPES: dict[
    str, Callable[[Tensor], tuple[Tensor, ...]]
] = {  # f, f', f'' of the commonest: torch takes 0.2 ms
    "tanh": _tanh,
    "silu": _silu,
    "exp": lambda x: (torch.exp(x),) * 3,
    "square": lambda x: (x * x, 2 * x, torch.full_like(x, 2.0)),
    "sqrt": lambda x: ((y := x.sqrt()), 0.5 / y, -0.25 / (x * y)),
    "rsqrt": lambda x: ((y := x.rsqrt()), -0.5 * y / x, 0.75 * y / (x * x)),
    "reciprocal": lambda x: ((y := 1 / x), -y * y, 2 * y * y * y),
    "log": lambda x: (x.log(), 1 / x, -1 / (x * x)),
    "sin": lambda x: ((y := x.sin()), x.cos(), -y),
    "cos": lambda x: ((y := x.cos()), -x.sin(), -y),
}


def _elementwise(func: Rule, x: Any, *rest: Any, **options: Any) -> Any:
    if _has_jet(rest) or not isinstance(x, Jet):
        return _curved(func, x, *rest, **options)
    known = _SLOPES.get(name_of(func)) if not (rest or options) else None
    if known is not None:
        value, first, second = known(x.value)
    else:
        one = torch.ones_like(x.value)

        def slope(y: Tensor) -> Any:
            return jvp(lambda z: func(z, *rest, **options), (y,), (one,))

        found: Any = jvp(slope, (x.value,), (one,))
        (value, first), (_, second) = found
    rows = _aligned(x.rows, value.dim())
    return make_jet(value, _with_second(first * rows, second * rows[:-1].square().sum(0)))


def _curved(func: Rule, *arguments: Any, **options: Any) -> Any:
    """(chain) by forward mode, one direction at a time, for any number of jets among the arguments."""
    at = [k for k, x in enumerate(arguments) if isinstance(x, Jet)]
    if len(at) < sum(map(_has_jet, (*arguments, *options.values()))):
        raise NoRuleError(refusal(f"{getattr(func, '__name__', func)} with such arguments"))

    def called(*values: Tensor) -> Any:
        given = list(arguments)
        for k, x in zip(at, values, strict=True):
            given[k] = x
        return func(*given, **options)

    values, rows = zip(*((arguments[k].value, arguments[k].rows) for k in at), strict=True)

    def slope(*along: Tensor) -> Any:
        return jvp(called, values, along)[1]

    def bend(*along: Tensor) -> Any:
        return jvp(lambda *y: jvp(called, y, along)[1], values, along)[1]

    first = _over_rows(slope, *rows)
    second = _over_rows(bend, *(x[:-1] for x in rows))

    def joined(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[:-1], (a[-1] + b.sum(0))[None]])

    if isinstance(first, Tensor):
        return _packed(called(*values), joined(first, second))
    return _packed(called(*values), [joined(a, b) for a, b in zip(first, second, strict=True)])


def _moments(x: Jet, dim: Any) -> tuple[Tensor, Tensor, Tensor]:
    r"""Weights p = softmax(x), centred derivatives x'_d − E[x'_d], and Δx + Σ_d (x'_d − E[x'_d])².

    G = logsumexp(x) has the derivatives E[x'_d] and Cov(x'_d, x'_d) + E[Δx]: cumulants of the rows under p.
    Those of p itself are p (x'_d − E[x'_d]) and p times the centred last result.
    """
    p = torch.softmax(x.value, dim)
    axis = dim if dim < 0 else dim + 1
    centred = x.rows[:-1] - (p * x.rows[:-1]).sum(axis, keepdim=True)
    return p, centred, x.rows[-1] + centred.square().sum(0)


def _softmax(x: Jet, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = x if dtype is None else x.to(dtype)  # type: ignore[assignment]
    p, centred, second = _moments(x, dim)
    second = second - (p * second).sum(dim, keepdim=True)
    return make_jet(p, p * torch.cat([centred, second[None]]))


def _logsumexp(x: Jet, dim: Any, keepdim: bool = False) -> Any:
    axes = [dim] if isinstance(dim, int) else list(dim)
    if len(axes) > 1:
        return _curved(torch.logsumexp, x, dim, keepdim)
    p, centred, second = _moments(x, axes[0])
    rows = torch.cat([x.rows[:-1] - centred, second[None]])
    axis = axes[0] if axes[0] < 0 else axes[0] + 1
    return make_jet(torch.logsumexp(x.value, dim, keepdim), (p * rows).sum(axis, keepdim=keepdim))


def _logaddexp(x: Any, y: Any) -> Any:
    """log(eˣ + eʸ). Second derivatives of `torch.logaddexp` are NaN where x is far below y."""
    above = value_of(x) >= value_of(y)
    larger, smaller = _where(above, x, y), _where(above, y, x)
    gap = _masked_fill(smaller - larger, torch.isneginf(larger.value), 0.0)
    return larger + torch.log1p(torch.exp(gap))


def _log_softmax(x: Jet, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = x if dtype is None else x.to(dtype)  # type: ignore[assignment]
    return x - torch.logsumexp(x, dim, keepdim=True)


def _slogdet(matrix: Jet) -> Any:
    r"""Jacobi: ∂_d log|det A| = tr M_d and Δ log|det A| = tr A⁻¹ΔA − Σ_d tr M_d², where M_d = A⁻¹ ∂_d A.

    (Torch's own formula is not right when it is differentiated forwards twice.)
    """
    values = torch.linalg.slogdet(matrix.value)
    moved = torch.linalg.solve(matrix.value, matrix.rows)
    first = moved.diagonal(dim1=-2, dim2=-1).sum(-1)
    square = (moved[:-1] * moved[:-1].mT).sum((0, -2, -1))
    sign = make_jet(values[0], torch.zeros_like(first))
    return type(values)((sign, make_jet(values[1], _with_second(first, -square))))


def _det(matrix: Jet) -> Any:
    sign, size = _slogdet(matrix)
    return sign * size.exp()


def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    axes = tuple(range(-len(shape), 0))
    return _scaled(x - x.mean(axes, keepdim=True), axes, weight, bias, eps)


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _scaled(
        x, tuple(range(-len(shape), 0)), weight, None, torch.finfo(x.dtype).eps if eps is None else eps
    )


def _scaled(centred: Any, axes: tuple[int, ...], weight: Any, bias: Any, eps: float) -> Any:
    """c r with r = (E[c²] + eps)^(−1/2), whose derivatives are −r³ t_d, where t_d = E[c ∂_d c]."""
    c, rows = centred.value, centred.rows
    r = (c.square().mean(axes, keepdim=True) + eps).rsqrt()
    cubed = r * r * r
    t = (c * rows).mean(axes, keepdim=True)
    spread = rows[:-1].square().sum(0).mean(axes, keepdim=True)
    second = c * (3 * cubed * r * r * t[:-1].square().sum(0) - cubed * spread)
    second = second - 2 * cubed * (rows[:-1] * t[:-1]).sum(0)
    found: Any = make_jet(c * r, _with_second(r * rows - (c * cubed) * t, second))
    found = found if weight is None else found * weight
    return found if bias is None else found + bias


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and p > 0:
        raise NoRuleError(refusal("dropout", "Call .eval() on the model first."))
    return x


# --- names ---

LINEAR = words("""
    view reshape view_as reshape_as transpose permute t T mT swapaxes swapdims movedim expand expand_as
    broadcast_to unsqueeze squeeze flatten unflatten ravel select narrow split chunk unbind tensor_split
    split_with_sizes unfold flip roll rot90 tril triu diagonal diag diag_embed trace sum mean cumsum neg
    positive contiguous clone to float double half bfloat16 type_as repeat repeat_interleave tile gather
    index_select
    take_along_dim take nansum sum_to_size unsafe_chunk unsafe_split real conj diff dsplit hsplit vsplit
    avg_pool1d adaptive_avg_pool1d
""")
LAST = words("""
    transpose mT contiguous clone neg float double
""")  # with axes from the end
ELEMENTWISE = words("""
    tanh exp exp2 expm1 log log2 log10 log1p sigmoid logsigmoid log_sigmoid silu gelu relu relu6
    leaky_relu elu celu selu mish softplus hardtanh hardswish sin cos tan asin acos atan sinh cosh asinh
    acosh atanh erf erfc erfinv sqrt rsqrt square reciprocal abs absolute pow float_power clamp
    clamp_min clamp_max clip sinc lgamma digamma special_expit special_erf logit softsign tanhshrink
    nan_to_num
""")
CURVED = words("""
    linalg_inv inverse linalg_cholesky cholesky linalg_vector_norm linalg_norm linalg_matrix_norm norm
    dist var std prod cumprod amax amin maximum minimum atan2 hypot xlogy cross linalg_cross
    addcmul addcdiv lerp index_add index_copy scatter scatter_add mse_loss logcumsumexp
""")
_RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "subtract": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "multiply": _mul,
    "div": _div,
    "divide": _div,
    "true_divide": _div,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "mv": _matmul,
    "dot": _matmul,
    "inner": lambda x, y: _matmul(x, y.mT if y.dim() > 1 else y),
    "outer": lambda x, y: x[:, None] * y,
    "linear": _affine,
    "addmm": lambda c, x, y, *, beta=1, alpha=1: beta * c + alpha * _matmul(x, y),
    "baddbmm": lambda c, x, y, *, beta=1, alpha=1: beta * c + alpha * _matmul(x, y),
    "einsum": _einsum,
    "getitem": _index,
    "where": _where,
    "masked_fill": _masked_fill,
    "pad": _pad,
    "cat": _join(torch.cat),
    "concat": _join(torch.cat),
    "concatenate": _join(torch.cat),
    "stack": _join(torch.stack),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logaddexp": _logaddexp,
    "logsumexp": _logsumexp,
    "linalg_slogdet": _slogdet,
    "slogdet": _slogdet,
    "linalg_det": _det,
    "det": _det,
    "logdet": lambda x: _det(x).log(),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "iter": lambda x: iter(x.unbind(0)),
}
SPECIAL.update(_RULES)
KINDS += (LINEAR, _linear), (ELEMENTWISE, _elementwise), (CURVED, _curved)
