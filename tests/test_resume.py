"""Resume: the order of candidates, the decision, the counters."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.errors import ArgumentError
from reshard.resume.resolve import Folder, order


def f(iteration: int, **what: Any) -> Folder:
    return Folder(iteration, f"iteration_{iteration:08d}", **what)


def saved(iteration: int, previous: int | None, epoch: int = 1, *, tracked: bool = True, over: Any = ()) -> Folder:
    return f(iteration, is_tracked=tracked, epoch=epoch, previous_tracker=previous, passed_over=tuple(over))


S100, S200, S300 = saved(100, None), saved(200, 100), saved(300, 200)
UNTRACKED = saved(300, 200, tracked=False)

ORDERS: list[tuple[str, list[Folder], int | None, dict[str, Any], list[int]]] = [
    # what, folders, tracker, options, candidates
    ("nothing there", [], None, {}, []),
    ("the tracker's first, then downwards", [S100, S200, S300], 300, {}, [300, 200, 100]),
    ("left before the tracker moved: taken", [S100, S200, UNTRACKED], 200, {}, [300, 200, 100]),
    ("left before the very first tracker", [saved(100, None, tracked=False)], None, {}, [100]),
    ("tracked once, so rolled back on purpose", [S100, S200, S300], 200, {}, [200, 100]),
    ("untracked, but of another line", [S100, S200, saved(300, 100, tracked=False)], 200, {}, [200, 100]),
    ("untracked, saved when there was no tracker", [S100, S200, saved(300, None, tracked=False)], 200, {}, [200, 100]),
    ("above the tracker without a manifest", [f(5), f(10)], 5, {}, [5]),
    ("the original's, tracker lost", [f(5), f(10)], None, {}, [10, 5]),
    ("a tracker that names nothing", [f(5), f(10)], 777, {}, [10, 5]),
    ("a tracker that cannot be read", [f(5), f(10)], None, {"tracker_fault": "it is empty"}, [10, 5]),
    ("two untracked ones: the later run's first",
        [S200, saved(400, 200, 3, tracked=False), saved(500, 200, 2, tracked=False)], 200, {}, [400, 500, 200]),
    # 300 and 200 were found damaged, 100 was taken, and 150 is the first save after that
    ("passed over, tracker moved", [S100, saved(150, 300, 2, over=[300, 200]), S200, S300], 150, {}, [150, 100]),
    ("passed over, crash before the tracker moved",
        [S100, saved(150, 300, 2, tracked=False, over=[300, 200]), S200, S300], 300, {}, [150, 100]),
    ("passed over, tracker lost", [S100, saved(150, 300, 2, over=[300, 200]), S200, S300], None, {}, [150, 100]),
    ("passed over, then saved again by the new run",
        [S100, saved(150, 300, 2, over=[300, 200]), saved(200, 150, 2), S300], 200, {}, [200, 150, 100]),
    ("passed over, then asked for by hand", [S100, saved(150, 300, 2, over=[300, 200]), S200, S300], 300, {},
        [300, 150, 100]),
    ("passed over by an older run: no word on a newer one",
        [saved(100, None, 1, over=[200]), saved(200, 100, 2)], 200, {}, [200, 100]),
    ("tracker only", [S100, S200, UNTRACKED], 200, {"policy": "tracker_only"}, [200]),
    ("tracker only, without one", [S100, S200], None, {"policy": "tracker_only"}, []),
    ("highest", [S100, S200, S300], 200, {"policy": "highest"}, [300, 200, 100]),
    ("highest, but not what was passed over",
        [S100, saved(150, 300, 2, over=[300]), S300], 150, {"policy": "highest"}, [150, 100]),
    ("exact", [S100, S200, S300], 300, {"exact": 200}, [200]),
    ("exact, even if passed over", [S100, saved(150, 300, 2, over=[300]), S300], 150, {"exact": 300}, [300]),
    ("exact, not there", [S100], 100, {"exact": 200}, []),
]  # fmt: skip


@pytest.mark.parametrize(("folders", "tracker", "options", "expected"), [case[1:] for case in ORDERS],
                         ids=[case[0] for case in ORDERS])  # fmt: skip
def test_the_order_of_candidates(
    folders: list[Folder], tracker: int | None, options: dict[str, Any], expected: list[int]
) -> None:
    for given in (folders, folders[::-1]):  # what is on disk has no order
        found = order(tuple(given), tracker, **options)
        assert [one.iteration for one in found.candidates] == expected
        refused = {one.iteration for one in found.refused}
        assert refused == {folder.iteration for folder in folders} - set(expected)
        assert all(one.reason for one in (*found.candidates, *found.refused))


@pytest.mark.parametrize(
    ("tracker", "options", "told"),
    [
        (777, {}, "it names iteration 777, which has no folder"),
        (None, {"tracker_fault": "it is empty"}, "of no use: it is empty"),
        (100, {"exact": 7}, "no folder of iteration 7"),
        (100, {}, None),
        (None, {}, None),
    ],
)
def test_what_is_wrong_with_a_root_is_told(tracker: int | None, options: dict[str, Any], told: str | None) -> None:
    warnings = order((S100,), tracker, **options).warnings
    assert (told is None) == (not warnings)
    assert told is None or told in warnings[0]


def test_options_that_cannot_be_meant() -> None:
    with pytest.raises(ArgumentError, match="policy is 'latest'"):
        order((), None, policy="latest")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="exclude each other"):
        order((), None, policy="highest", exact=5)
