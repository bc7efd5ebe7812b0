"""`reshard.mindspore.save`: the parameters of a network and its optimizer as an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import ArgumentError
from reshard.mindspore.parameters import as_array, check_alone, named_parts
from reshard.values.words import show
from reshard.verbs.save import save as save_iteration

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from reshard.verbs.save import SaveReport

_OPTIONS = {
    *("common", "files", "commit", "format", "group", "keep", "layout", "metrics", "on_event", "retention", "shapes"),
    "timeout",
    "verify",
}


def save(
    root: str | os.PathLike[str],
    step: int,
    network: Any,
    optimizer: Any = None,
    *,
    extra: Mapping[str, object] | None = None,
    **options: Any,
) -> SaveReport:
    """Save the parameters of a network and its optimizer as an iteration of a checkpoint root.

    Tensors have the names of their parameters, as MindSpore Transformers names them: `adam_m.<name>`, `adam_v.<name>`,
    `global_step`. Parameters of the optimizer that the network has too are saved once.

    Args:
        root: the checkpoint root; made if it is missing.
        step: the iteration.
        network: a Cell, or Parameters, Tensors and numpy arrays by name.
        optimizer: the same for the optimizer.
        extra: other state by name, as in `reshard.save`.
        options: `common`, `files`, `commit`, `format`, `group`, `keep`, `layout`, `metrics`, `on_event`, `retention`,
            `shapes`, `timeout` and `verify` of `reshard.save`.

    Raises:
        ArgumentError: two parameters have the same name; an entry is not a tensor; an unknown option.
        UnsupportedError: MindSpore runs in several processes without `group`; a dtype cannot be saved.
        ReshardError: as `reshard.save`.

    Example:
        >>> from mindspore import nn
        >>> network = nn.Dense(2, 1)
        >>> report = save("saved", 10, network, nn.AdamWeightDecay(network.trainable_params()), keep=3)
        >>> import reshard
        >>> sorted(reshard.open("saved").keys("model"))
        ['bias', 'weight']
    """
    check_options(options)
    check_alone(options.get("group"))
    model, state = named_parts(network, optimizer)
    save_any: Any = save_iteration  # its overloads do not take `**options`
    report: SaveReport = save_any(
        root,
        step,
        {name: as_array(one) for name, one in model.items()},
        {name: as_array(one) for name, one in state.items()},
        extra=extra,
        **options,
    )
    return report


def check_options(options: Mapping[str, object]) -> None:
    """Check that `save` has the options.

    Raises:
        ArgumentError: it does not have one of them.

    Example:
        >>> check_options({"keep": 3})
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise ArgumentError(
            f"`save` has no option {show(unknown[0])}", hint=f"options are {', '.join(sorted(_OPTIONS))}"
        )
