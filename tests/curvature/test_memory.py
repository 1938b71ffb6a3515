"""The C library's setting while a product runs."""

import ctypes
import platform

import pytest

from exptilt.curvature import memory


def test_the_setting_is_taken_back_and_left_alone_where_the_user_chose(monkeypatch):
    calls = []

    class Library:
        def mallopt(self, what, value):
            calls.append((what, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.delenv(memory.VARIABLE, raising=False)

    @memory.freed_memory_returned()
    def fails():
        assert calls == [(-3, memory.RETURNED)]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert calls[1:] == [(-3, memory.KEPT)]
    monkeypatch.setenv(memory.VARIABLE, "4096")
    with memory.freed_memory_returned():
        assert len(calls) == 2
