"""Which checkpoint a run would resume from, and why the others are not selected. Loads and changes nothing.

The facts are the same as in `load`, but a folder that cannot be read does not end the search. With `verify` the
contents of the selected checkpoint are read as the run would read them; a damaged one is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from reshard import _core, opening
from reshard.commit.scrub import Fault, fault_of, is_damage, own_sums, scrub_folder, scrub_plain
from reshard.errors import ReshardError, StorageError
from reshard.formats import registry
from reshard.formats.left_out import LeftOut
from reshard.formats.rank_file import add_rank_file
from reshard.opening.gather import gather
from reshard.resume import decide, evaluate
from reshard.resume.parts import settings_of, with_parts
from reshard.storage.location import locate
from reshard.values.argument_types import Part
from reshard.verbs.start import initial

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint
    from reshard.commit.manifest import Manifest
    from reshard.config import Config
    from reshard.resume import ResumeDecision, ResumeFacts, RunFacts, Verdict

_PARTS: tuple[Part, ...] = ("model", "optimizer")
Contents: TypeAlias = Literal["not read", "compared", "no sums"]


@dataclass(frozen=True)
class Answer:
    """The checkpoint that a run would resume from, or its error.

    Attributes:
        facts: the facts of all candidates.
        verdicts: every candidate, best first, and whether it is selected.
        decision: the decision; None: the run would raise an error.
        settings: options of parameter groups and constants of schedulers that the run had when it began, as lines. What
            the new program has instead is not known here: `Checkpointer.resume` compares.
        error: the error that the run would raise, or None.
        contents: whether the contents of the selected checkpoint were compared with their checksums: "not read", or
            "no sums" where there are none.
        n_bytes: bytes of the files that were compared.
        left_out: the tensors that the selected checkpoint leaves out; None: none, or not known.
    """

    facts: ResumeFacts
    verdicts: tuple[Verdict, ...]
    decision: ResumeDecision | None
    settings: tuple[str, ...] = ()
    error: ReshardError | None = None
    contents: Contents = "not read"
    n_bytes: int = 0
    left_out: LeftOut | None = None


def explain(
    config: Config,
    run: RunFacts,
    *,
    compatible: bool = False,
    verify: bool = False,
    progress: _core.Progress | None = None,
) -> Answer:
    """Determine which checkpoint a run would resume from.

    Args:
        config: the configuration of the run.
        run: what is known of the run.
        compatible: compute the counters as MindSpore Transformers does, rounding errors included.
        verify: read and compare the contents of the selected checkpoint, and select the next one if they are damaged.
            A run that loads the weights alone does not read the optimizer's files.
        progress: called as `progress(done_bytes, total_bytes)` while a checkpoint is read.

    Raises:
        StorageError: the root cannot be read.
        ReshardError: the configuration contradicts itself.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.config import Config
        >>> from reshard.resume import RunFacts
        >>> _ = reshard.save("explained", 100, {"w": np.zeros(4)})
        >>> answer = explain(Config("explained", resume=True), RunFacts(), verify=True)
        >>> answer.decision.iteration, answer.contents
        (100, 'compared')
    """
    faults: dict[str, str] = {}
    while True:
        facts = gather(config, run, faults=faults, keep_going=True)
        verdicts = evaluate(config, facts)
        try:
            decision = decide(config, facts, compatible=compatible)
        except ReshardError as error:
            return Answer(facts, verdicts, None, error=error)
        refusal = _names_error(config, decision)
        if refusal is not None:
            return Answer(facts, verdicts, None, error=refusal)
        if not verify or decision.path is None:
            return _with_saved(Answer(facts, verdicts, decision))
        found, contents, n_bytes = _read(facts, decision, progress)
        if not found:
            return _with_saved(Answer(facts, verdicts, decision, contents=contents, n_bytes=n_bytes))
        fault = next((one for one in found if one.is_damage), found[0])
        if not fault.is_damage:
            return Answer(facts, verdicts, None, error=StorageError(str(fault), path=decision.path))
        faults[decision.path] = str(fault)


def _with_saved(answer: Answer) -> Answer:
    """The answer with every part that is restored, the saved settings, and what the checkpoint leaves out."""
    decision = answer.decision
    if decision is None or decision.path is None or "counters" not in decision.restored:
        return answer
    try:
        with opening.open(decision.path) as checkpoint:
            extra = checkpoint.extra()
        left_out = LeftOut.of(extra, decision.path)
    except ReshardError:  # the run reads it again, and says what is wrong
        return answer
    return replace(answer, decision=with_parts(decision, extra), settings=settings_of(extra), left_out=left_out)


def _names_error(config: Config, decision: ResumeDecision) -> ReshardError | None:
    """The error of the name map of `init_from`, which a run applies to what it starts from; None if it fits."""
    init = config.init_from
    if init is None or init.names is None or decision.path is None:
        return None
    try:
        with opening.open(decision.path, format=init.format) as checkpoint, initial(checkpoint, init):
            return None
    except ReshardError as error:
        return error


def _read(
    facts: ResumeFacts, decision: ResumeDecision, progress: _core.Progress | None
) -> tuple[list[Fault], Contents, int]:
    """Compare the files that a run would read: the faults, whether there are checksums, and the bytes of the files."""
    path = locate(str(decision.path))
    try:
        tree = registry.saves_at(locate(facts.path)) if facts.kind == "rank_folders" else None
        if tree is not None:
            saves, index = registry.rank_saves(tree), _core.Index()
            for rank in range(next(one.world_size or 0 for one in facts.candidates if one.path == decision.path)):
                add_rank_file(index, saves.place(path.name, rank))
            return _own_sums(index)
        with opening.open(path) as checkpoint:
            if checkpoint.manifest is None or not path.is_folder():
                return _own_sums(checkpoint._index)  # noqa: SLF001  as `scrub`, file by file
            return _manifest_sums(checkpoint, checkpoint.manifest, decision, progress)
    except ReshardError as error:
        return [replace(fault_of(error, None), is_damage=is_damage(error))], "no sums", 0  # a run skips it


def _manifest_sums(
    checkpoint: Checkpoint, manifest: Manifest, decision: ResumeDecision, progress: _core.Progress | None
) -> tuple[list[Fault], Contents, int]:
    """Compare the files that are loaded with the manifest."""
    names = set(manifest.shards)
    if decision.restored == ("weights",):
        files = {part: {name for key in checkpoint.keys(part) for name in _files(checkpoint, key)} for part in _PARTS}
        names -= files["optimizer"] - files["model"]
    done, total = 0, sum(manifest.shards[name].n_bytes for name in names)

    def advance(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, total)

    # Through the page cache, as the run reads.
    found = scrub_plain(checkpoint.data.path, manifest)
    found += scrub_folder(checkpoint.data.path, manifest, names, direct=False, advance=advance)
    return found, "compared", total + sum(entry.n_bytes for entry in manifest.files.values())


def _files(checkpoint: Checkpoint, key: str) -> tuple[str, ...]:
    return tuple(name for shard in checkpoint[key].shards for name in shard.files)


def _own_sums(index: _core.Index) -> tuple[list[Fault], Contents, int]:
    """Compares files with the checksums that they hold."""
    compared, faults = own_sums(index)
    index.close()
    return faults, "compared" if any(compared) else "no sums", sum(compared)
