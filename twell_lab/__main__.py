"""`python -m twell_lab`: the command where the package is not installed, from a bare checkout."""

import signal
import sys

if __name__ == "__main__":
    # Until `main` handles Ctrl-C, it ends the process, without the traceback of an import.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .app.cli import main

    sys.exit(main())
