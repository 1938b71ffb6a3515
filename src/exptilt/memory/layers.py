r"""A memory as a layer of a network: states settle among keys, then read values.

    ξ ← Σ_n softmax_n(β_h <k_n, ξ>) k_n      (steps − 1 times, or to the fixed point)
    z = Σ_n softmax_n(β_h <k_n, ξ>) v_n

`associate` is the function; with one step it is attention with scale β_h, where β is one number a head and
multiplies that head's queries and no others. The modules own parameters and call it. `HopfieldLayer` looks
things up: in what it is given, or in patterns of its own that it learns. `HopfieldPooling` has learnt states
that summarise a set of any length. β is kept as its logarithm so that learning cannot make it negative.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exptilt._support.checks import number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.attention import attend
from exptilt.dynamics import fixed_point
from exptilt.memory.patterns import wide

Beta = float | Sequence[float] | Tensor


def _check_steps(caller: str, steps: int | None) -> None:
    if steps is not None:
        whole(caller, "steps", steps, otherwise=", or None for the fixed point")


def _sharpened(state: Tensor, beta: Tensor) -> Tensor:
    """βξ ``(..., H, Q, D)`` in the dtype of ξ, which under autocast is narrower than β ``(..., H)``."""
    return (state * beta[..., None, None]).to(state.dtype)


def _weights(state: Tensor, key: Tensor, beta: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(β<k,ξ>) ``(..., H, Q, N)``; 0 for a state that sees nothing."""
    score = (_sharpened(state, beta) @ key.mT).to(wide(state.dtype))
    if mask is None:
        return torch.softmax(score, -1)
    return torch.softmax(score.masked_fill(~mask, torch.finfo(score.dtype).min), -1).masked_fill(~mask, 0.0)


def associate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    *,
    steps: int | None = 1,
    mask: Tensor | None = None,
    tolerance: float = 1e-4,
    max_steps: int = 100,
    throw: bool = True,
) -> Tensor:
    """States that settle among the keys of their head, and read its values.

    Args:
        query: ``(..., H, Q, D)``, the states to begin with.
        key: ``(..., H, N, D)``, the stored patterns.
        value: ``(..., H, N, Dv)``, what they stand for.
        beta: ``(..., H)``, one inverse temperature a head, > 0.
        steps: updates in all, the last of which reads the values; None goes to the fixed point,
            differentiated implicitly. With None **no gradient reaches query**: the start does not matter.
        mask: booleans that broadcast to ``(..., H, Q, N)``, True where a state may see a pattern.
        tolerance: of the fixed point's residual ‖step(ξ) − ξ‖/‖ξ‖.
        max_steps: on the way to it.
        throw: raise where it is not reached; False reads from where the states stand.

    Returns:
        ``(..., H, Q, Dv)``.

    Example:
        >>> x = torch.eye(4)[None]
        >>> associate(x[:, :1], x, x, torch.tensor([20.0])).round(decimals=3)
        tensor([[[1., 0., 0., 0.]]])
    """
    _check_steps("associate", steps)
    if not isinstance(beta, Tensor) or not beta.is_floating_point():
        got = f"of dtype {beta.dtype}" if isinstance(beta, Tensor) else f"a {type(beta).__name__}"
        wanted = "Pass a floating tensor (..., H), one number a head: torch.full((H,), beta)."
        raise ArgumentError(f"associate: beta is {got}. {wanted}")
    if is_concrete(beta) and not bool(((beta > 0) & beta.isfinite()).all()):
        wanted = "It is an inverse temperature: pass finite numbers > 0."
        raise ArgumentError(f"associate: beta is {beta.tolist()}. {wanted}")
    if query.ndim < 3:
        raise ArgumentError(f"associate: query has shape {tuple(query.shape)}. Pass (..., H, Q, D).")
    try:
        fits = torch.broadcast_shapes(beta.shape, query.shape[:-2])[-1] == query.shape[-3]
    except RuntimeError:
        fits = False
    if not fits:
        got, H = f"beta has shape {tuple(beta.shape)}, query {tuple(query.shape)}", query.shape[-3]
        raise ArgumentError(f"associate: {got}, which has {H} heads. Pass one beta a head: (..., {H}).")

    def update(state: Tensor, among: Tensor, read: Tensor) -> Tensor:
        return attend(_sharpened(state, beta), among, read, scale=1.0, mask=mask).output

    if steps is not None:
        for _ in range(steps - 1):
            query = update(query, key, key)
        return update(query, key, value)
    exact = key.to(wide(query.dtype))  # no half precision comes within the tolerance
    with torch.autocast(query.device.type, enabled=False):
        found = fixed_point(
            lambda state: update(state, exact, exact),
            query.to(exact.dtype),
            solver="picard",
            tolerance=tolerance,
            max_steps=max_steps,
            throw=throw,
        )
    return update(found.value.to(query.dtype), key, value)


def _log_beta(beta: Beta | None, heads: int, size: int) -> Tensor:
    """log β ``(heads,)``, where it begins."""
    try:
        given = torch.as_tensor(1 / math.sqrt(size) if beta is None else beta, dtype=torch.float64)
        given = given.detach().cpu()
        fits = given.shape in ((), (heads,)) and bool(((given > 0) & given.isfinite()).all())
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits or isinstance(beta, bool):
        wanted = f"Pass a finite number > 0, {heads} of them (one a head), or None."
        raise ArgumentError(f"HopfieldLayer: beta is {beta!r}. {wanted}")
    return given.log().float().expand(heads).clone()


class HopfieldLayer(nn.Module):
    """Look up states in a memory: one that is given, or patterns that the layer learns.

    Args:
        dimension: features of states.
        heads: memories side by side; divides dimension, unless head_dimension is given.
        stored: how many patterns the layer itself holds and learns; None: the call is given a memory.
        steps: updates in all; None goes to the fixed point, with implicit gradients. A fixed point does not
            depend on where one came from, so with None neither `to_query` nor what is before it is trained.
        beta: where each head's β begins, a number or ``(heads,)``; None is 1/sqrt(head dimension).
        learn_beta: whether it is learnt.
        throw: with steps=None, raise where the fixed point is not reached.
        memory_dimension: features of the memory; None: as states.
        value_dimension: features of values that are passed beside the memory; None: as the memory.
        head_dimension: features in which a head compares and reads; None is dimension / heads.
        output_dimension: features of the output; None: as states.
        normalize: put a layer norm before each of states, memory and values.
        dropout: share of the associations that are dropped, and the others scaled up, in training. That takes
            the matrix of associations, Q × N numbers a head.

    Example:
        >>> layer = HopfieldLayer(16, heads=4, steps=3)
        >>> layer(torch.randn(2, 5, 16), torch.randn(2, 9, 16)).shape
        torch.Size([2, 5, 16])
    """

    # What layers of before, pickled whole, do not hold.
    normalize = False
    dropout = 0.0

    def __init__(
        self,
        dimension: int,
        *,
        heads: int = 1,
        stored: int | None = None,
        steps: int | None = 1,
        beta: Beta | None = None,
        learn_beta: bool = True,
        throw: bool = True,
        memory_dimension: int | None = None,
        value_dimension: int | None = None,
        head_dimension: int | None = None,
        output_dimension: int | None = None,
        normalize: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if head_dimension is None and (heads < 1 or dimension < 1 or dimension % heads):
            got = f"dimension {dimension} must be a positive multiple of heads {heads}"
            raise ArgumentError(f"HopfieldLayer: {got}. Or pass head_dimension.")
        _check_steps("HopfieldLayer", steps)
        if stored is not None:
            whole("HopfieldLayer", "stored", stored, otherwise=", how many patterns to learn, or None")
        self.dimension, self.heads, self.steps, self.throw = dimension, heads, steps, throw
        self.normalize = normalize
        self.dropout = number("HopfieldLayer", "dropout", dropout, least=0, below=1)
        size = head_dimension or dimension // heads
        memory, output = memory_dimension or dimension, output_dimension or dimension
        inputs = (dimension, memory, value_dimension or memory)
        start = _log_beta(beta, heads, size)
        self.log_beta = nn.Parameter(start, requires_grad=learn_beta)
        self.to_query, self.to_key, self.to_value = (nn.Linear(n, heads * size) for n in inputs)
        self.to_output = nn.Linear(heads * size, output)
        if normalize:
            self.norm_state, self.norm_memory, self.norm_value = (nn.LayerNorm(n) for n in inputs)
        self.stored = None if stored is None else nn.Parameter(torch.randn(stored, memory))

    @property
    def beta(self) -> Tensor:
        """``(heads,)``."""
        return self.log_beta.exp()

    def forward(
        self,
        state: Tensor,
        memory: Tensor | None = None,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Associate states with the memory.

        Args:
            state: ``(..., Q, dimension)``.
            memory: ``(..., N, memory_dimension)``; None for a layer with patterns of its own.
            values: ``(..., N, value_dimension)``, what is read; None reads the memory itself.
            mask: ``(..., N)`` booleans, False where a pattern is padding.
            association_mask: booleans, broadcast to ``(..., Q, N)``, True where a state may see a pattern.

        Returns:
            ``(..., Q, output_dimension)``.
        """
        memory = self._memory(memory)
        query, key, seen = self._inputs(state, memory, mask, association_mask)
        given = self._checked(
            "values", memory if values is None else values, self.to_value, "value_dimension"
        )
        value = self._split(self.to_value(self.norm_value(given) if self.normalize else given))
        if self.training and self.dropout:
            weight = nn.functional.dropout(self._association(query, key, seen), self.dropout)
            found = weight.to(value.dtype) @ value
        else:
            found = associate(query, key, value, self.beta, steps=self.steps, mask=seen, throw=self.throw)
        output: Tensor = self.to_output(found.transpose(-2, -3).flatten(-2))
        return output

    def association(
        self,
        state: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights with which each state reads each pattern, without dropout: the matrix of associations.

        Args:
            state: ``(..., Q, dimension)``.
            memory: ``(..., N, memory_dimension)``; None for a layer with patterns of its own.
            mask: ``(..., N)`` booleans, False where a pattern is padding.
            association_mask: booleans, broadcast to ``(..., Q, N)``, True where a state may see a pattern.

        Returns:
            ``(..., heads, Q, N)``.
        """
        return self._association(*self._inputs(state, self._memory(memory), mask, association_mask))

    def _association(self, query: Tensor, key: Tensor, seen: Tensor | None) -> Tensor:
        """The weights ``(..., H, Q, N)`` of the last step: those of states that have made all others."""
        if self.steps != 1:
            before = None if self.steps is None else self.steps - 1
            query = associate(query, key, key, self.beta, steps=before, mask=seen, throw=self.throw)
        return _weights(query, key, self.beta, seen)

    def _memory(self, given: Tensor | None) -> Tensor:
        """The memory that was passed, or the layer's own."""
        if given is not None and self.stored is None:
            return given
        if given is None and self.stored is not None:
            return self.stored
        which = "no patterns: pass a memory" if given is None else "patterns of its own: pass memory=None"
        raise ArgumentError(f"HopfieldLayer: this layer holds {which}.")

    def _checked(self, name: str, given: Tensor, projection: nn.Linear, keyword: str) -> Tensor:
        """What was given, which has to have as many features as the projection takes."""
        features = projection.in_features
        if given.ndim < 2 or given.shape[-1] != features:
            raise ArgumentError(
                f"HopfieldLayer: {name} has shape {tuple(given.shape)}, the layer takes {features} features. "
                f"Pass (..., length, {features}), or make the layer with {keyword}={given.shape[-1]}."
            )
        return given

    def _split(self, x: Tensor) -> Tensor:
        """(..., L, H·d) → (..., H, L, d): the features of head h are h·d … (h+1)·d."""
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(-2, -3)

    def _inputs(
        self, state: Tensor, memory: Tensor, mask: Tensor | None, association_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries ``(..., H, Q, d)``, keys ``(..., H, N, d)``, who sees whom ``(..., 1, Q, N)`` or None."""
        state = self._checked("state", state, self.to_query, "dimension")
        memory = self._checked("memory", memory, self.to_key, "memory_dimension")
        N, seen = memory.shape[-2], None
        for name, given, least in (("mask", mask, 1), ("association_mask", association_mask, 2)):
            if given is None:
                continue
            if given.dtype != torch.bool or given.shape[-1:] != (N,) or given.ndim < least:
                got = f"{tuple(given.shape)} {given.dtype}, and there are N = {N} patterns"
                wanted = "(..., Q, N)" if least > 1 else "(..., N)"
                raise ArgumentError(f"HopfieldLayer: {name} is {got}. Pass booleans {wanted}.")
            rows = given[..., None, :] if least == 1 else given
            seen = rows[..., None, :, :] if seen is None else seen & rows[..., None, :, :]
        if self.normalize:
            state, memory = self.norm_state(state), self.norm_memory(memory)
        return self._split(self.to_query(state)), self._split(self.to_key(memory)), seen


class HopfieldPooling(nn.Module):
    """Summarise a set by states that the layer learns.

    Args:
        dimension: features of the set's members and of the output.
        queries: how many states, and so outputs.
        heads: memories side by side; divides dimension.
        steps: updates in all. Not None: a fixed point does not depend on the states, which are learnt.
        beta: where each head's β begins, a number or ``(heads,)``; None is 1/sqrt(head dimension).
        learn_beta: whether it is learnt.
        normalize: put a layer norm before states and members, as in `HopfieldLayer`.
        dropout: share of the associations that are dropped in training, as in `HopfieldLayer`.

    Example:
        >>> HopfieldPooling(16, queries=2, heads=4)(torch.randn(3, 9, 16)).shape
        torch.Size([3, 2, 16])
    """

    def __init__(
        self,
        dimension: int,
        *,
        queries: int = 1,
        heads: int = 1,
        steps: int = 1,
        beta: Beta | None = None,
        learn_beta: bool = True,
        normalize: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        whole("HopfieldPooling", "queries", queries)
        if steps is None:
            got = "A fixed point does not depend on its start, so the states would never learn"
            raise ArgumentError(f"HopfieldPooling: steps is None. {got}. Pass an integer >= 1.")
        _check_steps("HopfieldPooling", steps)
        self.query = nn.Parameter(torch.randn(queries, dimension) / math.sqrt(dimension))
        self.lookup = HopfieldLayer(
            dimension,
            heads=heads,
            steps=steps,
            beta=beta,
            learn_beta=learn_beta,
            normalize=normalize,
            dropout=dropout,
        )

    def forward(self, members: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool each set.

        Args:
            members: ``(..., N, dimension)``.
            mask: ``(..., N)`` booleans, False where a member is padding.

        Returns:
            ``(..., queries, dimension)``.
        """
        state = self.query.expand(*members.shape[:-2], *self.query.shape)
        pooled: Tensor = self.lookup(state, members, mask=mask)
        return pooled
