"""`python -m twell_lab`: the command where the package is not installed, from a bare checkout."""

import sys

from .app.cli import main

if __name__ == "__main__":
    sys.exit(main())
