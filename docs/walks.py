"""The walks in docs/architecture.md: which modules a load, a save and a resume pass through, drawn from a trace.

    python docs/walks.py            # prints them
    python docs/walks.py --write    # writes them into the page

Each walk is made twice: the first one imports modules and fills caches, the second one is traced. A line is a package,
in the order of the layers, with its modules in the order in which they are entered. A call that goes up comes from a
layer below: a function that was handed down, or a method of a class that a layer above has derived.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from layers import PAGE, layers

import reshard
from reshard.errors import ReshardError
from reshard.options import Retention, SaveOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PACKAGE = str(Path(reshard.__file__).parent) + os.sep
BEGIN, END = "<!-- walks: python docs/walks.py --write -->\n", "<!-- end of walks -->\n"
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
DEPTH = {name: n for n, names in enumerate(layers()) for name in names}
DEPTH |= dict.fromkeys(("values", "options", "dtypes", "errors"), max(DEPTH.values()))  # they call each other


def place_of(frame: FrameType | None) -> tuple[str, str] | None:
    """Package and module of a frame of this package."""
    name = "" if frame is None else frame.f_code.co_filename
    if not name.startswith(PACKAGE):
        return None
    package, _, module = name[len(PACKAGE) :].removesuffix(".py").partition(os.sep)
    return package, module.replace(os.sep, ".").removesuffix(".__init__") or package


class Walk:
    """The calls of one walk."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.modules: dict[str, dict[str, None]] = {}
        self.keep: dict[str, None] = {}
        self.up: Counter[tuple[str, str]] = Counter()

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call; what `sys.setprofile` takes."""
        place = place_of(frame)
        if event != "call" or place is None:
            return
        package, module = place
        self.n_calls += 1
        self.modules.setdefault(package, {})[module] = None
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        values = [(name, frame.f_locals.get(name)) for name in names]
        if any(name == "keep" or isinstance(value, Retention | SaveOptions) for name, value in values):
            self.keep[f"{package}.{module}" if module != package else package] = None
        caller = place_of(frame.f_back)
        if caller is not None and DEPTH.get(caller[0], 0) > DEPTH.get(package, 0) and "<" not in frame.f_code.co_name:
            self.up[caller[0], package] += 1

    def text(self) -> str:
        """The walk as lines."""
        n_files = sum(map(len, self.modules.values()))
        width = max(map(len, self.modules))
        lines = [f"{round(self.n_calls, -2):,} calls, {n_files} modules, {len(self.modules)} packages"]
        packages = sorted(self.modules, key=lambda one: DEPTH.get(one, 0))
        lines += [f"  {package:<{width}}  {' '.join(self.modules[package])}" for package in packages]
        up = [f"{low} -> {high} {n}" for (low, high), n in sorted(self.up.items())]
        lines.append(f"  calls that go up: {', '.join(up) or 'none'}")
        return "\n".join(lines)


def traced(work: Callable[[], object]) -> Walk:
    """The walk of a function that has run before."""
    walk = Walk()
    sys.setprofile(walk.see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return walk


def state(value: int) -> dict[str, np.ndarray]:
    """Four tensors."""
    return {f"w{i}": np.full((64, 64), value, np.float32) for i in range(4)}


def walks(folder: Path) -> list[tuple[str, str]]:
    """The title and the text of each walk."""
    root, found = folder / "run", []
    for iteration in (1, 2, 3):
        reshard.save(root, iteration, state(iteration), keep=5)

    def load() -> None:
        with reshard.open(root) as checkpoint:
            checkpoint.load(LAYOUT, 1)

    load()
    found.append(("`open` and `load` of one rank of two", traced(load).text()))
    save = traced(lambda: reshard.save(root, 4, state(4), keep=5))
    found.append(("`save`, the fourth of a process, with `keep`", save.text()))
    found.append(("The option `keep` in this save", "  " + "\n  ".join(save.keep)))
    shard = next((root / "iteration_00000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    def resume() -> None:
        assert reshard.load(root).iteration == 3

    resume()
    found.append(("`load`, where the newest of four iterations is damaged", traced(resume).text()))
    return found


def main() -> int:
    """Print or write."""
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(f"{title}:\n\n```text\n{walk}\n```\n\n" for title, walk in walks(Path(folder)))
    if "--write" not in sys.argv[1:]:
        sys.stdout.write(text)
        return 0
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ReshardError as error:
        raise SystemExit(str(error)) from None
