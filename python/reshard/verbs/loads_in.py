"""Whether a library loads a folder: its names and shapes against those of the model that the folder's config describes.

The library makes the model on the device `meta`, so neither needs the memory of the weights, and only headers are read:
transformers from config.json, diffusers from the config of each component, peft from adapter_config.json and the config
of the base model. Code of a folder is not executed. The libraries are imported when they are needed.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from reshard import opening
from reshard.conversion.library_model import (
    Difference,
    compare_shapes,
    hint_for,
    made_model,
    model_of_class,
    published_shapes,
    saved_state,
    start_before,
)
from reshard.documents.strict_json import read_json
from reshard.errors import CheckpointNotFoundError, UnsupportedError
from reshard.formats import weight_map
from reshard.storage.location import Location, locate
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping

Library: TypeAlias = Literal["transformers", "peft", "diffusers"]

_ADAPTER_CONFIG, _ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_PIPELINE, _CONFIG = "model_index.json", "config.json"
_DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"
_MAX_BYTES = 64 << 20
_MOST = 3  # names in one message


@dataclass(frozen=True)
class LoadsIn:
    """Whether a library loads a folder.

    Attributes:
        library: "transformers", "peft" or "diffusers".
        models: the classes of the models that were made, by folder relative to the path; "." is the path itself.
        n_tensors: number of stored tensors that were compared.
        differences: tensors that are missing, have another shape, or would be lost, by name. The name of a tensor of
            a component begins with the folder of the component and a slash.
        warnings: tensors that the library ignores when it loads the folder, as sentences.
        hint: what to do about the differences, where the cause is known.
    """

    library: str
    models: dict[str, str]
    n_tensors: int
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...] = ()
    hint: str | None = None


@dataclass(frozen=True)
class Part:
    """A model of a folder.

    Attributes:
        folder: its folder.
        files: what holds its weights, as `reshard.open` opens it.
        kind: the name of its class; None: its config says it.
    """

    folder: Location
    files: tuple[Location, ...]
    kind: str | None = None
    library: Library = "transformers"


def parts_of(path: Location, library: Library) -> dict[str, Part]:
    """The models of a folder, by folder relative to it, with the files of their weights.

    Raises:
        UnsupportedError: the library is not installed.
        CheckpointNotFoundError: the folder has no such config, or no weights beside it.
    """
    _library(library)
    if library == "transformers":
        return {".": Part(path, (path,))}
    if library == "peft":
        _needed(path, _ADAPTER_CONFIG, library)
        return {".": Part(path, (_needed(path, _ADAPTER_FILE, library),), library=library)}
    if not (path / _PIPELINE).is_file():
        _needed(path, _CONFIG, library)
        return {".": Part(path, _diffusers_files(path), library=library)}
    parts = {}
    for name, entry in _object(path / _PIPELINE).items():
        if name.startswith("_") or not isinstance(entry, list) or len(entry) != 2 or None in entry:
            continue
        owner, kind = map(str, entry)
        if not (path / name / _CONFIG).is_file() and owner in ("transformers", "diffusers"):
            if not _is_model(owner, kind):
                continue  # a scheduler or a tokenizer
            _needed(path / name, _CONFIG, library)
        if owner == "transformers" and _is_model(owner, kind):
            parts[name] = Part(path / name, (path / name,), kind)
        elif owner == "diffusers" and _is_model(owner, kind):
            parts[name] = Part(path / name, _diffusers_files(path / name), kind, "diffusers")
        elif owner not in ("transformers", "diffusers"):
            raise UnsupportedError(
                f"{show(str(path))}: the component {show(name)} is the {show(kind)} of {show(owner)}, which is not "
                "transformers or diffusers",
                path=str(path / name),
                hint="verify the folders of the other components one by one",
            )
    return parts


def loads_in(parts: Mapping[str, Part], library: Library, base: str | None = None) -> LoadsIn:
    """Compare the names and shapes of a folder with those of the models that a library makes of its configs.

    Args:
        parts: of `parts_of`.
        library: the library.
        base: for peft, the folder of the base model; None: the one that adapter_config.json names.

    Raises:
        UnsupportedError: the library cannot make a model; the message says why.
    """
    differences: list[Difference] = []
    ignored: list[str] = []
    models, n_tensors, hint = {}, 0, None
    for name, part in parts.items():
        start = "" if name == "." else f"{name}/"
        found = _shapes(part.files)
        if part.library == "peft":
            kind, wrong, unknown, why = _of_peft(part.folder, found, base)
        elif part.library == "diffusers":
            kind, wrong, unknown, why = _of_diffusers(part.folder, found, part.kind)
        else:
            kind, wrong, unknown, why = _of_transformers(part.folder, found, part.kind)
        models[name] = kind
        n_tensors += len(found)
        hint = hint or why
        differences += [one._replace(key=start + one.key) for one in wrong]
        if unknown and wrong:
            differences += [Difference(start + key, found[key], None) for key in unknown]
        elif unknown:
            ignored.append(
                f"{kind} of {show(str(part.folder))} does not load {listed(map(show, unknown), _MOST)}: it is ignored"
            )
    differences.sort(key=lambda one: one.key)
    return LoadsIn(library, models, n_tensors, tuple(differences), tuple(ignored), hint)


_Compared: TypeAlias = "tuple[str, list[Difference], list[str], str | None]"


def _of_transformers(folder: Location, found: dict[str, tuple[int, ...]], kind: str | None) -> _Compared:
    model = made_model(str(folder)) if kind is None else model_of_class(str(folder), kind)
    expected = published_shapes(model)
    if expected is None:
        expected = {key: tuple(one.shape) for key, one in saved_state(model).items()}
    wrong, unknown = compare_shapes(found, expected, model)
    start = start_before(found, expected)
    if start is not None and not wrong and any(key.startswith(start) for key in expected):
        # transformers accepts the name of the base model twice. No other program does, and it does not write it.
        wrong = [Difference(key, None, expected[key]) for key in sorted(expected.keys() - found.keys())]
    return type(model).__name__, wrong, unknown, hint_for(found, expected, wrong)


def _of_diffusers(folder: Location, found: dict[str, tuple[int, ...]], kind: str | None) -> _Compared:
    library, torch = _library("diffusers"), _torch()
    config = _object(folder / _CONFIG)
    name = kind or str(config.get("_class_name"))
    made: Any = getattr(library, name, None)
    if not _is_model("diffusers", name):
        raise UnsupportedError(
            f"{show(str(folder))}: config.json names the class {show(name)}, which is no model of diffusers "
            f"{library.__version__}",
            path=str(folder),
        )
    try:
        with torch.device("meta"):
            model: Any = made.from_config(config)
    except Exception as error:
        raise _not_made(folder, "diffusers", name, error) from error
    given = {key: torch.empty(shape, device="meta") for key, shape in found.items()}
    names = {id(tensor): key for key, tensor in given.items()}
    model._fix_state_dict_keys_on_load(given)  # noqa: SLF001  as it does for names of earlier versions
    stored = {key: names[id(tensor)] for key, tensor in given.items()}
    live = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    wrong = [
        Difference(stored.get(key, key), found.get(stored.get(key, key)), shape)
        for key, shape in live.items()
        if key not in given or tuple(given[key].shape) != shape
    ]
    ignored = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]  # noqa: SLF001
    unknown = [stored[key] for key in given if key not in live and not any(one.search(key) for one in ignored)]
    return name, wrong, unknown, _rename_hint(found, live)


def _of_peft(folder: Location, found: dict[str, tuple[int, ...]], base: str | None) -> _Compared:
    library, torch = _library("peft"), _torch()
    try:
        config = library.PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise _not_made(folder, "peft", "config", error) from error
    inner = _base_model(folder, config, base)
    try:
        if isinstance(getattr(config, "init_lora_weights", None), str):
            config.init_lora_weights = True  # the others need the values of the base model
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = library.get_peft_model(inner, config, low_cpu_mem_usage=True)
            wrong, unknown, expected = _compare_adapter(library, model, found)
    except Exception as error:
        raise _not_made(folder, "peft", type(config).__name__, error) from error
    wrong += [Difference(key, found[key], None) for key in unknown]
    return f"{type(model).__name__} of {type(inner).__name__}", wrong, [], _rename_hint(found, expected)


def _rename_hint(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> str | None:
    return None if start_before(found, expected) is None else hint_for(found, expected, ())


def _compare_adapter(
    library: Any, model: Any, found: Mapping[str, tuple[int, ...]]
) -> tuple[list[Difference], list[str], dict[str, tuple[int, ...]]]:
    """What is missing or has another shape, the names that are lost, and the shapes that peft publishes.

    Other names than the published ones are given to peft itself, with tensors on the device `meta`.
    """
    torch = _torch()
    live = dict(model.state_dict())
    published = library.get_peft_model_state_dict(model, state_dict=dict(live), save_embedding_layers=False)
    expected = {key: tuple(tensor.shape) for key, tensor in published.items()}
    # Other names that it loads are those of the model, such as a whole embedding.
    right = {key: tuple(tensor.shape) for key, tensor in live.items()} | expected
    wrong = [Difference(key, shape, right[key]) for key, shape in found.items() if right.get(key, shape) != shape]
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if (missing or unknown) and not model.active_peft_config.is_prompt_learning:
        given = {key: torch.empty(shape) for key, shape in found.items() if right.get(key, shape) == shape}
        key_of = {id(tensor): key for key, tensor in live.items()}
        loaded = None
        with contextlib.suppress(KeyError):  # a whole module is not there
            loaded = library.set_peft_model_state_dict(
                model, given, ignore_mismatched_sizes=True, low_cpu_mem_usage=True
            )
        if loaded is not None:
            used = {_storage(tensor) for tensor in model.state_dict().values()}
            missing = [key for key in missing if key_of.get(id(published[key])) in {None, *loaded.missing_keys}]
            unknown = [key for key in unknown if key in given and _storage(given[key]) not in used]
            unknown = unknown if loaded.unexpected_keys else []
    return [*wrong, *(Difference(key, None, expected[key]) for key in missing)], unknown, expected


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _base_model(folder: Location, config: Any, base: str | None) -> Any:
    """The base model of an adapter on the device `meta`, of the class for its task.

    Raises:
        UnsupportedError: it is not on this machine, or of no class of transformers.
    """
    transformers = _library("transformers")
    name = base or config.base_model_name_or_path
    hint = 'give the folder of its config.json: `base="FOLDER"`'
    if not name:
        raise UnsupportedError(
            f"{show(str(folder))}: adapter_config.json does not name the base model", path=str(folder), hint=hint
        )
    place = locate(name)
    if not place.is_folder() and base is None:
        try:
            place = locate(transformers.utils.cached_file(name, _CONFIG, local_files_only=True)).parent
        except Exception:  # noqa: BLE001  of any kind, as it is not there
            place = locate(name)
    if not (place / _CONFIG).is_file():
        raise UnsupportedError(
            f"{show(str(folder))}: the config.json of the base model {show(name)} is not on this machine",
            path=str(folder),
            hint=hint,
        )
    mapping = config.auto_mapping or {}
    if mapping and not str(mapping.get("parent_library")).startswith("transformers."):
        raise UnsupportedError(
            f"{show(str(folder))}: the base model is of {show(str(mapping.get('parent_library')))}, which is not "
            "transformers",
            path=str(folder),
        )
    kind = mapping.get("base_model_class")
    if kind is None and config.task_type is not None:
        auto: Any = importlib.import_module("peft.auto")
        of_task = auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type)
        pairs = {
            getattr(one, "_target_peft_class", None): getattr(one, "_target_class", None) for one in vars(auto).values()
        }
        kind = getattr(pairs.get(of_task), "__name__", None)
    return made_model(str(place)) if kind is None else model_of_class(str(place), str(kind))


def _shapes(files: tuple[Location, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with opening.open(file) as checkpoint:
            shapes |= {key: tuple(checkpoint.shape(key)) for key in checkpoint}
    return shapes


def _diffusers_files(folder: Location) -> tuple[Location, ...]:
    index = folder / f"{_DIFFUSERS_FILE}.index.json"
    if index.is_file() and not (folder / _DIFFUSERS_FILE).is_file():
        return tuple(folder / name for name in sorted(set(weight_map.read(index).values())))
    return (_needed(folder, _DIFFUSERS_FILE, "diffusers"),)


def _needed(folder: Location, name: str, library: str) -> Location:
    path = folder / name
    if not path.is_file():
        there = listed(map(show, folder.names()), _MOST) if folder.is_folder() else "it is no folder"
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds no {name}, which {library} loads; it holds {there or 'nothing'}",
            path=str(folder),
        )
    return path


def _object(path: Location) -> dict[str, Any]:
    value = read_json(path, _MAX_BYTES, follow_links=True)
    if not isinstance(value, dict):
        raise UnsupportedError(f"{show(str(path))} is no JSON object", path=str(path))
    return value


def _is_model(owner: str, kind: str) -> bool:
    found = getattr(_library(owner), kind, None)
    return isinstance(found, type) and issubclass(found, _torch().nn.Module)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{name} cannot be imported: {show(str(error))}", hint=f"install it, such as by `pip install {name}`"
        ) from error


def _torch() -> Any:
    return importlib.import_module("torch")


def _not_made(folder: Location, library: str, what: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"{show(str(folder))}: {library} cannot make the {show(what)}: {type(error).__name__}: {show(str(error))}",
        path=str(folder),
    )
