"""Any format and layout to any other: merge, split, re-cut, re-shard to another file size, cast.

The destination is planned first: which file holds which arrays. Then each file is streamed by the core, source to
destination, within the memory budget, into a staging folder that is published whole. Nothing here touches a byte.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reshard import _core, checkpoint, dtypes
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DestinationExistsError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats import checkpoint2, huggingface, tiles
from reshard.formats.checkpoint2_common import CommonInfo
from reshard.formats.checkpoint2_metadata import expressible, write_metadata
from reshard.formats.checkpoint2_shards import Shard, TensorRecord, World, assign, shards_of
from reshard.formats.files import parse_size, show, write_file_atomically
from reshard.layout import BoundLayout, ModelLayout, as_layout
from reshard.write.commit import published_folder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping

    from reshard.checkpoint import Checkpoint, LayoutLike, Part

__all__ = ["ConvertReport", "Target", "convert"]

_log = logging.getLogger("reshard")

Target = Literal["huggingface", "checkpoint2", "safetensors"]

# Named in the `__metadata__` of what is written: by it an earlier convert is known again.
WRITER_KEY = "reshard"


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion wrote.

    Attributes:
        path: the destination; of a Checkpoint 2.0 the iteration folder.
        to: its format.
        n_tensors: tensors of the source that were written.
        n_files: shard files.
        n_bytes: bytes of the shard files.
        seconds: how long it took.
        not_expressible: keys whose layout metadata.json cannot say, with the reason; the original does not see them
        warnings: what deserves a look.
    """

    path: str
    to: Target
    n_tensors: int
    n_files: int
    n_bytes: int
    seconds: float
    not_expressible: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    """One shard file to be: its name, and what the core is asked for."""

    name: str
    request: _core.Request


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Target | None = None,
    part: Part | None = None,
    layout: LayoutLike | None = None,
    iteration: int | None = None,
    prefix: str | None = None,
    dtype: object = None,
    max_shard_size: str | int = "4GiB",
    dedup: bool = True,
    memory: str | int = "256MiB",
    threads: int | None = None,
    durable: bool = True,
    overwrite: bool = False,
    strict_format: bool = False,
    modes: Literal["original"] | None = None,
    progress: _core.Progress | None = None,
) -> ConvertReport:
    """Write a checkpoint again in another format, layout, file size or dtype.

    Args:
        src: whatever `reshard.open` opens.
        dst: the destination: a Hugging Face folder, a Checkpoint 2.0 root, a folder for one file a rank, or a file.
        to: "huggingface" (the default without a layout), "checkpoint2" (the default with one) or "safetensors": one
            file if `dst` ends so, else one a rank.
        part: "model", "optimizer" or "all"; default "model" for Hugging Face, else "all".
        layout: how the destination is cut; none: whole tensors.
        iteration: number of the Checkpoint 2.0 iteration; default: the source's, or 0 if it has none.
        prefix: first part of the names of Checkpoint 2.0 shard files.
        dtype: cast the floating-point tensors to it; others stay.
        max_shard_size: largest Hugging Face file, such as "4GiB"; a larger tensor gets a file of its own.
        dedup: write each shard once instead of once for every rank that holds it.
        memory: budget of the copy, such as "256MiB"; what is used beyond it does not grow with the model.
        threads: threads of the copy.
        durable: sync everything before it is published.
        overwrite: replace that iteration, or the files of an earlier conversion, and nothing else.
        strict_format: refuse tensors whose layout metadata.json cannot express, instead of describing them in
            tiles.json, which only this package reads.
        modes: "original" gives files the permissions that MindSpore Transformers gives (shard files 0400).
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        What was written.

    Raises:
        DestinationExistsError: `dst` holds something, and `overwrite` was not given or does not cover it.
        ArgumentError: options that contradict each other, or `dst` inside `src` or the reverse.
        LayoutError, CoverageError, MismatchError, UnsupportedError: the source or the layout does not allow it.
        DamagedFileError, StorageError: reading or writing failed. In every case the destination is as it was.

    Example:
        >>> import numpy as np, reshard
        >>> src, dst = "m.safetensors", "tp2"
        >>> reshard.save_file({"w": np.arange(8, dtype=np.float32)}, src)
        >>> layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
        >>> reshard.convert(src, dst, layout=layout, iteration=7).n_files
        2
        >>> reshard.open(dst).iteration
        7
    """
    started = time.monotonic()
    source, target = Path(src), Path(dst)
    chosen = _target(to, layout)
    _check_options(chosen, target, layout, {"iteration": iteration, "prefix": prefix, "modes": modes})
    _check_apart(source, target)
    options = _Options(
        metadata={"format": "ms" if chosen == "checkpoint2" else "pt", WRITER_KEY: _core.__version__},
        dtype=None if dtype is None else dtypes.parse_dtype(dtype),
        windows=_core.Windows(parse_size(memory)),
        threads=threads,
        durable=durable,
        file_mode=0o640 if chosen == "checkpoint2" else 0o666,
        folder_mode=0o750 if chosen == "checkpoint2" else 0o777,
        progress=progress,
    )
    with checkpoint.open(source) as opened:
        keys = opened.keys(part or ("model" if chosen == "huggingface" else "all"))
        if not keys:
            raise ArgumentError(f"{source} holds no tensors of that part; there is nothing to write", path=str(source))
        job = _Job(opened, keys, target, options, overwrite)
        if chosen == "huggingface":
            written = _to_huggingface(job, parse_size(max_shard_size))
        elif chosen == "safetensors":
            written = _to_safetensors(job, layout)
        else:
            number = iteration if iteration is not None else (opened.iteration or 0)
            written = _to_checkpoint2(
                job,
                layout,
                number,
                prefix,
                dedup=dedup,
                strict_format=strict_format,
                original_modes=modes == "original",
            )
    return ConvertReport(
        path=str(written.path),
        to=chosen,
        n_tensors=len(keys),
        n_files=written.n_files,
        n_bytes=written.n_bytes,
        seconds=time.monotonic() - started,
        not_expressible=written.not_expressible,
        warnings=tuple(written.warnings),
    )


@dataclass(frozen=True)
class _Options:
    """What holds for every file."""

    metadata: dict[str, str]
    dtype: str | None
    windows: _core.Windows
    threads: int | None
    durable: bool
    file_mode: int
    folder_mode: int
    progress: _core.Progress | None


@dataclass(frozen=True)
class _Job:
    source: Checkpoint
    keys: list[str]
    target: Path
    options: _Options
    overwrite: bool


@dataclass
class _Written:
    path: Path
    n_files: int
    n_bytes: int
    not_expressible: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def _target(to: Target | None, layout: LayoutLike | None) -> Target:
    if to is None:
        return "huggingface" if layout is None else "checkpoint2"
    if to not in ("huggingface", "checkpoint2", "safetensors"):
        raise ArgumentError(f'`to` is {to!r}; "huggingface", "checkpoint2" or "safetensors" are accepted')
    return to


def _check_options(to: Target, target: Path, layout: LayoutLike | None, of_checkpoint2: Mapping[str, object]) -> None:
    if to == "huggingface" and layout is not None:
        raise ArgumentError(
            "Hugging Face files hold whole tensors: `layout` has no meaning there",
            hint='leave `layout` out, or choose to="checkpoint2" or to="safetensors"',
        )
    if to == "safetensors" and layout is not None and target.suffix == ".safetensors":
        raise ArgumentError(
            f"{target} is one file, a layout makes one a rank",
            hint="give a folder as the destination",
            path=str(target),
        )
    for name, value in of_checkpoint2.items():
        if value is not None and to != "checkpoint2":
            raise ArgumentError(f'`{name}` belongs to to="checkpoint2"; the destination is "{to}"')
    if of_checkpoint2["modes"] not in (None, "original"):
        raise ArgumentError(f'`modes` is {of_checkpoint2["modes"]!r}; "original" is accepted')
    iteration = of_checkpoint2["iteration"]
    if iteration is not None and (isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0):
        raise ArgumentError(f"`iteration` is {iteration!r}; a whole number from 0 on is needed")


def _check_apart(source: Path, target: Path) -> None:
    if not source.exists():
        raise CheckpointNotFoundError(f"there is nothing at {source}", path=str(source))
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        # A file beside others in its folder is no container: only a destination *in* it, or around it, is meant.
        raise ArgumentError(
            f"source {source} and destination {target} lie inside each other",
            path=str(target),
            hint="choose another one",
        )


def _bind(source: Checkpoint, layout: LayoutLike | None) -> BoundLayout:
    return source.bind(ModelLayout.replicated() if layout is None else layout)


class _Progress:
    """Progress over several files as one."""

    def __init__(self, call: _core.Progress | None, total_bytes: int) -> None:
        self.call = call
        self.total_bytes = total_bytes
        self.before = 0

    def of_file(self, n_bytes: int) -> Callable[[int, int], object] | None:
        """The callback for the next file."""
        start, call = self.before, self.call
        self.before += n_bytes
        return None if call is None else lambda done, _: call(start + done, self.total_bytes)


def _write_files(job: _Job, folder: Path, files: list[_File]) -> int:
    """Stream the files; the bytes that were written."""
    options = job.options
    # Plans are cheap and hold what they open: they are made one by one, and once more to know the total.
    sizes = [sum(array[3] for array in job.source.plan(file.request, dtype=options.dtype).arrays) for file in files]
    progress = _Progress(options.progress, sum(sizes))
    total = 0
    for file, n_bytes in zip(files, sizes, strict=True):
        plan = job.source.plan(file.request, dtype=options.dtype)
        total += plan.write(
            str(folder / file.name),
            metadata=options.metadata,
            windows=options.windows,
            threads=options.threads,
            durable=options.durable,
            mode=options.file_mode,
            progress=progress.of_file(n_bytes),
        )
    return total


# -- Hugging Face and plain files


def _to_huggingface(job: _Job, max_shard_bytes: int) -> _Written:
    _check_folder_free(job)
    request = _whole(job.source, job.keys)
    sizes = [(name, n_bytes) for name, _, _, n_bytes in job.source.plan(request, dtype=job.options.dtype).arrays]
    shards = huggingface.plan_shards(sizes, max_shard_bytes)
    files = [
        _File(huggingface.file_name(number, len(shards)), _whole(job.source, keys))
        for number, keys in enumerate(shards, 1)
    ]
    with _folder(job) as folder:
        n_bytes = _write_files(job, folder, files)
        if len(files) > 1:
            weight_map = {key: file.name for file, keys in zip(files, shards, strict=True) for key in keys}
            total = sum(size for _, size in sizes)
            text = huggingface.index_text(weight_map, total, _core.__version__)
            write_file_atomically(
                folder / huggingface.INDEX_FILE, text, job.options.file_mode, durable=job.options.durable
            )
    return _Written(job.target, len(files), n_bytes)


def _whole(source: Checkpoint, keys: list[str]) -> _core.Request:
    request = _core.Request()
    for key in keys:
        shape = source.shape(key)
        request.add_region(key, key, (0,) * len(shape), shape)
    return request


def _to_safetensors(job: _Job, layout: LayoutLike | None) -> _Written:
    if job.target.suffix == ".safetensors":
        _check_file_free(job)
        job.target.parent.mkdir(parents=True, exist_ok=True)
        n_bytes = _write_files(job, job.target.parent, [_File(job.target.name, _whole(job.source, job.keys))])
        return _Written(job.target, 1, n_bytes)
    _check_folder_free(job)
    bound = _bind(job.source, layout)
    cutting = _Cutting(job, bound)
    files = []
    for rank in bound.ranks:
        names = bound.local_names(rank, job.keys)
        if names:
            files.append(cutting.file(f"rank_{rank}.safetensors", rank, names, described=set(job.keys)))
    with _folder(job) as folder:
        n_bytes = _write_files(job, folder, files)
        cutting.write_tiles(folder, layout)
    return _Written(job.target, len(files), n_bytes, warnings=list(bound.warnings))


class _Cutting:
    """Files of cut arrays, and the description of those that only tiles.json can describe."""

    def __init__(self, job: _Job, bound: BoundLayout) -> None:
        self.job = job
        self.bound = bound
        # Casts and keys are checked for everything before anything is written.
        plan = job.source.plan(_whole(job.source, job.keys), dtype=job.options.dtype)
        self.dtypes = {name: dtype for name, dtype, _, _ in plan.arrays}
        self.builder = tiles.Builder()

    def file(self, name: str, rank: int, arrays: Collection[str], described: Collection[str]) -> _File:
        """A file of a rank's arrays; arrays that hold a part of a key in `described` are told to tiles.json."""
        members = {join.name: join.keys for join in self.bound.joins}
        # Wide elements first, as safetensors orders them: every tensor then begins on a multiple of its element.
        order = sorted(arrays, key=lambda array: (-dtypes.bits(self.dtypes[members.get(array, (array,))[0]]), array))
        for array in order:
            keys = [key for key in members.get(array, (array,)) if key in described]
            if keys:
                self._describe(name, rank, array, keys)
        return _File(name, self.bound.request_of(rank, order))

    def _describe(self, file: str, rank: int, array: str, keys: list[str]) -> None:
        last = self.bound.request_of(rank, [array]).last()
        assert last is not None
        shape, tiles_of_all = last
        by_key: dict[str, list[_core.Tile]] = {key: [] for key in keys}
        for key, tile in tiles_of_all:
            by_key[key].append(tile)
        for key, own in by_key.items():
            # Flattened blocks that share an uncut block are cut at different places of it.
            overlapping = bool(self.bound.specs[key].flat)
            stored = tiles.StoredArray(file, array, shape, tuple(own))
            self.builder.add(key, self.dtypes[key], self.job.source.shape(key), stored, overlapping=overlapping)

    def write_tiles(self, folder: Path, layout: LayoutLike | None) -> None:
        """Write tiles.json, if anything was told to it."""
        if len(self.builder):
            mapping = None if layout is None else as_layout(layout).to_mapping()
            options = self.job.options
            tiles.write(
                folder / tiles.TILES_FILE, self.builder.build(mapping), options.file_mode, durable=options.durable
            )


# -- Checkpoint 2.0


def _to_checkpoint2(
    job: _Job,
    layout: LayoutLike | None,
    iteration: int,
    prefix: str | None,
    *,
    dedup: bool,
    strict_format: bool,
    original_modes: bool,
) -> _Written:
    checkpoint2.check_prefix(prefix)
    folder_name = checkpoint2.iteration_folder_name(iteration)
    _check_root_free(job, folder_name)
    bound = _bind(job.source, layout)
    cutting = _Cutting(job, bound)
    world = World(tuple(bound.mesh.axes), tuple(bound.ranks))
    records = _records(job, bound, cutting.dtypes)
    joined = {key for join in bound.joins for key in join.keys}
    reasons = {record.key: "it is joined with others into one array" for record in records if record.key in joined}
    for record in records:
        reason = None if record.key in joined else expressible(record, world)
        if reason is not None:
            reasons[record.key] = reason
    warnings = list(bound.warnings)
    if reasons:
        warnings.append(_inexpressible(reasons, strict=strict_format))
    shards = shards_of([record for record in records if record.key not in joined], world)
    shards += _joined_shards(job, bound)
    plan = assign(shards, world, dedup=dedup)
    files = [cutting.file(file.name(prefix), file.rank, file.keys, described=reasons) for file in plan.files]
    options = job.options
    created = not job.target.exists()
    job.target.mkdir(mode=options.folder_mode, parents=True, exist_ok=True)
    staging = job.target / ".staging"
    try:
        with published_folder(
            job.target / folder_name, staging, replace=job.overwrite, durable=options.durable, mode=options.folder_mode
        ) as folder:
            n_bytes = _write_files(job, folder, files)
            described = [record for record in records if record.key not in reasons]
            metadata_path = folder / checkpoint2.METADATA_FILE
            write_metadata(
                metadata_path, described, world, plan, prefix=prefix, mode=options.file_mode, durable=options.durable
            )
            common = (job.source.common or CommonInfo()).to_json()
            write_file_atomically(folder / checkpoint2.COMMON_FILE, common, options.file_mode, durable=options.durable)
            cutting.write_tiles(folder, layout)
            if original_modes:
                _set_original_modes(folder)
        with contextlib.suppress(OSError):
            staging.rmdir()
        warnings += _move_tracker(job.target, iteration, options)
        if original_modes:
            job.target.chmod(0o750)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.rmdir()
        if created:
            with contextlib.suppress(OSError):
                job.target.rmdir()
        raise
    return _Written(job.target / folder_name, len(files), n_bytes, reasons, warnings)


def _records(job: _Job, bound: BoundLayout, dtype_of: Mapping[str, str]) -> list[TensorRecord]:
    records = []
    optimizer = set(job.source.keys("optimizer"))
    for key in job.keys:
        spec = bound.specs[key]
        records.append(
            TensorRecord(
                key=key,
                dtype=dtype_of[key],
                shape=spec.shape,
                part="optimizer" if key in optimizer else "model",
                cut=spec.cut,
                uneven=spec.uneven,
                sizes=spec.sizes,
                blocks=spec.blocks,
                flat=spec.flat,
                stored=spec.stored,
                place=spec.place,
            )
        )
    return records


def _joined_shards(job: _Job, bound: BoundLayout) -> list[Shard]:
    """The distinct parts of joined arrays, and who holds each: found by what they consist of."""
    optimizer = set(job.source.keys("optimizer"))
    keys = set(job.keys)
    holders: dict[tuple[str, int, tuple[object, ...]], list[int]] = {}
    for rank in sorted(bound.ranks) if bound.joins else ():
        names = set(bound.local_names(rank, job.keys))
        for join in bound.joins:
            if join.name in names and keys.issuperset(join.keys):
                last = bound.request_of(rank, [join.name]).last()
                assert last is not None
                (n_elements,), parts = last
                holders.setdefault((join.name, n_elements, tuple(parts)), []).append(rank)
    members = {join.name: join.keys for join in bound.joins}
    shards, numbers = [], dict.fromkeys(members, 0)
    for (name, n_elements, _), ranks in holders.items():
        part: Literal["model", "optimizer"] = "optimizer" if members[name][0] in optimizer else "model"
        shards.append(Shard(name, part, numbers[name], tuple(ranks), n_elements * 8))
        numbers[name] += 1
    return shards


def _inexpressible(reasons: Mapping[str, str], *, strict: bool) -> str:
    """The one warning of a conversion for tensors that the original will not see, or the error."""
    key, reason = next(iter(reasons.items()))
    some = ", ".join(show(key) for key in list(reasons)[:5]) + (", ..." if len(reasons) > 5 else "")
    text = (
        f"metadata.json cannot express the layout of {len(reasons)} tensors ({some}): {show(key)}: {reason}. "
        "They are described in tiles.json, which MindSpore Transformers ignores: there they keep their initial values"
    )
    if strict:
        raise UnsupportedError(text, key=key, hint="choose another layout for them, or leave out `strict_format`")
    _log.warning("%s", text)
    return text


def _set_original_modes(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.chmod(0o400 if entry.suffix == ".safetensors" else 0o640)
    folder.chmod(0o750)


def _move_tracker(root: Path, iteration: int, options: _Options) -> list[str]:
    current, _ = checkpoint2.read_tracker(root)
    if current is not None and current > iteration and (root / checkpoint2.iteration_folder_name(current)).is_dir():
        return [f"the tracker still names iteration {current}, which is newer than {iteration}"]
    checkpoint2.write_tracker(root, iteration, options.file_mode, durable=options.durable)
    return []


def _check_root_free(job: _Job, folder_name: str) -> None:
    target = job.target
    if not target.exists():
        return
    if not target.is_dir():
        raise DestinationExistsError(f"{target} is a file; a checkpoint root is a folder", path=str(target))
    entries = [entry.name for entry in target.iterdir() if entry.name != ".staging"]
    if entries and not job.overwrite:
        raise DestinationExistsError(
            f"{target} holds {len(entries)} entries, such as {entries[0]}",
            path=str(target),
            hint=f"choose another root, or give `overwrite` to replace {folder_name} in this one and nothing else",
        )


# -- the destination


def _folder(job: _Job) -> Any:
    return published_folder(
        job.target,
        job.target.parent,
        replace=job.overwrite,
        durable=job.options.durable,
        mode=job.options.folder_mode,
        keep=lambda entry: not _is_ours(entry),
    )


def _is_ours(entry: Path) -> bool:
    """Whether a file was written by an earlier conversion: it names its writer."""
    if entry.is_symlink() or not entry.is_file():
        return False
    if entry.name == tiles.TILES_FILE:
        return True
    if entry.name == huggingface.INDEX_FILE:
        return huggingface.index_writer(entry) is not None
    if entry.suffix != ".safetensors":
        return False
    try:
        index = _core.Index()
        return WRITER_KEY in (index.file_metadata(index.add_file(str(entry), follow_links=False)) or {})
    except ReshardError:
        return False


def _check_folder_free(job: _Job) -> None:
    target = job.target
    if not target.exists():
        return
    if not target.is_dir():
        raise DestinationExistsError(f"{target} is a file; the destination is to be a folder", path=str(target))
    entries = list(target.iterdir())
    if not entries:
        return
    if not job.overwrite:
        raise DestinationExistsError(
            f"{target} holds {len(entries)} entries, such as {entries[0].name}",
            path=str(target),
            hint="choose another destination, or give `overwrite` to replace the files of an earlier conversion",
        )
    foreign = [
        e for e in entries if not _is_ours(e) and (e.suffix == ".safetensors" or e.name == huggingface.INDEX_FILE)
    ]
    if foreign:
        raise DestinationExistsError(
            f"{foreign[0]} was not written by an earlier conversion and would be mixed up with what is written now",
            path=str(foreign[0]),
            hint="move it away, or choose another destination",
        )


def _check_file_free(job: _Job) -> None:
    target = job.target
    if not (target.exists() or target.is_symlink()):
        return
    if not job.overwrite:
        raise DestinationExistsError(f"{target} exists", path=str(target), hint="give `overwrite` to replace it")
    if not _is_ours(target):
        raise DestinationExistsError(
            f"{target} was not written by an earlier conversion", path=str(target), hint="choose another destination"
        )
