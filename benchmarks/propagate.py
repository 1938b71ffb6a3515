"""Uncertainty through attention: what it costs, and how it compares with Monte Carlo through whole models.

cost        `propagate` with a diagonal covariance, both readings, beside the same attention without one
models      noise of rank 8 on the embeddings of the model that comes with the package and of MiniLM: mean,
            variances and covariance (of the last token) of the hidden states of every layer by the delta
            method, against 100,000 Monte Carlo passes through the same network; coverage of the 50, 90 and
            95 % intervals
accuracy    the passes that Monte Carlo needs for variances as good as the delta method's, 2/e² of them for
            a relative error e, and the time they take over its time

`--only cost` or `--only models` does one of both, which are saved apart: the passes take half an hour.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import exptilt as xt
import harness
from exptilt._support.progress import track
from exptilt.attention import Moments, propagate
from exptilt.lens.models.load import default_folder, load_model
from exptilt.tilting import attend
from harness import Goal

PAGE = harness.FOLDER.parent / "filters_and_attention.md"
LEVELS = (0.5, 0.9, 0.95)
NOISE, RANK = 0.02, 8  # the noise's standard deviation over that of the embeddings


def cost_cases(length: int, heads: int = 8, size: int = 64) -> dict[str, Callable[[], object]]:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, length, size, generator=g) for _ in range(2))
    x, weight = (
        torch.randn(1, length, heads * size, generator=g),
        torch.randn(heads, size, heads * size, generator=g),
    )
    variance = torch.rand(1, length, heads * size, generator=g)

    def plain() -> Tensor:
        return attend(q, k, torch.einsum("...ie,hde->...hid", x, weight)).output

    def carried(reading: str) -> Callable[[], object]:
        return lambda: propagate(x, variance, q, k, weight, reading=reading)

    return {"attention": plain, "mixture": carried("mixture"), "average": carried("average")}


def hidden_states(model: Any) -> Callable[[Tensor], Tensor]:
    """From embeddings ``(..., n, E)`` to the hidden states of all layers, ``(layers, ..., n, E)``."""

    def run(x: Tensor) -> Tensor:
        seen = model(inputs_embeds=x.reshape(-1, *x.shape[-2:]), output_hidden_states=True).hidden_states
        return torch.stack([h.reshape(x.shape) for h in seen[1:]])

    return run


def model_errors(where: Any, passes: int, length: int, batch: int) -> dict[str, Any]:
    """Errors by layer, coverage at the end, and seconds of the delta method and of a pass."""
    model = load_model(where).model.eval()
    ids = torch.randint(5, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), xt.differentiable(model):
        mean = model.get_input_embeddings()(ids).detach()
        g = torch.Generator().manual_seed(1)
        factor = NOISE * mean.std() * torch.randn(*mean.shape, RANK, generator=g) / RANK**0.5
        given, run = Moments(mean, factor, "low-rank"), hidden_states(model)
        given.through(run, joint=True)  # compiled
        begin = time.perf_counter()
        found = given.through(run, joint=True)
        seconds = time.perf_counter() - begin
        first, second = (
            torch.zeros_like(found.mean, dtype=torch.float64),
            torch.zeros_like(found.mean, dtype=torch.float64),
        )
        inside, cross = dict.fromkeys(LEVELS, 0.0), torch.zeros_like(found.matrix[..., -1, :, :])
        begin = time.perf_counter()
        for _ in track(range(-(-passes // batch)), f"passes through {Path(str(where)).name}"):
            z = torch.randn(batch, RANK, generator=g)
            got = run(mean + torch.einsum("ier,br->bie", factor, z)).movedim(1, 0)
            gap = (got - found.mean).double()
            first, second = first + gap.sum(0), second + gap.square().sum(0)
            last = gap[..., -1, :].float()
            cross += torch.einsum("bld,ble->lde", last, last)
            for level in LEVELS:
                inside[level] += float(found.covers(got, level)[:, -1].double().mean())
        per_pass = (time.perf_counter() - begin) / (-(-passes // batch) * batch)
    count = -(-passes // batch) * batch
    first, variance = first / count, second / count - (first / count).square()
    ours = found.variance.double()
    middle = first[..., -1, :]
    cross = cross.double() / count - middle.unsqueeze(-1) * middle.unsqueeze(-2)
    off = torch.linalg.matrix_norm(found.matrix[..., -1, :, :] - cross) / torch.linalg.matrix_norm(cross)
    error = ((ours - variance).square().mean((-1, -2)) / variance.square().mean((-1, -2))).sqrt()
    shift = (first.square().mean((-1, -2)) / variance.mean((-1, -2))).sqrt()
    own = max(float(error[-1]) ** 2 - 2 / count, 2 / count)  # no less than what Monte Carlo itself errs by
    return {
        "passes": count,
        "mean error / deviation": shift.tolist(),
        "variance error": error.tolist(),
        "covariance error": off.tolist(),
        "coverage": {str(level): total / (count / batch) for level, total in inside.items()},
        "seconds": seconds,
        "seconds of a pass": per_pass,
        "times faster at equal accuracy": 2 / own * per_pass / seconds,
    }


def cost_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Milliseconds and ratios, for the page."""
    rows = [
        [
            length,
            *(f"{1e3 * row[name]['best']:.3g}" for name in row),
            *(f"{row[n]['ratio']:.2f}" for n in list(row)[1:]),
        ]
        for length, row in results["cost"].items()
    ]
    return ["tokens", "attention, ms", "mixture, ms", "average, ms", "mixture, ratio", "average, ratio"], rows


def model_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Errors by layer and coverage, for the page."""
    header = [
        "model",
        "layer",
        "error of the mean, in deviations",
        "error of variances",
        "error of the covariance",
        "covered by 50 / 90 / 95 %",
    ]
    rows = []
    for name, found in results["models"].items():
        names = ("mean error / deviation", "variance error", "covariance error")
        pairs = list(zip(*(found[name] for name in names), strict=True))
        for layer, (shift, error, off) in enumerate(pairs, 1):
            cover = (
                " / ".join(f"{100 * x:.1f}" for x in found["coverage"].values())
                if layer == len(pairs)
                else ""
            )
            rows.append(
                [name, str(layer), f"{shift:.3f}", f"{100 * error:.1f} %", f"{100 * off:.1f} %", cover]
            )
    return header, rows


PARTS = (
    harness.Part(PAGE, "cost of uncertainty", "propagate", cost_table),
    harness.Part(PAGE, "uncertainty through models", "propagate_models", model_table),
)


def costs(quick: bool) -> dict[str, Any]:
    """Times of `propagate` beside plain attention."""
    cost = {}
    for length in (256,) if quick else (512, 2048, 8192):
        print(f"\n{length} tokens", flush=True)
        cost[length] = harness.compare(cost_cases(length), "attention", rounds=2 if quick else 9)
        harness.print_times(cost[length])
    goals = [
        Goal(f"{reading}, {length} tokens, over attention", row[reading].ratio, 2.5)
        for length, row in cost.items()
        for reading in ("mixture", "average")
    ]
    return {"cost": cost, "goals": goals}


def through_models(quick: bool) -> dict[str, Any]:
    """Errors and times of the delta method through whole models."""
    models, goals, passes = {}, [], 256 if quick else 100_000
    for name, where in {"embedded": default_folder() / "checkpoint-4096", "MiniLM": "minilm"}.items():
        if name == "MiniLM" and quick:
            continue
        models[name] = model_errors(where, passes, 6, 64 if quick else 500)
        print(name, {key: value for key, value in models[name].items() if key != "passes"}, flush=True)
        faster = models[name]["times faster at equal accuracy"]
        goals.append(Goal(f"{name}: time over Monte Carlo's at equal accuracy", 1 / faster, 0.01))
    return {"models": models, "goals": goals}


def main(argv: list[str] | None = None) -> Path:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--only", choices=("cost", "models"))
    chosen, rest = own.parse_known_args(argv)
    arguments = harness.start(__doc__, rest)
    for part, measure, name in zip(
        PARTS, (costs, through_models), ("propagate", "propagate_models"), strict=True
    ):
        if chosen.only not in (None, "cost" if measure is costs else "models"):
            continue
        results = measure(arguments.quick)
        harness.print_goals(results["goals"])
        path = harness.save(name, results, folder=harness.folder(arguments.quick))
        if not arguments.quick:
            part.write()
    return path


if __name__ == "__main__":
    main()
