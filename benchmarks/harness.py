"""How we measure: ratios from one interleaved run, memory in a process of its own, goals that never fail.

Time. A shared machine drifts by tens of percent within a minute, so a number of seconds means little and two
runs cannot be compared. `compare` therefore runs all cases in turn, round after round, each round in another
order, and reports for every case

    ratio = best time / best time of the baseline,   spread = quartiles of the ratio within one round

A rival that takes seconds may be declared slow: it joins only some of the rounds, spread evenly, one call
each, and is not warmed up.

Memory. `peak_extra_memory` starts a fresh process, lets it build the inputs, hands free heap back to the
system, notes the resident set, makes one call, and reads the kernel's own high-water mark (elsewhere: a
sampling thread). What the call returns is counted and told apart.

A benchmark is a script `python benchmarks/NAME.py [--quick]` that calls `compare`, prints a table and its
goals, and ends with `save`:

    harness.start(__doc__)  # reads --quick and --threads, sets the threads, prints the machine
    times = compare({"ours": f, "SDPA": g}, baseline="SDPA")
    print_times(times)
    print_goals([Goal("forward", times["ours"].ratio, 1.2)])
    save("attention", {"times": times}, folder=folder(arguments.quick))

Results are kept for each kind of processor, side by side: docs/benchmarks/amd-epyc-25-1-avx2/attention.json.
A run replaces results of its own kind only. What docs/ shows is written from the saved files: `plot` draws
NAME.svg beside them; a script's `PARTS` say which marked places of which pages hold its tables, one block for
each kind (`python benchmarks/pages.py` writes them all, without measuring). A quick run leaves docs/ alone:
`folder(quick)` sends its files to the system's temporary folder.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import os
import platform
import re
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from exptilt._support.files import write_text
from exptilt._support.plotting import new_figure
from exptilt._support.progress import track

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
LIBRARIES = ("exptilt", "torch", "numpy", "scipy", "triton", "transformers")
MAKERS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
MODEL = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}  # widest first


@dataclass(frozen=True)
class Timing:
    """Seconds a call takes, and its ratio to the baseline."""

    best: float
    median: float
    ratio: float  # best over the baseline's best
    ratio_low: float  # lower quartile of the ratio within a round
    ratio_high: float  # upper quartile
    rounds: int
    calls: int  # in one measurement
    ratio_median: float = float("nan")  # of the ratio within a round: for differences of a few percent


@dataclass(frozen=True)
class Memory:
    """Bytes that one call added to the resident set at its peak; of these, what it returned."""

    peak: int
    returned: int

    @property
    def beyond(self) -> int:
        """Bytes beyond inputs and outputs."""
        return max(self.peak - self.returned, 0)


@dataclass(frozen=True)
class Goal:
    """A number that should stay at or below a limit; the table says whether it does, and nothing fails."""

    what: str
    value: float
    limit: float
    unit: str = "×"

    @property
    def met(self) -> bool:
        """Whether the limit was kept."""
        return self.value <= self.limit


def start(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a script's arguments, set threads and clock, print the machine. Returns: `quick`, `threads`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: to see that it runs")
    parser.add_argument("--threads", type=int, default=2, help="threads for torch (default: 2)")
    words = "one thread and its processor time, which other programs on the machine hardly lengthen"
    parser.add_argument("--processor-time", action="store_true", help=words)
    arguments = parser.parse_args(argv)
    import torch

    if arguments.processor_time:
        global _clock
        arguments.threads, _clock = 1, time.thread_time
    torch.set_num_threads(arguments.threads)
    facts = machine()
    shown = ("kind", "cores", "torch threads", "torch")
    print("  ".join(f"{key}: {facts[key]}" for key in shown), flush=True)
    return arguments


_clock = time.perf_counter


def _measure(function: Callable[[], object], calls: int) -> float:
    """Seconds for each of `calls` calls, the collector held back meanwhile."""
    gc.collect()
    gc.disable()
    try:
        begin = _clock()
        for _ in range(calls):
            function()
        return (_clock() - begin) / calls
    finally:
        gc.enable()


def compare(
    cases: dict[str, Callable[[], object]],
    baseline: str,
    *,
    rounds: int = 9,
    minimum_seconds: float = 0.05,
    slow: dict[str, int] | None = None,
    label: str = "timing",
) -> dict[str, Timing]:
    """Time all cases in one interleaved run.

    Args:
        cases: functions without arguments, by name.
        baseline: the name of the case that ratios are taken against.
        rounds: how often each case is measured.
        minimum_seconds: one measurement repeats a quick function for at least so long.
        slow: of cases too slow for every round, in how many rounds each is measured; one call makes a
            measurement, none is a warm-up.
        label: words for the progress bar.
    """
    if baseline not in cases:
        raise ValueError(
            f"compare: baseline is {baseline!r}, and the cases are {', '.join(cases)}. "
            "Pass the name of one of them."
        )
    if rounds < 1:
        raise ValueError(f"compare: rounds is {rounds}. Pass 1 or more.")
    slow = slow or {}
    if wrong := [
        name
        for name, count in slow.items()
        if name not in cases or name == baseline or not 1 <= count <= rounds
    ]:
        raise ValueError(
            f"compare: slow has {wrong[0]!r}. "
            f"Pass names of cases other than the baseline, each with 1 to {rounds} rounds."
        )
    calls = dict.fromkeys(cases, 1)
    for name, function in cases.items():
        if name not in slow:
            function()  # loads code, fills caches
            calls[name] = max(1, round(minimum_seconds / max(_measure(function, 1), 1e-9)))
    joins = {
        name: {turn * rounds // count for turn in range(count)}
        for name, count in ((n, slow.get(n, rounds)) for n in cases)
    }
    seconds: dict[str, dict[int, float]] = {name: {} for name in cases}  # by round
    names = list(cases)
    gc.collect()
    gc.freeze()  # else every collection walks all that was imported, and leaves cold caches behind
    try:
        for turn in track(range(rounds), label):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                if turn in joins[name]:
                    seconds[name][turn] = _measure(cases[name], calls[name])
    finally:
        gc.unfreeze()
    reference = seconds[baseline]
    timings = {}
    for name, times in seconds.items():
        values = list(times.values())
        ratios = [value / reference[turn] for turn, value in times.items()]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        ratio = min(values) / min(reference.values())
        timings[name] = Timing(
            min(values), statistics.median(values), ratio, low, high, len(values), calls[name], middle
        )
    return timings


def tensor_bytes(value: Any) -> int:
    """Bytes of all distinct storages in a nest of tensors, arrays, lists, dicts and dataclasses."""
    import numpy
    import torch

    seen: dict[int, int] = {}

    def visit(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, numpy.ndarray):
            owner = item if item.base is None or not isinstance(item.base, numpy.ndarray) else item.base
            seen[owner.__array_interface__["data"][0]] = owner.nbytes
        elif isinstance(item, dict):
            for part in item.values():
                visit(part)
        elif isinstance(item, list | tuple):
            for part in item:
                visit(part)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            for field in dataclasses.fields(item):
                visit(getattr(item, field.name))

    visit(value)
    return sum(seen.values())


def _high_water() -> int | None:
    """The largest resident set since the last reset, in bytes; None where the kernel does not record it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _one_call(run: Callable[[], object]) -> Memory:
    """Memory of one call in this process."""
    import psutil

    process = psutil.Process()
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        # else the call could live on heap that the set-up left behind
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    exact = _reset_high_water()
    before = process.memory_info().rss
    highest = before
    done = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, process.memory_info().rss)
            time.sleep(0.0005)

    sampler = threading.Thread(target=sample, daemon=True)
    if not exact:
        sampler.start()
    result = run()
    done.set()
    if not exact:
        sampler.join()
    highest = max(highest, process.memory_info().rss, (_high_water() or 0) if exact else 0)
    return Memory(peak=highest - before, returned=tensor_bytes(result))


def _child(
    pipe: Any, prepare: Callable[..., Callable[[], object]], arguments: tuple[Any, ...], threads: int
) -> None:
    try:
        import torch

        torch.set_num_threads(threads)
        pipe.send(_one_call(prepare(*arguments)))
    except BaseException:
        pipe.send(traceback.format_exc())


def peak_extra_memory(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> Memory:
    """Peak memory that one call adds, measured in a fresh process.

    Args:
        prepare: a function at the top level of a module (the new process imports it). It makes the inputs,
            calls once on something small, so that code is loaded, and returns the function
            without arguments that is to be measured.
        arguments: what `prepare` is called with; they must pickle.
    """
    import torch

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, prepare, arguments, torch.get_num_threads()))
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"peak_extra_memory: the process ended with exit code {process.exitcode} and no answer; "
            "out of memory?"
        ) from None
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(f"peak_extra_memory: the call failed in its process:\n{answer}")
    return answer


def kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The kind of this processor, such as "AMD EPYC (family 25 model 1, AVX2)", without cores and clock."""
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    pairs = [line.partition(":") for line in reversed(lines)]  # reversed: the first core's facts stay
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    name = facts.get("model name") or platform.processor() or platform.machine()
    name = " ".join(re.sub(r"\((R|TM)\)|@.*|\bCPU\b|\bProcessor\b|\b\d+-Core\b", " ", name).split())
    maker = MAKERS.get(facts.get("vendor_id", ""), "")
    flags = facts.get("flags", facts.get("Features", "")).split()
    details = [" ".join(f"{ours} {facts[theirs]}" for theirs, ours in MODEL.items() if theirs in facts)]
    details += [vector for flag, vector in VECTORS.items() if flag in flags][:1]
    words = ", ".join(filter(None, details))
    return (name if name.startswith(maker) else f"{maker} {name}") + (f" ({words})" if words else "")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    facts: dict[str, Any] = {"kind": kind(), "cores": os.cpu_count()}
    facts |= {"torch threads": torch.get_num_threads(), "processor time": _clock is time.thread_time}
    facts |= {"system": platform.system(), "Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return facts


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table in plain text: the first column to the left, the others to the right."""
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print(
            line[0].ljust(widths[0])
            + "".join("  " + cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        )
    print(flush=True)


def print_times(timings: dict[str, Timing]) -> None:
    """Best and median time, and the ratio to the baseline with its quartiles."""
    rows = [
        (
            name,
            f"{t.best * 1e3:.3f}",
            f"{t.median * 1e3:.3f}",
            f"{t.ratio:.2f}",
            f"{t.ratio_low:.2f} to {t.ratio_high:.2f}",
        )
        for name, t in timings.items()
    ]
    print_table(("case", "best ms", "median ms", "ratio", "quartiles"), rows)


def print_goals(goals: Iterable[Goal]) -> None:
    """Each goal next to its value, and whether it was met."""
    rows = [
        (g.what, f"≤ {g.limit:g} {g.unit}", f"{g.value:.3g} {g.unit}", "met" if g.met else "NOT met")
        for g in goals
    ]
    print_table(("goal", "limit", "measured", ""), rows)


def _plain(value: Any) -> Any:
    """What json cannot write by itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        extra = {
            name: getattr(value, name)
            for name, member in vars(type(value)).items()
            if isinstance(member, property)
        }
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} | extra
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(
        f"save: cannot write a {type(value).__name__} as JSON. "
        "Pass numbers, text, lists, dicts and dataclasses."
    )


def folder(quick: bool) -> Path:
    """Where results go: the folder of this kind of processor; those of a quick run to a temporary one."""
    if quick:
        return Path(tempfile.gettempdir()) / "exptilt-quick-benchmarks"
    short = re.sub(r"\b(family|model|implementer|part) ", "", kind().lower())
    return FOLDER / re.sub(r"[^a-z0-9]+", "-", short).strip("-")


def read(path: Path) -> Any:
    """The results in a file that `save` wrote."""
    return json.loads(path.read_text("utf-8"))["results"]


def save(name: str, results: Any, *, folder: Path) -> Path:
    """Write results, machine and date to NAME.json in a folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "name": name,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "results": results,
    }
    write_text(path, json.dumps(content, indent=1, default=_plain, ensure_ascii=False) + "\n")
    print(f"Wrote {os.path.relpath(path)}", flush=True)
    return path


def plot(
    name: str, paint: Callable[[Any], None], *, width: float = 6.4, height: float = 4.0, folder: Path
) -> Path:
    """Write NAME.svg to a folder in the house's style; `paint(axes)` draws it."""
    from exptilt.report.figures import STYLE

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    with new_figure(width, height, {**STYLE, "svg.hashsalt": name}) as figure:
        paint(figure.add_subplot())
        figure.savefig(path, format="svg", metadata={"Date": None})
    print(f"Wrote {os.path.relpath(path)}", flush=True)
    return path


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for a page: the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def marked(page: str, mark: str) -> tuple[int, int]:
    """Where in a page the text between ``<!-- mark -->`` and ``<!-- /mark -->`` begins and ends."""
    opening, closing = f"<!-- {mark} -->\n", f"\n<!-- /{mark} -->"
    if page.count(opening) != 1 or page.count(closing) != 1:
        raise ValueError(
            f"marked: the page must hold the lines {opening.strip()} and {closing.strip()} once each."
        )
    return page.index(opening) + len(opening), page.index(closing)


@dataclass(frozen=True)
class Part:
    """A place of a page that shows what was measured, between ``<!-- mark -->`` and ``<!-- /mark -->``."""

    page: Path
    mark: str
    name: str  # of the saved results
    table: Callable[[Any], tuple[Sequence[str], Iterable[Sequence[object]]]]  # header and rows, from results
    pictures: dict[str, str] = field(default_factory=dict)  # names of plots: what they show

    def text(self) -> str:
        """For each kind of processor the machine, the table and the pictures."""
        parts = []
        for path in sorted(FOLDER.glob(f"*/{self.name}.json")):
            saved = json.loads(path.read_text("utf-8"))
            on, day, place = saved["machine"], saved["written"][:10], f"benchmarks/{path.parent.name}"
            versions = f"torch {on['torch']}, {on['torch threads']} threads"
            versions += ", processor time" * on.get("processor time", False)
            parts.append(f"**{on['kind']}**, {on['cores']} cores; {versions}; {day}")
            parts.append(markdown(*self.table(saved["results"])))
            parts += [f"![{words}]({place}/{name}.svg)" for name, words in self.pictures.items()]
        return "\n\n".join(parts) or "Not measured yet."

    def write(self) -> None:
        """Put the text into its page; the rest of the page stays."""
        page = self.page.read_text("utf-8")
        begin, end = marked(page, self.mark)
        self.page.write_text(page[:begin] + self.text() + page[end:], "utf-8")
        print(f"Wrote the table '{self.mark}' of {os.path.relpath(self.page)}", flush=True)


def write(parts: Iterable[Part]) -> None:
    """Write all parts of a benchmark."""
    for part in parts:
        part.write()
