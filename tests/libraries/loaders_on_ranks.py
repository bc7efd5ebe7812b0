"""Trainings by Trainer or accelerate, one after the other, as a program: `cases.json`.

Each rank is a fork, which writes what its steps read into the file `<out>.<rank>`. `stop` of a case is the step after
which the ranks end, with the exit code 75. A position that is refused ends them with 3.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402
from tests.helpers.ports import unused_port  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from reshard.accelerate import prepared  # noqa: E402
from reshard.errors import MismatchError  # noqa: E402
from reshard.torch import Checkpointer  # noqa: E402
from reshard.transformers import ReshardCallback  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 22
_out: list[Any] = []  # of this rank: its number and its file


class Items(Dataset[Any]):
    def __init__(self, *, draws: bool = False) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < N:
            raise IndexError(index)
        noise = torch.rand(1).item() if self.draws else 0.0
        return {"x": torch.tensor([float(index), noise]), "input_ids": list(range(1 + index % 5))}


class Stream(IterableDataset[Any]):
    def __init__(self, *, draws: bool = False) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        numbers = range(N) if info is None else range(info.id, N, info.num_workers)
        for number in numbers:
            yield {"x": torch.tensor([float(number), random.random() if self.draws else 0.0])}


def collate(rows: list[Any]) -> Any:
    return {"x": torch.stack([row["x"] for row in rows])}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, x: Any, **_others: Any) -> Any:
        loss = torch.nn.functional.dropout(self.line(x / N), 0.5).square().mean()
        say(f"read {x[:, 0].int().tolist()} {float(x.sum()).hex()} {float(loss).hex()}")
        return {"loss": loss}


def say(line: str) -> None:
    _out[0].write(f"{line}\n")
    _out[0].flush()


def said(step: int, net: Net) -> None:
    say(f"step {step} {float(net.line.weight.detach().double().sum()).hex()}")


def data_of(case: dict[str, Any]) -> Any:
    kind, draws = case["kind"], case.get("draws", False)
    return Stream(draws=draws) if kind == "stream" else Items(draws=draws)


def loader_of(case: dict[str, Any]) -> Any:
    """The loader of a case."""
    data, kind, size = data_of(case), case["kind"], case.get("size", 2)
    options: dict[str, Any] = {"num_workers": case.get("workers", 0), "collate_fn": collate}
    if kind == "batch sampler":
        sampler: Any = RandomSampler(data, generator=torch.Generator().manual_seed(3))
        return DataLoader(data, batch_sampler=BatchSampler(sampler, size, drop_last=False), **options)
    options |= {"batch_size": size, "drop_last": case.get("drop_last", False)}
    if kind == "shuffle":
        options["shuffle"] = True
    if kind == "generator":
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
    if kind == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0 + i for i in range(N)], N)
    if kind == "sequential":
        options["sampler"] = SequentialSampler(data)
    return DataLoader(data, **options)


class Cut(TrainerCallback):
    def __init__(self, net: Net, stop: int | None) -> None:
        self.net, self.stop = net, stop

    def on_step_begin(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        if state.global_step:
            said(state.global_step, self.net)
        if state.global_step == self.stop:
            os._exit(75)

    def on_train_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
        said(state.global_step, self.net)


def by_trainer(root: Path, case: dict[str, Any], net: Net) -> None:
    args = TrainingArguments(
        str(root) + ".out",
        max_steps=case["steps"],
        per_device_train_batch_size=case.get("size", 2),
        gradient_accumulation_steps=case.get("accumulate", 1),
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=case.get("workers", 0),
        dataloader_drop_last=case.get("drop_last", False),
        train_sampling_strategy="group_by_length" if case["kind"] == "grouped" else "random",
        accelerator_config=case.get("config", {}),
    )
    callbacks: list[Any] = [Cut(net, case.get("stop"))]
    if case.get("callback", True):
        made = ReshardCallback(root, save_every=1, signals=(), commit={"durable": False}, async_save=False)
        callbacks.insert(0, made)
    trainer = Trainer(net, args, train_dataset=data_of(case), data_collator=collate, callbacks=callbacks)
    if case["kind"] not in {"stream", "shuffle", "grouped"}:
        given = trainer.accelerator.prepare(loader_of(case))
        trainer.get_train_dataloader = lambda: given  # type: ignore[method-assign]
    trainer.train()


def by_accelerate(root: Path, case: dict[str, Any], net: Net) -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.get("accumulate", 1),
        dataloader_config=DataLoaderConfiguration(**case.get("config", {})),
    )
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(net, optimizer, loader_of(case))
    with Checkpointer(root, save_every=1, signals=(), commit={"durable": False}, async_save=False) as made:
        step = made.resume(**prepared(accelerator)).initial_step if case.get("callback", True) else 0
        while step < case["steps"]:
            for batch in data:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"])["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    if case.get("callback", True):
                        made.step(step)
                    said(step, net)
                    if step == case.get("stop"):
                        os._exit(75)
                    if step == case["steps"]:
                        break


LIBRARIES = {"transformers": by_trainer, "accelerate": by_accelerate}


def rank(number: int, port: int, case: dict[str, Any]) -> None:
    """Run a case on one rank."""
    n_ranks = case["ranks"]
    if n_ranks > 1:
        names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _out.append(Path(f"{case['out']}.{number}").open("w"))  # noqa: SIM115
    os.dup2(_out[0].fileno(), 1)
    os.dup2(_out[0].fileno(), 2)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    code = 0
    try:
        LIBRARIES[case["library"]](Path(case["root"]), case, Net())
    except MismatchError as error:
        say(f"refused {error}")
        code = 3
    except BaseException:  # noqa: BLE001
        say(traceback.format_exc())
        code = 1
    os._exit(code)


def ranks(case: dict[str, Any]) -> list[int]:
    """Run a case. Returns the exit codes of its ranks."""
    port = unused_port()
    pids = []
    for number in range(case["ranks"]):
        pid = os.fork()
        if not pid:
            rank(number, port, case)
        pids.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + case.get("patience", 240)
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        if any(code not in (0, 75) for code in codes.values()):
            deadline = min(deadline, time.monotonic() + 60)  # the others end as well, or wait for that one for ever
        if time.monotonic() > deadline:
            for one in set(pids) - set(codes):
                os.kill(one, signal.SIGKILL)
            deadline += 1e9
        time.sleep(0.01)
    return [codes[one] for one in pids]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(ranks(chosen)), flush=True)
