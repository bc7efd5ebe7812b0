"""The model of a config.json, made by the library that owns its class, without memory for its tensors.

transformers is asked where it is installed. It is imported when it is needed, which takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.errors import MismatchError, UnsupportedError
from reshard.names.model import config_beside, read_config
from reshard.quantised.config import CONFIG_FILE
from reshard.storage.changes import copy_file, temporary_folder
from reshard.storage.location import locate
from reshard.values.words import listed, show
from reshard.values.wrappers import bare

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from reshard.storage.location import Location

_MOST = 5  # differences in one message
_MOST_RULES = 3


def model_of(folder: str | os.PathLike[str], *, is_dequantised: bool = False) -> Any:
    """The model of a folder's config.json on the device `meta`; None: there is no transformers, or no such class.

    Args:
        folder: the folder.
        is_dequantised: the model without quantised weights, whatever config.json says of them.

    Raises:
        UnsupportedError: transformers cannot make the model.
    """
    made = _model(folder, is_dequantised=is_dequantised)
    return None if isinstance(made, str) else made


def made_model(folder: str | os.PathLike[str]) -> Any:
    """As `model_of`, where the model is needed.

    Raises:
        UnsupportedError: there is none; the message says why.
    """
    made = _model(folder)
    if isinstance(made, str):
        raise UnsupportedError(f"{show(str(folder))}: the model is not made: {made}", path=str(folder))
    return made


def model_of_class(folder: str | os.PathLike[str], kind: str) -> Any:
    """The model of a folder's config.json on the device `meta`, of a class of transformers that is given.

    Args:
        folder: the folder.
        kind: the name of the class, or of one such as `AutoModelForCausalLM`.

    Raises:
        UnsupportedError: transformers cannot make the model.
    """
    library: Any = importlib.import_module("transformers")
    made: Any = getattr(library, kind, None)
    try:
        with _on_this_host(locate(folder)) as here, importlib.import_module("torch").device("meta"):
            if kind.startswith("Auto"):
                return made.from_config(library.AutoConfig.from_pretrained(here, local_files_only=True))
            return made(made.config_class.from_pretrained(here, local_files_only=True))
    except Exception as error:
        raise _not_made(folder, kind, error) from error


def _model(folder: str | os.PathLike[str], *, is_dequantised: bool = False) -> Any:
    """The model, or why there is none."""
    path = config_beside(folder)
    if path is None:
        return "there is no config.json"
    config = read_config(path)
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1:
        return "config.json does not name one class as `architectures`"
    if config.get("quantization_config") is not None and not is_dequantised:
        return "config.json has `quantization_config`, and the names of quantized models are not compared"
    try:
        library: Any = importlib.import_module("transformers")
        importlib.import_module("transformers.modeling_utils")
    except ImportError:
        return "transformers is not installed"
    kind = getattr(library, str(classes[0]), None)
    of_config = getattr(kind, "config_class", None)
    if "auto_map" in config:
        return "config.json has `auto_map`: the code of the model is not executed"
    if not isinstance(kind, type) or of_config is None:
        return f"transformers {library.__version__} has no {show(str(classes[0]))}"
    try:
        with _on_this_host(path.parent) as here, importlib.import_module("torch").device("meta"):
            # Its own reader, which decodes values such as infinity.
            made = of_config.from_pretrained(here, local_files_only=True)
            if is_dequantised and hasattr(made, "quantization_config"):
                del made.quantization_config
            return kind(made)
    except Exception as error:
        raise _not_made(folder, str(classes[0]), error) from error


@contextlib.contextmanager
def _on_this_host(folder: Location) -> Iterator[str]:
    """A folder of this host with the config.json of a folder, which may be in a bucket: the library opens files."""
    if folder.is_local:
        yield str(folder)
        return
    with temporary_folder("reshard-config-") as here:
        copy_file(folder / CONFIG_FILE, here / CONFIG_FILE, 0o600, durable=False)
        yield str(here)


def _not_made(folder: str | os.PathLike[str], kind: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"{show(str(folder))}: transformers cannot make the {show(kind)} of config.json: {type(error).__name__}: "
        f"{show(str(error))}",
        path=str(folder),
        hint="correct config.json",
    )


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


class Difference(NamedTuple):
    """A tensor that a library does not load as it is stored.

    Attributes:
        key: the stored name, or the one that is expected.
        found: the stored shape; None: there is no such tensor.
        expected: the shape that the library loads; None: it loads no such tensor.
    """

    key: str
    found: tuple[int, ...] | None
    expected: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.expected is None:
            return f"{show(self.key)} has shape {self.found}, and is not loaded"
        return f"{show(self.key)} has shape {self.found or 'none'}, expected {self.expected}"


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
    wrong, unknown = compare_shapes(found, expected, model, left_out)
    names = listed(map(show, unknown), _MOST)
    if not wrong:
        return [f"{type(model).__name__} of {show(folder)} does not load {names}"] if unknown else []
    more = f"; there is also {names}" if unknown else ""
    raise MismatchError(
        f"{path}: {type(model).__name__} of {show(folder)} does not load what is published: "
        f"{listed(map(str, wrong), _MOST)}{more}",
        path=path,
        hint=hint_for(found, expected, wrong)
        or "give the config.json of the model that was saved; `files=Files(check_names=False)` publishes it as it is",
    )


def compare_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    model: Any,
    left_out: Collection[str] = (),
) -> tuple[list[Difference], list[str]]:
    """The tensors that are missing or have another shape, by name, and the names that the library does not load.

    Args:
        found: the stored shapes, by name.
        expected: those that the library publishes.
        model: the model.
        left_out: names that are left out on purpose.
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
    return [Difference(key, found.get(key), expected.get(key) or right.get(key)) for key in wrong], unknown


def _tied(model: Any) -> list[set[str]]:
    """The names of each group of tied tensors, of which one is enough."""
    groups: dict[str, set[str]] = {}
    for one, two in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        group = groups.get(one, {one}) | groups.get(two, {two})
        groups |= dict.fromkeys(group, group)
    return list(groups.values())


def _patterns(model: Any, name: str) -> list[re.Pattern[str]]:
    return [re.compile(one) for one in getattr(model, name, None) or ()]


def hint_for(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], wrong: Sequence[Difference]
) -> str | None:
    """What to do about names or shapes of a model that differ; None: the cause is not known.

    Args:
        found: the stored shapes, by name.
        expected: those of the library.
        wrong: what differs.
    """
    start = start_before(found, expected)
    if start is not None:
        return (
            f"all fit after `select=Select(rename={{{start!r}: ''}})`"
            if {key.removeprefix(start) for key in found} <= expected.keys()
            else (f"`select=Select(rename={{{start!r}: ''}})` removes the text before the names")
        )
    if (of_wrappers := _hint_of_wrappers(found, expected)) is not None:
        return of_wrappers
    rows = [
        one
        for one in wrong
        if one.found and one.key in expected and one.expected is not None and one.found[1:] == one.expected[1:]
    ]
    if rows and len(rows) == len(wrong):
        n_found, n_expected = found[rows[0].key][0], expected[rows[0].key][0]
        says = f"config.json says `vocab_size` {n_expected}, and the checkpoint has {n_found} rows"
        sizes = {one.key: expected[one.key][0] for one in rows}
        if all(found[key][0] > n for key, n in sizes.items()):
            return (
                f"{says}: a vocabulary may be padded for training; `select=Select(trim={sizes!r})` leaves out the "
                "rest; or give the config.json of the padded model"
            )
        return f"{says}: give the config.json of the model that was saved"
    return None


def _hint_of_wrappers(found: Iterable[str], expected: Collection[str]) -> str | None:
    """A name map that removes what wrappers add inside of names; None: they add nothing.

    Example:
        >>> _hint_of_wrappers(["layers.0._orig_mod.w", "layers.1._orig_mod.w"], {"layers.0.w", "layers.1.w"})
        'all fit with `names={"rules": [{"from": "layers.{i}._orig_mod.w", "to": "layers.{i}.w"}]}`'
    """
    names = set(found)
    of_rules = {key: bare(key) for key in names - set(expected) if bare(key) in expected}
    rules = {_numbered(key): _numbered(name) for key, name in of_rules.items()}
    if not rules:
        return None
    shown = [json.dumps({"from": one, "to": other}) for one, other in sorted(rules.items())]
    text = ", ".join([*shown[:_MOST_RULES], *["..."] * (len(shown) > _MOST_RULES)])
    fit = "all fit" if {of_rules.get(key, key) for key in names} == set(expected) else f"{len(of_rules)} more fit"
    n = f", {len(shown)} rules" if len(shown) > _MOST_RULES else ""
    return f'{fit} with `names={{"rules": [{text}]}}`{n}'


def _numbered(name: str) -> str:
    """A name with indices of a name map in place of its numbers.

    Example:
        >>> _numbered("layers.3.experts.12.w"), _numbered("0.1.2.3.4.5.6.7.8.9.w")
        ('layers.{i}.experts.{j}.w', '{i}.{j}.{k}.{l}.{m}.{n}.{o}.{p}.8.9.w')
    """
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal() and part.isascii()]
    for at, index in zip(numbers, "ijklmnop", strict=False):
        parts[at] = f"{{{index}}}"
    return ".".join(parts)


def start_before(found: Iterable[str], expected: Collection[str]) -> str | None:
    """The text before the names without which more of them are expected; None: there is none.

    Example:
        >>> start_before(["model.a.w", "model.a.b"], {"a.w", "a.b"})
        'model.'
    """
    names = set(found)
    first = min(names, default="")
    for start in (first[: n + 1] for n, letter in enumerate(first) if letter == "."):
        if len({key.removeprefix(start) for key in names} & set(expected)) > len(names & set(expected)):
            return start
    return None


def kept_in_float32(
    folder: str | os.PathLike[str], names: Iterable[str], dtype: str, *, is_dequantised: bool = False
) -> set[str] | None:
    """Which tensors the library keeps in float32 when it loads the model of a config.json in another dtype.

    Args:
        folder: the folder of config.json.
        names: published names of tensors.
        dtype: the other dtype, "F16" or "BF16".
        is_dequantised: as for `model_of`.

    Returns:
        Their names; None: `model_of` does not know the model, or this version does not say it.

    Raises:
        UnsupportedError: as `model_of`.
    """
    model = model_of(folder, is_dequantised=is_dequantised)
    plan_of = getattr(model, "_get_dtype_plan", None)  # of transformers 5
    if plan_of is None:
        return None
    torch: Any = importlib.import_module("torch")
    plan = plan_of(torch.float16 if dtype == "F16" else torch.bfloat16)
    patterns = [re.compile(one.replace("*", ".*")) for one, kept in plan.items() if kept is torch.float32]
    live_name = _live_names(model)
    return {name for name in names if any(one.search(name) or one.search(live_name(name)) for one in patterns)}


def fp8_weights(folder: str | os.PathLike[str], names: Iterable[str]) -> tuple[set[str], list[str]]:
    """Which weights the library holds in block-scaled FP8 in the model of a config.json.

    Args:
        folder: the folder of config.json.
        names: published names of tensors.

    Returns:
        Their names, and the modules that the library leaves as they are.

    Raises:
        UnsupportedError: there is no such model, or this version does not say it.
    """
    model = made_model(folder)
    live_name = _live_names(model)
    try:
        configs: Any = importlib.import_module("transformers.utils.quantization_config")
        library: Any = importlib.import_module("transformers.quantizers.quantizer_finegrained_fp8")
        quantizer = library.FineGrainedFP8HfQuantizer(configs.FineGrainedFP8Config())
        quantizer.pre_quantized = False
        quantizer._process_model_before_weight_loading(model)  # noqa: SLF001  it replaces the modules
        live = model.state_dict().keys()
        found = {name for name in names if live_name(name) in live
                 and quantizer.param_needs_quantization(model, live_name(name))}  # fmt: skip
    except (ImportError, AttributeError, TypeError) as error:
        raise UnsupportedError(
            f"{show(str(folder))}: transformers does not say which weights are FP8: {type(error).__name__}: {error}",
            path=str(folder),
            hint="transformers 5 does",
        ) from error
    return found, sorted(quantizer.modules_to_not_convert or ())


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
