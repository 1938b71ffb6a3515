"""Files written whole or not at all.

A writer fills a draft in a hidden folder beside the target. The finished draft goes to the disk (`fsync`) and
is then renamed over the target in one step, so that a reader sees the old file or the new one, never half of
one, and a failure leaves the old one.

A process that is killed leaves its folder behind. While a writer is alive it holds a lock on its folder, and
every write removes the folders beside its target that nobody holds a lock on. Temporary files that the writer
itself makes (safetensors does) lie in the same folder and are removed with it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from exptilt._support.errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows: drafts are not locked, and the folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".exptilt-draft"


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Descriptor that holds the lock of a draft folder; None if the folder is gone or (no `wait`) locked."""
    if fcntl is None:
        return -1 if wait else None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as problem:
        if wait and not isinstance(problem, FileNotFoundError):
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = folder.exists()
    except OSError:  # held by its writer, or a file system without locks, where nothing counts as abandoned
        held = wait
    if held:
        return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path, lock: int) -> None:
    """Remove a draft folder with all that is in it, and let go of its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    if lock >= 0:
        os.close(lock)


@contextmanager
def _draft_folder(parent: Path) -> Iterator[Path]:
    """A hidden folder in `parent`, removed at the end; folders left by dead writers are removed first."""
    for abandoned in parent.glob(f".*{_SUFFIX}"):
        if (lock := _lock(abandoned, wait=False)) is not None:
            _remove(abandoned, lock)
    lock = None
    while lock is None:  # another writer may take the folder for abandoned before it is locked
        folder = Path(tempfile.mkdtemp(prefix=".", suffix=_SUFFIX, dir=parent))
        lock = _lock(folder, wait=True)
    try:
        yield folder
    finally:
        _remove(folder, lock)


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
        path = folder / target.name
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
        with _draft_folder(place) as drafts:
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
            (probe / "file").touch()
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
