"""What code outside of a format asks about it."""

from __future__ import annotations

from typing import NamedTuple


class Traits(NamedTuple):
    """Properties of a format for code outside of it.

    Attributes:
        name: its name in the API and on the command line, such as "checkpoint2".
        counters_as_tensors: the counters of a run are tensors beside the weights, not fields of a file.
        expects_manifest: this package writes a manifest in it; one without a manifest cannot be verified.
        rank_folders: each rank has its own folder, and `strategy` is used.
        has_metadata: `metadata.json` describes the tensors, so a tensor can be missing from it.
        takes_strategy: `strategy` is used without rank folders.
        is_pretrained: it holds weights to start from, without the state of a run.
        has_sums: its files hold checksums of their own, which are compared when they are read.
        counters: what holds the counters of a run, such as a file; None: they are not read from this format.
    """

    name: str
    counters_as_tensors: bool = False
    expects_manifest: bool = False
    rank_folders: bool = False
    has_metadata: bool = False
    takes_strategy: bool = False
    is_pretrained: bool = False
    has_sums: bool = False
    counters: str | None = None
