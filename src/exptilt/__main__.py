"""`python -m exptilt` is the `exptilt` command."""

import sys

from exptilt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
