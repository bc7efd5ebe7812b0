"""The program `reshard`. Ctrl-C is no traceback, also while it imports the command line and while it ends."""

from __future__ import annotations

import atexit
import os
import signal
from typing import NoReturn


def main() -> None:
    """Run the command line."""
    # KeyboardInterrupt within the import of an extension module would become a traceback or another error.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _end)
    from reshard.cli import main as run  # noqa: PLC0415  after the handler is set

    if not is_default:
        run()
        return
    # While Python shuts down, the signal would kill the process, though the command is done.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:  # in the moment in which the command line has ended
        _end()
    finally:
        signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
