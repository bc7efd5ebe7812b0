"""tiles.json: written files are read again, and invalid untrusted files are refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from reshard._core import Tile
from reshard.errors import ArgumentError, DamagedFileError, UnsupportedError
from reshard.formats.tiled import names as tiles

if TYPE_CHECKING:
    from pathlib import Path


def tiles_file(**changes: Any) -> dict[str, Any]:
    """A sound file of one tensor, (2, 3) as two rows in two files, with changes at the paths that names spell."""
    content: dict[str, Any] = {
        "version": 1,
        "layout": {"mesh": {"dp": 2}},
        "tensors": {
            "w": {
                "dtype": "F32",
                "shape": [2, 3],
                "overlapping": False,
                "stored": [
                    {
                        "file": f"rank_{r}.safetensors",
                        "name": "flat",
                        "shape": [4],
                        "tiles": [[[r, 0], [1, 3], 0, [3, 1]]],
                    }
                    for r in (0, 1)
                ],
            }
        },
    }
    tensor = content["tensors"]["w"]
    places = {"top": content, "tensor": tensor, "stored": tensor["stored"][0]}
    for place, fields in changes.items():
        places[place].update(fields)
    return content


def test_tiles_round_trip(tmp_path: Path) -> None:
    path = tmp_path / tiles.TILES_FILE
    path.write_text(json.dumps(tiles_file()))
    first = tiles.read(path)
    assert first.layout == {"mesh": {"dp": 2}}
    assert first.tensors["w"].stored[1].tiles == (((1, 0), (1, 3), 0, (3, 1)),)
    tiles.write(path, first)
    assert tiles.read(path) == first
    assert json.loads(path.read_text()) == tiles_file()
    tiles.write(path, tiles.Builder().build())
    assert tiles.read(path) == tiles.TilesFile(None, {})


def with_tile(*tile: Any) -> dict[str, Any]:
    return tiles_file(stored={"tiles": [list(tile)]})


TILES: list[tuple[str, object, str]] = [
    ("no object", [], "the file is not an object"),
    ("version missing", {"layout": None, "tensors": {}}, "lacks `version`"),
    ("version as text", tiles_file(top={"version": "1"}), "`version` is not an integer"),
    ("version true", tiles_file(top={"version": True}), "`version` is not an integer"),
    ("an unknown field", tiles_file(top={"extra": 1}), "unknown field `extra`"),
    ("layout a list", tiles_file(top={"layout": []}), "`layout` is neither"),
    ("tensors a list", tiles_file(top={"tensors": []}), "`tensors` is not an object"),
    ("an empty key", tiles_file(top={"tensors": {"": {}}}), "a key has 0 bytes"),
    ("a key that drives a terminal", tiles_file(top={"tensors": {"\x1b[2J": {}}}), "`\\x1b[2J`, has a control"),
    ("dtype a number", tiles_file(tensor={"dtype": 4}), "`dtype` is not the name"),
    ("dtype a path", tiles_file(tensor={"dtype": "../F32"}), "`dtype` is not the name"),
    ("shape a number", tiles_file(tensor={"shape": 6}), "no list of numbers"),
    ("shape with a fraction", tiles_file(tensor={"shape": [2.0, 3]}), "integers from 0 on"),
    ("shape with true", tiles_file(tensor={"shape": [True, 3]}), "integers from 0 on"),
    ("shape negative", tiles_file(tensor={"shape": [-2, 3]}), "integers from 0 on"),
    ("33 dims", tiles_file(tensor={"shape": [1] * 33}), "has 33 dims"),
    ("overlapping a number", tiles_file(tensor={"overlapping": 1}), "`overlapping` is not true or false"),
    ("stored an object", tiles_file(tensor={"stored": {}}), "`stored` is not a list"),
    ("stored of text", tiles_file(tensor={"stored": ["x"]}), "an entry of `stored` is not an object"),
    ("file missing", tiles_file(tensor={"stored": [{"name": "w", "shape": [], "tiles": []}]}), "lacks `file`"),
    ("file a number", tiles_file(stored={"file": 1}), "`file` is not text"),
    ("file above", tiles_file(stored={"file": "../x.safetensors"}), "path separator"),
    ("file absolute", tiles_file(stored={"file": "/etc/passwd"}), "path separator"),
    ("file with a backslash", tiles_file(stored={"file": "a\\b"}), "path separator"),
    ("file dots", tiles_file(stored={"file": ".."}), "names a folder"),
    ("file empty", tiles_file(stored={"file": ""}), "it is empty"),
    ("file with NUL", tiles_file(stored={"file": "a\0"}), "control character"),
    ("file too long", tiles_file(stored={"file": "a" * 256}), "has 256 bytes"),
    ("name a number", tiles_file(stored={"name": 1}), "`name` is not text"),
    ("name too long", tiles_file(stored={"name": "a" * 1025}), "has 1025 bytes"),
    ("tiles an object", tiles_file(stored={"tiles": {}}), "`tiles` is not a list"),
    ("a tile of three", with_tile([0, 0], [1, 3], 0), "a tile is not a list of offset"),
    ("a tile of text", tiles_file(stored={"tiles": ["abcd"]}), "a tile is not a list of offset"),
    ("a local offset that is a list", with_tile([0, 0], [1, 3], [0], [3, 1]), "integers from 0 on"),
    ("too few strides", with_tile([0, 0], [1, 3], 0, [1]), "not as many dims as the tensor, 2"),
    ("a negative stride", with_tile([0, 0], [1, 3], 0, [3, -1]), "integers from 0 on"),
    ("outside the tensor", with_tile([1, 1], [1, 3], 0, [3, 1]), "leaves the tensor"),
    ("outside the tensor by overflow", with_tile([0, (1 << 63) - 1], [1, 3], 0, [3, 1]), "leaves the tensor"),
    ("outside the array", with_tile([0, 0], [1, 3], 2, [3, 1]), "ends at element 4 of an array of 4"),
    ("outside by stride", with_tile([0, 0], [2, 3], 0, [1 << 62, 1]), "ends at element"),
]


@pytest.mark.parametrize(("content", "message"), [pytest.param(*row[1:], id=row[0]) for row in TILES])
def test_tiles_that_are_damaged(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / tiles.TILES_FILE
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedFileError) as caught:
        tiles.read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_tiles_of_a_later_version(tmp_path: Path) -> None:
    path = tmp_path / tiles.TILES_FILE
    path.write_text(json.dumps({"version": 2, "everything": "else"}))
    with pytest.raises(UnsupportedError, match="is of version 2; this release reads version 1"):
        tiles.read(path)


def test_a_tensor_told_of_twice_must_be_the_same() -> None:
    builder = tiles.Builder()
    stored = tiles.TiledArray("f", "w", (2,), (Tile((0,), (2,), 0, (1,)),))
    builder.add("w", "F32", (4,), stored)
    with pytest.raises(ArgumentError, match="`w` is"):
        builder.add("w", "BF16", (4,), stored)
    assert len(builder) == 1
