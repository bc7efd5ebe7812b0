"""The model of a config.json, made by the library that owns its class, without memory for its tensors.

transformers is asked where it is installed. It is imported when it is needed, which takes seconds.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import TYPE_CHECKING, Any

from reshard.errors import MismatchError, UnsupportedError
from reshard.names.model import config_beside, read_config
from reshard.words import listed, show

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_MOST = 5  # differences in one message


def model_of(folder: str | os.PathLike[str]) -> Any:
    """The model of a folder's config.json on the device `meta`; None: there is no transformers, or no such class.

    Raises:
        UnsupportedError: transformers cannot make the model.
    """
    path = config_beside(folder)
    if path is None:
        return None
    config = read_config(path)
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or config.get("quantization_config") is not None:
        return None
    try:
        library: Any = importlib.import_module("transformers")
        importlib.import_module("transformers.modeling_utils")
    except ImportError:
        return None
    kind = getattr(library, str(classes[0]), None)
    of_config = getattr(kind, "config_class", None)
    if not isinstance(kind, type) or of_config is None or "auto_map" in config:
        return None
    try:
        with importlib.import_module("torch").device("meta"):
            # Its own reader, which decodes values such as infinity.
            return kind(of_config.from_pretrained(str(path.parent), local_files_only=True))
    except Exception as error:
        raise UnsupportedError(
            f"{show(str(folder))}: transformers cannot make the {show(str(classes[0]))} of config.json: "
            f"{type(error).__name__}: {show(str(error))}",
            path=str(folder),
            hint="correct config.json",
        ) from error


def published_shapes(model: Any) -> dict[str, tuple[int, ...]] | None:
    """The names and shapes with which the library publishes a model; None: this version does not say it.

    Args:
        model: a model on the device `meta`, of `model_of`.
    """
    try:
        revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
        published: dict[str, Any] = revert(model, saved_state(model))
    except Exception:  # noqa: BLE001  older versions publish the names of the model; a newer one may need the values
        return None
    return {name: tuple(one.shape) for name, one in published.items()}


def saved_state(model: Any) -> dict[str, Any]:
    """The tensors of a model that the library saves: one of each group of tied ones, and none that it computes."""
    left_out = {*(getattr(model, "all_tied_weights_keys", None) or ()), *not_saved(model)}
    return {name: one for name, one in model.state_dict().items() if hasattr(one, "shape") and name not in left_out}


def not_saved(model: Any) -> list[str]:
    """The names of tensors of a model that the library computes anew and does not save, such as tables of positions."""
    return sorted(getattr(model, "_keys_to_ignore_on_save", None) or ())


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    model: Any,
    *,
    path: str,
    folder: str,
    left_out: Collection[str] = (),
) -> list[str]:
    """Compare what is published with what the library loads, also under other names that it accepts.

    Args:
        found: the shapes that are about to be published, by name.
        expected: those that the library publishes.
        model: the model.
        path: what is published, for messages.
        folder: the folder of config.json, for messages.
        left_out: names that are left out on purpose.

    Returns:
        Warnings about tensors that the library does not load.

    Raises:
        MismatchError: a tensor is missing or has another shape; the message names the first ones.
    """
    name_of = _live_names(model)
    live = {name: tuple(one.shape) for name, one in model.state_dict().items() if hasattr(one, "shape")}
    sources: dict[str, list[str]] = {}
    for key in expected:
        sources.setdefault(name_of(key), []).append(key)
    given = {key: name_of(key) for key in found}
    covered = set(given.values())
    either = {key for group in _tied(model) if group & (found.keys() | covered) for key in group}
    optional = _patterns(model, "_keys_to_ignore_on_load_missing")
    missing = [
        key
        for key in expected.keys() - found.keys() - either - set(left_out)
        if (target := name_of(key)) not in found
        and not (len(sources[target]) == 1 and target in covered)
        and not any(one.search(target) for one in optional)
    ]
    # A tensor that the library makes of several has its shape under the published name only.
    right = {key: expected.get(key, live.get(target)) for key, target in given.items()}
    other = [
        key for key in found if right[key] not in (None, found[key]) and (key in expected or given[key] in sources)
    ]
    unknown = [key for key in found if key not in expected and given[key] not in live]
    wrong = sorted({*missing, *other})
    if not wrong:
        ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
        unknown = [key for key in unknown if not any(one.search(key) for one in ignored)]
        names = listed(map(show, unknown), _MOST)
        return [f"{type(model).__name__} of {show(folder)} does not load {names}"] if unknown else []
    shapes = {key: expected.get(key) or right.get(key) for key in wrong}
    lines = [f"{show(key)} has shape {found.get(key, 'none')}, expected {shapes[key]}" for key in wrong]
    more = f"; there is also {listed(map(show, unknown), _MOST)}" if unknown else ""
    raise MismatchError(
        f"{path}: {type(model).__name__} of {show(folder)} does not load what is published: "
        f"{listed(lines, _MOST)}{more}",
        path=path,
        hint=_hint(found, expected, wrong),
    )


def _tied(model: Any) -> list[set[str]]:
    """The names of each group of tied tensors, of which one is enough."""
    groups: dict[str, set[str]] = {}
    for one, two in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        group = groups.get(one, {one}) | groups.get(two, {two})
        groups |= dict.fromkeys(group, group)
    return list(groups.values())


def _patterns(model: Any, name: str) -> list[re.Pattern[str]]:
    return [re.compile(one) for one in getattr(model, name, None) or ()]


def _hint(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], wrong: Sequence[str]) -> str:
    """What to do about names or shapes that differ."""
    first = next(iter(found), "")
    starts = [first[: n + 1] for n, letter in enumerate(first) if letter == "."]
    for start in starts:
        bare = {key.removeprefix(start) for key in found}
        if len(bare & expected.keys()) > len(found.keys() & expected.keys()):
            return (
                f"all fit after `select=Select(rename={{{start!r}: ''}})`"
                if bare <= expected.keys()
                else (f"`select=Select(rename={{{start!r}: ''}})` removes the text before the names")
            )
    rows = [key for key in wrong if key in found and key in expected and found[key][1:] == expected[key][1:]]
    if rows and len(rows) == len(wrong):
        n_found, n_expected = found[rows[0]][0], expected[rows[0]][0]
        return (
            f"config.json says `vocab_size` {n_expected}, and the checkpoint has {n_found} rows: a vocabulary may be "
            f"padded for training; a name map with `trim: 0, to_size: {n_expected}` leaves out the rest; or give the "
            "config.json of the padded model"
        )
    return "give the config.json of the model that was saved; `files=Files(check_names=False)` publishes it as it is"


def kept_in_float32(folder: str | os.PathLike[str], names: Iterable[str], dtype: str) -> set[str] | None:
    """Which tensors the library keeps in float32 when it loads the model of a config.json in another dtype.

    Args:
        folder: the folder of config.json.
        names: published names of tensors.
        dtype: the other dtype, "F16" or "BF16".

    Returns:
        Their names; None: `model_of` does not know the model, or this version does not say it.

    Raises:
        UnsupportedError: as `model_of`.
    """
    model = model_of(folder)
    plan_of = getattr(model, "_get_dtype_plan", None)  # of transformers 5
    if plan_of is None:
        return None
    torch: Any = importlib.import_module("torch")
    plan = plan_of(torch.float16 if dtype == "F16" else torch.bfloat16)
    patterns = [re.compile(one.replace("*", ".*")) for one, kept in plan.items() if kept is torch.float32]
    live_name = _live_names(model)
    return {name for name in names if any(one.search(name) or one.search(live_name(name)) for one in patterns)}


def _live_names(model: Any) -> Callable[[str], str]:
    """A function that gives the name of a published tensor in the live model, as far as the library renames it."""
    live = model.state_dict()
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
        renamings = [one for one in mapping if not isinstance(one, loading.WeightConverter)]
        prefix = model.base_model_prefix
        loading.rename_source_key("a", renamings, converters, prefix, live)
    except (ImportError, AttributeError, TypeError):
        return lambda name: name

    def name_of(name: str) -> str:
        found: str = loading.rename_source_key(name, renamings, converters, prefix, live)[0]
        if found not in live and name in live:
            return name
        return found

    return functools.cache(name_of)
