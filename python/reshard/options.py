"""The options of `save`, `load`, `convert`, `prune` and `Checkpointer`, in groups: one frozen dataclass for each group.

Each option is a field of one class and is documented there. A class checks its values when it is made. A function takes
an object of the class or a mapping of its fields, as a configuration file holds it:

    reshard.save(root, 100, model, retention=Retention(keep=5, keep_every=1000), commit={"durable": False})

`dataclasses.replace` makes a changed copy. The printed form shows the fields that differ from their defaults. Here
values are only checked by themselves; whether an option fits a format or another option is checked where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, Self, TypeAlias, TypeVar, get_args

from reshard.errors import ArgumentError
from reshard.values.argument_types import Count, Described, Patterns, ReadMethod, Rows, Seconds, Size, VerifyMode
from reshard.values.arguments import check_fields, checked
from reshard.values.words import nearest, show

if TYPE_CHECKING:
    import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


MAY_DIFFER: Mapping[str, Any] = {"agreed as": None}
"""Marks a field that `agreed` leaves out."""

_WHETHER_GIVEN = {"agreed as": lambda value: value is not False}


@dataclass(frozen=True, repr=False, kw_only=True)
class Options:
    """A group of options.

    Attributes:
        keyword: the parameter of the functions that take the group.
    """

    keyword: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in fields(self))
        shown = ", ".join(f"{field.name}={value!r}" for field, value in given if _differs(field, value))
        return f"{type(self).__name__}({shown})"

    @classmethod
    def of(cls, value: Self | Mapping[str, object] | None) -> Self:
        """The options that an argument means: an object of the class, a mapping of its fields, or None: the defaults.

        Raises:
            ArgumentError: it is none of these, or a field is not known, or has a value that is not accepted.

        Example:
            >>> Commit.of({"durable": False}), Commit.of(None)
            (Commit(durable=False), Commit())
            >>> Commit.of({"durabel": False})
            Traceback (most recent call last):
            reshard.errors.ArgumentError: `commit`: `Commit` has no field `durabel`
            hint: did you mean `durable`?
        """
        return cls() if value is None else cls().updated(value)

    def updated(self, value: Self | Mapping[str, object]) -> Self:
        """A copy with the fields of a mapping; or the object that is given instead.

        Raises:
            ArgumentError: as `of`.

        Example:
            >>> Files(prefix="run", dedup=False).updated({"prefix": "other"})
            Files(prefix='other', dedup=False)
        """
        cls = type(self)
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ArgumentError(
                f"`{cls.keyword}` is of type {type(value).__name__}, expected a `{cls.__name__}` or a mapping of its "
                "fields"
            )
        names = [field.name for field in fields(cls)]
        for name in value:
            if name not in names:
                near = nearest(str(name), names, n=1)
                known = ", ".join(f"`{one}`" for one in names)
                raise ArgumentError(
                    f"`{cls.keyword}`: `{cls.__name__}` has no field {show(str(name))}",
                    hint=f"did you mean `{near[0]}`?" if near else f"its fields are {known}",
                )
        return replace(self, **value)

    def _normalise(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _differs(field: Field[object], value: object) -> bool:
    default = field.default if field.default is not MISSING else None
    return value is not default and not (isinstance(value, str | int | float | tuple) and value == default)


@dataclass(frozen=True, repr=False, kw_only=True)
class Retention(Options):
    """Which iterations of a checkpoint root are kept when a save has been published; older ones are removed.

    The iteration that the tracker names, pinned iterations and the newest verified one are never removed. `keep=5` of
    `save` and `Checkpointer` is short for `retention=Retention(keep=5)`.

    Attributes:
        keep: how many complete iterations to keep, the newest; at least 1. Default 5. Nothing is removed before one
            that stays has been verified, so about one save in `keep` is read back; with 1 it is every save. Choose more
            where a fault of the training, such as a diverged loss, can stay unnoticed for several saves.
        keep_every: also keep every iteration that is a multiple of this number. Default: none. Give it to keep a
            history of the run, for evaluations or to restart from an early step.
        best: `(metric, n)`: also keep the `n` iterations with the lowest values of a metric of `save(metrics=...)`, or
            with the highest values if the name begins with `-`. Default: none. The metric "loss" is recorded by
            `Checkpointer.step`.

    Raises:
        ArgumentError: a number is below 1, or `best` is not a name and a number.

    Example:
        >>> import pathlib
        >>> import numpy as np, reshard
        >>> retention = Retention(keep=2, keep_every=1000, best=("loss", 1))
        >>> retention
        Retention(keep=2, keep_every=1000, best=('loss', 1))
        >>> for step, loss in ((1000, 3.0), (1100, 1.0), (1200, 2.0), (1300, 1.5), (1400, 1.6)):
        ...     _ = reshard.save("kept", step, {"w": np.zeros(4)}, metrics={"loss": loss}, retention=retention)
        >>> sorted(path.name for path in pathlib.Path("kept").glob("iteration_*"))
        ['iteration_00001000', 'iteration_00001100', 'iteration_00001300', 'iteration_00001400']
    """

    keyword: ClassVar[str] = "retention"

    keep: int = 5
    keep_every: int | None = None
    best: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            is_left_out = value is None and name == "keep_every"
            if not is_left_out and (type(value) is not int or value < 1):
                raise ArgumentError(f"`{name}` is a number of iterations from 1 on, not {value!r}")
        super().__post_init__()
        if self.best is not None:
            if type(self.best[1]) is not int or self.best[1] < 1:
                raise ArgumentError(
                    f"`best` is {self.best!r}, expected the name of a metric and a number from 1 on",
                    hint='for example `retention=Retention(best=("loss", 3))`',
                )
            self._normalise("best", tuple(self.best))


@dataclass(frozen=True, repr=False, kw_only=True)
class Verify(Options):
    """What is compared, and when, so that damage and wrong data are found.

    `verify="full"` of `load` and `Checkpointer` is short for `verify=Verify(on_load="full")`.

    Attributes:
        on_load: what is compared with its checksums when a checkpoint is loaded. "touched" (default): every block of
            256 KiB that is read. "full": all files first, shared out over the ranks; choose it where what other ranks
            read must be known to be undamaged, too. "structure": sizes and headers only; choose it where loading must
            be as fast as the disk and something else checks the bytes.
        after_save: read back every file past the page cache before the save is published. Default False: one save in
            `Retention.keep` is read back. Choose True where the storage is not trusted; a save takes about twice as
            long.
        check_replicas: compare the checksums of all copies of a shard, and refuse the save if they differ. Default
            True. With False one of the copies is saved and no difference is found; it saves the time of the checksums.
        may_differ: patterns of keys whose copies may differ between ranks on purpose. Default: none. Where copies
            differ, one is saved, and each rank's own copy is kept in `checkpoint.extra(rank)["rank_local"]`; another
            number of ranks cannot resume from it.
        may_be_infinite: patterns of keys that hold infinities on purpose, such as masks. Default: none. A save with an
            infinity in another tensor, or a NaN in any, is recorded as unhealthy.

    Raises:
        ArgumentError: a value is not accepted.

    Example:
        >>> import numpy as np, reshard
        >>> verify = Verify(on_load="full", after_save=True)
        >>> report = reshard.save("verified", 1, {"w": np.zeros(4)}, verify=verify)
        >>> reshard.load("verified", verify=verify).iteration
        1
    """

    keyword: ClassVar[str] = "verify"

    on_load: VerifyMode = "touched"
    after_save: bool = False
    check_replicas: bool = True
    may_differ: Patterns = ()
    may_be_infinite: Patterns = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._normalise("may_differ", tuple(self.may_differ))
        self._normalise("may_be_infinite", tuple(self.may_be_infinite))

    @classmethod
    def of(cls, value: Self | Mapping[str, object] | str | None) -> Self:
        """As `Options.of`; text is the value of `on_load`.

        Example:
            >>> Verify.of("full")
            Verify(on_load='full')
        """
        if isinstance(value, str):
            if value not in get_args(VerifyMode):
                accepted = ", ".join(f'"{one}"' for one in get_args(VerifyMode))
                raise ArgumentError(f"`verify` is {value!r}, expected {accepted} or a `Verify`")
            return super().of({"on_load": value})
        return super().of(value)


@dataclass(frozen=True, repr=False, kw_only=True)
class Commit(Options):
    """How a save or a conversion is published, and in whose name.

    Attributes:
        durable: sync all files and folders before the checkpoint is published. Default True: it survives a loss of
            power. False survives the end of the process only; choose it for tests and for storage that loses its
            content anyway.
        private: make files and folders for their owner alone (0600, 0700). Default False: as the umask says. A folder
            that exists keeps its permissions. The weight files of Checkpoint 1.0 are read-only in both cases.
        rollback: allow an iteration below the one that the tracker names. Default False. Choose True where a run goes
            back on purpose. For a `Checkpointer`: the run is meant to start below the newest iteration of the root,
            and iterations above its first step are skipped from its first save on; with `from_config` it starts
            from what the configuration names, whatever the root holds. Not for `convert`.
        takeover: claim the root even if another process that writes into it seems to be alive. Default False. The saves
            of the other process fail from then on. Not for `convert`.

    Raises:
        ArgumentError: a value is not True or False.

    Example:
        >>> import numpy as np, reshard
        >>> commit = Commit(durable=False, rollback=True)
        >>> for iteration in (200, 100):
        ...     _ = reshard.save("back", iteration, {"w": np.zeros(4)}, commit=commit)
        >>> reshard.open("back").iteration
        100
    """

    keyword: ClassVar[str] = "commit"

    durable: bool = True
    private: bool = False
    rollback: bool = False
    takeover: bool = False


@dataclass(frozen=True, repr=False, kw_only=True)
class Files(Options):
    """Which files hold the tensors, how they are called and what is written into them.

    Attributes:
        prefix: first part of the names of the shard files. Default: the name of the format. In Checkpoint 1.0 files are
            named as a training run names them, `<prefix>_rank_<r>-<epoch>_<step>.safetensors`; a conversion without a
            prefix writes `net.safetensors`.
        dedup: write each shard once, balanced over the ranks that hold it, instead of once for each of them. Default
            None: yes, except that a conversion to rank folders writes all copies, as each rank of MindSpore
            Transformers reads its own file.
        strict_format: refuse tensors whose layout metadata.json cannot express. Default False: they are described in
            tiles.json, which only this package reads. Choose True where other programs must read the checkpoint.
        max_shard_size: largest file of whole weights, in bytes or as text such as "4GiB"; a larger tensor gets a file
            of its own. Default: 4 GiB for Hugging Face; for "mindspore" as many files as MindSpore Transformers makes,
            about 3 GiB each. For `convert` only.
        model_files: a folder whose other files (configuration, tokenizer, templates, code) are copied beside the
            weights of a Hugging Face folder. Default: the source, if it is such a folder. A file that the destination
            has already is left as it is if it is equal, and refused if it is not. For `convert` only.
        check_names: compare the names and shapes of a Hugging Face folder with those of the model of its config.json,
            before it gets its name. Default True: where transformers is installed and knows the model. For `convert`
            only.
        modes: "mindspore-transformers" gives files the permissions that MindSpore Transformers gives (shard files
            0400), in its formats. Default: as the umask says. For `convert` only.

    Raises:
        ArgumentError: a value has the wrong type.

    Example:
        >>> import pathlib
        >>> import numpy as np, reshard
        >>> _ = reshard.save("named", 1, {"w": np.zeros(4)}, files=Files(prefix="qwen"))
        >>> sorted(path.name for path in pathlib.Path("named/iteration_00000001").glob("*.safetensors"))
        ['qwen-model-0000000-0000001.safetensors']
    """

    keyword: ClassVar[str] = "files"

    prefix: str | None = None
    dedup: bool | None = None
    strict_format: bool = False
    max_shard_size: Size | None = None
    model_files: str | os.PathLike[str] | None = None
    check_names: bool = True
    modes: Literal["mindspore-transformers"] | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class Checkpoint1Options(Options):
    """Save in Checkpoint 1.0 (`use_legacy_format`): a file for each rank, under a name that says epoch and step.

    Given as `format=`; `format="checkpoint1"` is short for the defaults. The fields but `steps_per_epoch` are named as
    the keys of a MindSpore Transformers configuration.

    Attributes:
        sink_size: steps of a sink, if the training loop runs in sinks: the names of the files then count sinks as
            epochs. Default: no sinks.
        steps_per_epoch: steps of an epoch, for the names of the files. Default: `common` says the epoch and the step is
            the iteration. A `Checkpointer` takes it from an `ElasticSampler`.
        save_network_params: write the weights a second time, alone, into `<root>_network`. Default False.
        save_trainable_params: write the weights that are trained a second time, alone, into `<root>_trainable`. For
            `save` their names. For a `Checkpointer` True: the parameters that require gradients. Default: not.
        only_save_strategy: write the strategy files, that is how the tensors are sharded, and nothing else. Default
            False.

    Raises:
        ArgumentError: a value has the wrong type.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save("legacy", 40, {"w": np.zeros(2)}, format=Checkpoint1Options(sink_size=2)).suffix
        '20_2'
    """

    keyword: ClassVar[str] = "format"
    name: ClassVar[str] = "checkpoint1"

    sink_size: int | None = None
    steps_per_epoch: int | None = None
    save_network_params: bool = False
    save_trainable_params: bool | Collection[str] = dataclasses.field(default=False, metadata=_WHETHER_GIVEN)
    only_save_strategy: bool = False

    @property
    def trained_names(self) -> frozenset[str] | None:
        """The names in `save_trainable_params`; None: there are none."""
        names = self.save_trainable_params
        if isinstance(names, bool):
            return None
        return frozenset([names] if isinstance(names, str) else names)


@dataclass(frozen=True, repr=False, kw_only=True)
class Interrupts(Options):
    """What a `Checkpointer` does when a signal, an exception or failed saves end the training.

    Attributes:
        grace_s: seconds from a signal until ranks stop waiting for each other. Default 25, as schedulers often kill
            after 30. When the block ends in an exception, also the seconds without progress after which a save in the
            background is given up: other ranks may be gone.
        drift: steps by which the host of one rank can be ahead of another's. Default 1: a step waits for all ranks, as
            on the CPU, or `step` gets each loss. Where hosts run ahead of their devices, give the number of steps from
            one wait to the next.
        save_on_exception: also save when the block ends in an exception, if the blocks of all ranks end within
            `grace_s` and no optimizer was in the midst of its step. Default False. Such a checkpoint is of the last
            complete step, but random streams and buffers may be those of the step that failed; a run that resumes from
            it says so.
        max_failures: number of consecutive saves that fail, such as on a full disk, with which the error of the last
            one ends the training. Default 3. Each failure before it is logged with its number.

    Raises:
        ArgumentError: a number is out of its range.

    Example:
        >>> Interrupts(grace_s=110.0)
        Interrupts(grace_s=110.0)
    """

    keyword: ClassVar[str] = "interrupts"

    grace_s: Seconds = 25.0
    drift: Count = 1
    save_on_exception: bool = False
    max_failures: Count = 3


@dataclass(frozen=True, repr=False)
class Mirror(Options):
    """Where a `Checkpointer` copies its saves to in the background, see docs/guides/buckets.md. A URL is short for it.

    Attributes:
        url: a folder of a bucket, such as "s3://bucket/run". It is the second root of the same run: the run resumes
            from whichever of the two has the newest complete save.
        every: copy each n-th save. Default 1: each. With `save_every` in steps, those of the saves at a multiple of
            `every * save_every`. Choose more where the bucket is slower than the saves.
        keep: how many newest copies are kept in the bucket. Default 5; None: all. Older ones are removed once one that
            stays was read back. Pinned ones stay.
        wait_s: how long `close` and the end of the process wait for copies, in seconds. Default 600. What is not copied
            by then is named in a warning, and copied by the next run.

    Raises:
        ArgumentError: a value has the wrong type, or a number is below 1.

    Example:
        >>> Mirror("s3://bucket/run", every=4, keep=2)
        Mirror(url='s3://bucket/run', every=4, keep=2)
    """

    keyword: ClassVar[str] = "mirror"

    url: str = ""
    every: Count = 1
    keep: int | None = 5
    wait_s: Seconds = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise ArgumentError(f"`keep` of `mirror` is a number of copies from 1 on, not {self.keep!r}")

    @classmethod
    def of(cls, value: Self | Mapping[str, object] | str | None) -> Self:
        """As `Options.of`; a URL is short for `Mirror(url)`.

        Raises:
            ArgumentError: as `Options.of`, or the URL is missing.

        Example:
            >>> Mirror.of("s3://bucket/run")
            Mirror(url='s3://bucket/run')
        """
        made = cls(value) if isinstance(value, str) else super().of(value)
        if not made.url:
            raise ArgumentError("`mirror` has no `url`", hint='for example `mirror="s3://bucket/run"`')
        return made


@dataclass(frozen=True, repr=False, kw_only=True)
class Exports(Options):
    """What a `Checkpointer` makes of each save besides the checkpoint, and besides the folders of `hf_every`.

    Attributes:
        integrated: write each save a second time, as whole tensors, into `<root>_integrated`, see
            `reshard.verbs.integrate`. Default False.
        links: keep the relative links `last`, to the newest iteration, and `best`, to the best one by
            `Retention.best`, in the root. Default False.
        after_publish: called on rank 0 after each save as `after_publish(report)`, with the `SaveReport`, in the thread
            that saves. The next save waits for it. An error of it is a warning of the report. It is for work on a
            save, such as an upload; `on_event` is for watching the run. Default None.

    Raises:
        ArgumentError: a value has a type that is not accepted.

    Example:
        >>> Exports(links=True)
        Exports(links=True)
    """

    keyword: ClassVar[str] = "exports"

    integrated: bool = False
    links: bool = False
    after_publish: Callable[..., object] | None = dataclasses.field(default=None, metadata=MAY_DIFFER)


@dataclass(frozen=True, repr=False, kw_only=True)
class Ranks(Options):
    """What a `Checkpointer` cannot learn of the ranks from the tensors and the group.

    Attributes:
        mesh: the `DeviceMesh` of all ranks, if tensors have none. Default None.
        coordinate: the position of this rank's random streams, by mesh axis, as in `reshard.torch.rng.capture`.
            Default: that in the mesh.
        seed: the seed from which random streams are derived for another number of ranks. That of rank 0 is used.
            Default: the seed of torch on rank 0.

    Raises:
        ArgumentError: a value has a type that is not accepted.

    Example:
        >>> Ranks(seed=7, coordinate={"dp": 1})
        Ranks(coordinate={'dp': 1}, seed=7)
    """

    keyword: ClassVar[str] = "ranks"

    mesh: Any = None
    coordinate: Mapping[str, int] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mesh is not None and not hasattr(self.mesh, "mesh_dim_names"):
            raise ArgumentError(f"`mesh` is of type {type(self.mesh).__name__}, expected a `DeviceMesh`")


@dataclass(frozen=True, repr=False, kw_only=True)
class Environment(Options):
    """Facts of a run that a `Checkpointer` records besides versions and hardware; those of rank 0 are recorded.

    Attributes:
        config: the configuration as text or as a value that JSON can hold. Its digest is recorded. Default None.
        dataset: text that identifies the dataset. Default None.
        code: folder with the code. Default: the working folder. If it is in a git repository, the revision is recorded,
            and whether tracked files differ from it.
        must_match: refuse to resume in an environment that may change numbers. Default False: differences are warnings
            of the decision.

    Raises:
        ArgumentError: a value has a type that is not accepted.

    Example:
        >>> Environment(dataset="text-v2", must_match=True)
        Environment(dataset='text-v2', must_match=True)
    """

    keyword: ClassVar[str] = "environment"

    config: Any = None
    dataset: str | None = None
    code: str | os.PathLike[str] | None = None
    must_match: bool = False


@dataclass(frozen=True, repr=False, kw_only=True)
class Select(Options):
    """Which tensors of the source a conversion takes, and under which names, before `names` is applied.

    Attributes:
        only: take the tensors whose names begin with this text, or with one of several, and no others: such as an
            average of the weights. Default: all.
        drop: leave out the tensors whose names begin with this text, or with one of several, and the optimizer state of
            these. Default: none. They are nowhere in the destination.
        rename: how names begin, and how they begin instead: `{"model.": "", "lm_head.": "head."}`. The longest
            beginning that fits is replaced; "" puts text before every name. The state of a parameter follows it.
            Default: no change.
        pad: how many rows tensors get, by the beginnings of their names: `{"lm_head.": 32256}`, or a size from the
            model's config.json, `{"lm_head.": "padded_vocab_size"}`. The new rows are zeros. Optimizer state of the
            same shape is padded, too. A tensor with more rows is refused. Rows are the first dim; a name map has `pad`
            for every dim. Default: no change.
        trim: how many rows tensors keep, in the same form: `{"lm_head.": "vocab_size"}`. The rows after them are left
            out, whatever they hold; the report says how many are not zero. A tensor with fewer rows is refused.
            Default: no change.
        suffix: of rank folders, which file of each rank is read, by the end of its name: "20_2", of a later run
            "1-20_2". Default: the newest that all ranks have.
        entry: what stands before the names of the weights, such as "ema", as in `InitFrom`: the weights below it are
            taken, under their names without it. Needed where a file holds several sets of weights of one model.

    Raises:
        ArgumentError: a value has the wrong type.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"model.w": np.zeros(4), "adam_m.w": np.zeros(4)}, "all.safetensors")
        >>> select = Select(drop="adam_", rename={"model.": ""})
        >>> _ = reshard.convert("all.safetensors", "weights.safetensors", select=select)
        >>> reshard.open("weights.safetensors").keys()
        ['w']
        >>> _ = reshard.convert("weights.safetensors", "six.safetensors", select=Select(pad={"w": 6}))
        >>> reshard.open("six.safetensors").shape("w")
        (6,)
    """

    keyword: ClassVar[str] = "select"

    only: str | Sequence[str] = ()
    drop: str | Sequence[str] = ()
    rename: Mapping[str, str] | None = None
    pad: Rows | None = None
    trim: Rows | None = None
    suffix: str | None = None
    entry: str | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class Reading(Options):
    """How `load` reads files and where it puts the arrays.

    Attributes:
        out: arrays by key that are filled instead of new ones, as in `Checkpoint.load`. Default: new arrays. Give it to
            load into memory that exists, such as a pinned buffer.
        copy: False gives copy-on-write views of the files where possible, as in `Checkpoint.load`. Default True.
        method: "map" maps the files, "read" reads them piece by piece. Default "auto": by the file system, and for long
            runs on a local one by a measurement in the first large load of the process.

    Raises:
        ArgumentError: a value has the wrong type.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("filled", 1, {"w": np.arange(3.0)})
        >>> w = np.empty(3)
        >>> _ = reshard.load("filled", reading=Reading(out={"w": w}))
        >>> w
        array([0., 1., 2.])
    """

    keyword: ClassVar[str] = "reading"

    out: Mapping[str, np.ndarray] | None = None
    copy: bool = True
    method: ReadMethod = "auto"


@dataclass(frozen=True, repr=False, kw_only=True)
class InitFrom(Options):
    """What a run starts from when it has no checkpoint of its own, such as pretrained weights.

    `init_from="pretrained"` of `Checkpointer.resume` is short for `init_from=InitFrom("pretrained")`. Steps count from
    0. Schedulers, the sampler, random streams and other objects with state start as they are.

    Attributes:
        path: anything that `reshard.open` opens: a folder or file of weights, a checkpoint root, an iteration.
        entry: what stands before the names of the weights, such as "ema". Needed where the checkpoint holds several
            sets of weights that fit the model. Default: the only one that fits.
        format: of a folder that holds checkpoints of several formats, which one is read, such as "deepspeed", as
            `format` of `reshard.open`.
        names: a name map from the names in the checkpoint to those of the model: a `NameMap`, its file or mapping, or a
            preset such as "qwen3-mindspore"; or `{"rename": {"encoder.": "model."}}`, new prefixes by old ones, as
            `rename` of `Select`. Default: the names are the same.
        include: patterns of the names in the model; only tensors that match one of them are loaded. Default: all.
        exclude: patterns of the names in the model; tensors that match keep their initial values. Default: none.
        fresh_optimizer: start the optimizer with new state. Default True. False also loads the state of the optimizer
            for each loaded parameter, which the checkpoint must have; the options of its groups, such as the learning
            rate, stay those of the run.

    Raises:
        ArgumentError: a value has the wrong type.

    Example:
        >>> InitFrom("pretrained", exclude=["lm_head.*"])
        InitFrom(path='pretrained', exclude=['lm_head.*'])
    """

    keyword: ClassVar[str] = "init_from"

    path: str | os.PathLike[str] = dataclasses.field(default="", kw_only=False)
    entry: str | None = None
    format: str | None = None
    names: Described | None = None
    include: Patterns = ()
    exclude: Patterns = ()
    fresh_optimizer: bool = True

    @classmethod
    def of(cls, value: Self | Mapping[str, object] | str | os.PathLike[str] | None) -> Self:
        """As `Options.of`; a path is short for `InitFrom(path)`.

        Raises:
            ArgumentError: as `Options.of`, or the path is missing.

        Example:
            >>> InitFrom.of("pretrained")
            InitFrom(path='pretrained')
        """
        made = cls(value) if isinstance(value, str | os.PathLike) else super().of(value)
        if not os.fspath(made.path):
            raise ArgumentError(
                "`init_from` has no `path`", hint='for example `init_from={"path": "pretrained", "names": "map.yaml"}`'
            )
        return made


@dataclass(frozen=True, repr=False, kw_only=True)
class Strict(Options):
    """What happens where a checkpoint and the run that resumes from it differ. Each difference is a warning by name.

    `strict=True` is short for the defaults: every difference is an error. `strict=False` is short for
    `Strict(missing="keep", unexpected="skip")`.

    Attributes:
        missing: state of the run that the checkpoint lacks. "error" (default); "keep": it keeps its initial value.
        unexpected: state of the checkpoint that the run lacks. "error" (default); "skip": it is not loaded.
        shape: tensors with another shape. "error" (default); "skip": they keep their initial values, and the optimizer
            starts them with new state; "grow": a tensor with more rows than the saved one, such as the embedding of a
            larger vocabulary, keeps the saved rows, and its new rows keep their initial values. Their optimizer state
            is zero in the new rows. "trim": a tensor with fewer rows than the saved one, such as an embedding that was
            padded for tensor-parallel ranks, gets the first of the saved rows, and its optimizer state those of these
            rows. Other differences of shape stay an error.
        other_optimizer: parameters that were saved with another optimizer or in other groups, or that only one of the
            two runs trains. "error" (default); "skip": the optimizer starts them with new state, or their group keeps
            its options. State of parameters that are not trained now is not loaded.

    Raises:
        ArgumentError: a value is not accepted.

    Example:
        >>> Strict.of(False), Strict.of({"shape": "grow"})
        (Strict(missing='keep', unexpected='skip'), Strict(shape='grow'))
    """

    keyword: ClassVar[str] = "strict"

    missing: Literal["error", "keep"] = "error"
    unexpected: Literal["error", "skip"] = "error"
    shape: Literal["error", "grow", "trim", "skip"] = "error"
    other_optimizer: Literal["error", "skip"] = "error"

    @classmethod
    def of(cls, value: Self | Mapping[str, object] | bool | None) -> Self:  # noqa: FBT001
        """As `Options.of`; True and False are short for what the class says.

        Raises:
            ArgumentError: as `Options.of`.

        Example:
            >>> Strict.of(True)
            Strict()
        """
        if isinstance(value, bool):
            return cls() if value else cls(missing="keep", unexpected="skip")
        return super().of(value)


@dataclass(frozen=True, repr=False, kw_only=True)
class Settings(Options):
    """Whose settings a resumed run has, where the program and the checkpoint differ. Each difference is a warning.

    A setting is what the program chooses and training does not move: a constant of a scheduler, such as `T_max`, or an
    option of a parameter group, such as `weight_decay`. Progress, such as the current step of a schedule, is restored
    in every case. Each field is "saved" (default): the values of the checkpoint; "program": those of the program; or
    "error": a difference is refused.

    Attributes:
        scheduler: the constants of schedulers, also those that a `OneCycleLR` keeps in the groups. What functions of a
            `LambdaLR` hold is not saved: it is always that of the program.
        optimizer: the options of the parameter groups. With "program", a learning rate that a scheduler has moved
            follows the one of the program: by the formula of the scheduler, else in the same proportion.

    Raises:
        ArgumentError: a value is not accepted.

    Example:
        >>> Settings(scheduler="program")
        Settings(scheduler='program')
    """

    keyword: ClassVar[str] = "settings"

    scheduler: Literal["saved", "program", "error"] = "saved"
    optimizer: Literal["saved", "program", "error"] = "saved"


@dataclass(frozen=True)
class Resuming:
    """Arguments of `Checkpointer.resume` that an integration passes on, checked before the training starts.

    Attributes:
        strict, init_from, settings, data: as in `Checkpointer.resume`.
    """

    strict: Strict
    init_from: InitFrom | None
    settings: Settings
    data: Literal["saved", "new"]

    @classmethod
    @checked
    def of(
        cls,
        *,
        strict: StrictLike = True,
        init_from: InitFromLike | None = None,
        settings: SettingsLike | None = None,
        data: Literal["saved", "new"] = "saved",
    ) -> Self:
        """Parse the arguments.

        Args:
            strict: see `Strict`.
            init_from: see `InitFrom`.
            settings: see `Settings`.
            data: "saved" or "new".

        Raises:
            ArgumentError: a value is not accepted.

        Example:
            >>> Resuming.of(strict=False).arguments()["strict"]
            Strict(missing='keep', unexpected='skip')
        """
        init = None if init_from is None else InitFrom.of(init_from)
        return cls(Strict.of(strict), init, Settings.of(settings), data)

    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


RetentionLike: TypeAlias = Retention | Mapping[str, object]
VerifyLike: TypeAlias = Verify | Mapping[str, object] | VerifyMode
CommitLike: TypeAlias = Commit | Mapping[str, object]
FilesLike: TypeAlias = Files | Mapping[str, object]
ExportsLike: TypeAlias = Exports | Mapping[str, object]
MirrorLike: TypeAlias = str | Mirror | Mapping[str, object]
RanksLike: TypeAlias = Ranks | Mapping[str, object]
EnvironmentLike: TypeAlias = Environment | Mapping[str, object]
InitFromLike: TypeAlias = str | os.PathLike[str] | InitFrom | Mapping[str, object]
SettingsLike: TypeAlias = Settings | Mapping[str, object]
StrictLike: TypeAlias = bool | Strict | Mapping[str, object]
Target: TypeAlias = Literal[
    "huggingface",
    "mindspore",
    "checkpoint2",
    "checkpoint1",
    "safetensors",
    "torch",
    "dcp",
    "megatron",
    "deepspeed-universal",
]
"""The formats that `convert` writes; the registry of formats has the same."""
FormatLike: TypeAlias = Literal["checkpoint2", "checkpoint1"] | Checkpoint1Options | Mapping[str, object]


# -- what a function makes of them


def retention_of(keep: int | None, retention: RetentionLike | None) -> Retention | None:
    """What `keep=` and `retention=` mean together; None: nothing is removed.

    Args:
        keep: the short form, or None.
        retention: a `Retention` or a mapping of its fields, or None.

    Raises:
        ArgumentError: both are given, or a value is not accepted.

    Example:
        >>> retention_of(5, None), retention_of(None, {"keep": 3, "best": ["loss", 2]})
        (Retention(), Retention(keep=3, best=('loss', 2)))
    """
    if keep is None:
        return None if retention is None else Retention.of(retention)
    if retention is not None:
        raise ArgumentError(
            "`keep` and `retention` are both given: `keep` is short for `retention=Retention(keep=...)`",
            hint="leave one of them out",
        )
    return Retention(keep=keep)


def files_with_size(max_shard_size: str | int | None, files: FilesLike | None) -> Files:
    """What `max_shard_size=` and `files=` of `convert` mean together.

    Args:
        max_shard_size: the short form, or None.
        files: a `Files` or a mapping of its fields, or None.

    Raises:
        ArgumentError: both say the size, or a value is not accepted.

    Example:
        >>> files_with_size("5GB", {"prefix": "run"})
        Files(prefix='run', max_shard_size='5GB')
    """
    known = Files.of(files)
    if max_shard_size is None:
        return known
    if known.max_shard_size is not None:
        raise ArgumentError(
            "`max_shard_size` is given twice: it is short for `files=Files(max_shard_size=...)`",
            hint="leave one of them out",
        )
    return replace(known, max_shard_size=max_shard_size)


def format_of(value: FormatLike) -> tuple[str, Options | None]:
    """The name of the format that `format=` means, and the format's own options; None: it has none.

    Args:
        value: the name of a format, a `Checkpoint1Options`, or a mapping of `name` and the fields of the options.

    Raises:
        ArgumentError: it is none of these.

    Example:
        >>> format_of("checkpoint2"), format_of({"name": "checkpoint1", "sink_size": 2})
        (('checkpoint2', None), ('checkpoint1', Checkpoint1Options(sink_size=2)))
    """
    if isinstance(value, Checkpoint1Options):
        return value.name, value
    if not isinstance(value, Mapping):
        value = {"name": value}
    options = {key: one for key, one in value.items() if key != "name"}
    if "name" not in value:
        raise ArgumentError(
            "`format` is a mapping without `name`, the name of the format",
            hint=f"for example `format={{'name': '{Checkpoint1Options.name}', 'sink_size': 2}}`",
        )
    name = _format_name(value["name"])
    if name == Checkpoint1Options.name:
        return name, Checkpoint1Options.of(options)
    if options:
        raise ArgumentError(f"`format`: {show(name)} has no options, found {show(str(next(iter(options))))}")
    return name, None


def _format_name(value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentError(
            f"`format` is of type {type(value).__name__}, expected the name of a format or its options",
            hint='for example `format="checkpoint2"`',
        )
    return value


@dataclass(frozen=True)
class SaveOptions:
    """The options of a save, parsed: what `save` and a `Checkpointer` are given.

    Attributes:
        retention: which iterations are kept; None: all.
        verify: what is compared.
        commit: how the save is published.
        files: which files hold the tensors.
        format: the name of the format.
        of_format: the options that only this format has; None: it has none.
        threads: threads of the copies; None: all processors.
    """

    retention: Retention | None = dataclasses.field(default=None, metadata=MAY_DIFFER)  # that of rank 0 is used
    verify: Verify = Verify()
    commit: Commit = Commit()
    files: Files = Files()
    format: str = "checkpoint2"
    of_format: Options | None = None
    threads: int | None = dataclasses.field(default=None, metadata=MAY_DIFFER)

    @property
    def dedup(self) -> bool:
        """Whether each shard is written once."""
        return self.files.dedup is not False

    @classmethod
    def of(
        cls,
        *,
        keep: int | None,
        retention: RetentionLike | None,
        verify: VerifyLike | None,
        commit: CommitLike | None,
        files: FilesLike | None,
        format: FormatLike,  # noqa: A002
        threads: int | None,
    ) -> Self:
        """Parse the arguments of `save` and `Checkpointer`, which have these names.

        Args:
            keep: short for `retention`.
            retention: see `Retention`.
            verify: see `Verify`.
            commit: see `Commit`.
            files: see `Files`; those for `convert` only are refused.
            format: see `format_of`.
            threads: threads of the copies.

        Raises:
            ArgumentError: an option has a value that is not accepted, or does not go with another one.
        """
        name, of_format = format_of(format)
        known = Files.of(files)
        for one in ("max_shard_size", "model_files", "modes"):
            if getattr(known, one) is not None:
                raise ArgumentError(f"`{one}` of `Files` is an option of `convert`, and this is a save")
        return cls(
            retention_of(keep, retention),
            Verify.of(verify),
            Commit.of(commit),
            known,
            name,
            of_format,
            threads,
        )


def agreed(options: Any) -> dict[str, object]:
    """What must be equal on all ranks, as plain values: each field that is not marked, and those of groups, by name.

    Args:
        options: a dataclass, such as `SaveOptions`.

    Example:
        >>> sorted(agreed(SaveOptions()))[:4]
        ['after_save', 'check_names', 'check_replicas', 'dedup']
    """
    found: dict[str, object] = {}
    for one in fields(options):
        value, agreed_as = getattr(options, one.name), one.metadata.get("agreed as", comparable)
        if isinstance(value, Options) and agreed_as:
            found |= agreed(value)
        elif agreed_as:
            found[one.name] = agreed_as(value)
    return found


def comparable(value: object) -> object:
    """An argument as plain values that ranks can send and compare; of any other object its class.

    Example:
        >>> comparable(Retention(best=("loss", 2))), comparable({"w", "b"}), comparable(len)
        ({'keep': 5, 'keep_every': None, 'best': ['loss', 2]}, ['b', 'w'], 'builtin_function_or_method')
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if callable(getattr(value, "to_mapping", None)):
        return comparable(value.to_mapping())  # type: ignore[attr-defined]
    if isinstance(value, Options):
        compared = [one.name for one in fields(value) if one.metadata != MAY_DIFFER]
        return {name: comparable(getattr(value, name)) for name in compared}
    if isinstance(value, Mapping):
        return {str(name): comparable(one) for name, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return list(map(comparable, value))
    return type(value).__name__


# -- keywords of earlier releases

_GROUPS: tuple[type[Options], ...] = (
    Retention, Verify, Commit, Files, Checkpoint1Options, Interrupts, Exports, Mirror, Ranks, Environment, Select,
    Reading, InitFrom, Strict, Settings,
)  # fmt: skip
_RENAMED = {
    "keep_best": "best",
    "verify_after_save": "after_save",
    "integrated_save": "integrated",
    "strict_environment": "must_match",
}
_MOVED: dict[str, list[type[Options]]] = {}
for _group in _GROUPS:
    for _field in fields(_group):
        _MOVED.setdefault(_field.name, []).append(_group)


def explains_moved(function: Callable[P, T]) -> Callable[P, T]:
    """Say of a keyword that is a field of a group of options where it is given, instead of Python's message.

    Example:
        >>> @explains_moved
        ... def save(root: str, commit: Commit | None = None) -> None: ...
        >>> save("root", durable=False)
        Traceback (most recent call last):
        reshard.errors.ArgumentError: `durable` is a field of `Commit`
        hint: write `commit=Commit(durable=False)`
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in kwargs.items():
            field = _RENAMED.get(name, name)
            group = next((one for one in _MOVED.get(field, ()) if one.keyword in parameters), None)
            if name not in parameters and group is not None:
                given = f"{field}={str(value)[:80] if isinstance(value, bool | int) else '...'}"
                if isinstance(value, tuple | str):
                    given = f"{field}={repr(value)[:80]}"
                raise ArgumentError(
                    f"`{name}` is a field of `{group.__name__}`",
                    hint=f"write `{group.keyword}={group.__name__}({given})`",
                )
        return function(*args, **kwargs)

    return call
