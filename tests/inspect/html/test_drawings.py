"""What charts draw: bars, marks and bands at the numbers of the description, read back from matplotlib's axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megablend.inspect.description import SourceDescription, SplitDescription
from megablend.inspect.html import drawings
from tests.inspect.html.pages import run

pytest.importorskip("matplotlib")
COUNT = 4


@pytest.fixture
def axes() -> Any:
    from matplotlib.figure import Figure

    return Figure().add_axes((0.1, 0.1, 0.8, 0.8))


@pytest.fixture
def sources() -> list[SourceDescription]:
    """Sources whose numbers all differ."""
    made = run(COUNT).splits["train"].sources
    return [
        dataclasses.replace(
            each,
            actual_share=0.1 + 0.1 * i,
            requested_share=0.15 + 0.1 * i,
            tokens_read=1000 + i,
            tokens=50 + i,
            documents=3 + i,
            epochs=0.5 + i,
            first_sample=10 * i,
            last_sample=100 + 10 * i,
            epoch_ends=tuple(range(20 * i, 20 * i + 5 * i, 5)),
        )
        for i, each in enumerate(made)
    ]


def lines(axes: Any, number: int) -> list[list[list[float]]]:
    """The ends of each line of a collection."""
    return [segment.round(9).tolist() for segment in axes.collections[number].get_segments()]


def bars(axes: Any) -> list[float]:
    """The lengths of bars, from the top row on."""
    assert [[start[0], start[1], end[1]] for start, end in lines(axes, 0)] == [
        [0, row, row] for row in range(COUNT)
    ]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first row is on top"
    return [end[0] for _, end in lines(axes, 0)]


def marks(axes: Any) -> list[tuple[float, float]]:
    """Places and rows of marks."""
    return [(start[0], round((start[1] + end[1]) / 2, 9)) for start, end in lines(axes, 1)]


def test_requested_and_actual_shares(axes: Any, sources: list[SourceDescription]) -> None:
    drawings.draw_requested(sources, axes)
    assert bars(axes) == [pytest.approx(each.actual_share) for each in sources]
    assert marks(axes) == [
        (round(each.requested_share, 9), row) for row, each in enumerate(sources)
    ]
    assert axes.get_xlim()[1] >= sources[-1].requested_share


def test_tokens(axes: Any, sources: list[SourceDescription]) -> None:
    drawings.draw_tokens(sources, axes)
    assert bars(axes) == [each.tokens_read for each in sources]


def test_epochs_have_a_line_at_one(axes: Any, sources: list[SourceDescription]) -> None:
    drawings.draw_epochs(sources, axes)
    assert bars(axes) == [each.epochs for each in sources]
    assert set(axes.lines[0].get_xdata()) == {1}


def test_means(axes: Any, sources: list[SourceDescription]) -> None:
    drawings.draw_means(sources, axes)
    assert bars(axes) == [pytest.approx(each.tokens / each.documents) for each in sources]


def test_exhaustion_is_from_the_first_to_the_last_sample(
    axes: Any, sources: list[SourceDescription]
) -> None:
    drawings.draw_exhaustion(500, sources, axes)
    assert lines(axes, 0) == [
        [[each.first_sample, i], [each.last_sample, i]] for i, each in enumerate(sources)
    ]
    assert marks(axes) == [
        (end, row) for row, each in enumerate(sources) for end in each.epoch_ends
    ]
    assert axes.get_xlim() == (0, 500)


def heights(axes: Any, x: float) -> list[float]:
    """The heights of the bands of a stacked chart at a sample."""
    found = []
    for band in axes.collections:
        points = np.concatenate([path.vertices for path in band.get_paths()])
        at = points[np.isclose(points[:, 0], x)][:, 1]
        found.append(round(float(at.max() - at.min()), 9))
    return found


@pytest.mark.parametrize(
    ("count", "others"), [(4, 0), (drawings.NAMED, 0), (drawings.NAMED + 3, 4)]
)
def test_bands_of_shares_fill_each_stage(axes: Any, count: int, others: int) -> None:
    split: SplitDescription = run(count).splits["train"]
    assert split.stages is not None
    uneven = [2 * (i + 1) / (count * (count + 1)) for i in range(count)]
    second = dataclasses.replace(
        split.stages[1],
        sources=tuple(
            dataclasses.replace(each, actual_share=share)
            for each, share in zip(split.stages[1].sources, uneven, strict=True)
        ),
    )
    split = dataclasses.replace(split, stages=(split.stages[0], second))
    drawings.draw_shares(split, split.sources, axes)
    named = count - others
    for x, shares in ((0, [1 / count] * count), (split.samples, uneven)):
        rest = [sum(shares[named:])] if others else []
        assert heights(axes, x) == [
            pytest.approx(share, abs=1e-6) for share in (*shares[:named], *rest)
        ]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(labels) == named + bool(others)
    assert not others or labels[-1] == f"{others} others"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "0"),
        (999, "999"),
        (1500, "1.5k"),
        (2e7, "20M"),
        (3e9, "3B"),
        (1.2e12, "1.2T"),
        (-2e3, "-2k"),
    ],
)
def test_numbers_are_short(value: float, says: str) -> None:
    assert drawings._shorten_number(value) == says
