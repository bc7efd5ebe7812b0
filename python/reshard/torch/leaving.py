"""How a run ends before its time: told by a signal, or by an exception. All ranks save at one step, or none does.

That they are at one step is seen to elsewhere (`emergency`). Here it is saved within the time that is left, and the
process ends with a code that says whether that worked.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from reshard.collective import Collective
from reshard.errors import ReshardError
from reshard.group import session
from reshard.torch.emergency import EXIT_CODE, LAST_WORDS_S

if TYPE_CHECKING:
    from reshard.group import Group
    from reshard.torch.emergency import Signals
    from reshard.torch.saving import Saver

__all__ = ["leave", "save_after", "save_and_leave"]

_log = logging.getLogger("reshard")


def save_and_leave(saver: Saver, signals: Signals, step: int, why: str, seconds: float) -> NoReturn:
    """Save within so many seconds and end the process. What is under way in the background is waited for.

    Raises:
        SystemExit: always.
    """
    run, deadline = saver.run, time.monotonic() + seconds
    _log.warning("%s: saving iteration %d, then leaving", why, step)
    try:
        saver.wait(seconds)
    except (ReshardError, TimeoutError) as error:
        _log.error("the save in the background failed: %s", error)
        run.saved = -1  # whatever it was
    saved, message = True, f"iteration {step} is saved"
    if run.saved != step:
        try:
            saver.save(step, blocking=True, timeout=max(deadline - time.monotonic(), LAST_WORDS_S))
        except ReshardError as error:
            saved, message = False, f"iteration {step} is not saved: {error}"
    leave(saver.group, signals, message, saved=saved)


def leave(group: Group, signals: Signals, message: str, *, saved: bool) -> NoReturn:
    """End the process, with a last word.

    Raises:
        SystemExit: always.
    """
    try:
        # Rank 0 may serve the store: it leaves last.
        session(group, "leaving").gather(None, timeout=LAST_WORDS_S)
    except ReshardError as error:
        _log.debug("leaving: %s", error)
    _log.log(logging.WARNING if saved else logging.ERROR, "%s; leaving", message)
    # Launchers send another signal to whoever is left when the first rank ends.
    signals.stay()
    raise SystemExit(EXIT_CODE if saved else 128 + (signals.number or signal.SIGTERM))


def save_after(saver: Saver, error: BaseException, seconds: float) -> None:
    """Save where the last complete step ended, if the exception has left it as it was, on all ranks.

    Raises:
        ReshardError: it is not saved.
    """
    run = saver.run
    if run.last == run.saved:
        return
    own = (run.last, run.n_updates == 0 and not run.is_updating)  # the last step, and whether no other has begun
    what = f"{type(error).__name__} in the step after {run.last}"
    states = Collective(session(saver.group, "exception"), seconds).share(own, tuple[int, bool])
    if any(state != (run.last, True) for state in states):
        _log.error("%s: nothing is saved, the ranks are not at the end of one step: %s", what, states)
        return
    saver.wait(seconds)
    saver.save(run.last, blocking=True, timeout=seconds, interrupted=True)
    _log.warning("%s: iteration %d is saved", what, run.last)
