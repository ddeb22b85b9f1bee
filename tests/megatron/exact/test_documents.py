import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megablend.megatron.exact import shuffle as ours
from megablend.megatron.exact.shuffle import Generator
from tests.examples import examples
from tests.megatron_core import megatron

MANY = 1 << 16


def same_state(one: Generator, other: np.random.RandomState) -> bool:
    state = other.get_state(legacy=False)["state"]
    return np.array_equal(one.key, state["key"]) and one.position == state["pos"]


@pytest.mark.long
@examples(80)
@given(st.integers(0, 50), st.integers(1, 5), st.booleans(), st.integers(0, 9))
@example(MANY // 3 + 1, 4, True, 1)
@example(MANY + 1, 1, True, 1)
def test_document_index_as_megatron(size: int, epochs: int, separate: bool, seed: int) -> None:
    documents = np.arange(7, 7 + size, dtype=np.int32)
    state = Generator(seed)
    twin = np.random.RandomState(seed)
    found = ours.document_index(documents, epochs, state, separate)
    expected = megatron("gpt_dataset")._build_document_index(documents, epochs, twin, separate)
    np.testing.assert_array_equal(found, expected, strict=True)
    assert same_state(state, twin)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "total"),
    [(0, 0), (0, 5), (5, 5), (3, 8), (MANY, MANY), (MANY + 3, 2 * MANY + 9), (9, 6)],
)
def test_shuffle_index_as_megatron(first: int, total: int) -> None:
    state = Generator(3)
    twin = np.random.RandomState(3)
    found = ours.shuffle_index(first, total, state)
    expected = megatron("gpt_dataset")._build_shuffle_index(first, total, twin)
    np.testing.assert_array_equal(found, expected, strict=True)
    assert same_state(state, twin)
