"""Files: whole or not at all, whatever fails."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from exptilt._support import files
from exptilt._support.errors import ArgumentError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes(tmp_path):
    files.write_text(tmp_path / "a", "ä\ud800\n")
    assert (tmp_path / "a").read_bytes() == "ä?\n".encode()
    files.write_bytes(tmp_path / "a", b"\x00\r\n")
    assert (tmp_path / "a").read_bytes() == b"\x00\r\n"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("moment", ["fsync", "replace", "write_bytes"])
@pytest.mark.parametrize("before", [False, True])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, moment, before):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if before:
        files.write_text(tmp_path / "a", "old")
    monkeypatch.setattr(Path if moment == "write_bytes" else os, moment, fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(tmp_path / "a", "new")
    assert names(tmp_path) == (["a"] if before else [])
    assert not before or (tmp_path / "a").read_text() == "old"


def test_permissions_are_those_of_an_ordinary_file(tmp_path):
    old = os.umask(0o027)
    try:
        with files.draft(tmp_path / "a") as path:
            path.unlink()
            os.close(
                os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
            )  # as writers with a temporary file leave it
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    (tmp_path / "a").chmod(0o604)
    files.write_text(tmp_path / "a", "x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o604


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    files.write_text(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "x"


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.write_text(tmp_path / "none" / "a", "x")


def test_many_writers_of_one_file(tmp_path):
    texts = [str(number) * 20_000 for number in range(8)]
    failed = []

    def work(text):
        try:
            for _ in range(10):
                files.write_text(tmp_path / "a", text)
        except BaseException as problem:
            failed.append(problem)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "a").exists():
            assert (tmp_path / "a").read_text() in texts
    assert failed == []
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("moment", range(7))
@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [False, True])
def test_all_or_nothing(tmp_path, monkeypatch, moment, stop, before):
    folder = tmp_path / "out"
    old = {"a.csv": "old a", "b.json": "old b", "index.html": "old page"} if before else {}
    if before:
        files.write_together(folder, old)
    done = []

    def may_fail(work):
        def act(*arguments, **options):
            done.append(work)
            if len(done) == moment + 1:
                raise stop
            return work(*arguments, **options)

        return act

    monkeypatch.setattr(Path, "write_bytes", may_fail(Path.write_bytes))
    monkeypatch.setattr(os, "replace", may_fail(os.replace))
    new = {"a.csv": "new a", "b.json": "new b", "index.html": "new page"}
    if moment < 6:
        with pytest.raises(type(stop)):
            files.write_together(folder, new)
        assert ({path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}) == old
        assert folder.exists() == before
    else:
        files.write_together(folder, new)
        assert {path.name: path.read_text() for path in folder.iterdir()} == new


def test_unwritable_folders(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match="is a file"):
        files.prepare_folder(tmp_path / "file")
    with pytest.raises(ArgumentError, match=r"nothing can be written into .* \(Not a directory\)"):
        files.prepare_folder(tmp_path / "file" / "below")
    assert os.listdir(tmp_path) == ["file"]


def test_folders_made_for_nothing_are_forgotten(tmp_path):
    made = files.prepare_folder(tmp_path / "a" / "b")
    files.forget_folders(made)
    assert os.listdir(tmp_path) == []
    made = files.prepare_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "kept").write_text("x")
    files.forget_folders(made)
    assert os.listdir(tmp_path / "a") == ["kept"]
