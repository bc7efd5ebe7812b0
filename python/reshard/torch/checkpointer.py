"""The three lines of a trainer: `Checkpointer`, `resume` and `step`.

    checkpointer = Checkpointer("output/checkpoint", save_every=500, keep=5)
    decision = checkpointer.resume(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for step in range(decision.initial_step + 1, n_steps + 1):
        ...
        checkpointer.step(step, loss=loss)

Here is put together what others do: `saving` makes a checkpoint of what is live, `preflight` finds out at the start
whether that can succeed, `load_with` chooses what is resumed from, `loading` reads it and `resuming` puts it back,
`emergency` brings the ranks to the same step when a signal came, and `leaving` saves there and ends. What is decided
here is when to save.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch

from reshard.arguments import checked
from reshard.checkpoint import Verify as VerifyOption
from reshard.collective import Collective
from reshard.config import Config, as_config
from reshard.errors import ArgumentError, ClaimedError, GroupError, ReshardError
from reshard.group import resolve, session
from reshard.resume import RunFacts
from reshard.storage import protocol
from reshard.storage.inputs import read_input
from reshard.storage.location import locate
from reshard.torch import environment as environments
from reshard.torch.checks import MAX_SEED, count, seconds
from reshard.torch.emergency import LAST_WORDS_S, Rendezvous, Signals, board_of
from reshard.torch.health import LossHealth
from reshard.torch.leaving import leave, save_after, save_and_leave
from reshard.torch.loading import read_for
from reshard.torch.preflight import check_has_content, check_state, claim, rehearse
from reshard.torch.resuming import (
    How,
    check_restored,
    counted,
    refuse_lonely_model,
    restore_objects,
    restore_random,
    restore_sampler,
    restore_tensors,
)
from reshard.torch.run import Run, interval, number_of, object_name
from reshard.torch.sampler import ElasticSampler
from reshard.torch.saving import Saver
from reshard.torch.state import describe
from reshard.verbs.load import load_with, pass_over
from reshard.verbs.start import own_config, start_of
from reshard.words import show
from reshard.write.save import check_save_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from types import TracebackType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.checkpoint import Checkpoint, Verify
    from reshard.config import ConfigLike
    from reshard.resume import ResumeDecision
    from reshard.torch.health import Health
    from reshard.torch.loading import Read
    from reshard.torch.state import Described
    from reshard.write.save import PendingSave, SaveReport

__all__ = ["Checkpointer"]

_log = logging.getLogger("reshard")

_MAX_THREADS = 1024
_MAX_CONFIG_BYTES = 16 << 20


class Checkpointer:
    """Saves a training run and resumes it: model, optimizer, schedulers, data position, random state, on any ranks.

    Every rank makes one with the same arguments and makes the same calls. `resume` comes first: it says what the run
    consists of, and fills it from the newest checkpoint that proves whole, if there is one. `step` comes at the end of
    every step.

    As a context manager it waits for the last save at the end of the block; else call `close`.

    What would make saves fail is an error of the constructor or of `resume`: options, an unwritable root, a root that
    another job writes into or that is at a later step, state that cannot be saved. `resume` claims the root for this
    process. With `save_every=None`, as for an evaluation beside a training, it does not, and these are warnings of the
    decision.

    Steps are steps: `initial_step` is the step that was saved, whatever the batch size is now. The position in the data
    is that of the sampler, which counts samples.

    Signals (SIGTERM and SIGUSR1): when one reaches any rank, all save at the same step, the next or the one after it,
    wait until it is published and exit with code 75; with 128 + the signal's number if the save failed. `step` is where
    that happens.

    Args:
        root: the checkpoint root.
        prefix: first part of the names of shard files.
        save_every: steps from one save to the next; or a time, "30min", "1h30min", "90s", by rank 0's clock; None: save
            only when asked.
        keep: the newest iterations that are kept; None: all. About one save in `keep` is read back, see `reshard.save`.
        keep_every: keep every iteration that is a multiple of this.
        keep_best: `(metric, n)`: keep the n iterations with the smallest value of a metric, such as "loss".
        async_save: write in the background; the step waits only until its tensors are copied. A group without a method
            `session` cannot serve two threads at once: with one, saves are waited for, and a warning says so.
        overlap: with `async_save`, `step` does not wait for copies of what only an optimizer's step changes, its
            parameters and its state: a hook makes its next step wait. Then nothing else may change them: no step that
            is replayed from a CUDA graph, and no update by hand.
        dedup: write each shard once instead of once for every rank that holds it.
        check_replicas: compare what several ranks hold copies of, and refuse a save if they differ, as in
            `reshard.save`. Buffers may differ: where they do, each rank gets its own back, and another number of ranks
            the first one's, with a warning. Those that DDP broadcasts are the sender's.
        may_differ: patterns of parameters and of state (`<slot>.<parameter>`) that differ between ranks on purpose.
            Each rank gets its own back; another number of ranks is refused.
        verify: how what is loaded is proven, as in `reshard.load`.
        verify_after_save: read back what was written before it is published.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: torch's default group if there is one, else this process alone.
        mesh: the mesh of all ranks, where tensors do not tell it.
        health: called after each step as `health(step, loss, metrics)`, says whether the run is healthy; a checkpoint
            is marked with what it said of its step. Default: the loss is finite. Rank 0's counts.
        healthy_only: resume only from checkpoints that were marked healthy.
        environment: what is to be recorded of the run besides versions and hardware: the arguments `config`, `dataset`
            and `code` of `reshard.torch.environment.record`.
        strict_environment: refuse to resume in an environment that may change numbers. Otherwise differences are
            warnings of the decision.
        seed: the seed from which random streams are derived in another world; None: what torch was seeded with on
            rank 0.
        coordinate: where this rank's random streams belong, by mesh axis, as in `reshard.torch.rng.capture`.
        signals: that ask for a save and the end.
        grace_s: seconds from a signal until ranks stop waiting for each other; and, when the block ends in an
            exception, for a save in the background that does not move: other ranks may be gone.
        drift: steps by which the host of one rank can be ahead of another's. 1 where a step waits for all ranks, as on
            the CPU, or where `step` is told each loss; where hosts run ahead of their devices, the steps from one wait
            to the next.
        save_on_exception: save as well when the block ends in an exception, if all ranks' blocks do within `grace_s`
            and no optimizer was in the midst of its step. Such a checkpoint stands at the last complete step, but
            random streams and buffers may have moved on in the step that failed; resuming from it says so.
        durable: as in `reshard.save`.
        private: as in `reshard.save`.
        timeout: seconds that ranks wait for each other in one meeting, the time to write or to read included.
        threads: threads of copies.
        format: as in `reshard.save`. In Checkpoint 1.0 (`use_legacy_format`) epoch and step of the names are those of
            an `ElasticSampler`, where there is one.
        sink_size: as in `reshard.save`.
        save_network_params: as in `reshard.save`.
        save_trainable_params: the parameters that require gradients are saved a second time, alone; of Checkpoint 1.0.
        only_save_strategy: as in `reshard.save`.
        integrated_save: each save is written once more, as whole tensors, into `<root>_integrated`, see
            `reshard.verbs.integrate`.
        rollback: the run is meant to be below the newest iteration of the root: what is above its first step is passed
            over from its first save on. With `from_config` it starts from what the configuration says, whatever the
            root holds.
        takeover: claim the root even if another job that writes into it seems to be alive; the saves of that one fail
            from then on.

    Raises:
        ArgumentError: an option has a value that is not accepted, or does not go with another one; `save_every` is a
            time and ranks cannot leave word for each other.

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

    @checked
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        prefix: str | None = None,
        save_every: int | str | None = None,
        keep: int | None = 5,
        keep_every: int | None = None,
        keep_best: tuple[str, int] | None = None,
        async_save: bool = True,
        overlap: bool = False,
        dedup: bool = True,
        check_replicas: bool = True,
        may_differ: Collection[str] = (),
        verify: Verify = "touched",
        verify_after_save: bool = False,
        group: object = None,
        mesh: DeviceMesh | None = None,
        health: Health | None = None,
        healthy_only: bool = False,
        environment: Mapping[str, Any] | None = None,
        strict_environment: bool = False,
        seed: int | None = None,
        coordinate: Mapping[str, int] | None = None,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace_s: float = 25.0,
        drift: int = 1,
        save_on_exception: bool = False,
        durable: bool = True,
        private: bool = False,
        timeout: float = 1800.0,
        threads: int | None = None,
        format: Literal["checkpoint2", "checkpoint1"] = "checkpoint2",  # noqa: A002
        sink_size: int | None = None,
        save_network_params: bool = False,
        save_trainable_params: bool = False,
        only_save_strategy: bool = False,
        integrated_save: bool = False,
        rollback: bool = False,
        takeover: bool = False,
    ) -> None:
        self._root = Path(root)
        self._every_steps, self._every_s = interval(save_every)
        self._options: dict[str, Any] = {
            "prefix": prefix,
            "keep": keep,
            "keep_every": keep_every,
            "keep_best": keep_best,
            "dedup": dedup,
            "check_replicas": check_replicas,
            "may_differ": tuple(may_differ),
            "verify_after_save": verify_after_save,
            "durable": durable,
            "private": private,
            "threads": threads,
            "format": format,
            "sink_size": sink_size,
            "save_network_params": save_network_params,
            "only_save_strategy": only_save_strategy,
        }
        check_save_options(
            format=format,
            prefix=prefix,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            sink_size=sink_size,
            save_network_params=save_network_params,
            only_save_strategy=only_save_strategy,
        )
        if threads is not None:
            count("threads", threads, 1, _MAX_THREADS)
        if verify not in get_args(VerifyOption):
            raise ArgumentError(f"`verify` is {verify!r}; {', '.join(map(repr, get_args(VerifyOption)))} are accepted")
        unknown = sorted(set(environment or {}) - set(signature(environments.record).parameters))
        if unknown:
            raise ArgumentError(
                f"`environment` has {show(str(unknown[0]))}", hint="its entries are `config`, `dataset` and `code`"
            )
        self._rollback, self._takeover = rollback, takeover
        self._with_trainable, self._is_integrated = save_trainable_params, integrated_save
        self._config = Config(load_path=os.fspath(self._root), resume=True, healthy_only=healthy_only, sink_mode=False)
        if overlap and not async_save:
            raise ArgumentError("`overlap` is about saves in the background", hint="give `async_save=True`, too")
        self._async, self._overlap, self._verify, self._mesh = async_save, overlap, verify, mesh
        self._save_optimizer = True
        self._scale_steps = False
        self._health: Health = health or LossHealth()
        self._environment, self._strict_environment = dict(environment or {}), strict_environment
        self._coordinate = coordinate
        self._timeout, self._grace_s = seconds("timeout", timeout), seconds("grace_s", grace_s)
        self._save_on_exception = save_on_exception
        self._root_seed = None if seed is None else count("seed", seed, 0, MAX_SEED)
        self._group = resolve(group)
        self._one_channel = self._group.world_size > 1 and not hasattr(self._group, "session")
        if self._async and self._one_channel:
            self._async = False
            _log.warning("the group has no method `session(label)`: saves are not written in the background")
        self._board, self._drift = board_of(self._group), count("drift", drift, 1)
        if self._board is None and self._every_s is not None:
            raise ArgumentError(
                "saving by the clock needs a group on which ranks can leave word for each other",
                hint="give `save_every` in steps, or the group the methods `post(name, text)` and `read(name)`",
            )
        self._signals = Signals(signals)
        self._saver: Saver | None = None

    @classmethod
    def from_config(cls, config: ConfigLike, **options: Any) -> Self:
        """Made of a configuration in the original's words: a YAML file, a mapping or a `Config`.

        It says what is loaded, which may be another root or one iteration, and whether the counters go on; where to
        save, how often and how; and the rules of data and health. What is loaded is where the run starts for the first
        time: if the folder that it saves into holds checkpoints that are further on, as after a crash, it goes on from
        the newest of these, and the decision says so.

        When the global batch size changes, steps are scaled as MindSpore Transformers does.

        Args:
            config: the configuration; its digest is recorded in the environment.
            options: further arguments of `Checkpointer`, which count more than what the configuration says. `root` is
                where it saves.

        Raises:
            ConfigError: the configuration is not one.
            ArgumentError: it does not say where to save, and `root` is not given.

        Example:
            >>> checkpointer = Checkpointer.from_config({
            ...     "load_checkpoint": "run", "resume_training": True, "output_dir": "out",
            ...     "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 500, "async_save": True}],
            ... }, signals=())
        """
        known = as_config(config)
        said = {
            "root": known.save_path or (known.load_path if known.resume else None) or None,
            "prefix": known.prefix,
            "save_every": known.save_every,
            "keep": known.keep,
            "async_save": known.async_save,
            "dedup": known.dedup,
            "integrated_save": known.integrated_save,
            "only_save_strategy": known.only_save_strategy,
        }
        if known.legacy_format or known.only_save_strategy:  # strategy files are those of Checkpoint 1.0
            said |= {
                "format": "checkpoint1",
                "sink_size": known.sink_size if known.sink_mode else None,
                "save_network_params": known.save_network_params,
                "save_trainable_params": known.save_trainable_params,
            }
        given = said | options
        if given["root"] is None:
            raise ArgumentError(
                "the configuration does not say where to save", hint="give `root`, or `output_dir` in it"
            )
        if not isinstance(config, Config):
            text = dict(config) if isinstance(config, Mapping) else read_input(config, _MAX_CONFIG_BYTES).decode()
            given["environment"] = {"config": text} | dict(given.get("environment") or {})
        made = cls(**given)
        healthy_only = known.healthy_only or bool(options.get("healthy_only"))
        made._scale_steps = True
        made._config = replace(known, healthy_only=healthy_only, sink_mode=False)  # a loop in torch makes single steps
        made._save_optimizer = known.save_optimizer
        return made

    # ------------------------------------------------------------------------------------------------------ resuming

    def resume(
        self,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: object = None,
        scheduler: object = None,
        sampler: object = None,
        extra: Mapping[str, object] | None = None,
        strict: bool = True,
        cast: bool = False,
        init: Callable[[str, torch.Tensor], torch.Tensor | None] | None = None,
        device: torch.device | str | None = None,
        check: Callable[[Mapping[str, Any]], bool | None] | None = None,
        grown: bool = False,
        allow_fresh: bool = False,
    ) -> ResumeDecision:
        """Say what the run consists of, and go on from the newest checkpoint that proves whole, if there is one.

        Args:
            model: a module, plain or in DDP, FSDP2, tensor parallel; or several, such as stages of a pipeline. Tensors
                on the device `meta` get their content here.
            optimizer: one of torch's, or several; it need not have made a step.
            scheduler: anything with `state_dict` and `load_state_dict`.
            sampler: the same. `step` moves an `ElasticSampler` on; one that the checkpoint knows nothing of skips the
                steps that the decision says.
            extra: anything else with `state_dict` and `load_state_dict`, by name. Rank 0's state is kept, and other
                ranks' must equal it; of what is
                wrapped in `reshard.per_rank` each rank's, which fits the same number of ranks only.
            strict: what is missing in the checkpoint or in the run is an error; else a warning of the decision.
            cast: convert floating-point tensors to the dtype of the live ones, instead of refusing them.
            init: fills buffers that no checkpoint holds, as in `reshard.torch.state.apply`.
            device: where tensors on the device `meta` get their content.
            check: called after everything is restored but the random state, as `check(saved)`, with `step`, `loss` and
                the metrics at the save: to run a forward pass and compare. False refuses to go on.
            grown: the dataset is the saved one with samples appended, as in `ElasticSampler.load_state_dict`.
            allow_fresh: start from nothing if there are checkpoints and none is whole.

        Returns:
            What the run goes on from: `initial_step` steps count as done. What differs from the saved run is in its
            `warnings` and `reasons`.

        Raises:
            ArgumentError: an object without state; `resume` was called before.
            ArgumentError: state that cannot be saved; a root that is at a later step; a model on the device `meta` and
                nothing to resume from.
            ClaimedError: another job writes into the root.
            MismatchError: tensors or objects do not fit, `check` refused, or the environment differs and is strict.
            DamagedFileError, CheckpointNotFoundError, UnsupportedError, GroupError, StorageError: as `reshard.load`.
        """
        if self._saver is not None:
            raise ArgumentError("`resume` was called before", hint="make another Checkpointer")
        run = Run(model, optimizer, scheduler, sampler, extra or {})
        members = self._group
        described = self._describe(run, optimizer)
        saver = self._saver_of(run)
        told = self._check_saves(saver, described)
        facts = _facts_of(run.sampler, scale_steps=self._scale_steps)
        is_own, reason = self._start(facts)
        how = How(strict, cast, init, device, grown)
        is_weights_alone = False

        def read(checkpoint: Checkpoint, decision: ResumeDecision) -> Read:
            nonlocal is_weights_alone
            is_weights_alone = decision.restored == ("weights",)
            return read_for(
                described,
                checkpoint,
                members.rank,
                part="model" if is_weights_alone or optimizer is None else "all",
                verify="touched" if self._verify == "full" else self._verify,
                threads=self._options["threads"],
            )

        def load(config: Config) -> tuple[ResumeDecision, Read | None]:
            return load_with(
                read,
                group=members,
                scrub=self._verify == "full",
                config=config,
                run=facts,
                allow_fresh=allow_fresh,
                threads=self._options["threads"],
                timeout=self._timeout,
            )

        decision, found = load(own_config(self._config, self._root) if is_own else self._config)
        is_fresh_by_word = allow_fresh and decision.fresh
        if is_own and decision.fresh:  # `allow_fresh`, and none of its own is whole
            told += decision.warnings
            decision, found = load(self._config)
        elif reason is not None:
            decision = replace(decision, reasons=(reason, *decision.reasons))
        if found is None:
            self._together(lambda: check_has_content(described, str(self._root)))
            # What is restored is the same on all ranks; what is new is compared as the first save compares it.
            told += self._expected_to_work(lambda: self._describe(run, optimizer, compare=True))
        else:
            saved = {} if is_weights_alone else found.extra

            def restore() -> list[str]:
                return [
                    *([] if is_weights_alone else self._lonely_model(run, found, saved, how)),
                    *restore_tensors(described, found, saved, how),
                    *restore_objects(run, found, saved, members.world_size, how),
                    *restore_sampler(run.sampler, saved, decision, self._config, how),
                ]

            told += self._together(restore)[members.rank]
            told += self._restore_rest(saved, decision, check)
            if decision.scaling is not None and decision.scaling.factor != 1 and run.has_scheduler:
                told.append(
                    "the batch size changed, and with it the number of steps: the scheduler goes on where it was, and "
                    f"steps from {decision.initial_step}"
                )
        if not self._scale_steps or run.sampler is None:
            decision = counted(decision, run.sampler)
        self._begin(saver, decision, is_back=self._rollback or is_fresh_by_word)
        for line in told:
            _log.warning("resume: %s", line)
        return replace(decision, warnings=(*decision.warnings, *told))

    def _start(self, facts: RunFacts) -> tuple[bool, str | None]:
        """Whether the run starts from its own newest checkpoint, as rank 0 sees it, and why."""
        if self._rollback:
            return False, None
        known = replace(facts, world_size=self._group.world_size)
        is_own, reason = self._together(
            lambda: start_of(self._config, self._root, known) if self._group.rank == 0 else None
        )[0]
        return is_own, reason

    def _check_saves(self, saver: Saver, described: Described) -> list[str]:
        """See that saves can succeed; what would make them fail is a warning where none is due."""
        extra: dict[str, Any] = {}

        def check_own() -> None:
            extra.update(check_state(saver, described))
            obstacle = protocol.obstacle(self._root) if self._group.rank == 0 else None
            if obstacle is not None and not (self._takeover and isinstance(obstacle, ClaimedError)):
                raise obstacle

        def check_all() -> None:
            self._together(check_own)
            rehearse(saver, described, extra, self._every_steps or 1)

        return self._expected_to_work(check_all)

    def _expected_to_work(self, work: Callable[[], object]) -> list[str]:
        """Do what a save would do: if that fails, it is an error where saves are due, and else a warning."""
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
            mesh=self._mesh,
            group=self._group,
            timeout=self._timeout,
            compare=compare,
            object_name=object_name,
        )

    def _lonely_model(self, run: Run, found: Read, saved: Mapping[str, Any], how: How) -> list[str]:
        # Who does not save the optimizer knows that it begins anew.
        return refuse_lonely_model(run, found, saved, replace(how, strict=how.strict and self._save_optimizer))

    def _restore_rest(
        self,
        saved: Mapping[str, Any],
        decision: ResumeDecision,
        check: Callable[[Mapping[str, Any]], bool | None] | None,
    ) -> list[str]:
        """What comes after everything that is trained: the check, then the random streams, which it may have used."""
        members, told = self._group, list[str]()
        known = saved.get("run")
        if known is not None:
            if check is not None:
                self._together(lambda: check_restored(check, known))
            self._root_seed = count("root_seed", known["root_seed"], 0, MAX_SEED)
            told += self._together(
                lambda: restore_random(
                    saved,
                    decision.iteration or 0,
                    rank=members.rank,
                    world_size=members.world_size,
                    coordinate=self._coordinate,
                    root_seed=self._root_seed or 0,
                )
            )[members.rank]
            if known["interrupted"]:
                told.append(
                    f"saved after an exception in the step after {known['step']}: random streams and buffers may have "
                    "moved on in it"
                )
        return told + self._compare_environment(saved)

    def _compare_environment(self, saved: Mapping[str, Any]) -> list[str]:
        """Rank 0's differences, on all ranks."""
        if "environment" not in saved:
            return []
        compare = environments.check if self._strict_environment else environments.compare
        values = self._together(
            lambda: (
                [str(one) for one in compare(saved["environment"], self._record())] if self._group.rank == 0 else None
            )
        )
        return list(values[0])

    def _record(self) -> dict[str, Any]:
        sizes = None
        if self._mesh is not None and self._mesh.mesh_dim_names is not None:
            sizes = dict(zip(self._mesh.mesh_dim_names, self._mesh.mesh.shape, strict=True))
        return environments.record(**{"world_size": self._group.world_size, "mesh": sizes} | self._environment)

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on all ranks: what one raises, all raise."""
        return Collective(session(self._group, "resume"), self._timeout).each(work)

    def _begin(self, saver: Saver, decision: ResumeDecision, *, is_back: bool) -> None:
        """Everything is in place: agree on what the run is known by, and claim the root."""
        run = saver.run
        seed = torch.initial_seed() % (MAX_SEED + 1) if self._root_seed is None else self._root_seed
        word, self._root_seed = self._together(lambda: [secrets.token_hex(8), seed])[0]
        saver.root_seed = self._root_seed
        if self._board is not None:
            run.rendezvous = Rendezvous(self._group, self._board, word, self._drift)
        run.last = run.saved = decision.initial_step
        if decision.iteration is not None and self._saves_where_it_loads(decision):
            # Only steps that were scaled begin below the checkpoint. A loop that starts over by mistake must not.
            run.above = decision.iteration if decision.initial_step < decision.iteration else 0
        if is_back:
            pass_over(self._root, -1 if decision.fresh else decision.initial_step)
        if self._has_interval or self._takeover:
            every = self._every_steps or 1
            first = (run.last // every + 1) * every
            is_below = is_back or first < run.above
            self._together(
                lambda: (
                    claim(saver, step=first, is_below=is_below, takeover=self._takeover)
                    if self._group.rank == 0
                    else None
                )
            )
        if self._save_on_exception:
            run.watch()
        saver.begin()
        self._saver = saver

    def _saver_of(self, run: Run) -> Saver:
        return Saver(
            run=run,
            root=self._root,
            group=self._group,
            options=self._options,
            mesh=self._mesh,
            coordinate=self._coordinate,
            root_seed=0,  # agreed when the run begins
            timeout=self._timeout,
            is_async=self._async,
            overlap=self._overlap,
            with_optimizer=self._save_optimizer,
            with_trainable=self._with_trainable,
            is_integrated=self._is_integrated,
            record=self._record,
        )

    @property
    def _has_interval(self) -> bool:
        return self._every_steps is not None or self._every_s is not None

    def _saves_where_it_loads(self, decision: ResumeDecision) -> bool:
        if decision.path is None:
            return False
        return locate(decision.path).resolved().parent == locate(self._root).resolved()

    # -------------------------------------------------------------------------------------------------------- saving

    def step(self, step: int, *, loss: object = None, metrics: Mapping[str, Any] | None = None) -> None:
        """A step is complete: move the sampler on, save if it is time, and heed signals.

        To be called by all ranks at the end of every step, when the optimizer and the schedulers have made theirs. A
        save that fails for want of room or of an answer is logged, and training goes on; the third in a row raises.

        Args:
            step: its number, counting on from the decision's `initial_step`; the iteration, if it is saved. Where
                steps were left out (`step` is called for every tenth), the sampler moves on by so many.
            loss: of this step, for health and the log: a number or a tensor of one element.
            metrics: other numbers by name, for the log of saves.

        Raises:
            ArgumentError: `resume` was not called; the step does not count up.
            SystemExit: a signal came, and the save is done (code 75) or failed.
            ReshardError: what is to be saved cannot be, or three saves in a row have failed.
        """
        saver = self._running()
        run = saver.run
        n_new = count("step", step) - run.last
        if n_new < 1:
            raise ArgumentError(f"step {step} is complete, and so was step {run.last} before it: steps count up")
        run.last = step
        run.n_updates = 0
        if isinstance(run.sampler, ElasticSampler):
            run.sampler.step(n_new)
        run.loss = None if loss is None else number_of(loss)
        run.metrics = {name: number_of(value) for name, value in (metrics or {}).items()}
        run.healthy = self._health(step, run.loss, run.metrics)
        is_due = self._every_steps is not None and step % self._every_steps == 0
        if run.rendezvous is None:
            if is_due:
                self._step_without_board(saver, step)
            return
        by_clock = (
            self._every_s is not None and self._group.rank == 0 and time.monotonic() - run.saved_at >= self._every_s
        )
        if self._signals.seen is not None:
            left_s = max(self._grace_s - self._signals.age_s(), LAST_WORDS_S)
            who = f"{self._signals.seen} on rank {self._group.rank}"
            run.rendezvous.ask(step, who, leave=True, seconds=left_s)
        elif by_clock:
            run.rendezvous.ask(step, "it is time", leave=False, seconds=self._timeout)
        try:
            notice = run.rendezvous.look(step, self._timeout)
        except ReshardError as error:
            if self._signals.seen is not None:
                leave(self._group, self._signals, f"the ranks did not meet: {error}", saved=False)
            saver.failed(error, "the ranks did not meet to save")
            notice = None
        if notice is not None and notice.leave:
            save_and_leave(saver, self._signals, step, notice.why, notice.seconds)
        if is_due or notice is not None:
            saver.save_due(step)

    def save(self, step: int | None = None, *, blocking: bool | None = None) -> SaveReport | PendingSave[SaveReport]:
        """Save now, whatever is due. All ranks call it.

        Args:
            step: the iteration; None: the step that was last told to `step`.
            blocking: whether to wait until it is published; None: as `async_save` says. A group without sessions waits.

        Returns:
            What was saved, or the save in progress.

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
            timeout: seconds; None: as long as it takes.

        Returns:
            What was saved last in the background; None: nothing was.

        Raises:
            TimeoutError: it has not ended in time.
            ReshardError: it failed.
        """
        return None if self._saver is None else self._saver.wait(timeout)

    def close(self) -> None:
        """Wait for the save in the background, and leave signals to whoever had them before.

        Raises:
            ReshardError: that save failed.
        """
        self._let_go()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            if self._save_on_exception and self._saver is not None and not isinstance(error, SystemExit):
                save_after(self._saver, error, self._grace_s)
            self._let_go()
            if self._saver is not None:
                self._saver.wait_after_error(self._grace_s)
        except Exception as other:  # noqa: BLE001  what ended the block matters more
            _log.error("closing the checkpointer: %s", other)

    def _let_go(self) -> None:
        """Leave signals and optimizers to others."""
        self._signals.close()
        if self._saver is not None:
            self._saver.run.unwatch()
            self._saver.close()

    def _step_without_board(self, saver: Saver, step: int) -> None:
        """A group without a board: signals are heeded where a save is due, all ranks having come there anyway."""
        seen = [why for why in self._together(lambda: self._signals.seen) if why is not None]
        if seen:
            save_and_leave(saver, self._signals, step, seen[0], self._grace_s)
        saver.save_due(step)

    def _running(self) -> Saver:
        if self._saver is None:
            raise ArgumentError("`resume` has not been called, which says what there is to save")
        return self._saver


def _facts_of(sampler: object, *, scale_steps: bool) -> RunFacts:
    # Whether an optimizer is missing is seen later: plain SGD has no tensors, and is there all the same.
    facts = RunFacts(has_optimizer=False, scale_steps=scale_steps)
    if not isinstance(sampler, ElasticSampler):
        return facts
    return replace(facts, global_batch_size=sampler.global_batch_size, steps_per_epoch=sampler.steps_per_epoch)
