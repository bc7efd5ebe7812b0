"""A demonstration on a small model: write it, shard it, reshard it, merge it, and verify each step.

The verification does not use reshard's geometry: shard files are opened one by one, and each array in them is compared,
byte for byte, with the slice that numpy takes of the original tensor.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from reshard import _core, opening
from reshard.errors import ArgumentError, DestinationExistsError
from reshard.layout import ModelLayout
from reshard.options import Commit
from reshard.storage.changes import make_folders
from reshard.storage.location import Location, locate
from reshard.verbs.convert import convert

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from reshard.checkpoint import Checkpoint
    from reshard.verbs.convert import ConvertReport

Shape = tuple[int, ...]
Region = tuple[Shape, Shape]

_N_LAYERS = 4
_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_ROW = ("o_proj", "down_proj")


@dataclass(frozen=True)
class DemoStep:
    """One step of the demo and the result of its verification.

    Attributes:
        name: "make", "shard TP2 x PP2", "reshard TP4" or "merge".
        path: the folder that it wrote.
        n_files: number of shard files that it wrote.
        n_bytes: bytes of these files.
        seconds: duration of writing, without the verification.
        n_compared: number of arrays that were compared with the model; 0 for the model itself.
        different: keys of tensors that differ.
    """

    name: str
    path: str
    n_files: int
    n_bytes: int
    seconds: float
    n_compared: int = 0
    different: tuple[str, ...] = ()


@dataclass(frozen=True)
class DemoReport:
    """The result of the demo.

    Attributes:
        n_tensors: number of tensors of the model.
        n_bytes: bytes of the tensors.
        steps: the steps in order.
        equal: whether every tensor was equal after every step.
    """

    n_tensors: int
    n_bytes: int
    steps: tuple[DemoStep, ...]
    equal: bool


def demo(
    folder: str | os.PathLike[str],
    n_bytes: int = 200_000_000,
    *,
    on_step: Callable[[DemoStep], object] | None = None,
    progress: _core.Progress | None = None,
) -> DemoReport:
    """Write a llama-like bf16 model, shard it TP2 x PP2, reshard it to TP4, merge it, and compare it each time.

    Args:
        folder: an empty folder, or one that does not exist. All files stay there, including the layout files.
        n_bytes: approximate size of the model in bytes, at least 1,000,000; four times as much is written.
        on_step: called with each step after its verification.
        progress: called as `progress(done_bytes, total_bytes)` while a conversion writes.

    Raises:
        ArgumentError: `n_bytes` is too small.
        DestinationExistsError: the folder is not empty.
        ReshardError: a step failed; see `convert` and `open`.

    Example:
        >>> import tempfile
        >>> from reshard.verbs.demo import demo
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = demo(folder, 1_000_000)
        >>> report.equal, report.n_tensors
        (True, 39)
    """
    if n_bytes < 1_000_000:
        raise ArgumentError(f"a model of {n_bytes} bytes is too small for 4 parts; the minimum is 1000000")
    folder = locate(folder)
    if folder.found() not in (None, "folder") or (folder.is_folder() and folder.names()):
        raise DestinationExistsError(
            f"{folder} is not an empty folder", path=str(folder), hint="pass a folder that is empty or does not exist"
        )
    make_folders(folder)
    shapes = _shapes(n_bytes)
    steps: list[DemoStep] = []

    def step(name: str, act: Callable[[], DemoStep]) -> None:
        steps.append(replace(act(), name=name))
        if on_step is not None:
            on_step(steps[-1])

    model, sharded, resharded, merged = (folder / name for name in ("hf", "tp2_pp2", "tp4", "merged"))

    def convert_and_compare(source: Location, target: Location, mesh: dict[str, int] | None) -> DemoStep:
        layout = None if mesh is None else layout_of(mesh)
        if layout is not None:
            locate(target.with_name(f"{target.name}.yaml")).replace(str(layout), durable=False)
        # Not durable: the files are not needed after a crash, and a sync would dominate the time.
        report = convert(source, target, layout=layout, commit=Commit(durable=False), progress=progress)
        return _compare(report, model, 1 if mesh is None else mesh["tp"])

    step("make", lambda: _make(model, shapes))
    step("shard TP2 x PP2", lambda: convert_and_compare(model, sharded, {"pp": 2, "tp": 2}))
    step("reshard TP4", lambda: convert_and_compare(sharded, resharded, {"tp": 4}))
    step("merge", lambda: convert_and_compare(resharded, merged, None))
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    return DemoReport(len(shapes), total, tuple(steps), equal=not any(step.different for step in steps))


def layout_of(mesh: dict[str, int]) -> ModelLayout:
    """The layout of the demo's model over a mesh with an axis `tp` and optionally `pp`.

    Example:
        >>> print(layout_of({"tp": 4}))
        mesh: {tp: 4}
        rules:
          - match: ["*.o_proj.weight", "*.down_proj.weight"]
            cut: [null, tp]
          - match: "*norm.weight"
          - match: "*"
            cut: [tp]
        <BLANKLINE>
    """
    mapping: dict[str, object] = {
        "mesh": mesh,
        "rules": [
            {"match": [f"*.{name}.weight" for name in _ROW], "cut": [None, "tp"]},
            {"match": "*norm.weight"},
            {"match": "*", "cut": ["tp"]},
        ],
    }
    if "pp" in mesh:
        mapping["place"] = [
            {"match": "model.layers.{i}.*", "axis": "pp"},
            {"match": "model.embed_tokens.*", "axis": "pp", "at": 0},
            {"match": ["model.norm.*", "lm_head.*"], "axis": "pp", "at": -1},
        ]
    return ModelLayout.from_mapping(mapping)


# -- the model


def _shapes(n_bytes: int) -> dict[str, Shape]:
    """The tensors of a llama-like model of about this size, under their Hugging Face names, in bf16."""
    # About 54 hidden**2 parameters of 2 bytes. Every sharded dim is a multiple of 16, so it divides by 4.
    hidden = max(64, math.isqrt(n_bytes // 108) // 32 * 32)
    kv, ffn, vocabulary = hidden // 2, hidden * 11 // 4, 4 * hidden
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(_N_LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _make(folder: Location, shapes: dict[str, Shape]) -> DemoStep:
    """Write the model, filled with random bits, as Hugging Face files: one for each layer and one for each end."""
    started = time.monotonic()
    make_folders(folder)
    groups: dict[str, list[str]] = {}
    for key in shapes:
        groups.setdefault(key.split(".")[2] if key.startswith("model.layers.") else key, []).append(key)
    generator = np.random.default_rng(20)
    weight_map: dict[str, str] = {}
    n_bytes = 0
    for number, keys in enumerate(groups.values(), 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Random bits include all kinds of NaN, which must be preserved.
        bits = {key: np.frombuffer(generator.bytes(2 * math.prod(shapes[key])), np.uint16) for key in keys}
        arrays = [(key, "BF16", shapes[key], bits[key].reshape(shapes[key])) for key in keys]
        path = str(folder / name)
        n_bytes += _core.write_arrays(path, arrays, metadata={"format": "pt"}, durable=False, mode=0o666).n_bytes
        weight_map |= dict.fromkeys(keys, name)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    locate(folder / "model.safetensors.index.json").replace(json.dumps(index, indent=2), durable=False)
    return DemoStep("", str(folder), len(groups), n_bytes, time.monotonic() - started)


# -- the verification


def _compare(report: ConvertReport, model: Location, tp: int) -> DemoStep:
    """Compare every array in the written files with the model."""
    different: list[str] = []
    n_compared = 0
    with opening.open(model) as made, opening.open(report.path) as written:
        files: dict[str, Checkpoint] = {}
        try:
            for key in made.keys():  # noqa: SIM118  not a mapping
                original = _bits(made.read(key))
                shards = written[key].shards if key in written else ()
                is_equal = {(shard.offset, shard.shape) for shard in shards} == set(_expected(key, original.shape, tp))
                for shard in shards if is_equal else ():
                    region = tuple(slice(start, start + n) for start, n in zip(shard.offset, shard.shape, strict=True))
                    for name in shard.files:
                        if name not in files:
                            files[name] = opening.open(written.path / name)
                        n_compared += 1
                        is_equal &= np.array_equal(_bits(files[name].read(key)), original[region])
                if not is_equal:
                    different.append(key)
            different += sorted(set(written) - set(made))
        finally:
            for file in files.values():
                file.close()
    return DemoStep("", report.path, report.n_files, report.n_bytes, report.seconds, n_compared, tuple(different))


def _expected(key: str, shape: Shape, tp: int) -> Iterator[Region]:
    """The expected regions of a tensor, computed without reshard's geometry."""
    name = key.split(".")[-2]
    dim = 0 if name in _COLUMN else 1 if name in _ROW else None
    if dim is None:
        yield (0,) * len(shape), shape
        return
    part = shape[dim] // tp
    for n in range(tp):
        yield (
            tuple(n * part if d == dim else 0 for d in range(len(shape))),
            tuple(part if d == dim else extent for d, extent in enumerate(shape)),
        )


def _bits(array: np.ndarray) -> np.ndarray:
    """bf16 as integers with the same bits, since NaNs are not equal as numbers."""
    assert array.dtype == ml_dtypes.bfloat16
    return array.view(np.uint16)
