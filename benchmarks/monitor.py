"""What a TrainingMonitor costs: one step in 50 watched, on a small real training loop.

The loop trains the model that comes with the package on the text that comes with it: forward, backward,
gradient norm, AdamW, 8 windows of 256 characters. Three kinds of step take turns: plain, inside a monitor
that does not watch this one, and watched, read and logged (to CSV and to TensorBoard). With r and w the
medians, over rounds, of the time of an unwatched and of a watched step over that of the plain step of the
same round,

    overhead at k = ((k − 1) r + w) / k

which is the cost of k steps with a monitor over the same without. Small models are the hard case: what does
not shrink with the model (Python, the log) weighs more.
"""

import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import exptilt as xt
import harness
from harness import Goal

EVERY = 50
FOLDER = Path(str(files("exptilt.lens.models") / "shakespeare"))


def training(monitor_log: str | None, watched: bool, windows: int, folder: Path) -> Callable[[], Any]:
    """A function that makes one step of training, with its own model and optimizer; under no monitor if there
    is no log.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = FOLDER / "checkpoint-256"
    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(checkpoint)((FOLDER / "text.txt").read_text("utf-8"), verbose=False)[
            "input_ids"
        ]
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        starts = torch.randint(len(tokens) - 256, (windows, 1), generator=generator)
        batch = tokens[starts + torch.arange(256)]
        model(batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if monitor_log is None:
        return step
    monitor = xt.lens.TrainingMonitor(
        model, every=EVERY, log=monitor_log, folder=folder, max_logit=1e9, min_entropy=None
    )
    numbers = iter(range(0, 10**9, EVERY)) if watched else iter(range(1, 10**9, EVERY))

    def monitored() -> None:
        with monitor.step(next(numbers)):
            step()

    return monitored


def main(argv: Sequence[str] | None = None) -> None:
    arguments = harness.start(__doc__, argv)
    windows, rounds = (1, 2) if arguments.quick else (8, 25)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cases = {
            "plain": training(None, False, windows, folder),
            "not watched": training("csv", False, windows, folder),
            "watched, CSV": training("csv", True, windows, folder / "csv"),
            "watched, TensorBoard": training("tensorboard", True, windows, folder / "board"),
        }
        times = harness.compare(cases, "plain", rounds=rounds, minimum_seconds=0.0, label="steps of training")
        harness.print_times(times)
        goals = []
        for log in ("CSV", "TensorBoard"):
            overhead = (
                (EVERY - 1) * times["not watched"].ratio_median + times[f"watched, {log}"].ratio_median
            ) / EVERY
            goals.append(Goal(f"training, one step in {EVERY} to {log}", overhead, 1.02))
        harness.print_goals(goals)
        harness.save("monitor", {"times": times, "goals": goals}, folder=harness.folder(arguments.quick))


if __name__ == "__main__":
    main()
