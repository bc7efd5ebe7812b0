"""Goes on from a checkpoint of Trainer on two ranks, with and without the callback: `trainer_ranks.py <folder>`."""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from tests.transformers.trainers import outcome, plain, stopped, trainer

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from transformers import Trainer

warnings.simplefilter("ignore")
STEP = 3


def gone_on(root: Path, checkpoint: Path, *, is_ours: bool) -> Trainer:
    made = (trainer if is_ours else plain)(root, ddp_backend="gloo")
    made.train(resume_from_checkpoint=str(checkpoint))
    assert made.args.world_size == 2
    return made


def main(folder: Path) -> None:
    checkpoint = stopped(folder / "before", STEP, ddp_backend="gloo")
    expected = gone_on(folder / "expected", checkpoint, is_ours=False)
    made = gone_on(folder / "run", checkpoint, is_ours=True)
    rank = int(os.environ["RANK"])
    found = {"step": made.state.global_step, "is_equal": outcome(made)[1:] == outcome(expected)[1:]}
    dist.barrier()
    if rank == 0:
        (checkpoint / "rng_state_1.pth").unlink()
    dist.barrier()
    again = trainer(folder / "other", ddp_backend="gloo")
    try:
        again.train(resume_from_checkpoint=str(checkpoint))
    except ReshardError as error:
        found |= {"error": str(error), "refused_at": again.state.global_step}
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
