"""Steps on the disk: what a name that is taken, or cannot be, is told as."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from reshard.commit import filesystem
from reshard.errors import StorageError
from reshard.storage.location import locate


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_name_that_is_taken(tmp_path: Path, *, is_folder: bool) -> None:
    for name in ("new", "taken"):
        if is_folder:
            (tmp_path / name / "shard").mkdir(parents=True)
        else:
            (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError):
        filesystem.rename(locate(tmp_path / "new"), locate(tmp_path / "taken"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "taken"]


@pytest.mark.parametrize(
    ("source", "target", "number"),
    [
        ("nothing", "name", errno.ENOENT),
        ("file", "n" * 256, errno.ENAMETOOLONG),
        ("file", "nowhere/name", errno.ENOENT),
    ],
)
@pytest.mark.parametrize("act", [filesystem.rename, filesystem.exchange])
def test_a_failure_keeps_its_number(source: str, target: str, number: int, act: object, tmp_path: Path) -> None:
    assert callable(act)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        act(locate(tmp_path / source), locate(tmp_path / target))
    assert caught.value.errno == number
    assert Path(str(caught.value.path)).name == Path(target).name
