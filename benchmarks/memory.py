"""Retrieval from a memory against plain torch, and what a million patterns cost.

    step        ξ ← softmax(β X ξ) X once, N = 4096 to 1e6, D = 64, float32, against two rivals:
                batch 1     softmax(X ξ) X as it is written, one state at a time
                batch 256   the materialised form softmax(ξ X') X of the batch, with its states × N matrix
    retrieval   to the fixed point with the same tolerance, N = 4096, 65536, 1e6, batch 256 and 1; the rivals
                are loops of these steps that stop when the whole batch stands still (ours leaves out each
                state that does)
    file        a batch of 256 from a million patterns, in memory and memory-mapped
    memory      what one call adds to the resident set, measured in a fresh process
    classical   N = 1000, 160 patterns settled asynchronously, against the same sweeps in numpy

Answers are compared before they are timed. Takes a few minutes, and fills the tables of docs/memory.md.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from exptilt.memory import ClassicalHopfield, Hopfield
from harness import Goal

PAGE = harness.FOLDER.parent / "memory.md"
D = 64
BETA = 0.5
SHARP = 1.0  # for retrievals
TOLERANCE = 1e-5


def patterns(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def one_state(x: torch.Tensor, state: torch.Tensor, beta: float = BETA) -> torch.Tensor:
    """softmax(X ξ) X for one state ``(1, D)``."""
    return (torch.softmax(beta * (x @ state[0]), 0) @ x)[None]


def materialised(x: torch.Tensor, state: torch.Tensor, beta: float = BETA) -> torch.Tensor:
    """The same for a batch ``(B, D)``, with the B × N matrix."""
    return torch.softmax(beta * (state @ x.T), -1) @ x


def plain(batch: int) -> Callable[..., torch.Tensor]:
    return one_state if batch == 1 else materialised


def step_cases(count: int, batch: int) -> dict[str, Callable[[], Any]]:
    x, state = patterns(count), patterns(batch, 1)
    memory, rival = Hopfield(x, BETA), plain(batch)
    exact = rival(x[:4096].double(), state.double())
    torch.testing.assert_close(Hopfield(x[:4096], BETA).step(state).double(), exact, atol=1e-4, rtol=1e-4)
    return {"exptilt": lambda: memory.step(state), "plain torch": lambda: rival(x, state)}


def retrieval_cases(count: int, batch: int) -> dict[str, Callable[[], Any]]:
    """Starts near patterns; β such that a pattern among a million random ones is a fixed point."""
    x = patterns(count)
    state, memory, rival = x[:batch] + 0.3 * patterns(batch, 2), Hopfield(x, SHARP), plain(batch)
    reach = TOLERANCE * float(memory.size)

    def loop() -> torch.Tensor:
        current = state
        for _ in range(1000):
            new = rival(x, current, SHARP)
            if bool(((new - current).norm(dim=-1) <= reach).all()):
                return current
            current = new
        raise RuntimeError("the rival has not settled after 1000 steps")

    torch.testing.assert_close(memory.retrieve(state, tolerance=TOLERANCE).value, loop(), atol=1e-3, rtol=0)
    return {"exptilt": lambda: memory.retrieve(state, tolerance=TOLERANCE), "plain torch": loop}


def prepare(kind: str, count: int, batch: int) -> Callable[[], Any]:
    """For `peak_extra_memory`: the call that is measured."""
    x, state = patterns(count), patterns(batch, 1)
    memory = Hopfield(x, BETA)
    small = Hopfield(x[:2048], BETA)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "exptilt": (lambda: small.step(state), lambda: memory.step(state)),
        "plain torch": (lambda: materialised(x[:2048], state), lambda: materialised(x, state)),
        "sparsemax": (
            lambda: Hopfield(x[:2048], BETA, separation="sparsemax").step(state),
            lambda: Hopfield(x, BETA, separation="sparsemax").step(state),
        ),
    }
    first, measured = calls[kind]
    first()
    return measured


def classical_cases(units: int, load: float) -> dict[str, Callable[[], Any]]:
    count = round(units * load)
    x = torch.randint(0, 2, (count, units), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    memory = ClassicalHopfield.hebbian(x)
    w = memory.weight.numpy()

    def in_numpy() -> np.ndarray:
        state = x.numpy().copy()
        generator = torch.Generator().manual_seed(0)
        for _ in range(200):
            before = state.copy()
            for i in torch.randperm(units, generator=generator).tolist():
                field = state @ w[i]
                state[:, i] = np.where(np.abs(field) <= 1e-12, state[:, i], np.sign(field))
            if (state == before).all():
                return state
        return state

    ours = memory.retrieve(x).value.numpy()
    assert (ours == in_numpy()).mean() > 0.99  # orders part once some states have settled
    return {"exptilt": lambda: memory.retrieve(x), "numpy, unit by unit": in_numpy}


def speed_table(times: dict[str, Any], sizes: list[int], what: str) -> tuple[list[str], list[list[str]]]:
    """Times of a step, or of a retrieval, by number of patterns, from saved results."""
    header = ["patterns"] + [
        f"batch {batch}: {column}" for batch in (256, 1) for column in ("torch, ms", "exptilt, ms", "ratio")
    ]
    rows = []
    for count in sizes:
        row = [f"{count:,}"]
        for batch in (256, 1):
            found = times[f"{what}, batch {batch}, N = {count}"]
            row += [f"{1e3 * found[who]['best']:.3g}" for who in ("plain torch", "exptilt")] + [
                f"{found['exptilt']['ratio']:.2f}"
            ]
        rows.append(row)
    return header, rows


def cost_table(times: dict[str, Any], sizes: list[int]) -> tuple[list[str], list[list[str]]]:
    """Memory, retrieval and the classical network, from saved results."""
    rows = [
        [
            f"one step, batch 256, {count:,} patterns, {kind}",
            f"{times[f'memory, {kind}, N = {count}']['peak'] / 2**20:.0f} MiB",
        ]
        for count in (sizes[0], sizes[-1])
        for kind in ("exptilt", "sparsemax", "plain torch")
    ]
    rows += [
        [f"retrieval of 256 states from {sizes[-1]:,}, {what}", f"{row['best']:.3g} s"]
        for what, row in times["file"].items()
    ]
    rows += [
        [f"classical network, {what}", f"{row['best']:.3g} s"]
        for what, row in times["classical, N = 1000, load 0.16"].items()
    ]
    return ["what", "cost"], rows


PARTS = (
    harness.Part(PAGE, "memory steps", "memory", lambda x: speed_table(x["times"], x["sizes"], "step")),
    harness.Part(
        PAGE, "memory retrievals", "memory", lambda x: speed_table(x["times"], x["long"], "retrieval")
    ),
    harness.Part(PAGE, "memory costs", "memory", lambda x: cost_table(x["times"], x["sizes"])),
)


def main(argv: list[str] | None = None) -> Path:
    arguments = harness.start(__doc__, argv)
    sizes = (512, 4096) if arguments.quick else (4096, 16384, 65536, 262144, 1_000_000)
    rounds = 2 if arguments.quick else 5
    results: dict[str, Any] = {}
    goals = []
    long = (512, 4096) if arguments.quick else (4096, 65536, 1_000_000)
    for what, make, counts in (("step", step_cases, sizes), ("retrieval", retrieval_cases, long)):
        for batch in (256, 1):
            for count in counts:
                name = f"{what}, batch {batch}, N = {count}"
                print(f"\n{name}", flush=True)
                turns = 3 if count * batch > 10**8 else 4 * rounds if count * batch <= 2**20 else rounds
                times = harness.compare(make(count, batch), "plain torch", rounds=turns, label=name)
                harness.print_times(times)
                results[name] = times
                goals.append(Goal(f"{name}, over plain torch", times["exptilt"].ratio, 1.0))
    largest = sizes[-1]
    for kind in ("exptilt", "sparsemax", "plain torch"):
        for count in (sizes[0], largest):
            used = harness.peak_extra_memory(prepare, kind, count, 256)
            results[f"memory, {kind}, N = {count}"] = used
            print(f"{kind}, N = {count}: {used.peak / 2**20:.1f} MiB beyond what was there", flush=True)
            if kind != "plain torch":
                goals.append(Goal(f"memory, {kind}, batch 256, N = {count}", used.peak / 2**20, 64, "MiB"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"
        x = patterns(largest)
        here = Hopfield(x, SHARP)
        here.save(path)
        mapped = Hopfield.load(path, mapped=True)
        state = x[:256] + 0.3 * patterns(256, 2)
        assert torch.equal(here.retrieve(state).value, mapped.retrieve(state).value)
        cases = {
            "in memory": lambda: here.retrieve(state),
            "mapped": lambda: mapped.retrieve(state),
            "load, mapped": lambda: Hopfield.load(path, mapped=True),
        }
        times = harness.compare(cases, "in memory", rounds=2 if arguments.quick else 3, label="file")
        print(f"\nretrieval of 256 from {largest}, {int(here.retrieve(state).steps)} steps", flush=True)
        harness.print_times(times)
        results["file"] = times
        goals.append(Goal(f"retrieval of 256 from {largest}", times["in memory"].best, 10.0, "s"))
    name = "classical, N = 1000, load 0.16"
    cases = classical_cases(100 if arguments.quick else 1000, 0.16)
    times = harness.compare(cases, "numpy, unit by unit", rounds=2, label=name)
    print(f"\n{name}", flush=True)
    harness.print_times(times)
    results[name] = times
    goals.append(Goal(f"{name}, over numpy", times["exptilt"].ratio, 1.0))
    harness.print_goals(goals)
    path = harness.save(
        "memory",
        {"sizes": sizes, "long": long, "times": results, "goals": goals},
        folder=harness.folder(arguments.quick),
    )
    for part in PARTS:
        harness.print_table(*part.table(harness.read(path)))
    if not arguments.quick:
        harness.write(PARTS)
    return path


if __name__ == "__main__":
    main()
