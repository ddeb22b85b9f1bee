from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megablend.formats.buffers import as_numpy


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(),
        pa.uint16(),
        pa.int32(),
        pa.int64(),
        pa.uint64(),
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.bool_(),
    ],
)
@pytest.mark.parametrize("values", [[], [1], [0, 1, 1, 0, 1] * 7])
def test_values_are_those_of_to_numpy(kind: Any, values: list[int]) -> None:
    convert = (
        bool if pa.types.is_boolean(kind) else np.float16 if pa.types.is_float16(kind) else int
    )
    array = pa.array([convert(each) for each in values], kind)
    for part in (array, array[1:], array[3:20]):
        expected = part.to_numpy(zero_copy_only=False)
        np.testing.assert_array_equal(as_numpy(part), expected, strict=True)
