"""The end of a connection to a cluster. Ray itself is not needed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from reshard.ray.cluster import shut_down


def test_an_interrupt_does_not_come_in_the_middle_of_the_end_of_ray() -> None:
    """Ray would end the process with exit code 1."""
    done: list[str] = []

    class Connected:
        @staticmethod
        def shutdown() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            done.append("shutdown")

    with pytest.raises(KeyboardInterrupt):
        shut_down(Connected)
    assert done == ["shutdown"]


def test_the_end_of_a_cluster_that_has_gone_is_no_error() -> None:
    class Gone:
        @staticmethod
        def shutdown() -> None:
            raise ConnectionError

    shut_down(Gone)
