"""Tiny transformers in float64, and their attention worked out by hand: slow, obvious, one head and one query
at a time.

`by_hand(model, ids)` gives, for every layer, hidden states, queries and keys as the scores see them (made
from the weights, not from hooks), the whole attention matrix, and functions to differentiate.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def tiny(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model of 2 layers, 4 heads, width 32, with weights large enough that attention is far from even."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "llama":
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            **(shape | changes),
        )
        model = LlamaForCausalLM(config)
    elif kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **(shape | changes))
        )
    else:
        config = BertConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            **(shape | changes),
        )
        model = BertModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                weight.mul_(9.0)
            elif weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model.double().eval()


@dataclass
class Layer:
    """One attention layer by hand; `query_of` and `write` take and give single vectors."""

    hidden: Tensor  # (token, width)
    query: Tensor  # (head, token, D)
    key: Tensor  # (head, token, D)
    value: Tensor
    probability: Tensor  # (head, token, token)
    scale: float
    causal: bool
    query_of: Any  # (head, position, hidden vector) -> query
    out_weight: Tensor  # (head, D, width)

    def G(self, head: int, i: int, query: Tensor) -> Tensor:
        seen = i + 1 if self.causal else self.key.shape[1]
        return torch.logsumexp(torch.stack([self.scale * query @ self.key[head, j] for j in range(seen)]), 0)

    def write(self, head: int, i: int) -> Tensor:
        mean = sum(self.probability[head, i, j] * self.value[head, j] for j in range(self.value.shape[1]))
        return mean @ self.out_weight[head]

    def gradient(self, head: int, i: int) -> Tensor:
        h = self.hidden[i].clone().requires_grad_()
        return torch.autograd.grad(self.G(head, i, self.query_of(head, i, h)), h)[0]


def by_hand(model: Any, ids: Tensor) -> list[Layer]:
    """Every layer of one of the `tiny` models."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=ids[None], output_hidden_states=True, output_attentions=True)
    kind = type(model).__name__
    make = {"LlamaForCausalLM": _llama, "GPT2LMHeadModel": _gpt2, "BertModel": _bert}[kind]
    return [make(model, i, out.hidden_states[i][0], out.attentions[i][0]) for i in range(2)]


def _llama(model: Any, index: int, hidden: Tensor, probability: Tensor) -> Layer:
    block = model.model.layers[index]
    attention, norm = block.self_attn, block.input_layernorm
    n, D = hidden.shape[0], 8
    frequency = 1.0 / (
        model.config.rope_parameters["rope_theta"] ** (torch.arange(0, D, 2, dtype=torch.float32) / D)
    )

    def turned(x: Tensor, position: int) -> Tensor:
        """Rotary embedding of one vector, pairs (c, c + D/2); the model's table of angles is float32."""
        angle = (position * frequency).repeat(2)
        half = torch.cat([-x[D // 2 :], x[: D // 2]])
        return x * angle.cos().double() + half * angle.sin().double()

    def normed(h: Tensor) -> Tensor:
        # the model's norm goes through float32
        x = h.float()
        return norm.weight * (x * torch.rsqrt(x.pow(2).mean() + norm.variance_epsilon)).double()

    def query_of(head: int, position: int, h: Tensor) -> Tensor:
        return turned(attention.q_proj.weight[head * D : (head + 1) * D] @ normed(h), position)

    x = torch.stack([normed(h) for h in hidden])
    rows = [
        slice((head // 2) * D, (head // 2 + 1) * D) for head in range(4)
    ]  # two query heads share a key head
    key = torch.stack(
        [torch.stack([turned(attention.k_proj.weight[r] @ x[i], i) for i in range(n)]) for r in rows]
    )
    value = torch.stack([x @ attention.v_proj.weight[r].T for r in rows])
    query = torch.stack([torch.stack([query_of(head, i, hidden[i]) for i in range(n)]) for head in range(4)])
    out = attention.o_proj.weight.T.reshape(4, D, -1)
    return Layer(
        hidden,
        query.detach(),
        key.detach(),
        value.detach(),
        probability,
        1 / math.sqrt(D),
        True,
        query_of,
        out.detach(),
    )


def _gpt2(model: Any, index: int, hidden: Tensor, probability: Tensor) -> Layer:
    block = model.transformer.h[index]
    D, width = 8, 32
    weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias

    def part(which: int, head: int, h: Tensor) -> Tensor:
        columns = slice(which * width + head * D, which * width + (head + 1) * D)
        return block.ln_1(h) @ weight[:, columns] + bias[columns]

    def query_of(head: int, position: int, h: Tensor) -> Tensor:
        return part(0, head, h)

    query, key, value = (
        torch.stack([part(which, head, hidden) for head in range(4)]).detach() for which in range(3)
    )
    out = block.attn.c_proj.weight.reshape(4, D, -1)
    return Layer(hidden, query, key, value, probability, 1 / math.sqrt(D), True, query_of, out.detach())


def _bert(model: Any, index: int, hidden: Tensor, probability: Tensor) -> Layer:
    attention = model.encoder.layer[index].attention
    D = 8

    def part(linear: Any, head: int, h: Tensor) -> Tensor:
        rows = slice(head * D, (head + 1) * D)
        return h @ linear.weight[rows].T + linear.bias[rows]

    def query_of(head: int, position: int, h: Tensor) -> Tensor:
        return part(attention.self.query, head, h)

    parts = (attention.self.query, attention.self.key, attention.self.value)
    query, key, value = (
        torch.stack([part(linear, head, hidden) for head in range(4)]).detach() for linear in parts
    )
    out = attention.output.dense.weight.T.reshape(4, D, -1)
    return Layer(hidden, query, key, value, probability, 1 / math.sqrt(D), False, query_of, out.detach())
