"""Copies of tensors on the host, made while the training goes on: what a save in the background writes.

The idea: copies are queued, and whoever must not run before they are made *holds*. On a GPU they are queued on a side
stream, into pinned memory; the compute stream then waits for the side stream, and the host for neither. On the host a
thread stands in for the stream, and the caller waits for it. With `overlap` the compute stream, or the caller, is held
later: not before the next step of an optimizer, which a hook notices. That is right for what nobody else changes:
parameters that an optimizer trains, and its state. Everything else, such as running means, which a forward pass moves,
is held for at once.

What is different on a GPU is told in `_OnStream`, in the five calls that it makes. Nothing here knows what is saved,
or when.
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

__all__ = ["Staged", "Staging"]


class _Copying(Protocol):
    """Copies under way on one device."""

    def hold(self) -> None:
        """Let what this thread does next with the device wait for the copies. Never raises."""

    def wait(self) -> None:
        """Wait until the host has the copies; from any thread. Raises what went wrong."""


@dataclass(frozen=True, eq=False)
class Staged:
    """The copies of one save.

    Attributes:
        tensors: by key, on the host; without their content until `ready`.
    """

    tensors: dict[str, torch.Tensor]
    _copying: tuple[_Copying, ...]

    def ready(self) -> None:
        """Wait until the copies are made; from any thread, and more than once."""
        for one in self._copying:
            one.wait()


class Staging:
    """Makes copies, in memory that is kept from save to save.

    It is as much as the state; on a GPU's behalf it is pinned, and torch rounds each piece up to a power of two.

    Example:
        >>> staging, live = Staging(), torch.zeros(3)
        >>> staged = staging.stage({"w": live}, overlap={"w"})
        >>> staging.hold()  # as a hook does before the optimizer's step
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
        """Begin to copy tensors, which have the content of the copies until something changes them.

        Args:
            tensors: on any device, by key.
            overlap: keys of those that do not change before `hold` is called; what changes the others may come at once.
            reuse: whether nobody looks at the copies of the last time any more.

        Raises:
            RuntimeError, MemoryError: there is no memory.
        """
        self.hold()  # of the last time, if no optimizer has made a step since
        kept = self._kept if reuse else {}
        self._kept, self._held_later = {}, []
        # What is waited for at once is queued first.
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
        """Let what this thread does next with the tensors wait for the copies that overlap."""
        for one in self._held_later:
            one.hold()


class _InThread:
    """Copies of tensors of the host, by a thread."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pairs,), name="reshard-staging", daemon=True)
        self._thread.start()

    def _run(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        try:
            for host, live in pairs:
                # By numpy: torch would start threads of its own for it, beside those that compute.
                np.copyto(_array(host), _array(live))
        except BaseException as error:  # noqa: BLE001  raised where somebody waits for it
            self._error = error

    def hold(self) -> None:
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class _OnStream:
    """Copies by a side stream of a GPU."""

    def __init__(self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._device = device
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))  # what computes the tensors comes first
        with torch.cuda.stream(side):
            for host, live in pairs:
                _integers(host).copy_(_integers(live), non_blocking=True)
                live.record_stream(side)  # who frees the tensor meanwhile does not free its memory yet
        self._made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits for it sleeps
        self._made.record(side)

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._made)

    def wait(self) -> None:
        self._made.synchronize()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _host_memory(live: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Contiguous memory for a copy: what was kept, if it fits."""
    if kept is not None and (kept.shape, kept.dtype) == (live.shape, live.dtype):
        return kept
    return torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.device.type == "cuda")


def _array(tensor: torch.Tensor) -> np.ndarray:
    array, _ = from_tensor(tensor)
    return array.view(f"u{array.itemsize}")


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: not every dtype can be copied."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.resolve_conj().resolve_neg().view(dtype)
