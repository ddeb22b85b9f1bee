from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megablend.errors import PlanError
from megablend.megatron.exact.greedy import MAX_SCANNED, Greedy, _State, exhaustive, greedy
from megablend.megatron.request.request import MAX_DATASETS
from tests.megatron_core import megatron

KINDS = [
    "uniform",
    "equal",
    "within 1 %",
    "zipf",
    "few heavy",
    "tiny",
    "rounded",
    "unnormalised",
    "drifting",
    "geometric",
]


def weights_of(kind: str, size: int, seed: int = 0) -> npt.NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    uniform = rng.random(size) + 1e-3
    weights: dict[str, npt.NDArray[np.float64]] = {
        "uniform": uniform,
        "equal": np.ones(size),
        "within 1 %": 1 + 0.01 * uniform,
        "zipf": 1 / np.arange(1, size + 1),
        "few heavy": np.where(np.arange(size) < 3, 1 + uniform, 1e-4 * (1 + uniform)),
        "tiny": np.where(np.arange(size) % 3 == 1, 1e-9, uniform),
        "rounded": np.round(uniform + 0.01, 2),
        "geometric": 0.5 ** np.minimum(np.arange(size), 60.0),
        "unnormalised": uniform,
        "drifting": uniform,
    }
    chosen = (
        weights[kind] / weights[kind].sum() * {"unnormalised": 3.7, "drifting": 0.4}.get(kind, 1.0)
    )
    return np.asarray(chosen)


def theirs(weights: Any, size: int) -> tuple[Any, Any]:
    datasets = np.zeros(size, np.int16)
    samples = np.zeros(size, np.int64)
    megatron("helpers_cpp").build_blending_indices(
        datasets, samples, weights, len(weights), size, False
    )
    return datasets, samples


def check(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [1, 2, 3, 24, 25, 26, MAX_SCANNED, MAX_SCANNED + 1, MAX_SCANNED + 2, 100, 1000]
)
def test_greedy_as_megatron(kind: str, size: int) -> None:
    weights = weights_of(kind, size)
    count = 5 * size + 700
    check(greedy(weights.tolist(), count).draw(count), theirs(weights, count))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["uniform", "rounded"])
def test_as_many_datasets_as_there_may_be(kind: str) -> None:
    weights = weights_of(kind, MAX_DATASETS)
    check(greedy(weights.tolist(), 2000).draw(2000), theirs(weights, 2000))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [10, 300, 5000])
def test_long_blends_as_megatron(kind: str, size: int) -> None:
    weights = weights_of(kind, size, seed=size)
    count = 1_000_000_000 // (size + 1000)
    check(greedy(weights.tolist(), count).draw(count, threads=3), theirs(weights, count))


@pytest.mark.long
@pytest.mark.parametrize(
    "weights",
    [
        [0, 0, 0],
        [5, 6, 7],
        [1e-320, 0],
    ],
)
@pytest.mark.parametrize("repeats", [1, 20])
def test_odd_weights_as_megatron(weights: list[float], repeats: int) -> None:
    many = np.array(weights * repeats, np.float64)
    check(greedy(many.tolist(), 300).draw(300, threads=4), theirs(many, 300))


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes", [[1], [5], [3, 3, 3], [1, 2, 300], [7] * 50, [1] * 40 + [90]], ids=str
)
def test_exhaustive_as_megatron(sizes: list[int]) -> None:
    _check_exhaustive(sizes)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, MAX_SCANNED, MAX_SCANNED + 1, 400])
@pytest.mark.parametrize("most", [2, 60])
def test_generated_exhaustive_as_megatron(size: int, most: int) -> None:
    _check_exhaustive(np.random.default_rng(size).integers(1, most + 1, size).tolist())


def _check_exhaustive(sizes: list[int]) -> None:
    total = sum(sizes)
    expected = np.zeros(total, np.int16), np.zeros(total, np.int64)
    build = megatron("helpers_cpp").build_exhaustive_blending_indices
    build(*expected, np.array(sizes, np.int64), len(sizes))
    blend = exhaustive(sizes)
    assert blend.size == total
    check(blend.draw(total), expected)


@pytest.mark.long
def test_pieces_and_threads_do_not_matter() -> None:
    for kind, size in (
        ("uniform", 200),
        ("rounded", 400),
        ("zipf", 20),
        ("tiny", 90),
        ("unnormalised", 50),
    ):
        weights = weights_of(kind, size)
        expected = theirs(weights, 40_000)
        for threads in (1, 2, 5):
            blend = greedy(weights.tolist(), 40_000)
            blend.min_part = 500
            blend.max_part = 3000
            pieces = [
                blend.draw(count, threads=threads) for count in (1, 1, 0, 12_345, 20_000, 7653)
            ]
            check(
                (np.concatenate([p[0] for p in pieces]), np.concatenate([p[1] for p in pieces])),
                expected,
            )


@pytest.mark.long
def test_wrong_guesses_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    guess = Greedy._guess_state
    wrong = []

    def guess_wrong(self: Greedy, step: int) -> _State:
        state = guess(self, step)
        wrong.append(step)
        # One of them would be right by its sum
        state[0][len(wrong) % 2 : 2 + len(wrong) % 2] += [1, -1]
        return state

    monkeypatch.setattr(Greedy, "_guess_state", guess_wrong)
    weights = weights_of("uniform", 100)
    blend = greedy(weights.tolist(), 9000)
    blend.min_part = 500
    check(blend.draw(9000, threads=4), theirs(weights, 9000))
    assert len(wrong) == 3


@pytest.mark.compiled
def test_guesses_are_nearly_always_right() -> None:
    blend = greedy(weights_of("uniform", 500).tolist(), 500_000)
    right = 0
    for _ in range(10):
        blend.draw(50_000)
        right += all(map(np.array_equal, blend._guess_state(blend.step), blend._state))
    assert right >= 8


def test_refusals() -> None:
    with pytest.raises(
        PlanError,
        match="dataset 1 has 0 samples; an exhaustive blend needs at least one sample from each",
    ):
        exhaustive([3, 0, 4])
    with pytest.raises(PlanError, match="a blend of 0 datasets; expected 1 to 32,766"):
        greedy([], 4)
    with pytest.raises(PlanError, match="a blend of 32,767 datasets"):
        exhaustive([1] * 32_767)
    blend = greedy([0.5, 0.5], 10)
    blend.draw(8)
    with pytest.raises(PlanError, match="3 samples requested, but the blend has only 2 of 10 left"):
        blend.draw(3)
