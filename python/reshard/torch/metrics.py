"""The state of metrics of torchmetrics, which their `state_dict()` leaves out unless they are made persistent.

torchmetrics is not imported: a program that has metrics has imported it.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import MismatchError
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def is_metric(one: object) -> bool:
    """Whether an object is a metric or a collection of metrics.

    Example:
        >>> is_metric(torch.nn.Linear(1, 1))
        False
    """
    library: Any = sys.modules.get("torchmetrics")
    return library is not None and isinstance(one, library.Metric | library.MetricCollection)


def metric_states(module: torch.nn.Module, without: Collection[int] = ()) -> dict[str, Any]:
    """The states of the metrics in a module that were updated, by name, and how often they were.

    Args:
        module: a metric, or a module that has some.
        without: `id` of metrics that are left out.

    Example:
        >>> metric_states(torch.nn.Linear(1, 1))
        {}
    """
    library: Any = sys.modules.get("torchmetrics")
    if library is None:
        return {}
    for one in module.modules():
        if isinstance(one, library.MetricCollection):
            one.items(copy_state=False)  # metrics that share a state get it
    return {
        name: {"state": {key: _host(value) for key, value in one.metric_state.items()}, "updates": one._update_count}  # noqa: SLF001  there is no public way
        for name, one in module.named_modules()
        if isinstance(one, library.Metric) and one._update_count and id(one) not in without  # noqa: SLF001
    }


def set_metrics(module: torch.nn.Module, states: Mapping[str, Any]) -> None:
    """Set the metrics in a module to saved states.

    Args:
        module: as of `metric_states`.
        states: the value of `metric_states`.

    Raises:
        MismatchError: the module has other metrics, or metrics with other states.
    """
    metrics: dict[str, Any] = dict(module.named_modules())
    wrong = [
        name
        for name, saved in states.items()
        if not is_metric(metrics.get(name)) or saved["state"].keys() != metrics[name].metric_state.keys()
    ]
    if wrong:
        raise MismatchError(
            f"{listed([show(name or type(module).__name__) for name in wrong])} of the checkpoint: the run has no such "
            "metric, or one with another state",
            key=wrong[0],
            hint="give the model the metrics of the run that saved",
        )
    for name, saved in states.items():
        one = metrics[name]
        for key, value in saved["state"].items():
            setattr(one, key, _on_device(value, one.device))
        one._update_count, one._computed = saved["updates"], None  # noqa: SLF001


class MetricState:
    """A metric as an object with its whole state."""

    def __init__(self, metric: torch.nn.Module) -> None:
        self.metric = metric

    def state_dict(self) -> dict[str, Any]:
        """The states of the metrics."""
        return metric_states(self.metric)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the metrics to saved states."""
        set_metrics(self.metric, state)


def _host(value: Any) -> Any:
    """A copy of a tensor, or of a list of tensors, on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return [_host(one) for one in value] if isinstance(value, list | tuple) else copy.deepcopy(value)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on_device(one, device) for one in value] if isinstance(value, list) else value
