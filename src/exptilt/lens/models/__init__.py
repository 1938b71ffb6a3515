"""Models read from the disk, and the small Shakespeare model that comes with this package."""

from exptilt.lens.models.load import (
    DEFAULT,
    PACKAGED,
    Loaded,
    default_folder,
    find_checkpoints,
    load_model,
    load_tokenizer,
    load_weights,
    picture_part,
    quiet,
    read_text,
)

__all__ = [
    "DEFAULT",
    "PACKAGED",
    "Loaded",
    "default_folder",
    "find_checkpoints",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "picture_part",
    "quiet",
    "read_text",
]
