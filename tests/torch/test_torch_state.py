"""Models, optimizers and objects as arrays and back: a run that went through them goes on bit for bit."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler

from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.formats import state as state_format
from reshard.torch import from_tensor
from reshard.torch.optimizers import OptimizerRecord, merge_records
from reshard.torch.restore import OPTIONS, Beside, Report, apply
from reshard.torch.state import Described, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def through_files(described: Described) -> tuple[dict[str, np.ndarray], Any]:
    """The arrays and the extra state as they come out of files: new memory, plain values."""
    arrays = {key: from_tensor(t)[0].copy() for key, t in (described.model | described.optimizer).items()}
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


@pytest.mark.slow(disk=False)
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


def test_lists_of_tensors_are_kept_with_all_that_belongs_to_them() -> None:
    model = net()
    optimizer = OPTIMIZERS["LBFGS"](model)
    step(model, optimizer, 0)
    described = describe(model, optimizer)
    assert described.optimizer == {}
    (state,) = described.extra["optimizer"]["state"].values()
    assert {"old_dirs", "ro", "d", "t", "n_iter"} <= set(state)


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


class Curve(lr_scheduler.LRScheduler):
    """A scheduler of somebody's own that keeps a function, which no file can hold."""

    def __init__(self, optimizer: Any) -> None:
        self.curve: Callable[[int], float] = lambda epoch: 0.5**epoch
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [rate * self.curve(self.last_epoch) for rate in self.base_lrs]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR object": lambda o: lr_scheduler.LambdaLR(o, Warmup(4)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lr_scheduler.LinearLR,
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
    "own": Curve,
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
    model[0].seen = 5  # type: ignore[assignment]
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
    with pytest.raises(ArgumentError, match=r"two tensors of the model are named `0.weight`"):
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


def test_state_of_a_parameter_that_no_record_names_is_not_taken_for_that_of_a_frozen_one() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad = False
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    arrays = {"weight": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
    with pytest.raises(MismatchError, match=r"the run does not have `exp_avg.bias`"):
        apply(describe(model, optimizer), arrays | {"exp_avg.bias": np.zeros(2, np.float32)}, None)


def test_parameters_that_only_one_of_both_runs_trains_may_begin_anew() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam([model.weight])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    arrays, extra = through_files(describe(model, optimizer))
    both = torch.optim.Adam(model.parameters())
    with pytest.raises(MismatchError, match="it was not trained"):
        apply(describe(model, both), arrays, extra)
    report = apply(describe(model, both), arrays, extra, strict={"other_optimizer": "skip"})
    assert any("`bias` has no saved optimizer state" in line for line in report.changed)


def test_what_has_no_names_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="holds a parameter of shape \\(3,\\) that the model does not have"):
        describe(model, torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(ArgumentError, match="two optimizers hold `weight`"):
        describe(model, [torch.optim.SGD([model.weight], lr=0.1)] * 2)
    with pytest.raises(ArgumentError, match=r"`optimizer` is a dict, expected a torch.optim.Optimizer"):
        describe(model, {})
    with pytest.raises(ArgumentError, match="`model` is a dict, expected"):
        describe({})
    with pytest.raises(UnsupportedError, match="`weight` is not initialised yet"):
        describe(nn.LazyLinear(3))
    with pytest.raises(UnsupportedError, match=r"`weight`: unknown dtype torch.complex128"):
        describe(nn.Linear(2, 2, dtype=torch.complex128))

    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(UnsupportedError, match="a Own overrides `state_dict`"):
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
        "the checkpoint lacks `bias`, `exp_avg.weight`, and the run does not have `odd`, `max_exp_avg_sq.bias`\n"
        "hint: `strict=False` loads the 1 of 2 tensors of the model that fit"
    )
    assert bits(model) == changed  # nothing was done by halves
    assert apply(describe(model, optimizer), arrays, extra, strict=False) == expected
    assert bits(model)["weight"] == before["weight"]


def test_shape_and_dtype_must_agree() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    arrays, extra = fitting(nn.Linear(2, 2))
    with pytest.raises(MismatchError, match="`weight` is F32 in the checkpoint and BF16 in the run\nhint: `cast"):
        apply(describe(model), arrays, extra)
    assert apply(describe(model), arrays, extra, cast=True) == Report()
    assert torch.equal(model.weight, torch.from_numpy(arrays["weight"]).to(torch.bfloat16))
    whole = {"weight": np.zeros((2, 2), np.int32), "bias": np.zeros(2, np.int32)}
    with pytest.raises(MismatchError, match=r"`weight` is I32 in the checkpoint and BF16 in the run$"):
        apply(describe(model), whole, cast=True)
    with pytest.raises(MismatchError, match=r"`weight`: the loaded array has shape \(3, 2\), and .* \(2, 2\)"):
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
    with pytest.raises(MismatchError, match="`weight` was saved with optimizer Adam, and now has SGD"):
        apply(describe(model, torch.optim.SGD(model.parameters(), lr=0.1)), arrays, extra)
    assert apply(describe(model), arrays, extra) == Report()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("modules", [1], "`extra` has `modules` of type list, expected a mapping of names"),
        ("objects", {1: 2}, "`extra` has `objects` of type dict, expected a mapping of names"),
        ("optimizer", {"groups": []}, "`extra` holds an invalid record of the optimizer"),
        ("optimizer", {"groups": [7], "slots": [], "state": {}}, "invalid record"),
        ("optimizer", {"groups": [], "slots": [[1]], "state": {}}, "invalid record"),
        ("optimizer", {"groups": [], "slots": [], "state": {"w": 3}}, "invalid record"),
    ],
)
def test_extra_state_of_another_form_is_refused(name: str, value: Any, message: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    arrays, extra = fitting(model, optimizer)
    with pytest.raises(MismatchError, match=message):
        apply(describe(model, optimizer), arrays, {**extra, name: value})


def test_options_cannot_replace_parameters() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    arrays, extra = fitting(model, optimizer)
    extra["optimizer"]["groups"][0]["options"] |= {"params": [], "param_names": ["x"], "lr": 0.5}
    apply(describe(model, optimizer), arrays, extra)
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert "param_names" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_groups_may_be_made_otherwise() -> None:
    """Options follow the parameters, whatever groups these are in; an empty group takes its place in the list."""
    model = nn.Linear(2, 2)
    parameters: list[torch.Tensor] = [model.weight, model.bias]
    optimizer = torch.optim.SGD([{"params": parameters, "lr": 0.5}, {"params": [], "lr": 0.25}], lr=1.0)
    arrays, extra = fitting(model, optimizer)
    split = torch.optim.SGD([{"params": [p]} for p in reversed(parameters)], lr=1.0)
    apply(describe(model, split), arrays, extra)
    assert [group["lr"] for group in split.param_groups] == [0.5, 0.5]
    groups: list[dict[str, Any]] = [{"params": parameters}, {"params": []}]
    alike = torch.optim.SGD(groups, lr=1.0)
    apply(describe(model, alike), arrays, extra)
    assert [group["lr"] for group in alike.param_groups] == [0.5, 0.25]
    apart = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}], lr=1.0)
    arrays, extra = fitting(model, apart)
    with pytest.raises(MismatchError, match=r"`bias` and `weight` are in one group .*: lr is 0.1 and 0.2"):
        apply(describe(model, alike), arrays, extra)
    # The options that they had together are those of neither group.
    arrays, extra = fitting(model, torch.optim.SGD(parameters, lr=0.5, weight_decay=0.01))
    words = r"`bias` and `weight` were saved in one group .* groups with different options: lr is 0.2 and 0.1"
    by_optimizer = [torch.optim.SGD([model.bias], lr=0.2), torch.optim.SGD([model.weight], lr=0.1)]
    for order in (apart, by_optimizer):
        one = describe(model, order)
        with pytest.raises(MismatchError, match=words if order is by_optimizer else "were saved in one group"):
            apply(one, arrays, extra, strict=False)
        assert len(apply(one, arrays, extra, strict={"other_optimizer": "skip"}).changed) == 2
        assert sorted(group["lr"] for live in one.live.optimizers for group in live.optimizer.param_groups) == [
            0.1,
            0.2,
        ]
    # Options that the checkpoint lacks keep their values.
    named: list[dict[str, Any]] = [{"params": [p], "mark": p.ndim} for p in parameters]
    marked = torch.optim.SGD(named, lr=1.0)
    apply(describe(model, marked), arrays, extra)
    assert [(group["lr"], group["mark"]) for group in marked.param_groups] == [(0.5, 2), (0.5, 1)]
    # A parameter that was not trained before.
    arrays, extra = fitting(model, torch.optim.SGD([model.weight], lr=0.1))
    report = apply(describe(model, alike), arrays, extra, strict=False)
    assert report.missing == (Beside(OPTIONS, "bias"),)
    assert ["`lr` of group 0" in line for line in report.changed] == [True]


def test_groups_of_two_optimizers_with_equal_options_stay_apart() -> None:
    """They may have other options in the run that resumes, which is not a split of one group."""
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in (model.weight, model.bias)]
    record = OptimizerRecord.from_value(describe(model, optimizers).extra["optimizer"])
    merged = merge_records([record, record])
    assert [group["params"] for group in merged.groups] == [["weight"], ["bias"]]


class Expanded(nn.Module):
    """A buffer of one row, and one whose rows are that row."""

    row: torch.Tensor
    rows: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("row", torch.full((1, 3), value))
        self.register_buffer("rows", self.row.expand(4, 3))


def test_an_expanded_buffer_is_restored() -> None:
    arrays, extra = fitting(Expanded(2.0), None)
    other = Expanded(0.0)
    rows = other.rows
    apply(describe(other), arrays, extra)
    assert other.rows is rows
    assert rows.tolist() == [[2.0] * 3] * 4
    other.row.fill_(5.0)
    assert rows[3].tolist() == [5.0] * 3  # it shares memory, as before
    # Rows that differ need memory of their own.
    apply(describe(other), {**arrays, "rows": np.arange(12, dtype=np.float32).reshape(4, 3)}, extra)
    assert other.rows is rows
    assert rows.flatten().tolist() == list(range(12))
    assert other.row.tolist() == [[2.0] * 3]


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
    with pytest.raises(MismatchError, match=r"`mask` on device `meta`: non-persistent buffers.*\nhint: pass"):
        apply(target, arrays, extra)
    called = []

    def init(name: str, buffer: torch.Tensor) -> None:
        called.append(name)
        buffer.copy_(torch.arange(4.0))

    short = {key: array for key, array in arrays.items() if key != "scale"}
    with pytest.raises(MismatchError, match="lacks `scale`, which are on device `meta` and need their values from it"):
        apply(target, short, extra, strict=False, init=init)
    assert apply(target, arrays, extra, init=init) == Report()
    assert called == ["mask"]
    assert other.head.weight is other.embed.weight
    assert other.scale.my_mark == 7  # type: ignore[attr-defined]
    assert other.embed.weight.data_ptr() == arrays["embed.weight"].ctypes.data  # the array itself
    for n in range(1, 3):
        assert step(model, optimizer, n) == step(other, other_optimizer, n)
    assert bits(other) == bits(model)
