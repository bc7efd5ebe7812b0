"""What holds for every test process."""

from __future__ import annotations

import os
import signal

# A job that a shell starts in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: tests fork ranks off this process, which wait for ever for the threads of a pool that only
# their parent has, once it has one.
os.environ["OMP_NUM_THREADS"] = "1"
