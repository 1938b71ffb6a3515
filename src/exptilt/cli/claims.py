"""Run the claims of the papers as experiments, and print the numbers and the verdict of each.

Without ID all claims are run, which takes a few minutes. One ID alone is shown with all its numbers. The exit
code is 1 if a claim that should hold does not.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.cli.arguments import check_model, positive, seed

if TYPE_CHECKING:
    from exptilt.claims.evidence import Evidence

SUMMARY = "run the claims of the papers and print the evidence for each"
EXAMPLES = """\
commands that work as printed:
  exptilt claims A1 A10
  exptilt claims B5a --set dimensions=3
  exptilt claims A1 A10 --out ledger
"""
OWN = ("shakespeare",)  # the model that only the claims know


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `exptilt claims`."""
    add = parser.add_argument
    add("ids", nargs="*", metavar="ID", help="claims such as A10 (default: all)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting of the claims")
    model = "also run the claims about trained models on this model (any MODEL of `exptilt report`)"
    add("--model", metavar="MODEL", help=model)
    add(
        "--others",
        action="store_true",
        help="run published results of others, H1 to H9, instead of the drafts' claims",
    )
    add("--seed", type=seed, default=0, help="the first seed (default: 0)")
    add("--seeds", type=positive, metavar="N", help="how many seeds (default: set by each claim)")
    add("--json", action="store_true", help="print one JSON object a line instead of the table")
    add("--out", type=Path, metavar="FOLDER", help="also write the ledger's page into this folder")


def run(arguments: argparse.Namespace) -> int:
    """Run, print what was found, write the page."""
    check_model("--model", arguments.model, OWN)
    from exptilt._support.files import prepare_folder
    from exptilt.claims import ledger

    chosen = ledger.chosen_claims(arguments.ids, others=arguments.others)
    settings = _settings(arguments.set)
    if arguments.out is not None:
        prepare_folder(arguments.out)
    options = {"seed": arguments.seed, "seeds": arguments.seeds}
    found: list[Evidence] = []
    others: list[Evidence] = []
    plan = [(found, "claims", chosen, settings)]
    if arguments.model is not None:
        asked = [claim for claim in chosen if "model" in claim.settings]
        if not asked:
            raise ArgumentError(
                "--model: none of these claims is about a trained model. Name one that is, such as F1, "
                "or leave --model out."
            )
        own = {name: value for name, value in settings.items() if any(name in c.settings for c in asked)}
        # First, so that a model that cannot be loaded is reported before anything else runs.
        plan.insert(0, (others, arguments.model, asked, own | {"model": arguments.model}))
    runs = [
        (done, track(ledger.run([c.id for c in some], settings=given, **options), title, total=len(some)))
        for done, title, some, given in plan
    ]
    try:
        for done, evidence in runs:
            for each in evidence:
                done.append(each)
    except KeyboardInterrupt:
        if found + others and not arguments.json:
            print(_table(found + others))
        raise
    if arguments.json:
        print("\n".join(each.to_json() for each in found + others))
    elif len(found) == 1 and not others:
        print(_one(found[0]))
    else:
        print(_table(found + others))
        print("".join(_changed(found, each) for each in others), end="")
    if arguments.out is not None:
        from exptilt.report.ledger import write_ledger

        path = write_ledger(found + others, arguments.out)
        if not arguments.json:
            print(f"\nWrote {path.resolve()}. Open it in a browser.")
    return 1 if any(ledger.fails(each) for each in found + others) else 0


def _settings(words: list[str]) -> dict[str, int | float | str]:
    pairs = [word.partition("=") for word in words]
    for word, (name, sign, value) in zip(words, pairs, strict=True):
        if not (name and sign and value):
            raise ArgumentError(f"--set: {word!r} is not NAME=VALUE. Write for example --set dimensions=8.")
    return {name: value for name, _, value in pairs}


def _table(found: "list[Evidence]") -> str:
    """One line a claim, and how many there are of each verdict."""
    from exptilt.claims import ledger

    width = max(len(each.verdict.value) for each in found)
    rows = []
    for each in found:
        model = f" ({each.settings['model']})" if "model" in each.settings else ""
        mark = "!" if ledger.fails(each) else " "
        title = ledger.find(each.id).title + model
        rows.append(f"{mark}{each.id:4} {each.verdict.value:{width}}  {each.seconds:7.1f} s  {title}")
    counts = Counter(each.verdict.value for each in found)
    total = ", ".join(f"{verdict}: {count}" for verdict, count in counts.items())
    return "\n".join([*rows, "", f"{ledger.counted(found)}. {total}."])


def _one(each: "Evidence") -> str:
    """A claim with all its numbers."""
    from exptilt.claims import ledger

    claim = ledger.find(each.id)
    settings = ", ".join(f"{name}={value}" for name, value in each.settings.items()) or "none"
    lines = [f"{claim.id}: {claim.title}", "", claim.statement, "", f"Source: {claim.source}."]
    lines += [claim.procedure, f"Settings: {settings}. Seeds: {', '.join(map(str, each.seeds))}.", ""]
    width = max((len(check.name) for check in each.checks), default=0)
    for check in each.checks:
        low, high = check.interval
        spread = "" if low != low else f" [{low:.3g}, {high:.3g}]"
        passes = "" if check.role == "note" else "passes" if check.passed else "fails"
        bound = f"{check.role}: {check.bound}" if check.bound else check.role
        lines.append(f"  {check.name:{width}}  {check.mean:.4g}{spread}  ({bound}) {passes}".rstrip())
    return "\n".join([*lines, "", f"{each.verdict.value}: {each.reason}"])


def _changed(found: "list[Evidence]", other: "Evidence") -> str:
    """What another model changed, check by check."""
    first = next(each for each in found if each.id == other.id)
    same = "as before" if first.verdict is other.verdict else f"was {first.verdict.value}"
    lines = [f"\n{other.id} on {other.settings['model']}: {other.verdict.value} ({same})\n"]
    was = {check.name: check for check in first.checks}  # not every number is there for every model
    for after in other.checks:
        before = was.get(after.name)
        if before is None or before.values != after.values:  # some numbers are not about the model
            old = "" if before is None else f"{before.mean:.4g} → "
            lines.append(f"  {after.name}: {old}{after.mean:.4g}\n")
    return "".join(lines)
