"""Measure the models that claims about trained transformers are asked of, each with random weights beside it.

The result is the file that the ledger reads its table from. Models that are not installed are left out,
with the command that installs them.

Run: make models && python examples/profile_models.py --out models.json
"""

import argparse
import datetime
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.claims.models import subjects

MODELS = ("shakespeare", "minilm", "smollm2", "rxnmapper", "antiberty")


def as_json(profiles: Sequence[subjects.Profile], **about: Any) -> str:
    """Profiles as text for `kept`, numbers to six digits."""

    def short(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: short(value) for key, value in x.items()}
        if isinstance(x, list):
            return [short(value) for value in x]
        return float(f"{x:.6g}") if isinstance(x, float) else x

    rows = [json.dumps(short(asdict(one)), allow_nan=False) for one in profiles]
    return json.dumps(about)[:-1] + ', "profiles": [\n' + ",\n".join(rows) + "\n]}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=subjects.KEPT)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--models", nargs="+", default=MODELS)
    given = parser.parse_args()
    found = [one for one in subjects.kept() if one.model not in given.models]
    for model, weights in track([(m, w) for m in given.models for w in ("trained", "random")], "models"):
        started = time.perf_counter()
        try:
            found.append(subjects.profile(model, weights, given.tokens, 0))
        except ArgumentError as problem:
            print(problem)
            continue
        print(f"{model}, {weights}: {time.perf_counter() - started:.0f} s")
    found.sort(key=lambda one: MODELS.index(one.model) if one.model in MODELS else len(MODELS))
    about = {"date": str(datetime.date.today()), "tokens": given.tokens, "seed": 0}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    given.out.write_text(as_json(found, **about), "utf-8")
