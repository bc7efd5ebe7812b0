"""What every installation of the package can do: a program of a user, run against the wheels, and checked by mypy.

`.ci/wheels` runs it in environments that hold nothing but the package and what it requires.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

import reshard
from reshard.errors import DamagedFileError

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Save, verify, load under another layout, convert, and see that damage is found."""
    installed = Path(reshard.__file__)
    assert ROOT not in installed.parents, f"{installed} is the source tree"
    assert (installed.parent / "py.typed").exists()
    weights = {f"layers.{i}.w": np.arange(96 * 32, dtype=np.float32).reshape(96, 32) + i for i in range(2)}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        assert reshard.save(run, 100, weights, retention=reshard.Retention(keep=2)).iteration == 100
        loaded = reshard.load(run)
        assert loaded.iteration == 100
        for name, value in loaded.state.items():
            assert np.array_equal(value, weights[name]), name
        with reshard.open(run) as checkpoint:
            local = checkpoint.load({"mesh": {"tp": 4}, "rules": [{"match": "*.w", "cut": ["tp"]}]}, rank=3)
            assert np.array_equal(local["layers.1.w"], weights["layers.1.w"][72:])
        reshard.convert(run, Path(folder) / "merged")
        merged = reshard.load_file(Path(folder) / "merged" / "model.safetensors")
        assert np.array_equal(merged["layers.0.w"], weights["layers.0.w"])
        (stored,) = run.glob("iter*/*.safetensors")
        data = bytearray(stored.read_bytes())
        data[-1] ^= 1
        stored.write_bytes(data)
        assert stored.name in refusal(stored.parent)
        assert not reshard.verify(run).ok
    print(
        f"reshard {version('reshard')} works on Python {sys.version.split()[0]}, {sys.platform}, numpy {np.__version__}"
    )


def refusal(path: Path) -> str:
    """The message with which a damaged iteration is refused; empty if it is loaded."""
    try:
        reshard.load(path)
    except DamagedFileError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
