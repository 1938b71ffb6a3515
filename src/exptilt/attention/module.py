"""`MultiheadAttention`: torch's module of that name, with attention's statistics on request.

Parameters, state_dict and call are those of ``torch.nn.MultiheadAttention``, which it inherits; the attention
itself goes through `attend`. The n×n matrix of weights exists only where it is asked for
(``need_weights=True``, torch's default) or where torch's own dropout of weights needs it.

Nested tensors are padded, and the output is nested again. In evaluation mode ``torch.nn.TransformerEncoder``
makes them from a padding mask by itself; they reach this module if a layer has a hook.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import pytree
from exptilt.tilting import AttentionResult, attend
from exptilt.tilting.backends.reference import scores
from exptilt.tilting.problem import Inputs
from exptilt.tilting.score_rule import ScoreRule


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with statistics: same constructor, same state_dict, same call.

    Inputs are ``(L, N, E)``, ``(N, L, E)`` with ``batch_first=True``, or ``(L, E)`` unbatched, as in torch.
    With ``batch_first=True`` they may be nested tensors of N sequences.

    Example:
        >>> layer = xt.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 16)
        >>> output, _, seen = layer(x, x, x, need_weights=False, statistics=True)
        >>> output.shape, seen.entropy.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 4, 10]))
    """

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        statistics: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, AttentionResult]:
        """Attend, as torch.nn.MultiheadAttention does.

        Args:
            query: ``(L, N, E)``, ``(N, L, E)`` if batch_first, or ``(L, E)``.
            key: ``(S, N, kdim)`` or as query.
            value: ``(S, N, vdim)`` or as query.
            key_padding_mask: ``(N, S)`` or ``(S,)``; True or −inf hides a key.
            need_weights: also return the weights, which costs the L×S matrix.
            attn_mask: ``(L, S)`` or ``(N·heads, L, S)``; True hides a key, numbers are added to the scores.
            average_attn_weights: average the weights over heads.
            is_causal: a hint that attn_mask is causal; as in torch, it needs attn_mask.
            statistics: also return the statistics of the scores, each ``(N, heads, L)`` (unbatched: ``(heads,
                L)``), before dropout.

        Returns:
            (output, weights or None), and with ``statistics=True`` also an `AttentionResult`, whose output
            is each head's own ``(N, heads, L, head dim)``. For nested tensors the output is nested; weights
            and statistics are padded to the longest sequence, with queries that see nothing.
        """
        if is_causal and attn_mask is None:
            raise ArgumentError(
                "MultiheadAttention: is_causal=True is a hint about attn_mask, which is None. "
                "Pass attn_mask as well."
            )
        if query.is_nested or key.is_nested or value.is_nested:
            self._check_nested(query, key, value, key_padding_mask, attn_mask)
            return self._nested(query, key, value, need_weights, average_attn_weights, statistics)
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            raise ArgumentError(
                f"MultiheadAttention: got {shapes}. "
                "Pass all three as (length, batch, dim), or all as (length, dim)."
            )
        q, k, v = (
            x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)
            for x in (query, key, value)
        )
        N, L = q.shape[:2]
        q, k, v = self._project(q, k, v)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(N, 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        bias, mask = self._masks(key_padding_mask, attn_mask, N, L, k.shape[2], q.dtype)
        seen = attend(q, k, v, bias=bias, mask=mask)
        dropping = self.training and self.dropout > 0
        shown: Tensor | None = None
        heads = seen.output
        if need_weights or dropping:
            weights = self._weights(q, k, bias, mask, seen.log_normalizer)
            if dropping:
                weights = F.dropout(weights, self.dropout)
                heads = weights @ v
            if need_weights:
                shown = weights.mean(1) if average_attn_weights else weights
                shown = shown if batched else shown.squeeze(0)
        output = self.out_proj(heads.transpose(1, 2).flatten(2))
        output = output.squeeze(0) if not batched else output if self.batch_first else output.transpose(0, 1)
        if not statistics:
            return output, shown
        if not batched:
            seen = pytree.tree_map(lambda x: x.squeeze(0), seen)
        return output, shown, seen

    def _check_nested(self, *given: Tensor | None) -> None:
        *tensors, padding, attn_mask = given
        if not self.batch_first or not all(x is not None and x.is_nested and x.dim() == 3 for x in tensors):
            raise ArgumentError(
                "MultiheadAttention: got a nested tensor. Make all of query, key and value nested, of "
                "sequences (length, dim), and the module with batch_first=True."
            )
        if padding is not None or attn_mask is not None:
            name = "attn_mask" if padding is None else "key_padding_mask"
            raise ArgumentError(
                f"MultiheadAttention: {name} with nested tensors, which have no padding. Leave it out; if it "
                "hides more than padding, pass padded tensors."
            )

    def _nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average: bool, statistics: bool
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, AttentionResult]:
        """The result of `forward` for nested tensors: found with padded ones, the output nested again."""
        lengths, keys, values = ([len(x) for x in y.unbind()] for y in (query, key, value))
        if keys != values or len(lengths) != len(keys):
            raise ArgumentError(
                f"MultiheadAttention: lengths are {lengths} in query, {keys} in key, {values} in value. "
                "Pass as many sequences in each, and values as long as their keys."
            )
        q, k, v = (torch.nested.to_padded_tensor(x, 0.0) for x in (query, key, value))
        there, seen_keys = (
            torch.arange(x.shape[1], device=x.device) < torch.tensor(n, device=x.device)[:, None]
            for x, n in ((q, lengths), (k, keys))
        )
        output, weights, *seen = self.forward(
            q, k, v, ~seen_keys, need_weights, None, average, statistics=statistics
        )
        pieces = [x[:n] for x, n in zip(output, lengths, strict=True)]
        if query.layout == torch.jagged:  # torch adds two jagged tensors only if they share their offsets
            offsets: Tensor = query.offsets()  # type: ignore[attr-defined]
            output = torch.nested.nested_tensor_from_jagged(torch.cat(pieces), offsets)
        else:
            output = torch.nested.as_nested_tensor(pieces)
        if weights is not None:
            weights = torch.where(there[:, :, None] if average else there[:, None, :, None], weights, 0.0)
        return (output, weights, _rows_there(seen[0], there[:, None])) if statistics else (output, weights)

    def _project(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value times their weights."""
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, matrices, biases, strict=True))

    def _masks(
        self, padding: Tensor | None, attn_mask: Tensor | None, N: int, L: int, S: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """The two masks of torch (True hides, numbers are added) as the bias and mask of `attend`."""
        bias: Tensor | None = None
        mask: Tensor | None = None
        given = S - (self.bias_k is not None) - self.add_zero_attn
        for name, x, shapes in (
            ("key_padding_mask", padding, [(N, given), (given,)]),
            ("attn_mask", attn_mask, [(L, given), (N * self.num_heads, L, given)]),
        ):
            if x is None:
                continue
            if tuple(x.shape) not in shapes:
                known = ", ".join(map(str, shapes))
                raise ArgumentError(
                    f"MultiheadAttention: {name} has shape {tuple(x.shape)}. Pass one of {known}."
                )
            x = F.pad(x, (0, S - given))  # keys added by the module itself are always seen
            x = x.reshape(-1, 1, 1, S) if name == "key_padding_mask" else x
            x = x.reshape(N, self.num_heads, L, S) if x.dim() == 3 else x
            if x.dtype == torch.bool:
                mask = ~x if mask is None else mask & ~x
            else:
                bias = x.to(dtype) if bias is None else bias + x.to(dtype)
        return bias, mask

    @staticmethod
    def _weights(q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, G: Tensor) -> Tensor:
        """``(N, heads, L, S)``, the weights e^{s − G}; a row that sees nothing has weights 0."""
        axes = [x if x is None or x.dim() == 4 else x[None, None] for x in (bias, mask)]
        s = scores(Inputs(q, k, k[..., :0], axes[0], mask=axes[1]), ScoreRule(q.shape[-1] ** -0.5))
        return torch.exp(s - torch.where(torch.isneginf(G), 0.0, G)[..., None]).to(q.dtype)


def _rows_there(seen: AttentionResult, there: Tensor) -> AttentionResult:
    """The result with padded queries (`there` is False) turned into queries that see nothing."""
    empty = {"log_normalizer": -torch.inf, "score_max": -torch.inf}
    rows = ("log_normalizer", "entropy", "score_mean", "score_variance", "score_max")
    made = {name: torch.where(there, getattr(seen, name), empty.get(name, 0.0)) for name in rows}
    output = torch.where(there.unsqueeze(-1), seen.output, 0.0)
    shift, weight, gap = (torch.where(there, x, 0.0) for x in seen.parts or ())
    return replace(seen, output=output, parts=(shift, weight, gap), **made)
