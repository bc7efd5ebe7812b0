"""`config_groups` of compressed-tensors say how weights are read, and must agree with the tensors."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.quantised_samples import ARCHITECTURE, fp8, integers, scales

import reshard
from reshard.errors import MismatchError, UnsupportedError
from reshard.quantised.config import Groups, Said

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.helpers.quantised_samples import Array

RNG = np.random.default_rng


def model(folder: Path, arrays: Mapping[str, Array], *weights: dict[str, Any] | None) -> Path:
    classes = ("Linear", "Embedding", "LlamaAttention")
    groups = {f"group_{n}": {"targets": [classes[n]], "weights": one} for n, one in enumerate(weights)}
    entry = {"quant_method": "compressed-tensors", "config_groups": groups}
    folder.mkdir()
    reshard.save_file(dict(arrays), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**ARCHITECTURE, "quantization_config": entry}))
    return folder


def args(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, **more}


def packed(rng: np.random.Generator, bits: int, rows: int, columns: int, groups: int) -> dict[str, Array]:
    return {
        "a.weight_packed": integers(rng, (rows, -(-columns * bits // 32)), np.int32),
        "a.weight_scale": scales(rng, (rows, groups), ml_dtypes.bfloat16),
        "a.weight_shape": np.array([rows, columns]),
    }


def test_blocks_are_those_of_the_groups(tmp_path: Path) -> None:
    """Two blocks of 96 rows are no blocks of 128, and five of 40 do not divide 190."""
    for rows_a_block, n in ((96, 2), (40, 5)):
        arrays = {"a.weight": fp8(RNG(1), (190, 128)), "a.weight_scale": scales(RNG(2), (n, 1))}
        size: object = [40, 128] if n == 5 else "96x128"
        block = args("float", 8, "block", block_structure=size)
        path = model(tmp_path / f"{n}", arrays, args("float", 4, "tensor_group", group_size=16), block, None)
        of_rows = np.repeat(arrays["a.weight_scale"], rows_a_block, 0)[:190]
        with reshard.open(path) as checkpoint, checkpoint.dequantised() as plain:
            assert (plain.read("a.weight") == arrays["a.weight"].astype(np.float32) * of_rows).all()


def test_groups_and_tensors_agree(tmp_path: Path) -> None:
    weight = {"a.weight": fp8(RNG(1), (256, 128)), "a.weight_scale": scales(RNG(2), (2, 1))}
    four = packed(RNG(3), 4, 64, 128, 2)
    cases: list[tuple[Mapping[str, Array], list[dict[str, Any]], str]] = [
        (weight, [args("float", 8, "block", block_structure=[64, 64])], "blocks of 64 x 64, as `config_groups` of"),
        (weight, [args("float", 8, "channel")], "blocks of 1 x 128, as `config_groups` of"),
        (weight, [args("int", 8, "channel")], "has values of type float of 8 bits, and `config_groups` of"),
        (
            {"a.weight": fp8(RNG(1), (190, 128)), "a.weight_scale": scales(RNG(2), (2, 1))},
            [args("float", 8, "block", block_structure=[n, 128]) for n in (96, 128)],
            "blocks of 96 x 128 and 128 x 128, as `config_groups` of",
        ),
        (weight, [args("float", 8, "block", block_structure="128xx")], "`weights` of the group `group_0`"),
        (weight, [args("float", 8, "block", block_structure="9" * 5000 + "x1")], "`weights` of the group `group_0`"),
        (weight, [args("float", 8, "group", group_size=0)], "`weights` of the group `group_0`"),
        (four, [args("int", 8, "group", group_size=64)], "packs no (64, 128) integers of 8 bits, as `config_groups`"),
        (four, [args("int", 4, "group", group_size=32)], "has 2 groups a row of 128, and `config_groups` of"),
        (four, [args("int", 4, "group", group_size=64, symmetric=False)], "`a.weight_zero_point` is missing"),
        (
            {"a.weight": integers(RNG(1), (8, 4), np.int8), "a.weight_scale": scales(RNG(1), (8, 1))},
            [args("int", 8, "channel", symmetric=False)],
            "`a.weight_zero_point` is missing",
        ),
    ]
    for number, (arrays, groups, message) in enumerate(cases):
        path = model(tmp_path / f"{number}", arrays, *groups)
        with reshard.open(path) as checkpoint, pytest.raises(MismatchError, match=re.escape(message)):
            checkpoint.quantised()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_int8_with_groups_and_zero_points(dtype: Any, tmp_path: Path) -> None:
    """As `compressed_tensors.quantization.lifecycle.forward.dequantize`: exact differences, and one rounding."""
    rng = RNG(4)
    arrays = {
        "a.weight": integers(rng, (6, 96), np.int8), "a.weight_scale": scales(rng, (6, 3), dtype),
        "a.weight_zero_point": integers(rng, (6, 3), np.int8),
        "b.weight": integers(rng, (4, 64), np.int8), "b.weight_scale": scales(rng, (4, 2), dtype),
        "b.weight_zero_point": integers(rng, (4, 2), np.int8),
    }  # fmt: skip
    path = model(tmp_path / "m", arrays, args("int", 8, "group", group_size=32, symmetric=False))
    with reshard.open(path) as checkpoint, checkpoint.dequantised() as plain:
        assert list(checkpoint.quantised()["a.weight"].parts) == ["weight", "scale", "zero_point"]
        found = plain.load(dtype=np.dtype(dtype).name)
    for name in "ab":
        zeros, of = (np.repeat(arrays[f"{name}.weight_{one}"], 32, 1) for one in ("zero_point", "scale"))
        difference = (arrays[f"{name}.weight"].astype(np.int16) - zeros).astype(np.float32)
        assert (found[f"{name}.weight"] == (difference * of.astype(np.float32)).astype(dtype)).all()
    # A part follows its weight into the ranks.
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
    reshard.convert(path, tmp_path / "ranks", to="checkpoint2", layout=layout)
    with reshard.open(tmp_path / "ranks") as checkpoint:
        assert [one.shape for one in checkpoint["a.weight_zero_point"].shards] == [(3, 3)] * 2


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_of_any_bits_stay_as_they_are(bits: int, tmp_path: Path) -> None:
    arrays = packed(RNG(bits), bits, 32, 96, 3)
    path = model(tmp_path / "m", arrays, args("int", bits, "group", group_size=32))
    reshard.convert(path, tmp_path / "out")
    with reshard.open(tmp_path / "out") as checkpoint:
        [one] = checkpoint.quantised().values()
        assert (one.kind, one.shape, one.values) == ("int-packed", (32, 96), {"bits": bits})
        assert all((checkpoint.read(key).view(np.uint8) == array.view(np.uint8)).all() for key, array in arrays.items())


def integers_of(words: Array, bits: int, n: int) -> Array:
    """As `unpack_from_int32` of `compressed_tensors.compressors.pack_quantized`, along the rows, without the offset."""
    each = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")[:, : n * bits]
    return np.asarray(each.reshape(len(words), n, bits) @ (1 << np.arange(bits)))


@pytest.mark.parametrize("zero_points", ["none", "packed"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_values_of_packed_integers(bits: int, zero_points: str, tmp_path: Path) -> None:
    """Codes lie across words of 32 bits, along the rows; zero points along the columns."""
    rows, columns, groups = 45, 104, 13
    rng = RNG(bits)
    arrays = packed(rng, bits, rows, columns, groups)
    codes, zeros = integers_of(arrays["a.weight_packed"], bits, columns), np.full((rows, groups), 1 << bits - 1)
    if zero_points == "packed":
        arrays["a.weight_zero_point"] = integers(rng, (-(-rows * bits // 32), groups), np.int32)
        zeros = integers_of(arrays["a.weight_zero_point"].T, bits, rows).T
    of_columns = [np.repeat(one.astype(np.float32), 8, 1) for one in (zeros, arrays["a.weight_scale"])]
    expected = (codes - of_columns[0]).astype(np.float32) * of_columns[1]
    path = model(tmp_path / "m", arrays, args("int", bits, "group", group_size=8, symmetric=zero_points == "none"))
    with reshard.open(path) as checkpoint, checkpoint.dequantised() as plain:
        assert (plain.read("a.weight") == expected).all()
        part = (slice(7, 40), slice(11, 97))
        assert (plain.read("a.weight", part) == expected[part]).all()
        assert (plain.load(dtype="bfloat16")["a.weight"] == expected.astype(ml_dtypes.bfloat16)).all()


def test_one_scale_for_all_packed_integers(tmp_path: Path) -> None:
    arrays = packed(RNG(1), 4, 32, 96, 1) | {"a.weight_scale": scales(RNG(2), (1,))}
    path = model(tmp_path / "m", arrays, args("int", 4, "tensor"))
    codes = integers_of(arrays["a.weight_packed"], 4, 96).astype(np.float32) - 8
    with reshard.open(path) as checkpoint, checkpoint.dequantised() as plain:
        assert (plain.read("a.weight") == codes * arrays["a.weight_scale"]).all()


def test_floats_of_6_bits_are_refused_by_name(tmp_path: Path) -> None:
    arrays = {"a.weight_packed": np.zeros((8, 96), np.uint8), "a.weight_scale": np.zeros((8, 4), np.uint8)}
    path = model(tmp_path / "m", arrays, args("float", 6, "group", group_size=32))
    with (
        reshard.open(path) as checkpoint,
        pytest.raises(UnsupportedError, match="has floats of 6 bits, as `config_groups`"),
    ):
        checkpoint.quantised()


LOOSE = {
    "3 of 128": (3, 128, 45, 13),
    "5 of 96": (5, 96, 45, 16),
    "6 of 200": (6, 200, 45, 40),
    "7 of 64": (7, 64, 45, 16),
}


@pytest.mark.parametrize("name", LOOSE)
def test_integers_that_stay_within_words_are_not_read_as_others(name: str, tmp_path: Path) -> None:
    """As compressed-tensors to 0.17.1 packs 3, 5, 6 and 7 bits: `32 // bits` integers a word."""
    bits, columns, rows, words = LOOSE[name]
    arrays = packed(RNG(1), bits, rows, columns, 1) | {"a.weight_packed": integers(RNG(2), (rows, words), np.int32)}
    path = model(tmp_path / "m", arrays, args("int", bits, "channel"))
    reshard.convert(path, tmp_path / "out")
    words_of_error = f"`a.weight_packed` packs integers of {bits} bits, each in one word of 32 bits, which is not"
    with reshard.open(tmp_path / "out") as checkpoint:
        assert (checkpoint.read("a.weight_packed") == arrays["a.weight_packed"]).all()
        with pytest.raises(UnsupportedError, match=words_of_error):
            checkpoint.dequantised()


def test_the_version_decides_how_integers_are_packed(tmp_path: Path) -> None:
    """20 integers of 3 bits need two words in both ways, and 8 bits in one way are as many words as 7 in the other."""
    narrow, eight = packed(RNG(1), 3, 8, 20, 1), packed(RNG(1), 8, 8, 64, 1)
    narrow["a.weight_packed"] &= np.array([(1 << 30) - 1, (1 << 28) - 1], np.int32)  # bits that both ways fill
    eight["a.weight_packed"] &= np.int32((1 << 28) - 1)
    rows = packed(RNG(1), 3, 20, 10, 1) | {"a.weight_zero_point": integers(RNG(2), (2, 1), np.int32)}
    three = args("int", 3, "channel")
    cases: list[tuple[Mapping[str, Array], dict[str, Any] | None, str | None, str]] = [
        (narrow, three, None, "3 bits, one after the other or 3 bits, each in one word of 32 bits: both fit"),
        (narrow, three, "0.17.2.a20260101", ": both fit"),
        (narrow, three, "0.17.1", "of 3 bits, each in one word of 32 bits, which is not supported"),
        (narrow, three, "0.18.0", ""),
        (rows, three | {"symmetric": False}, "0.14.0", "3 bits, each in one word of 32 bits, which is not supported"),
        (rows, three | {"symmetric": False}, "0.20.1", ""),
        (packed(RNG(1), 3, 20, 10, 1), three, "0.14.0", ""),
        (packed(RNG(1), 3, 8, 128, 1), three, "0.14.0", ""),
        (eight, None, None, "7 bits, each in one word of 32 bits or 8 bits, one after the other: both fit"),
        (eight, None, "0.18.0", ""),
        (eight, args("int", 8, "channel"), None, ""),
    ]
    for number, (arrays, weights, version, message) in enumerate(cases):
        path = model(tmp_path / f"{number}", arrays, weights)
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] |= {"version": version} if version else {}
        (path / "config.json").write_text(json.dumps(config))
        with reshard.open(path) as checkpoint:
            assert list(checkpoint.quantised()) == ["a.weight"]
            if message:
                with pytest.raises(UnsupportedError, match=message):
                    checkpoint.dequantised()
                continue
            with checkpoint.dequantised() as plain:
                assert plain.read("a.weight").shape == tuple(arrays["a.weight_shape"])


def in_words(codes: Array, bits: int, *, is_loose: bool) -> Array:
    """As `pack_to_int32` of compressed-tensors: 0.17.1, which keeps each integer in one word, or 0.18.0."""
    each: Array = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits].reshape(
        len(codes), -1
    )
    of_word = 32 // bits * bits if is_loose else 32
    each = np.pad(each, ((0, 0), (0, -each.shape[1] % of_word))).reshape(len(codes), -1, of_word)
    each = np.pad(each, ((0, 0), (0, 0), (0, 32 - of_word)))
    return np.packbits(each, axis=-1, bitorder="little").view(np.int32)[..., 0]


def test_a_set_bit_decides_how_integers_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that no integer fills are 0, so one that is set excludes a way of packing."""
    monkeypatch.setattr("reshard.quantised.dequantise._ROWS_BYTES", 64)  # one row at a time
    eight, seven, three = (
        RNG(1).integers(0, 256, (8, 64)),
        RNG(1).integers(0, 128, (8, 64)),
        RNG(1).integers(0, 8, (8, 20)),
    )
    seven_or_eight = (
        "`a.weight_packed` packs integers of 7 bits, each in one word of 32 bits or 8 bits, one after the other"
    )
    low = np.where(np.arange(8 * 64).reshape(8, 64) == 7 * 64 + 3, 255, seven & 15)  # one bit, in the last row
    cases: list[tuple[Array, int, bool, dict[str, Any] | None, str]] = [
        (eight, 8, False, None, ""),
        (low, 8, False, None, ""),
        (seven, 7, True, None, f"{seven_or_eight}: both fit"),
        (three, 3, False, args("int", 3, "channel"), ""),
        (three, 3, True, args("int", 3, "channel"), "of 3 bits, each in one word of 32 bits, which is not supported"),
    ]
    for number, (codes, bits, is_loose, weights, message) in enumerate(cases):
        arrays = packed(RNG(2), 8, len(codes), codes.shape[1], 1) | {
            "a.weight_packed": in_words(codes, bits, is_loose=is_loose)
        }
        with reshard.open(model(tmp_path / f"{number}", arrays, weights)) as checkpoint:
            if message:
                with pytest.raises(UnsupportedError, match=message):
                    checkpoint.dequantised()
                continue
            with checkpoint.dequantised() as plain:
                values = (codes.astype(np.float32) - (1 << bits - 1)) * arrays["a.weight_scale"].astype(np.float32)
                assert (plain.read("a.weight") == values).all()
    arrays = packed(RNG(1), 3, 8, 20, 1) | {"a.weight_packed": np.full((8, 2), -1, np.int32)}
    with (
        reshard.open(model(tmp_path / "none", arrays, args("int", 3, "channel"))) as checkpoint,
        pytest.raises(MismatchError, match="in its rows from 0 on bits are set that no integer fills"),
    ):
        checkpoint.dequantised()


def with_targets(path: Path, *targets: list[str]) -> Path:
    said = json.loads((path / "config.json").read_text())
    for one, group in zip(targets, said["quantization_config"]["config_groups"].values(), strict=True):
        group["targets"] = one
    (path / "config.json").write_text(json.dumps(said))
    return path


def test_a_weight_is_compared_with_the_group_of_its_module(tmp_path: Path) -> None:
    """Two blocks of 190 rows are blocks of 96 or of 128: `match_targets` of compressed-tensors says which are taken."""
    arrays = {"m.a.weight": fp8(RNG(1), (190, 128)), "m.a.weight_scale": scales(RNG(2), (2, 1))}
    blocks = [args("float", 8, "block", block_structure=[n, 128]) for n in (96, 128)]
    cases: list[tuple[list[str], list[str], int]] = [
        (["m.a"], ["Linear"], 96),
        (["re:.*a$"], ["m.a"], 128),  # a name comes before an expression
        (["re:m.*"], ["re:.*a"], 128),  # the first in the order of their texts
        (["re:a"], ["re:m[.]a"], 128),  # from the start of the name
        (["re:.*b$"], ["Linear"], 128),
        (["Linear", "re:.*a"], ["Linear"], 96),
    ]
    for number, (first, second, rows) in enumerate(cases):
        path = with_targets(model(tmp_path / f"{number}", arrays, *blocks), first, second)
        with reshard.open(path) as checkpoint:
            assert checkpoint.quantised()["m.a.weight"].values["block"] == (rows, 128), (first, second)
    # Not known: two groups fit.
    for number, (first, second) in enumerate(((["re:.*b"], ["re:.*c"]), (["re:(?!b).*"], ["Linear"]))):
        path = with_targets(model(tmp_path / f"both{number}", arrays, *blocks), first, second)
        with reshard.open(path) as checkpoint, pytest.raises(MismatchError, match="blocks of 96 x 128 and 128 x 128"):
            checkpoint.quantised()


def test_a_weight_as_another_group_says_is_refused(tmp_path: Path) -> None:
    arrays = packed(RNG(3), 4, 64, 128, 2)
    groups = [args("int", 4, "group", group_size=64), args("int", 8, "channel")]
    path = with_targets(model(tmp_path / "m", arrays, *groups), ["Linear"], ["re:.*a"])
    with reshard.open(path) as checkpoint, pytest.raises(MismatchError, match=r"packs no .* integers of 8 bits"):
        checkpoint.quantised()


def test_targets_can_have_the_names_that_transformers_gives(tmp_path: Path) -> None:
    """transformers renames modules on load: a target that names no module here can be that of a module that ends so."""
    arrays = {"m.a.weight": fp8(RNG(1), (190, 128)), "m.a.weight_scale": scales(RNG(2), (2, 1)), "m.b": np.ones(3)}
    named, of_class = (args("float", 8, "block", block_structure=[n, 128]) for n in (96, 200))
    for number, target in enumerate(("model.layers.a", "re:model[.].*a")):
        path = with_targets(model(tmp_path / f"{number}", arrays, named, of_class), [target], ["Linear"])
        with reshard.open(path) as checkpoint:
            assert checkpoint.quantised()["m.a.weight"].values["block"] == (96, 128), target
    for number, target in enumerate(("model.layers.q", "re:.*model[.].*a", "m")):  # of others
        path = with_targets(model(tmp_path / f"no{number}", arrays, named, of_class), [target], ["Linear"])
        with reshard.open(path) as checkpoint, pytest.raises(MismatchError, match="blocks of 200 x 128"):
            checkpoint.quantised()


def test_the_later_of_two_groups_has_a_target(tmp_path: Path) -> None:
    arrays = {"a.weight": fp8(RNG(1), (190, 128)), "a.weight_scale": scales(RNG(2), (2, 1))}
    blocks = [args("float", 8, "block", block_structure=[n, 128]) for n in (96, 128)]
    path = with_targets(model(tmp_path / "m", arrays, *blocks), ["Linear"], ["Linear"])
    with reshard.open(path) as checkpoint:
        assert checkpoint.quantised()["a.weight"].values["block"] == (128, 128)


PRESETS: dict[str, tuple[str, int, tuple[int | None, int | None], bool] | None] = {
    "UNQUANTIZED": None, "W8A8": ("int", 8, (1, None), True), "INT8": ("int", 8, (1, None), True),
    "W4A16_ASYM": ("int", 4, (1, 128), False), "W4AFP8": ("int", 4, (1, 128), True),
    "FP8": ("float", 8, (None, None), True), "FP8_DYNAMIC": ("float", 8, (1, None), True),
    "FP8_BLOCK": ("float", 8, (128, 128), True),
    **dict.fromkeys(("NVFP4", "NVFP4A16"), ("float", 4, (1, 16), True)),
    **dict.fromkeys(("MXFP4", "MXFP4A16", "MXFP4XFP8"), ("float", 4, (1, 32), True)),
    **dict.fromkeys(("MXFP6A16", "MXFP6A8"), ("float", 6, (1, 32), True)),
    **dict.fromkeys(("MXFP8", "MXFP8A16"), ("float", 8, (1, 32), True)),
    **{f"W{n}A{of}": ("int", n, (1, 128), True) for n in range(2, 9) for of in (4, 8, 16)
       if n <= of and (n, of) != (8, 8)},
}  # fmt: skip


def groups_of(entries: object) -> list[tuple[str, int, tuple[int | None, int | None], bool]]:
    return [tuple(one) for one in Groups(Said("config.json", "compressed-tensors", {"config_groups": entries})).of("a")]  # type: ignore[misc]


def test_presets() -> None:
    for name, told in PRESETS.items():
        for written in (name, name.lower()):
            assert groups_of({written: ["Linear"]}) == ([] if told is None else [told]), name
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    assert set(schemes.PRESET_SCHEMES) == set(PRESETS)
    for name in PRESETS:
        scheme = schemes.preset_name_to_scheme(name, ["Linear"]).model_dump(mode="json")
        assert groups_of({"group_0": scheme}) == groups_of({name: ["Linear"]}), name


def test_words_that_are_not_known_say_nothing() -> None:
    """Neither of the modules that they name, nor of those that they can name."""
    four = {"targets": ["re:b"], "weights": args("int", 4, "channel")}
    for unknown in (
        {"W4A17": ["Linear"]},
        {"W5A4": ["Linear"]},
        {"group_0": {"targets": ["Linear"], "weights": args("int", 4, "swizzled")}},
        {"group_0": {"targets": ["Linear"], "weights": args("ternary", 2, "channel")}},
        {"group_0": "W4A16"},
    ):
        assert groups_of(unknown) == []
        assert groups_of({**unknown, "group_1": four}) == []
        assert groups_of({**unknown, "group_1": {**four, "targets": ["a"]}}) == [("int", 4, (1, None), True)]
        assert groups_of({**unknown, "group_1": {**four, "targets": ["Embedding"]}}) == []


def test_types_and_strategies_in_any_case_and_bits_that_are_left_out() -> None:
    assert groups_of({"g": {"targets": ["Linear"], "weights": {"type": "FLOAT", "strategy": "Channel"}}}) == [
        ("float", 8, (1, None), True)
    ]
