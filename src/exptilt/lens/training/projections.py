r"""Find the weights that make one head's queries and keys, in the layouts that attention modules use.

A head's scores are s = scale · ⟨W_q x, W_k y⟩ up to a rotation, so they scale with the head's rows of W_q
(and of its bias) and with its key head's rows of W_k. Layouts that are known:

    two linear maps          q_proj and k_proj (Llama, Mistral, Gemma 2, Whisper ...), query and key (BERT),
                             q and k, q_lin and k_lin
    one map, [q | k | v]     GPT-2's c_attn (columns), Phi-3's qkv_proj, torch's in_proj_weight
    one map, [q k v] a head  GPT-NeoX's query_key_value
    latent attention (MLA)   DeepSeek V2 and V3, Kimi K2: queries and keys of two parts, ⟨q₁, k₁⟩ + ⟨q₂, k₂⟩,
                             where k₁ is a head's own and k₂, with its rotary positions, one for all heads: q₁
                             and k₁ are scaled by √γ, q₂ by γ. The norms of its latent states come before
                             these weights

Anything else raises, for example norms after the maps (Qwen 3, Gemma 3, OLMo 2), which already bound scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn, cast

from torch import Tensor, nn

from exptilt._support.errors import ArgumentError

_PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"))


@dataclass(frozen=True)
class Rows:
    """A stretch of a weight or bias in which every head has its own piece."""

    tensor: Tensor
    axis: int  # along which the heads lie
    start: int  # where head 0 begins
    stride: int  # from one head to the next
    dim: int  # length of a piece
    heads: int
    power: float | None = None  # scaled by γ^power; None: ½ if a key head serves one query head, else 1

    def of(self, head: int) -> Tensor:
        """The piece of one head, a view."""
        return self.tensor.detach().narrow(self.axis, self.start + head * self.stride, self.dim)


@dataclass(frozen=True)
class Projections:
    """Weights and biases behind the queries and the keys of a layer, by query head and by key head."""

    query: list[Rows]
    key: list[Rows]


@dataclass(frozen=True)
class _Finder:
    """Finds the projections of one attention module with `heads` query heads of dimension `dim`."""

    module: nn.Module
    name: str
    dim: int
    heads: int

    def refuse(self, why: str) -> NoReturn:
        raise ArgumentError(f"clip_qk_: {type(self.module).__name__} {self.name!r} {why}")

    def length(self, attribute: str) -> int:
        """Output dimension of a linear map; GPT-2's Conv1D has its weight transposed."""
        part = getattr(self.module, attribute)
        weight = getattr(part, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            self.refuse(
                f"holds {attribute} in a form that cannot be rescaled head by head (quantised or sharded "
                "weights)."
            )
        return int(weight.shape[1 if type(part).__name__ == "Conv1D" else 0])

    def linear(self, attribute: str, start: int, stride: int, heads: int) -> list[Rows]:
        """Rows of a linear map's weight and, if it has one, of its bias."""
        part = getattr(self.module, attribute)
        kind = type(part).__name__
        if type(part) is not nn.Linear and kind != "Conv1D":
            self.refuse(
                f"makes queries or keys with a {kind} ({attribute}). Only plain linear maps can be rescaled; "
                "merge it first."
            )
        pieces = (start, stride, self.dim, heads)
        rows = [Rows(part.weight, 1 if kind == "Conv1D" else 0, *pieces)]
        return rows if part.bias is None else [*rows, Rows(part.bias, 0, *pieces)]

    def key_heads(self, length: int) -> int:
        """Number of key heads in a map of output dimension `length`."""
        if length % self.dim or length == 0 or self.heads % (length // self.dim):
            self.unknown(f"keys of {length} numbers")
        return length // self.dim

    def unknown(self, what: str) -> NoReturn:
        self.refuse(f"has {what} for {self.heads} heads of {self.dim}; this layout is not known.")

    def multihead(self, module: nn.MultiheadAttention) -> Projections:
        """Projections of nn.MultiheadAttention: one weight for queries, keys and values, or one for each."""
        E, pieces = module.embed_dim, (self.dim, self.dim, self.heads)
        fused = module.in_proj_weight is not None
        query = [Rows(module.in_proj_weight if fused else module.q_proj_weight, 0, 0, *pieces)]
        key = [Rows(module.in_proj_weight if fused else module.k_proj_weight, 0, E if fused else 0, *pieces)]
        if module.in_proj_bias is not None:
            query.append(Rows(module.in_proj_bias, 0, 0, *pieces))
            key.append(Rows(module.in_proj_bias, 0, E, *pieces))
        if module.bias_k is not None:
            key.append(Rows(module.bias_k, 2, 0, *pieces))
        return Projections(query, key)

    def latent(self) -> Projections:
        """Projections of latent attention, whose keys are partly a head's own, partly shared by all heads."""
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes = [getattr(self.module, name, None) for name in names]
        q = "q_b_proj" if isinstance(getattr(self.module, "q_b_proj", None), nn.Module) else "q_proj"
        if not all(isinstance(size, int) for size in sizes) or not hasattr(self.module, q):
            self.unknown("latent keys")
        own, shared, values = cast(list[int], sizes)
        lengths = self.length(q), self.length("kv_b_proj")
        if own + shared != self.dim or lengths != (self.heads * self.dim, self.heads * (own + values)):
            self.unknown(f"{q} of {lengths[0]} rows and kv_b_proj of {lengths[1]}")
        query = self.linear(q, 0, self.dim, self.heads)
        key = self.linear("kv_b_proj", 0, own + values, self.heads)
        return Projections(
            [replace(rows, dim=own, power=0.5) for rows in query]
            + [replace(rows, start=own, dim=shared, power=1.0) for rows in query],
            [replace(rows, dim=own, power=0.5) for rows in key],
        )

    def pair(self, q: str, k: str) -> Projections:
        """Projections made by two linear maps, `q` for the queries and `k` for the keys."""
        if self.length(q) != self.heads * self.dim:
            self.unknown(f"{q} of {self.length(q)} rows")
        if getattr(self.module, q) is getattr(self.module, k):
            self.refuse("makes queries and keys with the same weights, so that scores are quadratic in them.")
        key_heads = self.key_heads(self.length(k))
        return Projections(self.linear(q, 0, self.dim, self.heads), self.linear(k, 0, self.dim, key_heads))

    def fused(self) -> Iterator[tuple[str, str, int, int, int, int, int]]:
        """Known layouts in which one linear map makes several of queries, keys and values.

        Each is: attribute of the queries and of the keys, output dimension of either map, first row of the
        keys, rows from one head to the next, number of key heads.
        """
        L, dim, heads = self.heads * self.dim, self.dim, self.heads
        yield "q_attn", "c_attn", L, 2 * L, 0, dim, heads  # GPT-2's cross-attention: [k | v]
        yield "c_attn", "c_attn", 3 * L, 3 * L, L, dim, heads
        if isinstance(groups := getattr(self.module, "num_key_value_heads", None), int):
            total = L + 2 * groups * dim
            yield "qkv_proj", "qkv_proj", total, total, L, dim, groups
        if type(self.module).__name__ == "GPTNeoXAttention":
            yield "query_key_value", "query_key_value", 3 * L, 3 * L, dim, 3 * dim, heads

    def find(self) -> Projections:
        module = self.module
        if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
            self.refuse(
                "clamps queries and keys after their weights (clip_qkv), so scores do not scale with the "
                "weights."
            )
        if isinstance(module, nn.MultiheadAttention):
            return self.multihead(module)
        parts = dict(module.named_children())
        if {"kv_a_layernorm", "kv_b_proj"} <= parts.keys():
            return self.latent()
        norms = {
            name: x for name, x in parts.items() if "norm" in name.lower() and type(x) is not nn.Identity
        }
        norms.pop("LayerNorm", None)  # ALBERT's, which acts on the output of its attention module
        if norms:
            self.refuse(
                f"normalises queries or keys ({' and '.join(norms)}) after their weights, which then do not "
                "scale scores. The norm already bounds them; lower its weight instead."
            )
        for q, k in _PAIRS:
            if all(isinstance(getattr(module, name, None), nn.Module) for name in (q, k)):
                return self.pair(q, k)
        for q, k, query_length, key_length, start, stride, key_heads in self.fused():
            there = hasattr(module, q) and hasattr(module, k)
            if there and (self.length(q), self.length(k)) == (query_length, key_length):
                query = self.linear(q, 0, stride, self.heads)
                return Projections(query, self.linear(k, start, stride, key_heads))
        names = ", ".join(parts) or "no submodules"
        self.refuse(f"keeps its query and key weights in a layout that is not known ({names}).")


def find_projections(module: nn.Module, name: str, dim: int, heads: int) -> Projections:
    """Weights and biases of a module's queries and keys, given its dotted name, dimension and query heads."""
    return _Finder(module, name, dim, heads).find()
