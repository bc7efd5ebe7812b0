"""Copies of tensors in host memory, made while the training continues: the input of a save in the background.

Copies are queued, and `hold` makes later work wait for them. On a GPU the copies are queued on a side stream, into
pinned memory; `hold` makes the compute stream wait for the side stream, and the host does not wait. For tensors on the
host a thread copies, and `hold` makes the caller wait for the thread. Tensors in `overlap` are held for later, just
before the next optimizer step, by a hook. This is correct for tensors that only an optimizer changes: parameters and
optimizer state. All other tensors, such as running means that a forward pass changes, are held for at once.

Everything specific to GPUs is in `_OnStream`. This module does not know what is saved, or when.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from reshard.torch.tensors import from_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class _Copying(Protocol):
    """Copies in progress on one device."""

    def hold(self) -> None:
        """Make later work of this thread on the device wait for the copies. Never raises."""

    def wait(self) -> None:
        """Wait until the copies are complete; from any thread. Raises the error of a failed copy."""


def on_device(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor is on a GPU, so that copies are made in pinned memory."""
    return any(tensor.is_cuda for tensor in tensors.values())


@dataclass(frozen=True, eq=False)
class Staged:
    """The copies of one save.

    Attributes:
        tensors: the copies by key, on the host. Their values are undefined until `ready` returns.
    """

    tensors: dict[str, torch.Tensor]
    _copying: tuple[_Copying, ...]

    def ready(self) -> None:
        """Wait until the copies are complete; from any thread, any number of times."""
        for one in self._copying:
            one.wait()


class Staging:
    """Makes copies, in memory that is reused from save to save.

    The memory has the size of the state. For tensors on a GPU it is pinned, and torch rounds each allocation up to a
    power of two.

    Example:
        >>> staging, live = Staging(), torch.zeros(3)
        >>> staged = staging.stage({"w": live}, overlap={"w"})
        >>> staging.hold()  # called by a hook before the optimizer step
        >>> live += 1
        >>> staged.ready()
        >>> staged.tensors["w"]
        tensor([0., 0., 0.])
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._held_later: list[_Copying] = []

    def stage(
        self, tensors: Mapping[str, torch.Tensor], overlap: Collection[str] = (), *, reuse: bool = True
    ) -> Staged:
        """Start to copy tensors.

        Args:
            tensors: tensors on any device, by key.
            overlap: keys of the tensors that do not change before `hold` is called. The others may change right after
                this call.
            reuse: whether the copies of the previous call may be overwritten.

        Raises:
            RuntimeError, MemoryError: out of memory.
        """
        self.hold()  # for the previous copies, if there was no optimizer step since
        kept = self._kept if reuse else {}
        self._kept, self._held_later = {}, []
        # Copies that are held for at once are queued first.
        groups: dict[tuple[bool, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for key, tensor in sorted(tensors.items(), key=lambda item: item[0] in overlap):
            live = tensor.detach()
            if live.device.type in {"cpu", "cuda"}:
                self._kept[key] = _host_memory(live, kept.get(key))
                groups.setdefault((key in overlap, live.device), []).append((self._kept[key], live))
            else:
                self._kept[key] = live.cpu()
        copying: list[_Copying] = []
        for (is_later, device), pairs in groups.items():
            copying.append(_InThread(pairs) if device.type == "cpu" else _OnStream(device, pairs))
            if is_later:
                self._held_later.append(copying[-1])
            else:
                copying[-1].hold()
        return Staged(dict(self._kept), tuple(copying))

    def hold(self) -> None:
        """Make later work of this thread on the tensors wait for the copies of tensors in `overlap`."""
        for one in self._held_later:
            one.hold()


class _InThread:
    """Copies of host tensors, by a thread."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pairs,), name="reshard-staging", daemon=True)
        self._thread.start()

    def _run(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        try:
            for host, live in pairs:
                # With numpy: torch would use its own threads, which the computation needs.
                np.copyto(_array(host), _array(live))
        except BaseException as error:  # noqa: BLE001  raised by `wait`
            self._error = error

    def hold(self) -> None:
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class _OnStream:
    """Copies on a side stream of a GPU."""

    def __init__(self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._device = device
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))  # for the queued work that computes the tensors
        with torch.cuda.stream(side):
            for host, live in pairs:
                _integers(host).copy_(_integers(live), non_blocking=True)
                live.record_stream(side)  # keeps the memory allocated until the copy is complete
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting does not spin
        self._copied.record(side)

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        self._copied.synchronize()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _host_memory(live: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Contiguous memory for a copy: the memory of the previous copy if shape and dtype are the same."""
    if kept is not None and (kept.shape, kept.dtype) == (live.shape, live.dtype):
        return kept
    return torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.device.type == "cuda")


def _array(tensor: torch.Tensor) -> np.ndarray:
    array, _ = from_tensor(tensor)
    return array.view(f"u{array.itemsize}")


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor viewed as integers: torch cannot copy all dtypes."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.resolve_conj().resolve_neg().view(dtype)
