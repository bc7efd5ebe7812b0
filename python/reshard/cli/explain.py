"""`reshard explain`: which checkpoint a restart would use, why it would not use the others, and the counters."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import (
    PATH,
    WholeNumber,
    collected_warnings,
    command,
    echo,
    echo_facts,
    echo_json,
    echo_table,
    hint_near,
    plain_table,
    progress_bar,
    ranges,
    shown,
    size,
    styled,
)
from reshard.values.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.config import Config
    from reshard.errors import ReshardError
    from reshard.resume import EpochStep, RankFolderFacts, ResumeDecision, ResumeFacts, Verdict
    from reshard.verbs.explain import Answer

_FRESH = 3
_COUNT = WholeNumber(min=1)
_STYLES = {"selected": "bold green", "skipped": "red", "unreadable": "red"}


@click.command(short_help="Show which checkpoint a restart would use, and why.")
@click.argument("root", type=PATH, required=False)
@click.option(
    "--config", "config_file", type=PATH, metavar="FILE", help="YAML file of the trainer. Default: resume from ROOT."
)
@click.option("--world-size", type=_COUNT, metavar="N", help="Number of ranks of the new run.")
@click.option("--global-batch-size", type=_COUNT, metavar="B", help="Samples per step of the new run, over all ranks.")
@click.option("--dataset-steps", type=_COUNT, metavar="S", help="Steps in an epoch of the dataset of the new run.")
@click.option("--new-data", is_flag=True, help="The new run has another dataset.")
@click.option("--compatible", is_flag=True, help="Compute counters as MindSpore Transformers does, with its rounding.")
@click.option(
    "--init-from", type=PATH, metavar="PATH", help="Checkpoint from which the run starts if ROOT holds none yet."
)
@click.option("--names", metavar="MAP", help="Name map for the checkpoint of --init-from: a file or a preset.")
@click.option(
    "--format", metavar="NAME", help="Which checkpoint of --init-from, if it is a folder with several formats."
)
@click.option("--include", multiple=True, metavar="PATTERN", help="Load only these tensors from --init-from.")
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Do not load these tensors: they keep their initial values."
)
@click.option("--verify", is_flag=True, help="Compare the files that the run would read with their checksums.")
@command
def explain(
    root: str | None,
    *,
    config_file: str | None,
    world_size: int | None,
    global_batch_size: int | None,
    dataset_steps: int | None,
    new_data: bool,
    compatible: bool,
    init_from: str | None,
    format: str | None,  # noqa: A002  the name of the option
    names: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    verify: bool,
    as_json: bool,
) -> None:
    """Show which checkpoint a run would resume from, why it would skip newer ones, and at which step it would continue.

    ROOT is a checkpoint root or an iteration folder. Default: the path that the configuration loads. If the folder that
    the configuration saves into holds newer checkpoints, which `Checkpointer.from_config` would use, the command says
    so. For a Checkpoint 1.0 tree the files of each rank folder are listed too. Nothing is changed.

    --init-from (or `init_from` in the section `reshard` of the configuration) is a path from which the run starts if
    its own root holds no checkpoint yet. If the root holds one, the run resumes from that, as in `Checkpointer.resume`.

    Tensor data is not read: only sizes, headers and metadata are checked, as a run does before it loads. While it
    loads, a run compares the data with its checksums, and uses the next checkpoint if they differ. --verify does this
    comparison now.

    \b
    Examples:
      reshard explain output/checkpoint
      reshard explain output/checkpoint --global-batch-size 512 --dataset-steps 10000
      reshard explain --config train.yaml --json
      reshard explain output/checkpoint --verify
      reshard explain output/checkpoint --init-from pretrained/ --exclude "lm_head.*"

    Exit codes: 0 there is a checkpoint to load, 3 the run would start fresh, 1 refused, 2 usage error.
    """
    from reshard.config import Config
    from reshard.options import InitFrom
    from reshard.resume import RunFacts
    from reshard.verbs.explain import explain as find_answer
    from reshard.verbs.start import own_config, start_of, with_init

    if root is None and config_file is None:
        raise click.UsageError("give ROOT, --config, or both")
    config = Config(resume=True) if config_file is None else Config.from_yaml(config_file)
    if init_from is None and (names or format or include or exclude):
        raise click.UsageError("--names, --format, --include and --exclude need --init-from")
    init = config.init_from
    if init_from is not None:
        init = InitFrom(init_from, format=format, names=names, include=include, exclude=exclude)
    own, reason = root or config.save_path, None
    if root is not None and init is None:
        config = dataclasses.replace(config, load_path=root)
    run = RunFacts(
        global_batch_size=global_batch_size,
        world_size=world_size,
        steps_per_epoch=dataset_steps,
        dataset_changed=new_data or None,
    )
    if init is not None:
        if own is None:
            raise click.UsageError(
                "give ROOT, the checkpoint root of the run, or a configuration that says where it saves"
            )
        if config_file is None:
            config = dataclasses.replace(config, load_path=own)
        config = with_init(config, init, own)
        is_own, reason = start_of(config, own, run)
        config = own_config(config, own) if is_own else config
    own_root: str | None = None
    with collected_warnings(), progress_bar() as progress:  # the verdicts contain the logged warnings
        answer = find_answer(config, run, compatible=compatible, verify=verify, progress=progress)
        if init is None and root is None and config.save_path and start_of(config, Path(config.save_path), run)[0]:
            own_root = config.save_path
    facts, decision = answer.facts, answer.decision
    if decision is not None and reason is not None:
        decision = dataclasses.replace(decision, reasons=(reason, *decision.reasons))
        answer = dataclasses.replace(answer, decision=decision)
    if decision is None:
        assert answer.error is not None
        _refuse(answer.error, config, facts, answer.verdicts, as_json=as_json)
        raise AssertionError  # not reached
    if as_json:
        ranks = {"ranks": list(map(_rank, facts.ranks))} if facts.ranks else {}
        proof = {
            "is_verified": answer.contents == "compared",
            "has_sums": decision.is_verified,
            "contents": answer.contents,
            "contents_read": answer.contents != "not read",
        }
        echo_json(
            {
                "outcome": _outcome(decision),
                **_json(decision),
                **proof,
                "settings": answer.settings,
                "left_out": None if answer.left_out is None else answer.left_out.summary(),
                "own_root": own_root,
                **_start_options(config),
                **ranks,
            }
        )
    else:
        _print(config, facts, decision, answer, counts_sinks=config_file is not None and config.sink_mode)
        if own_root is not None:
            echo(f"\n{shown(own_root)} holds checkpoints that the run itself has saved:")
            echo("`Checkpointer.from_config` resumes from those, `reshard.load` does not.")
            echo(f"To see which one, run: reshard explain {shlex.quote(shown(own_root))}")
    if decision.fresh:
        if facts.path and not as_json:
            hint_near(facts.path)
        raise click.exceptions.Exit(_FRESH)


def _outcome(decision: ResumeDecision) -> str:
    if decision.fresh:
        return "fresh"
    return "resume" if "counters" in decision.restored else "weights"


def _start_options(config: Config) -> dict[str, Any]:
    """The options of what the run starts from."""
    init = config.init_from
    if init is None:
        return {}
    names = None if init.names is None else str(init.names) if not isinstance(init.names, dict) else init.names
    options = {"names": names, "include": list(init.include), "exclude": list(init.exclude)}
    if init.format is not None:
        options["format"] = init.format
    return {"options": {**options, "fresh_optimizer": init.fresh_optimizer}}


def _start_lines(config: Config) -> list[tuple[str, str]]:
    found = _start_options(config).get("options", {})
    lines = []
    if found.get("names"):
        lines.append(
            ("names", f"by {shown(str(found['names']))}" if len(str(found["names"])) < 80 else "by a name map")
        )
    lines += [(word, shown(", ".join(found[word]))) for word in ("include", "exclude") if found.get(word)]
    if found:
        lines.append(("optimizer", "new state" if found["fresh_optimizer"] else "its state is loaded, too"))
    return lines


def _json(decision: ResumeDecision) -> dict[str, Any]:
    return {name: _plain(value) for name, value in dataclasses.asdict(decision).items()}


def _rank(view: RankFolderFacts) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(view).items() if name != "labels"}


def _plain(value: object) -> object:
    """The value with fractions as text, which keeps them exact."""
    from fractions import Fraction

    if isinstance(value, Fraction):
        return str(value)
    return {name: _plain(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _refuse(
    error: ReshardError, config: Config, facts: ResumeFacts, verdicts: Sequence[Verdict], *, as_json: bool
) -> None:
    """Print why a run would not start: the table of verdicts and then the error, or one JSON object."""
    if as_json:
        echo_json(
            {
                "outcome": "refused",
                "error": type(error).__name__,
                "message": error.message,
                "path": error.path,
                "hint": error.hint,
                "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
                "warnings": facts.warnings,
                **({"ranks": list(map(_rank, facts.ranks))} if facts.ranks else {}),
            }
        )
        raise click.exceptions.Exit(1) from None
    if verdicts:
        _print_verdicts(config, facts, verdicts)
        if facts.warnings:
            echo_facts([("warning", shown(warning)) for warning in facts.warnings])
        error.message = error.message.partition(":\n")[0]  # the rest repeats the table
    raise error


# -- text


def _print(config: Config, facts: ResumeFacts, decision: ResumeDecision, answer: Answer, *, counts_sinks: bool) -> None:
    from reshard.resume.choose import name_of

    if decision.verdicts:
        _print_verdicts(config, facts, decision.verdicts)
        echo()
    if decision.fresh:
        echo("the training would start from nothing")
    elif "counters" in decision.restored:
        echo(f"the training would resume from {shown(decision.path)}")
    else:
        echo(f"the training would load the weights of {shown(decision.path)}")
    # Warnings are part of the result here, so they go to stdout.
    is_known = counts_sinks or facts.run.steps_per_epoch is not None
    listed = {f"{name_of(verdict)} is skipped: {verdict.reason}" for verdict in decision.verdicts}  # in the table
    warnings = (("warning", shown(warning)) for warning in decision.warnings if warning not in listed)
    lines = _lines(decision, knows_epochs=is_known)
    lines += [("settings", shown(line)) for line in answer.settings]
    if answer.left_out is not None:
        text = f"{answer.left_out.to_text()}. The program gives them, and the run compares them with their digests"
        lines.append(("left out", shown(text)))
    echo_facts([*_contents(answer), *_start_lines(config), *lines, *_next_lines(facts, decision), *warnings])


def _contents(answer: Answer) -> list[tuple[str, str]]:
    """Whether the data of the chosen checkpoint was compared with its checksums."""
    if answer.decision is None or answer.decision.path is None:
        return []
    text_of = {
        "compared": f"{size(answer.n_bytes)} read and compared with the checksums: no difference",
        "no sums": "there are no checksums to compare with",
        "not read": "not compared yet. The run compares the data with its checksums while it loads, and uses the next "
        "checkpoint if they differ. --verify compares now"
        if answer.decision.is_verified
        else "not read, and there are no checksums to compare with",
    }
    return [("contents", text_of[answer.contents])]


def _next_lines(facts: ResumeFacts, decision: ResumeDecision) -> list[tuple[str, str]]:
    """What follows from skipped checkpoints: which steps are repeated, and what to do."""
    skipped = list(itertools.takewhile(lambda verdict: not verdict.taken, decision.verdicts))
    damaged = [verdict for verdict in skipped if verdict.path in _with_fault(facts)]
    lines = []
    if decision.iteration is not None and any((one.iteration or 0) > decision.iteration for one in damaged):
        newest = max(one.iteration or 0 for one in damaged)
        lines.append(("repeated", f"what was trained between iterations {decision.iteration} and {newest}"))
    if damaged and facts.kind == "root":
        best = shown(damaged[0].path)
        text = "nothing has to be deleted: a restart skips the damaged iterations. If a copy of them exists, put back "
        lines.append(("next", text + f"the damaged files and run: reshard verify {shlex.quote(best)}"))
    return lines


def _with_fault(facts: ResumeFacts) -> set[str]:
    return {candidate.path for candidate in facts.candidates if candidate.state.kind == "damaged"}


def _print_verdicts(config: Config, facts: ResumeFacts, verdicts: Sequence[Verdict]) -> None:
    echo(f"{facts.kind}: {shown(facts.path or config.load_path)}")
    table = plain_table("file of rank 0" if facts.ranks else "folder", "verdict", "why", folds=("why",))
    for verdict in verdicts:
        name = verdict.path.rstrip("/").rpartition("/")[2]
        word = _word(verdict)
        why = verdict.reason.removeprefix("not needed: ").removeprefix("not reached: ")
        table.add_row(shown(name), styled(word, _STYLES.get(word)), shown(why))
    echo_table(table)
    if facts.ranks:
        echo()
        _print_ranks(facts.ranks)


def _print_ranks(views: Sequence[RankFolderFacts]) -> None:
    """Print the files of each rank folder, with one line for all ranks that have the same files."""
    lines: dict[tuple[str, str], list[int]] = {}
    for view in views:
        damaged = dict(view.faults)
        files = [f"{view.labels.get(name, name)}{' (incomplete)' if name in damaged else ''}" for name in view.files]
        meta = view.labels.get(view.meta, view.meta) if view.meta is not None else "damaged" if view.meta_fault else "-"
        lines.setdefault((meta, ", ".join(files) or "-"), []).append(view.rank)
    table = plain_table("rank", "meta.json names", "files", folds=("files",))
    for (meta, listed), ranks in lines.items():
        table.add_row(", ".join(ranges(ranks)), shown(meta), shown(listed))
    echo_table(table)


def _lines(decision: ResumeDecision, *, knows_epochs: bool) -> list[tuple[str, str]]:
    lines = [("because", shown(reason)) for reason in decision.reasons]
    if not decision.fresh:
        lines.append(("restored", ", ".join(decision.restored)))
    steps = f"{decision.initial_step} done"
    if decision.total_steps is not None:
        steps += f" of {decision.total_steps}"
    if decision.global_step != decision.initial_step:
        steps += f"; the optimizer made {decision.global_step}"
    lines.append(("steps", steps))
    views = [f"next is {_view(decision.next_step)}"] if decision.next_step else []
    views += [f"the next sink ends with {_view(decision.next_sink)}"] if decision.next_sink else []
    if views:
        lines.append(("of the data", "; ".join(views)))
    if knows_epochs:
        lines.append(("epochs done", f"{decision.initial_epoch}, as the training loop counts"))
    elif decision.initial_epoch:
        # Without the length of an epoch it is not known whether that epoch is complete.
        lines.append(("epoch", f"{decision.initial_epoch} when it was saved"))
    n_skipped = decision.data_skip_steps
    samples = f"the samples of {counted(n_skipped, 'step')}"
    if not n_skipped:
        skip = "from the start"
    elif decision.fresh or "data position" in decision.restored or "counters" not in decision.restored:
        skip = f"{samples} are skipped"
    else:
        skip = f"no position was saved: from the start, unless the program skips {samples}"
    if decision.skip_micro_steps is not None:
        skip += f", {decision.skip_micro_steps} micro-steps"
    lines.append(("data", skip))
    if decision.consumed_samples is not None:
        lines.append(("samples", f"{decision.consumed_samples} seen"))
    if decision.global_batch_size is not None:
        lines.append(("batch", f"{counted(decision.global_batch_size, 'sample')} per step"))
    if decision.loss_scale is not None:
        lines.append(("loss scale", f"{decision.loss_scale:g}"))
    return lines


def _view(view: EpochStep) -> str:
    return f"epoch {view.epoch}, step {view.step}"


def _word(verdict: Verdict) -> str:
    return "selected" if verdict.outcome == "taken" else verdict.outcome
