"""The program: `tito-audit`, and `python -m tito_audit`."""

from __future__ import annotations

import gc
import signal


def main() -> None:
    """Load the command line and run it; until it is loaded, Ctrl-C ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Python would print a traceback
    gc.set_threshold(250_000)  # more net allocations than all imports and a few rows make
    from tito_audit.cli import main as command

    command()


if __name__ == "__main__":
    main()
