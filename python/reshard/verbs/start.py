"""What a run starts from: its own newest checkpoint, if it has saved one, else what its configuration loads.

This module changes nothing and loads no tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.config import split_iteration
from reshard.errors import ArgumentError, CheckpointNotFoundError, ConfigError, ReshardError, UnsupportedError
from reshard.names import as_names, config_beside
from reshard.opening.gather import gather_both
from reshard.options import InitFrom
from reshard.resume import decide
from reshard.storage.location import locate
from reshard.values.argument_types import Part
from reshard.verbs.selection import of_prefixes, sizes_changed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.checkpoint import Checkpoint
    from reshard.config import Config
    from reshard.resume import RunFacts


def own_config(config: Config, root: str | os.PathLike[str]) -> Config:
    """The configuration that resumes from the newest checkpoint that the run itself has saved.

    Example:
        >>> from reshard.config import Config
        >>> own_config(Config(load_path="pretrained"), "tuning").load_path
        'tuning'
    """
    groups = tuple(one for one in config.groups if not isinstance(one, InitFrom))
    return replace(
        config,
        load_path=str(root),
        resume=True,
        resume_file=None,
        load_format=None,
        strategy=None,
        model_path=None,
        groups=groups,
    )


def with_init(config: Config, init: InitFrom, root: str | os.PathLike[str]) -> Config:
    """The configuration of a run that starts from something else if it has no checkpoint of its own.

    Args:
        config: what the run loads otherwise.
        init: what it starts from.
        root: where it saves.

    Raises:
        ConfigError: the configuration itself loads something else.

    Example:
        >>> from reshard.config import Config
        >>> with_init(Config(load_path="tuning", resume=True), InitFrom("pretrained"), "tuning").load_path
        'pretrained'
    """
    path, known = os.fspath(init.path), config.load_path
    if config.init_from is None and known and locate(known).resolved() != locate(root).resolved():
        raise ConfigError(
            f"the configuration loads {known}, and `init_from` is {path}",
            hint="say in one place what the run starts from",
        )
    groups = tuple(one for one in config.groups if not isinstance(one, InitFrom))
    return replace(own_config(config, root), load_path=path, resume=False, groups=(*groups, init))


@contextlib.contextmanager
def initial(checkpoint: Checkpoint, init: InitFrom | None, notes: list[str] | None = None) -> Iterator[Checkpoint]:
    """The checkpoint under the names of the model, while the block runs.

    Args:
        checkpoint: the opened checkpoint.
        init: what is taken; None: the checkpoint as it is.
        notes: where sentences about tensors that the name map pads or trims are added; what is left out is then read.

    Raises:
        ArgumentError: the file of the name map does not exist, or there is no such entry.
        NamesError: the name map does not match the tensors, or would leave out values that are no padding.
        UnsupportedError: `entry` is given for a checkpoint whose optimizer state does not follow it.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"encoder.w": np.zeros(2)}, "pretrained.safetensors")
        >>> init = InitFrom("pretrained.safetensors", names={"rules": [{"from": "encoder.w", "to": "w"}]})
        >>> with reshard.open(init.path) as checkpoint, initial(checkpoint, init) as renamed:
        ...     renamed.keys()
        ['w']
    """
    if init is None or (init.names is None and init.entry is None):
        yield checkpoint
        return
    if init.names is None and checkpoint.data.run_values() is not None:
        yield checkpoint  # the entry is one of the whole state of a run
        return
    prefixes = _prefixes(init.names)
    if init.entry is not None or prefixes is not None:
        if not init.fresh_optimizer:
            raise UnsupportedError(
                f"{checkpoint.path}: `{'rename' if init.entry is None else 'entry'}` of `init_from` takes weights "
                "alone here, not the state of an optimizer",
                path=str(checkpoint.path),
                hint="start with a new optimizer, as `InitFrom` does by default",
            )
        rest = replace(init, entry=None, names=init.names if prefixes is None else None)
        with of_prefixes(checkpoint, init.entry, prefixes) as inner, initial(inner, rest, notes) as renamed:
            yield renamed
        return
    assert init.names is not None  # else there is an entry
    part: Part = "model" if init.fresh_optimizer else "all"
    try:
        names = as_names(init.names, config_beside(checkpoint.data.path))
        view = checkpoint.renamed(names, part=part)
    except CheckpointNotFoundError as error:  # of the name map, not of the checkpoint
        hint = "`names` of `init_from` is the path of a name map, a preset or a mapping"
        raise ArgumentError(error.message, path=error.path, hint=hint) from None
    with view as renamed:
        if notes is not None:
            notes += sizes_changed(checkpoint, names, part)
        yield renamed


def _prefixes(names: object) -> Mapping[str, str] | None:
    """New prefixes by old ones, if `names` consists of them."""
    if not isinstance(names, Mapping) or names.keys() != {"rename"}:
        return None
    prefixes = names["rename"]
    if not isinstance(prefixes, Mapping):
        raise ArgumentError(f"`rename` in `names` of `init_from` is {prefixes!r}, expected new prefixes by old ones")
    return prefixes


def start_of(
    config: Config, root: str | os.PathLike[str], facts: RunFacts, copies: str | None = None
) -> tuple[bool, str | None]:
    """What a run that saves into `root` starts from: its own newest checkpoint, or what its configuration loads.

    A configuration names what the first start loads, such as pretrained weights. The same configuration is used for
    the restart after a crash, when the run has checkpoints of its own, and the root would refuse a second start at a
    lower step. One rank calls this and sends the result to the others.

    Args:
        config: what is to be loaded.
        root: where the run saves.
        facts: the run.
        copies: a second root, into which the saves of the first are copied.

    Returns:
        Whether it starts from its own checkpoint (see `own_config`), and why; None where there is no choice.

    Raises:
        StorageError: a file or folder cannot be read.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.config import Config
        >>> from reshard.resume import RunFacts
        >>> weights = Config(load_path="pretrained")
        >>> start_of(weights, "tuning", RunFacts())
        (False, 'tuning holds no checkpoint: the run starts from pretrained')
        >>> _ = reshard.save("tuning", 200, {"w": np.zeros(1)})
        >>> start_of(weights, "tuning", RunFacts())
        (True, 'the run goes on from its own newest checkpoint, in tuning; pretrained is not loaded again')
    """
    folder, iteration = split_iteration(config.load_path)
    given = config.load_path or config.model_path or ""
    is_same = bool(folder) and locate(folder).resolved() == locate(root).resolved()
    if is_same and config.init_from is None and (config.resume or iteration is not None):
        return False, None
    own = own_config(config, root)
    if gather_both(own, copies, facts).kind not in ("root", "rank_folders"):
        return False, f"{root} holds no checkpoint: the run starts from {given}" if given and not is_same else None
    if config.resume:
        own_step, given_step = _step_of(own, facts, copies), _step_of(config, facts)
        if own_step is not None and given_step is not None and own_step <= given_step:
            return False, f"{given} is at step {given_step}, and {root} not beyond that"
    not_again = f"; {given} is not loaded again" if given and not is_same else ""
    return True, f"the run goes on from its own newest checkpoint, in {root}{not_again}"


def _step_of(config: Config, facts: RunFacts, copies: str | None = None) -> int | None:
    """The step that a configuration resumes from; None: from nothing, or it fails."""
    try:
        decision = decide(config, gather_both(config, copies, facts))
    except (ReshardError, OSError):
        return None
    return None if decision.fresh else decision.initial_step
