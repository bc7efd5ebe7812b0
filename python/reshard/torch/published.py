"""Published names in a run: the check before a folder is published, and a start from a published folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.conversion.library_model import check_shapes, model_of, not_saved, published_shapes, saved_state
from reshard.conversion.library_names import published_names, unwrapped

if TYPE_CHECKING:
    import os

    from reshard.checkpoint import Checkpoint
    from reshard.names import NameMap
    from reshard.options import InitFrom


def check_loads(checkpoint: Checkpoint, folder: str | os.PathLike[str], names: NameMap | None) -> None:
    """Check that the model of a folder's config.json has the names and shapes that are about to be published.

    Nothing is checked if `model_of` does not know the model. Either name of tied tensors is enough.

    Args:
        checkpoint: what is published.
        folder: the folder of config.json.
        names: the map from the names of the checkpoint to the published ones; None: they are the same.

    Raises:
        MismatchError: they differ; the message names the first tensors.
        UnsupportedError: as `model_of`.
    """
    model = model_of(folder)
    if model is None:
        return
    expected = published_shapes(model)
    if expected is None:
        expected = {key: tuple(one.shape) for key, one in saved_state(model).items()}
    shapes = {key: tuple(checkpoint.shape(key)) for key in checkpoint.keys("model")}
    found = shapes if names is None else {made.key: tuple(made.shape) for made in names.resolve(shapes)}
    check_shapes(found, expected, model, path=str(checkpoint.path), folder=str(folder))


def under_names(init: InitFrom | None, checkpoint: Checkpoint, model: object) -> InitFrom | None:
    """The same start, with `names` of a published folder if the checkpoint has published names and none are given.

    Tensors that the library computes and does not publish, such as tables of positions, keep their values.

    Raises:
        UnsupportedError: as `published_names`.
    """
    if init is None:
        return None
    inner = unwrapped(model)
    names = () if init.include else not_saved(inner)
    live = inner.state_dict() if names else {}
    computed = [key for key in names if key in live and not live[key].is_meta and key not in checkpoint]
    if computed:
        init = replace(init, exclude=(*init.exclude, *computed))
    return _with_names(init, checkpoint, model)


def _with_names(init: InitFrom, checkpoint: Checkpoint, model: object) -> InitFrom:
    if init.names is not None or checkpoint.data.is_renamed:
        return init
    inner = unwrapped(model)
    models: Any = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(inner, models.PreTrainedModel) or set(inner.state_dict()) <= set(checkpoint):
        return init
    names = published_names(inner)
    if names is None:
        return init
    stored = [template for rule in names.rules for template in rule.templates("from")]  # type: ignore[union-attr]
    is_published = any(template.match(key) is not None for template in stored for key in checkpoint)
    return replace(init, names=names) if is_published else init
