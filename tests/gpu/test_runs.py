"""Runs on a GPU: cut and resumed, they end with the numbers of an uninterrupted run, bit by bit."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.interop import load_file, save_file
from reshard.torch import Checkpointer, device_loads
from reshard.torch.dcp import Reader, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

WIDTH, STEPS, CUT = 64, 6, 3


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embed(ids)))
        return found


class Run:
    """One process of a training: everything that a new process would make anew."""

    def __init__(self, root: Path, kind: str) -> None:
        torch.manual_seed(0)
        self.kind, self.losses = kind, {}  # type: ignore[var-annotated]
        model = Net().cuda()
        self.model: Any = model
        if kind == "bfloat16":
            self.model.to(torch.bfloat16)
        if kind == "channels":
            layer: Any = model.body[0]
            layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
        if kind == "fsdp":
            fully_shard(self.model.body)
            fully_shard(self.model)
        options: dict[str, Any] = {"fused": {"fused": True}, "capturable": {"capturable": True}}.get(kind, {})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2) if kind == "float16" else None
        self.call = torch.compile(self.model) if kind == "compiled" else self.model
        self.checkpointer = Checkpointer(
            root, save_every=1, signals=(), overlap=kind == "overlap", commit={"durable": False}
        )
        self.step = self.checkpointer.resume(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"scaler": self.scaler} if self.scaler else None,
        ).initial_step

    def train(self, last: int) -> Run:
        for step in range(self.step + 1, last + 1):
            ids = torch.randint(32, (16,), device="cuda")
            with torch.autocast("cuda", torch.float16, enabled=self.scaler is not None):
                loss = nn.functional.cross_entropy(self.call(ids).float(), (ids + 1) % 32)
            self.optimizer.zero_grad()
            if self.scaler:
                torch.autograd.backward(self.scaler.scale(loss))
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                torch.autograd.backward(loss)
                self.optimizer.step()
            self.scheduler.step()
            self.losses[step] = loss.item()
            self.checkpointer.step(step, loss=loss)
        self.checkpointer.close()
        return self

    def state(self) -> dict[str, Any]:
        found = {name: full(tensor) for name, tensor in self.model.state_dict().items()}
        for n, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{n}.{name}": full(tensor) for name, tensor in state.items()}
        return found


def full(tensor: Any) -> bytes:
    tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


@pytest.fixture
def group() -> Iterator[None]:
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


KINDS = ("plain", "overlap", "fused", "capturable", "bfloat16", "float16", "channels", "compiled")


def check(tmp_path: Path, kind: str) -> None:
    whole = Run(tmp_path / "whole", kind).train(STEPS)
    first = Run(tmp_path / "cut", kind).train(CUT)
    torch.rand(7, device="cuda")  # another process has drawn other numbers
    second = Run(tmp_path / "cut", kind)
    assert second.step == CUT
    second.train(STEPS)
    assert first.losses | second.losses == whole.losses
    assert second.state() == whole.state()
    if whole.scaler and second.scaler:
        assert second.scaler.state_dict() == whole.scaler.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_cut_ends_like_one_that_was_not(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind)


@pytest.mark.usefixtures("group")
def test_a_run_of_fsdp2(tmp_path: Path) -> None:
    check(tmp_path, "fsdp")


def test_a_step_in_a_cuda_graph(tmp_path: Path) -> None:
    """Nothing tells the checkpointer of a replay: the copies must be complete before the next one."""
    weight = nn.Parameter(torch.zeros(1 << 24, device="cuda"))
    model = nn.ParameterList([weight])
    weight.grad = -torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    weight.data.zero_()
    with Checkpointer(tmp_path, save_every=1, keep=None, signals=(), commit={"durable": False}) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        for step in range(1, 6):
            graph.replay()
            checkpointer.step(step)
    for step in range(1, 6):
        with reshard.open(tmp_path / f"iteration_{step:08d}") as checkpoint:
            assert (checkpoint.read("0") == step).all(), step


def test_the_model_of_another_device_goes_on_here(tmp_path: Path) -> None:
    def made(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Net().to(device)
        return model, torch.optim.AdamW(model.parameters(), foreach=device == "cpu")

    model, optimizer = made("cpu")
    with Checkpointer(tmp_path, save_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        model(torch.arange(16)).sum().backward()
        optimizer.step()
        checkpointer.step(1)
    other, its_optimizer = made("cuda")
    for parameter in other.parameters():
        parameter.data.zero_()
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        assert checkpointer.resume(model=other, optimizer=its_optimizer).initial_step == 1
    assert all(parameter.is_cuda for parameter in other.parameters())
    assert [full(t) for t in other.state_dict().values()] == [full(t) for t in model.state_dict().values()]
    for here, there in zip(other.parameters(), model.parameters(), strict=True):
        moment = its_optimizer.state[here]["exp_avg"]
        assert moment.is_cuda
        assert full(moment) == full(optimizer.state[there]["exp_avg"])


def test_torch_saves_and_loads_a_run_through_the_storage(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net().cuda()
    save({"model": model.state_dict()}, storage_writer=Writer(tmp_path / "iteration_00000001"), no_dist=True)
    other = copy.deepcopy(model)
    for tensor in other.state_dict().values():
        tensor.zero_()
    state = {"model": other.state_dict()}
    load(state, storage_reader=Reader(tmp_path / "iteration_00000001"), no_dist=True)
    assert [full(t) for t in other.state_dict().values()] == [full(t) for t in model.state_dict().values()]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("changed", ["no", "transposed", "strided", "expanded", "empty", "scalar"])
def test_a_file_holds_what_the_device_held(tmp_path: Path, dtype: torch.dtype, changed: str) -> None:
    change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "no": lambda t: t,
        "transposed": lambda t: t.T,
        "strided": lambda t: t[::2, 1::3],
        "expanded": lambda t: t[:1].expand(9, -1),
        "empty": lambda t: t[:0],
        "scalar": lambda t: t[0, 0],
    }
    tensor = change[changed](torch.randint(0, 2, (24, 30), device="cuda").to(dtype))
    save_file({"x": tensor, "y": tensor.clone()}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors", "pt", "cuda:0")
    assert {one.device.type for one in loaded.values()} == {"cuda"}
    assert all(one.shape == tensor.shape and one.dtype == dtype for one in loaded.values())
    assert {full(one) for one in loaded.values()} == {full(tensor)}


@pytest.mark.parametrize("buffer_bytes", [1 << 10, 1 << 16, 1 << 26])
def test_a_checkpoint_passes_buffers_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    monkeypatch.setattr(device_loads, "_BUFFER_BYTES", buffer_bytes)
    torch.manual_seed(5)
    shapes = [(300, 70), (3, 5000), (1,), (), (0, 4), (17,), (1, 9000), (40, 3, 11)]
    kinds = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool)
    tensors = {f"{n}.{kind}": torch.rand(shape).to(kind) for n, shape in enumerate(shapes) for kind in kinds}
    save_file(tensors, tmp_path / "x.safetensors")
    busy = torch.ones(1 << 26, device="cuda")
    for _ in range(50):  # queued work, whose memory is free for the tensors once it is done
        busy = busy * 1.0001
    loaded = load_file(tmp_path / "x.safetensors", "pt", "cuda")
    del busy
    assert {name: full(one) for name, one in loaded.items()} == {name: full(one) for name, one in tensors.items()}


def test_values_that_are_not_finite_are_found(tmp_path: Path) -> None:
    model = Net().cuda()
    with torch.no_grad():
        model.head.weight[3, 4] = float("nan")
    with Checkpointer(tmp_path, save_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=model)
        checkpointer.step(1)
    text = next(tmp_path.glob("iteration_*/not_finite.json")).read_text()
    assert "head.weight" in text


def test_trainer(tmp_path: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", minversion="5.17")
    from reshard.transformers import ReshardCallback

    class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = (torch.arange(4) * (index % 3 + 1) + index) % 24
            return {"input_ids": ids, "labels": ids}

    class Crash(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def __init__(self, at: int) -> None:
            self.at = at

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == self.at:
                raise KeyboardInterrupt

    def trainer(root: Path, crash: int) -> Any:
        transformers.set_seed(1)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = transformers.LlamaConfig(vocab_size=24, max_position_embeddings=8, attention_dropout=0.2, **sizes)
        args = transformers.TrainingArguments(
            output_dir=str(root.parent / f"{root.name}.out"),
            report_to=[],
            disable_tqdm=True,
            num_train_epochs=2,
            per_device_train_batch_size=2,
            bf16=True,
            save_strategy="no",
        )
        ours = ReshardCallback(root, save_every=2, signals=(), commit={"durable": False})
        model = transformers.LlamaForCausalLM(config)
        return transformers.Trainer(model, args, train_dataset=Data(), callbacks=[Crash(crash), ours])

    whole = trainer(tmp_path / "whole", -1)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", 9).train()
    second = trainer(tmp_path / "cut", -1)
    second.train()
    assert second.model.device.type == "cuda"
    expected = {name: full(tensor) for name, tensor in whole.model.state_dict().items()}
    assert {name: full(tensor) for name, tensor in second.model.state_dict().items()} == expected


def test_a_published_folder_of_a_model_on_a_gpu(tmp_path: Path) -> None:
    """Values of the Hugging Face folder are those of the device at the save."""
    model = Net().cuda().to(torch.bfloat16)
    with Checkpointer(tmp_path / "run", save_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=model)
        checkpointer.step(1)
    reshard.convert(tmp_path / "run", tmp_path / "hf")
    with reshard.open(tmp_path / "hf") as checkpoint:
        for name, tensor in model.state_dict().items():
            stored = checkpoint.read(name)
            kind: Any = ml_dtypes.bfloat16 if tensor.dtype == torch.bfloat16 else np.int64
            assert stored.dtype == kind
            assert stored.tobytes() == full(tensor)
