"""Arrays compared bit for bit, name by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reshard import _core

if TYPE_CHECKING:
    from collections.abc import Mapping

Arrays = dict[str, np.ndarray]


def assert_same(found: Arrays, expected: Arrays) -> None:
    """The same names, and under each the same dtype, shape and bytes."""
    assert set(found) == set(expected)
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key


def as_bytes(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What is compared of arrays: by name their dtype, shape and bytes."""
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


def whole_request(shapes: dict[str, tuple[int, ...]], keys: dict[str, str] | None = None) -> _core.Request:
    """The request for whole tensors as regions, by the name of the array that each becomes."""
    request = _core.Request()
    for name, shape in shapes.items():
        request.add_region(name, name if keys is None else keys[name], (0,) * len(shape), shape)
    return request
