"""The time of imports, and of the first load in a new process. Elsewhere imports are outside of the clock."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benches import model
from benches.machine import LIBRARIES, Library
from benches.sources import create
from benches.table import Case, Table, Target

if TYPE_CHECKING:
    from benches.sources import Sources

# Programs of a new process: `PATH` is a file with one tensor of 2 MB, `WRITTEN` the same in formats of other libraries.
# `found` is the array or tensor, whose bits are compared.
_FIRST_LOADS = {
    "reshard": "import reshard\nwith reshard.open(PATH) as c: found = c.load()[KEY]",
    "safetensors, numpy": (
        "import ml_dtypes, safetensors.numpy\nwith safetensors.safe_open(PATH, 'numpy') as f: found = f.get_tensor(KEY)"
    ),
    "safetensors, torch": (
        "import safetensors\nwith safetensors.safe_open(PATH, 'pt') as f: found = f.get_tensor(KEY).clone()"
    ),
    "torch DCP": (
        "import torch, torch.distributed.checkpoint as dcp\nfound = torch.empty(512, 2048, dtype=torch.bfloat16)\n"
        "dcp.load({KEY: found}, storage_reader=dcp.FileSystemReader(WRITTEN['dcp']), no_dist=True)"
    ),
    "fastsafetensors": (
        "from fastsafetensors import SafeTensorsFileLoader\nf = SafeTensorsFileLoader(None, 'cpu', nogds=True)\n"
        "f.add_filenames({0: [PATH]})\nb = f.copy_files_to_device()\nfound = b.get_tensor(KEY)"
    ),
    "Run:ai model streamer": (
        "from runai_model_streamer import SafetensorsStreamer\n"
        "with SafetensorsStreamer() as s:\n    s.stream_file(PATH)\n"
        "    found = dict((k, t.clone()) for k, t in s.get_tensors())[KEY]"
    ),
    "Orbax": "import orbax.checkpoint as o\nfound = o.PyTreeCheckpointer().restore(WRITTEN['orbax'])[KEY]",
}
_PROGRAM = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import numpy
PATH, KEY, WRITTEN = json.loads(sys.argv[1])
started = time.perf_counter()
exec(sys.argv[2])
seconds = time.perf_counter() - started
with open(PATH, "rb") as file:
    expected = file.read()[-2 * 512 * 2048:]
if hasattr(found, "untyped_storage"):
    import torch
    found = found.contiguous().view(torch.uint16).numpy()
assert numpy.ascontiguousarray(found).tobytes() == expected, "the tensor is not that of the model"
print("SECONDS", seconds)
"""
_IMPORT = """
import sys, time, warnings
warnings.simplefilter("ignore")
if sys.argv[1] != "numpy": import numpy
started = time.perf_counter()
__import__(sys.argv[1])
print("SECONDS", time.perf_counter() - started)
"""


def first_use(sources: Sources) -> list[Table]:
    """Imports, first loads and the help of the command line, each in a new interpreter."""
    create(sources.small, "dcp", "orbax")

    def importing(library: Library) -> Case:
        def run() -> float:
            library.require()
            return _seconds(_IMPORT, library.module)

        kind = "reshard" if library.name == "reshard" else "peer"
        return Case(f"import {library.module}", 0, run, kind)

    def loading(name: str, program: str) -> Case:
        def run() -> float:
            if name in LIBRARIES:
                LIBRARIES[name].require()
            (key,) = model.shapes(0)
            written = {form: str(sources.small.at(form)) for form in ("dcp", "orbax")}
            return _seconds(_PROGRAM, json.dumps([str(sources.small.path), key, written]), program)

        return Case(name, 0, run, "reshard" if name == "reshard" else "peer")

    return [
        Table("import in a new process, after numpy's", [importing(one) for one in LIBRARIES.values()]),
        Table(
            "import and first load of 2 MB in a new process, after the import of numpy",
            [loading(name, program) for name, program in _FIRST_LOADS.items()],
            (Target("reshard", at_most=0.080),),
        ),
        Table("command line", [Case("reshard --help", 0, _help)], (Target("reshard --help", at_most=0.150),)),
    ]


def _seconds(*arguments: str) -> float:
    done = subprocess.run([sys.executable, "-c", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("SECONDS")))


def _help() -> float:
    """From the start of the interpreter to its end."""
    started = time.perf_counter()
    program = "from reshard.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert "convert" in done.stdout, done.stdout
    return seconds
