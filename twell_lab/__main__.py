"""`python -m twell_lab`: the command where the package is not installed, from a bare checkout."""

import signal
import sys

if __name__ == "__main__":
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # until `main` knows what to say: no traceback of an import
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .app.cli import main

    sys.exit(main())
