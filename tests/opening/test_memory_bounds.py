"""How much memory and time the package takes by itself: bounds that a user of a small machine relies on.

Peaks are those of private memory (`RssAnon`: heap, stacks, anonymous maps, and what was written to private maps) of a
process of its own, which does the work. Maps of the source are not counted: they are page cache.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.memory import MIB, peak_mib, sparse_model

import reshard

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RssAnon is Linux")
COLUMNS_TP4 = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": [None, "tp"]}]}

CONVERT = """
import json, sys, reshard
source, target, layout = sys.argv[1:]
reshard.convert(source, target, layout=json.loads(layout), memory="32MiB", commit={"durable": False}, threads=2,
                progress=look)
"""


def convert_peaks(folder: Path, layout: object) -> list[float]:
    """Peaks of converting 144 and 600 MiB with a budget of 32 MiB."""
    peaks = []
    for n_mib in (144, 600):
        source = sparse_model(folder / f"{n_mib}.safetensors", n_mib)
        target = folder / f"out-{n_mib}"
        peaks.append(peak_mib(CONVERT, source, target, json.dumps(layout)))
        written = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
        assert written >= n_mib * MIB
        shutil.rmtree(target)  # pytest keeps its folders for a while
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize("layout", [None, COLUMNS_TP4], ids=["whole", "columns of tp4"])
def test_convert_takes_its_budget_and_a_constant(tmp_path: Path, layout: object) -> None:
    small, large = convert_peaks(tmp_path, layout)
    assert large <= 32 + 64, f"{large:.0f} MiB, interpreter included, with a budget of 32 MiB"
    assert large <= small + 8, f"{large:.0f} MiB for 600 MiB, {small:.0f} MiB for 144 MiB: it grows with the model"


LOAD = """
import json, sys, reshard
source, method, layout = sys.argv[1:]
layout = json.loads(layout)
with reshard.open(source, method=method) as checkpoint:
    checkpoint.load(layout, rank=None if layout is None else 1, threads=2, progress=look)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["map", "read"])
@pytest.mark.parametrize(("layout", "result_mib"), [(None, 288), (COLUMNS_TP4, 72)], ids=["whole", "columns of tp4"])
def test_load_takes_its_result_and_a_constant(tmp_path: Path, layout: object, result_mib: int, method: str) -> None:
    source = sparse_model(tmp_path / "m.safetensors", 288)
    peak = peak_mib(LOAD, source, method, json.dumps(layout))
    assert result_mib <= peak <= result_mib + 48, f"{peak:.0f} MiB, interpreter included, for {result_mib} MiB"


def test_views_take_no_memory(tmp_path: Path) -> None:
    source = sparse_model(tmp_path / "m.safetensors", 288)
    program = (
        "import sys, reshard\nfound = reshard.open(sys.argv[1]).load(copy=False)\nassert sum(map(len, found.values()))"
    )
    assert peak_mib(program, source) <= 48


IMPORT = """
import sys, time
started = time.process_time()  # of processor: what else runs on the machine does not count
import reshard
print(time.process_time() - started, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_import_is_quick_and_brings_no_framework() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout.split()
        for _ in range(5)
    ]
    # The least of five: the first one reads files from the disk.
    assert min(float(seconds) for seconds, *_ in runs) < 0.150
    for framework in ("torch", "mindspore", "jax", "tensorflow", "safetensors"):
        assert framework not in runs[0]


@pytest.mark.slow(disk=False)
def test_what_is_used_first_imports_no_framework(tmp_path: Path) -> None:
    source = sparse_model(tmp_path / "m.safetensors", 24)
    program = (
        "import sys, reshard\n"
        "reshard.open(sys.argv[1]).load()\n"
        "reshard.convert, reshard.safe_open(sys.argv[1], 'np')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, source], check=True, env=os.environ)


def file_of_empty_tensors(path: Path, n_tensors: int = 600_000) -> int:
    """A file whose header is all there is to it; the bytes of the header."""
    entries = (f'"{i:06d}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(n_tensors))
    text = ("{" + ",".join(entries) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return len(text)


OPENS = {
    "core": "index = _core.Index(); index.add_whole_file(index.add_file(sys.argv[1])); n = len(index)",
    "open": "checkpoint = reshard.open(sys.argv[1]); n = len(checkpoint); checkpoint.read('000007')",
    "safe_open": "file = reshard.safe_open(sys.argv[1], 'np'); n = 600_000; file.get_tensor('599999')",
    "load_file of a key": "n = len(reshard.open(sys.argv[1]).load(keys=['000001', '000002'])) + 599_998",
}
OPEN = """
import sys, numpy, reshard
from reshard import _core, interop, opening
{program}
assert n == 600_000, n
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", OPENS.values(), ids=OPENS)
def test_a_file_of_600_000_tensors_opens_in_twice_its_header(tmp_path: Path, program: str) -> None:
    header_bytes = file_of_empty_tensors(tmp_path / "m.safetensors")
    # What the interpreter and the imports take is measured by a run that opens nothing.
    idle = peak_mib(OPEN.replace("{program}", "n = 600_000"), tmp_path / "m.safetensors")
    peak = peak_mib(OPEN.replace("{program}", program), tmp_path / "m.safetensors") - idle
    bound = 2 * header_bytes / MIB + 32
    assert peak <= bound, f"{peak:.0f} MiB for a header of {header_bytes / MIB:.0f} MiB, allowed are {bound:.0f} MiB"


def test_a_small_metadata_file_is_read_within_a_memory_limit(tmp_path: Path) -> None:
    program = (
        "import resource, sys, numpy, reshard\n"
        "from reshard import opening, checkpoint\n"
        "from reshard.errors import ReshardError\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_AS)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, hard))\n"
        "print(reshard.open(sys.argv[1]).read('w').sum())\n"
    )
    reshard.save(tmp_path / "root", 7, {"w": np.arange(8.0)}, commit={"durable": False})
    folder = tmp_path / "root" / "iteration_00000007"
    (folder / "manifest.json").unlink()
    (folder / "checksums.bin").unlink(missing_ok=True)
    for text in folder.glob("*.safetensors"):  # of a foreign writer, that has no manifest
        reshard.save_file(reshard.load_file(text), text)
    done = subprocess.run(
        [sys.executable, "-c", program, folder], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stdout.strip()) == (0, "28.0"), done.stderr


DESCRIBE = """
import sys
from reshard.layout import ModelLayout
from reshard.storage.location import locate
from reshard.formats.checkpoint2.iteration import plan_layout, write_descriptions
n = int(sys.argv[1])
layout = {"mesh": {"tp": n}, "rules": [{"match": "w", "cut": ["tp"]}, {"match": "*"}]}
tensors = {"w": ("F32", "model"), "norm": ("F32", "model")}
bound = ModelLayout.from_mapping(layout).bind({"w": (n, 2), "norm": (2,)})
write_descriptions(plan_layout(tensors, bound), locate(sys.argv[2]), mode=0o666)
"""


@pytest.mark.slow(disk=False)
def test_metadata_takes_memory_in_proportion_to_the_ranks(tmp_path: Path) -> None:
    few, many = (peak_mib(DESCRIBE, n_ranks, tmp_path) for n_ranks in (64, 16384))
    assert many - few < 128, f"{many:.0f} MiB for 16,384 ranks"  # 1.5 GiB with the list of all ranks for each file
