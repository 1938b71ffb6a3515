r"""Where the weights of one head's queries and keys are, in the layouts that attention modules use.

A head's scores are s = scale · ⟨W_q x, W_k y⟩ up to a rotation, so they scale with the head's rows of W_q (and of its bias) and with its
key head's rows of W_k. Layouts that are known:

    two linear maps         q_proj and k_proj (Llama, Mistral, Gemma 2, Whisper ...), query and key (BERT, ViT), q and k, q_lin and k_lin
    one map, [q | k | v]    GPT-2's c_attn (columns), Phi-3's qkv_proj, in_proj_weight of torch.nn.MultiheadAttention
    one map, [q k v] a head GPT-NeoX's query_key_value
    norms after the maps    OLMo 2: a norm over all heads together, whose weight then is what scales them one by one

Anything else raises. Among it: a norm of each head by itself with one weight for all of them (Qwen 3, Gemma 3), after which no weight
belongs to one head alone.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from exptilt._support.errors import ArgumentError

_PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"))
# Norms over all heads of a layer that multiply by their weight at the end.
_WIDE_NORMS = {"OlmoeRMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm"}


@dataclass(frozen=True)
class Rows:
    """A stretch of a weight or bias in which every head has its own piece of `dim`.

    Attributes:
        tensor: the parameter.
        axis: along which the heads lie.
        start: where head 0 begins.
        stride: from one head to the next.
        dim: length of a piece.
        heads: how many there are.
    """

    tensor: Tensor
    axis: int
    start: int
    stride: int
    dim: int
    heads: int

    def of(self, head: int) -> Tensor:
        """The piece of one head, a view."""
        return self.tensor.detach().narrow(self.axis, self.start + head * self.stride, self.dim)


@dataclass(frozen=True)
class Projections:
    """What makes the queries and the keys of a layer.

    Attributes:
        query: pieces by query head.
        key: pieces by key head.
    """

    query: list[Rows]
    key: list[Rows]

    @property
    def key_heads(self) -> int:
        """How many key heads there are."""
        return self.key[0].heads


def _refuse(module: nn.Module, name: str, why: str) -> ArgumentError:
    return ArgumentError(f"clip_qk_: {type(module).__name__} {name!r} {why}")


def _norms(module: nn.Module) -> dict[str, nn.Module]:
    """Norms inside an attention module, by name."""
    return {
        name: part
        for name, part in module.named_children()
        if "norm" in name.lower() and not isinstance(part, nn.Identity)
    }


def _linear(module: nn.Module, name: str, attribute: str, pieces: tuple[int, int, int, int]) -> list[Rows]:
    """Weight and bias of a linear map; pieces: start, stride, dim, heads."""
    part = getattr(module, attribute)
    if type(part) is nn.Linear:
        axis = 0
    elif type(part).__name__ == "Conv1D":  # GPT-2's: the weight is transposed
        axis = 1
    else:
        kind = type(part).__name__
        raise _refuse(
            module,
            name,
            f"makes queries or keys with a {kind} ({attribute}). Only plain linear maps can be rescaled; merge it first.",
        )
    rows = [Rows(part.weight, axis, *pieces)]
    return rows if part.bias is None else [*rows, Rows(part.bias, 0, *pieces)]


def _length(module: nn.Module, name: str, attribute: str) -> int:
    """How many numbers a linear map puts out."""
    part = getattr(module, attribute)
    weight = getattr(part, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise _refuse(
            module,
            name,
            f"holds {attribute} in a form that cannot be rescaled head by head (quantised or sharded weights).",
        )
    return int(weight.shape[1 if type(part).__name__ == "Conv1D" else 0])


def _key_heads(module: nn.Module, name: str, length: int, dim: int, heads: int) -> int:
    """Key heads in a map that puts out `length` numbers."""
    if length % dim or length == 0 or heads % (length // dim):
        raise _refuse(
            module,
            name,
            f"has keys of {length} numbers for {heads} heads of {dim}; this layout is not known.",
        )
    return length // dim


def _multihead(module: nn.MultiheadAttention, dim: int, heads: int) -> Projections:
    E = module.embed_dim
    pieces = (dim, dim, heads)
    if module.in_proj_weight is not None:
        query, key = (
            [Rows(module.in_proj_weight, 0, 0, *pieces)],
            [Rows(module.in_proj_weight, 0, E, *pieces)],
        )
    else:
        query, key = [Rows(module.q_proj_weight, 0, 0, *pieces)], [Rows(module.k_proj_weight, 0, 0, *pieces)]
    if module.in_proj_bias is not None:
        query.append(Rows(module.in_proj_bias, 0, 0, *pieces))
        key.append(Rows(module.in_proj_bias, 0, E, *pieces))
    if module.bias_k is not None:
        key.append(Rows(module.bias_k, 2, 0, *pieces))
    return Projections(query, key)


def _wide_norms(
    module: nn.Module, name: str, norms: dict[str, nn.Module], dim: int, heads: int
) -> Projections:
    """Norms over all heads together; the weights before them have no say in the size of what comes out."""
    found = []
    for attribute in ("q_norm", "k_norm"):
        weight = getattr(norms.get(attribute), "weight", None)
        if (
            len(norms) != 2
            or type(norms.get(attribute)).__name__ not in _WIDE_NORMS
            or not isinstance(weight, Tensor)
            or weight.dim() != 1
        ):
            names = " and ".join(norms)
            raise _refuse(
                module,
                name,
                f"normalises queries or keys ({names}) after their weights, with what all heads share: no weight scales the scores of one "
                "head alone. The norm already bounds them; lower its weight instead.",
            )
        found.append(weight)
    query, key = found
    if query.numel() != heads * dim:
        raise _refuse(
            module,
            name,
            f"has a norm of {query.numel()} numbers for {heads} heads of {dim}; this layout is not known.",
        )
    key_heads = _key_heads(module, name, key.numel(), dim, heads)
    return Projections([Rows(query, 0, 0, dim, dim, heads)], [Rows(key, 0, 0, dim, dim, key_heads)])


def find_projections(module: nn.Module, name: str, dim: int, heads: int) -> Projections:
    """Weights and biases of queries and keys.

    Args:
        module: the attention module.
        name: its dotted name, for errors.
        dim: of the queries.
        heads: number of query heads.
    """
    if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        raise _refuse(
            module,
            name,
            "clamps queries and keys after their weights (clip_qkv), so scores do not scale with the weights.",
        )
    if isinstance(module, nn.MultiheadAttention):
        return _multihead(module, dim, heads)
    norms = _norms(module)
    if norms:
        return _wide_norms(module, name, norms, dim, heads)
    length = heads * dim
    pieces = (dim, dim, heads)
    for q, k in _PAIRS:
        if isinstance(getattr(module, q, None), nn.Module) and isinstance(
            getattr(module, k, None), nn.Module
        ):
            if _length(module, name, q) != length:
                raise _refuse(
                    module,
                    name,
                    f"has {q} of {_length(module, name, q)} rows for {heads} heads of {dim}; this layout is not known.",
                )
            if getattr(module, q) is getattr(module, k):
                raise _refuse(
                    module,
                    name,
                    "makes queries and keys with the same weights, so that scores are quadratic in them.",
                )
            key_heads = _key_heads(module, name, _length(module, name, k), dim, heads)
            return Projections(
                _linear(module, name, q, (0, *pieces)), _linear(module, name, k, (0, dim, dim, key_heads))
            )
    if hasattr(module, "q_attn") and hasattr(module, "c_attn"):  # GPT-2's cross-attention: [k | v]
        if (_length(module, name, "q_attn"), _length(module, name, "c_attn")) == (length, 2 * length):
            return Projections(
                _linear(module, name, "q_attn", (0, *pieces)), _linear(module, name, "c_attn", (0, *pieces))
            )
    elif hasattr(module, "c_attn") and _length(module, name, "c_attn") == 3 * length:
        return Projections(
            _linear(module, name, "c_attn", (0, *pieces)), _linear(module, name, "c_attn", (length, *pieces))
        )
    if hasattr(module, "qkv_proj") and hasattr(module, "num_key_value_heads"):
        key_heads = int(module.num_key_value_heads)  # type: ignore[arg-type]
        if _length(module, name, "qkv_proj") == (heads + 2 * key_heads) * dim:
            return Projections(
                _linear(module, name, "qkv_proj", (0, *pieces)),
                _linear(module, name, "qkv_proj", (length, dim, dim, key_heads)),
            )
    if type(module).__name__ == "GPTNeoXAttention" and _length(module, name, "query_key_value") == 3 * length:
        attribute = "query_key_value"
        return Projections(
            _linear(module, name, attribute, (0, 3 * dim, dim, heads)),
            _linear(module, name, attribute, (dim, 3 * dim, dim, heads)),
        )
    parts = ", ".join(part for part, _ in module.named_children()) or "no submodules"
    raise _refuse(module, name, f"keeps its query and key weights in a layout that is not known ({parts}).")
