"""Models, optimizers and objects as arrays and back: a run that went through them goes on bit for bit as if it had not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from torch import nn

from reshard.formats import state as state_format
from reshard.torch.state import Described, Report, apply, describe

if TYPE_CHECKING:
    from collections.abc import Callable


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
        return float(optimizer.step(closure))  # type: ignore[no-untyped-call]
    loss = closure()
    optimizer.step()
    return float(loss)


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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("into", ["fresh", "used", "live memory"])
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
    torch.testing.assert_close(everything, expected, rtol=0, atol=0)


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
