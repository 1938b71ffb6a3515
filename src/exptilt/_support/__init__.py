"""Parts that all other folders use: errors, checks, progress, threads, the compiled library."""

import os

# The process that loaded the package. A child forked from it does not have the parent's OpenMP threads, and
# must not use them.
FIRST_PROCESS = os.getpid()
