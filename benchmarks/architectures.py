"""Architectures under the lens: does a watched model give what it gives unwatched, and what derivatives?

Each is built small, with random weights in float64, and its numbers are held against torch's own attention
written out (`sdpa_kernel(SDPBackend.MATH)`), relative to their size:

    watched      output of the model inside `xt.lens.watch`
    jvp          forward derivative along all parameters
    2 × back     gradient of the squared gradient
    HVP          Hessian times a vector, forward over reverse
    per sample   gradients of each text of a batch, vmap(grad)

the last four inside `xt.differentiable(model)`. What plain torch does, with the attention it chooses by
itself, stands beside each if it raises or is wrong. Norms that a model computes in float32 round the same on
both sides. The second table has the peak memory of a forward derivative at 4096 and 8192 tokens, of one layer
with 2 heads, each in a process of its own.
"""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "lens.md"
DERIVATIVES = harness.FOLDER.parent / "differentiable.md"
WORDS, LENGTH, BATCH = 61, 9, 3
LONG, QUICK = 8192, 512
LIMIT = 1e-10
SMALL = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
PICTURE = {**SMALL, "image_size": 16, "patch_size": 4}
PAIR = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0}
PAIR |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
PAIR |= {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "decoder_start_token_id": 3}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LATENT |= {"num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1}
LATENT |= {"moe_intermediate_size": 8, "topk_group": 1, "num_experts_per_tok": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
FEW_KEYS = {**TEXT, **ENDS, "num_key_value_heads": 2}
GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS}
DISTILLED = {"vocab_size": WORDS, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 3, "pad_token_id": 0}
# Name: class of the model, options of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaModel", GROUPED),
    "Qwen2": ("Qwen2Model", GROUPED),
    "Qwen3": ("Qwen3Model", GROUPED),
    "Mistral": ("MistralModel", {**GROUPED, "sliding_window": 4}),
    "Gemma": ("GemmaModel", GROUPED),
    "Gemma 3": ("Gemma3TextModel", {**GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "Phi": ("PhiModel", {**TEXT, **ENDS}),
    "Phi-3": ("Phi3Model", FEW_KEYS),
    "OLMo": ("OlmoModel", FEW_KEYS),
    "OLMo 2": ("Olmo2Model", FEW_KEYS),
    "StableLM": ("StableLmModel", FEW_KEYS),
    "StarCoder 2": ("Starcoder2Model", FEW_KEYS),
    "Cohere": ("CohereModel", FEW_KEYS),
    "Granite": ("GraniteModel", FEW_KEYS),
    "SmolLM3": ("SmolLM3Model", FEW_KEYS),
    "GLM": ("GlmModel", GROUPED),
    "Helium": ("HeliumModel", GROUPED),
    "Nemotron": ("NemotronModel", GROUPED),
    "Falcon": ("FalconModel", {"vocab_size": WORDS, **SMALL}),
    "DeepSeek-V3": ("DeepseekV3Model", {**TEXT, **LATENT, **ENDS}),
    "GPT-2": ("GPT2Model", GPT2),
    "GPT-NeoX": ("GPTNeoXModel", {**TEXT, **ENDS}),
    "OPT": ("OPTModel", {**TEXT, "ffn_dim": 40, "word_embed_proj_dim": 32}),
    "BERT": ("BertModel", TEXT),
    "RoBERTa": ("RobertaModel", TEXT),
    "DistilBERT": ("DistilBertModel", DISTILLED),
    "ELECTRA": ("ElectraModel", {**TEXT, "embedding_size": 16}),
    "ALBERT": ("AlbertModel", {**TEXT, "embedding_size": 16}),
    "ModernBERT": ("ModernBertModel", {**TEXT, **ENDS, "cls_token_id": 1, "sep_token_id": 2}),
    "ViT": ("ViTModel", PICTURE),
    "DeiT": ("DeiTModel", PICTURE),
    "DINOv2": ("Dinov2Model", PICTURE),
    "BEiT": ("BeitModel", {**PICTURE, "use_relative_position_bias": True}),
    "SigLIP, pictures": ("SiglipVisionModel", PICTURE),
    "CLIP, text": ("CLIPTextModel", {**TEXT, **ENDS}),
    "BART": ("BartModel", {**PAIR, "max_position_embeddings": 64}),
    "T5": ("T5Model", T5),
    "Whisper": ("WhisperModel", {**PAIR, "max_source_positions": 10, "num_mel_bins": 8}),
    "nn.TransformerEncoder": ("", {}),
}


def build(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Tensor]]:
    """A model in eval mode, the options of a call, and what it reads: ``(batch, ...)`` each."""
    import transformers as tf

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    kind, options = MODELS[name]
    if not kind:
        layer = nn.TransformerEncoderLayer(32, 4, 40, dropout=0.0, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    else:
        made = getattr(tf, kind)
        model = made(made.config_class(**options, attn_implementation="sdpa"))
    model = model.double().train(
        not kind
    )  # torch's own encoder has a fused path in eval mode, without derivatives
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and label.endswith("weight") else 0.0
            parameter.normal_(centre, 0.3, generator=generator)
    words = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
    if not kind:
        return model, {}, {"src": torch.randn(BATCH, LENGTH, 32, generator=generator).double()}
    if options.get("image_size"):
        return model, {}, {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator).double()}
    if name == "Whisper":
        sound = torch.randn(BATCH, 8, 20, generator=generator).double()
        return model, {"use_cache": False}, {"input_features": sound, "decoder_input_ids": words}
    both = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    plain = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return model, plain, {"input_ids": words, **both}


def first(output: Any) -> Tensor:
    """The first tensor of what a model gives."""
    return output if isinstance(output, Tensor) else output[0]


def operations(
    model: nn.Module, options: dict[str, Any], inputs: dict[str, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """The derivatives of the table by name, each as one vector."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    along = {name: torch.randn(p.shape, generator=generator).to(p) for name, p in parameters.items()}

    def output(p: Any, given: dict[str, Tensor] = inputs) -> Tensor:
        return first(functional_call(model, p, (), {**given, **options}))

    def loss(p: Any, given: dict[str, Tensor] = inputs) -> Tensor:
        return output(p, given).square().mean()

    def flat(tensors: Iterator[Tensor | None] | Any, start: int = 0) -> Tensor:
        return torch.cat([x.flatten(start) for x in tensors if x is not None], -1)

    def twice() -> Tensor:
        p = {name: x.clone().requires_grad_() for name, x in parameters.items()}
        slopes = torch.autograd.grad(loss(p), list(p.values()), create_graph=True, allow_unused=True)
        squared = sum(x.square().sum() for x in slopes if x is not None)
        return flat(torch.autograd.grad(squared, list(p.values()), allow_unused=True))

    def one(p: Any, given: dict[str, Tensor]) -> Tensor:
        return loss(p, {name: x[None] for name, x in given.items()})

    return {
        "jvp": lambda: jvp(output, (parameters,), (along,))[1],
        "2 × back": twice,
        "HVP": lambda: flat(jvp(grad(loss), (parameters,), (along,))[1].values()),
        "per sample": lambda: flat(vmap(grad(one), (None, 0))(parameters, inputs).values(), 1),
    }


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def attempt(function: Callable[[], Tensor], exact: Tensor) -> float | str:
    """The error of a function, or what it raises."""
    try:
        return error(function(), exact)
    except Exception as problem:  # of any kind: it is what the table tells
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"


def one_architecture(name: str) -> dict[str, Any]:
    model, options, inputs = build(name)
    with torch.no_grad():
        with sdpa_kernel(SDPBackend.MATH):
            exact = first(model(**inputs, **options))
        with xt.lens.watch(model):
            seen = error(first(model(**inputs, **options)), exact)
    row: dict[str, Any] = {"name": name, "watched": seen, "ours": {}, "torch": {}}
    for label, operation in operations(model, options, inputs).items():
        with sdpa_kernel(SDPBackend.MATH):
            exact = operation()
        row["torch"][label] = attempt(operation, exact)
        with xt.differentiable(model):
            row["ours"][label] = attempt(operation, exact)
    return row


def prepare(way: str, length: int) -> Callable[[], object]:
    """In a new process: a forward derivative of one layer of 2 heads, after one on something small."""
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)

    def run(n: int) -> object:
        x, v = torch.randn(2, 1, n, 64)
        with (
            torch.no_grad(),
            xt.differentiable(layer) if way == "differentiable" else sdpa_kernel(SDPBackend.MATH),
        ):
            return jvp(layer, (x,), (v,))[1]

    run(64)
    return lambda: run(length)


def measure(quick: bool) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="There is a performance drop")
    names = list(MODELS)[::8] if quick else list(MODELS)
    rows = [one_architecture(name) for name in harness.track(names, "architectures")]
    sizes = (QUICK, 2 * QUICK) if quick else (LONG // 2, LONG)
    memory = [
        {"way": way, "length": n, "peak": harness.peak_extra_memory(prepare, way, n).peak}
        for way in ("differentiable", "torch, written out")
        for n in sizes
    ]
    worst = max(
        x if isinstance(x, float) else 1.0 for row in rows for x in (row["watched"], *row["ours"].values())
    )
    growth = memory[1]["peak"] / max(memory[0]["peak"], 1)
    goals = [
        Goal("largest error", worst, LIMIT),
        Goal(f"memory, {sizes[1]} over {sizes[0]} tokens", growth, 2.2),
    ]
    return {"rows": rows, "memory": memory, "goals": goals}


def cell(ours: float | str, plain: float | str) -> str:
    """An error of ours, and what plain torch does if it is not right too."""
    beside = (
        ""
        if isinstance(plain, float) and plain < LIMIT
        else "; torch raises"
        if isinstance(plain, str)
        else "; torch is wrong"
    )
    return (f"{ours:.0e}" if isinstance(ours, float) else "raises") + beside


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    labels = list(results["rows"][0]["ours"])
    rows = [
        [row["name"], f"{row['watched']:.0e}", *(cell(row["ours"][x], row["torch"][x]) for x in labels)]
        for row in results["rows"]
    ]
    return ["architecture", "watched", *labels], rows


def memory_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [[m["way"], str(m["length"]), f"{m['peak'] / 1e6:.0f}"] for m in results["memory"]]
    return ["forward derivative", "tokens", "peak MB"], rows


PARTS = (
    harness.Part(PAGE, "architectures", "architectures", table),
    harness.Part(DERIVATIVES, "memory", "architectures", memory_table),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save("architectures", measure(arguments.quick), folder=harness.folder(arguments.quick))
    results = harness.read(path)
    harness.print_table(*table(results))
    harness.print_table(*memory_table(results))
    harness.print_goals(Goal(g["what"], g["value"], g["limit"], g["unit"]) for g in results["goals"])
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
