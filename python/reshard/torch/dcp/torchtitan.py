"""torchtitan's `CheckpointManager` over `Writer` and `Reader`. It is imported by those who have torchtitan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.components.checkpointer.dcp import CheckpointManager as TitanCheckpointManager

from reshard.commit.roots import iteration_folder_name
from reshard.errors import EmptyRootError
from reshard.opening import open as open_checkpoint
from reshard.storage.location import locate
from reshard.torch.dcp.reader import Reader
from reshard.torch.dcp.writer import Writer


class CheckpointManager(TitanCheckpointManager):  # type: ignore[misc]  # its types are known where torchtitan is
    """As torchtitan's, with the files of this package: its folder is a checkpoint root, with an iteration for a step.

    `Config(enable=True, interval=...)` goes into the configuration of a trainer as `checkpoint`. `keep_latest_k` is the
    `keep` of a `Writer`. What is read or written as Hugging Face weights is as before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan."""

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return str(locate(folder or self.folder) / iteration_folder_name(step))

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that is complete, or -1."""
        try:
            with open_checkpoint(folder or self.folder) as newest:
                return -1 if newest.iteration is None else newest.iteration
        except EmptyRootError:
            return -1

    def _purge_stale_checkpoints(self) -> None:
        """Nothing: the writer removes older iterations once a newer one is complete."""

    def dcp_save(  # noqa: D102  as torchtitan's
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,  # noqa: FBT001, FBT002
        to_hf: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = Writer(checkpoint_id, keep=self.keep_latest_k or None)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)  # type: ignore[attr-defined]
            return None
        return dcp.async_save(  # type: ignore[attr-defined]
            state_dict, storage_writer=writer, process_group=self.pg, async_stager=self.stager
        )

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:  # noqa: D102, FBT001
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=Reader(checkpoint_id))  # type: ignore[attr-defined]
        if "model" in self.states:  # its weights are at the top level of the state, and no `Stateful` there
            self.states["model"].load_state_dict(state_dict)
