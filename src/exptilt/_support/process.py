"""Which process loaded the package: a child forked from it must not use the parent's OpenMP threads, which it
does not have.
"""

import os

FIRST_PROCESS = os.getpid()
