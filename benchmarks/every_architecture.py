"""Every architecture of transformers under the lens: does a watched model give what it gives unwatched?

Each type that `AutoModel` knows is built small from its default configuration (sizes by name, see `SIZES`),
with random weights in float64, and run on random tokens, pictures or sounds, unwatched and inside
`xt.lens.watch`. The verdicts:

    same       the outputs agree to 1e-10, and attention was seen
    rounded    they agree to 1e-6: the model's own softmax is in float32, that of the watch in float64
    written    attention is written out with a softmax: `watch(model, softmax=True)` sees it, and agrees
    refused    the watch raised, and said why
    part       the outputs agree; the watch warned which modules it does not see
    differs    the outputs do not agree: must not happen
    none       there is no softmax attention to see (state spaces, convolutions, Fourier transforms)
    not built  the default configuration was not brought to a small model that runs on random input

It takes some minutes, most of them for importing models. `python benchmarks/every_architecture.py NAME ...`
tries some and says more.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import exptilt as xt
import harness
from exptilt._support.errors import ExptiltError
from exptilt.lens import NothingSeenError
from harness import Goal

PAGE = harness.FOLDER.parent / "lens.md"
LIMIT, ROUNDED = 1e-10, 1e-6
MOST = 30_000_000  # parameters
WORDS, LENGTH = 61, 12
# Sizes, and the names that configurations have for them.
SIZES = """
64 max_position_embeddings n_positions max_seq_len n_ctx max_source_positions max_target_positions seq_length
64 max_seq_length max_length
61 vocab_size text_vocab_size n_vocab
32 hidden_size d_model n_embd dim embed_dim word_embed_proj_dim projection_dim d_embed embedding_size emb_dim
32 encoder_hidden_size decoder_hidden_size vision_embed_dim text_embed_dim transformer_dim hidden_dim width
32 projection_size
40 intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner n_inner mlp_dim
40 dim_feedforward ff_dim intermediate_dim
16 image_size img_size mamba_d_head num_mel_bins n_mels
12 kv_lora_rank q_lora_rank o_lora_rank
8 head_dim d_kv d_head qk_nope_head_dim v_head_dim moe_intermediate_size qk_head_dim attention_head_dim
8 shared_expert_intermediate_size expert_intermediate_size moe_shared_expert_intermediate_size mamba_num_heads
8 global_head_dim swa_head_dim index_head_dim linear_key_head_dim linear_value_head_dim
5 sliding_window attention_window attention_chunk_size
4 num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads
4 patch_size heads
4 qk_rope_head_dim rotary_dim num_local_experts num_experts n_routed_experts moe_num_experts mamba_n_heads
4 linear_num_value_heads linear_num_key_heads index_n_heads num_routed_experts attention_heads
3 decoder_start_token_id num_channels
2 num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers depth layers
2 num_decoder_layers num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk top_k moe_k
2 num_kv_heads num_block_layers encoder_num_hidden_layers decoder_num_hidden_layers spatial_merge_size
2 global_num_key_value_heads num_global_key_value_heads index_topk mamba_expand eos_token_id
1 n_group topk_group n_shared_experts bos_token_id
0 pad_token_id first_k_dense_replace num_nextn_predict_layers
"""
SMALL = {name: int(line.split()[0]) for line in SIZES.strip().splitlines() for name in line.split()[1:]}
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers")


def shrink(config: Any) -> Any:
    """The same configuration with small sizes, its parts likewise."""
    before = next((getattr(config, n) for n in LAYERS if isinstance(getattr(config, n, None), int)), None)
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            _set(config, name, min(value, SMALL[name]))
        elif name in SMALL and value is None and name in ("pad_token_id", "decoder_start_token_id"):
            _set(config, name, SMALL[name])
        elif isinstance(value, list | tuple) and before is not None and len(value) == before > 2:
            _set(config, name, type(value)([*value[:1], *value[-1:]]))
    return config


def _set(config: Any, name: str, value: Any) -> None:
    with suppress(AttributeError, ValueError, TypeError, NotImplementedError):  # derived from others
        setattr(config, name, value)


def build(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a type, in float64 and eval mode, and what it is given."""
    import transformers as tf
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    torch.manual_seed(0)
    config = shrink(tf.models.auto.configuration_auto.CONFIG_MAPPING[kind]())
    made = MODEL_MAPPING[type(config)]
    made = made[0] if isinstance(made, tuple) else made
    with torch.device("meta"):
        size = sum(p.numel() for p in made(config).parameters())
    if size > MOST:
        raise ValueError(f"{size:,} parameters")
    model = made(config).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others do not know float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.3, generator=generator)
            elif name.endswith("weight"):
                p.normal_(1.0, 0.1, generator=generator)
    problem: Exception = ValueError("no input that this script knows")
    for inputs in candidates(model, generator):
        try:
            with torch.no_grad():
                model(**inputs)
            return model, inputs
        except Exception as found:  # another form of input may do
            problem = found
    raise problem


def candidates(model: Any, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """Random inputs that a model may take, the likeliest first."""
    config, reads, takes = model.config, model.main_input_name, inspect.signature(model.forward).parameters
    vision, audio = (getattr(config, f"{part}_config", None) or config for part in ("vision", "audio"))
    side = getattr(vision, "image_size", 16)
    sides = side if isinstance(side, list | tuple) else (side, side)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    words = torch.randint(3, WORDS, (2, LENGTH), generator=generator)
    pixels = noise(2, getattr(vision, "num_channels", 3), *sides)
    bins = getattr(audio, "num_mel_bins", None) or getattr(audio, "n_mels", 16)
    forms: dict[str, list[Tensor]] = {"input_ids": [words], "pixel_values": [pixels, pixels[:, None]]}
    longest, wide = getattr(config, "max_length", 64), getattr(config, "feature_size", 80)
    forms["input_values"] = [noise(2, 4000), noise(2, 1, 4000), noise(2, longest, bins)]
    forms["input_features"] = [noise(2, bins, 128), noise(2, 128, bins), noise(2, 128, wide)]
    more = {"use_cache": False} if "use_cache" in takes else {}
    if "decoder_input_ids" in takes:
        more["decoder_input_ids"] = words
    for x in forms.get(reads, []):
        yield {reads: x, **more}
    for other in ("pixel_values", "input_ids", "input_features", "input_values"):
        if other != reads and other in takes:
            for x in forms.get(reads, []):
                yield {reads: x, other: forms[other][0], **more}
    for other in ("input_ids", "hidden_states", "inputs_embeds"):
        if other in takes and other != reads:
            yield {other: words if other == "input_ids" else noise(2, LENGTH, 32), **more}


def first(output: Any) -> list[Tensor]:
    """The tensors of numbers in what a model gives."""
    parts = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [x for x in tree_leaves(parts) if isinstance(x, Tensor) and x.is_floating_point()]


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp(min=1e-300)) for a, b in zip(one, other, strict=True))


def attempt(kind: str) -> dict[str, Any]:
    """The verdict on one type of model."""
    try:
        model, inputs = build(kind)

        def run() -> list[Tensor]:
            torch.manual_seed(2)
            with torch.no_grad():
                return first(model(**inputs))

        plain = run()
        if not plain or apart(run(), plain) > 0 or not all(bool(x.isfinite().all()) for x in plain):
            raise ValueError("the model itself gives no output, or another one each time")
    except Exception as problem:  # of any kind: it is what the table tells
        return {"verdict": "not built", "why": _said(problem)}
    return {"model": type(model).__name__, **_watched(model, run, plain)}


def _watched(model: nn.Module, run: Callable[[], list[Tensor]], plain: list[Tensor]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings(record=True) as caught, xt.lens.watch(model) as seen:
            warnings.simplefilter("always")
            error = apart(run(), plain)
        missed = [str(w.message) for w in caught if "the record of" in str(w.message)]
        verdict = "differs" if not error <= ROUNDED else "part" if missed else "same"
        verdict = "rounded" if verdict == "same" and error > LIMIT else verdict
        return {"verdict": verdict, "error": error, "layers": len(seen.record.calls), "why": "".join(missed)}
    except NothingSeenError as problem:
        why = _said(problem)
    except ExptiltError as problem:
        return {"verdict": "refused", "why": _said(problem)}
    except Exception as problem:
        return {"verdict": "differs", "why": _said(problem)}
    try:
        with warnings.catch_warnings(), xt.lens.watch(model, softmax=True) as seen:
            warnings.simplefilter("ignore")
            error = apart(run(), plain)
        return {"verdict": "written" if error <= LIMIT else "differs", "error": error, "why": why}
    except NothingSeenError:
        return {"verdict": "none" if "no attention of it was seen" in why else "refused", "why": why}
    except Exception as problem:
        return {"verdict": "refused", "why": _said(problem)}


def _said(problem: BaseException) -> str:
    text = re.sub(r"/\S*/", "", " ".join(str(problem).split()))  # without this machine's paths
    return f"{type(problem).__name__}: {text[:200]}"


def measure(names: list[str]) -> dict[str, Any]:
    rows = {}
    for name in harness.track(names, "architectures"):
        rows[name] = attempt(name)
    wrong = sum(row["verdict"] == "differs" for row in rows.values())
    worst = max((row["error"] for row in rows.values() if row["verdict"] in ("same", "part")), default=0.0)
    goals = [Goal("largest error", worst, LIMIT), Goal("models whose output differs", wrong, 0)]
    return {"rows": rows, "goals": goals}


VERDICTS = {
    "same": "the same to rounding",
    "rounded": "the same to rounding of the model's own float32 softmax",
    "written": "the same, with `softmax=True`",
    "part": "the same; names what it does not see",
    "refused": "refused, with the reason",
    "differs": "**differs**",
    "none": "no softmax attention",
    "not built": "not tried: not built small by this script",
}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for verdict, words in VERDICTS.items():
        names = sorted(name for name, row in results["rows"].items() if row["verdict"] == verdict)
        if names:
            rows.append([words, str(len(names)), ", ".join(names)])
    return ["watched output", "types", "which"], rows


PARTS = (harness.Part(PAGE, "every architecture", "every_architecture", table),)


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    names = [] if any(word.startswith("-") for word in words) else words
    arguments = harness.start(__doc__, [] if names else words)
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    every = list(MODEL_MAPPING_NAMES)
    results = measure(names or (every[::40] if arguments.quick else every))
    for name in names:
        print(name, results["rows"][name])
    path = harness.save("every_architecture", results, folder=harness.folder(arguments.quick or bool(names)))
    results = harness.read(path)
    harness.print_table(*table(results))
    harness.print_goals(Goal(g["what"], g["value"], g["limit"], g["unit"]) for g in results["goals"])
    if not arguments.quick and not names:
        harness.write(PARTS)


if __name__ == "__main__":
    main()
