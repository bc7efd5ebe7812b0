"""Fields of config.json of models whose text model has a config of its own, as transformers writes it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tests.helpers.command_line import run

import reshard
import reshard.torch
from reshard.errors import ArgumentError
from reshard.names import NameMap
from reshard.names.config_fields import config_fields
from reshard.options import InitFrom, Select
from reshard.verbs.start import initial

if TYPE_CHECKING:
    from pathlib import Path

N_ROWS = 100  # of the vocabulary
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny multimodal model."""
    path = tmp_path_factory.mktemp("models") / "llava"
    vision = transformers.CLIPVisionConfig(**{**SMALL, "num_attention_heads": 2}, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**SMALL, vocab_size=N_ROWS, max_position_embeddings=16)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=9)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(path)
    return path


def edited(folder: Path, **fields: Any) -> Any:
    """The content of config.json with other fields in its parts, by the name of the part."""
    config = json.loads((folder / "config.json").read_text())
    for name, changes in fields.items():
        config[name] = {key: value for key, value in {**config[name], **changes}.items() if value is not None}
    return config


@pytest.fixture(params=["with transformers", "without"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "transformers", None)
    return bool(request.param == "with transformers")


@pytest.mark.usefixtures("library")
def test_rows_are_padded_and_trimmed_there_and_back(llava: Path, tmp_path: Path) -> None:
    rows = dict.fromkeys(("language_model.lm_head.", "language_model.model.embed_tokens."), "vocab_size / 5 * 6")
    with reshard.open(llava) as checkpoint:
        names = [key for key in checkpoint if key.startswith(tuple(rows))]
        assert len(names) == 2
        before = {key: checkpoint.read(key) for key in names}
    padding = [f"--pad={name}={size}" for name, size in rows.items()]
    done = run("convert", llava, tmp_path / "padded", "--config", llava / "config.json", "--no-check", *padding)
    assert done.exit_code == 0, done.output
    with reshard.open(tmp_path / "padded") as checkpoint:
        assert {checkpoint.shape(key) for key in names} == {(N_ROWS * 6 // 5, 16)}
    select = Select(trim=dict.fromkeys(rows, "vocab_size"))
    reshard.convert(
        tmp_path / "padded",
        tmp_path / "back",
        to="huggingface",
        select=select,
        config=llava,
        files={"check_names": False},
    )
    with reshard.open(tmp_path / "back") as checkpoint:
        assert all((checkpoint.read(key) == before[key]).all() for key in names)


@pytest.mark.usefixtures("library")
def test_a_start_from_more_rows(llava: Path, tmp_path: Path) -> None:
    (tmp_path / "padded").mkdir()
    (tmp_path / "padded/config.json").write_bytes((llava / "config.json").read_bytes())
    reshard.save_file({"w": torch.ones(N_ROWS + 28, 2).numpy()}, tmp_path / "padded/model.safetensors")
    rule = {"from": "w", "to": "v", "trim": 0, "to_size": "vocab"}
    names = {"sizes": {"vocab": "vocab_size"}, "rules": [rule]}
    init = InitFrom(tmp_path / "padded", names=names)
    with reshard.open(init.path) as checkpoint, initial(checkpoint, init) as renamed:
        assert renamed.shape("v") == (N_ROWS, 2)


def test_presets_take_the_sizes_of_the_text_model(llava: Path, *, library: bool) -> None:
    if not library:  # the vision model has heads, too
        several = r"`text_config\.num_attention_heads` is 4, `vision_config.num_attention_heads` is 2"
        with pytest.raises(ArgumentError, match=several):
            NameMap.preset("llama-megatron", llava)
        return
    sizes = NameMap.preset("llama-megatron", llava).sizes
    found = {name: sizes[name].choices[0].value({}) for name in ("vocab", "heads", "kv_heads", "head_dim")}
    assert found == {"vocab": N_ROWS, "heads": 4, "kv_heads": 4, "head_dim": 4}


def test_the_library_says_which_part_is_the_text_model(llava: Path, *, library: bool) -> None:
    # Older versions wrote it for vision models as well.
    both = edited(llava, vision_config={"vocab_size": 32000})
    if library:
        assert config_fields(both, ["vocab_size"]) == {"vocab_size": N_ROWS}
        # They left out what is the default of the library.
        assert config_fields(edited(llava, text_config={"vocab_size": None}), ["vocab_size"]) == {"vocab_size": 32000}
    else:
        several = r"`text_config\.vocab_size` is 100, `vision_config.vocab_size` is 32000"
        with pytest.raises(ArgumentError, match=several):
            config_fields(both, ["vocab_size"])
    same = edited(llava, vision_config={"vocab_size": N_ROWS}) | {"padded_vocab_size": 128}
    assert config_fields(same, ["vocab_size", "padded_vocab_size", "tp"]) == {
        "vocab_size": N_ROWS,
        "padded_vocab_size": 128,
    }


@pytest.mark.usefixtures("library")
def test_two_text_models_are_named() -> None:
    encoder, decoder = transformers.BertConfig(vocab_size=50), transformers.GPT2Config(vocab_size=60)
    config = transformers.EncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict()).to_dict()
    with pytest.raises(ArgumentError, match=r"`encoder\.vocab_size` is 50, `decoder\.vocab_size` is 60") as caught:
        config_fields(config, ["vocab_size"])
    assert "give the config of one part" in str(caught.value.hint)
    assert config_fields(config["decoder"], ["vocab_size"]) == {"vocab_size": 60}


def test_a_plain_config_is_read_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    config = transformers.LlamaConfig(**SMALL, vocab_size=N_ROWS).to_dict()
    assert config_fields(config, ["vocab_size", "nothing"]) == {"vocab_size": N_ROWS}
