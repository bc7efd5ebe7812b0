"""What is made of a save that is published: folders of whole weights, links to iterations, and a call of the user.

The save has succeeded whatever happens here, so every error is a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.commit import roots
from reshard.commit.retention import best_of
from reshard.conversion.buckets import exporting
from reshard.conversion.library_names import published_names
from reshard.errors import ArgumentError, ReshardError
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_of_all, session
from reshard.storage.changes import make_folders, remove_file, replace_link
from reshard.storage.location import locate
from reshard.torch.adapters import adapters_of, write_adapters
from reshard.torch.merging import merge_of, write_merged
from reshard.torch.published import check_loads
from reshard.values.words import show
from reshard.verbs.convert import open_source
from reshard.verbs.integrate import check_no_root, integrate, integrated_root, remove_outdated

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from reshard.names import NameMap
    from reshard.options import Exports, SaveOptions
    from reshard.ranks.group import Group
    from reshard.storage.location import Location
    from reshard.torch.adapters import Adapter
    from reshard.verbs.save import SaveReport

_log = logging.getLogger("reshard")

_MODEL_FILES = ".model_files"
_LAST, _BEST = "last", "best"


@dataclass(eq=False)
class SaveExports:
    """What a `Checkpointer` makes of each save; the fields are its arguments.

    Attributes:
        given: `exports`.
        hf_every, merge, model_files, save_every: the arguments; `save_every` only in steps.
        n_saves: number of saves so far.
    """

    given: Exports
    hf_every: int | None = None
    merge: bool = False
    model_files: str | os.PathLike[str] | None = None
    save_every: int | None = None
    n_saves: int = 0

    def check(self, model: object, *, is_partial: bool = False) -> None:
        """Check before the first step that the names under which weights are published are known.

        Args:
            model: the model.
            is_partial: whether saves leave tensors out, so that only adapters can be published.

        Raises:
            ArgumentError: all tensors are published, and saves leave some out.
            UnsupportedError: they are not, or adapters cannot be merged.
        """
        if is_partial and self.hf_every is not None and not adapters_of(model):
            raise ArgumentError(
                "`hf_every` writes all weights of the model, and `leave_out_frozen` leaves some out of the saves",
                hint="leave one of the two out; of a model of peft the adapters are written",
            )
        if self.merge:
            published_names(merge_of(model).model)
        elif self.hf_every is not None and not adapters_of(model):
            published_names(model)

    def is_due(self, iteration: int) -> bool:
        """Whether the weights of this save are written. All ranks give the same answer, also after a restart."""
        if self.hf_every is None:
            return False
        if self.save_every is not None:
            return iteration % (self.hf_every * self.save_every) == 0
        return self.n_saves % self.hf_every == 0


def export(
    exports: SaveExports,
    report: SaveReport,
    model: object,
    *,
    root: str | os.PathLike[str],
    group: Group,
    options: SaveOptions,
    timeout: float,
) -> list[str]:
    """Export a save, all ranks collectively.

    Args:
        exports: what is made of it.
        report: the report of the save.
        model: the model, of which the configuration is written.
        root: the checkpoint root.
        group: the ranks.
        options: the options of the save.
        timeout: seconds that ranks wait for each other.

    Returns:
        Warnings.
    """
    exports.n_saves += 1
    shared: dict[str, Any] = {
        "group": group,
        "keep": None if options.retention is None else options.retention.keep,
        "commit": options.commit,
        "threads": options.threads,
        "timeout": timeout,
    }
    warnings: list[str] = []
    if exports.given.integrated:
        warnings += integrate(root, report, **shared)
    is_due = exports.is_due(report.iteration)
    adapters = adapters_of(model) if is_due and not exports.merge else []
    if is_due and exports.merge:
        warnings += _export_merged(exports, root, report, model, options, group=group, timeout=timeout)
    elif adapters:
        warnings += _export_adapters(root, report, adapters, options, group=group, timeout=timeout)
    elif is_due:
        try:
            names = published_names(model)
            names = None if names is None else names.reversed()
            files = Collective(session(group, "export"), timeout).first(
                lambda: _files(exports, root, model, report, names), str
            )
        except ReshardError as error:
            warnings.append(f"the files of the model are not written: {error.message}")
        else:
            warnings += integrate(
                root,
                report,
                suffix="hf",
                part="model",
                model_files=files or None,
                names=names,
                **shared,
            )
    if group.rank == 0:
        if exports.given.links:
            warnings += _link(root, report, None if options.retention is None else options.retention.best)
        if exports.given.after_publish is not None:
            try:
                exports.given.after_publish(report)
            except Exception as error:  # noqa: BLE001  of the user's code; the save has succeeded
                _log.warning("iteration %d is saved, and `after_publish` failed", report.iteration, exc_info=True)
                warnings.append(f"`after_publish` failed: {type(error).__name__}: {show(str(error))}")
    return warnings


def _export_merged(
    exports: SaveExports,
    root: str | os.PathLike[str],
    report: SaveReport,
    model: object,
    options: SaveOptions,
    *,
    group: Group,
    timeout: float,
) -> list[str]:
    """Write the merged weights of a save, on rank 0. Returns warnings."""

    def write(target: Location) -> None:
        merge = merge_of(model)
        files = _folder(exports, root, merge.model)
        write_merged(
            report.path,
            str(target),
            merge,
            suffix=report.suffix,
            model_files=files or None,
            commit=options.commit,
            threads=options.threads,
        )

    return _export(root, write, "merged weights are", report, options, group=group, timeout=timeout)


def _export_adapters(
    root: str | os.PathLike[str],
    report: SaveReport,
    adapters: list[Adapter],
    options: SaveOptions,
    *,
    group: Group,
    timeout: float,
) -> list[str]:
    """Write the adapters of a save, on rank 0. Returns warnings."""

    def write(target: Location) -> None:
        write_adapters(report.path, str(target), adapters, commit=options.commit)

    return _export(root, write, "adapter is", report, options, group=group, timeout=timeout)


def _export(
    root: str | os.PathLike[str],
    write: Callable[[Location], object],
    what: str,
    report: SaveReport,
    options: SaveOptions,
    *,
    group: Group,
    timeout: float,
) -> list[str]:
    """Write what is made of a save on rank 0, and remove what was made of saves that are gone. Returns warnings."""
    target = integrated_root(root, "hf") / roots.iteration_folder_name(report.iteration)

    def checked() -> str:
        check_no_root(target.parent)
        with exporting(locate(root)):
            write(target)
        return ""

    try:
        Collective(session(group, "export"), timeout).first(checked, str)
    except ReshardError as error:
        log_of_all(group.rank, "iteration %d is saved, and its %s not written: %s", report.iteration, what, error)
        return [f"the {what} not written: {error.message}"]
    return remove_outdated(root, target, None if options.retention is None else options.retention.keep, group)


def _files(
    exports: SaveExports, root: str | os.PathLike[str], model: object, report: SaveReport, names: NameMap | None
) -> str:
    """The folder of the files that are copied beside the weights; "": there are none.

    Raises:
        MismatchError: the model of its config.json does not load the weights.
    """
    folder = _folder(exports, root, model)
    if folder:
        with open_source(locate(report.path), suffix=report.suffix) as checkpoint:
            check_loads(checkpoint, folder, names)
    return folder


def _folder(exports: SaveExports, root: str | os.PathLike[str], model: object) -> str:
    if exports.model_files is not None:
        return str(locate(exports.model_files).resolved())
    texts = _configuration(model)
    if not texts:
        _log.warning("the model has no `config`: the weights are written without a config.json")
        return ""
    folder = integrated_root(root, "hf") / _MODEL_FILES
    if folder.is_local:
        make_folders(folder)
    for name, text in texts.items():
        (folder / name).replace(text, durable=False)
    return str(folder.resolved())


def _configuration(model: object) -> dict[str, str]:
    """The files of a model of transformers that describe it."""
    if isinstance(model, Mapping | Sequence):
        return {}
    inner = model
    while (wrapped := getattr(inner, "_orig_mod", None) or _of_replicas(inner)) is not None:
        inner = wrapped
    config: Any = getattr(inner, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    value = json.loads(config.to_json_string())
    value.setdefault("architectures", [_class_of(inner)])
    dtype = str(getattr(inner, "dtype", None))
    if dtype.startswith(
        "torch."
    ):  # of the weights, as `save_pretrained` writes it; `config` has that of the loaded ones
        value["torch_dtype" if "torch_dtype" in value else "dtype"] = dtype.removeprefix("torch.")
    texts = {"config.json": json.dumps(value, indent=2, sort_keys=True) + "\n"}
    generation: Any = getattr(inner, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        texts["generation_config.json"] = generation.to_json_string()
    return texts


def _of_replicas(model: Any) -> Any:
    return model.module if type(model).__name__ in ("DistributedDataParallel", "DataParallel") else None


def _class_of(model: object) -> str:
    """The name of the class of a model, which FSDP2 replaces by one that is derived from two."""
    bases = type(model).__bases__
    is_fsdp = len(bases) > 1 and bases[0].__name__ == "FSDPModule"
    return (bases[1] if is_fsdp else type(model)).__name__


def _link(root: str | os.PathLike[str], report: SaveReport, best: tuple[str, int] | None) -> list[str]:
    """Let the links name the newest and the best iteration. Returns warnings."""
    warnings = []
    targets: dict[str, str | None] = {_LAST: roots.iteration_folder_name(report.iteration)}
    if best is not None:
        try:
            targets[_BEST] = best_of(locate(root), best[0])
        except ReshardError as error:
            warnings.append(f"the link `{_BEST}` is not made: {error.message}")
    for name, target in targets.items():
        link = locate(root) / name
        try:
            if target is not None:
                replace_link(link, target)
            elif link.kind() == "link":
                remove_file(link)
        except ReshardError as error:
            warnings.append(f"the link `{name}` is not made: {error.message}")
    return warnings
