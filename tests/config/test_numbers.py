from __future__ import annotations

import numpy as np
import pytest

from megablend.config.numbers import whole_number
from megablend.errors import ConfigError


@pytest.mark.parametrize("number", [0, np.int64(3), 10**99])
def test_a_whole_number(number: int) -> None:
    assert whole_number("n", number, least=0) == number


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "found n -1, expected a whole number, 0 or more"),
        (True, "found n True, expected"),
        (1.0, "found n 1.0, expected"),
    ],
)
def test_what_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        whole_number("n", value, least=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_python_refuses_to_write(sign: int) -> None:
    with pytest.raises(ConfigError, match="found n of more than 100 digits, expected a smaller"):
        whole_number("n", sign * 10**5000)
