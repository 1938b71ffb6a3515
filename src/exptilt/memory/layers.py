r"""A memory as a layer of a network: states settle among keys, then read values.

    ξ ← Σ_n softmax_n(β_h ⟨k_n, ξ⟩) k_n      (steps − 1 times, or to the fixed point)
    z = Σ_n softmax_n(β_h ⟨k_n, ξ⟩) v_n

`hopfield_attention` is the function. With one step it is attention with scale β_h: β has one number a head,
which multiplies that head's queries and no others. The modules own parameters and call it. `HopfieldLayer`
looks up states in a memory that it is given, or in patterns of its own that it learns. `HopfieldPooling`
has learnt states that summarise a set of any length. The logarithm of β is learnt, so that β stays
positive.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exptilt._support.checks import choice, number, whole
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import is_concrete
from exptilt.dynamics import fixed_point
from exptilt.memory.patterns import wide
from exptilt.tilting import attend

Beta = float | Sequence[float] | Tensor


def _check_steps(caller: str, steps: int | None) -> None:
    if steps is not None:
        whole(caller, "steps", steps, otherwise=", or None for the fixed point")


def _sharpened(state: Tensor, beta: Tensor) -> Tensor:
    """βξ ``(..., H, Q, D)`` in the dtype of ξ, which under autocast is narrower than β ``(..., H)``."""
    return (state * beta[..., None, None]).to(state.dtype)


def _weights(state: Tensor, key: Tensor, beta: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(β⟨k,ξ⟩) ``(..., H, Q, N)``; 0 for a state that sees nothing."""
    score = (_sharpened(state, beta) @ key.mT).to(wide(state.dtype))
    if mask is None:
        return torch.softmax(score, -1)
    return torch.softmax(score.masked_fill(~mask, torch.finfo(score.dtype).min), -1).masked_fill(~mask, 0.0)


def hopfield_attention(
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
    """The values read by states once they have settled among the keys of their head.

    Args:
        query: ``(..., H, Q, D)``, the states to begin with.
        key: ``(..., H, N, D)``, the stored patterns.
        value: ``(..., H, N, Dv)``, the value of each pattern.
        beta: ``(..., H)``, one inverse temperature a head, > 0.
        steps: updates in all, the last of which reads the values; None goes to the fixed point,
            differentiated implicitly. With None **no gradient reaches query**: the start does not matter.
        mask: booleans that broadcast to ``(..., H, Q, N)``, True where a state may see a pattern.
        tolerance: of the fixed point's residual ‖step(ξ) − ξ‖/‖ξ‖.
        max_steps: most steps to the fixed point.
        throw: raise where the fixed point is not reached; False reads at the last states.

    Returns:
        ``(..., H, Q, Dv)``.

    Example:
        >>> x = torch.eye(4)[None]
        >>> hopfield_attention(x[:, :1], x, x, torch.tensor([20.0])).round(decimals=3)
        tensor([[[1., 0., 0., 0.]]])
    """
    _check_steps("hopfield_attention", steps)
    if not isinstance(beta, Tensor) or not beta.is_floating_point():
        got = f"of dtype {beta.dtype}" if isinstance(beta, Tensor) else f"a {type(beta).__name__}"
        wanted = "Pass a floating tensor (..., H), one number a head: torch.full((H,), beta)."
        raise ArgumentError(f"hopfield_attention: beta is {got}. {wanted}")
    if is_concrete(beta) and not bool(((beta > 0) & beta.isfinite()).all()):
        wanted = "It is an inverse temperature: pass finite numbers > 0."
        raise ArgumentError(f"hopfield_attention: beta is {beta.tolist()}. {wanted}")
    if query.ndim < 3:
        raise ArgumentError(f"hopfield_attention: query has shape {tuple(query.shape)}. Pass (..., H, Q, D).")
    try:
        fits = torch.broadcast_shapes(beta.shape, query.shape[:-2])[-1] == query.shape[-3]
    except RuntimeError:
        fits = False
    if not fits:
        got, H = f"beta has shape {tuple(beta.shape)}, query {tuple(query.shape)}", query.shape[-3]
        raise ArgumentError(
            f"hopfield_attention: {got}, which has {H} heads. Pass one beta a head: (..., {H})."
        )

    def update(state: Tensor, among: Tensor, read: Tensor) -> Tensor:
        return attend(_sharpened(state, beta), among, read, scale=1.0, mask=mask).output

    if steps is not None:
        for _ in range(steps - 1):
            query = update(query, key, key)
        return update(query, key, value)
    exact = key.to(wide(query.dtype))  # half precision cannot reach the tolerance
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
    """The initial log β ``(heads,)``."""
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


def _appended(x: Tensor, bias: Tensor) -> Tensor:
    """``x (..., H, N, d)`` and, after it, ``bias (H, 1, d)``."""
    return torch.cat([x, bias.to(x.dtype).expand(*x.shape[:-2], *bias.shape[-2:])], -2)


class HopfieldLayer(nn.Module):
    """Look up states in a memory: one that is given, or patterns that the layer learns.

    Args:
        dimension: features of states.
        heads: memories side by side; divides dimension, unless head_dimension is given.
        stored: number of patterns that the layer holds and learns; None: each call is given a memory.
        steps: updates in all; None goes to the fixed point, with implicit gradients. A fixed point does not
            depend on its start, so with None neither `to_query` nor any layer before it is trained.
        beta: initial β of each head, a number or ``(heads,)``; None is 1/sqrt(head dimension).
        learn_beta: whether β is learnt.
        throw: with steps=None, raise where the fixed point is not reached.
        memory_dimension: features of the memory; None: as states.
        value_dimension: features of values that are passed beside the memory; None: as the memory.
        head_dimension: features in which a head compares and reads; None is dimension / heads.
        output_dimension: features of the output; None: as states.
        normalize: put a layer norm before each of states, memory and values.
        dropout: share of the associations that are dropped in training; the others are scaled up. This makes
            the matrix of associations, Q × N numbers a head.
        static: which of "state", "memory" and "values" are not projected: every head is given all of their
            features. States and memory then need head_dimension features.
        connected: project values as the memory, then by their own projection: v = W_V (W_K y + b_K) + b_V.
        normalize_heads: put a layer norm without parameters on each head's states and keys, once projected.
        bias_pattern: give each head one more pattern, with its value, that it learns; no mask hides it.
        project_output: False leaves out the last projection: the heads' outputs stand side by side.

    Example:
        >>> layer = HopfieldLayer(16, heads=4, steps=3)
        >>> layer(torch.randn(2, 5, 16), torch.randn(2, 9, 16)).shape
        torch.Size([2, 5, 16])
    """

    # Defaults for layers pickled before these options existed.
    normalize = False
    dropout = 0.0
    inputs: tuple[int, ...] = ()
    static: tuple[str, ...] = ()
    connected = False
    normalize_heads = False
    bias_pattern = False

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
        static: Sequence[str] = (),
        connected: bool = False,
        normalize_heads: bool = False,
        bias_pattern: bool = False,
        project_output: bool = True,
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
        self.inputs, start = inputs, _log_beta(beta, heads, size)
        self.log_beta = nn.Parameter(start, requires_grad=learn_beta)
        self.static, self.connected = tuple(static), connected
        self.normalize_heads, self.bias_pattern = normalize_heads, bias_pattern
        self._check_static(size, None if project_output else output_dimension)
        read = inputs[2] if "values" in static and not connected else size
        self.to_query = None if "state" in static else nn.Linear(dimension, heads * size)
        self.to_key = None if "memory" in static else nn.Linear(memory, heads * size)
        before = heads * size if connected else inputs[2]
        self.to_value = None if "values" in static else nn.Linear(before, heads * size)
        self.to_output = nn.Linear(heads * read, output) if project_output else None
        if bias_pattern:
            self.bias_key, self.bias_value = (
                nn.Parameter(torch.randn(heads, 1, n) / math.sqrt(n)) for n in (size, read)
            )
        if normalize:
            self.norm_state, self.norm_memory, self.norm_value = (nn.LayerNorm(n) for n in inputs)
        self.stored = None if stored is None else nn.Parameter(torch.randn(stored, memory))

    def _check_static(self, size: int, unused: int | None) -> None:
        """Raise unless `static`, `connected` and the numbers of features fit each other."""
        for name in self.static:
            choice("HopfieldLayer", "static", name, ("state", "memory", "values"))
        for name, features in zip(("state", "memory"), self.inputs, strict=False):
            if name in self.static and features != size:
                raise ArgumentError(
                    f"HopfieldLayer: static {name} has {features} features, and heads compare {size}. "
                    f"Pass head_dimension={features}."
                )
        _, memory, values = self.inputs
        if self.connected and ("memory" in self.static or memory != values):
            got = f"static={self.static}, memory of {memory} and values of {values} features"
            wanted = (
                "It puts values through the projection of the memory: there must be one, and it must fit."
            )
            raise ArgumentError(f"HopfieldLayer: connected with {got}. {wanted}")
        if unused is not None:
            got = f"output_dimension is {unused} and project_output False"
            raise ArgumentError(f"HopfieldLayer: {got}. Pass one of the two.")

    @property
    def beta(self) -> Tensor:
        """β ``(heads,)``, one for each head."""
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
        """The values that states read from the memory.

        Args:
            state: ``(..., Q, dimension)``.
            memory: ``(..., N, memory_dimension)``; None for a layer with patterns of its own.
            values: ``(..., N, value_dimension)``, to be read; None reads the memory itself.
            mask: ``(..., N)`` booleans, False where a pattern is padding.
            association_mask: booleans, broadcast to ``(..., Q, N)``, True where a state may see a pattern.

        Returns:
            ``(..., Q, output_dimension)``; with project_output=False ``(..., Q, heads · features)``.
        """
        memory = self._memory(memory)
        query, key, seen = self._inputs(state, memory, mask, association_mask)
        value = self._values(memory if values is None else values)
        if self.training and self.dropout:
            weight = nn.functional.dropout(self._association(query, key, seen), self.dropout)
            found = weight.to(value.dtype) @ value
        else:
            found = hopfield_attention(
                query, key, value, self.beta, steps=self.steps, mask=seen, throw=self.throw
            )
        joined = found.transpose(-2, -3).flatten(-2)
        output: Tensor = joined if self.to_output is None else self.to_output(joined)
        return output

    def _values(self, given: Tensor) -> Tensor:
        """The values ``(..., H, N, Dv)`` that each head reads, the bias pattern's last."""
        given = self._checked("values", given, 2)
        given = self.norm_value(given) if self.normalize else given
        projections = [self.to_key] * self.connected + [self.to_value]
        value = self._heads(given, *projections)
        return _appended(value, self.bias_value) if self.bias_pattern else value

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
            ``(..., heads, Q, N)``; the bias pattern, if there is one, comes last: N + 1.
        """
        return self._association(*self._inputs(state, self._memory(memory), mask, association_mask))

    def _association(self, query: Tensor, key: Tensor, seen: Tensor | None) -> Tensor:
        """The weights ``(..., H, Q, N)`` of the last step, of states that have made all other steps."""
        if self.steps != 1:
            before = None if self.steps is None else self.steps - 1
            query = hopfield_attention(query, key, key, self.beta, steps=before, mask=seen, throw=self.throw)
        return _weights(query, key, self.beta, seen)

    def _memory(self, given: Tensor | None) -> Tensor:
        """The memory that was passed, or the layer's own."""
        if given is not None and self.stored is None:
            return given
        if given is None and self.stored is not None:
            return self.stored
        which = "None, and the layer holds no" if given is None else "given, and the layer holds its own"
        raise ArgumentError(f"HopfieldLayer: memory is {which} patterns. Pass one of them.")

    def _checked(self, name: str, given: Tensor, place: int) -> Tensor:
        """The tensor `given`; an error unless it has the number of features that the layer takes."""
        projection = (self.to_query, self.to_key, self.to_value)[place]
        features = self.inputs[place] if projection is None or self.connected else projection.in_features
        if given.ndim < 2 or given.shape[-1] != features:
            keyword = ("dimension", "memory_dimension", "value_dimension")[place]
            raise ArgumentError(
                f"HopfieldLayer: {name} has shape {tuple(given.shape)}, the layer takes {features} features. "
                f"Pass (..., length, {features}), or make the layer with {keyword}={given.shape[-1]}."
            )
        return given

    def _heads(self, x: Tensor, *projections: nn.Linear | None) -> Tensor:
        """(..., L, n) → (..., H, L, d): of H·d features head h has h·d … (h+1)·d; unprojected, all of x."""
        used = [projection for projection in projections if projection is not None]
        if not used:
            return x.unsqueeze(-3).expand(*x.shape[:-2], self.heads, *x.shape[-2:])
        for projection in used:
            x = projection(x)
        return x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads).transpose(-2, -3)

    def _inputs(
        self, state: Tensor, memory: Tensor, mask: Tensor | None, association_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries ``(..., H, Q, d)``, keys ``(..., H, N, d)``, and the mask ``(..., 1, Q, N)`` or None."""
        state, memory = self._checked("state", state, 0), self._checked("memory", memory, 1)
        N, seen = memory.shape[-2], None
        if not N:
            raise ArgumentError("HopfieldLayer: memory holds no patterns. Pass at least one.")
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
        query, key = self._heads(state, self.to_query), self._heads(memory, self.to_key)
        if self.normalize_heads:
            query, key = (nn.functional.layer_norm(x, x.shape[-1:]) for x in (query, key))
        if self.bias_pattern:
            key = _appended(key, self.bias_key)
            seen = None if seen is None else nn.functional.pad(seen, (0, 1), value=True)
        return query, key, seen


class HopfieldPooling(nn.Module):
    """A layer that summarises a set by states that it learns.

    Args:
        dimension: features of the set's members and of the output.
        queries: number of states, and so of outputs.
        heads: memories side by side; divides dimension.
        steps: updates in all; None is refused, as a fixed point would not depend on the learnt states.
        beta: initial β of each head, a number or ``(heads,)``; None is 1/sqrt(head dimension).
        learn_beta: whether β is learnt.
        normalize: put a layer norm before states and members, as in `HopfieldLayer`.
        dropout: share of the associations that are dropped in training, as in `HopfieldLayer`.
        static: as in `HopfieldLayer`; where something is static, heads compare in all features.
        connected: as in `HopfieldLayer`.
        normalize_heads: as in `HopfieldLayer`.
        bias_pattern: as in `HopfieldLayer`.
        project_output: as in `HopfieldLayer`.

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
        static: Sequence[str] = (),
        connected: bool = False,
        normalize_heads: bool = False,
        bias_pattern: bool = False,
        project_output: bool = True,
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
            head_dimension=dimension if static else None,
            static=static,
            connected=connected,
            normalize_heads=normalize_heads,
            bias_pattern=bias_pattern,
            project_output=project_output,
        )

    def forward(self, members: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The summary of each set.

        Args:
            members: ``(..., N, dimension)``.
            mask: ``(..., N)`` booleans, False where a member is padding.

        Returns:
            ``(..., queries, dimension)``; with project_output=False ``(..., queries, heads · features)``.
        """
        shape, features = tuple(members.shape), self.query.shape[-1]
        if shape[-1:] != (features,) or len(shape) < 2:
            raise ArgumentError(f"HopfieldPooling: members has shape {shape}. Pass (..., N, {features}).")
        state = self.query.expand(*members.shape[:-2], *self.query.shape)
        pooled: Tensor = self.lookup(state, members, mask=mask)
        return pooled
