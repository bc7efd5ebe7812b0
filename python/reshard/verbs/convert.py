"""Any format and layout to any other: merge, split, reshard, change the file size, cast.

The destination is planned first: which file holds which arrays. Then each file is streamed by the core, source to
destination, within the memory budget, into a staging folder that is published as a whole. Nothing here copies bytes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from reshard import _core, dtypes, opening
from reshard.checkpoint import Checkpoint
from reshard.commit import writer_mark
from reshard.commit.filling import staging_name
from reshard.commit.publication import SHARED_PREFIX
from reshard.commit.trash import STAGING_FOLDER
from reshard.conversion.buckets import home_of
from reshard.conversion.destinations import Job, Options
from reshard.conversion.kept_dtypes import kept_by_cast
from reshard.conversion.library_model import fp8_weights, model_of, not_saved, published_shapes
from reshard.conversion.shares import Begun, SentPart, Share, Shared, digest_of, remove_published, start_beside
from reshard.conversion.writer import Settings
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    MismatchError,
    NamesError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats.base import OpenOptions
from reshard.formats.left_out import LeftOut
from reshard.formats.rank_file import is_of_one_rank
from reshard.formats.registry import check_destination, known_files, rank_root, writer_for, writers
from reshard.formats.weight_sets import alike, model_start
from reshard.layout import ModelLayout, as_layout
from reshard.layout.patterns import Matcher
from reshard.names import as_names, config_beside
from reshard.names.file import NameRule
from reshard.opening.several import common_folder, files_of
from reshard.options import MAY_DIFFER, Commit, Select, Target, agreed, explains_moved, files_with_size
from reshard.quantised.config import said
from reshard.quantised.kinds import FLOATING, KINDS
from reshard.quantised.nvfp4 import FORMS as NVFP4_FORMS
from reshard.quantised.nvfp4 import entry as nvfp4_entry
from reshard.quantised.quantise import BLOCK, FP8, fits, scale_name
from reshard.quantised.quantise import entry as quantisation_entry
from reshard.quantised.stored import described
from reshard.quantised.together import check_together
from reshard.ranks.collective import Collective
from reshard.ranks.group import SingleProcess, resolve, session
from reshard.ranks.led import LedRanks
from reshard.ranks.places import ShareRun, Work, do_shares  # reports are decoded by their type hints
from reshard.ranks.said_once import held_back, release
from reshard.storage.location import Location, locate, locate_destination
from reshard.values.argument_types import AnyText, GroupLike, Part, PlaceLike, Progress, Seconds, Size
from reshard.values.arguments import checked, parse_size, plain_integer
from reshard.values.words import hub_hint, listed, show
from reshard.values.wrappers import WRAPPERS
from reshard.verbs.selection import NewSizes, of_prefixes
from reshard.verbs.selection import select as selected

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from reshard.checkpoint import LayoutLike
    from reshard.conversion.writer import Writer
    from reshard.layout import BoundLayout
    from reshard.names import ConfigLike, NameMap, NamesLike
    from reshard.options import CommitLike, Files, FilesLike
    from reshard.quantised.kinds import Quantised
    from reshard.ranks.group import Group
    from reshard.ranks.places import Place

# Ranks of a destination. Planning takes up to 30 microseconds and 4 KiB for each: 4 s and half a GiB without progress.
_MAX_RANKS = 1 << 17


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
        pending: shares that other processes must still write before the files are published.
        shares: with `on`, where each share was written.
        not_expressible: keys whose layout metadata.json cannot express, with the reason; MindSpore Transformers does
            not see them.
        warnings: problems that did not stop the conversion.
    """

    path: str
    to: str
    n_tensors: int
    n_files: int
    n_bytes: int
    seconds: float
    pending: tuple[int, ...] = ()
    not_expressible: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    shares: tuple[ShareRun, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What `convert` is asked for, parsed as far as nothing is opened for it. All shares of a conversion agree on it.

    Attributes:
        to, part, layout, strategy, format, select, names, config, iteration, dtype, dtype_all, files, commit,
            overwrite, memory, threads, progress: the arguments of `convert`, with `max_shard_size` in `files`.
    """

    to: str | None
    part: Part | None
    layout: ModelLayout | None
    strategy: str | os.PathLike[str] | None
    format: str | None
    select: Select
    names: NamesLike | None
    config: ConfigLike | None = field(metadata=MAY_DIFFER)  # what it changes is in names and shapes
    iteration: int | None
    dtype: str | None
    dtype_all: bool
    files: Files
    commit: Commit
    overwrite: bool
    memory: int = field(metadata=MAY_DIFFER)
    threads: int | None = field(metadata=MAY_DIFFER)
    progress: Progress | None = field(metadata=MAY_DIFFER)


@explains_moved
@checked
def convert(
    src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    to: Annotated[Target, AnyText] | None = None,
    part: Part | None = None,
    layout: LayoutLike | None = None,
    strategy: str | os.PathLike[str] | None = None,
    format: str | None = None,  # noqa: A002  as in `reshard.open`
    select: Select | Mapping[str, object] | None = None,
    names: NamesLike | None = None,
    config: ConfigLike | None = None,
    iteration: int | None = None,
    dtype: object = None,
    dtype_all: bool = False,
    max_shard_size: Size | None = None,
    files: FilesLike | None = None,
    commit: CommitLike | None = None,
    overwrite: bool = False,
    memory: Size = "256MiB",
    threads: int | None = None,
    share: tuple[int, int] | None = None,
    group: GroupLike = None,
    on: PlaceLike = None,
    timeout: Seconds = 3600.0,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, layout, file size or dtype.

    Tied tensors, which `reshard.torch.save_file` stores once, are written in full under each of their names: no other
    format can express them, and every reader finds all names.

    Args:
        src: a checkpoint, a list of weight files or a pattern of their names, as in `reshard.open`.
        dst: the destination: a Hugging Face folder, a Checkpoint 2.0 root, a folder for one file a rank, or a file. An
            existing folder is filled: it keeps its mode, its owner and its other entries. Or the URL of a folder or a
            file in a bucket.
        to: "checkpoint2" (the default with a layout), "safetensors" (the default if `dst` ends with `.safetensors`: one
            file; else one per rank), "huggingface" (the default elsewhere), "mindspore" (full weights in its layout),
            "checkpoint1" (a folder a rank), "torch" (`torch.save`; the default if `dst` ends with `.bin`, `.pt` or
            `.pth`: one file; else `pytorch_model.bin` or several files with an index), "dcp" (a folder of
            `torch.distributed.checkpoint`), "megatron" (a root of Megatron-Core with weights in `torch_dist`) or
            "deepspeed-universal" (a root of DeepSpeed with a universal folder, for any ZeRO stage).
        part: "model", "optimizer" or "all"; default "model" for Hugging Face, torch and Megatron, else "all", which is
            also the default with `Select(only=...)`.
        layout: how the destination is sharded, also a strategy file; None: whole tensors. It uses the new names.
        strategy: of rank folders, how they are sharded: a strategy file, or a folder with those of all stages.
        format: of a folder `src` that holds checkpoints of several formats, which one is read, such as "huggingface" or
            "deepspeed", as `format` of `reshard.open`.
        select: which tensors are selected, and under which names: a `Select` or a mapping of its fields.
        names: a name map, applied after `select`: tensors are renamed, fused, split, stacked, transposed. A `NameMap`,
            its file or mapping, or a preset such as "qwen3-mindspore"; text that ends in ":reverse" applies the
            inverse.
        config: the model's `config.json`, for the sizes that the name map and `Select` take from it; default: the one
            in `src`, else the one in `Files.model_files`.
        iteration: number of the Checkpoint 2.0 iteration; default: the source's, else its step, else 0. Of rank folders
            the step in the names of the files. For Megatron the default is the source's, or `release`; for DeepSpeed it
            is also the step of the optimizer, where the source has none.
        dtype: cast the floating-point tensors to it; others stay. Quantised weights become ordinary tensors with the
            values of the library that owns their kind. "float8_e4m3fn" makes block-scaled FP8 of the weights that
            transformers holds so, which needs a config.json of one of its models. "nvfp4" and "nvfp4-modelopt" give the
            parts of NVFP4 weights the names and the scales of compressed-tensors or of modelopt. float32 tensors that
            the library of the model keeps in float32 in a model of that dtype, such as the bias of a router, stay, too:
            transformers is asked, if it is installed and there is a config.json of one of its models, else known names
            stay, with a warning.
        dtype_all: cast these, too.
        max_shard_size: largest file of whole weights, in bytes or as text such as "5GB", as in `save_pretrained`; short
            for `files=Files(max_shard_size=...)`.
        files: which files are written: a `Files` or a mapping of its fields.
        commit: how the destination is published: a `Commit` or a mapping of its fields. `rollback` and `takeover` are
            not for conversions.
        overwrite: replace that iteration, or the files of an earlier conversion, and nothing else. In a bucket these
            are removed before the new ones are written, and so are those of a conversion that was killed.
        memory: budget of the copy, in bytes or as text such as "256MiB"; the memory used beyond it does not depend on
            the size of the model.
        threads: threads of the copy.
        share: `(i, n)`, i from 0: write the i-th of n shares of the bytes, on any machine that can access source and
            destination, and publish if it was the last. A share that was interrupted is written again. For a bucket
            see docs/guides/cluster.md.
        group: a `reshard.ranks.group.Group` or a process group of torch.distributed, all ranks of which call this: each
            writes its share, and all return when it is published.
        on: where the conversion is done, such as a `reshard.ray.Ray`: its processes write the shares, and this one
            publishes. If it fails, nothing is left.
        timeout: seconds that ranks of a group wait for each other.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        What was written; of a share that is not the last, what this share wrote.

    Raises:
        DestinationExistsError: `dst` has entries, and `overwrite` is not given or does not cover them.
        ClaimedError: another process writes into the checkpoint root `dst`.
        ArgumentError: options that contradict each other, or one of `dst` and `src` is inside the other.
        NamesError: the name map does not match the tensors.
        LayoutError, CoverageError, MismatchError, UnsupportedError: the source or the layout does not allow it.
        MismatchError: a source without checksums was changed while it was read; ranks have planned other conversions.
        DamagedFileError, StorageError: reading or writing failed. In every case the destination is unchanged; but a
            folder in a bucket, with `overwrite`, has lost the files of the earlier conversion by then, and shares and
            ranks leave there what they wrote, which opens as no checkpoint.

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
    if sum(one is not None for one in (group, share, on)) > 1:
        raise ArgumentError("`share`, `group` and `on` exclude each other: each says who writes which share")
    if group is not None and is_led(dst, to, has_layout=layout is not None):
        group, on = None, LedRanks(resolve(group), timeout)
    elif isinstance(on, LedRanks) and not is_led(dst, to, has_layout=layout is not None):
        raise ArgumentError("the ranks of a conversion are given as `group`, not as `on`")
    started = time.monotonic()
    place = None if isinstance(on, LedRanks) and on.group.world_size == 1 else on

    def asked() -> ConvertOptions:
        return ConvertOptions(
            to=to,
            part=part,
            layout=None if layout is None else as_layout(layout),
            strategy=strategy,
            format=format,
            select=Select.of(select),
            names=names,
            config=config,
            iteration=plain_integer(iteration),
            dtype=dtype
            if dtype is None or (isinstance(dtype, str) and dtype in NVFP4_FORMS)
            else dtypes.parse_dtype(dtype),
            dtype_all=dtype_all,
            files=files_with_size(max_shard_size, files),
            commit=Commit.of(commit),
            overwrite=overwrite,
            memory=parse_size(memory),
            threads=threads,
            progress=progress,
        )

    def lead(share: tuple[int, int] | None = share) -> ConvertReport:
        return _convert(src, dst, asked(), share, on=place)[0]

    def of_rank(sent: _Sent) -> Work[_Sent]:
        return _work(src, dst, replace(asked(), progress=None), sent)

    # Options are parsed where an error of one rank, such as of a file that its host lacks, is told to all.
    members = SingleProcess() if group is None else resolve(group)
    if members.world_size > 1:
        report = _by_ranks(members, timeout, lead)
    else:
        report = place.led(lead, of_rank, _Sent, ConvertReport) if isinstance(place, LedRanks) else lead()
    return replace(report, seconds=time.monotonic() - started)


def _convert(
    src: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    asked: ConvertOptions,
    share: tuple[int, int] | None,
    *,
    on: Place | None = None,
    sent: _Sent | None = None,
) -> tuple[ConvertReport, dict[str, SentPart]]:
    """Convert, or write a share: the report, and what a share has written of an iteration in a bucket."""
    chosen, files, commit = asked.select, asked.files, asked.commit
    if commit.rollback or commit.takeover:
        raise ArgumentError("`rollback` and `takeover` of `Commit` are options of a save, and this is a conversion")
    several, target = files_of(src), locate_destination(dst)
    source = locate(src) if several is None else common_folder(several)  # type: ignore[arg-type]
    writer = writer_for(asked.to, target, has_layout=asked.layout is not None)
    of_format = {"iteration": asked.iteration} | {
        name: getattr(files, name) for name in ("prefix", "modes", "model_files")
    }
    _check_options(writer, target, asked.layout, of_format, is_private=commit.private)
    if not target.is_local:
        _check_bucket(writer, target, asked, is_shared=share is not None and (sent is None or sent.begun is None))
    for one in several or [source]:
        _check_apart(one, target)
    is_one_file = writer.is_one_file(target)
    if target.name in ("", "..") or (target.kind() == "link" and not is_one_file):
        # A rename needs a unique source name on the file system of the destination.
        target = target.resolved()
    model_folder = None if files.model_files is None else locate(files.model_files)
    options = Options(
        metadata={**writer.metadata, **writer_mark.MARK},
        dtype=asked.dtype,
        buffers=_core.Buffers(asked.memory),
        threads=asked.threads,
        durable=commit.durable,
        file_mode=0o600 if commit.private else 0o666,
        folder_mode=0o700 if commit.private else 0o777,
        keep_modes=not commit.private and files.modes is None,
        progress=asked.progress,
    )
    max_bytes = None if files.max_shard_size is None else parse_size(files.max_shard_size)
    with (
        open_source(several or source, strategy=asked.strategy, suffix=chosen.suffix, of_format=asked.format) as whole,
        contextlib.ExitStack() as views,
    ):
        if several is None:
            _check_whole(source)
        if model_folder is None and "model_files" in writer.options:
            model_folder = whole.data.model_files
        part_written = asked.part or ("all" if chosen.only else writer.default_part)
        _check_complete(whole, part_written, chosen)
        if chosen.entry is not None:
            if asked.part not in (None, "model"):
                raise ArgumentError(f"`entry` of `Select` takes weights alone, and `part` is {asked.part!r}")
            part_written = "model"
            whole = views.enter_context(of_prefixes(whole, chosen.entry))  # noqa: PLW2901  the one that is converted
        elif asked.part != "all" and asked.names is None and not (chosen.rename or chosen.only):
            _check_one_set(whole, (chosen.drop,) if isinstance(chosen.drop, str) else tuple(chosen.drop))
        known = None
        beside = asked.config
        if beside is None:
            beside = config_beside(source)
        if beside is None and model_folder is not None:
            beside = config_beside(model_folder)
        if beside is None and whole.data.config:
            beside = whole.data.config
        sizes = NewSizes(chosen.pad or {}, chosen.trim or {}, beside)
        if asked.names is not None:
            known = as_names(asked.names, beside)
            known = known if asked.layout is None else _padded_for(known, asked.layout)
        elif asked.config is not None and not (sizes.pad or sizes.trim):
            raise ArgumentError("`config` has a meaning only with `names`, or with `pad` or `trim` of `Select`")
        apart = writer.apart(whole)
        if apart and part_written == "all" and whole.common is None:
            whole.common = whole.data.read_common()
        rename, of_entry = chosen.rename, list[str]()
        is_checked = files.check_names and "model_files" in writer.options and part_written == "model"
        if is_checked and whole.data.naming is not None and not (rename or known):
            known, of_entry = _from_naming(whole)
        if is_checked and model_folder is not None and not (rename or known or chosen.only or chosen.entry):
            rename, of_entry = _without_entry(whole, model_folder)
            if rename is None:
                known, of_entry = _under_published_names(whole, model_folder)
        drop = (chosen.drop,) if isinstance(chosen.drop, str) else tuple(chosen.drop)
        if known is not None:
            drop += whole.data.derived
        if is_checked and model_folder is not None:
            drop += tuple(key for key in not_saved(model_of(str(model_folder))) if key in whole)
        weights = whole.quantised() if part_written != "optimizer" else {}
        if options.dtype in NVFP4_FORMS:
            said_of_source = _nvfp4_entry(options.dtype, weights, model_folder or source)
            whole = views.enter_context(whole.in_nvfp4(options.dtype))  # type: ignore[arg-type]  # noqa: PLW2901
            weights = whole.quantised()
            options = replace(options, dtype=None, quantised_as=said_of_source)
        if weights and options.dtype in FLOATING:
            whole = views.enter_context(whole.dequantised())  # noqa: PLW2901  the one that is converted
            options, weights = replace(options, is_dequantised=True), {}
        selection = selected(
            whole,
            part_written,
            only=chosen.only,
            drop=drop,
            rename=rename,
            sizes=sizes,
            names=known,
            apart=apart,
            dtype=options.dtype,
        )
        opened, keys = views.enter_context(selection.source), selection.keys
        of_fp8: list[str] = []
        if options.dtype == FP8 and part_written != "optimizer":
            entry, chosen_keys, of_fp8 = _fp8_weights(opened, keys, model_folder or source, weights)
            opened = views.enter_context(opened.in_fp8(chosen_keys))
            keys = [name for key in keys for name in ((key, scale_name(key)) if key in chosen_keys else (key,))]
            options = replace(options, dtype=None, quantised_as=entry)
        elif weights:
            _check_quantised(weights, whole, opened, selection.keys, writer)
            options = replace(options, metadata=options.metadata | described(weights, whole.data.index))
        for copies, is_state in ((selection.copies, False), (selection.joined, True)):
            _check_copies(whole, copies, asked.memory, asked.threads, is_state=is_state)
        job = Job(
            opened,
            keys,
            target,
            options,
            asked.overwrite,
            known_files(),
            selection.counters,
            left_out=selection.left_out,
            is_renamed=selection.is_renamed,
            names=selection.names,
        )
        of_cast = _keep_dtypes(job, model_folder or source, all_tensors=asked.dtype_all)
        runs: list[ShareRun] = []
        spread = None
        if on is not None:
            share = 0, on.n_shares(sum(file.n_bytes for file in whole.files()))
            to_send = replace(asked, progress=None, threads=asked.threads or on.cpus)

            def spread(n_bytes: int, begun: Begun | None) -> list[dict[str, SentPart]]:
                work = _work(src, dst, to_send, _Sent(share[1], begun))
                results, done = do_shares(on, work, share[1], n_bytes, asked.progress)
                runs.extend(done)
                return results

        if share is not None:
            resolved = replace(
                asked,
                to=writer.name,
                strategy=None if asked.strategy is None else locate(asked.strategy).resolved(),
                select=replace(chosen, rename=rename),
                names=known,
                dtype=options.dtype,
                files=replace(
                    files,
                    max_shard_size=max_bytes,
                    model_files=None if model_folder is None else model_folder.resolved(),
                ),
            )
            shared = _shared(job, Share(*share), resolved, writer)
            begun = None if sent is None else sent.begun
            job = replace(job, shared=replace(shared, spread=spread, is_sent=sent is not None, begun=begun))
        remove_published(target, None if job.shared is None or not asked.overwrite else job.shared.folder)
        is_all = part_written == "all"
        with_extra = is_all and writer.writes_extra(job)
        settings = Settings(
            layout=_bound(job, None if writer.is_whole else asked.layout),
            iteration=asked.iteration,
            prefix=files.prefix,
            max_bytes=max_bytes,
            dedup=files.dedup,
            strict_format=files.strict_format,
            original_modes=files.modes is not None,
            model_files=model_folder,
            check_names=is_checked,
            source=source,
            with_state=is_all,
            with_extra=with_extra,
        )
        if asked.overwrite:  # else it has to be empty
            check_destination(target, writer.name, keeps_others=writer.keeps_others)
        written = writer.write(job, settings)
        loses_extra = is_all and not with_extra
        warnings = [
            *written.warnings,
            *of_entry,
            *of_cast,
            *of_fp8,
            *selection.resized,
            *(_extra_left_out(whole) if loses_extra else []),
        ]
        if part_written == "model" and not selection.is_renamed:
            warnings += _with_entries(whole, job.keys)
    report = ConvertReport(
        path=str(written.path),
        to=writer.name,
        n_tensors=len(job.keys) + (len(job.counters) if writer.counts_counters else 0),
        n_files=written.n_files,
        n_bytes=written.n_bytes,
        seconds=0.0,
        pending=tuple(written.pending),
        not_expressible=written.not_expressible,
        warnings=tuple(warnings),
        shares=tuple(runs),
    )
    return report, written.sent


@dataclass(frozen=True)
class _Sent:
    """What another process says of a conversion that it has begun."""

    n_shares: int
    begun: Begun | None


_Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


def _work(src: _Source, dst: str | os.PathLike[str], asked: ConvertOptions, sent: _Sent) -> Work[_Sent]:
    return Work(functools.partial(_sent_share, src, dst, asked), sent, dict[str, SentPart])


def _sent_share(
    src: _Source, dst: str | os.PathLike[str], asked: ConvertOptions, sent: _Sent, index: int
) -> tuple[int, dict[str, SentPart]]:
    """Write a share of a conversion that another process has begun."""
    report, of_files = _convert(src, dst, asked, (index, sent.n_shares), sent=sent)
    return report.n_bytes, of_files


def is_led(dst: str | os.PathLike[str], to: str | None, *, has_layout: bool) -> bool:
    """Whether one of several ranks has to lead a conversion, as nothing in the destination lets them meet.

    Args:
        dst: the destination.
        to: its format, as of `convert`.
        has_layout: whether a layout is given.

    Raises:
        ArgumentError, UnsupportedError: the destination or the format does not exist.

    Example:
        >>> is_led("s3://bucket/run", "checkpoint2", has_layout=False), is_led("run", "checkpoint2", has_layout=False)
        (True, False)
    """
    target = locate_destination(dst)
    return not target.is_local and writer_for(to, target, has_layout=has_layout).in_root


def _bound(job: Job, layout: ModelLayout | None) -> BoundLayout:
    """How the tensors of the source lie in the destination; without a layout whole on one rank, which is not recorded.

    Raises:
        LayoutError: the layout does not match the tensors, or one of its rules matches no tensor.
        UnsupportedError: it has too many ranks.
    """
    if layout is None:
        return replace(job.source.bind(ModelLayout.replicated()), to_mapping=lambda: None)
    if (n_ranks := math.prod(layout.mesh.values())) > _MAX_RANKS:
        raise UnsupportedError(
            f"the layout has {n_ranks} ranks, each with its own file or folder; a conversion writes for at most "
            f"{_MAX_RANKS}",
            hint="check the sizes in `mesh` of the layout, or the devices in the strategy. Nothing was written",
        )
    bound = job.source.bind(layout)
    bound.refuse_unused(job.left_out)
    return bound


def _padded_for(names: NameMap, layout: ModelLayout) -> NameMap:
    """The map with the number of parts of a dim that it pads to a multiple, as `tensor_model_parallel_size`.

    The layout is one of rules: the map decides which tensors there are.
    """
    matcher = Matcher([rule.match for rule in layout.rules])
    n_parts = 0
    for rule in names.rules:
        if not isinstance(rule, NameRule) or rule.pad_side != "to" or rule.to_multiple is None or rule.trim is None:
            continue
        found = matcher.find(rule.whole.format(dict.fromkeys(rule.whole.variables, 0)))
        if found is None:
            continue
        partition = layout.rules[found[0]].partition
        if any(dim == rule.trim for dim, _ in partition.sizes):
            return names  # the layout says how long the parts are
        axes = partition.cut[rule.trim] if rule.trim < len(partition.cut) else ()
        n_parts = math.lcm(n_parts or 1, math.prod(layout.mesh[axis] for axis in axes))
    return names.with_config({"tensor_model_parallel_size": n_parts}) if n_parts else names


def _keep_dtypes(job: Job, folder: Location, *, all_tensors: bool) -> list[str]:
    """Let a cast leave the tensors that stay float32; returns warnings. Refuses to cast a part of quantised weights."""
    dtype, index = job.options.dtype, job.source.data.index
    if dtype is None:
        return []
    is_dequantised = job.options.is_dequantised
    of_model = set(job.source.keys("model"))
    tensors = {key: index.info(key) for key in job.keys if key in of_model}
    has_config = folder.is_folder() and not all_tensors
    kept, warnings = kept_by_cast(tensors, dtype, folder if has_config else None, is_dequantised=is_dequantised)
    if all_tensors:
        return []
    index.keep_dtypes(kept)
    return warnings


def _fp8_weights(
    source: Checkpoint, keys: Sequence[str], folder: Location, weights: Mapping[str, Quantised]
) -> tuple[dict[str, Any], set[str], list[str]]:
    """The weights that are written in block-scaled FP8.

    Returns:
        `quantization_config`; the weights; and warnings.

    Raises:
        UnsupportedError: the library of the model does not say which weights these are, or they are quantised already.
    """
    if weights:
        name = next(iter(weights))
        raise UnsupportedError(
            f"{show(name)} is quantised already ({KINDS[weights[name].kind].title})",
            key=name,
            hint='convert with `dtype="bfloat16"` first',
        )
    named, skipped = fp8_weights(folder, keys)
    found = {key for key in keys if key in named and fits(source.shape(key))}
    if not found:
        raise UnsupportedError(
            f"transformers holds no tensor of {show(str(source.path))} in FP8 with blocks of {BLOCK[0]} x {BLOCK[1]}",
            path=str(source.path),
        )
    others = sorted(named.difference(found))
    warnings = []
    if others:
        warnings = [f"{listed(map(show, others), 3)} have no complete blocks of {BLOCK[0]} x {BLOCK[1]}: not quantised"]
    return quantisation_entry({*skipped, *(key.removesuffix(".weight") for key in others)}), found, warnings


def _nvfp4_entry(form: str, weights: Mapping[str, Quantised], folder: Location) -> dict[str, Any]:
    """`quantization_config` of a model whose NVFP4 weights are written in one form.

    Raises:
        UnsupportedError: no weight is NVFP4, or the form does not have all that config.json says.
    """
    if not any(one.kind in NVFP4_FORMS for one in weights.values()):
        raise UnsupportedError(
            f"{show(str(folder))} has no weights in NVFP4, which {show(form)} gives the names of another form",
            path=str(folder),
            hint="`reshard inspect` shows how its weights are quantised",
        )
    has_input = all("input_scale" in one.parts or "input_global_scale" in one.parts for one in weights.values())
    return nvfp4_entry(said(folder if folder.is_folder() else None), form, has_input=has_input)


def _check_quantised(
    weights: Mapping[str, Quantised], source: Checkpoint, written: Checkpoint, keys: Sequence[str], writer: Writer
) -> None:
    """Refuse to separate the parts of quantised weights, and to lose the header of a file that describes them."""
    only_here = next((one for one in weights.values() if KINDS[one.kind].only_here and one.packed in keys), None)
    if only_here is not None:
        raise UnsupportedError(
            f"{show(only_here.name)} is stored as {KINDS[only_here.kind].title}, which no format that is written holds",
            key=only_here.name,
            hint='`dtype="bfloat16"` makes ordinary tensors of all such weights; so do "float16" and "float32"',
        )
    check_together(weights, written.quantised, source.data.index, written.data.index, keys)
    named = next((one for one in weights.values() if KINDS[one.kind].named and one.packed in keys), None)
    if named is not None and not writer.has_headers:
        raise UnsupportedError(
            f"{show(named.name)} ({KINDS[named.kind].title}) is described in the header of its file, and files of "
            f'`to="{writer.name}"` have none',
            key=named.name,
            hint='`to="huggingface"` keeps it; `dtype="bfloat16"` makes an ordinary tensor of it',
        )


def _check_whole(source: Location) -> None:
    """Refuse the file of one rank: what it holds is a part of the state."""
    if is_of_one_rank(source.name):
        raise UnsupportedError(
            f"{show(str(source))} is the file of one rank of several, and no whole checkpoint",
            path=str(source),
            hint=f"convert its folder {show(str(source.parent))} with the files of all ranks",
        )


def _check_complete(source: Checkpoint, part: Part, select: Select) -> None:
    """Refuse a checkpoint that leaves out tensors that are selected, or of which this is not known."""
    try:
        left_out = None if part == "optimizer" else LeftOut.of_checkpoint(source)
    except ReshardError as error:
        if select.only:
            return
        raise type(error)(
            f"{error.message}: so it is not known whether the save leaves out tensors",
            path=error.path,
            hint="`select=Select(only=...)` converts the tensors that it names, as far as they are there",
        ) from error
    if left_out is None:
        return
    only, drop = ((one,) if isinstance(one, str) else tuple(one) for one in (select.only, select.drop))
    needed = {
        key: one
        for key, one in left_out.tensors.items()
        if (not only or key.startswith(only)) and not (drop and key.startswith(drop))
    }
    if needed:
        raise replace(left_out, tensors=needed).refusal(str(source.path), "a conversion")


def _check_one_set(source: Checkpoint, drop: tuple[str, ...]) -> None:
    """Refuse a file with several sets of weights of one model: one of them is the model."""
    try:
        values = source.data.run_values()
    except ReshardError:  # of a value that is not converted
        return
    if values is None:
        return
    kept = (key for key in source.keys("model") if not drop or not key.startswith(drop))
    entries = alike({key: source.shape(key) for key in kept}, values.paths)
    if entries:
        raise MismatchError(
            f"{show(str(source.path))} holds several sets of weights: {listed(map(show, entries))}",
            path=str(source.path),
            hint=f"`select=Select(entry={entries[0]!r})` takes the first one; `part='all'` takes all",
        )


def _extra_left_out(source: Checkpoint) -> list[str]:
    """The warning that the state of the run beside the tensors is not written, if the source has one."""
    try:
        names = sorted(map(str, source.extra()))
    except ReshardError as error:
        return [f"the state of the run beside the tensors is not written: {error.message}"]
    if not names:
        return []
    what = f"the state of the run beside the tensors is not written: {listed(names)}"
    return [f"{what}. A strict resume from it is refused; resume from the source, with any layout, to keep it"]


def _without_entry(source: Checkpoint, folder: Location) -> tuple[dict[str, str] | None, list[str]]:
    """The change that removes an entry or wrapper before all names, if the model of config.json has them without it.

    Returns:
        As `Select.rename`, or None; and a warning.
    """
    starts = _starts(source, source.keys("model"))
    model = model_of(str(folder)) if len(set(starts.values())) == 1 and all(starts.values()) else None
    expected = None if model is None else published_shapes(model)
    if expected is None:
        return None, []
    start = next(iter(starts.values()))
    is_as_stored = starts.keys() <= expected.keys()
    if is_as_stored or not {key.removeprefix(start) for key in starts} <= expected.keys():
        return None, []
    return {start: ""}, [f"names begin with `{start}`, which is removed: the model of config.json has them without it"]


def _from_naming(source: Checkpoint) -> tuple[NameMap | None, list[str]]:
    """The map from the naming that the source records to Hugging Face names, and warnings; None: it is not known."""
    data = source.data
    if not data.config:
        what = f"the names are those of {data.naming}: the architecture of the model has no preset"
        return None, [f"{what}; `names=` takes a name map"]
    derived = (
        f", and {listed(map(show, data.derived))} follow from config.json and are left out" if data.derived else ""
    )
    names = as_names(f"{data.naming}:reverse", data.config)
    what = f"names of {data.naming} ({data.config['model_type']}) are changed to those of Hugging Face{derived}"
    return names, [f"{what}; `files=Files(check_names=False)` keeps them"]


def _under_published_names(source: Checkpoint, folder: Location) -> tuple[NameMap | None, list[str]]:
    """The map from the names of the live model of config.json to those that its library publishes.

    Returns:
        The map, and a warning; None if the tensors have published names already, or the library is not known.
    """
    model = model_of(str(folder))
    published = None if model is None else published_shapes(model)
    if published is None:
        return None, []
    keys, live = set(source.keys("model")), model.state_dict().keys()
    if not keys & (live - published.keys()) or keys & (published.keys() - live):
        return None, []
    from reshard.conversion.library_names import published_names  # noqa: PLC0415  imports torch

    names = published_names(model)
    if names is None:
        return None, []
    what = f"names of {type(model).__name__} are changed to those that its library publishes"
    return names.reversed(), [f"{what}; `files=Files(check_names=False)` keeps them"]


def _starts(source: Checkpoint, keys: Sequence[str]) -> dict[str, str]:
    """What stands before the name of each tensor in a file of a run of torch; empty for other sources."""
    try:
        values = source.data.run_values()
    except ReshardError:  # of a value that is not converted
        return {}
    if values is None:
        return {}
    return {key: model_start(key, values.path(key) if key in values.paths else (key,)) for key in keys}


def _with_entries(source: Checkpoint, keys: Sequence[str]) -> list[str]:
    """Warnings about names of weights that begin with an entry of a run or a wrapper, and tensors outside of it."""
    start_of = _starts(source, keys)
    counts = Counter(start for start in start_of.values() if start)
    if not counts:
        return []
    start = counts.most_common(1)[0][0]
    is_wrapper = WRAPPERS.issuperset(start[:-1].split("."))
    what = "which a wrapper adds" if is_wrapper else "the entry of the file that holds the model"
    removes = f"`--rename {start}=` or `Select(rename={{'{start}': ''}})` removes it"
    warnings = [f"names begin with `{start}`, {what}: {removes}"]
    others = [show(key) for key in keys if start_of[key] != start]
    if others:
        removes = "`--drop` or `Select(drop=...)` leaves them out"
        warnings.append(f"tensors outside of `{start[:-1]}` are written, too: {listed(others, 3)}. {removes}")
    return warnings


def _check_copies(
    source: Checkpoint, copies: Mapping[str, str], max_bytes: int, threads: int | None, *, is_state: bool
) -> None:
    """Refuse a name map that leaves out a tensor as the copy of another one with other values.

    Args:
        source: the source.
        copies: the key that each must be equal to.
        max_bytes: of the buffers.
        threads: of the reads.
        is_state: whether they are numbers of an optimizer, for parameters that the map fuses.
    """
    if not copies:
        return
    from reshard.verbs.diff import diff_opened  # noqa: PLC0415  not needed without such copies

    with source.view({key: key for key in copies}) as left_out, source.view(copies) as kept:
        report = diff_opened(left_out, kept, max_bytes=max_bytes, threads=threads)
    if report.differences:
        key = report.differences[0].key
        if is_state:
            raise NamesError(
                f"{show(key)} differs from {show(copies[key])}, and the name map makes one tensor of their parameters, "
                "which has one such number",
                key=key,
                hint='convert the weights alone: `part="model"`',
            )
        raise NamesError(
            f"{show(key)} is tied to {show(copies[key])} by the name map, but differs from it: leaving it out would "
            "lose its data",
            key=key,
            hint="remove the rule from the map, which then keeps the tensor; `Select(drop=...)` leaves it out",
        )


def open_source(
    path: Location | Sequence[Location],
    *,
    strategy: str | os.PathLike[str] | None = None,
    suffix: str | None = None,
    of_format: str | None = None,
) -> Checkpoint:
    """Open the source of a conversion.

    Args:
        path: a checkpoint, or a list of weight files, as in `reshard.open`.
        strategy: of rank folders, how they are sharded.
        suffix: of rank folders, which file of each is read.
        of_format: of a folder with several checkpoints, which one is read, as `format` of `reshard.open`.

    Raises:
        ArgumentError: `suffix` is given, and there are no rank folders.
        ReshardError: as `reshard.open`.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.zeros(2)}, "m.safetensors")
        >>> open_source(locate("m.safetensors")).keys()
        ['w']
    """
    if suffix is None:
        return opening.open(path, strategy=strategy, format=of_format)
    if of_format is not None:
        raise ArgumentError("`format` and `suffix` exclude each other: `suffix` is of rank folders")
    options = OpenOptions(strategy=strategy)
    root = rank_root(path, options) if isinstance(path, Location) and path.is_folder() else None
    if root is None:
        raise ArgumentError(
            f"{path} holds no folders `rank_<number>`: `suffix` says which of their files are read", path=str(path)
        )
    return Checkpoint(root.open_suffix(suffix))


def _shared(job: Job, share: Share, asked: ConvertOptions, writer: Writer) -> Shared:
    # With dtypes: which tensors a cast leaves follows from the libraries of a host.
    shapes = [
        (key, one.dtype, one.shape) for key, one in zip(job.keys, job.arrays(job.whole_request(job.keys)), strict=True)
    ]
    digest = digest_of(
        job.source, {"asked": agreed(asked), "n": share.count, "tensors": shapes, "to": str(job.target.resolved())}
    )
    if writer.in_root:
        return Shared(share, job.target / STAGING_FOLDER / f"{SHARED_PREFIX}{digest}")
    if not job.target.is_local:
        home = home_of(job.target) if writer.is_one_file(job.target) else job.target
        return Shared(share, home / staging_name(f"{SHARED_PREFIX}{digest}"))
    beside = job.target.parent / f"{start_beside(job.target)}{digest}.staging"
    # An existing folder may be a mount. A folder created since the first share began has no effect.
    if job.target.is_folder() and not beside.is_folder():
        return Shared(share, job.target / staging_name(f"{SHARED_PREFIX}{digest}"))
    return Shared(share, beside)


@dataclass(frozen=True)
class _ShareOfRank:
    """What a rank tells the others of its share: whether it is published, and what it has logged."""

    is_published: bool
    logged: list[str]


def _by_ranks(members: Group, timeout: float, write: Callable[[tuple[int, int]], ConvertReport]) -> ConvertReport:
    """Let each rank write its share. An error of one rank is raised on all ranks."""
    outcome: Exception | _ShareOfRank
    with contextlib.ExitStack() as stack:
        with held_back() as held:
            stack.callback(release, held)  # of all ranks, if one fails
            try:
                report = write((members.rank, members.world_size))
            except Exception as error:  # noqa: BLE001  every rank learns of it, and raises it
                outcome = error
            else:
                outcome = _ShareOfRank(not report.pending, [one.getMessage() for one in held])
        told = Collective(session(members, "convert"), timeout).share(outcome, _ShareOfRank)
        release(held, [one.logged for one in told[: members.rank]])
    if not any(one.is_published for one in told):
        raise MismatchError(
            f"{show(report.path)} is not published: each rank has written its share, but not of the same conversion",
            hint="all hosts must see the same source and destination under the same paths, and have the same versions "
            "of reshard and its libraries",
        )
    return replace(report, pending=())  # the shares of other ranks are written by now


def _check_options(
    writer: Writer, target: Location, layout: LayoutLike | None, of_format: Mapping[str, object], *, is_private: bool
) -> None:
    if writer.is_whole and layout is not None:
        raise ArgumentError(
            f'`to="{writer.name}"` holds whole tensors: `layout` has no meaning there',
            hint='leave `layout=` out, or choose `to="checkpoint2"`, `to="checkpoint1"` or `to="safetensors"`',
        )
    if writer.is_one_file(target) and layout is not None:
        raise ArgumentError(
            f"{target} is one file, a layout makes one a rank",
            hint="give a folder as the destination",
            path=str(target),
        )
    for name, value in of_format.items():
        if value is not None and name not in writer.options:
            owners = " or ".join(f'`to="{one.name}"`' for one in writers() if name in one.options)
            hint = "to convert an older iteration of a root, name its folder as the source: <root>/iteration_<8 digits>"
            raise ArgumentError(
                f'`{name}` belongs to {owners}; the destination is "{writer.name}"',
                hint=hint if name == "iteration" else None,
            )
    if of_format["modes"] is not None and is_private:
        raise ArgumentError("`modes` and `private` both set permissions: give one of them")
    iteration = of_format["iteration"]
    if iteration is not None and (isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0):
        raise ArgumentError(f"`iteration` is {iteration!r}; a whole number from 0 on is needed")


def _check_bucket(writer: Writer, target: Location, asked: ConvertOptions, *, is_shared: bool) -> None:
    """Refuse what a bucket does not have."""
    if is_shared and writer.in_root:
        raise UnsupportedError(
            f"{show(str(target))} is in a bucket, where one process begins and publishes an iteration of a root: with "
            "`share`, none does",
            path=str(target),
            hint="the workers of a Ray cluster or the ranks of a launcher can share it: one process leads them, see "
            "docs/guides/cluster.md",
        )
    if asked.commit.private or asked.files.modes is not None:
        name = "private" if asked.commit.private else "modes"
        raise UnsupportedError(
            f"{show(str(target))} is in a bucket, where files have no permission bits: `{name}` has no meaning",
            path=str(target),
            hint="who may read an object is set in the bucket",
        )


def _check_apart(source: Location, target: Location) -> None:
    if source.found() is None:
        hint = None if source.parent.exists() else hub_hint(str(source))
        raise CheckpointNotFoundError(f"there is nothing at {show(str(source))}", path=str(source), hint=hint)
    a, b = source.resolved(), target.resolved()
    if b.kind() == "link":  # only a loop of links resolves to a link
        target.stat(follow_links=True)  # raises
    if a == b or a in b.parents or b in a.parents:
        # A file beside others in one folder is allowed: only a destination inside the source, or a source inside the
        # destination, is refused.
        if a == b:
            message = f"source {source} and destination {target} are the same"
        elif a in b.parents:
            message = f"destination {target} is inside source {source}"
        else:
            message = f"source {source} is inside destination {target}"
        raise ArgumentError(message, path=str(target), hint="choose another destination")
