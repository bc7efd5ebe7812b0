"""GGUF files: the values are those of the package `gguf`, and converted models are those that transformers loads."""

from __future__ import annotations

import logging
import shutil
import struct
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.command_line import run
from tests.peers.required import required

import reshard
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    LayoutError,
    NamesError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]

gguf = required("gguf")
Type = gguf.GGMLQuantizationType
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M",
          "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
          "NVFP4")  # fmt: skip
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCABULARY, EXPERTS = 256, 512, 2, 8, 2, 64, 4


class Writer:
    """A GGUF file, written by the package."""

    def __init__(self, path: Path, architecture: str = "llama", **values: Any) -> None:
        self.of = gguf.GGUFWriter(str(path), architecture)
        for name, value in values.items():
            getattr(self.of, f"add_{name}")(value)

    def add(self, name: str, array: Array, of: str | None = None) -> Array:
        """Add a tensor, and return the values that the package computes of what is stored."""
        if of is None:
            self.of.add_tensor(name, array)
            return array
        raw = array if array.dtype == np.uint8 else gguf.quants.quantize(array, Type[of])
        self.of.add_tensor(name, raw, raw_dtype=Type[of])
        with np.errstate(all="ignore"):
            values: Array = gguf.quants.dequantize(raw, Type[of])
        return values

    def close(self) -> None:
        self.of.write_header_to_file()
        self.of.write_kv_data_to_file()
        self.of.write_tensors_to_file()
        self.of.close()


def same(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    nan = np.isnan(expected)
    assert (np.isnan(found) == nan).all()
    assert (found[~nan].view(f"u{found.itemsize}") == expected[~nan].view(f"u{found.itemsize}")).all()


def random_blocks(of: str, rows: tuple[int, ...], columns: int, seed: int = 0) -> Array:
    """Blocks of random bytes: every code and every scale, also those that are not finite."""
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[Type[of]]
    return np.random.default_rng(seed).integers(0, 256, (*rows, columns // n_values * n_bytes), np.uint8)


def test_the_sizes_of_all_types(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "m.gguf")
    for one in Type:
        writer.of.add_tensor(one.name, random_blocks(one.name, (2,), 768), raw_dtype=one)
    writer.close()
    reader = gguf.GGUFReader(str(tmp_path / "m.gguf"))
    with reshard.open(tmp_path / "m.gguf") as checkpoint:
        weights = checkpoint.quantised()
        assert len(checkpoint) == len(Type)
        for tensor in reader.tensors:
            shape = weights[tensor.name].shape if tensor.name in weights else checkpoint.shape(tensor.name)
            assert shape == (2, 768)
            assert checkpoint.read(tensor.name).tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("of", BLOCKS)
def test_every_code_of_a_block_has_the_value_of_the_package(tmp_path: Path, of: str) -> None:
    writer = Writer(tmp_path / "m.gguf")
    expected = {
        "w": writer.add("w", random_blocks(of, (300,), 1024), of),
        "experts": writer.add("experts", random_blocks(of, (3, 5), 512, 1), of),
        "row": writer.add("row", random_blocks(of, (), 256, 2), of),
    }
    writer.close()
    with reshard.open(tmp_path / "m.gguf") as checkpoint, checkpoint.dequantised() as plain:
        assert {key: one.values["type"] for key, one in checkpoint.quantised().items()} == dict.fromkeys(expected, of)
        for key, values in expected.items():
            same(plain.read(key), values)
        for dtype in (ml_dtypes.bfloat16, np.float16):
            with np.errstate(all="ignore"):
                same(plain.load(keys=["w"], dtype=dtype)["w"], expected["w"].astype(dtype))
        # Slices that begin and end inside blocks.
        rng = np.random.default_rng(1)
        for _ in range(20):
            (a, b), (c, d) = np.sort(rng.integers(0, 300, 2)), np.sort(rng.integers(0, 1024, 2))
            same(plain.read("w", (slice(a, b), slice(c, d))), expected["w"][a:b, c:d])
        same(plain.read("experts", (slice(1, 3), 2, slice(30, 70))), expected["experts"][1:3, 2, 30:70])


def test_tensors_without_blocks(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "m.gguf")
    values = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    expected = {of: writer.add(of, values, of) for of in ("F32", "F16", "BF16")}
    expected |= {"i8": writer.add("i8", np.arange(4, dtype=np.int8)), "f64": writer.add("f64", np.ones(3))}
    writer.close()
    with reshard.open(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.format == "gguf"
        assert not checkpoint.quantised()
        for key, array in expected.items():
            assert (checkpoint.read(key).astype(array.dtype) == array).all()
        assert checkpoint["BF16"].dtype == "BF16"


def test_types_whose_values_are_not_known_are_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "m.gguf")
    writer.of.add_tensor("w", random_blocks("Q8_1", (2,), 256), raw_dtype=Type.Q8_1)
    writer.close()
    with pytest.raises(UnsupportedError, match="how its values are computed is not known here") as caught:
        reshard.convert(tmp_path / "m.gguf", tmp_path / "hf", dtype="bfloat16")
    assert caught.value.key == "w"


def permuted(weights: Array, n_heads: int) -> Array:
    """As `LlamaModel.permute` of llama.cpp."""
    halves = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


class Case:
    """A small model of transformers, and a GGUF file of it as llama.cpp converts it."""

    def __init__(self, model_type: str, of: str = "Q8_0", *, has_biases: bool = False) -> None:
        transformers = required("transformers")
        torch = required("torch")
        more: dict[str, Any] = {"head_dim": 32}
        if model_type in ("qwen3_moe", "olmoe"):
            more |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
        if model_type == "mixtral":
            more |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
        if model_type == "llama":
            more |= {"attention_bias": has_biases, "mlp_bias": has_biases}
        if model_type == "qwen3":
            more["head_dim"] = 128  # transformers does not read it from the file
        if model_type in ("olmoe", "phi3"):
            del more["head_dim"]
        config = transformers.AutoConfig.for_model(
            model_type, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY, max_position_embeddings=64, **more,
            tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model_type, self.of = model_type, of
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        for one in self.model.parameters():
            one.data.uniform_(-1, 1)

    def published(self, folder: Path) -> dict[str, Array]:
        """The tensors that transformers publishes."""
        self.model.save_pretrained(folder)
        return {key: np.array(array) for key, array in reshard.load_file(folder).items()}

    @property
    def architecture(self) -> str:
        names = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
        return names.get(self.model_type, self.model_type)

    def write(self, path: Path, published: dict[str, Array], **more: Any) -> dict[str, Array]:
        """Write a file as llama.cpp does, and return the values under published names."""
        writer = Writer(
            path, self.architecture, head_count=HEADS, head_count_kv=KV_HEADS, embedding_length=HIDDEN,
            block_count=LAYERS, feed_forward_length=FFN, context_length=64, layer_norm_rms_eps=1e-6,
            vocab_size=VOCABULARY, rope_dimension_count=32, rope_freq_base=10000.0, tokenizer_model="gpt2",
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
            token_list=[f"t{n}" for n in range(VOCABULARY)], **more,
        )  # fmt: skip
        if any("experts" in key for key in published):
            writer.of.add_expert_count(EXPERTS)
            writer.of.add_expert_used_count(2)
        of_library = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, self.architecture.upper()), LAYERS)
        experts: dict[str, dict[int, str]] = {}
        values = {}
        for key, array in published.items():
            start, is_expert, rest = key.partition(".experts.")
            if is_expert:
                number, _, name = rest.partition(".")
                experts.setdefault(f"{start}.experts.{name}", {})[int(number)] = key
                continue
            rotates = self.architecture == "llama" and key.rpartition(".")[0].endswith(("q_proj", "k_proj"))
            n_heads = HEADS if "q_proj" in key else KV_HEADS
            stored = permuted(array, n_heads) if rotates else array
            name = of_library.get_name(key, try_suffixes=(".weight", ".bias"))
            found = writer.add(name, stored.astype(np.float32), "F32" if array.ndim == 1 else self.of)
            if rotates:
                index = permuted(np.arange(len(found)), n_heads)
                found = found[np.argsort(index)]
            values[key] = found
        for key, members in experts.items():
            stacked = np.stack([published[members[n]] for n in range(len(members))]).astype(np.float32)
            found = writer.add(of_library.get_name(key, try_suffixes=(".weight",)), stacked, self.of)
            values |= {members[n]: one for n, one in enumerate(found)}
        writer.close()
        return values


FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmoe", "phi3")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_published_names_and_the_rows_of_rotated_heads(
    tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(model_type, has_biases=True)
    expected = case.write(tmp_path / "m.gguf", case.published(tmp_path / "published"))
    with caplog.at_level(logging.WARNING):
        report = reshard.convert(tmp_path / "m.gguf", tmp_path / "hf", dtype="float32")
    family = "llama" if model_type == "mistral" else model_type
    assert report.warnings[0].startswith(f"names of gguf ({family}) are changed to those of Hugging Face")
    found = reshard.load_file(tmp_path / "hf")
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        same(found[key], values)
    # The preset by its name, and the way back.
    named = reshard.open(tmp_path / "m.gguf").dequantised()
    with named, named.renamed(f"{model_type}-gguf", config=named.data.config, reverse=True) as renamed:
        assert set(renamed) == set(expected)
    reshard.convert(tmp_path / "hf", tmp_path / "back", names=f"{model_type}-gguf", config=named.data.config)
    with reshard.open(tmp_path / "m.gguf") as checkpoint, checkpoint.dequantised() as stored:
        again = reshard.load_file(tmp_path / "back")
        assert again.keys() == set(stored.keys())
        for key in again:
            same(again[key], stored.read(key))


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(("model_type", "of"), [("llama", "Q4_0"), ("mistral", "Q8_0"), ("qwen2", "F16"),
                                                ("qwen3", "BF16"), ("qwen3_moe", "Q8_0"),
                                                ("phi3", "Q5_1")])  # fmt: skip
def test_a_converted_model_is_the_one_that_transformers_loads(tmp_path: Path, model_type: str, of: str) -> None:
    transformers, torch = required("transformers"), required("torch")
    case = Case(model_type, of)
    case.write(tmp_path / "m.gguf", case.published(tmp_path / "published"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    reshard.convert(
        tmp_path / "m.gguf", tmp_path / "hf", dtype="float32", files={"model_files": tmp_path / "published"}
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = model.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert [key for key, one in ours.state_dict().items() if not torch.equal(one, expected[key])] == []


@pytest.mark.parametrize("architecture", ["starcoder2", "gemma2", "gemma3", "phi2", "qwen2moe", "nemotron", "mistral3"])
def test_an_unknown_architecture_keeps_its_names(tmp_path: Path, architecture: str) -> None:
    writer = Writer(tmp_path / "m.gguf", architecture)
    values = writer.add("blk.0.attn_q.weight", np.ones((8, 64), np.float32), "Q8_0")
    writer.close()
    report = reshard.convert(tmp_path / "m.gguf", tmp_path / "hf", dtype="float32")
    assert "the architecture of the model has no preset" in report.warnings[0]
    same(reshard.load_file(tmp_path / "hf")["blk.0.attn_q.weight"], values)


def test_an_unknown_tensor_of_a_known_architecture_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "m.gguf", head_count=2, embedding_length=8)
    writer.add("blk.0.attn_q.weight", np.ones((8, 8), np.float32))
    writer.add("blk.0.attn_sinks.weight", np.ones(8, np.float32))
    writer.close()
    with pytest.raises(NamesError, match="attn_sinks"):
        reshard.convert(tmp_path / "m.gguf", tmp_path / "hf")
    reshard.convert(tmp_path / "m.gguf", tmp_path / "kept", files={"check_names": False})
    assert "blk.0.attn_sinks.weight" in reshard.load_file(tmp_path / "kept")


def test_frequencies_that_follow_from_the_configuration(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "m.gguf", head_count=2, embedding_length=8)
    writer.add("token_embd.weight", np.ones((8, 8), np.float32))
    writer.add("rope_freqs.weight", np.ones(2, np.float32))
    writer.close()
    report = reshard.convert(tmp_path / "m.gguf", tmp_path / "hf")
    assert "`rope_freqs.weight` follow from config.json and are left out" in report.warnings[0]
    assert list(reshard.load_file(tmp_path / "hf")) == ["model.embed_tokens.weight"]


# -- blocks are kept together


def one_weight(path: Path, of: str = "Q4_K", shape: tuple[int, ...] = (8, 1024)) -> Array:
    writer = Writer(path, "other")
    values = writer.add("w", random_blocks(of, shape[:-1], shape[-1]), of)
    writer.add("norm", np.ones(8, np.float32))
    writer.close()
    return values


def test_blocks_are_not_written_apart_from_their_meaning(tmp_path: Path) -> None:
    one_weight(tmp_path / "m.gguf")
    for to in ("huggingface", "safetensors", "torch", "dcp", "checkpoint2"):
        with pytest.raises(UnsupportedError, match="blocks of GGUF") as caught:
            reshard.convert(tmp_path / "m.gguf", tmp_path / to, to=to, part="all")
        assert (caught.value.key, "bfloat16" in str(caught.value.hint)) == ("w", True)
    with pytest.raises(UnsupportedError, match="`w` belongs to the quantised weight `w`"):
        reshard.open(tmp_path / "m.gguf").load(dtype="bfloat16")
    # Tensors without blocks can be converted alone.
    reshard.convert(tmp_path / "m.gguf", tmp_path / "norm", select={"drop": "w"})
    assert list(reshard.load_file(tmp_path / "norm")) == ["norm"]


def test_a_layout_divides_at_whole_blocks(tmp_path: Path) -> None:
    values = one_weight(tmp_path / "m.gguf")
    with reshard.open(tmp_path / "m.gguf") as checkpoint:
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": [None, "tp"]}, {"match": "*"}]}
        halves = [checkpoint.load(layout, rank=rank)["w"] for rank in range(2)]
        assert np.array_equal(np.concatenate(halves, 1), checkpoint.read("w"))
        through = {"mesh": {"tp": 8}, "rules": [{"match": "w", "cut": [None, "tp"]}, {"match": "*"}]}
        with pytest.raises(LayoutError, match="144 at a time share a scale"):
            checkpoint.load(through, rank=0)
        with checkpoint.dequantised() as plain:
            parts = [plain.load(through, rank=rank)["w"] for rank in range(8)]
        same(np.concatenate(parts, 1), values)


def test_a_layout_of_a_conversion(tmp_path: Path) -> None:
    values = one_weight(tmp_path / "m.gguf", "Q6_K")
    layout = {"mesh": {"tp": 8}, "rules": [{"match": "w", "cut": [None, "tp"]}, {"match": "*"}]}
    reshard.convert(tmp_path / "m.gguf", tmp_path / "out", layout=layout, dtype="float32")
    with reshard.open(tmp_path / "out") as checkpoint:
        same(checkpoint.read("w"), values)


def test_a_renamed_view_still_knows_its_blocks(tmp_path: Path) -> None:
    one_weight(tmp_path / "m.gguf")
    with reshard.open(tmp_path / "m.gguf") as checkpoint:
        names = {"rules": [{"from": "w", "to": "v"}]}
        with checkpoint.renamed(names) as renamed:
            assert renamed.quantised()["v"].shape == (8, 1024)


# -- files and folders


def parts(folder: Path, count: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        writer = Writer(folder / f"m-{number + 1:05}-of-{count:05}.gguf", "llama")
        writer.of.add_uint16("split.no", number)
        writer.of.add_uint16("split.count", count)
        writer.of.add_int32("split.tensors.count", count)
        writer.add(f"w{number}", np.full(4, number, np.float32))
        writer.close()


def test_a_model_in_parts(tmp_path: Path) -> None:
    parts(tmp_path / "m", 3)
    for path in (tmp_path / "m", tmp_path / "m" / "m-00002-of-00003.gguf"):
        with reshard.open(path) as checkpoint:
            assert [checkpoint.read(f"w{n}")[0] for n in range(3)] == [0, 1, 2]
    (tmp_path / "m" / "m-00002-of-00003.gguf").rename(tmp_path / "away.gguf")
    with pytest.raises(CheckpointNotFoundError, match=r"holds 2 of 3 parts of `m`; missing: `m-00002-of-00003.gguf`"):
        reshard.open(tmp_path / "m")
    with pytest.raises(DamagedFileError, match="one of 3 parts by its header, and of 1 by its name"):
        reshard.open(tmp_path / "away.gguf")
    shutil.copy(tmp_path / "m" / "m-00001-of-00003.gguf", tmp_path / "m" / "m-00002-of-00003.gguf")
    with pytest.raises(DamagedFileError, match="both hold `w0`"):
        reshard.open(tmp_path / "m")


def test_a_folder_with_several_models(tmp_path: Path) -> None:
    one_weight(tmp_path / "a-Q4_K.gguf")
    one_weight(tmp_path / "a-Q8_0.gguf")
    with pytest.raises(UnsupportedError, match=r"several GGUF models: `a-Q4_K\.gguf`, `a-Q8_0\.gguf`") as caught:
        reshard.open(tmp_path)
    assert "path of its file" in str(caught.value.hint)
    # Beside other weights, these are opened.
    reshard.save_file({"w": np.zeros(2)}, tmp_path / "model.safetensors")
    assert reshard.open(tmp_path).format == "huggingface"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    one_weight(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:-1000])
    with pytest.raises(DamagedFileError, match="reaches beyond the end of the file") as caught:
        reshard.open(tmp_path / "m.gguf")
    assert (caught.value.path, caught.value.key) == (str(tmp_path / "m.gguf"), "w")


def test_inspect_and_verify(tmp_path: Path) -> None:
    one_weight(tmp_path / "m.gguf")
    text = run("inspect", tmp_path / "m.gguf").stdout
    assert "8192 parameters (1 blocks of GGUF)" in text
    assert "gguf-blocks  8 x 1024  4.50 KiB" in text
    verified = run("verify", tmp_path / "m.gguf")
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"swap": [2]}, "expected two sizes, as in"),
        ({"swap": [2, 2], "transpose": [1, 0]}, "`swap` needs one tensor on each side"),
        ({"swap": [2, 2], "trim": 0, "to_size": 4}, "`swap` and `trim` are both given"),
        ({"swap": [2, 3]}, "the 8 elements along dim 0 are not divisible into groups of 2 x 3"),
        ({"swap": [2, "n"]}, "needs the size `n`, which is not known"),
        ({"swap": [2, 0]}, "is 0, expected at least 1"),
    ],
)
def test_rules_that_cannot_swap(rule: dict[str, Any], message: str) -> None:
    mapping = {"sizes": {"n": "n"}, "rules": [{"from": "w", "to": "v", **rule}]}
    with pytest.raises(NamesError, match=message):
        reshard.NameMap.from_mapping(mapping).resolve({"w": (8, 2)})


def test_a_file_without_tensors_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(CheckpointNotFoundError, match="is a GGUF file without tensors"):
        reshard.open(tmp_path / "v.gguf")
