"""Arrays compared bit for bit, name by name."""

from __future__ import annotations

import numpy as np

Arrays = dict[str, np.ndarray]


def assert_same(found: Arrays, expected: Arrays) -> None:
    """The same names, and under each the same dtype, shape and bytes."""
    assert set(found) == set(expected)
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key
