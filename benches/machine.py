"""What figures depend on: the machine, its system, and the versions of all libraries that are measured."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benches.table import Unavailable


@dataclass(frozen=True)
class Library:
    """A library that is measured: its distribution, and the module that a user imports."""

    name: str
    distribution: str
    module: str

    def version(self) -> str | None:
        """The installed version; None if there is none."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def require(self) -> None:
        """Raise `Unavailable` if it is not installed."""
        if self.version() is None:
            raise Unavailable(f"{self.distribution} is not installed")


LIBRARIES = {
    one.name: one
    for one in (
        Library("numpy", "numpy", "numpy"),
        Library("reshard", "reshard", "reshard"),
        Library("safetensors", "safetensors", "safetensors.torch"),
        Library("torch", "torch", "torch"),
        Library("torch DCP", "torch", "torch.distributed.checkpoint"),
        Library("fastsafetensors", "fastsafetensors", "fastsafetensors"),
        Library("Run:ai model streamer", "runai-model-streamer", "runai_model_streamer"),
        Library("DeepSpeed", "deepspeed", "deepspeed"),
        Library("Orbax", "orbax-checkpoint", "orbax.checkpoint"),
    )
}


def describe(folder: Path, mindspore: str | None) -> dict[str, str]:
    """Machine, system and versions.

    Args:
        folder: on the disk that is measured.
        mindspore: version of MindSpore, which may be in another environment; None if it is not installed.
    """
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    facts = dict(line.split(":", 1) for line in _lines("/proc/cpuinfo") if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    model = f"family {facts.get('cpu family', '?')}, model {facts.get('model', '?')}"
    memory_kib = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    file_system = subprocess.run(
        ["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True
    ).stdout.strip()
    huge_pages = _lines("/sys/kernel/mm/transparent_hugepage/enabled")
    versions = {one.distribution: one.version() for one in LIBRARIES.values()} | {"mindspore": mindspore}
    return {
        "date": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{cpu} ({model}), {len(os.sched_getaffinity(0))} processors, {memory_kib / 2**20:.0f} GiB",
        "system": f"Linux {platform.release()}, {file_system}, huge pages {' '.join(huge_pages)}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        + f", Python {platform.python_version()}",
        "not installed": ", ".join(name for name, version in versions.items() if not version) or "-",
        "load average before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
