"""`reshard.mindspore`: Parameters in and out, and a `Model.train` that is killed and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.peers.required import required

import reshard
from reshard.errors import ArgumentError, MismatchError

ms = required("mindspore")
nn = required("mindspore.nn")

import reshard.mindspore  # noqa: E402
from reshard.mindspore import ReshardCallback  # noqa: E402
from reshard.mindspore.parameters import as_array, as_tensor  # noqa: E402

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"


class Net(nn.Cell):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Dense(4, 8), nn.BatchNorm1d(8), nn.Dense(8, 1, dtype=ms.bfloat16)

    def construct(self, x: Any) -> Any:
        return self.down(self.norm(self.up(x)).astype(ms.bfloat16)).astype(ms.float32)


def bytes_of(parameters: Any) -> dict[str, bytes]:
    return {name: one.get_bytes() for name, one in parameters.items()}


def zeros(like: Any) -> Any:
    """The CPU has no operators for bfloat16."""
    return as_tensor(np.zeros_like(as_array(like)))


def test_a_network_and_its_optimizer_come_back(tmp_path: Path) -> None:
    ms.set_seed(0)
    network = Net()
    optimizer = nn.AdamWeightDecay(network.trainable_params())
    for one in optimizer.parameters_dict().values():
        if one.name.startswith("adam_v"):
            one.set_data(as_tensor(np.ones_like(as_array(one))))
    optimizer.global_step.set_data(ms.Tensor([7], ms.int32))
    reshard.mindspore.save(tmp_path / "root", 7, network, optimizer, extra={"note": "x"}, metrics={"loss": 1.0})
    with reshard.open(tmp_path / "root") as checkpoint:
        assert sorted(checkpoint.keys("model")) == sorted(network.parameters_dict())
        assert {"adam_m.up.weight", "adam_v.down.weight", "global_step"} < set(checkpoint.keys("optimizer"))
        assert checkpoint["down.weight"].dtype == "BF16"

    other = Net()
    state = nn.AdamWeightDecay(other.trainable_params())
    assert bytes_of(other.parameters_dict()) != bytes_of(network.parameters_dict())
    loaded = reshard.mindspore.load(tmp_path / "root", other, state)
    assert (loaded.iteration, loaded.extra) == (7, {"note": "x"})
    assert bytes_of(other.parameters_dict()) == bytes_of(network.parameters_dict())
    assert bytes_of(state.parameters_dict()) == bytes_of(optimizer.parameters_dict())
    third = Net()
    assert ms.load_param_into_net(third, reshard.mindspore.load(tmp_path / "root").parameters)[0] == []
    assert bytes_of(third.parameters_dict()) == bytes_of(network.parameters_dict())
    # MindSpore reads the file.
    file = next((tmp_path / "root/iteration_00000007").glob("*model-*.safetensors"))
    read = ms.load_checkpoint(str(file), format="safetensors")
    assert bytes_of(read) == bytes_of(network.parameters_dict())
    assert reshard.mindspore.load(tmp_path / "none", other).parameters == {}


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    names = [
        "bool_",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
    ]
    tensors = {name: ms.Tensor(np.array([[1, 0, 3]]), getattr(ms, name)) for name in names}
    for name, dtype in (
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
    ):
        raw = np.array([1.5, -2, 0]).astype(dtype)
        tensors[name] = ms.Tensor(ms.Tensor.convert_bytes_to_tensor(raw.tobytes(), (3,), getattr(ms, name)))
        np.testing.assert_array_equal(as_array(tensors[name]).astype(float), [1.5, -2, 0])
    tensors |= {"scalar": ms.Tensor(3.0, ms.float32), "empty": ms.Tensor(np.zeros((0, 3), np.float32))}
    tensors["transposed"] = ms.Tensor(np.arange(6.0).reshape(2, 3)).T
    reshard.mindspore.save(tmp_path / "root", 1, tensors)
    given: dict[str, Any] = {name: zeros(one) for name, one in tensors.items()}
    given["float32"] = ms.Parameter(given["float32"], name="p")
    found = reshard.mindspore.load(tmp_path / "root", given).parameters
    new = reshard.mindspore.load(tmp_path / "root").parameters
    for name, one in tensors.items():
        assert found[name] is given[name]
        for other in (given[name], new[name]):
            assert (other.dtype, other.shape, other.get_bytes()) == (one.dtype, one.shape, one.get_bytes()), name


def test_differences_are_refused_and_change_nothing(tmp_path: Path) -> None:
    reshard.mindspore.save(tmp_path / "root", 1, {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)})

    def refused(text: str, **tensors: Any) -> None:
        before = bytes_of(tensors)
        with pytest.raises(MismatchError, match=text):
            reshard.mindspore.load(tmp_path / "root", tensors)
        assert bytes_of(tensors) == before

    own = {name: ms.Parameter(ms.ops.zeros(size, ms.float32), name=name) for name, size in (("a", 3), ("b", 2))}
    refused(r"`b` is F32 with shape \(2,\) in .*, and F32 with shape \(3,\)", a=own["a"], b=ms.ops.zeros(3))
    refused("and BF16 with shape", a=own["a"], b=as_tensor(np.zeros(2, ml_dtypes.bfloat16)))
    refused("lacks `c`", **own, c=ms.ops.zeros(1))
    refused("has `b`, which", a=own["a"])
    assert reshard.mindspore.load(tmp_path / "root", {"a": own["a"]}, partial=True).parameters["a"].asnumpy()[0] == 1
    cell = nn.CellList([nn.Dense(2, 2), nn.Dense(2, 2)], auto_prefix=False)
    with pytest.raises(ArgumentError, match="two parameters are named"):
        reshard.mindspore.save(tmp_path / "root", 2, cell)
    with pytest.raises(ArgumentError, match="no option"):
        reshard.mindspore.save(tmp_path / "root", 2, own, dry_run=True)


def test_a_tree_without_global_step_takes_it_from_the_counters(tmp_path: Path) -> None:
    """Checkpoints of MindSpore Transformers without redundant copies do not hold the tensor."""
    root = SAMPLES / "ckpt2_dedup"
    tree = next(path.parent for path in root.rglob("latest_checkpointed_iteration.txt"))
    with reshard.open(tree) as checkpoint:
        expected = checkpoint.load()
        common = checkpoint.common
    assert common is not None
    assert "global_step" not in expected
    tensors = {name: zeros(one) for name, one in expected.items()}
    tensors["global_step"] = ms.Tensor([0], ms.int32)
    reshard.mindspore.load(tree, tensors)
    assert int(tensors.pop("global_step").asnumpy()[0]) == common.global_step
    assert bytes_of(tensors) == {name: one.tobytes() for name, one in expected.items()}


class Log(ms.train.Callback):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, bytes] = {}
        self.stop_at = 0

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        self.losses[params.cur_step_num] = params.net_outputs.get_bytes()
        params.loss_scale_mananger.update_loss_scale(overflow=params.cur_step_num % 4 == 0)
        if params.cur_step_num == self.stop_at:
            run_context.request_stop()


def trained(
    root: Path, *, stop_at: int = 0, seed: int | None = 3, batch: int = 4, epochs: int = 4, **words: Any
) -> Any:
    """The losses, the model and the start. The CPU has no dynamic loss scale: its manager is only updated."""
    ms.dataset.config.set_seed(5489)
    if seed is not None:
        ms.set_seed(seed)
    x = np.random.default_rng(0).standard_normal((20, 4), np.float32)
    data = ms.dataset.NumpySlicesDataset((x, x.sum(1, keepdims=True)), ["x", "y"], shuffle=True).batch(batch)
    network, log = nn.Dense(4, 1), Log()
    manager = ms.train.DynamicLossScaleManager(init_loss_scale=4.0, scale_window=3)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    model = ms.train.Model(network, nn.MSELoss(), optimizer)
    model._loss_scale_manager, manager.get_drop_overflow_update = manager, lambda: False
    callback, log.stop_at = ReshardCallback(root, save_every=2, keep=9), stop_at
    start = callback.resume(model, data)
    model.train(epochs, data, callbacks=[callback, log], **{"initial_epoch": start.initial_epoch, **words})
    return log.losses, model, start


@pytest.mark.parametrize("stop_at", [5, 7, 10])
def test_a_stopped_training_goes_on_bit_equal(tmp_path: Path, stop_at: int) -> None:
    """Within an epoch and at its end: the dataset, the optimizer and the loss scale go on."""
    whole, expected, _ = trained(tmp_path / "whole")
    first, _, _ = trained(tmp_path / "torn", stop_at=stop_at)
    rest, model, start = trained(tmp_path / "torn")
    assert (start.initial_step, start.initial_epoch) == (stop_at, stop_at // 5)
    assert list(first) + list(rest) == list(range(1, 21))
    assert first | rest == whole
    assert bytes_of(model.train_network.parameters_dict()) == bytes_of(expected.train_network.parameters_dict())
    found, manager = (vars(one._loss_scale_manager) for one in (model, expected))
    assert all(found[name] == manager[name] for name in ("loss_scale", "cur_iter", "last_overflow_iter", "bad_step"))
    with reshard.open(tmp_path / "torn/iteration_00000012") as checkpoint:
        common = checkpoint.common
        assert common is not None
        assert (common.step_num, common.epoch_num, common.global_step, common.global_batch_size) == (12, 3, 12, 4)


def test_what_moves_the_position_in_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="shuffled without a seed"):
        trained(tmp_path / "new", seed=None)
    trained(tmp_path / "root", stop_at=7)
    with pytest.raises(MismatchError, match="dataset seed 3, and this run has 4"):
        trained(tmp_path / "root", seed=4)
    with pytest.raises(MismatchError, match="steps per epoch 5, and this run has 10"):
        trained(tmp_path / "root", batch=2)
    with pytest.raises(ArgumentError, match="starts with epoch 0, and the checkpoint is in epoch 1"):
        trained(tmp_path / "root", initial_epoch=0)
    network = nn.Dense(4, 1)
    model = ms.train.Model(network, nn.MSELoss(), nn.Momentum(network.trainable_params(), 0.01, 0.9))
    data = ms.dataset.NumpySlicesDataset((np.zeros((8, 4), np.float32), np.zeros((8, 1), np.float32)), ["x", "y"])
    with pytest.raises(ArgumentError, match="this run starts at step 0"):
        model.train(1, data.batch(4), callbacks=[ReshardCallback(tmp_path / "root", save_every=2)])


@pytest.mark.slow
def test_the_killed_example_goes_on(tmp_path: Path) -> None:
    def start(folder: str, epochs: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "reshard.examples.train_mindspore", "--epochs", str(epochs)]
        with (tmp_path / f"{folder}.log").open("ab") as log:
            return subprocess.Popen([*command, "--out", str(tmp_path / folder)], stdout=log, env=os.environ)

    whole = start("whole", 5)
    killed, log = start("torn", 100_000), tmp_path / "torn.log"
    while len(log.read_text().splitlines()) < 27:
        assert killed.poll() is None
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    assert whole.wait() == 0
    n_before = len(log.read_text().splitlines())
    n_epochs = n_before // 12 + 2
    assert start("torn", n_epochs).wait() == 0
    lines = log.read_text().splitlines()
    assert int(lines[n_before].split()[0]) > 20  # a MindSpore run that starts over begins at 1
    assert int(lines[-1].split()[0]) == 12 * n_epochs
    expected = (tmp_path / "whole.log").read_text().splitlines()
    by_step = dict(line.split() for line in expected)
    assert all(by_step[step] == loss for step, loss in map(str.split, lines) if step in by_step)
    assert n_before >= 60 or any(int(line.split()[0]) <= 60 for line in lines[n_before:])
