"""Several files written as one: all of them, or none.

Each file is first written whole under a hidden name beside its place; only when all are on the disk are they moved, in the order given, so
that the page that speaks of the others comes last. Whatever fails or is interrupted on the way, a full disk or Ctrl-C, the old files are
back in their places and no draft is left.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from exptilt._support.errors import ArgumentError


def prepare_folder(folder: str | os.PathLike[str]) -> list[Path]:
    """Make `folder` and its missing parents, and see that files can be written there.

    Args:
        folder: where files will go.

    Returns:
        The folders that were made, innermost first, for `forget_folders` if nothing comes of it.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ArgumentError(
            f"{target} is a file, and a page is written into a folder. Pass the name of a folder."
        )
    made = [path for path in (target, *target.parents) if not path.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        probe = target / f".probe.{os.getpid()}.tmp"
        try:
            probe.touch()
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
    except OSError as problem:
        forget_folders(made)
        raise ArgumentError(
            f"nothing can be written into {target} ({problem.strerror}). Pass a folder of your own with --out or folder=."
        ) from None
    return made


def forget_folders(made: list[Path]) -> None:
    """Remove folders that were made for nothing: those of `made` that are still empty.

    Args:
        made: innermost first, as `prepare_folder` returns them.
    """
    for path in made:
        with suppress(OSError):
            path.rmdir()


def write_files(folder: str | os.PathLike[str], files: Mapping[str, str]) -> list[Path]:
    """Write all of `files` into `folder`, or none.

    Args:
        folder: where; made if it is not there.
        files: text by name, the one that readers open first as the last.

    Returns:
        The paths, in the order given.
    """
    target, made = Path(folder), prepare_folder(folder)
    paths = [target / name for name in files]
    drafts = [target / f".{name}.{os.getpid()}.tmp" for name in files]
    olds = [target / f".{name}.{os.getpid()}.old" for name in files]
    fresh = [path for path in paths if not path.exists()]
    moving = False
    try:
        for draft, text in zip(drafts, files.values(), strict=True):
            draft.write_text(
                text, "utf-8", errors="replace"
            )  # a lone surrogate, from a file name, is no reason to fail
        moving = True
        for path, draft, old in zip(paths, drafts, olds, strict=True):
            if path not in fresh:
                os.replace(path, old)
            os.replace(draft, path)
    except BaseException:
        for path, draft, old in zip(paths, drafts, olds, strict=True):
            if old.exists():
                old.replace(path)
            elif moving and path in fresh:
                path.unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
        forget_folders(made)
        raise
    for old in olds:
        old.unlink(missing_ok=True)
    return paths
