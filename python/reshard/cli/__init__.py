"""The command line: one module per command, on top of the public API.

Results go to stdout; progress, warnings and errors go to stderr. Exit codes: 0 success, 1 refused or damaged, 2 usage
error, 74 the output could not be written, 130 interrupted, 141 the reader of a pipe has ended. `output` holds what the
commands share. Nothing here knows a format.
"""

from __future__ import annotations

import click

from reshard._core import __version__
from reshard.cli.convert import convert
from reshard.cli.convert_files import convert_files
from reshard.cli.demo import demo
from reshard.cli.diff import diff
from reshard.cli.explain import explain
from reshard.cli.inspect import inspect
from reshard.cli.layout import layout
from reshard.cli.merge import merge
from reshard.cli.names import names
from reshard.cli.output import SIZE, quiet_option
from reshard.cli.plan import plan
from reshard.cli.program import Program
from reshard.cli.prune import pin, prune, unpin
from reshard.cli.rollback import rollback
from reshard.cli.split import split
from reshard.cli.strategy import strategy
from reshard.cli.verify import verify
from reshard.cli.watch import watch
from reshard.errors import ReshardError
from reshard.storage.host import open_standard_streams
from reshard.storage.remote import use_cache

__all__ = ["main"]


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="reshard %(version)s")
@click.option(
    "--cache",
    metavar="DIR",
    help="Keep what is read of buckets in this folder, for all commands and programs of this host that name it.",
)
@click.option("--cache-size", type=SIZE, default="50GB", show_default=True, help="The most bytes in the cache.")
@quiet_option
def main(cache: str | None, cache_size: int) -> None:
    """Read, convert and watch the checkpoints of large-model training.

    `reshard COMMAND --help` describes a command.

    \b
    Examples:
      reshard inspect output/checkpoint
      reshard inspect output/checkpoint --html page.html
      reshard layout preset llama --tp 4 > tp4.yaml
      reshard layout check tp4.yaml output/checkpoint
      reshard plan output/checkpoint --layout tp4.yaml
      reshard convert output/checkpoint hf/
      reshard convert hf/ tp4/ --layout tp4.yaml
      reshard merge ranks/ full/ --strategy strategy/
      reshard split full/ ranks8/ --strategy strategy/
      reshard diff output/checkpoint hf/ --part model
      reshard explain output/checkpoint --global-batch-size 512
      reshard watch output/checkpoint
      reshard verify output/checkpoint
      reshard rollback output/checkpoint 400
      reshard demo
      reshard --cache /local/cache verify s3://bucket/run

    Sizes are written as 4GiB or 4G (2**30 bytes), 500MB (10**6 bytes), or a number of bytes.

    \b
    Shell completion in bash (for zsh and fish see docs/commands.md):
      eval "$(_RESHARD_COMPLETE=bash_source reshard)"

    Exit codes: 0 success, 1 refused or damaged, 2 usage error, 74 the output could not be written, 130 interrupted.
    """
    open_standard_streams()
    if cache is not None:
        try:
            use_cache(cache, cache_size)
        except ReshardError as error:
            raise click.UsageError(error.message) from None


for _commands in (
    (inspect, verify, convert, merge, split, convert_files, plan, diff, explain, watch),
    (prune, pin, unpin, rollback, layout, names, strategy, demo),
):
    for _command in _commands:
        main.add_command(_command)
