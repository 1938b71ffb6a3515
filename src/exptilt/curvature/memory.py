"""A setting of the C library under which the peak memory of a product is what is alive.

glibc keeps freed blocks below 32 MB in its heap, where blocks of other sizes often do not fit: the resident
set of a product is then 1.5 to 1.8 times what is alive. Blocks from a threshold on can be mapped one by one
instead, and are returned when they are freed. The environment variable MALLOC_MMAP_THRESHOLD_ does the same
for a whole process, and has precedence.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

M_MMAP_THRESHOLD = -3  # malloc.h
RETURNED = 2**18  # bytes; below, pages of 4 kB would cost more than they save
KEPT = 2**25  # glibc's own limit: its threshold grows up to here with the blocks that are freed
VARIABLE = "MALLOC_MMAP_THRESHOLD_"


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Context in which freed blocks go back to the system; does nothing without glibc."""
    if platform.libc_ver()[0] != "glibc" or VARIABLE in os.environ:
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, RETURNED)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_THRESHOLD, KEPT)
