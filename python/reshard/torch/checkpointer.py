"""The interface for a training loop: `Checkpointer` with its methods `resume` and `step`.

    checkpointer = Checkpointer("output/checkpoint", save_every=500, keep=5)
    decision = checkpointer.resume(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for step in range(decision.initial_step + 1, n_steps + 1):
        ...
        checkpointer.step(step, loss=loss)

This module decides when to save. `saving` writes a checkpoint of the live state, `preflight` checks at the start
whether that can succeed, `load_with` chooses the checkpoint to resume from, `loading` reads it and `resuming` restores
it, `emergency` brings the ranks to the same step after a signal, and `leaving` saves at that step and exits.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from reshard.commit import protocol
from reshard.commit.session import find_session
from reshard.config import Config, as_config
from reshard.errors import ArgumentError, ClaimedError, GroupError, ReshardError, UnsupportedError
from reshard.formats.registry import save_format
from reshard.options import (
    Environment,
    Exports,
    InitFrom,
    Interrupts,
    Mirror,
    Options,
    Ranks,
    Retention,
    SaveOptions,
    Settings,
    Strict,
    comparable,
    explains_moved,
)
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_of_all, resolve, session
from reshard.resume import RunFacts
from reshard.resume.parts import object_name, with_parts
from reshard.storage.inputs import read_input
from reshard.storage.location import locate, locate_root
from reshard.torch import environment as environments
from reshard.torch.checks import MAX_SEED, count, seconds
from reshard.torch.emergency import EXIT_GRACE_S, Rendezvous, Signals, notice_store_of
from reshard.torch.exports import SaveExports
from reshard.torch.health import Health, LossHealth
from reshard.torch.leaving import exit_process, save_after, save_and_exit
from reshard.torch.left_out import common_candidates, compare, digests, frozen_at_start, local_parts
from reshard.torch.loading import read_for
from reshard.torch.preflight import check_has_content, check_state, claim, dry_run, reserve
from reshard.torch.published import under_names
from reshard.torch.resuming import (
    RestoreOptions,
    check_has_optimizer,
    check_restored,
    check_state_beside,
    check_taken,
    initial_state,
    match_objects,
    restore_objects,
    restore_random,
    restore_sampler,
    restore_tensors,
    with_data_position,
    with_modules,
)
from reshard.torch.run import NOT_SAVED, Run, interval, number_of
from reshard.torch.sampler import ElasticSampler, check_not_read, keep_stream
from reshard.torch.saving import Saver
from reshard.torch.schedulers import KINDS, kind_of
from reshard.torch.state import describe
from reshard.values.argument_types import Count, GroupLike, Seconds
from reshard.values.arguments import checked
from reshard.values.events import Observers, OnEvent
from reshard.values.words import show
from reshard.verbs.integrate import integrated_root
from reshard.verbs.load import LoadRequest, load_with, pass_over, resumed
from reshard.verbs.mirror import Copier, copies_root
from reshard.verbs.save import check_format, check_save_options
from reshard.verbs.start import initial, own_config, start_of, with_init
from reshard.write.rank_facts import check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import EllipsisType, TracebackType

    from torch import nn

    from reshard.checkpoint import Checkpoint
    from reshard.config import ConfigLike
    from reshard.formats.left_out import LeftOutTensor
    from reshard.options import (
        CommitLike,
        EnvironmentLike,
        ExportsLike,
        FilesLike,
        FormatLike,
        InitFromLike,
        MirrorLike,
        RanksLike,
        RetentionLike,
        SettingsLike,
        StrictLike,
        VerifyLike,
    )
    from reshard.resume import ResumeDecision
    from reshard.torch.loading import Read
    from reshard.torch.state import Described
    from reshard.verbs.save import PendingSave, SaveReport

_log = logging.getLogger("reshard")

_MAX_THREADS = 1024
_MAX_CONFIG_BYTES = 16 << 20
_OF_EACH_RANK = frozenset({
    "self", "__class__", "group", "ranks", "threads",
    "environment", "health",  # those of rank 0 are used
    "on_event", "signals",
    "model", "optimizer", "scheduler", "sampler", "extra", "init", "device", "check",  # compared by what they are
})  # fmt: skip
"""Arguments that may differ between ranks. All others are compared when a run resumes."""


class Checkpointer:
    """Saves a training run and resumes it: model, optimizer, schedulers, data position, random state, on any ranks.

    Every rank creates one with the same arguments and calls the same methods. Call `resume` first: it restores the
    objects of the run from the newest undamaged checkpoint, if there is one. Call `step` at the end of every step.

    As a context manager it waits for the last save at the end of the block; else call `close`.

    The constructor or `resume` raises an error if saves would fail: an invalid option, an unwritable root, a root that
    another job writes into or that is at a later step, state that cannot be saved. `resume` claims the root for this
    process. With `save_every=None`, as for an evaluation beside a training, it does not, and these faults are warnings
    of the decision.

    `initial_step` is the step that was saved, whatever the batch size is now. The position in the data is the position
    of the sampler, which counts samples.

    Signals (SIGTERM and SIGUSR1): when any rank receives one, all ranks save at the same step, the next or the one
    after it, wait until the checkpoint is published and exit with code 75, or with 128 + the signal's number if the
    save failed. This happens in `step`.

    Args:
        root: the checkpoint root.
        save_every: steps from one save to the next: a save is due at each multiple, or at the first call of `step`
            after it; or a time, "30min", "1h30min", "90s", by rank 0's clock; None: save
            only in `save`.
        keep: number of newest iterations that are kept; short for `retention=Retention(keep=...)`. Default 5. None:
            all.
        retention: which iterations are kept, instead of `keep`: a `Retention` or a mapping of its fields.
        async_save: write in the background; the step waits only until its tensors are copied. The memory of the copies
            has the size of this rank's files; a thread allocates it after the first step. A group without a method
            `session` does not support two threads: with such a group, saves block, and a warning is logged.
        overlap: with `async_save`, `step` does not wait for copies of the parameters and state of optimizers: a hook
            makes the next step of the optimizer wait. They must then change only in that step, not in a step that is
            replayed from a CUDA graph or by a manual update.
        verify: what is compared: a `Verify`, a mapping of its fields, or "touched", "full" or "structure" for its field
            `on_load`. Copies of buffers may differ between ranks: each rank then gets its own copy back, and with
            another number of ranks all get that of the first rank, with a warning. Of buffers that DDP broadcasts, the
            sender's copy is saved.
        commit: how saves are published: a `Commit` or a mapping of its fields.
        files: which files hold the tensors: a `Files` or a mapping of its fields.
        format: "checkpoint2"; or "checkpoint1" or a `Checkpoint1Options`. In Checkpoint 1.0 epoch and step of the names
            are those of an `ElasticSampler`, where there is one.
        hf_every: each n-th save is written a second time, as a Hugging Face folder of whole weights with the model's
            `config.json`, into `<root>_hf`, also in a bucket; with `save_every` in steps, each save at a multiple of
            `n * save_every`.
        merge: for a model of peft: `hf_every` writes the weights of the base model with the active adapters merged, as
            `merge_and_unload().save_pretrained()` of the model does, instead of the adapters. The model is not changed.
            Rank 0 merges the layers one by one. Adapters that cannot be merged, and quantized layers, are refused by
            `resume`.
        model_files: a folder whose files (configuration, tokenizer) `hf_every` copies, instead of writing the
            configuration of the model.
        exports: what else is made of each save: an `Exports` or a mapping of its fields.
        mirror: a folder of a bucket, such as "s3://bucket/run", into which saves are copied in the background; or a
            `Mirror` or a mapping of its fields. `resume` takes the newest complete save of the two, and claims both.
            A step never waits for a copy; `close` does. See docs/guides/buckets.md.
        leave_out_frozen: do not save parameters for which no gradient is computed (`requires_grad=False`). The program
            must make them again at each start: the base model from `from_pretrained` or `init_from`, quantised in the
            same way. A save records a digest of each, and `resume` refuses a model with other values. A parameter
            that is trained later, has changed, or has values that only a checkpoint gave, is saved; so are buffers
            and adapters of peft. See docs/guides/special-state.md.
        save_at_end: save the last step at the end of a `with` block that no exception ends, even if no save is due. By
            default a warning says which steps are not saved.
        on_event: a function, or a list of functions, called with each `Event` of the run, such as `EventLog(root)`; see
            docs/watching.md. An error of it is logged once and has no other effect.
        signals: the signals that request a save and the exit.
        interrupts: what happens when a signal or an exception ends the training: an `Interrupts` or a mapping of its
            fields.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: torch's default group if there is one, else this process alone.
        ranks: the mesh, and random streams on it: a `Ranks` or a mapping of its fields.
        health: called after each step as `health(step, loss, metrics)`, returns whether the run is healthy; a
            checkpoint is marked with the result of its step. Default: the loss is finite. The result of rank 0 is used.
        healthy_only: resume only from checkpoints that were marked healthy.
        environment: facts of the run to record besides versions and hardware, and what follows where they have changed:
            an `Environment` or a mapping of its fields.
        timeout: seconds that ranks wait for each other in one exchange, the time to write or to read included.
        threads: threads of copies.

    Raises:
        ArgumentError: an option has a value that is not accepted, or contradicts another one; `save_every` is a time
            and ranks cannot leave messages for each other.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with Checkpointer("run", save_every=2, signals=()) as checkpointer:
        ...     start = checkpointer.resume(model=model, optimizer=optimizer).initial_step
        ...     for step in range(start + 1, 5):
        ...         loss = model(torch.ones(2)).square().sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         checkpointer.step(step, loss=loss)
        >>> Checkpointer("run", signals=()).resume(model=model, optimizer=optimizer).initial_step
        4
    """

    @explains_moved
    @checked
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | str | None = None,
        keep: int | EllipsisType | None = ...,
        retention: RetentionLike | None = None,
        async_save: bool = True,
        overlap: bool = False,
        verify: VerifyLike = "touched",
        commit: CommitLike | None = None,
        files: FilesLike | None = None,
        format: FormatLike = "checkpoint2",  # noqa: A002
        hf_every: Count | None = None,
        merge: bool = False,
        model_files: str | os.PathLike[str] | None = None,
        exports: ExportsLike | None = None,
        mirror: MirrorLike | None = None,
        leave_out_frozen: bool = False,
        save_at_end: bool = False,
        on_event: OnEvent | None = None,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        interrupts: Interrupts | Mapping[str, object] | None = None,
        group: GroupLike = None,
        ranks: RanksLike | None = None,
        health: Health | None = None,
        healthy_only: bool = False,
        environment: EnvironmentLike | None = None,
        timeout: Seconds = 1800.0,
        threads: int | None = None,
    ) -> None:
        copied = None if mirror is None else Mirror.of(mirror)
        given = locals() | {"exports": Exports.of(exports), "mirror": copied}
        self._given = {name: comparable(one) for name, one in given.items() if name not in _OF_EACH_RANK}
        self._root = locate_root(root).absolute()  # the program may change its working folder
        self._every_steps, self._every_s = interval(save_every)
        if keep is ...:
            keep = Retention().keep if retention is None else None
        self._options = SaveOptions.of(
            keep=keep,
            retention=retention,
            verify=verify,
            commit=commit,
            files=files,
            format=format,
            threads=None if threads is None else count("threads", threads, 1, _MAX_THREADS),
        )
        check_save_options(self._options)
        check_format(self._root, self._options)
        if self._root.objects is not None and given["exports"].links:
            raise UnsupportedError(
                f"{show(str(self._root))} is in a bucket, where there are no links",
                path=str(self._root),
                hint="leave `links` of `exports` out: the newest save is that which the root opens",
            )
        if hf_every is not None or given["exports"].integrated:
            integrated_root(self._root)  # refuses a root beside which there is none
        self._interrupts = Interrupts.of(interrupts)
        self._environment = Environment.of(environment)
        self._ranks = Ranks.of(ranks)
        self._exports = SaveExports(
            given["exports"],
            hf_every=None if hf_every is None else count("hf_every", hf_every, 1),
            merge=merge,
            model_files=None if model_files is None else locate(model_files).absolute(),
            save_every=self._every_steps,
        )
        if self._exports.given.links and save_format(self._options.format).traits.rank_folders:
            raise ArgumentError("`links` names iteration folders, and this format has none", hint="leave `links` out")
        if model_files is not None and hf_every is None:
            raise ArgumentError("`model_files` belongs to `hf_every`, which is not given")
        if merge and hf_every is None:
            raise ArgumentError("`merge` belongs to `hf_every`, which is not given")
        if copied is not None and save_format(self._options.format).traits.rank_folders:
            raise UnsupportedError(
                "`mirror` copies iterations of Checkpoint 2.0, and `format` is another one", hint="leave `mirror` out"
            )
        self._mirror = copied
        self._copies = None if copied is None else copies_root(self._root, copied)
        if leave_out_frozen:
            _check_partial(self._options, self._exports)
        self._leave_out_frozen = leave_out_frozen
        self._config = Config(load_path=os.fspath(self._root), resume=True, healthy_only=healthy_only, sink_mode=False)
        if overlap and not async_save:
            raise ArgumentError("`overlap` is about saves in the background", hint="give `async_save=True`, too")
        self._async, self._overlap = async_save, overlap
        self._save_at_end = save_at_end
        self._save_optimizer = True
        self._scale_steps = False
        self._health: Health = health or LossHealth()
        self._timeout = seconds("timeout", timeout)
        self._root_seed = None if self._ranks.seed is None else count("seed", self._ranks.seed, 0, MAX_SEED)
        self._group = resolve(group)
        self._observers = Observers.of(on_event, self._group.rank)
        self._one_channel = self._group.world_size > 1 and not hasattr(self._group, "session")
        if self._async and self._one_channel:
            self._async = False
            log_of_all(
                self._group.rank, "the group has no method `session(label)`: saves are not written in the background"
            )
        self._board, self._drift = notice_store_of(self._group), self._interrupts.drift
        if self._board is None and self._every_s is not None:
            raise ArgumentError(
                "saving by the clock needs a group on which ranks can leave word for each other",
                hint="give `save_every` in steps, or the group the methods `post(name, text)` and `read(name)`",
            )
        self._signals = Signals(signals)
        self._saver: Saver | None = None
        self._is_closed = False

    @classmethod
    def from_config(cls, config: ConfigLike, **options: Any) -> Self:
        """Create one from a configuration with MindSpore configuration keys: a YAML file, a mapping or a `Config`.

        The configuration defines the checkpoint that is loaded, which may be in another root or a single iteration, and
        whether the counters continue; where, how often and how to save; and the rules of data and health. The run loads
        that checkpoint when it starts for the first time. If the folder that it saves into holds newer checkpoints, as
        after a crash, it resumes from the newest of these, and the decision records it.

        When the global batch size changes, steps are scaled as MindSpore Transformers does.

        Args:
            config: the configuration; its digest is recorded in the environment.
            options: further arguments of `Checkpointer`, which take precedence over the configuration. `root` is the
                checkpoint root for saves. A mapping changes the fields of a group of options that it names; an object
                of the class, or `keep`, replaces the group.

        Raises:
            ConfigError: the configuration is not valid.
            ArgumentError: it has no folder for saves, and `root` is not given.

        Example:
            >>> checkpointer = Checkpointer.from_config({
            ...     "load_checkpoint": "run", "resume_training": True, "output_dir": "out",
            ...     "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 500, "async_save": True}],
            ...     "reshard": {"retention": {"keep_every": 1000}, "verify": {"after_save": True}},
            ... }, signals=())
        """
        known = as_config(config)
        given: dict[str, Any] = {
            "root": known.save_path or (known.load_path if known.resume else None) or None,
            "save_every": known.save_every,
            "async_save": known.async_save,
            "hf_every": known.hf_every,
            "merge": known.merge,
            "model_files": known.model_files,
            "exports": Exports(integrated=known.integrated_save, links=known.links),
            **known.options(),
        }
        if "keep" in options and "retention" not in options:
            del given["retention"]
        for name, value in options.items():
            group = given.get(name)
            if isinstance(group, Options) and isinstance(value, Mapping) and "name" not in value:
                given[name] = group.updated(value)
            else:
                given[name] = value
        if given["root"] is None:
            raise ArgumentError(
                "the configuration does not say where to save", hint="give `root`, or `output_dir` in it"
            )
        if not isinstance(config, Config):
            text = dict(config) if isinstance(config, Mapping) else read_input(config, _MAX_CONFIG_BYTES).decode()
            environment = Environment.of(given.get("environment"))
            given["environment"] = environment if environment.config is not None else replace(environment, config=text)
        made = cls(**given)
        healthy_only = known.healthy_only or bool(options.get("healthy_only"))
        made._scale_steps = True
        path = os.fspath(locate(known.load_path).absolute()) if known.load_path else known.load_path
        # A loop in torch makes single steps.
        made._config = replace(known, load_path=path, healthy_only=healthy_only, sink_mode=False)
        made._save_optimizer = known.save_optimizer
        return made

    # ------------------------------------------------------------------------------------------------------ resuming

    @explains_moved
    @checked
    def resume(
        self,
        *,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: object = None,
        scheduler: object = None,
        sampler: object = None,
        extra: Mapping[str, object] | None = None,
        init_from: InitFromLike | None = None,
        strict: StrictLike = True,
        settings: SettingsLike | None = None,
        data: Literal["saved", "new"] = "saved",
        cast: bool = False,
        init: Callable[[str, torch.Tensor], torch.Tensor | None] | None = None,
        device: torch.device | str | None = None,
        check: Callable[[Mapping[str, Any]], bool | None] | None = None,
        grown: bool = False,
        allow_fresh: bool = False,
        healthy_only: bool = False,
    ) -> ResumeDecision:
        """Register the objects of the run, and restore them from the newest undamaged checkpoint, if there is one.

        Args:
            model: a module, plain or in DDP, FSDP2, tensor parallel; or several, such as stages of a pipeline; or a
                mapping of several, such as a generator and a discriminator: its keys begin the names of their tensors.
                Tensors on the device `meta` get their values here.
            optimizer: one of torch's, or several; it need not have made a step. The `state_dict` of any other one, such
                as a wrapper with copies in float32, is saved whole, as objects of `extra` are.
            scheduler: anything with `state_dict` and `load_state_dict`; or a list of several, or a dict of several by
                name.
            sampler: anything with these two methods, such as a `StatefulDataLoader`. The state of each rank is saved;
                `reshard.PerRank` says what happens on another number of ranks. `step` advances an `ElasticSampler`; one
                without state in the checkpoint skips the steps that the decision gives.
            extra: anything else with `state_dict` and `load_state_dict`, by name, or a dict of values and tensors,
                which is restored in place. Rank 0's state is saved, and that of other ranks must equal it. Of an object
                wrapped in `reshard.per_rank`, or a loader, the state of each rank is saved, which fits the same number
                of ranks, or is converted by the function of a `reshard.PerRank`.
            init_from: what the run starts from if its root holds no checkpoint yet: a path, an `InitFrom` or a mapping
                of its fields. After a crash, the same call continues the run itself. `init_from` of the decision is
                set if the run starts from it.
            strict: what happens where the checkpoint and the run differ: a `Strict`, a mapping of its fields, or True
                (every difference is an error) or False (missing and unexpected state are warnings of the decision).
            settings: whose constants of schedulers and options of the optimizer are used where the checkpoint and the
                program differ: a `Settings` or a mapping of its fields. Default: the saved ones, with a warning.
            data: "new": the run goes on with another dataset, as in a second stage. The data position is not restored,
                and a warning says so: the sampler starts as the program made it. Leave it out when this stage restarts.
            cast: convert floating-point tensors to the dtype of the live ones, instead of refusing them.
            init: fills buffers that are not in the checkpoint, as in `reshard.torch.state.apply`.
            device: the device on which tensors on the device `meta` are allocated.
            check: called after everything is restored but the random state, as `check(saved)`, with `step`, `loss` and
                the metrics at the save: to run a forward pass and compare. If it returns False, an error is raised.
            grown: the dataset is the saved one with samples appended, as in `ElasticSampler.load_state_dict`.
            allow_fresh: start without a checkpoint if no checkpoint is complete.
            healthy_only: take the newest checkpoint that was saved as healthy, as `healthy_only` of the Checkpointer.

        Returns:
            The resume decision: `initial_step` steps count as done. Differences from the saved run are in its
            `warnings` and `reasons`.

        Raises:
            ArgumentError: an object without state; `resume` or `close` was called before; an `init_from` that fits
                nothing.
            ConfigError: `init_from` is given, and the configuration loads something else.
            ArgumentError: state that cannot be saved; a root that is at a later step; a model on the device `meta` and
                nothing to resume from.
            ClaimedError: another job writes into the root.
            MismatchError: tensors or objects do not match, `check` returned False, or the environment differs with
                `Environment.must_match`.
            DamagedFileError, CheckpointNotFoundError, UnsupportedError, GroupError, StorageError: as `reshard.load`.
        """
        given = locals()
        if self._saver is not None:
            raise ArgumentError("`resume` was called before", hint="make another Checkpointer")
        self._check_open()
        started = time.monotonic()
        policy = Strict.of(strict)
        if init_from is not None:
            self._config = with_init(self._config, InitFrom.of(init_from), self._root)
        if healthy_only:
            self._config = replace(self._config, healthy_only=True)
        start = self._config.init_from
        run = Run(model, optimizer, scheduler, sampler, extra or {})
        members = self._group
        self._check_same(given)
        described = self._describe(run, run.optimizer)
        run.started.frozen = frozenset(described.live.named.frozen)
        saver = self._saver_of(run)
        self._together(lambda: self._exports.check(model, is_partial=self._leave_out_frozen))
        notes = self._check_saves(saver, described)
        before: dict[str, LeftOutTensor] = {}
        if self._leave_out_frozen:
            known = common_candidates(run, described, members, self._timeout)
            before = digests(local_parts(described, known), members, self._timeout)
        compared: dict[str, LeftOutTensor] = {}
        facts = _facts_of(run.sampler, scale_steps=self._scale_steps)
        is_own, reason = self._start(facts)
        if not is_own and start is not None and not start.fresh_optimizer:
            check_taken({name: run.objects[name] for name in run.whole_optimizers})
        how = RestoreOptions(policy, cast, init, device, grown, Settings.of(settings), data)
        mode = self._options.verify.on_load
        is_weights_alone = False

        def read(checkpoint: Checkpoint, decision: ResumeDecision) -> Read:
            nonlocal is_weights_alone
            is_weights_alone = decision.restored == ("weights",)
            taken = None if decision.init_from is None else under_names(start, checkpoint, model)
            told: list[str] = []
            with initial(checkpoint, taken, told) as opened:
                found = read_for(
                    described,
                    opened,
                    members.rank,
                    part="model" if is_weights_alone else "all",
                    with_optimizer=run.optimizer is not None and not is_weights_alone,
                    strict=policy,
                    cast=cast,
                    init=taken,
                    of_each_rank=run.has_state_of_each_rank,
                    verify="touched" if mode == "full" else mode,
                    threads=self._options.threads,
                    leaves_out=True,
                )
            return replace(found, notes=(*told, *found.notes))

        def load(config: Config) -> tuple[ResumeDecision, Read | None]:
            return load_with(
                read,
                LoadRequest(config=config, run=facts, allow_fresh=allow_fresh, copies=self._copies_of(config)),
                group=members,
                scrub=mode == "full",
                threads=self._options.threads,
                timeout=self._timeout,
                observers=self._observers,
            )

        decision, found = load(own_config(self._config, self._root) if is_own else self._config)
        is_fresh_by_word = allow_fresh and decision.fresh
        if is_own and decision.fresh:  # with `allow_fresh`, and no checkpoint of its own is complete
            notes += decision.warnings
            decision, found = load(self._config)
        elif reason is not None:
            decision = replace(decision, reasons=(reason, *decision.reasons))
        if self._is_copy(decision):
            pass_over(self._root, decision.iteration or 0)  # what is newer on the disk is damaged
            reason = f"the newest complete save is the copy in {self._copies}"
            decision = replace(decision, reasons=(reason, *decision.reasons))
        base: str | None = None
        if found is None:
            self._together(lambda: check_has_content(described, str(self._root)))
            # Restored state is equal on all ranks; new state is compared as the first save compares it.
            notes += self._expected_to_work(lambda: self._describe(run, run.optimizer, compare=True))
        else:
            is_init = decision.init_from is not None
            base = None if decision.init_from is None else str(decision.init_from)
            if found.left_out is not None:
                compared, base = compare(
                    found.left_out,
                    described,
                    run,
                    start=None if is_init else start,
                    group=members,
                    timeout=self._timeout,
                    path=found.path,
                    cast=cast,
                    known=before,
                )
            saved = {} if is_weights_alone or is_init else found.extra
            of_tensors = saved
            if is_init:
                of_optimizer = initial_state(found.extra, start) if start and "optimizer" in decision.restored else {}
                of_tensors = with_modules(of_optimizer, found.extra)
            how = replace(how, only="model" if is_weights_alone else "tensors" if is_init else None)

            def restore() -> list[str]:
                states, of_objects = match_objects(run, found, saved, members.rank, members.world_size, how)
                messages = [
                    *([] if is_weights_alone or is_init else check_state_beside(run, found, saved, how)),
                    *(self._unused_optimizer(run, found) if not is_weights_alone and not is_init else []),
                    *([] if is_weights_alone else self._lonely_model(run, found, saved, how)),
                    *restore_tensors(described, found, of_tensors, how),
                    *of_objects,
                ]
                restore_objects(run, states)
                return messages + restore_sampler(
                    run, found, saved, decision, self._config, how, members.rank, members.world_size
                )

            if decision.initial_step:
                restored = [*(() if data == "new" else (run.sampler,)), *(extra or {}).values()]
                self._together(lambda: check_not_read(restored))
            notes += self._together(restore)[members.rank]
            decision = self._with_parts(run, found, saved, decision, data)
            if found.restored:
                decision = replace(decision, reasons=(*decision.reasons, found.restored))
            if is_init:
                notes += [
                    f"`{name}` saves its own state: if it holds copies of the parameters, such as in float32, copy the "
                    "loaded weights into them before the first step"
                    for name in sorted(run.whole_optimizers)
                ]
            notes += self._restore_rest(saved, decision, check)
            if data == "saved" and "rng" in saved and isinstance(run.sampler, ElasticSampler):
                keep_stream(run.sampler)
            if decision.scaling is not None and decision.scaling.factor != 1 and run.has_scheduler:
                notes.append(
                    "the batch size changed, and with it the number of steps: the scheduler goes on where it was, and "
                    f"steps from {decision.initial_step}"
                )
        if self._leave_out_frozen:
            saver.frozen, messages = frozen_at_start(
                run,
                described,
                members,
                self._timeout,
                before=before,
                compared=compared,
                is_loaded=found is not None,
                source=base,
                of_init=found is not None and decision.init_from is not None,
            )
            notes += messages
        if data == "new":
            decision = replace(decision, data_skip_steps=0, skip_micro_steps=None)
        if not self._scale_steps or run.sampler is None or data == "new":
            decision = with_data_position(decision, run.sampler, data)
        self._begin(saver, decision, is_back=self._options.commit.rollback or is_fresh_by_word)
        resumed(self._observers, decision, started)
        told = {line for of_rank in self._together(lambda: notes)[: self._group.rank] for line in of_rank}
        for line in notes:
            if line not in told:  # else a rank before this one says it
                _log.warning("resume: %s", line)
        return replace(decision, warnings=(*decision.warnings, *notes))

    def _check_same(self, given: Mapping[str, object]) -> None:
        """Refuse ranks with different arguments of the constructor, a different configuration or those of `resume`."""
        own = {name: comparable(value) for name, value in given.items() if name not in _OF_EACH_RANK}
        known = {one.name: comparable(getattr(self._config, one.name)) for one in fields(self._config)}
        every = {"save_every": self._every_steps}  # of a duration that of rank 0 is used
        check_same(self._together(lambda: {**known, **self._given, **own, **every}), "all ranks give the same")

    def _with_parts(
        self, run: Run, found: Read, saved: Mapping[str, Any], decision: ResumeDecision, data: str
    ) -> ResumeDecision:
        """The decision with every part that the run restores."""
        kinds = saved.get("trainer", {}).get(KINDS, {})
        names = {name for name, one in run.objects.items() if kind_of(one) in (None, kinds.get(name, kind_of(one)))}
        names |= set(run.per_rank) if found.world_size == self._group.world_size else set()
        skips = isinstance(run.sampler, ElasticSampler) and bool(decision.data_skip_steps)
        has_position = run.sampler is not None and data == "saved" and ("sampler" in saved or skips)
        has_optimizer = run.optimizer is not None or bool(run.whole_optimizers)
        return with_parts(decision, saved, names=names, has_position=has_position, has_optimizer=has_optimizer)

    def _start(self, facts: RunFacts) -> tuple[bool, str | None]:
        """Whether the run starts from its own newest checkpoint, as rank 0 sees it, and the reason."""
        if self._options.commit.rollback:
            return False, None
        known = replace(facts, world_size=self._group.world_size)
        copies = None if self._copies is None else str(self._copies)
        is_own, reason = self._together(
            lambda: start_of(self._config, self._root, known, copies) if self._group.rank == 0 else None
        )[0]
        return is_own, reason

    def _check_saves(self, saver: Saver, described: Described) -> list[str]:
        """Check that saves can succeed. If no saves are due, a fault is a warning."""
        extra: dict[str, Any] = {}

        def check_own() -> None:
            extra.update(check_state(saver, described))
            obstacle = protocol.obstacle(self._root) if self._group.rank == 0 else None
            if obstacle is not None and not (self._options.commit.takeover and isinstance(obstacle, ClaimedError)):
                raise obstacle

        def check_all() -> None:
            self._together(check_own)
            dry_run(saver, described, extra, self._every_steps or 1)

        return self._expected_to_work(check_all)

    def _expected_to_work(self, work: Callable[[], object]) -> list[str]:
        """Run a check of saves. A failure is an error if saves are due, else a warning."""
        try:
            work()
        except GroupError:
            raise
        except ReshardError as error:
            if self._has_interval:
                raise
            return [f"a save would fail: {error.message}"]
        return []

    def _describe(self, run: Run, optimizer: object, *, compare: bool = False) -> Described:
        return describe(
            run.model,
            optimizer,
            objects=run.objects,
            mesh=self._ranks.mesh,
            group=self._group,
            timeout=self._timeout,
            compare=compare,
            lifts=not save_format(self._options.format).traits.rank_folders,
            object_name=object_name,
            started=run.started,
        )

    def _unused_optimizer(self, run: Run, found: Read) -> list[str]:
        # An evaluation has no optimizer, and saves nothing.
        if run.optimizer is not None or run.whole_optimizers or not found.has_optimizer or not self._has_interval:
            return []
        return ["the checkpoint has state of an optimizer, and the run has no optimizer: the state is not loaded"]

    def _lonely_model(self, run: Run, found: Read, saved: Mapping[str, Any], how: RestoreOptions) -> list[str]:
        # If the optimizer is not saved, it is expected to restart.
        if run.optimizer is None:
            return []
        return check_has_optimizer(
            found, saved, how if self._save_optimizer else replace(how, strict=replace(how.strict, missing="keep"))
        )

    def _restore_rest(
        self,
        saved: Mapping[str, Any],
        decision: ResumeDecision,
        check: Callable[[Mapping[str, Any]], bool | None] | None,
    ) -> list[str]:
        """Restore the last part: call the check, then restore the random streams, which it may have used."""
        members, notes = self._group, list[str]()
        known = saved.get("run")
        if known is not None:
            if check is not None:
                self._together(lambda: check_restored(check, known))
            self._root_seed = count("root_seed", known["root_seed"], 0, MAX_SEED)
            notes += self._together(
                lambda: restore_random(
                    saved,
                    decision.iteration or 0,
                    rank=members.rank,
                    world_size=members.world_size,
                    coordinate=self._ranks.coordinate,
                    root_seed=self._root_seed or 0,
                )
            )[members.rank]
            if known["interrupted"]:
                notes.append(
                    f"saved after an exception in the step after {known['step']}: random streams and buffers may have "
                    "moved on in it"
                )
        return notes + self._compare_environment(saved)

    def _compare_environment(self, saved: Mapping[str, Any]) -> list[str]:
        """Rank 0's differences, on all ranks."""
        if "environment" not in saved:
            return []
        compare = environments.check if self._environment.must_match else environments.compare
        values = self._together(
            lambda: (
                [str(one) for one in compare(saved["environment"], self._record())] if self._group.rank == 0 else None
            )
        )
        return list(values[0])

    def _record(self) -> dict[str, Any]:
        sizes = None
        if self._ranks.mesh is not None and self._ranks.mesh.mesh_dim_names is not None:
            sizes = dict(zip(self._ranks.mesh.mesh_dim_names, self._ranks.mesh.mesh.shape, strict=True))
        given = self._environment
        return environments.record(
            world_size=self._group.world_size, mesh=sizes, config=given.config, dataset=given.dataset, code=given.code
        )

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Run a function on all ranks; an error of one rank is raised on all."""
        return Collective(session(self._group, "resume"), self._timeout).each(work)

    def _begin(self, saver: Saver, decision: ResumeDecision, *, is_back: bool) -> None:
        """Begin the run: agree on its identifier and its seed, and claim the root."""
        run = saver.run
        seed = torch.initial_seed() % (MAX_SEED + 1) if self._root_seed is None else self._root_seed
        word, self._root_seed = self._together(lambda: [secrets.token_hex(8), seed])[0]
        saver.root_seed = self._root_seed
        if self._board is not None:
            run.rendezvous = Rendezvous(self._group, self._board, word, self._drift)
        run.last = run.saved = decision.initial_step
        if decision.iteration is not None and self._saves_where_it_loads(decision):
            # Only scaled steps may begin below the checkpoint, not a loop that starts over by mistake.
            run.above = decision.iteration if decision.initial_step < decision.iteration else 0
        if is_back:
            pass_over(self._root, -1 if decision.fresh else decision.initial_step)
        if self._has_interval or self._options.commit.takeover:
            every = self._every_steps or 1
            first = (run.last // every + 1) * every
            is_below = is_back or first < run.above

            def claim_roots() -> None:
                if self._group.rank == 0:
                    claim(saver, self, step=first, is_below=is_below, takeover=self._options.commit.takeover)
                if saver.copier is not None:
                    saver.copier.start()

            self._together(claim_roots)
        if self._interrupts.save_on_exception:
            run.watch()
        saver.begin()
        self._saver = saver

    def _saver_of(self, run: Run) -> Saver:
        return Saver(
            run=run,
            root=self._root,
            group=self._group,
            options=self._options,
            mesh=self._ranks.mesh,
            coordinate=self._ranks.coordinate,
            root_seed=0,  # agreed when the run begins
            timeout=self._timeout,
            is_async=self._async,
            overlap=self._overlap,
            with_optimizer=self._save_optimizer,
            exports=self._exports,
            observers=self._observers,
            record=self._record,
            max_failures=self._interrupts.max_failures,
            copier=self._copier(),
            has_mirror=self._mirror is not None,
        )

    def _copier(self) -> Copier | None:
        if self._mirror is None or self._group.rank:
            return None
        takeover = self._options.commit.takeover
        return Copier(
            self._root, self._mirror, save_every=self._every_steps, observers=self._observers, takeover=takeover
        )

    def _copies_of(self, config: Config) -> str | None:
        """The second root of what a configuration loads: of the run itself, that of its copies."""
        if self._copies is None or not config.load_path:
            return None
        return str(self._copies) if locate(config.load_path).resolved() == self._root.resolved() else None

    def _is_copy(self, decision: ResumeDecision) -> bool:
        return decision.path is not None and locate(decision.path).parent == self._copies

    @property
    def _has_interval(self) -> bool:
        return self._every_steps is not None or self._every_s is not None

    def _saves_where_it_loads(self, decision: ResumeDecision) -> bool:
        if decision.path is None:
            return False
        return locate(decision.path).resolved().parent == self._root.resolved() or self._is_copy(decision)

    # -------------------------------------------------------------------------------------------------------- saving

    def step(
        self, step: int, *, loss: object = None, metrics: Mapping[str, Any] | None = None, save: bool = False
    ) -> None:
        """Complete a step: advance the sampler, save if a save is due, and handle signals.

        All ranks call this at the end of every step, after the steps of the optimizer and the schedulers. A save that
        fails because of missing space or a timeout is logged, and training continues; the third consecutive failure
        raises.

        Args:
            step: its number, counting on from the decision's `initial_step`; the iteration, if it is saved. If steps
                were omitted (`step` is called for every tenth), the sampler advances by their number.
            loss: of this step, for health and the log: a number or a tensor of one element.
            metrics: other numbers by name, for the log of saves.
            save: save also if no save is due; the same on all ranks.

        Raises:
            ArgumentError: `resume` was not called, or `close` was; the step does not count up.
            SystemExit: a signal was received, and the save is published (code 75) or failed.
            ReshardError: the state cannot be saved, or `max_failures` consecutive saves have failed.
        """
        self._step(step, loss, metrics, save=save)

    def _step(
        self, step: int, loss: object, metrics: Mapping[str, Any] | None, *, save: bool
    ) -> tuple[bool, SaveReport | PendingSave[SaveReport] | None]:
        """As `step`. Returns whether a save was due, the same on all ranks, and the save unless it has failed."""
        saver = self._running()
        run = saver.run
        step = count("step", step)
        n_new = step - run.last
        if n_new < 1:
            raise ArgumentError(
                f"`step` is {step}, expected more than {run.last}, the last completed step",
                hint="the first step after `resume` is `initial_step + 1`",
            )
        number = None if loss is None else number_of(loss, "loss")
        numbers = {name: number_of(value, f"metrics[{name!r}]") for name, value in (metrics or {}).items()}
        run.last = step
        run.n_updates = 0
        if isinstance(run.sampler, ElasticSampler):
            run.sampler.step(n_new)
        run.loss, run.metrics = number, numbers
        run.healthy = self._health(step, run.loss, run.metrics)
        every = self._every_steps
        is_due = save or (every is not None and step // every > (step - n_new) // every)
        if not saver.is_reserved:
            saver.is_reserved = True
            if not is_due:  # else the save itself allocates the memory, which may be in use at the next step
                self._reserve(saver, step)
        if run.rendezvous is None:
            return is_due, self._step_without_board(saver, step) if is_due else None
        by_clock = (
            self._every_s is not None and self._group.rank == 0 and time.monotonic() - run.saved_at >= self._every_s
        )
        if self._signals.seen is not None:
            left_s = max(self._interrupts.grace_s - self._signals.age_s(), EXIT_GRACE_S)
            who = f"{self._signals.seen} on rank {self._group.rank}"
            run.rendezvous.post(step, who, leave=True, seconds=left_s)
        elif by_clock:
            run.rendezvous.post(step, "it is time", leave=False, seconds=self._timeout)
        try:
            notice = run.rendezvous.poll(step, self._timeout)
        except ReshardError as error:
            if self._signals.seen is not None:
                exit_process(self._group, self._signals, f"the ranks did not meet: {error}", error)
            self._not_met(saver, error)
            notice = None
        if notice is not None and notice.leave:
            save_and_exit(saver, self._signals, step, notice.why, notice.seconds)
        is_due = is_due or notice is not None
        return is_due, saver.save_due(step) if is_due else None

    def _not_met(self, saver: Saver, error: ReshardError) -> None:
        """The ranks did not meet on this rank to save; on others they may have. Returns if the training goes on."""
        saver.failed(error, "the ranks did not meet to save")

    def save(self, step: int | None = None, *, blocking: bool | None = None) -> SaveReport | PendingSave[SaveReport]:
        """Save now, even if no save is due. All ranks call it.

        Args:
            step: the iteration; None: the step of the last call of `step`.
            blocking: whether to wait until it is published; None: as `async_save`. A group without sessions waits.

        Returns:
            The report, or the save in progress.

        Raises:
            ReshardError: as `reshard.save`, also if the save before, in the background, had failed.
        """
        saver = self._running()
        return saver.save(
            saver.run.last if step is None else count("step", step),
            blocking=self._one_channel or (not self._async if blocking is None else blocking),
        )

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """Wait for the save in the background, if there is one.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            The report of the last save in the background; None: there was none.

        Raises:
            TimeoutError: it has not ended in time.
            ReshardError: it failed.
        """
        return None if self._saver is None else self._saver.wait(timeout)

    def close(self) -> None:
        """Wait for the save in the background, and restore the previous signal handlers. Nothing is saved afterwards.

        With `mirror`, rank 0 then waits for the copies, and a warning says what is not copied within `Mirror.wait_s`.

        Raises:
            ReshardError: that save failed.
        """
        self._let_go()
        try:
            self.wait()
        finally:
            self._close_copier()

    def _close_copier(self, seconds: float | None = None) -> None:
        if self._saver is not None and self._saver.copier is not None:
            self._saver.copier.close(seconds)

    def __repr__(self) -> str:
        where = f"<reshard.torch.Checkpointer {self._root}"
        if self._saver is None:
            return f"{where}, {'closed' if self._is_closed else 'not resumed'}>"
        run = self._saver.run
        is_saved = "" if run.saved == NOT_SAVED else f", saved {run.saved}"
        return f"{where}, step {run.last}{is_saved}{', closed' if self._is_closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end()
            self.close()
            return
        try:
            if self._interrupts.save_on_exception and self._saver is not None and not isinstance(error, SystemExit):
                save_after(self._saver, error, self._interrupts.grace_s)
            self._let_go()
            if self._saver is not None:
                self._saver.wait_after_error(self._interrupts.grace_s)
            self._close_copier(self._interrupts.grace_s)
        except Exception as other:  # noqa: BLE001  what ended the block matters more
            _log.error("closing the checkpointer: %s", other)

    def _end(self) -> None:
        """Save the last step, or say which steps are not saved, at the end of a block in which saves are due."""
        saver = self._saver
        if saver is None or self._is_closed or not self._has_interval or saver.run.last <= max(saver.run.saved, 0):
            return
        run = saver.run
        if self._save_at_end:
            self.save(run.last)
        elif self._group.rank == 0:
            first = max(run.saved, 0) + 1
            steps = f"step {first} is" if first == run.last else f"steps {first} to {run.last} are"
            _log.warning("%s not saved: no save was due since; `save_at_end=True` saves the last one", steps)

    def _let_go(self) -> None:
        """Remove the signal handlers and the hooks of optimizers."""
        self._is_closed = True
        self._signals.close()
        session = find_session(self._root) if self._group.rank == 0 else None
        if session is not None:
            session.leave(self)
        if self._saver is not None:
            self._saver.run.unwatch()
            self._saver.close()

    def _reserve(self, saver: Saver, step: int) -> None:
        """Reserve memory for the first save in the background. A failure is one of that save, told earlier."""
        if not self._async or self._overlap or self._one_channel:
            return
        try:
            warnings = self._expected_to_work(lambda: reserve(saver, step))
        except GroupError as error:
            saver.failed(error, "the ranks did not prepare the first save")
        else:
            for warning in warnings if self._group.rank == 0 else ():
                _log.warning("%s", warning)

    def _step_without_board(self, saver: Saver, step: int) -> SaveReport | PendingSave[SaveReport] | None:
        """For a group without messages: handle signals at steps with a due save, which are the same on all ranks."""
        seen = [why for why in self._together(lambda: self._signals.seen) if why is not None]
        if seen:
            save_and_exit(saver, self._signals, step, seen[0], self._interrupts.grace_s)
        return saver.save_due(step)

    def _check_open(self) -> None:
        # Without the hooks a save in the background could copy parameters while they change.
        if self._is_closed:
            raise ArgumentError(
                f"the Checkpointer of {show(str(self._root))} is closed",
                hint="close it, or leave its `with` block, after the last step; or make another Checkpointer",
            )

    def _running(self) -> Saver:
        self._check_open()
        if self._saver is None:
            raise ArgumentError("`resume` has not been called: it gets the model and the other objects to save")
        return self._saver


def _check_partial(options: SaveOptions, exports: SaveExports) -> None:
    """Refuse options that need all tensors beside `leave_out_frozen`."""
    if save_format(options.format).traits.rank_folders:
        raise ArgumentError("`leave_out_frozen` needs the format checkpoint2, and `format` is another one")
    other = "integrated" if exports.given.integrated else "merge" if exports.merge else None
    if other is not None:
        raise ArgumentError(
            f"`{other}` writes whole weights, and `leave_out_frozen` leaves some out of the saves",
            hint="leave one of the two out; `hf_every` without `merge` writes the adapters of a model of peft",
        )


def _facts_of(sampler: object, *, scale_steps: bool) -> RunFacts:
    # A missing optimizer is detected later, since plain SGD has no tensors.
    facts = RunFacts(has_optimizer=False, scale_steps=scale_steps)
    if not isinstance(sampler, ElasticSampler):
        return facts
    return replace(facts, global_batch_size=sampler.global_batch_size, steps_per_epoch=sampler.steps_per_epoch)
