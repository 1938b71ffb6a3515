"""The page of a study with 384 heads in a real browser: its size, and how long a change takes to show.

24 layers of 16 heads, 27 statistics, 9 checkpoints, made-up numbers. A change is timed from the call that the
chooser makes until the browser has drawn the next frame:

    statistic    another statistic in the squares
    head         another head opened
    checkpoint   the slider moved

Reported is the median of 15 changes, 100 ms apart. It needs Chromium and playwright.
"""

import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from exptilt.report import write
from harness import Goal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

CHANGES = {
    "statistic": "choose({ measure: ['more_3', 'entropy', 'score_variance'][i % 3] })",
    "head": "choose({ layer: i % LAYERS, head: i % HEADS })",
    "checkpoint": "choose({ checkpoint: i % 9 })",
}
TIMED = """async () => {
  const times = [];
  for (let i = 0; i < 15; i += 1) {
    await new Promise((done) => setTimeout(done, 100));
    const start = performance.now();
    %s;
    await new Promise((done) => requestAnimationFrame(() => {
      const next = new MessageChannel();
      next.port1.onmessage = done;
      next.port2.postMessage(0);
    }));
    times.push(performance.now() - start);
  }
  return times;
}"""


def study(layers: int) -> Any:
    """A made-up study with as many statistics as a real one."""
    from report.made import make_study

    made = make_study(layers, 16, size=32)
    more = {f"more_{i}": dataclasses.replace(made.heads["entropy"], title=f"more {i}") for i in range(20)}
    curves = {**made.training.heads, **dict.fromkeys(more, made.training.heads["entropy"])}
    training = dataclasses.replace(made.training, heads=curves)
    return dataclasses.replace(made, heads={**made.heads, **more}, training=training)


def main(argv: list[str] | None = None) -> None:
    arguments = harness.start(__doc__, argv)
    from playwright.sync_api import sync_playwright

    from browser.chromium import ARGUMENTS, CHROMIUM, open_page

    if CHROMIUM is None:
        raise SystemExit("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        path = write(study(4 if arguments.quick else 24), folder)
        size = path.stat().st_size
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = open_page(browser, path.as_uri())
        times = {what: statistics.median(page.evaluate(TIMED % change)) for what, change in CHANGES.items()}
        browser.close()
    harness.print_table(["change", "ms"], [[what, f"{time:.0f}"] for what, time in times.items()])
    goals = [
        Goal("size of the page", size / 1e6, 3.0, "MB"),
        Goal("change of statistic", times["statistic"], 100.0, "ms"),
    ]
    harness.print_goals(goals)
    results = {"size": size, "milliseconds": times, "goals": goals}
    harness.save("page", results, folder=harness.folder(arguments.quick))


if __name__ == "__main__":
    main()
