"""The last save of a run that ends early, because of a signal or an exception. Either all ranks save, or none.

`emergency` brings all ranks to the same step. The functions here save within the remaining time, and end the process
with an exit code that tells whether the save succeeded.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from reshard.errors import GroupError, ReshardError
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_error_of_all, log_of_all, session
from reshard.torch.emergency import EXIT_CODE, EXIT_GRACE_S
from reshard.torch.run import NOT_SAVED

if TYPE_CHECKING:
    from reshard.ranks.group import Group
    from reshard.torch.emergency import Signals
    from reshard.torch.saving import Saver

_log = logging.getLogger("reshard")


def save_and_exit(saver: Saver, signals: Signals, step: int, why: str, seconds: float) -> NoReturn:
    """Save and end the process. A save in the background is waited for first.

    Args:
        saver: the saver of the run.
        signals: the signal handlers of the run.
        step: the step to save.
        why: the reason, for the log.
        seconds: time limit in seconds.

    Raises:
        SystemExit: always.
    """
    run, deadline = saver.run, time.monotonic() + seconds
    log_of_all(saver.group.rank, "%s: saving iteration %d, then the process ends", why, step)
    try:
        saver.wait(seconds)
    except (ReshardError, TimeoutError) as error:
        log_error_of_all(saver.group.rank, error, "the save in the background failed: %s", error)
        run.saved = NOT_SAVED
    if run.saved != step:
        try:
            saver.save(step, blocking=True, timeout=max(deadline - time.monotonic(), EXIT_GRACE_S))
        except ReshardError as error:
            exit_process(saver.group, signals, f"iteration {step} is not saved: {error}", error)
    saver.finish_copies(max(deadline - time.monotonic(), EXIT_GRACE_S))
    exit_process(saver.group, signals, f"iteration {step} is saved")


def exit_process(group: Group, signals: Signals, message: str, error: ReshardError | None = None) -> NoReturn:
    """Log a message and end the process.

    Args:
        group: the group; ranks wait for each other for a short time.
        signals: the signal handlers of the run, which stay in place.
        message: the message to log.
        error: why the last step is not saved; it determines the exit code.

    Raises:
        SystemExit: always.
    """
    try:
        # Rank 0 may serve the store, so it ends last.
        session(group, "leaving").gather(None, timeout=EXIT_GRACE_S)
    except ReshardError as missing:
        _log.debug("waiting for the other ranks before the end: %s", missing)
    if error is None:
        log_of_all(group.rank, "%s; the process ends", message)
    else:
        log_error_of_all(group.rank, error, "%s; the process ends", message)
    # Launchers send another signal to the remaining ranks when the first rank ends.
    signals.stay()
    raise SystemExit(EXIT_CODE if error is None else 128 + (signals.number or signal.SIGTERM))


def save_after(saver: Saver, error: BaseException, seconds: float) -> None:
    """Save the last complete step after an exception, if all ranks are still in the state of the same step.

    Args:
        saver: the saver of the run.
        error: the exception.
        seconds: time limit in seconds.

    Raises:
        ReshardError: the save failed.
    """
    run = saver.run
    if run.last == run.saved:
        try:
            saver.wait_after_error(seconds)
        except GroupError:
            raise
        except ReshardError as failed:
            log_error_of_all(saver.group.rank, failed, "the save in the background failed: %s", failed)
        else:
            return
    own = (run.last, run.n_updates == 0 and not run.is_updating)  # the last step, and whether no other has begun
    what = f"{type(error).__name__} in the step after {run.last}"
    states = Collective(session(saver.group, "exception"), seconds).share(own, tuple[int, bool])
    if any(state != (run.last, True) for state in states):
        message = "%s: nothing is saved, the ranks are not at the end of the same step: %s"
        log_of_all(saver.group.rank, message, what, states, level=logging.ERROR)
        return
    try:
        saver.wait(seconds)
    except ReshardError as failed:
        log_error_of_all(saver.group.rank, failed, "the save in the background failed: %s", failed)
    saver.save(run.last, blocking=True, timeout=seconds, interrupted=True)
    log_of_all(saver.group.rank, "%s: iteration %d is saved", what, run.last)
