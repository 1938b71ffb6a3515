"""Files written whole or not at all.

A writer fills a draft in a hidden folder beside the target. The finished draft goes to the disk (`fsync`) and
is then renamed over the target in one step, so that a reader sees the old file or the new one, never half of
one, and a failure leaves the old one.

Temporary files that the writer itself makes (safetensors does) lie in the same folder and are removed with
it. A process that is killed leaves its folder behind; a write beside it removes the folder a day later.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from exptilt._support.errors import ArgumentError

_SUFFIX = ".exptilt-draft"
_ABANDONED = 86400.0  # seconds after which a folder is taken for that of a killed process


def _draft_folder(parent: Path) -> "tempfile.TemporaryDirectory[str]":
    """A hidden folder in `parent` that is removed at the end of its `with` block; removes abandoned ones."""
    for folder in parent.glob(f".*{_SUFFIX}"):
        with suppress(OSError):  # its writer may remove it now
            if time.time() - folder.stat().st_mtime > _ABANDONED:
                shutil.rmtree(folder)
    return tempfile.TemporaryDirectory(prefix=".", suffix=_SUFFIX, dir=parent, ignore_cleanup_errors=True)


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def draft(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to; at the end of the block the file there becomes `target`, unless the block raises.

    The file gets the permissions that `open` would give it. A link is written through.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with draft(folder / "a.txt") as path:
        ...     _ = path.write_text("whole")
        >>> [(path.name, path.read_text()) for path in folder.iterdir()]
        [('a.txt', 'whole')]
    """
    target = Path(os.path.realpath(target))
    with _draft_folder(target.parent) as folder:
        path = Path(folder) / target.name
        path.touch()
        mode = (target if target.exists() else path).stat().st_mode
        yield path
        path.chmod(mode)
        _to_disk(path)
        os.replace(path, target)


def write_bytes(target: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, whole or not at all; its folder must exist."""
    with draft(target) as path:
        path.write_bytes(content)


def write_text(target: str | os.PathLike[str], text: str) -> None:
    """Write a text in UTF-8, whole or not at all; a lone surrogate (file names have them) becomes "?"."""
    write_bytes(target, text.encode("utf-8", "replace"))


def write_together(folder: str | os.PathLike[str], texts: Mapping[str, str]) -> list[Path]:
    """Write texts (file name: text) into `folder`: all of them, or none, with the old files restored.

    The folder is made if it is missing. Files are moved in the order given, so that a page that refers to the
    others can come last; their paths are returned in that order.
    """
    place, made = Path(folder), prepare_folder(folder)
    try:
        with _draft_folder(place) as hidden:
            drafts = Path(hidden)
            for name, text in texts.items():
                (drafts / name).write_bytes(text.encode("utf-8", "replace"))
                _to_disk(drafts / name)
            try:
                for name in texts:
                    if (place / name).exists():
                        shutil.copy2(place / name, drafts / f"{name}.old")
                    os.replace(drafts / name, place / name)
            except BaseException:
                for name in texts:
                    moved, old = not (drafts / name).exists(), drafts / f"{name}.old"
                    if moved and old.exists():
                        old.replace(place / name)
                    elif moved:
                        (place / name).unlink()
                raise
    except BaseException:
        forget_folders(made)
        raise
    return [place / name for name in texts]


def prepare_folder(folder: str | os.PathLike[str]) -> list[Path]:
    """Make `folder` and its missing parents, and check that files can be written there.

    Returns the folders that were made, innermost first, for `forget_folders` if nothing is written.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"{target} is a file, and a page is written into a folder. Pass a folder's name.")
    made = [path for path in (target, *target.parents) if not path.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _draft_folder(target) as probe:
            (Path(probe) / "file").touch()
    except OSError as problem:
        forget_folders(made)
        raise ArgumentError(
            f"nothing can be written into {target} ({problem.strerror}). "
            "Pass a folder of your own with --out or folder=."
        ) from None
    return made


def forget_folders(made: list[Path]) -> None:
    """Remove the folders that `prepare_folder` made and that are still empty."""
    for path in made:
        with suppress(OSError):
            path.rmdir()
