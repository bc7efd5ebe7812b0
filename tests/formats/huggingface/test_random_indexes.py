"""Random Hugging Face folders, damaged as downloads and saves damage them: what is read is what transformers loads.

The environment variable `RESHARD_RANDOM_INDEXES` sets the number of folders.
"""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.peers.required import required

import reshard
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

transformers = required("transformers")

N_FOLDERS = int(os.environ.get("RESHARD_RANDOM_INDEXES", "15"))
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Arrays = dict[str, np.ndarray]


class Folder:
    """A folder before it is written, and the names that a message about it may use."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.is_tied = draw.random() < 0.4
        self.config: dict[str, Any] = {
            **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8),
            **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1),
            "num_attention_heads": 2,
            "max_position_embeddings": 16,
            "tie_word_embeddings": self.is_tied,
        }
        torch.manual_seed(draw.randrange(1 << 30))
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**self.config))
        self.arrays: Arrays = {name: one.detach().numpy() for name, one in model.state_dict().items()}
        if self.is_tied:
            del self.arrays["lm_head.weight"]
        self.files: dict[str, Arrays] = {}
        self.torch_files: dict[str, Arrays] = {}
        self.texts: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.weight_map: dict[str, str] | None = None
        self.has_metadata = True
        self.about: set[str] = set()  # files and tensors that a mutation concerns

    def other(self, key: str | None = None) -> np.ndarray:
        """A tensor with the shape of this one and other values."""
        shape = self.arrays[key].shape if key in self.arrays else (2, 2)
        return np.full(shape, self.draw.random(), np.float32)

    def key(self) -> str:
        return self.draw.choice([*self.arrays])

    def listed(self) -> list[str]:
        return sorted(set((self.weight_map or {}).values()) & self.files.keys())

    def divide(self) -> None:
        """One file, or several with an index."""
        n = self.draw.choice([1, 2, 2, 3, 4])
        if n == 1:
            self.files[SINGLE] = dict(self.arrays)
            return
        names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        self.weight_map = {}
        for key in self.draw.sample([*self.arrays], len(self.arrays)):
            name = self.draw.choice(names)
            self.files.setdefault(name, {})[key] = self.arrays[key]
            self.weight_map[key] = name

    def write(self, folder: Path) -> None:
        folder.mkdir()
        config = {**self.config, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config))
        for name, arrays in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            reshard.save_file(arrays, folder / name, metadata={"format": "pt"})
        for name, arrays in self.torch_files.items():
            torch.save({key: torch.from_numpy(one.copy()) for key, one in arrays.items()}, folder / name)
        for name, target in self.links.items():
            (folder / name).symlink_to(target)
        for name, text in self.texts.items():
            (folder / name).write_text(text)
        if self.weight_map is not None:
            content = {"metadata": {"total_size": 1}} if self.has_metadata else {}
            (folder / INDEX).write_text(json.dumps({**content, "weight_map": self.weight_map}))


# -- what happens to a folder


def a_missing_file(one: Folder) -> None:
    if one.weight_map is None:
        one.files.pop(SINGLE, None)
        one.about.add(SINGLE)
        return
    name = one.draw.choice([*one.listed(), "model-00009-of-00009.safetensors"])
    if one.files.pop(name, None) is None:
        one.weight_map["model.new.weight"] = name
    one.about.add(name)


def an_index_without_names(one: Folder) -> None:
    if one.weight_map is None:
        return
    for key in one.draw.sample([*one.weight_map], one.draw.randint(1, len(one.weight_map))):
        name = one.weight_map.pop(key)
        one.about |= {key, name}


def an_index_with_wrong_names(one: Folder) -> None:
    if one.weight_map is None or not one.listed():
        return
    key = one.draw.choice([*one.arrays, "model.new.weight"])
    one.weight_map[key] = one.draw.choice(one.listed())
    one.about |= {key, one.weight_map[key]}


def a_file_beside(one: Folder) -> None:
    name = one.draw.choice(["mtp.safetensors", "model-00001-of-00009.safetensors", "consolidated.safetensors", "a.bin"])
    keys = one.draw.sample([*one.arrays], 2)
    arrays = {key: one.other(key) for key in keys} if one.draw.random() < 0.6 else {"mtp.weight": one.other()}
    (one.torch_files if name.endswith(".bin") else one.files)[name] = arrays
    one.about |= {name}


def a_tensor_in_two_files(one: Folder) -> None:
    if len(one.listed()) < 2:
        return
    source, target = one.draw.sample(one.listed(), 2)
    key = one.draw.choice([*one.files[source]])
    is_equal = one.draw.random() < 0.5
    one.files[target][key] = (
        one.files[source][key] if is_equal else one.other(key) if key in one.arrays else one.other()
    )
    one.about |= {key, source, target}


def a_single_file_beside_the_index(one: Folder) -> None:
    keys = one.draw.sample([*one.arrays], one.draw.choice([1, len(one.arrays)]))
    one.files[SINGLE] = {key: one.other(key) if one.draw.random() < 0.5 else one.arrays[key] for key in keys}
    one.about |= {SINGLE, INDEX}


def torch_files_beside(one: Folder) -> None:
    keys = [*one.arrays]
    name = "pytorch_model.bin"
    one.torch_files[name] = {key: one.other(key) for key in keys}
    one.about |= {name}


def torch_files_only(one: Folder) -> None:
    n = one.draw.choice([1, 2, 2, 2])
    arrays = {key: value for of_file in one.files.values() for key, value in of_file.items()}
    one.files, one.weight_map = {}, None
    if n == 1:
        one.torch_files["pytorch_model.bin"] = arrays
        one.about.add("pytorch_model.bin")
        return
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    weight_map = {key: one.draw.choice(names) for key in arrays}
    for key, name in weight_map.items():
        one.torch_files.setdefault(name, {})[key] = arrays[key]
    how = one.draw.choice(["right", "omits", "one file", "twice, equal", "twice, different"])
    key = one.key()
    if how == "omits":
        del weight_map[key]
    elif how == "one file":
        one.torch_files["pytorch_model.bin"] = {key: one.other(key) for key in arrays}
        one.about.add("pytorch_model.bin")
    elif how.startswith("twice"):
        for name in names:
            one.torch_files.setdefault(name, {}).setdefault(key, arrays[key] if "equal" in how else one.other(key))
    one.texts["pytorch_model.bin.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map})
    one.about |= {*names, "pytorch_model.bin.index.json"}


def a_variant(one: Folder) -> None:
    if one.draw.random() < 0.4 and one.weight_map is None and SINGLE in one.files:
        one.files["model.fp16.safetensors"] = one.files.pop(SINGLE)
    else:
        one.files["model.fp16.safetensors"] = {key: one.other(key) for key in one.arrays}
    one.about.add("model.fp16.safetensors")


def files_in_a_folder(one: Folder) -> None:
    if not one.listed():
        return
    assert one.weight_map is not None
    name = one.draw.choice(one.listed())
    moved = f"part/{name}"
    one.files[moved] = one.files.pop(name)
    if one.draw.random() < 0.7:
        one.weight_map |= {key: moved for key, of_key in one.weight_map.items() if of_key == name}
    one.about |= {name, moved}


def a_link(one: Folder) -> None:
    name = one.draw.choice([*one.files, SINGLE])
    if name in one.files and "/" not in name:
        one.files[f"blobs/{name}.blob"] = one.files.pop(name)
        one.links[name] = f"blobs/{name}.blob"
    elif name not in one.files:
        one.links[name] = "blobs/nothing"
    one.about.add(name)


def a_tied_head(one: Folder) -> None:
    files = [name for name in one.files if "model.embed_tokens.weight" in one.files[name]]
    if not files:
        return
    embed = one.files[files[0]]["model.embed_tokens.weight"]
    how = one.draw.choice(["equal", "different", "head only"])
    head = embed if how == "equal" else one.other("model.embed_tokens.weight")
    name = one.draw.choice(one.listed() or files)
    one.files[name]["lm_head.weight"] = head
    if one.weight_map is not None:
        one.weight_map["lm_head.weight"] = name
    if how == "head only":
        for of_file in one.files.values():
            of_file.pop("model.embed_tokens.weight", None)
        if one.weight_map is not None:
            one.weight_map.pop("model.embed_tokens.weight", None)
    one.about |= {"lm_head.weight", "model.embed_tokens.weight"}


def an_index_without_metadata(one: Folder) -> None:
    one.has_metadata = False
    one.about.add(INDEX)


def another_file_in_the_config(one: Folder) -> None:
    name = one.draw.choice(["other.safetensors", INDEX])
    one.config["transformers_weights"] = name
    if name != INDEX:
        one.files[name] = {key: one.other(key) for key in one.arrays}
    one.about |= {name, "transformers_weights"}


def a_tensor_too_many(one: Folder) -> None:
    if not one.files:
        return
    name = one.draw.choice([*one.files])
    one.files[name]["model.new.weight"] = one.other()
    if one.weight_map is not None and one.draw.random() < 0.5:
        one.weight_map["model.new.weight"] = name
    one.about |= {name, "model.new.weight"}


def a_tensor_missing(one: Folder) -> None:
    key = one.key()
    for arrays in one.files.values():
        arrays.pop(key, None)
    if one.weight_map is not None and one.draw.random() < 0.7:
        one.weight_map.pop(key, None)
    one.about.add(key)


def a_tensor_of_another_shape(one: Folder) -> None:
    key = one.key()
    for arrays in one.files.values():
        if key in arrays:
            arrays[key] = one.other()
            break
    one.about.add(key)


MUTATIONS: list[Callable[[Folder], None]] = [
    a_missing_file,
    an_index_without_names,
    an_index_with_wrong_names,
    a_file_beside,
    a_tensor_in_two_files,
    a_single_file_beside_the_index,
    torch_files_beside,
    torch_files_only,
    a_variant,
    files_in_a_folder,
    a_link,
    a_tied_head,
    an_index_without_metadata,
    another_file_in_the_config,
    a_tensor_too_many,
    a_tensor_missing,
    a_tensor_of_another_shape,
]


# -- what is loaded


class Loaded:
    """What transformers loads from a folder: the tensors, and those that it could not find or did not use."""

    def __init__(self, folder: Path) -> None:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        self.missing = set(info["missing_keys"])
        self.unexpected = set(info["unexpected_keys"])
        self.arrays = {
            name: one.detach().numpy() for name, one in model.state_dict().items() if name not in self.missing
        }

    def differences(self, other: Loaded) -> set[str]:
        names = self.arrays.keys() ^ other.arrays.keys()
        both = self.arrays.keys() & other.arrays.keys()
        return names | {name for name in both if not np.array_equal(self.arrays[name], other.arrays[name])}


def load_with_transformers(folder: Path) -> Loaded | Exception:
    try:
        return Loaded(folder)
    except Exception as error:  # noqa: BLE001  any of them is a refusal
        return error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(N_FOLDERS))
def test_what_is_read_is_what_transformers_loads(number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(number)
    one = Folder(draw)
    one.divide()
    chosen = draw.sample(MUTATIONS, draw.choice([0, 1, 1, 1, 2, 2, 3]))
    for mutate in chosen:
        mutate(one)
    what = ", ".join(mutate.__name__ for mutate in chosen)
    folder, out = tmp_path / "hf", tmp_path / "out"
    one.write(folder)
    expected = load_with_transformers(folder)
    if isinstance(expected, KeyError) and "metadata" in str(expected):
        # The library asks for the key and does not use it; the rest of the index says all.
        one.has_metadata = True
        one.write(tmp_path / "with metadata")
        expected = load_with_transformers(tmp_path / "with metadata")
    caplog.clear()
    refused: ReshardError | None = None
    try:
        with reshard.open(folder) as opened:
            read = {key: np.asarray(opened.read(key)) for key in opened}
        reshard.convert(folder, out, to="huggingface")
    except ReshardError as error:
        refused = error
    if refused is not None:
        if isinstance(expected, Loaded):
            assert any(name in str(refused) for name in one.about | expected.missing), f"{what}: {refused}"
        return
    assert isinstance(expected, Loaded), f"{what}: transformers refuses: {expected!r}"
    different = expected.differences(Loaded(out)) | {
        key for key in read.keys() & expected.arrays.keys() if not np.array_equal(read[key], expected.arrays[key])
    }
    assert not different, what
    told = "\n".join(record.getMessage() for record in caplog.records)
    unread = expected.arrays.keys() - read.keys() - {"lm_head.weight", "model.embed_tokens.weight"}
    assert not unread, what
    # Files of weights that nothing reads are named where the library does not name them either.
    beside = {name for name in one.files if name not in (SINGLE, *one.listed()) and "/" not in name}
    if one.weight_map is not None and SINGLE not in one.files:
        assert all(name in told for name in beside), f"{what}: {beside}: {told}"
