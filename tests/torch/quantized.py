"""Saves and resumes layers of bitsandbytes in the folder that is given, and prints what became of each.

The scales of a 4-bit layer are loaded by none of its methods: the base has to be made anew, and must be the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bitsandbytes
import torch
from accelerate import Accelerator
from torch import nn

import reshard
from reshard.accelerate import prepared
from reshard.errors import MismatchError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable


def made(bits: int, seed: int) -> nn.Module:
    """A frozen quantized layer and a trained one."""
    torch.manual_seed(seed)
    kinds: Any = bitsandbytes.nn
    layer: nn.Module
    if bits == 8:
        layer = kinds.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
    else:
        layer = kinds.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    model = nn.ModuleDict({"base": layer.requires_grad_(requires_grad=False), "adapter": nn.Linear(64, 2)}).to("cpu")
    if bits == 4:
        model["base"](torch.ones(1, 64))  # which quantizes it
    return model


def prepare(model: nn.Module) -> dict[str, Any]:
    """The model as accelerate prepares it."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    return prepared(accelerator)


def check(root: Path, bits: int, seeds: tuple[int, int], given: Callable[[nn.Module], dict[str, Any]]) -> str:
    """What becomes of a run with the first seed that is resumed with the second one."""
    first, second = (made(bits, seed) for seed in seeds)
    expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    with Checkpointer(root, signals=()) as checkpointer:
        checkpointer.resume(**given(first))
        checkpointer.save(1, blocking=True)
    try:
        Checkpointer(root, save_every=None, signals=()).resume(**given(second))
    except MismatchError as error:
        assert "`base.weight.quant_state.bitsandbytes__nf4`" in str(error)  # noqa: PT017
        return "refused"
    found = second.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return "restored"


def check_without_base(root: Path, bits: int, seeds: tuple[int, int]) -> str:
    """As `check`, with the base left out of the saves."""
    first, second = (made(bits, seed) for seed in seeds)
    expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    trained: Any = first["adapter"]  # type: ignore[index]
    with Checkpointer(root, signals=(), leave_out_frozen=True) as checkpointer:
        checkpointer.resume(model=first, optimizer=torch.optim.SGD(trained.parameters(), lr=0.1))
        checkpointer.save(1, blocking=True)
    with reshard.open(root) as checkpoint:
        assert "base.weight" not in checkpoint
        assert "adapter.weight" in checkpoint
    trained = second["adapter"]  # type: ignore[index]
    try:
        with Checkpointer(root, signals=()) as checkpointer:
            checkpointer.resume(model=second, optimizer=torch.optim.SGD(trained.parameters(), lr=0.1))
    except MismatchError as error:
        assert "leaves out `base.weight`" in str(error)  # noqa: PT017
        return "refused"
    assert all(torch.equal(second.state_dict()[name], tensor) for name, tensor in expected.items())
    return "restored"


root = Path(sys.argv[1])
print("8 bits", check(root / "8", 8, (1, 2), lambda model: {"model": model}))
print("4 bits", check(root / "4", 4, (1, 1), lambda model: {"model": model}))
print("4 bits", check(root / "4-other", 4, (1, 2), lambda model: {"model": model}))
print("8 bits, prepared,", check(root / "8-prepared", 8, (1, 2), prepare))
print("4 bits, prepared,", check(root / "4-prepared", 4, (1, 1), prepare))
for bits in (4, 8):
    print(bits, "bits without the base", check_without_base(root / f"{bits}-base", bits, (1, 1)))
    print(bits, "bits without the base", check_without_base(root / f"{bits}-base-other", bits, (1, 2)))
