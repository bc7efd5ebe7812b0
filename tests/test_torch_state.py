"""Models, optimizers and objects as arrays and back: a run that went through them goes on bit for bit as if it had not."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from tests.ranks import Job
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import lr_scheduler

import reshard
from reshard.errors import ArgumentError, MismatchError, ReshardError, UnsupportedError
from reshard.formats import state as state_format
from reshard.group import SingleProcess
from reshard.layout import ModelLayout
from reshard.torch.state import Described, Report, apply, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from reshard.group import TorchGroup


def through_files(described: Described) -> tuple[dict[str, np.ndarray], Any]:
    """The arrays and the extra state as they come out of files: new memory, plain values."""
    arrays = {}
    for key, tensor in (described.model | described.optimizer).items():
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        from reshard import dtypes

        raw = tensor.detach().contiguous().view(bits).numpy().copy()
        arrays[key] = raw.view(dtypes.numpy_dtype(dtypes.parse_dtype(tensor.dtype)))
    text, beside = state_format.dump(described.extra)
    return arrays, state_format.load(text, {name: array.copy() for name, array in beside.items()})


class Net(nn.Module):
    """Matrices, vectors, a scalar, a tied weight, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4, bias=False))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.embed(tokens)) + self.mask
        logits: torch.Tensor = self.head(self.body(hidden)) * self.scale
        return logits


KEYS = [
    "scale",
    "unused",
    "embed.weight",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "body.0.weight",
    "body.0.bias",
    "body.2.weight",
    "head.bias",
]


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def step(model: nn.Module, optimizer: Any, n: int) -> float:
    tokens = torch.randint(0, 7, (16,), generator=torch.Generator().manual_seed(n))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return float(optimizer.step(closure).detach())  # type: ignore[no-untyped-call]
    loss = closure()
    optimizer.step()
    return float(loss.detach())


def bits(model: nn.Module) -> dict[str, bytes]:
    return {key: tensor.detach().contiguous().numpy().tobytes() for key, tensor in model.state_dict().items()}


def two_groups(model: nn.Module, make: Callable[..., Any], **options: Any) -> Any:
    parameters = list(model.parameters())
    return make([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}], **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02, initial_accumulator_value=0.1),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "Adam fused": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "Adam foreach": lambda m: torch.optim.Adam(m.parameters(), foreach=True),
    "Adam lr tensor": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "AdamW": lambda m: two_groups(m, torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95)),
    "AdamW named": lambda m: torch.optim.AdamW(m.named_parameters()),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), t0=2),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), history_size=2, max_iter=3),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Muon and AdamW": lambda m: [
        torch.optim.Muon([p for p in m.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in m.parameters() if p.ndim != 2]),
    ],
}


class Both:
    """Several optimizers that make a step together."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def stepper(optimizer: Any) -> Any:
    return Both(optimizer) if isinstance(optimizer, list) else optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of what is this small, threads make nothing faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "into"),
    [(name, "fresh") for name in OPTIMIZERS]
    + [(name, into) for name in ("Adam", "SGD momentum", "SGD", "LBFGS") for into in ("used", "live memory")],
)
def test_a_run_goes_on_bit_for_bit(name: str, into: str) -> None:
    make = OPTIMIZERS[name]
    model = net()
    optimizer = make(model)
    for n in range(3):
        step(model, stepper(optimizer), n)
    described = describe(model, optimizer)
    assert list(described.model) == KEYS
    assert described.layout is None
    arrays, extra = through_files(described)
    for n in range(3, 6):
        step(model, stepper(optimizer), n)

    other = net(1)
    other_optimizer = make(other)
    if into != "fresh":
        step(other, stepper(other_optimizer), 7)
    target = describe(other, other_optimizer)
    if into == "live memory":
        for key, array in target.out().items():
            if key in arrays:
                array[...] = arrays[key]
                arrays[key] = array
    assert apply(target, arrays, extra) == Report()
    for n in range(3, 6):
        step(other, stepper(other_optimizer), n)
    assert bits(other) == bits(model)
    everything = [o.state_dict() for o in (other_optimizer if isinstance(optimizer, list) else [other_optimizer])]
    expected = [o.state_dict() for o in (optimizer if isinstance(optimizer, list) else [optimizer])]
    assert same(everything, expected)


def test_every_optimizer_of_torch_is_tested() -> None:
    known = {name.split()[0] for name in OPTIMIZERS} | {"SparseAdam"}
    kinds = {k for k, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)}
    assert kinds - {"Optimizer"} <= known


def test_sparse_gradients() -> None:
    def run(model: nn.Embedding, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
        for n in range(first, end):
            optimizer.zero_grad()
            model(torch.tensor([n, 2])).sum().backward()
            optimizer.step()

    model = nn.Embedding(9, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    run(model, optimizer, 0, 3)
    arrays, extra = through_files(describe(model, optimizer))
    assert sorted(arrays) == ["exp_avg.weight", "exp_avg_sq.weight", "weight"]
    run(model, optimizer, 3, 6)
    other = nn.Embedding(9, 3, sparse=True)
    other_optimizer = torch.optim.SparseAdam(other.parameters())
    apply(describe(other, other_optimizer), arrays, extra)
    run(other, other_optimizer, 3, 6)
    assert bits(other) == bits(model)


# ------------------------------------------------------------------------------------------------- schedulers, objects


def sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


class Warmup:
    """A callable object, whose attributes torch saves."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.n)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR object": lambda o: lr_scheduler.LambdaLR(o, Warmup(4)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CyclicLR function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, scale_fn=lambda x: 0.5**x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([sequential(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name: str) -> None:
    def run(optimizer: Any, scheduler: Any, steps: range) -> list[float]:
        rates = []
        for n in steps:
            optimizer.step()
            args = [1.0 + n % 2] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []
            scheduler.step(*args)
            rates += [group["lr"] for group in optimizer.param_groups]
        return rates

    def made() -> tuple[nn.Module, Any, Any]:
        model = nn.Linear(2, 2)
        optimizer = two_groups(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of schedulers that step when they are made
            return model, optimizer, SCHEDULERS[name](optimizer)

    def two_groups(model: nn.Linear, make: Any, **options: Any) -> Any:
        return make([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}], **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, scheduler = made()
        run(optimizer, scheduler, range(3))
        arrays, extra = through_files(describe(model, optimizer, objects={"scheduler": scheduler}))
        expected = run(optimizer, scheduler, range(3, 7))
        other, other_optimizer, other_scheduler = made()
        target = describe(other, other_optimizer, objects={"scheduler": other_scheduler})
        assert apply(target, arrays, extra) == Report()
        assert run(other_optimizer, other_scheduler, range(3, 7)) == expected


def test_every_scheduler_of_torch_is_tested() -> None:
    base = lr_scheduler.LRScheduler
    kinds = {k for k, v in vars(lr_scheduler).items() if isinstance(v, type) and issubclass(v, base)}
    assert {kind for kind in kinds if not kind.startswith("_")} - {"LRScheduler"} <= {n.split()[0] for n in SCHEDULERS}


def test_objects_and_what_they_are_called() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler._growth_tracker = None
    model = nn.Linear(2, 2)
    arrays, extra = through_files(describe(model, objects={"scaler": scaler}))
    other = torch.amp.GradScaler("cpu", init_scale=8.0)
    target = describe(model, objects={"scaler": other, "sampler": other})
    assert apply(target, arrays, extra, strict=False) == Report(missing=("objects.sampler",))
    assert other.get_scale() == 4.0
    assert apply(describe(model), arrays, extra, strict=False) == Report(unexpected=("objects.scaler",))
    with pytest.raises(MismatchError, match=r"the checkpoint lacks `objects.sampler`\nhint: `strict=False`"):
        apply(target, arrays, extra)
    with pytest.raises(ArgumentError, match="`lr`, a float without `state_dict`"):
        describe(model, objects={"lr": 0.1})


def test_state_of_modules_besides_tensors() -> None:
    class Counting(nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    model = nn.Sequential(Counting(2, 2))
    model[0].seen = 5
    arrays, extra = through_files(describe(model))
    other = nn.Sequential(Counting(2, 2))
    apply(describe(other), arrays, extra)
    assert other[0].seen == 5


# --------------------------------------------------------------------------------------------------------------- names


def test_wrappers_leave_no_trace_in_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), checkpoint_wrapper(nn.Linear(3, 2)))
    compiled = torch.compile(inner, backend="eager")
    plain = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for model in (compiled, nn.DataParallel(inner)):
        described = describe(model, torch.optim.SGD(inner.parameters(), lr=0.1))  # type: ignore[arg-type]
        assert list(described.model) == plain
        assert described.extra["optimizer"]["groups"][0]["params"] == plain
    # A module may be called `module`, and parts may be given together.
    named = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert list(describe([named, inner]).model) == ["module.weight", "module.bias", *plain]
    with pytest.raises(ArgumentError, match="two tensors of the model are named `0.weight`"):
        describe([inner, nn.Sequential(nn.Linear(1, 1))])


def test_tied_tensors_are_stored_once_under_whatever_name() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    described = describe(model, optimizer)
    assert described.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in described.model
    arrays, extra = through_files(described)
    # The checkpoint of a model whose head came first, and one in which nothing was tied.
    swapped = {key.replace("embed.weight", "head.weight"): array for key, array in arrays.items()}
    other_extra = copy.deepcopy(extra)
    other_extra["aliases"] = {"embed.weight": "head.weight"}
    record = other_extra["optimizer"]
    record["groups"][0]["params"] = [n.replace("embed.weight", "head.weight") for n in record["groups"][0]["params"]]
    record["slots"] = [[s, [n.replace("embed.weight", "head.weight") for n in names]] for s, names in record["slots"]]
    untied = arrays | {"head.weight": arrays["embed.weight"]}
    for loaded, beside in ((swapped, other_extra), (untied, extra), (swapped, None)):
        other = net(1)
        target = torch.optim.Adam(other.parameters())
        apply(describe(other, target), loaded, beside)
        assert bits(other) == bits(model)
        assert other.head.weight is other.embed.weight
        assert torch.equal(target.state[other.embed.weight]["exp_avg"], optimizer.state[model.embed.weight]["exp_avg"])
    # A model that does not tie what was tied.
    loose = net(1)
    loose.head.weight = nn.Parameter(torch.zeros(7, 4))
    apply(describe(loose), {key: a for key, a in arrays.items() if key in KEYS}, extra)
    assert torch.equal(loose.head.weight, model.embed.weight)


def test_what_has_no_names_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="holds a parameter of shape \\(3,\\) that the model does not have"):
        describe(model, torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(ArgumentError, match="two optimizers hold `weight`"):
        describe(model, [torch.optim.SGD([model.weight], lr=0.1)] * 2)
    with pytest.raises(ArgumentError, match="`optimizer` is a dict, expected a torch.optim.Optimizer"):
        describe(model, {})
    with pytest.raises(ArgumentError, match="`model` is a dict, expected"):
        describe({})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="`weight` is not initialised yet"):
        describe(nn.LazyLinear(3))
    with pytest.raises(UnsupportedError, match="`weight`: unknown dtype torch.complex128"):
        describe(nn.Linear(2, 2, dtype=torch.complex128))

    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(UnsupportedError, match="a Own has a `state_dict` of its own"):
        describe(model, Own(model.parameters(), lr=0.1))


# ------------------------------------------------------------------------------------------------- what does not fit


def fitting(model: nn.Module, optimizer: Any = None) -> tuple[dict[str, np.ndarray], Any]:
    return through_files(describe(model, optimizer))


def test_missing_and_unexpected_keys() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    arrays, extra = fitting(model, optimizer)
    del arrays["bias"], arrays["exp_avg.weight"]
    arrays |= {"odd": np.zeros(1, np.float32), "max_exp_avg_sq.bias": np.zeros(2, np.float32)}
    before = bits(model)
    with torch.no_grad():
        model.weight.fill_(9)
    changed = bits(model)
    expected = Report(missing=("bias", "exp_avg.weight"), unexpected=("odd", "max_exp_avg_sq.bias"))
    with pytest.raises(MismatchError) as caught:
        apply(describe(model, optimizer), arrays, extra)
    assert str(caught.value) == (
        "the checkpoint lacks `bias`, `exp_avg.weight`, and the trainer has no place for `odd`, `max_exp_avg_sq.bias`\n"
        "hint: `strict=False` loads what fits"
    )
    assert bits(model) == changed  # nothing was done by halves
    assert apply(describe(model, optimizer), arrays, extra, strict=False) == expected
    assert bits(model)["weight"] == before["weight"]


def test_shape_and_dtype_must_agree() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    arrays, extra = fitting(nn.Linear(2, 2))
    with pytest.raises(MismatchError, match="`weight` is F32 in the checkpoint and BF16 in the trainer\nhint: `cast"):
        apply(describe(model), arrays, extra)
    assert apply(describe(model), arrays, extra, cast=True) == Report()
    assert torch.equal(model.weight, torch.from_numpy(arrays["weight"]).to(torch.bfloat16))
    whole = {"weight": np.zeros((2, 2), np.int32), "bias": np.zeros(2, np.int32)}
    with pytest.raises(MismatchError, match="`weight` is I32 in the checkpoint and BF16 in the trainer$"):
        apply(describe(model), whole, cast=True)
    with pytest.raises(MismatchError, match=r"`weight`: an array of shape \(3, 2\) was loaded, and .* \(2, 2\)"):
        apply(describe(model), {"weight": np.zeros((3, 2), np.float32)}, strict=False)
    # New state: what was of its parameter's dtype still is, the rest stays as it was.
    full = nn.Linear(2, 2)
    trained = torch.optim.Adam(full.parameters())
    full(torch.ones(1, 2)).sum().backward()
    trained.step()
    arrays, extra = fitting(full, trained)
    apply(describe(model, optimizer), arrays, extra, cast=True)
    state = optimizer.state[model.weight]
    dtypes_of = {slot: tensor.dtype for slot, tensor in state.items()}
    assert dtypes_of == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def test_another_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    arrays, extra = fitting(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(MismatchError, match="`weight` was trained with Adam, and is with SGD now"):
        apply(describe(model, torch.optim.SGD(model.parameters(), lr=0.1)), arrays, extra)
    assert apply(describe(model), arrays, extra) == Report()


def test_groups_may_be_made_otherwise() -> None:
    """Options follow the parameters, whatever groups these are in; an empty group takes its place in the list."""
    model = nn.Linear(2, 2)
    parameters = [model.weight, model.bias]
    optimizer = torch.optim.SGD([{"params": parameters, "lr": 0.5}, {"params": [], "lr": 0.25}], lr=1.0)
    arrays, extra = fitting(model, optimizer)
    split = torch.optim.SGD([{"params": [p]} for p in reversed(parameters)], lr=1.0)
    apply(describe(model, split), arrays, extra)
    assert [group["lr"] for group in split.param_groups] == [0.5, 0.5]
    alike = torch.optim.SGD([{"params": parameters}, {"params": []}], lr=1.0)
    apply(describe(model, alike), arrays, extra)
    assert [group["lr"] for group in alike.param_groups] == [0.5, 0.25]
    apart = torch.optim.SGD([{"params": [p], "lr": 0.1 * n} for n, p in enumerate(parameters, 1)], lr=1.0)
    arrays, extra = fitting(model, apart)
    with pytest.raises(MismatchError, match=r"`bias` is in one group .* with `weight`, .*: lr is 0.1 and 0.2"):
        apply(describe(model, alike), arrays, extra)
    # A parameter that was not trained before.
    arrays, extra = fitting(model, torch.optim.SGD([model.weight], lr=0.1))
    report = apply(describe(model, alike), arrays, extra, strict=False)
    assert report == Report(missing=("options.bias",))


def test_state_that_the_checkpoint_does_not_have_is_dropped() -> None:
    """Going back to before the first step, in the same process."""
    model = net()
    for name in ("SGD momentum", "LBFGS", "Adam"):
        optimizer = OPTIMIZERS[name](model)
        arrays, extra = fitting(model, optimizer)
        step(model, optimizer, 0)
        assert optimizer.state
        assert apply(describe(model, optimizer), arrays, extra) == Report()
        assert not any(optimizer.state.values())


# ------------------------------------------------------------------------------------------------------ without content


def test_models_on_the_device_meta() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, 0)
    arrays, extra = fitting(model, optimizer)
    with torch.device("meta"):
        other = Net()
    other.scale.my_mark = 7  # type: ignore[attr-defined]
    other_optimizer = torch.optim.Adam(other.parameters())
    target = describe(other, other_optimizer)
    assert all(tensor.is_meta for tensor in target.model.values())
    with pytest.raises(MismatchError, match="`mask` on device `meta`: buffers with `persistent=False`.*\nhint: pass"):
        apply(target, arrays, extra)
    called = []

    def init(name: str, buffer: torch.Tensor) -> None:
        called.append(name)
        buffer.copy_(torch.arange(4.0))

    short = {key: array for key, array in arrays.items() if key != "scale"}
    with pytest.raises(MismatchError, match="lacks `scale`, on device `meta`: nothing else can give them a content"):
        apply(target, short, extra, strict=False, init=init)
    assert apply(target, arrays, extra, init=init) == Report()
    assert called == ["mask"]
    assert other.head.weight is other.embed.weight
    assert other.scale.my_mark == 7  # type: ignore[attr-defined]
    assert other.embed.weight.data_ptr() == arrays["embed.weight"].ctypes.data  # the array itself
    for n in range(1, 3):
        assert step(model, optimizer, n) == step(other, other_optimizer, n)
    assert bits(other) == bits(model)


# --------------------------------------------------------------------------------------------------------- many ranks


class Blocks(nn.Module):
    """Matrices of uneven sizes, a norm with running means; every rank makes the same."""

    def __init__(self, keys: str = "abcd") -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = {"a": (6, 10), "b": (10, 7), "c": (7, 9), "d": (9, 6)}
        layers = {key: nn.Linear(*size) for key, size in sizes.items()}
        self.layers = nn.ModuleDict({key: layers[key] for key in keys})
        self.norm = nn.BatchNorm1d(6) if "a" in keys else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def batch(n: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * n + rank))


def cut_with_tp(model: Blocks, mesh: Any) -> Blocks:
    plan: dict[str, Any] = {"layers.a": ColwiseParallel(), "layers.b": RowwiseParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    return model


def sharded(model: Blocks, mesh: Any) -> Blocks:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: Any, group: TorchGroup, steps: range, *, same: bool = False) -> None:
    for n in steps:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP2 over TP warns of the views that TP returns
            model(batch(n, 0 if same else group.rank)).square().sum().backward()
        optimizer.step()


def whole(tensor: Any) -> torch.Tensor:
    """The oracle: torch's own gathering."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def wholes(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Parameters and state by the names that they should have."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name.removeprefix("module."): whole(p) for p, name in names.items()}
    for p, state in getattr(optimizer, "optim", optimizer).state.items():
        found |= {f"{slot}.{names[p].removeprefix('module.')}": whole(value) for slot, value in state.items()}
    return found


def agrees(described: Described, expected: Mapping[str, torch.Tensor], group: TorchGroup) -> list[str]:
    """Names of arrays that are not what the layout cuts out of the whole."""
    shapes = {key: tuple(tensor.shape) for key, tensor in expected.items()}
    assert described.layout is not None
    optimizer = [key for key in expected if key.split(".")[0] in ("step", "exp_avg", "exp_avg_sq")]
    bound = ModelLayout.from_mapping(described.layout).bind(shapes, optimizer_keys=optimizer)
    arrays = described.model | described.optimizer
    assert set(bound.local_names(group.rank)) == set(arrays) & set(expected)
    wrong = []
    for key in bound.local_names(group.rank):
        layout = bound.layouts[key]
        wanted = torch.empty(layout.local_shape(group.rank))
        for first, extents, at, strides in layout.tiles(group.rank):
            box = tuple(slice(f, f + n) for f, n in zip(first, extents, strict=True))
            torch.as_strided(wanted, extents, strides, at).copy_(expected[key][box])
        if not torch.equal(wanted, arrays[key]):
            wrong.append(key)
    return wrong


KINDS = ["DDP", "FSDP2", "FSDP2 over TP"]


def built(kind: str, world_size: int) -> tuple[nn.Module, Any]:
    model = Blocks()
    wrapped: nn.Module
    if kind == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif kind == "FSDP2":
        wrapped = sharded(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",)))
    else:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        wrapped = sharded(cut_with_tp(model, mesh["tp"]), mesh["dp"])
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_hold_is_saved_and_loaded_under_any_other_cut(kind: str, tmp_path: Path) -> None:
    def save(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model, optimizer = built(kind, group.world_size)
        train(model, optimizer, group, range(2), same=kind == "FSDP2 over TP")
        described = describe(model, optimizer)
        expected = wholes(model, optimizer)
        wrong = agrees(described, expected, group)
        reshard.save(tmp_path, 2, **described.saving(), extra={"trainer": described.extra})
        raw = {key: tensor.tolist() for key, tensor in expected.items()}
        return [wrong, described.layout, described.reason, raw, whole(model.get_buffer(BUFFER[kind])).tolist()]

    with Job(4, save) as job:
        values = job.values()
    assert [value[0] for value in values] == [[]] * 4
    assert [value[1:3] for value in values] == [[values[0][1], None]] * 4
    expected, running_mean = values[0][3], values[0][4]
    assert running_mean != values[1][4] or kind == "FSDP2 over TP"  # ranks differ, and the first one's is saved

    def load(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        told = {}
        for kind in KINDS:
            model, optimizer = built(kind, group.world_size)
            if kind == "DDP":  # also into what has state already
                train(model, optimizer, group, range(7, 8))
            described = describe(model, optimizer)
            loaded = reshard.load(tmp_path, described.layout)
            assert apply(described, loaded.state, loaded.extra["trainer"]) == Report()
            raw = {key: tensor.tolist() for key, tensor in wholes(model, optimizer).items()}
            told[kind] = [raw, model.get_buffer(BUFFER[kind]).tolist()]
            train(model, optimizer, group, range(2, 3), same=True)  # it can go on
        return told

    for world_size in (2, 4) if kind == "FSDP2" else (2,):
        with Job(world_size, load) as job:
            for value in job.values():
                for told in value.values():
                    assert told == [expected, running_mean]


BUFFER = {"DDP": "module.norm.running_mean", "FSDP2": "norm.running_mean", "FSDP2 over TP": "norm.running_mean"}


def test_zero_redundancy_optimizer_and_back(tmp_path: Path) -> None:
    """Each state is whole on its owner, and belongs to another rank in another world."""

    def built(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model = nn.parallel.DistributedDataParallel(Blocks())
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def save(group: TorchGroup) -> Any:
        model, optimizer = built(group)
        train(model, optimizer, group, range(2))
        described = describe(model, optimizer)
        own = {key: tensor.tolist() for key, tensor in described.optimizer.items()}
        reshard.save(tmp_path, 2, **described.saving(), extra={"trainer": described.extra})
        train(model, optimizer, group, range(2, 4), same=True)
        return [own, {key: tensor.tolist() for key, tensor in wholes(model, torch.optim.SGD([model_p(model)])).items()}]

    def load(group: TorchGroup) -> Any:
        model, optimizer = built(group)
        described = describe(model, optimizer)
        loaded = reshard.load(tmp_path, described.layout)
        assert apply(described, loaded.state, loaded.extra["trainer"]) == Report()
        own = {key: tensor.tolist() for key, tensor in describe(model, optimizer).optimizer.items()}
        train(model, optimizer, group, range(2, 4), same=True)
        return [own, {key: tensor.tolist() for key, tensor in wholes(model, torch.optim.SGD([model_p(model)])).items()}]

    def model_p(model: nn.Module) -> nn.Parameter:
        return next(model.parameters())

    with Job(3, save) as job:
        saved = job.values()
    parts = [set(own) for own, _ in saved]
    assert all(parts)
    assert not any(a & b for a, b in itertools.combinations(parts, 2))
    state = {key: value for own, _ in saved for key, value in own.items()}
    with Job(2, load) as job:
        loaded = job.values()
    assert {key: value for own, _ in loaded for key, value in own.items()} == state
    with Job(3, load) as job:
        assert job.values() == saved


def test_stages_of_a_pipeline_keep_one_record(tmp_path: Path) -> None:
    """Options and state besides tensors of every stage are saved, though only rank 0 writes them."""

    class Counting(torch.optim.SGD):
        """Keeps a number where torch would keep a tensor."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["n_steps"] = self.state[p].get("n_steps", 0) + 1

    def built(group: TorchGroup, stages: list[str]) -> Any:
        torch.set_num_threads(1)
        keys = stages[group.rank * len(stages) // group.world_size]
        model = nn.ModuleDict({key: nn.Linear(3, 3) for key in keys})
        first, *rest = model.values()
        groups = [{"params": first.parameters()}, {"params": [p for one in rest for p in one.parameters()], "lr": 0.5}]
        return model, Counting(groups, lr=torch.tensor(0.25), momentum=0.5)

    def save(group: TorchGroup) -> Any:
        model, optimizer = built(group, ["ab", "cd"])
        for n in range(3):
            for module in model.values():
                module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        for options in optimizer.param_groups:
            options["lr"] = torch.tensor(0.125) if options["lr"] == 0.25 else 0.0625
        described = describe(model, optimizer)
        reshard.save(tmp_path, 3, **described.saving(), extra={"trainer": described.extra})
        raw = {key: tensor.tolist() for key, tensor in (described.model | described.optimizer).items()}
        return [described.layout, raw]

    def load(group: TorchGroup) -> Any:
        model, optimizer = built(group, ["abcd"] if group.world_size == 1 else ["a", "bcd"])
        described = describe(model, optimizer)
        loaded = reshard.load(tmp_path, described.layout)
        report = apply(described, loaded.state, loaded.extra["trainer"], strict=False)
        described = describe(model, optimizer)
        raw = {key: tensor.tolist() for key, tensor in (described.model | described.optimizer).items()}
        rates = {key: float(g["lr"]) for g in optimizer.param_groups for key, m in model.items() if m.weight in set(g["params"])}
        counts = [state["n_steps"] for state in optimizer.state.values()]
        return [list(report.missing + report.unexpected), raw, rates, counts]

    with Job(4, save) as job:
        values = job.values()
    layout = values[0][0]
    assert layout["mesh"] == {"pp": 2, "dp": 2}
    expected = values[0][1] | values[3][1]
    assert len(expected) == 16
    with Job(2, load) as job:
        first, second = job.values()
    assert first[0] == second[0] == []
    assert first[1] | second[1] == expected
    assert first[2] | second[2] == {"a": 0.125, "b": 0.0625, "c": 0.125, "d": 0.0625}


def test_boxes_where_no_layout_can_say_it(tmp_path: Path) -> None:
    def save(group: TorchGroup) -> Any:
        keys = "tied a" if group.rank == 0 else "tied b" if group.rank == 3 else "c"
        model = nn.ModuleDict({key: nn.BatchNorm1d(3) for key in keys.split()})
        for tensor in model.state_dict().values():
            tensor.fill_(5 + group.rank)
        if "tied" in model:
            nn.init.zeros_(model["tied"].weight)
            nn.init.zeros_(model["tied"].bias)
        described = describe(model)
        saving = described.saving()
        reshard.save(tmp_path, 1, **saving)
        return [described.layout, described.reason, sorted(saving["model"])]

    with Job(4, save) as job:
        values = job.values()
    assert all(value[0] is None for value in values)
    assert values[0][1] == "ranks 0, 3 alone hold some tensors, which is no part of a mesh"
    assert "tied.running_mean" in values[0][2]
    assert "tied.running_mean" not in values[3][2]
    checkpoint = reshard.open(tmp_path)
    assert checkpoint.read("tied.running_mean").tolist() == [5] * 3
    assert checkpoint.read("b.running_mean").tolist() == [8] * 3
    assert checkpoint.read("c.running_var").tolist() == [6] * 3


def test_fsdp_models_on_the_device_meta(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model, optimizer = built("FSDP2 over TP", group.world_size)
        train(model, optimizer, group, range(1), same=True)
        described = describe(model, optimizer)
        reshard.save(tmp_path, 1, **described.saving(), extra={"trainer": described.extra})
        with torch.device("meta"):
            empty = Blocks()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        other = sharded(cut_with_tp(empty, mesh["tp"]), mesh["dp"])
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
        target = describe(other, other_optimizer)
        loaded = reshard.load(tmp_path, target.layout)
        apply(target, loaded.state, loaded.extra["trainer"])
        same = []
        for _ in range(2):
            here, there = wholes(model, optimizer), wholes(other, other_optimizer)
            same.append(here.keys() == there.keys() and all(torch.equal(here[key], there[key]) for key in here))
            train(model, optimizer, group, range(1, 2), same=True)
            train(other, other_optimizer, group, range(1, 2), same=True)
        return same

    with Job(4, work) as job:
        assert job.values() == [[True, True]] * 4


def test_first_fsdp_and_foreign_groups_are_refused() -> None:
    def work(group: TorchGroup) -> list[str]:
        texts = []
        first = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2)), device_id=torch.device("cpu"))
        second = sharded(Blocks(), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
        for model, members in ((nn.Sequential(first), None), (second, SingleProcess())):
            try:
                describe(model, group=members)
            except ReshardError as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts

    with Job(2, work) as job:
        first, foreign = job.values()[0]
    assert "UnsupportedError: rank 0: `0` is wrapped in FullyShardedDataParallel" in first
    assert "hint: use `torch.distributed.fsdp.fully_shard`" in first
    assert "ArgumentError: the tensors lie on meshes of 2 ranks, and the group has 1" in foreign


def test_unsharded_parameters_are_sharded_again() -> None:
    """After a forward pass FSDP2 leaves the last parameters whole until it needs the memory."""

    def work(group: TorchGroup) -> bool:
        model = sharded(Blocks(), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))
        before = describe(model)
        with torch.no_grad():
            model(batch(0, 0))
        after = describe(model)
        return before.layout == after.layout and before.model.keys() == after.model.keys()

    with Job(2, work) as job:
        assert job.values() == [True, True]
