"""Start a script on several ranks of this machine, as `torchrun` would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["run_ranks"]

_PATIENCE_S = 300


def run_ranks(script: str, folder: Path, jobs: dict[str, Any], n_ranks: int) -> None:
    """Run a script beside this file as `python <script> <folder> <jobs as JSON>` on each rank; all must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(n_ranks):
            with (folder / f"output_{rank}").open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, Path(__file__).with_name(script), folder, json.dumps(jobs)],
                        env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | shared,
                        cwd=folder,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        codes = [one.wait(_PATIENCE_S) for one in ranks]
    finally:
        for one in ranks:
            # Libraries start writers, which would outlive a rank that ends without waiting for them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    failed = [rank for rank, code in enumerate(codes) if code]
    assert not failed, (failed, (folder / f"output_{failed[0]}").read_text()[-3000:])
